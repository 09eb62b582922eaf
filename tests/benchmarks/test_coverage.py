"""The coverage of intervals of eval/stats/uncertainty.py in simulated texts with a fixed seed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import coverage

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", list(coverage.SCORES))
def test_simulated_scores_have_the_mean_that_they_say(name: str) -> None:
    """The mean of 200 texts of 60,000 tokens is within four standard errors.

    The error is estimated from the texts' spread.
    """
    means = []
    for scores in coverage.simulate(name, 60_000, 200):
        means.append(float(scores.mean(dtype=np.float64)))
    error = float(np.std(means)) / math.sqrt(len(means))
    assert np.mean(means) == pytest.approx(coverage.SCORES[name].mean, abs=4 * error)
    assert error < 0.003 * max(1.0, coverage.SCORES[name].mean)


@pytest.mark.parametrize(
    ("name", "tokens", "texts"),
    [
        ("kld", 16_000, 500),
        ("loss", 60_000, 300),
        ("loss", 300_000, 100),
    ],
)
def test_intervals_hold(name: str, tokens: int, texts: int) -> None:
    """Intervals hold in at least 93 % of the texts; other errors hold far less.

    results/coverage.md has all lengths.
    """
    for method, shares in coverage.coverage(name, tokens, texts).items():
        assert 93 <= shares["blocks"] <= 99, (method, shares)
        assert shares["independent"] < 75, (method, shares)
        assert shares["windows"] < 85, (method, shares)


@pytest.mark.parametrize(
    ("tokens", "texts", "articles", "least", "most"),
    [
        (120_000, 300, (4600, 1.5), 92, 97),
        (60_000, 300, (13_800, 1.5), 0, 91),
    ],
)
def test_intervals_hold_where_documents_are_long(
    tokens: int, texts: int, articles: tuple[float, float], least: float, most: float
) -> None:
    """Intervals hold with heavy tails, but not if one document may be most of the text.

    A footnote states this.
    """
    shares = coverage.coverage("loss", tokens, texts, 0, articles, ["2048/512"])["2048/512"]
    assert least <= shares["blocks"] <= most
