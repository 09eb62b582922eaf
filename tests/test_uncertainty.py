"""Means, their errors and intervals, worked by hand; and how often the intervals hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import coverage
from eval import uncertainty
from eval.uncertainty import Mean, Value, caution, clustered, exponential, interval, mean, perplexity, root, stretch_of

LN2 = math.log(2)


def test_stretches_are_equal_lengths_of_text() -> None:
    """12 tokens in 3 stretches, in any order, wherever the text begins."""
    assert stretch_of(np.arange(12)).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert stretch_of(np.arange(100, 112)[::-1]).tolist() == [2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    assert stretch_of(np.arange(-5, 1)).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_token_is_in_one_stretch_whatever_window_scored_it() -> None:
    """Two windows, tokens 1 to 7 and 5 to 11: 11 tokens of text, cut at 1, 5 (4 * 3 // 11 = 1) and 9."""
    index = np.array([1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10, 11])
    assert stretch_of(index).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]


def test_gaps_between_windows_are_text() -> None:
    """Places 0 to 11, of which 1 to 8 are not scored: the middle stretch, 4 to 7, has no entry."""
    index = np.array([0, 9, 10, 11], np.int32)
    assert stretch_of(index).tolist() == [0, 2, 2, 2]
    assert uncertainty.length_of(index) == 12


@pytest.mark.parametrize(("length", "count"), [
    (1, 1), (2, 2), (3, 3), (79_999, 3), (80_000, 4), (124_999, 4), (125_000, 5), (301_567, 7), (1_000_000, 14),
    (5000 * 900, 30), (40_000_000, 30),
])  # fmt: skip
def test_number_of_stretches(length: int, count: int) -> None:
    """root(length / 5000), 3 to 30, and no more than there are tokens; the last token is in the last one."""
    found = stretch_of(np.array([7, 7 + length - 1]))
    assert found.tolist() == [0, count - 1]


def test_no_entries_have_no_stretch() -> None:
    assert stretch_of(np.array([], np.int64)).tolist() == []
    assert uncertainty.length_of(np.array([], np.int64)) == 0


def test_clustered_error_of_two_stretches() -> None:
    """Sums 2 and 10 of 2 and 3 entries: mean 2.4, off by 2 - 4.8 = -2.8 and 10 - 7.2 = 2.8;
    root(2 / 1 * (7.84 + 7.84)) / 5 = 5.6 / 5."""
    assert clustered(np.array([2.0, 10.0]), np.array([2, 3])) == pytest.approx(1.12, rel=1e-12)


def test_clustered_error_of_three_stretches() -> None:
    """Sums 1, 4, 10 of 1, 2, 3 entries: mean 2.5, off by -1.5, -1, 2.5; root(3 / 2 * 9.5) / 6.  Empty ones are none."""
    expected = math.sqrt(14.25) / 6
    assert clustered(np.array([1.0, 4.0, 10.0]), np.array([1, 2, 3])) == pytest.approx(expected, rel=1e-12)
    assert clustered(np.array([1.0, 0, 4.0, 10.0]), np.array([1, 0, 2, 3])) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tokens", [[5], [5, 0], [0, 0], []])
def test_one_stretch_tells_no_error(tokens: list[int]) -> None:
    assert clustered(np.ones(len(tokens)), np.array(tokens, int)) is None


def test_student() -> None:
    """The published quantiles, and all of them by integrating the density: 95 % lie within."""
    published = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 10: 2.228, 14: 2.145, 20: 2.086, 29: 2.045}
    assert {df: uncertainty.T975[df - 1] for df in published} == published
    assert len(uncertainty.T975) == uncertainty.MOST_STRETCHES - 1
    for df, quantile in enumerate(uncertainty.T975, start=1):
        scale = math.gamma((df + 1) / 2) / math.gamma(df / 2) / math.sqrt(df * math.pi)
        x = (np.arange(100_000) + 0.5) / 100_000 * quantile
        inside = 2 * scale * float(np.mean((1 + x * x / df) ** (-(df + 1) / 2))) * quantile
        assert inside == pytest.approx(0.95, abs=6e-5), df  # the table has three digits


def test_interval() -> None:
    """3 stretches: 10 +- 4.303 * 2."""
    assert interval(10, 2, 3) == pytest.approx((1.394, 18.606))
    assert interval(10, 2, 30) == pytest.approx((5.91, 14.09))


@pytest.mark.parametrize("groups", [-1, 0, 1, 31])
def test_an_interval_of_other_numbers_of_stretches_is_refused(groups: int) -> None:
    with pytest.raises(ValueError, match=f"2 to 30 stretches, not {groups}"):
        interval(10, 2, groups)


