"""Means of per-token scores, and their errors.  Uses only numpy; sums and counts are divided once,
at the end.

A text's tokens are not independent: windows overlap, so that a token is scored several times, and
an easy article is easy for thousands of tokens.  Every entry is therefore assigned to one of G = 30
disjoint blocks of the text by the place of its token (``assign_blocks``).  With u_g = sum of y -
m * entries over block g, the mean m of a score y over N entries has

    stderr ** 2 = 1 / B * sum over j = 1 .. B of p_j * (1 + M * j ** 2 / tokens of text) / N ** 2
    M = AUTOCORRELATION_TOKENS
    p_j = 2 * (sum over g of u_g * cos(pi * j * (g + 1/2) / G)) ** 2

and m ± t(0.975, B) stderr is a 95 % interval (``low_frequency_error``; blocks that hold no entry
are left out).  This is the estimator of Lazarus, Lewis, Stock and Watson (J. Business & Economic
Statistics 36, 2018) from the B cosines of lowest frequency, times a factor.  Changes of the mean
over a text are in its low frequencies; the noise of single tokens is in all frequencies.  (With all
cosines, B = G - 1, and without the factor, this would be the clustered estimator of Liang and
Zeger, Biometrika 73, 1986.)  If a score has an autocorrelation time of tau tokens, its component of
frequency f is 1 + (2 pi f tau) ** 2 times smaller than its component of frequency 0, which is the
error of the mean.  The factor corrects this, for an autocorrelation time that grows as the root of
the text's length.  In the factor, a text of less than 20,000 tokens counts as one of 20,000.  B =
root(tokens of text / 30,000), rounded down, at least 4, at most 16: the error itself is known to 35
% (4 cosines) or better.

The lengths of documents cannot be found from the scores of a text: a text that is a single document
shows no change.  The rule is therefore fixed, and ``longest_documents`` returns the longest
documents that it holds for.  docs/statistics.md and results/coverage.md list how often intervals
cover on simulated texts (``benchmarks/coverage.py``) and on real texts.

Functions of means (perplexity, ratios) have the error of their linear approximation.
``stderr_independent`` is llama.cpp's error, sqrt((mean y^2 - m^2) / (N - 1)), which takes entries
as independent: it is several times too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

Array = NDArray[Any]
Columns = Mapping[str, Array]
"""Scores of a model's scored tokens by name (``StoredScores.columns``), [N] each."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A count as results.json has it; larger integers are not exact in other readers."""
Error = Annotated[float, Field(ge=0)]
"""A number that is never below 0, such as a standard error."""

LARGEST_EXPONENT = math.log(1.7e308)
FEWEST_BLOCKS = 3
MOST_BLOCKS = 30
SMALLEST_BLOCK = 100
"""A text is cut into blocks of at least ``SMALLEST_BLOCK`` tokens, within these two limits of their
number."""
FEWEST_WAVES = 4
MOST_WAVES = 16
TOKENS_PER_SQUARED_WAVE = 30_000
"""Errors come from root(tokens of text / TOKENS_PER_SQUARED_WAVE) cosines, within the two limits,
and fewer than the blocks."""
LEAST_BLOCKS = FEWEST_WAVES + 1
"""Minimum number of blocks of the text in a part of its tokens that has an error; the error is then
known to 35 % or better."""
AUTOCORRELATION_TOKENS = 12_000
"""With this value the intervals of simulated texts cover (``benchmarks/coverage.py``)."""
SHORT = 20_000
"""Tokens: a shorter text is treated as one of this length, and a caution is shown."""
TAIL_PROBABILITY = 0.025
"""Probability beyond each end of a 95 % interval."""


