"""A file of rollouts as a model: its row has the log-probabilities that were recorded.

``rollouts.py`` describes the file, which is a text, too (``eval/text/rollouts.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..base import (
    Capabilities,
    Engine,
    ModelFacts,
    PlannedModel,
    ScoreRequest,
    TokenScores,
    Window,
)
from ..common.engine_options import EngineOptions, parse_options
from ..common.errors import ModelError
from ..common.jsonl_kinds import ROLLOUTS
from . import rollouts
from .rollouts import Rollout, RolloutsHeader
from .scores_file_engine import ScoresFiles, provenance_of


class RolloutsFiles(ScoresFiles):
    """A file of rollouts before it is read as a whole."""

    def facts(self) -> ModelFacts:
        rollouts.read_header(self.file)
        return ModelFacts()


class RolloutsEngine(Engine):
    """One file of rollouts."""

    capabilities = Capabilities(
        load_fns=("rollouts",),
        fwd_fn="rollouts",
        packages=(),
        install="built in",
        summary="log-probabilities that were recorded while a model sampled: perplexity only",
        reference=False,
        compares=False,
        torch=False,
        kinds=(ROLLOUTS,),
    )
    files = RolloutsFiles

    @classmethod
    def option_names(cls) -> Collection[str]:
        return EngineOptions.model_fields.keys()

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        parse_options(EngineOptions, model.options)
        # For the InputError of a wrong line.
        for _ in rollouts.read_rollouts(Path(model.model_dir)):
            pass

    def load(self) -> None:
        files = RolloutsFiles(self.planned)
        self.file = files.file
        self.header: RolloutsHeader = rollouts.read_header(self.file)
        self.rollouts = list(rollouts.read_rollouts(self.file))
        stamp = files.stamp()
        if self.planned.stamp and stamp != self.planned.stamp:
            raise ModelError(f"{self.file}: was changed after this run began; run again")

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield the recorded log-probabilities; ModelError if the file lacks some."""
        rollout_of = self.by_tokens(max(len(window.token_ids) for window in windows))
        scores: list[TokenScores] = []
        missing: list[int] = []
        for window in windows:
            rollout = rollout_of.get(window.token_ids.tobytes())
            if rollout is None or np.isnan(rollout.logprobs[window.positions]).any():
                missing.append(window.index)
                continue
            logprob = rollout.logprobs[window.positions].astype(np.float32)
            scores.append(TokenScores(window.index, logprob))
        if missing:
            raise ModelError(
                f"{self.file}: lacks {len(missing):,} of {len(windows):,} windows, window "
                f"{missing[0]} among them; give this file as the text, too"
            )
        yield from scores

    def by_tokens(self, longest: int) -> dict[bytes, Rollout]:
        """Return each sequence by the bytes of its tokens, and by those of its first ``longest``.

        The first one of equal sequences; a whole sequence before the beginning of another one.
        """
        by_tokens: dict[bytes, Rollout] = {}
        for rollout in self.rollouts:
            by_tokens.setdefault(rollout.token_ids.tobytes(), rollout)
        for rollout in self.rollouts:
            by_tokens.setdefault(rollout.token_ids[:longest].tobytes(), rollout)
        return by_tokens

    def provenance(self) -> dict[str, Any]:
        facts = provenance_of(self.header, self.file)
        facts["notes"] = [*facts["notes"], *self.notes_on_repeats()]
        return facts

    def notes_on_repeats(self) -> list[str]:
        """Return a note on equal sequences with other log-probabilities."""
        first: dict[bytes, Rollout] = {}
        n_different = 0
        for rollout in self.rollouts:
            other = first.setdefault(rollout.token_ids.tobytes(), rollout)
            if not np.array_equal(other.logprobs, rollout.logprobs, equal_nan=True):
                n_different += 1
        if not n_different:
            return []
        return [
            f"{n_different:,} of {len(self.rollouts):,} sequences repeat the tokens of an earlier "
            "one with other log-probabilities; this row has those of the first"
        ]
