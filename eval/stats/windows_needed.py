"""How many windows a KLD of a given precision needs, and how long they take.

Precision is the relative standard error of a mean over windows that are spread over a text, as the
mean of all windows of this text (``eval.stats.uncertainty.sampling_error``).
"""

from __future__ import annotations

import math

WINDOWS = 32
"""Windows of each text in a run without spec files and without a number of windows."""
TARGET = 0.02
"""The precision whose cost a run prints: a standard error of 2 % of the KLD."""
LEAST_WINDOWS = 5
"""Minimum number of windows whose error is printed.  From fewer, the error itself would be off by
more than a third."""


def windows_needed(error: float, scored: int, available: float, target: float = TARGET) -> int:
    """Return how many windows reduce the relative error of ``scored`` windows to ``target``.

    At most ``available``, which is infinite if the error of all windows of the text is not 0.  The
    square of the error of n windows out of N is proportional to 1 / n - 1 / N.
    """
    if error <= target:
        return scored
    share = (target / error) ** 2
    inverse = 1 / available + share * (1 / scored - 1 / available)
    # Rounded first: 30.000000001 windows are 30.
    needed = math.ceil(round(1 / inverse, 6))
    return int(min(needed, available))


def seconds_needed(load_seconds: float, score_seconds: float, scored: int, more: int) -> float:
    """Return the seconds of loading a model and scoring ``more`` windows.

    At the speed of the ``scored`` ones.
    """
    return load_seconds + more * score_seconds / scored
