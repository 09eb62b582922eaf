"""Estimates of a model and against its reference, each worked out by hand for four tokens."""

from __future__ import annotations

import math

import pytest

from eval.stats.estimates import Estimates
from eval.stats.uncertainty import Mean
from tests.support.four_tokens import LN2, near


def test_perplexity(four: Estimates) -> None:
    """2 ** 2.  Losses off their mean by -1, 0, 1, 0: independent root(2 / 4 / 3); blocks' sums 3, 3, 2 off by -1, 1,
    0: root(1.2 + 7.65) / 4; both times 4 ln 2."""
    assert near(four.ppl, 4, math.sqrt(8.85) * LN2, 4 * LN2 / math.sqrt(6))
    assert (four.ppl.tokens, four.ppl.non_finite) == (4, 0)
    assert four.ppl.logprob_sum == pytest.approx(-8 * LN2)


def test_reference_perplexity(four: Estimates) -> None:
    """2 ** 1.75.  Off by -.75, -.75, .25, 1.25: squares 2.75, independent root(2.75 / 4 / 3); blocks' sums 2, 2, 3
    off by -1.5, .25, 1.25: root(1.2 * 2.75^2 + 7.65 / 16) / 4."""
    assert four.against is not None
    ppl = 2**1.75
    assert near(four.against.ref_ppl, ppl, ppl * LN2 * math.sqrt(9.553125) / 4, ppl * LN2 * math.sqrt(2.75 / 12))


def test_ratio_of_perplexities(four: Estimates) -> None:
    """Differences 0, 1, 1, -1: mean 1/4, mean square 3/4; independent root((3/4 - 1/16) / 3); blocks' sums 1, 1, -1
    off by .5, .75, -1.25: root(1.2 * 1.75^2 + 7.65 * .75^2) / 4.  The ratio is 2 ** (1/4), with that of them."""
    assert four.against is not None
    clustered, independent = LN2 * math.sqrt(7.978125) / 4, LN2 * math.sqrt(0.6875 / 3)
    assert near(four.against.ln_ppl_ratio, LN2 / 4, clustered, independent)
    assert near(four.against.ppl_ratio, 2**0.25, 2**0.25 * clustered, 2**0.25 * independent)


def test_paired_error_is_llamacpp_s(four: Estimates) -> None:
    """root(SE(a)^2 + SE(b)^2 - 2 Cov), Cov = (mean ab - mean a mean b) / (n - 1) = (15/4 - 7/2) / 3 ln2^2; the
    correlation is Cov / (SE(a) SE(b)) = (1/12) / root(1/6 * 2.75/12); PPL(Q) - PPL(ref) likewise from PPL SE."""
    assert four.against is not None
    se_a, se_b, covariance = math.sqrt(1 / 6) * LN2, math.sqrt(2.75 / 12) * LN2, LN2**2 / 12
    paired = math.sqrt(se_a**2 + se_b**2 - 2 * covariance)
    assert four.against.ln_ppl_ratio.stderr_independent == pytest.approx(paired, rel=1e-6)
    assert four.against.correlation == pytest.approx(covariance / (se_a * se_b), rel=1e-6)
    assert four.against.correlation == pytest.approx(1 / math.sqrt(5.5), rel=1e-6)
    a, b = 4 * se_a, 2**1.75 * se_b
    error = math.sqrt(a**2 + b**2 - 2 * 4 * 2**1.75 * covariance)
    assert four.against.ppl_difference.stderr_independent == pytest.approx(error, rel=1e-6)


def test_difference_of_perplexities(four: Estimates) -> None:
    """4 - 2 ** 1.75 = .6364143.  4 a - 3.3635857 b: .6364143, 4.6364143, 5.2728287, -2.0907570, mean 2.1137251.
    BlockSums' sums 5.2728287, 5.2728287, -2.0907570 off by 1.0453785, 3.1591036, -4.2044820: root(109.4198) / 4.
    Independent: off by -1.4773107, 2.5226893, 3.1591036, -4.2044820, root(36.2040 / 4 / 3)."""
    assert four.against is not None
    off = (-1.4773107, 2.5226893, 3.1591036, -4.2044820)
    clustered = math.sqrt(1.2 * (off[0] + off[1] - off[3]) ** 2 + 7.65 * off[2] ** 2) / 4
    independent = math.sqrt(math.fsum(each**2 for each in off) / 12)
    assert (clustered, independent) == pytest.approx((math.sqrt(109.4198) / 4, math.sqrt(36.2040 / 12)), rel=1e-5)
    assert near(four.against.ppl_difference, 0.63641434, clustered * LN2, independent * LN2)


