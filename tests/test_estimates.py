"""Statistics, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.estimates import Estimates, Mean, mean, perplexity, summarize


def test_perplexity_by_hand() -> None:
    """ln 2 and ln 8 of loss: mean ln 4."""
    found = perplexity(np.log(np.array([0.5, 0.125], np.float32)))
    assert found.value == pytest.approx(4.0, rel=1e-7)
    assert (found.tokens, found.non_finite) == (2, 0)
    assert found.logprob_sum == pytest.approx(-math.log(16), rel=1e-7)


def test_non_finite_positions_are_left_out_and_counted() -> None:
    found = perplexity(np.array([-1.0, np.nan, -np.inf, -3.0, np.inf], np.float32))
    assert found.value == pytest.approx(math.exp(2.0))
    assert (found.tokens, found.non_finite) == (2, 3)


def test_nothing_finite_is_unknown() -> None:
    found = perplexity(np.array([np.nan], np.float32))
    assert (found.value, found.tokens, found.non_finite) == (None, 0, 1)


def test_sum_is_float64() -> None:
    """In float32, 2 ** 24 ones plus one more are still 2 ** 24."""
    found = perplexity(np.full(2**24 + 1, -1.0, np.float32))
    assert found.logprob_sum == -(2**24 + 1)
    assert found.value == pytest.approx(math.e, rel=1e-12)


def test_overflow_is_unknown_and_not_infinite() -> None:
    assert perplexity(np.array([-1000.0], np.float32)).value is None


def test_mean_by_hand() -> None:
    assert mean(np.array([0.25, 0.5, 0.75], np.float32)) == Mean(0.5, 1.5, 3, 0)
    assert mean(np.array([True, False, True, True])) == Mean(0.75, 3.0, 4, 0)


def test_mean_leaves_out_and_counts_what_is_not_finite() -> None:
    values = np.array([1.0, np.nan, np.inf, 3.0, -np.inf], np.float32)
    assert mean(values) == Mean(2.0, 4.0, 2, 3)
    assert mean(values, np.array([False, True, True, True, True])) == Mean(3.0, 3.0, 1, 4)
    shares = np.array([True, True, False, True])
    assert mean(shares, np.array([False, True, True, False])) == Mean(0.5, 1.0, 2, 2)


@pytest.mark.parametrize("values", [np.array([np.nan, np.inf], np.float32), np.array([], np.float32)])
def test_mean_of_nothing_is_unknown(values: np.ndarray) -> None:
    assert mean(values) == Mean(None, 0.0, 0, len(values))


def test_mean_is_summed_in_float64() -> None:
    """In float32, 2 ** 24 ones plus one more are still 2 ** 24."""
    assert mean(np.full(2**24 + 1, 1.0, np.float32)).total == 2**24 + 1


def test_without_a_reference_there_is_no_kld() -> None:
    found = summarize({"logprob": np.array([-1.0, -3.0], np.float32)})
    assert found == Estimates(perplexity(np.array([-1.0, -3.0], np.float32)), None, None, None, None, None)
    assert found.ppl.value == pytest.approx(math.exp(2.0))


def test_summary_by_hand() -> None:
    """Shares: positions 0, 1 and 4 have a finite logprob.  KLD and entropy: whatever is finite of all five."""
    found = summarize(
        {
            "logprob": np.array([-1.0, -2.0, -np.inf, np.nan, -3.0], np.float32),
            "entropy": np.array([0.5, 1.0, 1.5, np.nan, 2.0], np.float32),
            "top1": np.array([True, False, False, True, True]),
            "ref_logprob": np.array([-1.0, -2.0, -2.0, -2.0, -3.0], np.float32),
            "kld": np.array([0.25, 0.5, np.inf, np.nan, 0.0], np.float32),
            "same_top": np.array([True, False, True, True, False]),
        }
    )
    assert (found.ppl.value, found.ppl.tokens, found.ppl.non_finite) == (pytest.approx(math.exp(2.0)), 3, 2)
    assert found.kld == Mean(0.25, 0.75, 3, 2)
    assert found.entropy == Mean(1.25, 5.0, 4, 1)
    assert found.top1 == Mean(2 / 3, 2.0, 3, 2)
    assert found.same_top == Mean(1 / 3, 1.0, 3, 2)


def test_a_finite_kld_counts_where_the_real_token_is_impossible() -> None:
    """Both models rule the token out: their distributions can still be compared, PPL cannot take it in."""
    found = summarize({"logprob": np.array([-np.inf, -1.0], np.float32), "kld": np.array([0.5, 0.25], np.float32)})
    assert (found.ppl.tokens, found.kld) == (1, Mean(0.375, 0.75, 2, 0))


def test_same_top_needs_both_models() -> None:
    """Where the reference is nan, its most probable token is not known; top1 does not ask it."""
    found = summarize(
        {
            "logprob": np.array([-1.0, -1.0, -1.0], np.float32),
            "ref_logprob": np.array([np.nan, -1.0, -1.0], np.float32),
            "top1": np.array([True, False, False]),
            "same_top": np.array([False, True, True]),
        }
    )
    assert found.same_top == Mean(1.0, 2.0, 2, 1)
    assert found.top1 == Mean(1 / 3, 1.0, 3, 0)
