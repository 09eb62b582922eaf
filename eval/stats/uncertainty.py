"""Means of per-token scores, and their errors.  Uses only numpy; sums and counts are divided once,
at the end.

A text's tokens are not independent: windows overlap, so that a token is scored several times, and
an easy article is easy for thousands of tokens.  Every entry is therefore assigned to one of G = 30
disjoint blocks of the text by the place of its token (``places_of``).  With u_g = sum of y - m *
entries over block g, the mean m of a score y over N entries has

    stderr ** 2 = 1 / B * sum over j = 1 .. B of p_j * (1 + MEMORY * j ** 2 / tokens of text) / N ** 2
    p_j = 2 * (sum over g of u_g * cos(pi * j * (g + 1/2) / G)) ** 2

and m ± t(0.975, B) stderr is a 95 % interval (``clustered_error``; blocks that hold no entry are
left out).  This is the estimator of Lazarus, Lewis, Stock and Watson (J. Business & Economic
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

Count = Annotated[int, Field(ge=0, le=2**53)]
"""A count as results.json has it; larger integers are not exact in other readers."""
Error = Annotated[float, Field(ge=0)]
"""A number that is never below 0, such as a standard error."""

LARGEST_EXPONENT = math.log(1.7e308)
FEWEST_BLOCKS, MOST_BLOCKS, LEAST_BLOCK = 3, 30, 100
"""A text is cut into blocks of at least ``LEAST_BLOCK`` tokens, within these two limits of their
number."""
FEWEST_WAVES, MOST_WAVES, UNIT = 4, 16, 30_000
"""Errors come from root(tokens of text / UNIT) cosines, within the two limits, and fewer than the
blocks."""
MEMORY = 12_000
"""Tokens; with this value the intervals of simulated texts cover (``benchmarks/coverage.py``)."""
SHORT = 20_000
"""Tokens: a shorter text is treated as one of this length, and a caution is shown."""
TAIL = 0.025
"""Probability beyond each end of a 95 % interval."""


@dataclass(frozen=True)
class Places:
    """Position of entries in a text: the block of each (``block`` [N]), and the tokens of all
    blocks (``length``).
    """

    block: NDArray[Any]
    length: int


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(-logprob_sum / tokens); None if nothing finite was scored, or if it
    overflows.

    ``tokens`` counts the finite log-probabilities (nats) that are in the sum; ``non_finite`` those
    left out of it.  Errors: one standard error; None with one block, or one token.
    """

    value: Annotated[float, Field(gt=0)] | None
    logprob_sum: float
    tokens: Count
    non_finite: Count
    stderr: Error | None = None
    stderr_independent: Error | None = None


