"""Rollouts: sequences that a model has sampled, with the log-probabilities that were recorded.

A file of JSON Lines.  The first line is ``{"compare_q": "rollouts", "version": 1, "label": ...,
"engine": ..., "engine_version": ..., "model": ..., "hardware": ..., "temperature": ...}``; only the
first two keys are needed.  Each other line is one sequence:

- ``prompt_ids``: the tokens of the prompt, at least one;
- ``sampled_ids``: the tokens after the prompt;
- ``logprobs``: natural logarithm of the probability of each of ``sampled_ids``; ``null`` for a
  token that was not sampled, such as those of a tool's answer.

Every fault is an InputError that names file and line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ..common.errors import InputError
from ..common.json_files import parsed_line
from ..common.jsonl_kinds import KIND, ROLLOUTS
from ..common.message_text import printable
from ..scoring.entries import Ids, Logprobs
from .format import (
    MOST_ENTRIES,
    VERSION,
    Line,
    RowHeader,
    check_at_most_zero,
    check_version,
    lines_in,
    validated,
)
from .kept_lines import lines_of

PAGE = "docs/rollouts.md"


class RolloutsHeader(RowHeader):
    """The first line of a file of rollouts.

    ``temperature``: at which the tokens were sampled; None if it is not known.
    """

    compare_q: Literal["rollouts"]
    temperature: Annotated[float, Field(gt=0)] | None = None


class RolloutLine(Line):
    """One sequence of a file of rollouts."""

    prompt_ids: list[int] | None = None
    sampled_ids: list[int] | None = None
    logprobs: list[float | None] | None = None


@dataclass(frozen=True)
class Rollout:
    """One sequence.

    Attributes:
        line: its number in the file, from 1.
        token_ids: of the prompt and after it [L].
        logprobs: [L], nats; NaN for tokens that were not sampled.
    """

    line: int
    token_ids: Ids
    logprobs: Logprobs


def read_header(file: Path) -> RolloutsHeader:
    """Return the first line of a file of rollouts; InputError."""
    for _, where, content in lines_in(file):
        return header_in(where, content)
    raise InputError(
        f'{printable(file)}: is empty; its first line must be {{"{KIND}": "{ROLLOUTS}", '
        f'"version": {VERSION}}}, and each other line a sequence ({PAGE})'
    )


def header_in(where: str, content: bytes) -> RolloutsHeader:
    """Return the first line of a file of rollouts; InputError that begins with ``where``."""
    value = parsed_line(content, where)
    if not isinstance(value, dict) or value.get(KIND) != ROLLOUTS:
        raise InputError(
            f'{where}: is not a file of rollouts: its first line must have "{KIND}": "{ROLLOUTS}" '
            f"({PAGE})"
        )
    check_version(value, where)
    return validated(RolloutsHeader, value, where)


def read_rollouts(file: Path) -> Iterator[Rollout]:
    """Yield the checked sequences of a file; InputError with file and line."""
    read_header(file)
    n_lines = 0
    for number, where, content in lines_in(file):
        n_lines += 1
        if n_lines > 1:
            line = validated(RolloutLine, parsed_line(content, where), where)
            yield checked(line, number, where)
    if n_lines == 1:
        raise InputError(
            f"{printable(file)}: has no sequence after its first line; write one per line ({PAGE})"
        )


def checked(line: RolloutLine, number: int, where: str) -> Rollout:
    """Return the sequence of a line; InputError for what cannot be one."""
    if not line.prompt_ids:
        raise InputError(
            f"{where}: prompt_ids: no prompt; write its token ids, at least one (BOS), because the "
            "first token of a sequence is not predicted"
        )
    if not line.sampled_ids:
        raise InputError(f"{where}: sampled_ids: no sampled token; leave this sequence out")
    logprobs = logprobs_of(line.logprobs, len(line.sampled_ids), where)
    for key, ids in (("prompt_ids", line.prompt_ids), ("sampled_ids", line.sampled_ids)):
        check_ids(ids, f"{where}: {key}")
    # Numpy makes NaN of None.
    sampled = np.array(logprobs, np.float64)
    if np.isnan(sampled).all():
        raise InputError(f"{where}: logprobs: all are null; leave this sequence out")
    check_at_most_zero(sampled[~np.isnan(sampled)], f"{where}: logprobs")
    of_prompt = np.full(len(line.prompt_ids), np.nan)
    token_ids = np.array([*line.prompt_ids, *line.sampled_ids], np.int32)
    token_logprobs = np.concatenate([of_prompt, sampled])
    # Several parts of a run have the same arrays (``kept_lines.py``).
    token_ids.setflags(write=False)
    token_logprobs.setflags(write=False)
    return Rollout(number, token_ids, token_logprobs)


def logprobs_of(
    logprobs: Sequence[float | None] | None, n_tokens: int, where: str
) -> Sequence[float | None]:
    """Return the log-probabilities of a line; InputError without one for each of its tokens."""
    what_to_do = "write one for each of sampled_ids, and null for tokens that were not sampled"
    if logprobs is None:
        raise InputError(f"{where}: logprobs: missing; {what_to_do}")
    if len(logprobs) != n_tokens:
        raise InputError(
            f"{where}: logprobs: has {len(logprobs)} entries, and sampled_ids has {n_tokens}; "
            f"{what_to_do}"
        )
    return logprobs


def check_ids(ids: Sequence[int], where: str) -> None:
    """InputError for a number that is not the id of a token."""
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < MOST_ENTRIES:
            raise InputError(f"{where}: {token_id} is not the id of a token; write token ids")


def longest(file: Path) -> int:
    """Return the number of tokens in the longest sequence of a file; InputError."""
    return max(len(rollout.token_ids) for rollout in lines_of(read_rollouts, file))
