"""The log-probabilities in an answer of ``/v1/completions``, and their checks.

Entry i of ``prompt_logprobs`` has tokens that could follow the first i tokens of the prompt.  With
``prompt_logprobs=k``, these are the k most probable tokens, with ranks from 1.  The real token i is
appended if it has a higher rank.  The first entry is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from ..scoring.entries import NO_ID, Entries
from .client import ServerError
from .placeholders import placeholder

TOP = 20
"""vLLM's own default of --max-logprobs."""
MOST_LOGITS = 1 << 20
"""Four times the largest vocabulary."""
CLAMPED = -9999.0
"""vLLM's server writes this for minus infinity, which JSON does not have."""
ROUNDING = 1e-3
"""Largest excess of a sum of probabilities over 1, or of a log-probability over 0."""
MORE_LOGPROBS = f"start the server with --max-logprobs {TOP} or more"
NO_LOGPROBS = (
    "its values are no log-probabilities; start the server with --logprobs-mode raw_logprobs"
)
Name = Annotated[str, Field(max_length=1000)]


class Entry(BaseModel):
    """One token at one position; ``rank``: 1 for the most probable token."""

    logprob: float
    rank: int | None = None


class Choice(BaseModel):
    """The scores of a prompt: for each position, token id -> entry."""

    prompt_logprobs: list[dict[str, Entry] | None] | None = None


class Completion(BaseModel):
    """Answer of ``/v1/completions``."""

    model: Name | None = None
    choices: list[Choice] = Field(min_length=1)
    system_fingerprint: Name | None = None  # vLLM's digest of its version and configuration

    def position(self, index: int) -> Mapping[str, Entry]:
        """Return the entries of a position; none if the answer lacks them."""
        entries = self.choices[0].prompt_logprobs or []
        if index >= len(entries):
            return {}
        return entries[index] or {}


def real_logprobs(ids: Sequence[int], answer: Completion) -> NDArray[np.float32]:
    """Return log-probabilities [L - 1] of a prompt's tokens except the first; ServerError.

    Entry i of ``prompt_logprobs`` scores token i: one of its keys must be the id of the real token.
    The first entry is empty.
    """
    entries = answer.choices[0].prompt_logprobs
    if entries is None:
        raise ServerError(
            "its answer has no prompt_logprobs; compare_q needs vLLM's own server, `vllm serve`"
        )
    if len(entries) != len(ids) or entries[0] is not None:
        raise ServerError(
            f"its answer has prompt_logprobs of {len(entries)} positions for {len(ids)} tokens"
        )
    scored = [(entry or {}).get(str(token)) for token, entry in zip(ids, entries, strict=True)]
    if None in scored[1:]:
        at = scored.index(None, 1)
        raise ServerError(f"its answer does not score token {ids[at]} at position {at}")
    logprob = np.array([entry.logprob for entry in scored if entry is not None])
    # Below the range of float32, the conversion would turn a value into minus infinity.
    if (logprob > ROUNDING).any() or (logprob < np.finfo(np.float32).min).any():
        raise ServerError(NO_LOGPROBS)
    # vLLM sends minus infinity, which JSON does not have, as CLAMPED.
    logprob[logprob == CLAMPED] = -np.inf
    logprob_f32 = logprob.astype(np.float32)
    problem = placeholder(logprob_f32)
    if problem:
        raise ServerError(problem)
    return logprob_f32


def check_normalized(answer: Completion, top: int) -> None:
    """ServerError unless the entries of every position except the first can be log-probabilities.

    The probabilities of a position's ``top`` entries sum to at most 1.  No other token is more
    probable than the least probable entry: with its probability for every other token, the sum
    over all tokens is at least 1.
    """
    for entry in (answer.choices[0].prompt_logprobs or ())[1:]:
        if entry is None or len(entry) < top:
            raise ServerError(f"answers {len(entry or ())} of {top} entries; {MORE_LOGPROBS}")
        values = np.array([scores.logprob for scores in entry.values()])
        with np.errstate(over="ignore"):  # logits may be large; the sum is then infinite
            highest = np.exp(np.sort(values)[-top:])
            most_of_all = highest.sum() + MOST_LOGITS * highest[0]
        # NaN fails the first comparison.
        if not highest.sum() <= 1 + ROUNDING or most_of_all < 1 - ROUNDING:
            raise ServerError(NO_LOGPROBS)


def top_entries(
    ids: Sequence[int], positions: Sequence[int], answer: Completion, top: int
) -> Entries:
    """Return the ``top`` most probable tokens at some positions of a prompt, in the order of rank.

    The result does not depend on the real tokens ``ids`` [L]: vLLM appends the real token if it is
    none of the most probable ones, and an estimate of the KLD with it would be biased.  ServerError
    if the answer has other entries than vLLM's.
    """
    top_ids = np.full((len(positions), top), NO_ID, np.int32)
    logprobs = np.full((len(positions), top), -np.inf)
    for row, position in enumerate(positions):
        entry = answer.position(position)
        for token, scores in by_rank(entry, ids[position], position, top).items():
            column = (scores.rank or 0) - 1
            top_ids[row, column] = token
            logprobs[row, column] = scores.logprob
    logprobs[logprobs == CLAMPED] = -np.inf
    with np.errstate(over="ignore"):
        is_too_large = np.exp(logprobs).sum(axis=1) > 1 + ROUNDING
    if is_too_large.any():
        raise ServerError(NO_LOGPROBS)
    return Entries(top_ids, logprobs)


def by_rank(entry: Mapping[str, Entry], real: int, position: int, top: int) -> dict[int, Entry]:
    """Return token -> entry of the ``top`` most probable tokens at a position; ServerError."""
    tokens: dict[int, Entry] = {}
    for name, scores in entry.items():
        is_appended = len(entry) == top + 1 and name == str(real)
        if is_appended:
            continue
        if not name.isascii() or not name.isdecimal() or int(name) >= MOST_LOGITS:
            raise ServerError(f"its answer has no ids of tokens at position {position}")
        tokens[int(name)] = scores
    ranks = {scores.rank for scores in tokens.values()}
    if len(tokens) != top or ranks != set(range(1, top + 1)):
        raise ServerError(
            f"its answer does not have the {top} most probable tokens at position {position}"
        )
    return tokens
