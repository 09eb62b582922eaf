"""Some log-probabilities at each position, for example those of the most probable tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_ID = -1
"""In arrays of ids: no token.  Its log-probability is minus infinity."""
Ids = NDArray[np.int32]
Logprobs = NDArray[np.float64]


@dataclass(frozen=True)
class Entries:
    """Some log-probabilities at each of T positions.

    Attributes:
        ids: [T, k]; ``NO_ID``: no token.
        logprobs: [T, k], nats; minus infinity without a token.
    """

    ids: Ids
    logprobs: Logprobs


def with_targets(targets: Ids, logprob: Logprobs, *known: Entries | None) -> Entries:
    """Return the targets and all known entries of each position, each token once: [T, k].

    ``targets``, ``logprob`` [T]: the real tokens and their log-probabilities.
    """
    ids: list[Ids] = [targets[:, None].astype(np.int32)]
    logprobs: list[Logprobs] = [logprob[:, None]]
    for entries in known:
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
