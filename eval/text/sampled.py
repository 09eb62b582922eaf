"""Sampled text: prompts from a text, and what a model samples after each of them.

A window is a prompt of ``PROMPT_TOKENS`` tokens and the sampled tokens after it.  Only these are
scored, and each has its log-probability in the model that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ...backends.common.errors import InputError
from ..specs import spec_files
from ..specs.spec_types import OF_CUT_TEXTS, PROMPT_TOKENS, DataSpec
from . import cutting, text_windows
from .text_tokens import Tokens
from .text_windows import TextWindows

SAMPLED_VERSION = 1
"""Version of sampled tokens.  Raise it when prompts, batches or draws change."""
WINDOW_KEYS = {"label", "seed", "max_rows", "eval_len", "dataset_display_name"}
"""Keys of a data spec of sampled text that are not about the text of its prompts."""


def spec_of_prompts(spec: DataSpec) -> DataSpec:
    """Return the data spec whose windows are the prompts, spread over their text."""
    keys = spec.model_dump(mode="json", exclude_unset=True, exclude=WINDOW_KEYS)
    keys["dataset"] = "text"
    if spec.path is None:
        keys["dataset"] = keys.pop("dataset_path")
    keys |= {"eval_len": PROMPT_TOKENS, "eval_stride": PROMPT_TOKENS, "sample": "spread"}
    return spec_files.parse_data_spec(keys, spec._folder / "data spec")


def spec_of_sampled(text: DataSpec) -> DataSpec:
    """Return the data spec of sampled text whose prompts are from a text.

    InputError for conversations, for a reference pack, and for too short windows.
    """
    if text.is_sampled:
        return text
    if text.is_chat or text.is_rollouts or text.pack is not None:
        raise InputError(
            "--sampled: needs a text for its prompts, not conversations, rollouts or a pack"
        )
    dropped = OF_CUT_TEXTS | {"dataset"}
    keys = text.model_dump(mode="json", exclude_unset=True, exclude=dropped)
    if text.path is None and text.dataset_path is None:
        keys["dataset_path"] = text.dataset
    keys["dataset"] = "sampled"
    return spec_files.parse_data_spec(keys, text._folder / spec_files.COMMAND_LINE)


def text_of_prompts(tokens: Tokens, spec: DataSpec, n_windows: int, tokenizer: Path) -> TextWindows:
    """Return the text whose windows are the prompts; InputError if it is too short for one.

    ``spec``: as from ``spec_of_prompts``; ``tokenizer``: its folder.
    """
    least = cutting.least_tokens(spec.method, PROMPT_TOKENS)
    if len(tokens.ids) < least:
        raise InputError(
            f"path: the text has {len(tokens.ids)} tokens, and at least {least} are needed for one "
            f"prompt of {PROMPT_TOKENS}; give a longer text"
        )
    return text_windows.cut(tokens, spec, n_windows, tokenizer)


def token_ids_of_prompts(text: TextWindows, n_windows: int) -> list[list[int]]:
    """Return one prompt for each window, from the windows of ``spec_of_prompts``.

    A token that the tokenizer puts before a text (BOS) takes the place of each prompt's first
    token.  InputError if the text has too few prompts.
    """
    if len(text.windows) < n_windows:
        raise InputError(
            f"max_rows: {n_windows:,} windows need as many prompts of {PROMPT_TOKENS} tokens, and "
            f"the text of {text.n_tokens:,} tokens has {len(text.windows):,}; take fewer windows "
            "or a longer text"
        )
    prompts = [window.token_ids.tolist() for window in text.windows]
    # The first of spread windows is the text's first one.
    first_token = prompts[0][0]
    if first_token in text.special:
        for prompt in prompts:
            prompt[0] = first_token
    return prompts


def tokens_of(
    text: TextWindows,
    prompts: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    note: str,
) -> Tokens:
    """Return sampled text as tokens, one document per window.

    ``text``: of the prompts.  ``token_ids``, ``logprobs``: of the sampled tokens after each prompt.
    ``note``: footnote for the table.
    """
    ids: list[int] = []
    sampler_logprobs: list[float] = []
    ends = []
    for prompt, sampled_ids, sampled_logprobs in zip(prompts, token_ids, logprobs, strict=True):
        ids += [*prompt, *sampled_ids]
        sampler_logprobs += [np.nan] * len(prompt)
        sampler_logprobs += sampled_logprobs
        ends.append(len(ids))
    return Tokens(
        np.asarray(ids, np.int32),
        np.zeros(0, np.int32),
        text.top_id,
        text.vocabulary,
        ends=np.asarray(ends, np.int64),
        special=text.special,
        notes=(*text.notes, note),
        read=datetime.now().isoformat(" ", "minutes"),
        sampler_logprobs=np.asarray(sampler_logprobs, np.float32),
    )


def identity_of(
    spec: DataSpec, text: TextWindows, prompts: Sequence[Sequence[int]], model: dict[str, Any]
) -> dict[str, Any]:
    """Return everything that sampled tokens depend on, as JSON types.

    ``text``: of the prompts; ``model``: identity of the model's scores.
    """
    return {
        "sampled": SAMPLED_VERSION,
        "prompts": [list(prompt) for prompt in prompts],
        "text": [text.vocabulary, text.top_id, text.special.tolist(), list(text.notes)],
        "length": spec.eval_len,
        "seed": spec.seed or 0,
        "model": model,
    }


def name_of_model(located: str) -> str:
    """Return a model's name without folders, which may reveal the machine's user."""
    if Path(located).exists():
        return Path(located).resolve().name
    return located
