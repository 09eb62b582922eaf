"""Statistics, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.estimates import perplexity


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
