"""Means of per-token scores, and their errors.  numpy only; sums and counts travel, one division at the end.

A text's tokens are not independent: windows overlap, so that a token is scored several times, and an easy
article is easy for thousands of tokens.  Every entry is therefore assigned to one of G = 30 disjoint blocks of the
text by the place of its token, whatever window it was scored in.  With u_g = sum of y - m * entries over block g, the
mean m of a score y over N entries has

    stderr ** 2 = 1 / B * sum over j = 1 .. B of p_j * (1 + MEMORY * j ** 2 / tokens of text) / N ** 2
    p_j = 2 * (sum over g of u_g * cos(pi * j * (g + 1/2) / G)) ** 2

and m ± t(0.975, B) stderr is a 95 % interval.  This is the estimator from the B slowest waves of Lazarus, Lewis,
Stock and Watson (J. Business & Economic Statistics 36, 2018), times a factor.  Changes of the mean over a text are in
its slow waves, the noise of single tokens in all.  (All waves, B = G - 1, without the factor are the clustered
estimator of Liang and Zeger, Biometrika 73, 1986, which Miller, arXiv 2411.00640, 2024, asks of language model
evaluations.)  What remembers tau tokens has waves of frequency f smaller than that of its mean, by
1 + (2 pi f tau) ** 2: hence the factor, for a memory that grows as the root of the text does.  B = root(tokens of
text / 30,000), at least 4, at most 16: the error itself is known to 35 % (4 waves) or better.

How long its documents are, a text's scores do not tell.  Of 2,000 simulated texts of 60,000 tokens made of documents
of 13,800 (lognormal, sigma 1.5) we estimated the memory as well: intervals by it held in 85 % of those with a long one,
and in 74 % of those with a short one, for a text that is all one document shows no change.  So the rule is fixed, and
``documents`` says for what.  In texts that depend as WikiText-2's losses do (``benchmarks/coverage.py``,
``results/coverage.md``), intervals cover 92.5 to 98.8 % of 4,000 and 16,000 tokens and 94.7 to 98.4 % of 60,000 to
1,000,000 where documents are as short as the footnote says; documents of 4,600 with sigma 1.5, which are longer than
that, 93.1 to 95.1 %; of 13,800 with sigma 1.5, 84 to 91 %, and from 1,000,000 on 92.4 to 93.2 %.

Functions of means (perplexity, ratios) have the error of their linear approximation.  ``stderr_independent`` is
llama.cpp's, sqrt((mean y^2 - m^2) / (N - 1)), which takes entries as independent, and covers 3 to 74 %: of
SmolLM2-135M's perplexity of 21.31 on WikiText-2's test rows at 2048/2048 it is 0.12, where this one is 0.69.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_EXPONENT = math.log(1.7e308)
FEWEST_BLOCKS, MOST_BLOCKS, LEAST_BLOCK = 3, 30, 100
"""How many blocks a text is cut into; the most if they have ``LEAST_BLOCK`` tokens."""
FEWEST_WAVES, MOST_WAVES, UNIT = 4, 16, 30_000
"""root(tokens of text / UNIT) waves, within the two limits, and one less than blocks."""
MEMORY = 12_000
"""Tokens; tuned by the simulation."""
SHORT = 20_000
"""Tokens of text below which a text's own length is no longer counted on, and there is a caution."""
T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
"""Student's t at 0.975 for 1 to 29 degrees of freedom."""


@dataclass(frozen=True)
class Places:
    """Where entries stand in a text: the ``block`` [N] of each, and how many tokens of ``length`` were cut."""

    block: NDArray[Any]
    length: int

    def __getitem__(self, chosen: NDArray[np.bool_]) -> Places:
        """The places of some entries in the same text."""
        return Places(self.block[chosen], self.length)


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(-logprob_sum / tokens); None if nothing finite was scored, or if it overflows.

    ``tokens`` counts the finite log-probabilities (nats) that are in the sum; ``non_finite`` those left out of it.
    Errors: one standard error; None where it cannot be told (one block, one token).
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


