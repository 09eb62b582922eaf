"""The noise floor of a gate: how far the first variant is from itself with other roundings.

The model: N copies of the first variant, each with other roundings, and a variant that is right, which has other
roundings as well, are drawn from one distribution, in which the logarithm of the mean KLD is normal.  Then the mean KLD
of a right variant is with the probability p below

    exp(m + t(p, N - 1) * s * sqrt(1 + 1 / N))

the prediction limit for one more draw of a normal distribution, whose mean m and standard deviation s come from N draws
(Hahn and Meeker, Statistical Intervals, 1991, section 4.8).  All means are over the same tokens, so that the choice of
text does not matter.  ``LEVEL`` holds for all comparisons of a gate together (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compare_q.eval.run.token_scores import StoredScores
from compare_q.eval.stats.uncertainty import student_t

LEVEL = 0.99
"""The probability that a gate whose variants are all right says so."""
COPIES = 6
"""Copies of the first variant: with fewer, Student's t makes the limit wide."""
OWN_SHARE = 0.5
"""Share of the copies' KLD from which on the engine's own randomness, not the added roundings, makes the floor."""


class Tokens(NamedTuple):
    """The scores of one row's N tokens, in the order of windows and positions."""

    window: NDArray[np.int32]
    position: NDArray[np.int32]
    logprob: NDArray[np.float64]  # of the text's token, nats
    kld: NDArray[np.float64]  # KL(first variant || row), nats
    change: NDArray[np.float64]  # |log-probability - the first variant's|, nats

    @classmethod
    def of(cls, stored: StoredScores) -> Tokens:
        """Return the tokens of scores that were compared with the first variant."""
        logprob, kld, first = (stored.columns[name].astype(np.float64) for name in ("logprob", "kld", "ref_logprob"))
        return cls(stored.window, stored.position, logprob, kld, np.abs(logprob - first))

    def by_position(self) -> NDArray[np.float64]:
        """Return the mean KLD at each position from 0 to the last one; 0 where none is scored."""
        return np.bincount(self.position, weights=self.kld) / np.maximum(np.bincount(self.position), 1)


class Floor:
    """What roundings alone cost: the ``copies``, and how many ``comparisons`` share the level."""

    def __init__(self, copies: Sequence[Tokens], comparisons: int) -> None:
        self.copies, self.comparisons = copies, comparisons
        self.klds = [float(copy.kld.mean()) for copy in copies]
        self.curve = np.mean([copy.by_position() for copy in copies], axis=0)  # mean KLD at each position

    def limit(self, windows: int) -> float:
        """The prediction limit for a right variant's mean KLD over the first windows, nats; 0 if copies are equal."""
        return self.of_means([float(copy.kld[copy.window < windows].mean()) for copy in self.copies])

    def change_limit(self) -> float:
        """The prediction limit for the mean |difference of log-probabilities| of two right runs, nats."""
        return self.of_means([float(copy.change.mean()) for copy in self.copies])

    def of_means(self, means: Sequence[float]) -> float:
        """The prediction limit from the copies' means."""
        if min(means) <= 0:
            return max(0.0, *means)
        logs, count = np.log(means), len(means)
        reach = student_t(count - 1, (1 - LEVEL) / self.comparisons) * float(np.std(logs, ddof=1))
        return math.exp(float(np.mean(logs)) + reach * math.sqrt(1 + 1 / count))

    def is_own(self, again: float) -> bool:
        """True if a second run of the first variant is so far from the first that its randomness makes the floor."""
        return again > OWN_SHARE * float(np.mean(self.klds))
