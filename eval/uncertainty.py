"""Means of per-token scores, and their errors.  numpy only; sums and counts travel, one division at the end.

A text's tokens are not independent: windows overlap, so that a token is scored several times, and an easy
article is easy for thousands of tokens.  Every entry is therefore assigned to a disjoint stretch of the text by the
place of its token, whatever window it was scored in, and the mean m of a score y over N entries has

    stderr ** 2 = G / (G - 1) * sum over stretches of (sum of y - m * entries) ** 2 / N ** 2

the clustered (ratio) estimator of Liang and Zeger (Biometrika 73, 1986), which Miller (arXiv 2411.00640, 2024) asks of
language model evaluations.  Neighbouring stretches must not be alike, or the error is too small; so they are long, and
G = root(tokens of text / 5,000), at least 3 and at most 30: their length and number both grow with the text (Flegal and
Jones, Annals of Statistics 38, 2010).  WikiText-2's test text has 7 of 43,000 tokens.  A 95 % interval is
m ± t(0.975, G - 1) stderr: wide where stretches are few, for then the error itself is known to 30 % (7) or 50 % (3).

On simulated texts of articles with 5,000 tokens, whose losses depend on each other as WikiText-2's do, 95 % intervals
cover 93.7 to 95.2 % from 60,000 tokens on, and 87 to 92 % at 16,000 (``benchmarks/coverage.py``): ``caution`` is for
shorter texts.  What it cannot know is how long the documents are: of 20,000 tokens each, a text of 300,000 is covered
89 % of the time.

Functions of means (perplexity, ratios) have the error of their linear approximation.  ``stderr_independent`` is
llama.cpp's, sqrt((mean y^2 - m^2) / (N - 1)), which takes entries as independent, and covers 9 to 59 %: on WikiText-2
at 2048/512 it is 11 times smaller (mean loss of SmolLM2-135M: 0.0028 for 0.031).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_EXPONENT = math.log(1.7e308)
FEWEST_STRETCHES, MOST_STRETCHES, UNIT = 3, 30, 5000
"""root(tokens of text / UNIT) stretches, within the two limits."""
SHORT = 60_000
"""Tokens of text from which intervals cover 93 % and more; of 40,000 they were seen to cover 92.7 %."""
T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
"""Student's t at 0.975 for 1 to 29 degrees of freedom."""


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(-logprob_sum / tokens); None if nothing finite was scored, or if it overflows.

    ``tokens`` counts the finite log-probabilities (nats) that are in the sum; ``non_finite`` those left out of it.
    Errors: one standard error; None where it cannot be told (one stretch, one token).
    """

    value: float | None
    logprob_sum: float
    tokens: int
    non_finite: int
    stderr: float | None = None
    stderr_independent: float | None = None


@dataclass(frozen=True)
class Mean:
    """``value`` = total / tokens; None if no entry was finite.  ``non_finite`` counts the entries left out of both."""

    value: float | None
    total: float
    tokens: int
    non_finite: int
    stderr: float | None = None
    stderr_independent: float | None = None


@dataclass(frozen=True)
class Value:
    """A function of means, with the error of its linear approximation."""

    value: float | None
    stderr: float | None = None
    stderr_independent: float | None = None


def stretch_of(index: NDArray[Any]) -> NDArray[np.int64]:
    """Stretch [N] of each entry, from the place [N] of its token in the text, in any order and with any gaps."""
    length = length_of(index)
    count = min(max(math.isqrt(length // UNIT), FEWEST_STRETCHES), MOST_STRETCHES)
    place = index.astype(np.int64) - (int(index.min()) if length else 0)
    return np.asarray(place * count // max(length, 1))


def length_of(index: NDArray[Any]) -> int:
    """Tokens of text from the first scored one to the last, those in gaps between windows included."""
    return int(index.max()) - int(index.min()) + 1 if len(index) else 0


def caution(length: int) -> str | None:
    """What must be said of errors from a text of so many tokens; None if they were seen to hold."""
    if length >= SHORT:
        return None
    return f"the text has {length:,} tokens: with less than {SHORT:,}, the errors (±) are often too small"


def clustered(total: NDArray[Any], tokens: NDArray[Any]) -> float | None:
    """Standard error of sum(total) / sum(tokens), from sums and counts [G] of stretches; None for fewer than two."""
    total, tokens = total[tokens > 0].astype(np.float64), tokens[tokens > 0]
    groups, n = len(tokens), tokens.sum()
    if groups < 2:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        off = total - total.sum() / n * tokens
        squares = float(off @ off)
    return math.sqrt(groups / (groups - 1) * squares) / float(n) if math.isfinite(squares) else None


def interval(value: float, stderr: float, groups: int) -> tuple[float, float]:
    """95 % interval of an estimate from so many stretches, 2 to 30; ValueError for other numbers."""
    if not 2 <= groups <= len(T975) + 1:
        raise ValueError(f"an interval needs 2 to {len(T975) + 1} stretches, not {groups}")
    reach = T975[groups - 2] * stderr
    return value - reach, value + reach


def mean(values: NDArray[Any], finite: NDArray[np.bool_] | None = None, stretch: NDArray[Any] | None = None) -> Mean:
    """Mean of numbers [N], summed in float64, over the finite ones (and, of those, where ``finite``)."""
    used = np.isfinite(values) if finite is None else np.isfinite(values) & finite
    kept = values[used].astype(np.float64)
    total, tokens = float(kept.sum()), len(kept)
    if not tokens:
        return Mean(None, total, 0, len(used))
    with np.errstate(over="ignore"):
        variance = float(kept.var())
    independent = math.sqrt(variance / (tokens - 1)) if tokens > 1 and math.isfinite(variance) else None
    error = None
    if stretch is not None:
        error = clustered(np.bincount(stretch[used], kept), np.bincount(stretch[used]))
    return Mean(total / tokens, total, tokens, len(used) - tokens, error, independent)


def exponential(of: Mean, sign: int = 1) -> Value:
    """exp(sign * mean); None if it overflows."""
    if of.value is None or sign * of.value > LARGEST_EXPONENT:
        return Value(None)
    value = math.exp(sign * of.value)
    errors = (None if e is None else value * e for e in (of.stderr, of.stderr_independent))
    return Value(value, *(e if e is None or math.isfinite(e) else None for e in errors))


def perplexity(
    logprob: NDArray[Any], finite: NDArray[np.bool_] | None = None, stretch: NDArray[Any] | None = None
) -> Perplexity:
    """Perplexity of float32 log-probabilities [N], of the finite ones (and, of those, where ``finite``)."""
    return perplexity_of(mean(logprob, finite, stretch))


def perplexity_of(of: Mean) -> Perplexity:
    """Perplexity of a mean log-probability."""
    ppl = exponential(of, -1)
    return Perplexity(ppl.value, of.total, of.tokens, of.non_finite, ppl.stderr, ppl.stderr_independent)


def root(squares: Mean) -> Value:
    """Root of a mean of squares; its error is error / (2 root), and not known at 0."""
    if not squares.value:
        return Value(squares.value)
    value = math.sqrt(squares.value)
    return Value(value, *(None if e is None else e / (2 * value) for e in (squares.stderr, squares.stderr_independent)))
