"""Repeated requests, which find servers whose answers do not all come from one model.

One address may lead to several deployments: a router spreads requests over them, or an update
replaces one of them.  The log-probabilities of a window's first tokens do not depend on later
tokens.  A request for the first tokens of a window must therefore give the same log-probabilities
as the window itself, up to rounding.

The first ``ALWAYS`` windows are repeated, and as many later windows as ``SHARE`` allows.  Their
order and their moments are random, because a router may alternate between its models.  Each commit
repeats one of the first ``ALWAYS`` windows again, to find a model that was replaced.  These
repetitions have one token more each time, so that a proxy cannot answer them from its cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .client import ServerError

FIRST_TOKENS = 32
"""Number of tokens of the first repetition of a window."""
FEWEST_REPEATED_TOKENS = 9
"""Number of tokens of the shortest windows that are repeated: in a few tokens, rounding may look
like another model."""
MORE_TOKENS = 32
"""Number of further tokens that later repetitions of a window may have."""
ALWAYS = 32
"""Number of windows that are repeated in every run, however short its windows are."""
SHARE = 1 / 32
"""Largest number of repeated tokens per token of the run, if it has more than ``ALWAYS`` windows.
"""
NOW = 0.75
"""Probability that a repetition follows a window at once, while more of them are allowed."""
MOST_WAITING_WINDOWS = 1024
"""Largest number of windows that wait for their repetition."""
ENOUGH = 4
"""Smallest number of repetitions in which one can be found to differ from the others."""
OTHER_MODEL = 0.15
"""Largest mean difference in nats per token that rounding may cause.

``vllm serve`` 0.32 on a CPU computed the same bits with 1 and 8 requests in flight, for whole
windows and for their first 32 tokens (SmolLM2-135M in bfloat16, W8A8 and W4A16).  On an H200, other
kernels for the same bfloat16 weights give a KLD of 0.0014 to 0.0016 (docs/measurements.md), which
is 0.04 nats per token.  In 8 windows on that CPU, W8A8 differs from bfloat16 by 0.36 to 0.62, and
W4A16 by 0.64 to 0.90.
"""
RATIO = 4.0
"""A difference above this many times the lower quartile of all, and above ``OTHER_MODEL``, shows
another model.

The quartile shows the rounding of one model, even if another model answers every second request.
"""
CERTAIN = 0.5
"""Mean difference in nats per token that shows another model without a comparison with other
repetitions."""
NOTED = 0.1
"""Smallest mean difference in nats per token that adds a note to the row."""
LARGEST_TOKEN_DIFFERENCE = 1.0
"""A token's difference counts at most this many nats: one very improbable token must not decide."""


@dataclass
class Beginning:
    """The first tokens of a window that was answered, and their log-probabilities."""

    ids: NDArray[np.int32]  # [n]
    logprob: NDArray[np.float32]  # [n - 1]: of each token except the first

    def cut(self, length: int) -> Beginning:
        """Return the first ``length`` tokens of these."""
        return Beginning(self.ids[:length], self.logprob[: length - 1])


