"""Rollouts as a text: sequences that another program has sampled (docs/rollouts.md).

Each sequence is a window.  Only its sampled tokens are scored, and each has the log-probability
that was recorded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...backends.common.message_text import amount
from ...backends.scores_file.kept_lines import lines_of
from ...backends.scores_file.rollouts import Rollout, read_header, read_rollouts
from ..common.progress import Progress
from ..specs.spec_types import DataSpec
from . import corpus, vocabulary
from .text_tokens import Tokens, tokens_of_documents


def tokens_of(spec: DataSpec, tokenizer: Path, progress: Progress) -> Tokens:
    """Return the sequences of a file as tokens, one document each; InputError.

    ``tokenizer``: its folder.  Imports Transformers.
    """
    file = corpus.text_file(spec)
    sequences: list[Rollout] = []
    with progress.phase(f"reading {corpus.display_name(spec)}", unit="sequences") as phase:
        for rollout in lines_of(read_rollouts, file):
            sequences.append(rollout)
            phase.advance()
    loaded = vocabulary.load_tokenizer(tokenizer, trust_remote_code=spec.trust_remote_code)
    recorded = np.concatenate([rollout.logprobs for rollout in sequences])
    return tokens_of_documents(
        loaded,
        [rollout.token_ids for rollout in sequences],
        notes=tuple(notes_of(file, sequences, spec)),
        sampler_logprobs=recorded.astype(np.float32),
    )


def notes_of(file: Path, sequences: list[Rollout], spec: DataSpec) -> list[str]:
    """Return footnotes on what changes the meaning of k3 and of the sequences' ratios."""
    notes = []
    temperature = read_header(file).temperature
    if temperature is not None and temperature != 1.0:
        notes.append(
            f"rollouts sampled at temperature {temperature:g}: k3 is no estimate of a KL "
            "divergence there"
        )
    n_long = sum(len(rollout.token_ids) > spec.eval_len for rollout in sequences)
    if n_long:
        notes.append(
            f"{n_long:,} of {amount(len(sequences), 'sequence')} are longer than eval_len "
            f"{spec.eval_len:,}: only the tokens before that are scored, and their ratios are of "
            "these"
        )
    return notes