def test_kld(four: Estimates) -> None:
    """Mean 1/2; off by -1/4, 0, 1/2, -1/4: independent root(.375 / 4 / 3); blocks' sums .75, 1, .25 off by -1/4,
    1/2, -1/4: root(7.65 / 4) / 4.  Sorted 1/4, 1/4, 1/2, 1: the percentile p lies at 3 p."""
    assert four.against is not None
    assert four.kld is four.against.kld
    assert near(four.kld, 0.5, math.sqrt(1.9125) / 4, math.sqrt(0.03125))
    assert four.against.kld_percentiles == pytest.approx(
        {"min": 0.25, "0.1": 0.25, "1": 0.25, "5": 0.25, "10": 0.25, "25": 0.25, "50": 0.375, "75": 0.625, "90": 0.85,
         "95": 0.925, "99": 0.985, "99.9": 0.9985, "max": 1.0}
    )  # fmt: skip
    histogram = four.against.kld_histogram
    assert {i: count for i, count in enumerate(histogram.counts) if count} == {59: 2, 61: 1, 64: 1}  # 8 (log10 + 8)


def test_change_of_probability(four: Estimates) -> None:
    """0, -1/4, -1/8, 1/8: mean -1/16, mean square 3/128.  Independent root((3/128 - 1/256) / 3); blocks' sums -1/4,
    -1/8, 1/8 off by -1/8, -1/16, 3/16: root(.1470703125) / 4.  Sorted -1/4, -1/8, 0, 1/8: the median is -1/16."""
    assert four.against is not None
    assert near(four.against.delta_p, -1 / 16, math.sqrt(0.1470703125) / 4, math.sqrt(5 / 768))
    found = four.against.delta_p_percentiles
    assert found["min"] == pytest.approx(-0.25)
    assert found["25"] == pytest.approx(-0.15625)
    assert found["50"] == pytest.approx(-0.0625)
    assert found["90"] == pytest.approx(0.0875)
    assert found["max"] == pytest.approx(0.125)


def test_rms_change_of_probability(four: Estimates) -> None:
    """Squares 0, 1/16, 1/64, 1/64: mean 3/128, mean square 9/8192.  Independent root((9/8192 - 9/16384) / 3);
    blocks' sums 1/16, 1/64, 1/64 off by 1/64, -1/128, -1/128: root(18.45 / 16384) / 4; both over 2 root(3/128)."""
    assert four.against is not None
    rms = math.sqrt(3 / 128)
    independent, clustered = math.sqrt(9 / 16384 / 3), math.sqrt(18.45 / 16384) / 4
    assert near(four.against.delta_p_rms, rms, clustered / (2 * rms), independent / (2 * rms))


def test_shares(four: Estimates) -> None:
    """Same top 3 of 4: root(3/4 * 1/4 / 3) = 1/4; blocks' sums 1, 1, 1 off by -1/2, 1/4, 1/4: root(1.153125) / 4.
    Top 1 in 2 of 4: root(1/4 / 3); sums 1, 0, 1 off by 0, -1/2, 1/2: root(8.85 / 4) / 4."""
    assert four.same_top is not None
    assert four.top1 is not None
    assert near(four.same_top, 0.75, math.sqrt(1.153125) / 4, 0.25)
    assert near(four.top1, 0.5, math.sqrt(2.2125) / 4, math.sqrt(1 / 12))


def test_entropy(four: Estimates) -> None:
    """1/2, 1, 3/2, 1: mean 1, independent root(1/2 / 4 / 3); sums 3/2, 3/2, 1 off by -1/2, 1/2, 0:
    root(8.85 / 4) / 4."""
    assert four.entropy is not None
    assert near(four.entropy, 1, math.sqrt(2.2125) / 4, math.sqrt(1 / 24))


def test_buckets_by_the_reference_s_confidence(four: Estimates) -> None:
    """.6 and .6: KLD 1/4 and 1/2, in one block, so that only the independent error, root(1/64 / 1), is known."""
    assert four.against is not None
    lowest, low, middle, high, highest = four.against.confidence
    assert [(b.low, b.high) for b in four.against.confidence] == [
        (0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 0.95), (0.95, 1),
    ]  # fmt: skip
    assert [b.share for b in four.against.confidence] == [0, 0.25, 0.5, 0, 0.25]
    assert (lowest.kld, lowest.median) == (high.kld, high.median) == (Mean(None, 0, 0, 0), None)
    assert (middle.kld, middle.median) == (Mean(0.375, 0.75, 2, 0, None, 0.125), 0.375)
    assert (low.kld, low.median) == (Mean(1, 1, 1, 0), 1)
    assert (highest.kld, highest.median) == (Mean(0.25, 0.25, 1, 0), 0.25)


def test_rates_over_bytes_and_words(four: Estimates) -> None:
    """8 ln 2 over 16 bytes: 1/2 bit each, perplexity 2 ** (1/2); over 2 words 2 ** 4.  Errors: those of the mean,
    root(8.85) / 4 and root(1/6) in bits a token, times 4 tokens over 16 bytes or 2 words."""
    rates = four.rates
    assert rates is not None
    clustered, independent = math.sqrt(8.85) / 4, math.sqrt(1 / 6)
    assert near(rates.bits_per_byte, 0.5, clustered / 4, independent / 4)
    root2 = math.sqrt(2)
    assert near(rates.byte_perplexity, root2, root2 * LN2 * clustered / 4, root2 * LN2 * independent / 4)
    assert near(rates.word_perplexity, 16, 16 * LN2 * clustered * 2, 16 * LN2 * independent * 2)
    assert (rates.n_bytes, rates.n_words) == (16, 2)
