"""Put the log-probabilities of a window in a file together, and check them against its tokens."""

from __future__ import annotations

import numpy as np

from ..common.errors import ModelError
from ..scoring.entries import NO_ID, Entries, Logprobs, with_targets
from ..window import Window
from .format import AGREE, WindowScores


def check_targets(window: Window, scores: WindowScores, file: str) -> None:
    """ModelError if a window's entries contradict the log-probabilities of its tokens.

    A script that is off by one position writes such entries.
    """
    where = f"{file}: line {scores.line}"
    if len(scores.logprob) != window.n_scored:
        raise ModelError(
            f"{where}: logprob: has {len(scores.logprob)} positions, the window has "
            f"{window.n_scored} scored tokens"
        )
    for name, entries in (("top_logprobs", scores.top), ("asked_logprobs", scores.asked)):
        if entries is None:
            continue
        is_target = entries.ids == window.targets[:, None]
        allowed = AGREE + scores.rounding.errors(scores.logprob)
        with np.errstate(invalid="ignore"):
            difference = np.abs(entries.logprobs - scores.logprob[:, None])
        is_wrong = (is_target & (difference > allowed[:, None])).any(axis=1)
        if name == "top_logprobs":
            is_wrong |= ~is_target.any(axis=1) & (scores.logprob > least(entries) + allowed)
        if is_wrong.any():
            position = int(np.argmax(is_wrong))
            token = int(window.targets[position])
            raise ModelError(
                f"{where}: {name}: position {position}: contradicts logprob of token {token}; "
                "the entries must be those that predict this token"
            )


def least(entries: Entries) -> Logprobs:
    """Return the log-probability [T] above which every token must be an entry.

    It is the second smallest one, because engines may append the target to the most probable
    tokens.
    """
    known = np.where(entries.ids != NO_ID, entries.logprobs, np.inf)
    if known.shape[1] < 2:
        return np.full(len(known), np.inf)
    return np.asarray(np.sort(known, axis=1)[:, 1], np.float64)


def all_entries(window: Window, scores: WindowScores) -> Entries:
    """Return everything that is known at each position, each token once: [T, k]."""
    return with_targets(window.targets, scores.logprob, scores.top, scores.asked)
