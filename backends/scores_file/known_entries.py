"""Put the log-probabilities of a window in a file together, and check them against its tokens."""

from __future__ import annotations

import numpy as np

from ..common.errors import ModelError
from ..window import Window
from .format import AGREE, NO_ID, Entries, Ids, Logprobs, WindowScores


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
    ids: list[Ids] = [window.targets[:, None].astype(np.int32)]
    logprobs: list[Logprobs] = [scores.logprob[:, None]]
    for entries in (scores.top, scores.asked):
        if entries is not None:
            ids.append(entries.ids)
            logprobs.append(entries.logprobs)
    return each_once(Entries(np.concatenate(ids, axis=1), np.concatenate(logprobs, axis=1)))


def each_once(entries: Entries) -> Entries:
    """Return the entries without repeated tokens, ordered by token at each position."""
    order = np.argsort(entries.ids, axis=1, kind="stable")
    ids = np.take_along_axis(entries.ids, order, axis=1)
    logprobs = np.take_along_axis(entries.logprobs, order, axis=1)
    is_repeated = np.zeros(ids.shape, np.bool_)
    is_repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    ids = np.where(is_repeated, NO_ID, ids).astype(np.int32)
    return Entries(ids, np.where(ids == NO_ID, -np.inf, logprobs))


def most_probable(top: Entries, count: int) -> Entries:
    """Return up to ``count`` entries: those that are more probable than entry ``count + 1``.

    Each position has more than ``count`` entries.  Tokens as probable as entry ``count + 1`` are
    left out: engines append the target, and so the target would decide which of them are entries.
    """
    descending = -np.sort(-top.logprobs, axis=1)
    is_chosen = top.logprobs > descending[:, [count]]
    return Entries(
        np.where(is_chosen, top.ids, NO_ID).astype(np.int32),
        np.where(is_chosen, top.logprobs, -np.inf),
    )


def top_tokens(top: Entries) -> tuple[Ids, Logprobs]:
    """Return (the most probable token, its log-probability) of each position, [T] each.

    The lowest id of equally probable ones; ``NO_ID`` without entries.
    """
    highest = top.logprobs.max(axis=1, initial=-np.inf)
    is_highest = (top.logprobs == highest[:, None]) & (top.ids != NO_ID)
    candidates = np.where(is_highest, top.ids, np.iinfo(np.int32).max)
    ids = candidates.min(axis=1, initial=np.iinfo(np.int32).max)
    return np.where(is_highest.any(axis=1), ids, NO_ID).astype(np.int32), highest
