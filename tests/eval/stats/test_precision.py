"""The number of windows for a precision, and their seconds, computed by hand."""

from __future__ import annotations

import pytest

from compare_q.eval.stats.windows_needed import seconds_needed, windows_needed


@pytest.mark.parametrize(
    ("error", "scored", "available", "needed"),
    [
        # In an endless text the square of the error is proportional to 1 / n: 32 * 9 / 4.
        (0.03, 32, 10**9, 72),
        # 9 = c (1/16 - 1/100) and 4 = c (1/n - 1/100): exactly 30, which rounding errors must not
        # make 31.
        (0.03, 16, 100, 30),
        (0.03, 32, 100, 52),  # 51.4
        (0.02, 32, 100, 32),
        (0.001, 32, 100, 32),
        (0.5, 16, 100, 100),  # 99.2
        # The finite population correction: no error needs more windows than the text has.
        (50.0, 16, 20, 20),
    ],
)
def test_windows_for_two_percent(error: float, scored: int, available: int, needed: int) -> None:
    assert windows_needed(error, scored, available) == needed


def test_seconds_are_those_of_loading_and_of_the_new_windows() -> None:
    """64 s for 32 windows are 2 s per window."""
    assert seconds_needed(load_seconds=10.0, score_seconds=64.0, scored=32, more=48) == 10 + 48 * 2