def test_caution() -> None:
    assert caution(60_000) is None
    assert caution(59_999) == "the text has 59,999 tokens: with less than 60,000, the errors (±) are often too small"


def test_mean_and_its_errors() -> None:
    """1, 2, 6: mean 3, mean square off 14 / 3, independent root(14 / 3 / 2); stretches {1, 2} and {6}: off by -3 and 3,
    root(2 * 18) / 3 = 2."""
    found = mean(np.array([1, 2, 6], np.float32), None, np.array([0, 0, 1]))
    assert (found.value, found.total, found.tokens, found.non_finite) == (3, 9, 3, 0)
    assert found.stderr == pytest.approx(2, rel=1e-12)
    assert found.stderr_independent == pytest.approx(math.sqrt(7 / 3), rel=1e-12)


def test_mean_of_shares() -> None:
    """llama.cpp's error of a share: root(p (1 - p) / (n - 1))."""
    found = mean(np.array([True, False, True, True]))
    assert (found.value, found.total, found.tokens) == (0.75, 3, 4)
    assert found.stderr_independent == pytest.approx(math.sqrt(0.75 * 0.25 / 3), rel=1e-12)


def test_mean_leaves_out_and_counts_what_is_not_finite() -> None:
    """1 and 3 in two stretches: mean 2, off by -1 and 1, root(2 * 2) / 2 = 1; independent root(1 / 1) = 1."""
    values = np.array([1, np.nan, np.inf, 3, -np.inf], np.float32)
    assert mean(values, None, np.array([0, 0, 0, 1, 1])) == Mean(2, 4, 2, 3, 1, 1)
    assert mean(values, np.array([False, True, True, True, True])) == Mean(3, 3, 1, 4)
    shares = np.array([True, True, False, True])
    assert mean(shares, np.array([False, True, True, False])) == Mean(0.5, 1, 2, 2, None, 0.5)


@pytest.mark.parametrize("values", [[np.nan, np.inf], []])
def test_mean_of_nothing_is_unknown(values: list[float]) -> None:
    given = np.array(values, np.float32)
    assert mean(given, None, np.zeros(len(given), int)) == Mean(None, 0, 0, len(values))


def test_errors_of_one_token_are_unknown() -> None:
    assert mean(np.array([5], np.float32), None, np.array([0])) == Mean(5, 5, 1, 0, None, None)