@dataclass(frozen=True)
class BlockAssignment:
    """The block of each entry (``block`` [N]).

    ``length``: number of tokens of the text that the blocks cover, each counted once.
    """

    block: Array
    length: int


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(-logprob_sum / tokens).

    None if nothing finite was scored, or if it overflows.  ``tokens`` counts the finite
    log-probabilities (nats) that are in the sum; ``non_finite`` those left out of it.  Errors: one
    standard error; None with one block, or one token.
    """

    value: Annotated[float, Field(gt=0)] | None
    logprob_sum: float
    tokens: Count
    non_finite: Count
    stderr: Error | None = None
    stderr_independent: Error | None = None


@dataclass(frozen=True)
class Mean:
    """``value`` = total / tokens; None if no entry was finite.

    ``non_finite`` counts the entries left out of both.
    """

    value: float | None
    total: float
    tokens: Count
    non_finite: Count
    stderr: Error | None = None
    stderr_independent: Error | None = None


@dataclass(frozen=True)
class Value:
    """A function of means, with the error of its linear approximation."""

    value: float | None
    stderr: Error | None = None
    stderr_independent: Error | None = None


def assign_blocks(
    index: Array,
    begin: Array | None = None,
    text: NDArray[np.integer[Any]] | None = None,
) -> BlockAssignment:
    """Return the blocks of entries from their tokens' indices [N] in the text, in any order and
    with any gaps.

    The length is counted from the first to the last scored token, including gaps between windows.
    ``begin`` [N]: where the conversation of each entry begins in the text; a whole conversation is
    then in the block of its first token.  ``text`` [N]: number of the text of each entry; the texts
    then share the blocks by their lengths, at least one for each, so that no block spans two texts,
    and the length is the sum of their lengths.
    """
    place = index
    if begin is not None:
        place = begin
    members = [np.ones(len(index), np.bool_)]
    if text is not None:
        members = [text == number for number in np.unique(text)]
    lengths = [length_of(index[member]) for member in members]
    total = sum(lengths)
    n_blocks = min(max(total // SMALLEST_BLOCK, FEWEST_BLOCKS), MOST_BLOCKS)
    shares = shares_of(lengths, n_blocks)
    block = np.zeros(len(index), np.int64)
    first_block = 0
    for member, length, share in zip(members, lengths, shares, strict=True):
        if not length:
            continue
        # A conversation may begin before the first token that is scored.
        offset = np.maximum(place[member].astype(np.int64) - int(index[member].min()), 0)
        block[member] = first_block + offset * share // length
        first_block += share
    return BlockAssignment(block, total)


def length_of(index: Array) -> int:
    """Return the number of tokens from the first to the last of these indices in a text."""
    if not len(index):
        return 0
    return int(index.max()) - int(index.min()) + 1


def shares_of(lengths: Sequence[int], count: int) -> list[int]:
    """Return how many of ``count`` blocks each text gets.

    The shares are proportional to the lengths, by largest remainder, and at least one.
    """
    total = max(sum(lengths), 1)
    shares = [max(length * count // total, 1) for length in lengths]
    by_remainder = sorted(
        range(len(lengths)), key=lambda number: -(lengths[number] * count % total)
    )
    # Texts that got one block for less than one may have used up all of them.
    n_unassigned = max(count - sum(shares), 0)
    for number in by_remainder[:n_unassigned]:
        shares[number] += 1
    return shares


def longest_documents(length: int) -> int:
    """Return how long the documents of a text of ``length`` tokens may be, in tokens, two digits.

    If they are longer, the errors are too small.  The limit is for the length of a token's
    document, averaged over the tokens of the text: a long document counts once for each of its
    tokens.

    The limit is a tenth of the text, at least 10,000 tokens.  In simulated texts below it, 95 %
    intervals hold the true mean in 94.7 % or more of texts of 60,000 to 1,000,000 tokens, and in
    92.5 % or more of texts of 4,000 and 16,000 (docs/statistics.md, results/coverage.md).
    """
    longest = max(length // 10, 10_000)
    # Rounded down to two significant digits.
    unit = int(10 ** (len(str(longest)) - 2))
    return longest // unit * unit


def n_waves(groups: int, length: int) -> int:
    """Return the number of cosines in errors over ``groups`` blocks: their degrees of freedom."""
    waves = math.isqrt(length // TOKENS_PER_SQUARED_WAVE)
    return min(max(waves, FEWEST_WAVES), MOST_WAVES, groups - 1)


def low_frequency_error(total: Array, tokens: Array, length: int) -> float | None:
    """Return the standard error of sum(total) / sum(tokens), from sums and counts [G] of a text's
    blocks.

    It comes from cosines of low frequency over the blocks: the formula is at the top of this file,
    and comments here name its symbols.  ``length``: tokens of the text.  None for fewer than two
    blocks, and if the error overflows.
    """
    has_entries = tokens > 0
    total = total[has_entries].astype(np.float64)
    tokens = tokens[has_entries]
    groups = len(tokens)  # G
    n = tokens.sum()  # N
    if groups < 2:
        return None
    wave = np.arange(1, n_waves(groups, length) + 1)  # j = 1 .. B
    cosines = np.cos(np.pi * wave[:, None] * (np.arange(groups) + 0.5) / groups)
    # Losses near the largest float square to infinity: that error is None.
    with np.errstate(over="ignore", invalid="ignore"):
        mean = total.sum() / n  # m
        deviations = total - mean * tokens  # u_g
        squares = 2 * (cosines @ deviations) ** 2  # p_j
        factors = 1 + AUTOCORRELATION_TOKENS * wave**2 / max(length, SHORT)
        square = float(np.mean(squares * factors))
    if not math.isfinite(square):
        return None
    return math.sqrt(square) / float(n)


def sampling_error(total: Array, tokens: Array, available: float) -> float | None:
    """Return the standard error of sum(total) / sum(tokens) as the mean of all ``available``
    windows of a text, which may be infinite; None for fewer than two windows.

    ``total``, ``tokens``: sums and counts [n] of windows that are spread over the text, in the
    text's order.

    From the differences of neighbours, with the finite population correction (Wolter, Introduction
    to Variance Estimation, 2007, estimator 2 for systematic samples).  If fewer windows are left
    out than taken, the compared neighbours are as far apart as the windows that are left out.
    """
    n = len(tokens)
    count = float(tokens.sum())
    if n < 2:
        return None
    if n >= available:
        return 0.0
    distance = min(max(round(n / (available - n)), 1), n // 2)
    deviations = total - total.sum() / count * tokens
    differences = deviations[distance:] - deviations[:-distance]
    square = n * float(np.mean(np.square(differences))) / 2 * (1 - n / available)
    if not math.isfinite(square):
        return None
    return math.sqrt(square) / count


def interval(
    value: float, stderr: float, freedom: int, tail: float = TAIL_PROBABILITY
) -> tuple[float, float]:
    """Return the interval, by default of 95 %, of an estimate whose error has ``freedom`` degrees
    of freedom (``n_waves``).

    ``tail``: the probability beyond each end.
    """
    reach = student_t(freedom, tail) * stderr
    return value - reach, value + reach


@cache
def student_t(freedom: int, tail: float = TAIL_PROBABILITY) -> float:
    """Return the value that Student's t exceeds with the probability ``tail``, below 1/2.

    By bisection of ``probability_within``.  ValueError for 0 degrees of freedom.
    """
    if freedom < 1:
        raise ValueError(f"an interval needs 1 degree of freedom or more, not {freedom}")
    low = 0.0
    high = math.pi / 2
    angle = (low + high) / 2
    # Until no float is between the two ends.
    while low < angle < high:
        if probability_within(angle, freedom) < 1 - 2 * tail:
            low = angle
        else:
            high = angle
        angle = (low + high) / 2
    return math.sqrt(freedom) * math.tan(low)


def probability_within(angle: float, freedom: int) -> float:
    """Return the probability that abs(t) is below root(freedom) * tan(angle), for Student's t.

    The closed forms for odd and even degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4).
    """
    odd = freedom % 2
    total = 0.0
    term = math.cos(angle) ** odd
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    within = math.sin(angle) * total
    if odd:
        return (angle + within) * 2 / math.pi
    return within


def mean_with_errors(
    values: Array,
    mask: NDArray[np.bool_] | None = None,
    assignment: BlockAssignment | None = None,
) -> Mean:
    """Return the mean of numbers [N], summed in float64, over the finite ones.

    ``mask`` [N]: only where it is True.
    """
    used = np.isfinite(values)
    if mask is not None:
        used = used & mask
    used_values = values[used].astype(np.float64)
    total = float(used_values.sum())
    tokens = len(used_values)
    if not tokens:
        return Mean(None, total, 0, len(used))
    with np.errstate(over="ignore"):
        variance = float(used_values.var())
    independent = None
    if tokens > 1 and math.isfinite(variance):
        independent = math.sqrt(variance / (tokens - 1))
    error = None
    if assignment is not None:
        block = assignment.block[used]
        sums = np.bincount(block, used_values)
        error = low_frequency_error(sums, np.bincount(block), assignment.length)
    return Mean(total / tokens, total, tokens, len(used) - tokens, error, independent)


def exp_mean(mean: Mean | Value, sign: int = 1) -> Value:
    """Return exp(sign * mean) with its errors; None if it overflows."""
    if mean.value is None or sign * mean.value > LARGEST_EXPONENT:
        return Value(None)
    value = math.exp(sign * mean.value)
    return with_errors(value, mean, lambda error: value * error)


def perplexity(logprob: Mean) -> Perplexity:
    """Return the perplexity of a mean log-probability."""
    ppl = exp_mean(logprob, -1)
    return Perplexity(
        ppl.value,
        logprob.total,
        logprob.tokens,
        logprob.non_finite,
        ppl.stderr,
        ppl.stderr_independent,
    )


def root_of_mean(squares: Mean) -> Value:
    """Return the root of a mean of squares.

    Its error is the error of the mean / (2 root), and None at 0.
    """
    if not squares.value:
        return Value(squares.value)
    value = math.sqrt(squares.value)
    return with_errors(value, squares, lambda error: error / (2 * value))


def with_errors(value: float, mean: Mean | Value, change: Callable[[float], float]) -> Value:
    """Return a function's ``value`` at a mean, with the mean's errors after ``change``.

    An error that overflows is None.
    """
    errors: list[float | None] = []
    for error in (mean.stderr, mean.stderr_independent):
        changed = None
        if error is not None:
            changed = change(error)
            if not math.isfinite(changed):
                changed = None
        errors.append(changed)
    return Value(value, *errors)
