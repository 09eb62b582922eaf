"""Statistics of a model alone and compared with its reference, computed by hand for four tokens.

Also from missing, non-finite, constant or too few scores; sums over blocks, and the paired
differences of two models.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from compare_q.eval.stats.block_sums import (
    BlockSums,
    block_sums,
    paired_difference,
    short_text_cautions,
)
from compare_q.eval.stats.row_statistics import Average, RowStatistics, averages_of, statistics_of
from compare_q.eval.stats.spread_windows import sampling_errors
from compare_q.eval.stats.uncertainty import Value, assign_blocks

LN2 = math.log(2)
QUARTERS = np.arange(1, 5)
"""Positions of four tokens in the text.  They form three blocks, {1, 2}, {3}, {4}, and therefore
two cosines.

If the blocks' sums deviate from their mean by u, v, w, the first cosine is cos 30° (u - w), and the
second is u / 2 - v + w / 2 = -3/2 v.  With 0.6 = 12,000 / 20,000, their weights are 1 + 0.6 and 1 +
0.6 * 4: error^2 = 1/2 (2 * 3/4 (u - w)^2 * 1.6 + 2 * 9/4 v^2 * 3.4) / 4^2 = (1.2 (u - w)^2 + 7.65
v^2) / 16."""


def four_tokens() -> dict[str, np.ndarray]:
    """Probabilities 1/2, 1/4, 1/8, 1/4 of the model and 1/2, 1/2, 1/4, 1/8 of the reference: in
    units of ln 2, losses 1, 2, 3, 2 (mean 2) and 1, 1, 2, 3 (mean 7/4).
    """
    return {
        "logprob": np.log(np.array([1 / 2, 1 / 4, 1 / 8, 1 / 4])).astype(np.float32),
        "entropy": np.array([0.5, 1.0, 1.5, 1.0], np.float32),
        "top1": np.array([True, False, False, True]),
        "ref_logprob": np.log(np.array([1 / 2, 1 / 2, 1 / 4, 1 / 8])).astype(np.float32),
        "ref_top1_logprob": np.log(np.array([0.6, 0.6, 0.3, 0.97])).astype(np.float32),
        "kld": np.array([0.25, 0.5, 1.0, 0.25], np.float32),
        "same_top": np.array([True, False, True, True]),
    }


def is_near(average: Average, value: float, stderr: float, independent: float) -> bool:
    """Return True if an average and its errors have these values, to seven digits of float32."""
    values = (average.value, average.stderr, average.stderr_independent)
    return values == pytest.approx((value, stderr, independent), rel=1e-6, abs=1e-7)


@pytest.fixture
def averages() -> dict[str, Average]:
    """The averages of the four tokens, as a text of 16 bytes and 2 words."""
    return averages_of(four_tokens(), assign_blocks(QUARTERS), (16.0, 2.0))


@pytest.fixture
def row() -> RowStatistics:
    """The statistics of the four tokens, as a text of 16 bytes and 2 words."""
    return statistics_of(four_tokens(), assign_blocks(QUARTERS), QUARTERS, (16.0, 2.0))


def test_perplexity(averages: dict[str, Average], row: RowStatistics) -> None:
    """2 ** 2.  The losses deviate from their mean by -1, 0, 1, 0: the independent error is root(2 /
    4 / 3).  The blocks' sums 3, 3, 2 deviate by -1, 1, 0: the error is root(1.2 + 7.65) / 4.  Both
    are multiplied by 4 ln 2.
    """
    stderr = math.sqrt(8.85) * LN2
    independent = 4 * LN2 / math.sqrt(6)
    assert is_near(averages["ppl"], 4, stderr, independent)
    assert row.ppl == pytest.approx(4)
    assert row.ppl_stderr == pytest.approx(stderr)
    assert row.ppl_stderr_independent == pytest.approx(independent)
    assert (row.tokens, row.non_finite) == (4, 0)
    assert row.logprob_sum == pytest.approx(-8 * LN2)


def test_paired_error_is_llamacpp_s(averages: dict[str, Average], row: RowStatistics) -> None:
    """root(SE(a)^2 + SE(b)^2 - 2 Cov), Cov = (mean ab - mean a mean b) / (n - 1) = (15/4 - 7/2) / 3
    ln2^2; the correlation is Cov / (SE(a) SE(b)) = (1/12) / root(1/6 * 2.75/12).  The error of
    PPL(Q) - PPL(ref) has the same formula with PPL * SE.
    """
    se_a = math.sqrt(1 / 6) * LN2
    # The reference's losses deviate by -3/4, -3/4, 1/4, 5/4: their squares have the sum 2.75.
    se_b = math.sqrt(2.75 / 12) * LN2
    covariance = LN2**2 / 12
    paired = math.sqrt(se_a**2 + se_b**2 - 2 * covariance)
    assert averages["ln_ppl_ratio"].stderr_independent == pytest.approx(paired, rel=1e-6)
    assert row.correlation == pytest.approx(covariance / (se_a * se_b), rel=1e-6)
    assert row.correlation == pytest.approx(1 / math.sqrt(5.5), rel=1e-6)
    # PPL(Q) is 2^2 and PPL(ref) 2^(7/4): exp has these slopes at the mean losses.
    a = 4 * se_a
    b = 2**1.75 * se_b
    error = math.sqrt(a**2 + b**2 - 2 * 4 * 2**1.75 * covariance)
    assert averages["ppl_difference"].stderr_independent == pytest.approx(error, rel=1e-6)


def test_kld(averages: dict[str, Average], row: RowStatistics) -> None:
    """The values deviate from their mean 1/2 by -1/4, 0, 1/2, -1/4: the independent error is
    root(.375 / 4 / 3).  The blocks' sums .75, 1, .25 deviate by -1/4, 1/2, -1/4: the error is
    root(7.65 / 4) / 4.  In sorted order (1/4, 1/4, 1/2, 1), the quantile p has the index 3 p.
    """
    assert is_near(averages["kld"], 0.5, math.sqrt(1.9125) / 4, math.sqrt(0.03125))
    percentiles = {
        "min": 0.25,
        "0.1": 0.25,
        "1": 0.25,
        "5": 0.25,
        "10": 0.25,
        "25": 0.25,
        "50": 0.375,
        "75": 0.625,
        "90": 0.85,
        "95": 0.925,
        "99": 0.985,
        "99.9": 0.9985,
        "max": 1.0,
    }
    assert row.kld_percentiles == pytest.approx(percentiles)
    parts = (row.kld_median, row.kld_p99, row.kld_p99_9, row.kld_max)
    assert parts == pytest.approx((0.375, 0.985, 0.9985, 1.0))


def test_a_row_without_a_reference_sets_no_field_that_needs_one() -> None:
    columns = {"logprob": np.full(4, -1, np.float32)}
    row = statistics_of(columns, assign_blocks(QUARTERS), QUARTERS)
    assert set(row.computed()) == {
        "ppl",
        "ppl_stderr",
        "ppl_stderr_independent",
        "logprob_sum",
        "tokens",
        "non_finite",
        "blocks",
        "curve",
    }


def test_difference_of_two_models() -> None:
    """Blocks of 2 and 3 entries have the KLD sums 2, 6 in one model and 1, 2 in the other.  The
    sums differ by 1 and 4, the mean difference is 1, and the deviations are 1 - 2 and 4 - 3.  The
    only cosine is cos 45° * (-1 - 1); its square is 2, so that the error is root(2 * 2 * 1.6) / 5.
    If the models are exchanged, the difference has the other sign.
    """
    a = BlockSums((2, 3), (0.0, 0.0), kld=(2.0, 6.0), whole=("nll", "kld"))
    b = BlockSums((2, 3), (0.0, 0.0), kld=(1.0, 2.0), whole=("nll", "kld"))
    error = pytest.approx(math.sqrt(6.4) / 5)
    assert paired_difference(a, b, "kld") == Value(1, error)
    assert paired_difference(b, a, "kld") == Value(-1, error)
    assert paired_difference(a, a, "kld") == Value(0, 0)


@pytest.mark.parametrize(
    ("text", "part", "advice"),
    [
        (None, "4 tokens", "take a longer text"),
        (4, "4 tokens", "take a longer text"),
        (5, "4 tokens of a text of 5", "take a longer text"),
        # A text of 20,000 tokens or more is long enough itself: more of its windows are.
        (27_324, "4 tokens of a text of 27,324", "score more windows (-r, max_rows)"),
    ],
)
def test_short_texts_have_a_caution(text: int | None, part: str, advice: str) -> None:
    four = block_sums(four_tokens(), assign_blocks(QUARTERS))
    # The span counts, with gaps between windows: these two tokens span exactly 20,000.
    ends = assign_blocks(np.array([1, 20_000]))
    longer = block_sums({"logprob": np.full(2, -1, np.float32)}, ends)
    # Two rows on the same four tokens share one caution.
    assert short_text_cautions([four, longer, four], text) == [
        f"the scored part spans {part}: with less than 20,000, errors (±) may be far too small; "
        f"{advice}"
    ]


def test_non_finite_scores() -> None:
    """Positions 0, 1 and 4 have both log-probabilities.  KLD and entropy are means of their finite
    values.  ref_ppl and the ratio use the same three positions, so that ref_ppl equals PPL(Q) /
    ratio and PPL(Q) - difference.
    """
    columns = {
        # Position 2 is infinite in the model alone; 3 has no number at all; 4 lacks only the
        # reference's highest probability, which none of these means needs.
        "logprob": np.array([-1.0, -2.0, -np.inf, np.nan, -3.0], np.float32),
        "entropy": np.array([0.5, 1.0, 1.5, np.nan, 2.0], np.float32),
        "top1": np.array([True, False, False, True, True]),
        "ref_logprob": np.array([-1.0, -1.5, -2.0, -np.inf, -2.0], np.float32),
        "ref_top1_logprob": np.array([-0.1, -0.1, -0.1, -np.inf, np.nan], np.float32),
        "kld": np.array([0.25, 0.5, np.inf, np.nan, 0.0], np.float32),
        "same_top": np.array([True, False, True, True, False]),
    }
    assignment = assign_blocks(np.arange(5))
    # numpy warns of sums with infinities; such a warning would reach the user's terminal.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averages = averages_of(columns, assignment)
        row = statistics_of(columns, assignment, np.arange(1, 6))
    expected = {
        "ppl": (math.exp(2), 3, 2),
        "kld": (0.25, 3, 2),
        "entropy": (1.25, 4, 1),
        "top1": (2 / 3, 3, 2),
        "same_top": (1 / 3, 3, 2),
        "ref_ppl": (math.exp(1.5), 3, 2),
        "ln_ppl_ratio": (0.5, 3, 2),
    }
    for name, (value, tokens, non_finite) in expected.items():
        average = averages[name]
        assert average.value == pytest.approx(value), name
        assert (average.tokens, average.non_finite) == (tokens, non_finite), name
    assert averages["ppl_difference"].value == pytest.approx(math.exp(2) - math.exp(1.5))
    assert (row.kld_tokens, row.kld_non_finite, row.ref_ppl_tokens) == (3, 2, 3)
    assert row.kld_percentiles["max"] == 0.5


def test_same_top_needs_both_models() -> None:
    """If the reference is NaN, its most probable token is not known; top1 does not need the
    reference.
    """
    columns = four_tokens()
    columns["ref_logprob"][0] = np.nan
    averages = averages_of(columns, assign_blocks(QUARTERS))
    same_top = averages["same_top"]
    assert same_top.value == pytest.approx(2 / 3)
    assert (same_top.tokens, same_top.non_finite) == (3, 1)
    top1 = averages["top1"]
    assert (top1.value, top1.tokens) == (0.5, 4)


def test_what_windows_say_of_the_text() -> None:
    """3 of a text's 4 windows are scored, with 2 tokens each, and not in text order.  In text order
    their sums are 2, 6, 4.  Neighbours (lag 1, the largest for 3 windows) differ by 4 and 2, so
    that the squared error is 3 * 10 / 2 * 1/4, divided by 6^2.
    """
    window = np.array([0, 0, 1, 1, 2, 2])
    starts = (0, 20, 10)
    kld = np.array([1.0, 1, 2, 2, 3, 3], np.float32)
    expected = pytest.approx(math.sqrt(3 * 10 / 2 / 4) / 6)
    errors = sampling_errors({"logprob": -kld, "kld": kld}, window, starts, 4)
    assert (errors.nll, errors.kld) == (expected, expected)
    # One infinite score makes the error unknown; this row has no KLD at all.
    infinite = np.where(window == 0, -np.inf, -kld)
    errors = sampling_errors({"logprob": infinite}, window, starts, 4)
    assert (errors.nll, errors.kld) == (None, None)