def test_errors_of_a_constant_are_zero() -> None:
    found = mean(np.full(1000, 0.1, np.float32), None, np.arange(1000) // 250)
    assert (found.stderr, found.stderr_independent) == (pytest.approx(0, abs=1e-15), pytest.approx(0, abs=1e-15))


def test_mean_is_summed_in_float64() -> None:
    """In float32, 2 ** 24 ones plus one more are still 2 ** 24."""
    found = mean(np.full(2**24 + 1, 1, np.float32), None, np.zeros(2**24 + 1, np.int8))
    assert (found.total, found.value) == (2**24 + 1, 1)


def test_perplexity_and_its_errors() -> None:
    """Losses ln 2 and ln 8: mean ln 4, off by ln 2; independent root(ln2^2 / 1), clustered root(2 * 2 ln2^2) / 2."""
    found = perplexity(np.log(np.array([0.5, 0.125], np.float32)), None, np.array([0, 1]))
    assert found.value == pytest.approx(4, rel=1e-7)
    assert (found.tokens, found.non_finite) == (2, 0)
    assert found.logprob_sum == pytest.approx(-math.log(16), rel=1e-7)
    assert (found.stderr, found.stderr_independent) == pytest.approx((4 * LN2, 4 * LN2), rel=1e-7)


def test_non_finite_positions_are_left_out_and_counted() -> None:
    found = perplexity(np.array([-1, np.nan, -np.inf, -3, np.inf], np.float32))
    assert found.value == pytest.approx(math.exp(2))
    assert (found.tokens, found.non_finite) == (2, 3)


def test_nothing_finite_is_unknown() -> None:
    found = perplexity(np.array([np.nan], np.float32))
    assert (found.value, found.tokens, found.non_finite) == (None, 0, 1)


@pytest.mark.parametrize("logprobs", [[-1000], [-1000, -800]])
def test_overflow_is_unknown_and_not_infinite(logprobs: list[float]) -> None:
    found = perplexity(np.array(logprobs, np.float32))
    assert (found.value, found.stderr_independent) == (None, None)


def test_an_error_that_overflows_is_unknown() -> None:
    assert exponential(Mean(709, 709, 1, 0, 1e3, 0.5)) == Value(math.exp(709), None, 0.5 * math.exp(709))


def test_exponential() -> None:
    """exp(ln 4) = 4, of the linear approximation: 4 * 0.1; of the opposite sign 1 / 4."""
    of = Mean(2 * LN2, 0, 9, 0, 0.1, 0.01)
    up, down = exponential(of), exponential(of, -1)
    assert (up.value, up.stderr, up.stderr_independent) == pytest.approx((4, 0.4, 0.04))
    assert (down.value, down.stderr, down.stderr_independent) == pytest.approx((0.25, 0.025, 0.0025))
    assert exponential(Mean(None, 0, 0, 3)) == Value(None)


def test_root() -> None:
    """root(0.25 +- 0.1) = 0.5 +- 0.1 / (2 * 0.5)."""
    assert root(Mean(0.25, 1, 4, 0, 0.1, 0.01)) == Value(0.5, 0.1, 0.01)
    assert root(Mean(0, 0, 4, 0, 0, 0)) == Value(0)
    assert root(Mean(None, 0, 0, 4)) == Value(None)


def test_the_simulation_estimates_as_the_tables_do() -> None:
    """Its shortcuts, over tokens times how often they are scored, against ``mean`` over every entry."""
    tokens = 70_000
    score = coverage.Score(2.95, 0.27, {}, 0.0, 0.0, coverage.losses)  # no noise of entries, no effect of context
    scores = next(coverage.simulate("loss", tokens, 1))
    for method, (length, stride, first) in coverage.METHODS.items():
        index = np.concatenate([np.arange(at + first, at + length) for at in range(0, tokens - length, stride)])
        window = np.repeat(np.arange(len(index) // (length - first)), length - first)
        found = mean(scores[index], None, stretch_of(index))
        by_window = mean(scores[index], None, window)
        off, half = coverage.estimate(scores, coverage.cut(tokens, method), score, np.random.default_rng(0))
        assert found.value
        assert found.stderr
        assert found.stderr_independent
        assert by_window.stderr
        assert off == pytest.approx(found.value - 2.95, rel=1e-6)
        assert half["clustered"] == pytest.approx(4.303 * found.stderr, rel=1e-5)  # 3 stretches
        assert half["independent"] == pytest.approx(
            1.96 * found.stderr_independent, rel=1e-4
        )  # float32 sums of squares
        assert half["windows"] == pytest.approx(1.96 * by_window.stderr, rel=1e-5)


@pytest.mark.parametrize("name", list(coverage.SCORES))
def test_simulated_scores_have_the_mean_that_they_say(name: str) -> None:
    """200 texts of 60,000 tokens: within four standard errors, as their own spread tells them."""
    means = [float(scores.mean(dtype=np.float64)) for scores in coverage.simulate(name, 60_000, 200)]
    error = float(np.std(means)) / math.sqrt(len(means))
    assert np.mean(means) == pytest.approx(coverage.SCORES[name].mean, abs=4 * error)
    assert error < 0.003 * max(1.0, coverage.SCORES[name].mean)


def test_simulated_errors_grow_with_the_stretches_as_the_real_ones_do() -> None:
    """In 50 texts; the real ones are one text's, and known to 3 % (64 tokens) and 17 % (16,384)."""
    for length, simulated in coverage.growth(texts=50).items():
        assert simulated == pytest.approx(coverage.REAL[length], rel=0.06 if length < 8192 else 0.17)


@pytest.mark.parametrize(("name", "tokens", "texts"), [("loss", 60_000, 1500), ("difference", 60_000, 1000),
                                                       ("kld", 60_000, 1000), ("loss", 300_000, 300)])  # fmt: skip
def test_intervals_hold(name: str, tokens: int, texts: int) -> None:
    """93 to 97 % of the texts (results/coverage.md has every length, and more texts); independent ones far less."""
    for method, found in coverage.coverage(name, tokens, texts).items():
        assert 93 <= found["clustered"] <= 97, (method, found)
        assert found["independent"] < 70, (method, found)
        assert found["windows"] < 80, (method, found)


def test_intervals_of_short_texts_do_not() -> None:
    """Why there is a caution: 16,000 tokens are three articles."""
    assert coverage.coverage("loss", 16_000, 1000)["2048/512"]["clustered"] < 91


def test_an_error_that_overflows_is_not_known() -> None:
    """1e200 squared is beyond float64; the mean is not."""
    found = mean(np.array([1e200, -1e200, 1e200, 1e200]), None, np.array([0, 1, 2, 2]))
    assert (found.value, found.stderr, found.stderr_independent) == (5e199, None, None)