class Repeats:
    """Chooses the windows that are requested again, and compares the answers."""

    def __init__(self) -> None:
        # The order must be unrelated to a router's, but need not be unknown.
        self.random = random.Random(0)
        # Windows that were answered and not repeated yet; at most ``MOST_WAITING_WINDOWS``.
        self.waiting: list[Beginning] = []
        self.first: list[Beginning] = []  # the first windows, with ``MORE_TOKENS`` more tokens each
        self.n_windows = 0  # all windows that ``add`` has accepted so far
        self.n_tokens = 0  # all tokens of these windows
        self.n_repeated = 0  # windows that were chosen for a repetition, without those of commits
        self.n_commits = 0  # commits with a repetition
        self.differences: list[float] = []
        self.problem = ""  # why the answers cannot come from one model

    def add(self, ids: NDArray[np.int32], logprob: NDArray[np.float32]) -> None:
        """Add a window and its answer.

        Windows of fewer than ``FEWEST_REPEATED_TOKENS`` are not repeated.
        """
        if len(ids) < FEWEST_REPEATED_TOKENS:
            return
        window = Beginning(ids, logprob).cut(FIRST_TOKENS + MORE_TOKENS)
        self.n_windows += 1
        self.n_tokens += len(ids)
        if len(self.first) < ALWAYS:
            self.first.append(window)
        if len(self.waiting) == MOST_WAITING_WINDOWS:
            self.take()
        self.waiting.append(window.cut(FIRST_TOKENS))

    def take(self) -> Beginning:
        """Remove a random window from those that wait, and return it."""
        at = self.random.randrange(len(self.waiting))
        window = self.waiting[at]
        # The last window fills the gap: list.pop(at) would move all windows after it.
        self.waiting[at] = self.waiting[-1]
        self.waiting.pop()
        return window

    @property
    def n_due(self) -> int:
        """Number of windows that should have been repeated by now, but were not."""
        allowed = max(min(ALWAYS, self.n_windows), int(SHARE * self.n_tokens / FIRST_TOKENS))
        return min(allowed - self.n_repeated, len(self.waiting))

    def is_due(self) -> bool:
        """Return True if a window should be repeated now: at random while any is due."""
        return self.n_due > 0 and self.random.random() < NOW

    def next(self) -> Beginning:
        """Return a window that is repeated now; a repetition must be due."""
        self.n_repeated += 1
        return self.take()

    def at_commit(self) -> Beginning | None:
        """Return one of the first windows, one token longer each time; None before any window."""
        if not self.first:
            return None
        n_rounds, at = divmod(self.n_commits, len(self.first))
        self.n_commits += 1
        # Without the further token, a proxy could answer from its cache.
        return self.first[at].cut(FIRST_TOKENS + 1 + n_rounds % MORE_TOKENS)

    def compare(self, window: Beginning, logprob: NDArray[np.float32]) -> None:
        """Compare a window's answer with a second one.

        ServerError if any answers so far cannot come from one model.
        """
        self.differences.append(difference(window.logprob, logprob))
        if not self.problem:
            self.problem = self.verdict()
        if self.problem:
            raise ServerError(self.problem)

    def verdict(self) -> str:
        """Return why the answers cannot come from one model; "" if they can."""
        largest = max(self.differences)
        # Not the median: of two models that answer in turn, half of the differences are large.
        quartile = float(np.quantile(self.differences, 0.25))
        is_outlier = False
        if len(self.differences) >= ENOUGH:
            is_outlier = largest > max(OTHER_MODEL, RATIO * quartile)
        if not is_outlier and largest <= CERTAIN:
            return ""
        return (
            "the first tokens of a window, requested again, had log-probabilities that differ by "
            f"{largest:.2g} nats per token: more than one model answers here; "
            "give the URL of a single deployment, and run again with -cc"
        )

    def provenance(self) -> dict[str, Any]:
        """Return how many repetitions were compared, and their differences in nats per token."""
        if not self.differences:
            return {"windows": 0}
        return {
            "windows": len(self.differences),
            "median": round(float(np.median(self.differences)), 6),
            "largest": round(max(self.differences), 6),
        }

    def notes(self) -> list[str]:
        """Return a note if answers to the same tokens differ by more than rounding usually does."""
        largest = max(self.differences, default=0.0)
        if largest <= NOTED:
            return []
        return [
            "the same tokens, requested again, had log-probabilities that differ by up to "
            f"{largest:.2g} nats per token: rounding in other batches, or more than one deployment "
            "at this URL"
        ]


def difference(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the mean absolute difference of log-probabilities [n], in nats.

    A token counts at most ``LARGEST_TOKEN_DIFFERENCE``; equal infinities count 0.  The mean of a
    window with fewer than ``FIRST_TOKENS`` tokens varies more.  It is therefore multiplied by the
    square root of its share of ``FIRST_TOKENS``.  Otherwise the rounding in one of many short
    windows would look like another model.
    """
    with np.errstate(invalid="ignore"):  # the difference of two infinities
        by_token = np.where(one == other, 0.0, np.abs(one.astype(np.float64) - other))
    share = min(len(by_token) / (FIRST_TOKENS - 1), 1.0)
    return float(np.minimum(by_token, LARGEST_TOKEN_DIFFERENCE).mean() * np.sqrt(share))
