"""Shares from sums over windows, the order of windows, and which parts stop, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compare_q.eval.stats.uncertainty import low_frequency_error, student_t
from compare_q.eval.where import shares


def test_a_share_is_a_ratio_of_sums_with_the_error_of_means() -> None:
    sums = np.array([1.0, 3.0, 2.0, 6.0])
    tokens = np.array([10.0, 10.0, 20.0, 20.0])
    share = shares.estimate(sums, tokens, 1000)
    assert share.value == pytest.approx(12 / 60)
    error = low_frequency_error(sums, tokens, 1000)
    assert error is not None
    assert share.stderr == pytest.approx(error)
    # Four windows have three cosines.
    assert share.high == pytest.approx(0.2 + student_t(3) * error)
    assert share.low == pytest.approx(0.2 - student_t(3) * error)


def test_one_window_has_no_error() -> None:
    share = shares.estimate(np.array([3.0]), np.array([10.0]), 10)
    assert share == shares.Estimate(0.3)


@pytest.mark.parametrize("n_windows", [1, 4, 8, 9, 15, 16, 32, 100])
def test_stages_have_each_window_once_and_at_least_eight(n_windows: int) -> None:
    stages = shares.stages(n_windows)
    assert sorted(number for stage in stages for number in stage) == list(range(n_windows))
    if n_windows >= shares.FEWEST_WINDOWS:
        assert min(len(stage) for stage in stages) >= shares.FEWEST_WINDOWS


def test_each_stage_is_spread_over_the_text() -> None:
    first, second, *_ = shares.stages(32)
    assert sorted(first) == [0, 4, 8, 12, 16, 20, 24, 28]
    assert sorted(second) == [2, 6, 10, 14, 18, 22, 26, 30]


def sums_of(mean: float, deviation: float, n: int = 8) -> np.ndarray:
    """Return n sums with this mean and standard deviation."""
    values = np.array([-1.0, 1.0] * (n // 2))
    return mean + deviation * values * math.sqrt((n - 1) / n)


def test_a_part_below_a_fiftieth_of_the_whole_stops_when_that_is_certain() -> None:
    whole = sums_of(100.0, 0.0)
    # The limit is 2; with 8 windows the test needs t(7) = 5.41 standard errors of s / sqrt(8).
    reach = student_t(7, shares.STOP_TAIL) / math.sqrt(8)
    assert reach == pytest.approx(5.408 / math.sqrt(8), rel=1e-3)
    just_certain = 0.999 / reach
    just_uncertain = 1.001 / reach
    parts = {
        "certain": sums_of(1.0, just_certain),
        "uncertain": sums_of(1.0, just_uncertain),
        "zero": sums_of(0.0, 0.0),
        "large": sums_of(3.0, 0.0),
    }
    assert shares.small_parts(parts, whole) == {"certain", "zero"}


def test_a_part_below_a_tenth_of_the_largest_stops() -> None:
    whole = sums_of(100.0, 0.0)
    parts = {"largest": sums_of(50.0, 0.0), "small": sums_of(4.9, 0.0), "more": sums_of(5.1, 0.0)}
    assert shares.small_parts(parts, whole) == {"small"}


def test_a_share_far_below_zero_does_not_stop() -> None:
    parts = {"harmful": sums_of(-30.0, 1.0), "other": sums_of(50.0, 1.0)}
    assert shares.small_parts(parts, sums_of(100.0, 1.0)) == set()


def test_changes_over_the_text_cancel() -> None:
    """1 % of the KLD of every window is certain, whatever the KLDs of the windows are."""
    whole = np.geomspace(1.0, 1000.0, 8)
    parts = {"small": 0.01 * whole, "large": 0.3 * whole, "also small": 0.029 * whole}
    assert shares.small_parts(parts, whole) == {"small", "also small"}


def test_nothing_stops_before_eight_windows() -> None:
    assert shares.small_parts({"part": np.zeros(7)}, np.ones(7)) == set()
