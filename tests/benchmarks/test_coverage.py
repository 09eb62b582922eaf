"""How often the intervals of eval/stats/uncertainty.py hold, in simulated texts of a fixed seed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import coverage
from compare_q.eval.stats.uncertainty import mean_with_errors, places_of

pytestmark = pytest.mark.slow


def test_the_simulation_estimates_as_the_tables_do() -> None:
    """Its shortcuts, over tokens times how often they are scored, against ``mean_with_errors`` over every entry."""
    tokens = 70_000
    score = coverage.Score(2.95, 0.27, {}, 0.0, 0.0, coverage.losses)  # no noise of entries, no effect of context
    scores = next(coverage.simulate("loss", tokens, 1))
    for method, (length, stride, first) in coverage.METHODS.items():
        index = np.concatenate([np.arange(at + first, at + length) for at in range(0, tokens - length, stride)])
        window = np.repeat(np.arange(len(index) // (length - first)), length - first)
        found = mean_with_errors(scores[index], None, places_of(index))
        by_window = coverage.by_cluster(np.bincount(window, scores[index]), np.bincount(window))
        off, half = coverage.errors_of_text(
            scores, coverage.windows_of_method(tokens, method), score, np.random.default_rng(0)
        )
        assert found.value
        assert found.stderr
        assert found.stderr_independent
        assert by_window
        assert off == pytest.approx(found.value - 2.95, rel=1e-6)
        assert half["blocks"] == pytest.approx(2.77645 * found.stderr, rel=1e-5)  # 4 waves
        assert half["independent"] == pytest.approx(
            1.96 * found.stderr_independent, rel=1e-4
        )  # float32 sums of squares
        assert half["windows"] == pytest.approx(1.96 * by_window, rel=1e-5)


@pytest.mark.parametrize("name", list(coverage.SCORES))
def test_simulated_scores_have_the_mean_that_they_say(name: str) -> None:
    """200 texts of 60,000 tokens: within four standard errors, as their own spread tells them."""
    means = [float(scores.mean(dtype=np.float64)) for scores in coverage.simulate(name, 60_000, 200)]
    error = float(np.std(means)) / math.sqrt(len(means))
    assert np.mean(means) == pytest.approx(coverage.SCORES[name].mean, abs=4 * error)
    assert error < 0.003 * max(1.0, coverage.SCORES[name].mean)


@pytest.mark.parametrize(("name", "tokens", "texts"), [
    ("kld", 16_000, 500), ("loss", 60_000, 300), ("loss", 300_000, 100),
])  # fmt: skip
def test_intervals_hold(name: str, tokens: int, texts: int) -> None:
    """93 % of the texts and more (results/coverage.md has every length, and more texts); other errors far less."""
    for method, found in coverage.coverage(name, tokens, texts).items():
        assert 93 <= found["blocks"] <= 99, (method, found)
        assert found["independent"] < 75, (method, found)
        assert found["windows"] < 85, (method, found)


@pytest.mark.parametrize(("tokens", "texts", "articles", "least", "most"), [
    (120_000, 300, (4600, 1.5), 92, 97), (60_000, 300, (13_800, 1.5), 0, 91),
])  # fmt: skip
def test_intervals_hold_where_documents_are_long(
    tokens: int, texts: int, articles: tuple[float, float], least: float, most: float
) -> None:
    """Heavy tails as well; but not where a single document may be most of the text, which the footnote says."""
    found = coverage.coverage("loss", tokens, texts, 0, articles, ["2048/512"])["2048/512"]
    assert least <= found["blocks"] <= most
