"""Where in the window decode begins to differ, by plain loops, and no more often by chance than is said."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from compare_q.eval.stats.distributions import position_bins
from compare_q.eval.stats.phases import LEVEL, begins_at
from compare_q.eval.stats.uncertainty import student_t


def scores(windows: int, length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """KLD of noise twice, drawn alike, windows and positions of so many windows of so many tokens."""
    draw = np.random.default_rng(seed)
    shape = windows * (length - 1)
    window = np.repeat(np.arange(windows), length - 1)
    position = np.tile(np.arange(1, length), windows)
    kld, noise = (draw.gamma(0.5, 0.004, shape).astype(np.float32) for _ in range(2))
    return kld, noise, window, position


def by_loops(kld: np.ndarray, noise: np.ndarray, window: np.ndarray, position: np.ndarray, times: float) -> int | None:
    edges = position_bins(position)[0].tolist()
    for low, high in itertools.pairwise(edges):
        means = []
        for number in sorted(set(window.tolist())):
            inside = [
                float(a) - times * float(b)
                for a, b, w, p in zip(kld, noise, window, position, strict=True)
                if w == number and low <= p < high and math.isfinite(a) and math.isfinite(b)
            ]
            means += [math.fsum(inside) / len(inside)] if inside else []
        if len(means) < 2:
            continue
        mean = math.fsum(means) / len(means)
        error = math.sqrt(math.fsum((each - mean) ** 2 for each in means) / (len(means) - 1) / len(means))
        if mean > student_t(len(means) - 1, LEVEL / (len(edges) - 1)) * error:
            return int(low)
    return None


@pytest.mark.parametrize("begin", [1, 30, 90, None])
def test_a_difference_begins_where_it_does(begin: int | None) -> None:
    kld, noise, window, position = scores(12, 200)
    if begin is not None:
        kld[position >= begin] += 0.02
    kld[5] = np.nan
    found = begins_at(kld, noise, window, position, 2.0)
    assert found == by_loops(kld, noise, window, position, 2.0)
    edges = position_bins(position)[0].tolist()
    if begin is None:
        assert found is None
    else:
        bin_of_begin = int(np.searchsorted(edges, begin, side="right")) - 1
        assert found in edges[bin_of_begin : bin_of_begin + 2]


def test_a_difference_begins_at_a_scored_position() -> None:
    """Of each 64 tokens the last four are scored; the bins between them begin at tokens that are not."""
    kld, noise, window, position = scores(12, 512)
    kept = position % 64 >= 60
    kld[position >= 100] += 0.02
    found = begins_at(kld[kept], noise[kept], window[kept], position[kept], 2.0)
    assert found in position[kept]
    assert found == 124


def test_one_window_says_nothing_of_others() -> None:
    kld, noise, window, position = scores(1, 200)
    assert begins_at(kld + 1, noise, window, position, 2.0) is None


def test_noise_that_is_twice_as_large_is_seldom_taken_for_a_difference() -> None:
    """The limit itself: in at most about 5 of 100 texts; KLDs of tokens are as skewed as real ones."""
    found = 0
    for seed in range(200):
        kld, noise, window, position = scores(16, 128, seed)
        found += begins_at(2 * kld, noise, window, position, 2.0) is not None
    assert found <= 20
