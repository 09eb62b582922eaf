"""The rounding of log-probabilities that another program has written."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MOST_DECIMALS = 6
"""Numbers with more decimals are more precise than float32."""
DECIMAL_ERROR = 1e-6
"""Largest distance from a whole number, in units of the last decimal, of a rounded number."""
COMPUTED = 2.0**-14
"""Smallest absolute error, in nats, of a log-probability that was computed in float32.

torch's log_softmax in float32 on a CPU is off by up to 4.4e-5 (262,144 normal logits with a
standard deviation of 4), with the same sign at most positions.
"""
HALF_SPACINGS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Format -> largest rounding error of a number, relative to it."""


class Rounding(NamedTuple):
    """Largest rounding error of a number: ``absolute`` plus ``relative`` times its size."""

    absolute: float
    relative: float

    def errors(self, logprobs: Array) -> Array:
        """Return the largest error of each log-probability, in nats; 0 of an infinite one."""
        sizes = np.where(np.isfinite(logprobs), np.abs(logprobs), 0.0)
        return self.absolute + self.relative * sizes


def rounding_of(logprobs: Array) -> Rounding:
    """Return the coarsest rounding that fits all finite log-probabilities [n].

    Known are 0 to 6 decimals, bfloat16 and float16.  Other numbers count as float32, in which
    engines compute them.
    """
    values = logprobs[np.isfinite(logprobs)]
    relative = HALF_SPACINGS["float32"]
    if is_float16(values):
        relative = HALF_SPACINGS["float16"]
    if is_bfloat16(values):
        relative = HALF_SPACINGS["bfloat16"]
    absolute = 0.0
    for decimals in range(MOST_DECIMALS, -1, -1):
        scaled = values * 10.0**decimals
        if (np.abs(scaled - np.round(scaled)) > DECIMAL_ERROR).any():
            break
        absolute = 0.5 * 10.0**-decimals
    return Rounding(absolute + COMPUTED, relative)


def is_float16(values: Array) -> bool:
    """Return True if all numbers are exact in float16."""
    return bool((values.astype(np.float16) == values).all())


def is_bfloat16(values: Array) -> bool:
    """Return True if all numbers are exact in bfloat16, the first half of float32."""
    as_float32 = values.astype(np.float32)
    if (as_float32 != values).any():
        return False
    return not bool((as_float32.view(np.uint32) & 0xFFFF).any())
