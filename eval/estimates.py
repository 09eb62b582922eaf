"""Per-token scores -> estimates.  numpy only; sums and counts travel, one division at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_EXPONENT = math.log(1.7e308)


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(-logprob_sum / tokens); None if nothing finite was scored, or if it overflows.

    ``tokens`` counts the finite log-probabilities (nats) that are in the sum; ``non_finite`` those left out of it.
    """

    value: float | None
    logprob_sum: float
    tokens: int
    non_finite: int


def perplexity(logprob: NDArray[np.float32]) -> Perplexity:
    """Perplexity of float32 log-probabilities of any shape, summed in float64."""
    finite = np.isfinite(logprob)
    total, tokens = float(logprob[finite].sum(dtype=np.float64)), int(finite.sum())
    known = tokens > 0 and -total / tokens < LARGEST_EXPONENT
    return Perplexity(math.exp(-total / tokens) if known else None, total, tokens, int(finite.size - tokens))
