"""The counts of benchmarks/coverage_of_texts.py, on series with known results."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import coverage_of_texts


def first_parts(logprob: NDArray[np.float32]) -> list[dict[str, float]]:
    index = np.arange(len(logprob))
    return list(coverage_of_texts.first_parts({"bf16": {"logprob": logprob}}, index, index % 512))


def test_counts_by_hand() -> None:
    """The parts are 1, 1, 3, 3 from the whole; divided by root(3/4), 1.15 and 3.46; the spread is root(20/3)."""
    parts = [(value, 2.0, 2.0, 0.5, said) for value, said in ((1, "more"), (-1, "less"), (3, "more"), (-3, "equal"))]
    found = coverage_of_texts.counts(0.0, 0.25, parts)
    assert (found["parts"], found["held"], found["held_bootstrap"]) == (4, 2, 0)
    assert (found["certain"], found["wrong"]) == (3, 1)
    assert (found["error_by_spread"], found["error_by_bootstrap"]) == (0.77, 4.0)


def test_bootstrap_by_hand() -> None:
    """With blocks of one token, the error is the standard deviation / root(N); blocks of a whole period give 0."""
    assert coverage_of_texts.bootstrap_error(np.array([0.0, 2.0, 0.0, 2.0]), blocks=4) == pytest.approx(0.5)
    assert coverage_of_texts.bootstrap_error(np.tile([0.0, 2.0], 30)) == 0


def test_intervals_hold_in_noise_and_not_where_a_text_changes() -> None:
    """Intervals hold for independent tokens, but not for a text with two levels, of which a part sees only one."""
    noise = np.random.default_rng(0).normal(-3, 1, 120_000).astype(np.float32)
    assert all(row["held"] >= 0.85 * row["parts"] for row in first_parts(noise))
    noise[:61_440] -= 1
    assert all(row["held"] <= 1 for row in first_parts(noise) if row["size"] <= 8704)


def test_spread_samples_hold_in_noise() -> None:
    noise, window = np.random.default_rng(0).normal(-3, 1, 128 * 64), np.repeat(np.arange(128), 64)
    found = list(coverage_of_texts.spread_samples({"bf16": {"logprob": noise}}, window, range(0, 128 * 64, 64)))
    assert [row["parts"] for row in found] == [8]
    assert found[0]["held"] >= 6
