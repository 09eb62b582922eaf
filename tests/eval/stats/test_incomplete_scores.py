"""Estimates where scores are missing, not finite, constant, or too few."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict

import numpy as np
import pytest

from eval.stats import estimates
from eval.stats.estimates import BlockSums, Estimates, correlation, summarize, text_rates
from eval.stats.uncertainty import Mean, Value
from tests.support.four_tokens import QUARTERS, four_tokens


def test_no_rates_where_they_would_be_of_other_text(four: Estimates) -> None:
    """An infinite loss is in no sum, but its bytes are counted; a text without words has no rate over them."""
    columns = four_tokens()
    assert summarize(columns, QUARTERS, QUARTERS).rates is None
    columns["logprob"][1] = -np.inf
    assert summarize(columns, QUARTERS, QUARTERS, (16.0, 2.0)).rates is None
    assert text_rates(Mean(-1, -4, 4, 0), 16, 0) is None
    assert text_rates(Mean(-1, -4, 4, 0), 0, 2) is None
    assert text_rates(Mean(None, 0, 0, 0), 16, 2) is None


def test_without_a_reference_there_is_no_comparison() -> None:
    found = summarize({"logprob": np.array([-1.0, -3.0], np.float32)}, np.arange(2), np.arange(1, 3))
    assert (found.against, found.kld, found.same_top, found.top1, found.entropy, found.rates) == (None,) * 6
    assert found.ppl.value == pytest.approx(math.exp(2.0))
    assert found.blocks == BlockSums((1, 1), (1.0, 3.0), whole=("nll",), length=2)


def test_one_token() -> None:
    """No error of anything, and no correlation; a number for the rest."""
    columns = {name: values[:1] for name, values in four_tokens().items()}
    found = summarize(columns, np.array([5]), np.array([5]), (4.0, 1.0))
    assert (found.ppl.stderr, found.ppl.stderr_independent) == (None, None)
    assert found.against is not None
    assert found.against.correlation is None
    assert found.against.delta_p_rms == Value(0)
    assert found.against.kld_percentiles["99.9"] == found.kld.value == 0.25  # type: ignore[union-attr]


def test_short_texts_have_a_caution(four: Estimates) -> None:
    (said,) = estimates.short_text_cautions([four, four], 4)
    assert said.startswith("the scored part spans 4 tokens: ")
    longer = summarize({"logprob": np.full(2, -1, np.float32)}, np.array([1, 20_000]), np.array([1, 2]))
    assert estimates.short_text_cautions([longer], 20_000) == []


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0])
def test_a_constant_has_no_correlation(value: float) -> None:
    """The standard deviation of ten times 0.1 is 1.4e-17, not 0."""
    constant, other = np.full(10, value), np.arange(10.0)
    assert correlation(constant, other) is None
    assert correlation(other, constant) is None
    assert correlation(other, -2 * other) == pytest.approx(-1)


def test_non_finite_scores() -> None:
    """Positions 0, 1 and 4 have both log-probabilities; KLD and entropy take whatever is finite.  ref_ppl is of the
    same three as the ratio, so that it is PPL(Q) / ratio and PPL(Q) - difference."""
    columns = {
        "logprob": np.array([-1.0, -2.0, -np.inf, np.nan, -3.0], np.float32),
        "entropy": np.array([0.5, 1.0, 1.5, np.nan, 2.0], np.float32),
        "top1": np.array([True, False, False, True, True]),
        "ref_logprob": np.array([-1.0, -1.5, -2.0, -np.inf, -2.0], np.float32),
        "ref_top1_logprob": np.array([-0.1, -0.1, -0.1, -np.inf, np.nan], np.float32),
        "kld": np.array([0.25, 0.5, np.inf, np.nan, 0.0], np.float32),
        "same_top": np.array([True, False, True, True, False]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = summarize(columns, np.arange(5), np.arange(1, 6))
    assert (found.ppl.value, found.ppl.tokens, found.ppl.non_finite) == (pytest.approx(math.exp(2)), 3, 2)
    for of, value, tokens, left in (
        (found.kld, 0.25, 3, 2), (found.entropy, 1.25, 4, 1), (found.top1, 2 / 3, 3, 2), (found.same_top, 1 / 3, 3, 2),
    ):  # fmt: skip
        assert of is not None
        assert (of.value, of.tokens, of.non_finite) == (pytest.approx(value), tokens, left)
    assert found.against is not None
    ref_ppl, ratio = found.against.ref_ppl, found.against.ln_ppl_ratio
    assert (ref_ppl.value, ref_ppl.tokens, ref_ppl.non_finite) == (pytest.approx(math.exp(1.5)), 3, 2)
    assert (ratio.value, ratio.tokens, ratio.non_finite) == (pytest.approx(0.5), 3, 2)
    assert found.against.ppl_difference.value == pytest.approx(math.exp(2) - math.exp(1.5))
    assert found.against.kld_percentiles["max"] == 0.5
    assert [b.share for b in found.against.confidence] == [0, 0, 0, 0.6, 0]
    assert (found.against.confidence[3].kld.tokens, found.against.confidence[3].kld.non_finite) == (2, 1)


def test_nothing_finite() -> None:
    columns = {name: np.full(3, np.nan, np.float32) for name in ("logprob", "ref_logprob", "ref_top1_logprob", "kld")}
    columns["same_top"] = np.array([True, False, True])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = summarize(columns, np.arange(3), np.arange(1, 4), (9.0, 2.0))
    against = found.against
    assert against is not None
    assert (found.ppl.value, against.ref_ppl.value, against.ln_ppl_ratio.value, against.kld.value) == (None,) * 4
    assert (against.ppl_ratio, against.ppl_difference, against.delta_p_rms) == (Value(None),) * 3
    assert (against.correlation, against.kld_percentiles, found.rates, found.blocks.whole) == (None, {}, None, ())


def test_same_top_needs_both_models() -> None:
    """Where the reference is nan, its most probable token is not known; top1 does not ask it."""
    columns = four_tokens()
    columns["ref_logprob"][0] = np.nan
    found = summarize(columns, QUARTERS, QUARTERS)
    assert found.same_top is not None
    assert found.top1 is not None
    assert (found.same_top.value, found.same_top.tokens, found.same_top.non_finite) == (pytest.approx(2 / 3), 3, 1)
    assert (found.top1.value, found.top1.tokens) == (0.5, 4)


def test_estimates_are_numbers_and_tuples(four: Estimates) -> None:
    """As results.json needs them: no numpy type among them."""

    def check(value: object) -> None:
        if isinstance(value, dict):
            for each in value.values():
                check(each)
        elif isinstance(value, tuple):
            for each in value:
                check(each)
        else:
            assert type(value) in (int, float, str, bool, type(None)), repr(value)

    check(asdict(four))
    assert estimates.summarize(four_tokens(), QUARTERS, QUARTERS, (16.0, 2.0)) == four