@dataclass(frozen=True)
class Mean:
    """``value`` = total / tokens; None if no entry was finite.  ``non_finite`` counts the entries
    left out of both.
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


def places_of(
    index: NDArray[Any],
    begin: NDArray[Any] | None = None,
    text: NDArray[np.integer[Any]] | None = None,
) -> Places:
    """Return the blocks of entries from their tokens' indices [N] in the text, in any order and
    with any gaps.

    The length is counted from the first to the last scored token, including gaps between windows.
    ``begin`` [N]: where the conversation of each entry begins in the text; a whole conversation is
    then in the block of its first token.  ``text`` [N]: number of the text of each entry; the texts
    then share the blocks by their lengths, at least one for each, so that no block spans two texts,
    and the length is the sum of their lengths.
    """
    place = index if begin is None else begin
    members = [np.ones(len(index), np.bool_)]
    if text is not None:
        members = [text == number for number in np.unique(text)]
    lengths = [length_of(index[member]) for member in members]
    total = sum(lengths)
    count = min(max(total // LEAST_BLOCK, FEWEST_BLOCKS), MOST_BLOCKS)
    block = np.zeros(len(index), np.int64)
    first = 0
    for member, length, n_blocks in zip(members, lengths, shares_of(lengths, count), strict=True):
        if not length:
            continue
        offset = np.maximum(place[member].astype(np.int64) - int(index[member].min()), 0)
        block[member] = first + offset * n_blocks // length
        first += n_blocks
    return Places(block, total)


def length_of(index: NDArray[Any]) -> int:
    """Number of tokens from the first to the last of these indices in a text."""
    return int(index.max()) - int(index.min()) + 1 if len(index) else 0


def shares_of(lengths: Sequence[int], count: int) -> list[int]:
    """Return how many of ``count`` blocks each text gets: by their lengths, at least one, by
    largest remainder.
    """
    total = max(sum(lengths), 1)
    shares = [max(length * count // total, 1) for length in lengths]
    by_remainder = sorted(
        range(len(lengths)), key=lambda number: -(lengths[number] * count % total)
    )
    for number in by_remainder[: max(count - sum(shares), 0)]:
        shares[number] += 1
    return shares


def longest_documents(length: int) -> int:
    """Return the longest documents (two digits) that still leave intervals of ``length`` tokens a
    coverage of 94 %.

    This is the length of a token's document, averaged over the tokens of the text.
    """
    longest = max(length // 10, 10_000)
    unit = int(10 ** (len(str(longest)) - 2))
    return longest // unit * unit


def n_waves(groups: int, length: int) -> int:
    """Number of cosines in errors over ``groups`` blocks, which is their number of degrees of
    freedom.
    """
    return min(max(math.isqrt(length // UNIT), FEWEST_WAVES), MOST_WAVES, groups - 1)


def clustered_error(total: NDArray[Any], tokens: NDArray[Any], length: int) -> float | None:
    """Standard error of sum(total) / sum(tokens), from sums and counts [G] of a text's blocks.

    The formula is at the top of this file.  It is not the clustered estimator of Liang and Zeger.
    ``length``: tokens of the text.  None for fewer than two blocks, and if the error overflows.
    """
    total, tokens = total[tokens > 0].astype(np.float64), tokens[tokens > 0]
    groups, n = len(tokens), tokens.sum()
    if groups < 2:
        return None
    wave = np.arange(1, n_waves(groups, length) + 1)
    slow = np.cos(np.pi * wave[:, None] * (np.arange(groups) + 0.5) / groups)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = 2 * (slow @ (total - total.sum() / n * tokens)) ** 2
        square = float(np.mean(squares * (1 + MEMORY * wave**2 / max(length, SHORT))))
    return math.sqrt(square) / float(n) if math.isfinite(square) else None


def sampling_error(total: NDArray[Any], tokens: NDArray[Any], available: int) -> float | None:
    """Standard error of sum(total) / sum(tokens) as the mean of all ``available`` windows of a
    text, from sums and counts [n] of windows that are spread over it, in the text's order; None for
    fewer than two.

    From the differences of neighbours, with the finite population correction (Wolter, Introduction
    to Variance Estimation, 2007, estimator 2 for systematic samples).  If fewer windows are left
    out than taken, the compared neighbours are as far apart as the windows that are left out.
    """
    n, count = len(tokens), float(tokens.sum())
    if n < 2:
        return None
    if n >= available:
        return 0.0
    apart = min(max(round(n / (available - n)), 1), n // 2)
    off = total - total.sum() / count * tokens
    square = n * float(np.mean(np.square(off[apart:] - off[:-apart]))) / 2 * (1 - n / available)
    return math.sqrt(square) / count if math.isfinite(square) else None


def interval(value: float, stderr: float, freedom: int, tail: float = TAIL) -> tuple[float, float]:
    """Interval, by default of 95 %, of an estimate whose error has ``freedom`` degrees of freedom
    (``n_waves``).

    ``tail``: the probability beyond each end.
    """
    reach = student_t(freedom, tail) * stderr
    return value - reach, value + reach


@cache
def student_t(freedom: int, tail: float = TAIL) -> float:
    """The value that Student's t exceeds with the probability ``tail``, below 1/2; ValueError for 0
    degrees of freedom.

    By bisection of the closed forms for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and
    26.7.4).
    """
    if freedom < 1:
        raise ValueError(f"an interval needs 1 degree of freedom or more, not {freedom}")
    odd, low, high = freedom % 2, 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        total, term = 0.0, math.cos(angle) ** odd
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
        within = math.sin(angle) * total
        within = (angle + within) * 2 / math.pi if odd else within
        low, high = (angle, high) if within < 1 - 2 * tail else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def mean_with_errors(
    values: NDArray[Any], finite: NDArray[np.bool_] | None = None, places: Places | None = None
) -> Mean:
    """Mean of numbers [N], summed in float64, over the finite ones (and, of those, where
    ``finite``).
    """
    used = np.isfinite(values) if finite is None else np.isfinite(values) & finite
    kept = values[used].astype(np.float64)
    total, tokens = float(kept.sum()), len(kept)
    if not tokens:
        return Mean(None, total, 0, len(used))
    with np.errstate(over="ignore"):
        variance = float(kept.var())
    independent = (
        math.sqrt(variance / (tokens - 1)) if tokens > 1 and math.isfinite(variance) else None
    )
    error = None
    if places is not None:
        block = places.block[used]
        error = clustered_error(np.bincount(block, kept), np.bincount(block), places.length)
    return Mean(total / tokens, total, tokens, len(used) - tokens, error, independent)


def exp_mean(mean: Mean | Value, sign: int = 1) -> Value:
    """exp(sign * mean) with its errors; None if it overflows."""
    if mean.value is None or sign * mean.value > LARGEST_EXPONENT:
        return Value(None)
    value = math.exp(sign * mean.value)
    return with_errors(value, mean, lambda error: value * error)


def perplexity(logprob: Mean) -> Perplexity:
    """Perplexity of a mean log-probability."""
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
    """Root of a mean of squares; its error is the error of the mean / (2 root), and not known at 0."""
    if not squares.value:
        return Value(squares.value)
    value = math.sqrt(squares.value)
    return with_errors(value, squares, lambda error: error / (2 * value))


def with_errors(value: float, mean: Mean | Value, change: Callable[[float], float]) -> Value:
    """Return a function's ``value`` at a mean, with the mean's errors after ``change``; None for an
    overflow.
    """
    known = (
        None if error is None else change(error) for error in (mean.stderr, mean.stderr_independent)
    )
    return Value(
        value, *(error if error is None or math.isfinite(error) else None for error in known)
    )