def places_of(index: NDArray[Any]) -> Places:
    """Places of entries, from the index [N] of the token of each in the text, in any order and with any gaps."""
    length = length_of(index)
    count = min(max(length // LEAST_BLOCK, FEWEST_BLOCKS), MOST_BLOCKS)
    place = index.astype(np.int64) - (int(index.min()) if length else 0)
    return Places(np.asarray(place * count // max(length, 1)), length)


def length_of(index: NDArray[Any]) -> int:
    """Tokens of text from the first scored one to the last, those in gaps between windows included."""
    return int(index.max()) - int(index.min()) + 1 if len(index) else 0


def documents(length: int) -> int:
    """Tokens of the document that a token stands in, in the mean, up to which intervals cover 94 %; in two digits."""
    found = max(length // 10, 10_000)
    unit = int(10 ** (len(str(found)) - 2))
    return found // unit * unit


def caution(length: int, text: int | None = None) -> str | None:
    """What must be said of errors from so many tokens out of a ``text`` (its tokens); None if they can be believed."""
    if length >= SHORT:
        return None
    part = f"the scored part spans {length:,} tokens" + (f" of a text of {text:,}" if text and text > length else "")
    advice = "score more windows (-r, max_rows)" if text and text >= SHORT else "take a longer text"
    return f"{part}: with less than {SHORT:,}, errors (±) may be far too small; {advice}"


def waves(groups: int, length: int) -> int:
    """How many waves over so many blocks of a text errors come from, which are also their degrees of freedom."""
    return min(max(math.isqrt(length // UNIT), FEWEST_WAVES), MOST_WAVES, groups - 1)


def clustered(total: NDArray[Any], tokens: NDArray[Any], length: int) -> float | None:
    """Standard error of sum(total) / sum(tokens), from sums and counts [G] of a text's blocks.

    ``length``: the text's tokens.  None for fewer than two blocks, and if it overflows.
    """
    total, tokens = total[tokens > 0].astype(np.float64), tokens[tokens > 0]
    groups, n = len(tokens), tokens.sum()
    if groups < 2:
        return None
    wave = np.arange(1, waves(groups, length) + 1)
    slow = np.cos(np.pi * wave[:, None] * (np.arange(groups) + 0.5) / groups)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = 2 * (slow @ (total - total.sum() / n * tokens)) ** 2
        square = float(np.mean(squares * (1 + MEMORY * wave**2 / max(length, SHORT))))
    return math.sqrt(square) / float(n) if math.isfinite(square) else None


def interval(value: float, stderr: float, freedom: int) -> tuple[float, float]:
    """95 % interval of an estimate with 1 to 29 degrees of freedom (``waves``); ValueError for other numbers."""
    if not 1 <= freedom <= len(T975):
        raise ValueError(f"an interval needs 1 to {len(T975)} degrees of freedom, not {freedom}")
    reach = T975[freedom - 1] * stderr
    return value - reach, value + reach


def mean(values: NDArray[Any], finite: NDArray[np.bool_] | None = None, places: Places | None = None) -> Mean:
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
    if places is not None:
        block = places.block[used]
        error = clustered(np.bincount(block, kept), np.bincount(block), places.length)
    return Mean(total / tokens, total, tokens, len(used) - tokens, error, independent)


def exponential(of: Mean, sign: int = 1) -> Value:
    """exp(sign * mean); None if it overflows."""
    if of.value is None or sign * of.value > LARGEST_EXPONENT:
        return Value(None)
    value = math.exp(sign * of.value)
    errors = (None if e is None else value * e for e in (of.stderr, of.stderr_independent))
    return Value(value, *(e if e is None or math.isfinite(e) else None for e in errors))


def perplexity(
    logprob: NDArray[Any], finite: NDArray[np.bool_] | None = None, places: Places | None = None
) -> Perplexity:
    """Perplexity of float32 log-probabilities [N], of the finite ones (and, of those, where ``finite``)."""
    return perplexity_of(mean(logprob, finite, places))


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
