"""Means, their errors and intervals, computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compare_q.eval.stats.uncertainty import (
    BlockAssignment,
    assign_blocks,
    low_frequency_error,
    mean_with_errors,
    sampling_error,
    shares_of,
    student_t,
)

LONG = 10**18
"""Tokens of a text that is so long that autocorrelation does not widen its errors."""


def at(*blocks: int) -> BlockAssignment:
    """Return entries in these blocks of a long text."""
    return BlockAssignment(np.array(blocks), LONG)


def test_a_conversation_is_in_one_block() -> None:
    """Conversations begin at 0, 4 and 5 of 12 tokens; the first two are not scored: blocks have 3.3
    tokens.
    """
    # The first conversation begins before the first scored token: its offset would be -2.
    assignment = assign_blocks(np.array([2, 3, 4, 5, 9, 11]), np.array([0, 0, 4, 5, 5, 5]))
    assert assignment.block.tolist() == [0, 0, 0, 0, 0, 0]
    assert assignment.length == 10
    # Conversations as long as the shortest block, 100 tokens: each has a block of its own.
    assignment = assign_blocks(np.arange(2, 302), np.repeat([2, 102, 202], 100))
    assert assignment.block.tolist() == [0] * 100 + [1] * 100 + [2] * 100


def test_no_block_spans_two_texts() -> None:
    """400 tokens have 4 blocks: 3 of the text of 300 tokens, and 1 of the text of 100."""
    index = np.concatenate([np.arange(300), np.arange(100)])
    assignment = assign_blocks(index, text=np.repeat([0, 1], [300, 100]))
    assert assignment.block.tolist() == [0] * 100 + [1] * 100 + [2] * 100 + [3] * 100
    assert assignment.length == 400


def test_texts_share_the_blocks_by_their_lengths() -> None:
    """10 blocks of 7, 2 and 1 tokens: 7, 2, 1; of 5, 3 and 3: 4.5, 2.7, 2.7, so the remainders .7
    and .7 get two.
    """
    assert shares_of([7, 2, 1], 10) == [7, 2, 1]
    assert shares_of([5, 3, 3], 10) == [4, 3, 3]
    # By length the short text would have 0.01 blocks, and its tokens would share another text's
    # block.
    assert shares_of([1000, 1], 10) == [9, 1]


def test_a_token_is_in_one_block_whatever_window_scored_it() -> None:
    """Two windows score tokens 1 to 7 and 5 to 11, 11 tokens in all; blocks begin at 1, 5 (4 * 3 //
    11 = 1) and 9.
    """
    index = np.array([1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10, 11])
    assert assign_blocks(index).block.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("length", "count"),
    [
        # With fewer tokens than the minimum of 3 blocks, the last blocks stay empty.
        (1, 1),
        (2, 2),
        (3, 3),
        (399, 3),
        (400, 4),
        (2999, 29),
        (3000, 30),
        (40_000_000, 30),
    ],
)
def test_number_of_blocks(length: int, count: int) -> None:
    """One block per 100 tokens, 3 to 30 blocks, and at most one per token; the last token is in the
    last block.
    """
    # Blocks count from the first scored token, so that any first index gives the same blocks.
    assert assign_blocks(np.array([7, 7 + length - 1])).block.tolist() == [0, count - 1]


def test_error_of_two_blocks() -> None:
    """Sums 2 and 10 of 2 and 3 entries have the mean 2.4 and deviate by 2 - 4.8 = -2.8 and 10 - 7.2
    = 2.8.  The only cosine is cos 45° * -5.6, and twice its square is 5.6^2.  This is multiplied by
    1 + 0.1 for 120,000 tokens, and by 1 + 0.6 for 20,000 or fewer.
    """
    sums = np.array([2.0, 10.0])
    counts = np.array([2, 3])
    # 5.6 / 5 entries. For LONG the factor exceeds 1 by 12,000 / 10^18, which a float does not hold.
    assert low_frequency_error(sums, counts, LONG) == pytest.approx(1.12, rel=1e-12)
    assert low_frequency_error(sums, counts, 120_000) == pytest.approx(
        1.12 * math.sqrt(1.1), rel=1e-12
    )
    assert low_frequency_error(sums, counts, 20_000) == pytest.approx(
        1.12 * math.sqrt(1.6), rel=1e-12
    )
    # 12,000 / 20,000 = 0.6, also for 5 tokens: a shorter text counts as one of 20,000.
    assert low_frequency_error(sums, counts, 5) == pytest.approx(1.12 * math.sqrt(1.6), rel=1e-12)


def test_student() -> None:
    """The published quantiles, and other quantiles by integration of the density."""
    published = {
        1: 12.706,
        2: 4.303,
        3: 3.182,
        4: 2.776,
        7: 2.365,
        10: 2.228,
        14: 2.145,
        20: 2.086,
        29: 2.045,
    }
    assert {df: round(student_t(df), 3) for df in published} == published
    # Quantiles of the 99 % interval from the same published tables.
    assert [round(student_t(df, 0.005), 3) for df in (1, 2, 4, 15)] == [63.657, 9.925, 4.604, 2.947]
    for df in range(1, 31):
        # The smallest tail is that of the star for 40 rows: 0.05 for 39 comparisons with the best.
        for tail in (0.1, 0.025, 0.05 / 39):
            quantile = student_t(df, tail)
            scale = math.gamma((df + 1) / 2) / math.gamma(df / 2) / math.sqrt(df * math.pi)
            # Midpoints, for the integral by the midpoint rule.
            x = (np.arange(100_000) + 0.5) / 100_000 * quantile
            inside = 2 * scale * float(np.mean((1 + x * x / df) ** (-(df + 1) / 2))) * quantile
            assert inside == pytest.approx(1 - 2 * tail, abs=1e-6), (df, tail)


def test_mean_and_its_errors() -> None:
    """1, 2, 6 have the mean 3 and the mean squared deviation 14 / 3: the independent error is
    root(14 / 3 / 2).  The blocks {1, 2} and {6} deviate by -3 and 3: the error is root(2 * 18) / 3
    = 2.
    """
    mean = mean_with_errors(np.array([1, 2, 6], np.float32), None, at(0, 0, 1))
    assert (mean.value, mean.total, mean.tokens, mean.non_finite) == (3, 9, 3, 0)
    assert mean.stderr == pytest.approx(2, rel=1e-12)
    assert mean.stderr_independent == pytest.approx(math.sqrt(7 / 3), rel=1e-12)


def test_error_of_a_sample_of_windows() -> None:
    """Sums 1, 3, 2, 6 of 2 tokens each: neighbours differ by 2, 1, 4, with a mean square of 7, and
    4 * 7 / 2 = 14.
    """
    sums = np.array([1, 3, 2, 6])
    tokens = np.full(4, 2)
    # In an endless text the finite population correction is 1; with 4 of 8 windows it is 1 - 4/8.
    assert sampling_error(sums, tokens, 10**9) == pytest.approx(math.sqrt(14) / 8)
    assert sampling_error(sums, tokens, 8) == pytest.approx(math.sqrt(14 / 2) / 8)
    # All windows of the text were scored: there is nothing that a sample could miss.
    assert sampling_error(sums, tokens, 4) == 0
    assert sampling_error(sums[:1], tokens[:1], 8) is None


def test_windows_that_were_left_out_are_the_sparse_sample() -> None:
    """2 of 6 windows are left out, as far apart as every second of the 4 scored windows, which
    differ by 1 and 3.
    """
    # Deviations from 3 per window: -2, 0, -1, 3. At distance 2 they differ by 1 and 3: mean square
    # 5.
    error = sampling_error(np.array([1, 3, 2, 6]), np.full(4, 2), 6)
    assert error == pytest.approx(math.sqrt(4 * 5 / 2 * (1 - 4 / 6)) / 8)


def test_what_changes_slowly_is_in_every_spread_sample() -> None:
    """Every tenth of 160 windows with a trend is scored; independent windows would have 6 times the
    error.
    """
    trend = np.arange(0.0, 160, 10)
    error = sampling_error(trend, np.ones(16), 160)
    # Neighbours differ by 10: 16 * 10^2 / 2 * (1 - 16 / 160).
    assert error == pytest.approx(math.sqrt(16 * 100 / 2 * 0.9) / 16)
    # The standard deviation is 10 root((16^2 - 1) / 12) = 46.1: independent windows would have 46.1
    # root(0.9 / 16) = 10.9, which is 6.5 times 1.68.
    assert error < float(np.std(trend)) * math.sqrt(0.9 / 16) / 6


def test_mean_is_summed_in_float64() -> None:
    """In float32, 2 ** 24 + 1 + 1 is still 2 ** 24."""
    values = np.array([2**24, 1, 1], np.float32)
    assert values.sum() == 2**24
    mean = mean_with_errors(values, None, BlockAssignment(np.zeros(3, np.int8), LONG))
    assert (mean.total, mean.value) == (2**24 + 2, (2**24 + 2) / 3)
