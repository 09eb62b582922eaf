"""The noise floor of a gate: how far the first variant is from itself with other roundings.

Assumption: the KLD of roundings grows with their number.  N copies of the first variant each have
one more bf16 rounding per decoder layer.  The logarithm of their mean KLDs is normally distributed.
Then, with probability p, the mean KLD of one more copy is below the prediction limit

    exp(m + t(p, N - 1) * s * sqrt(1 + 1 / N))

of a normal distribution; its mean m and standard deviation s are estimated from N draws (Hahn and
Meeker, Statistical Intervals, 1991, section 4.8).  All means are over the same tokens, so that the
choice of text does not matter.  ``PASS_LEVEL`` holds for all comparisons of a gate together
(Bonferroni).  A right kernel may round at other places than a copy does: the floor is
``OTHER_PLACES`` times the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..run.stored_scores import StoredScores
from ..stats.uncertainty import student_t

PASS_LEVEL = 0.99
"""Probability that a gate passes if all its variants are right."""
FLOOR_COPIES = 6
"""Copies of the first variant: with fewer, Student's t makes the limit wide."""
OTHER_PLACES = 1.25
"""On an H100 correct kernels had up to 1.08 times the copies' KLD, and an FP8 KV cache 1.33
(results/h100/gate.md)."""
NONDETERMINISTIC_SHARE = 0.5
"""From this share of the copies' KLD on, the engine's randomness, not the added roundings, sets the
floor."""


class VariantTokens(NamedTuple):
    """The scores of one row's N tokens, in the order of windows and positions.

    ``logprob``: of the text's token, nats.  ``kld``: KL(first variant || row), nats.  ``change``:
    abs(log-probability - the first variant's), nats.
    """

    position: NDArray[np.int32]
    logprob: NDArray[np.float64]
    kld: NDArray[np.float64]
    change: NDArray[np.float64]

    @classmethod
    def of(cls, stored: StoredScores) -> VariantTokens:
        """Return the tokens of scores that were compared with the first variant."""
        logprob = stored.columns["logprob"].astype(np.float64)
        # The first variant itself has no other columns: it differs from itself by 0.
        kld = np.zeros_like(logprob)
        if "kld" in stored.columns:
            kld = stored.columns["kld"].astype(np.float64)
        change = np.zeros_like(logprob)
        if "ref_logprob" in stored.columns:
            change = np.abs(logprob - stored.columns["ref_logprob"])
        return cls(stored.position, logprob, kld, change)

    def by_position(self) -> NDArray[np.float64]:
        """Return the mean KLD at each position from 0 to the last one; 0 where none is scored."""
        sums = np.bincount(self.position, weights=self.kld)
        counts = np.bincount(self.position)
        return np.asarray(sums / np.maximum(counts, 1), np.float64)


class Floor:
    """The KLD of roundings alone on one text, from ``copies`` of the first variant.

    The ``comparisons`` of the gate share the level.

    Attributes:
        klds: mean KLD of each copy.
        curve: mean KLD of all copies at each position.
        limit: of a right variant's mean KLD, nats.
        change_limit: of the mean change of a log-probability between two runs, nats.
    """

    def __init__(self, copies: Sequence[VariantTokens], comparisons: int) -> None:
        self.comparisons = comparisons
        self.klds = [float(copy.kld.mean()) for copy in copies]
        self.curve = np.mean([copy.by_position() for copy in copies], axis=0)
        self.limit = OTHER_PLACES * self.prediction_limit(self.klds)
        changes = [float(copy.change.mean()) for copy in copies]
        self.change_limit = self.prediction_limit(changes)

    def prediction_limit(self, means: Sequence[float]) -> float:
        """Return the limit for one more mean like these.

        The largest of them if one is 0, which has no logarithm.
        """
        if min(means) <= 0:
            return max(0.0, *means)
        logs = np.log(means)
        count = len(means)
        deviation = float(np.std(logs, ddof=1))
        reach = student_t(count - 1, (1 - PASS_LEVEL) / self.comparisons) * deviation
        return math.exp(float(np.mean(logs)) + reach * math.sqrt(1 + 1 / count))

    def is_nondeterministic(self, second_kld: float) -> bool:
        """Return True if the engine's randomness sets the floor.

        ``second_kld``: KLD of a second run of the first variant.
        """
        return second_kld > NONDETERMINISTIC_SHARE * float(np.mean(self.klds))
