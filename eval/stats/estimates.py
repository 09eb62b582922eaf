"""Estimates and their errors (``eval/stats/uncertainty.py``) from token scores, of a model and
against a reference.

**Against a reference**, llama.cpp's statistics (tools/perplexity): with a = -ln q(token), b = -ln
p_ref(token), ln(PPL(Q)/PPL(ref)) = mean(a - b), and its error is the error of that mean, which is a
paired error.  The error of PPL(Q) - PPL(ref) is the error of the mean of PPL(Q) a - PPL(ref) b.
The change of probability is q(token) - p_ref(token).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .uncertainty import (
    FEWEST_WAVES,
    SHORT,
    Count,
    Error,
    Mean,
    Perplexity,
    Places,
    Value,
    clustered_error,
    exp_mean,
    mean_with_errors,
    n_waves,
    perplexity,
    root_of_mean,
    sampling_error,
    with_errors,
)

PERCENTS = (0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
"""llama.cpp's percentiles of KLD and of the change of probability, and both quartiles."""
PERCENTILES = ("min", *(f"{percent:g}" for percent in PERCENTS), "max")
CURVE_BINS = 32
MOST_TEXTS = 1000
"""Largest number of texts of a run: each has at least one block."""
LEAST_BLOCKS = FEWEST_WAVES + 1
"""Minimum number of blocks of the text in a bin that has an error; the error is then known to 35 %
or better."""


@dataclass(frozen=True)
class Curve:
    """Means over positions in the window: bin i holds positions ``edges[i]`` to ``edges[i + 1] -
    1``.

    ``nll`` (nats) and ``kld`` (nats; None without a reference) are None where a bin has no finite
    score.  Their errors are standard errors from the blocks of the text; None where a bin has
    scores in too few blocks.
    """

    edges: tuple[Count, ...]
    nll: tuple[float | None, ...]
    kld: tuple[float | None, ...] | None = None
    nll_stderr: tuple[Error | None, ...] | None = None
    kld_stderr: tuple[Error | None, ...] | None = None

    def __post_init__(self) -> None:
        """ValueError for edges that do not increase, or for another number of values than of bins."""
        if any(low >= high for low, high in itertools.pairwise((0, *self.edges))):
            raise ValueError("its edges do not increase")
        bins = max(len(self.edges) - 1, 0)
        for values in (self.nll, self.kld, self.nll_stderr, self.kld_stderr):
            if values is not None and len(values) != bins:
                raise ValueError(f"has {len(values)} values for {bins} bins")


@dataclass(frozen=True)
class BlockSums:
    """Sums over the entries of each of G blocks: ``tokens`` (entries), ``nll``, ``kld`` (nats),
    ``same_top``.

    The difference of any two models' means, and its error, follow from the sums.  ``whole`` names
    the sums with only finite entries, which can be compared; the other sums leave out entries that
    are not finite.  ``length``: tokens of the text that the blocks cover, each counted once.
    """

    tokens: Annotated[tuple[Count, ...], Field(max_length=MOST_TEXTS)]
    nll: tuple[float, ...]
    kld: tuple[float, ...] | None = None
    same_top: tuple[float, ...] | None = None
    whole: tuple[Annotated[str, Field(pattern="^(nll|kld|same_top)$")], ...] = ()
    length: Count = 0

    def __post_init__(self) -> None:
        """ValueError for sums of another number of blocks, or for sums that cannot be compared."""
        sums = {"nll": self.nll, "kld": self.kld, "same_top": self.same_top}
        for name, values in sums.items():
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"{name} has {len(values)} sums for {len(self.tokens)} blocks")
        for name in self.whole:
            if sums[name] is None or sum(self.tokens) == 0:
                raise ValueError(f"whole: there is no mean of {name}")

    @property
    def held(self) -> int:
        """Number of blocks that hold tokens: the errors come from these."""
        return sum(count > 0 for count in self.tokens)

    @property
    def waves(self) -> int:
        """Degrees of freedom of the errors."""
        return n_waves(self.held, self.length)


@dataclass(frozen=True)
class AgainstReference:
    """A model compared with its reference, over the entries with two finite log-probabilities (KLD:
    with a finite KLD).

    Nats, and probabilities from 0 to 1; ``ref_ppl`` is of the same entries, so that it differs from
    the reference's own perplexity where the model has infinite losses.

    ``correlation``: of the two losses over the entries; None if either loss is constant.
    ``delta_p``: model minus reference.  Percentiles: percent ("50"), "min" and "max" -> value, of
    the finite entries.
    """

    ref_ppl: Perplexity
    ln_ppl_ratio: Mean
    correlation: float | None
    ppl_ratio: Value
    ppl_difference: Value
    kld: Mean
    kld_percentiles: dict[str, float]
    delta_p: Mean
    delta_p_rms: Value
    delta_p_percentiles: dict[str, float]
    same_top: Mean


@dataclass(frozen=True)
class TextRates:
    """Losses in units that no tokenizer changes: nats over the bytes (UTF-8) or words of the scored
    text.
    """

    bits_per_byte: Value
    byte_perplexity: Value
    word_perplexity: Value
    n_bytes: float
    n_words: float


@dataclass(frozen=True)
class Sampled:
    """Standard errors of means over spread windows, as what all windows of the text would give:
    ``nll`` (nats, so relative ones of PPL), and ``kld`` (nats); None where a score is missing or
    not finite.
    """

    nll: Error | None
    kld: Error | None = None


@dataclass(frozen=True)
class Estimates:
    """All estimates from a model's scores; None for an estimate whose scores the engine does not
    give.

    ``entropy``: of the model's distribution, nats.  ``top1``: share of the positions at which the
    real token is the model's most probable one, of those with a finite log-probability.
    ``sampled``: None unless the windows are some of the text's, spread over it.
    """

    ppl: Perplexity
    against: AgainstReference | None
    top1: Mean | None
    entropy: Mean | None
    rates: TextRates | None
    blocks: BlockSums
    curve: Curve
    sampled: Sampled | None = None


def short_text_cautions(models: Sequence[BlockSums], text: int | None) -> list[str]:
    """Return cautions, without repeats, about errors of models that come from few tokens, by the
    models' blocks.

    ``text``: number of tokens of the whole text, if known.
    """
    advice = "score more windows (-r, max_rows)" if text and text >= SHORT else "take a longer text"
    cautions = []
    for length in sorted({blocks.length for blocks in models if blocks.length < SHORT}):
        part = f"{length:,} tokens" + (f" of a text of {text:,}" if text and text > length else "")
        cautions.append(
            f"the scored part spans {part}: with less than {SHORT:,}, errors (±) may be far too small; {advice}"
        )
    return cautions


def summarize(
    columns: Mapping[str, NDArray[Any]],
    places: Places,
    position: NDArray[Any],
    text: tuple[float, float] | None = None,
) -> Estimates:
    """All estimates of one model's columns [N] (``StoredScores.columns``); only ``logprob`` is
    mandatory.

    ``places``: of the entries in their texts; ``position`` [N]: in their windows.  ``text``: bytes
    and words of the scored tokens together, each as often as it was scored; None if they are not
    known.
    """
    logprob = columns["logprob"]
    finite = np.isfinite(logprob)
    mean_logprob = mean_with_errors(logprob, None, places)
    ppl = perplexity(mean_logprob)
    compared = {"ref_logprob", "kld", "same_top"} <= columns.keys()
    return Estimates(
        ppl=ppl,
        against=against_reference(columns, places) if compared else None,
        top1=mean_with_errors(columns["top1"], finite, places) if "top1" in columns else None,
        entropy=mean_with_errors(columns["entropy"], None, places)
        if "entropy" in columns
        else None,
        rates=None if text is None or ppl.non_finite else text_rates(mean_logprob, *text),
        blocks=block_sums(columns, places),
        curve=curve_over_position(position, -logprob, columns.get("kld"), places),
    )


def against_reference(columns: Mapping[str, NDArray[Any]], places: Places) -> AgainstReference:
    """The statistics of a model's columns [N] that need its reference's."""
    model, reference = (columns[name].astype(np.float64) for name in ("logprob", "ref_logprob"))
    # If the reference's logits are nan, argmax returns some token.
    both = np.isfinite(model) & np.isfinite(reference)
    model, reference = (
        np.where(both, logprob, np.nan) for logprob in (model, reference)
    )  # inf - inf would warn
    ppl, ref_ppl = (
        perplexity(mean_with_errors(logprob, None, places)) for logprob in (model, reference)
    )
    ratio, difference = mean_with_errors(reference - model, None, places), Value(None)
    if ppl.value is not None and ref_ppl.value is not None:
        linear = mean_with_errors(ref_ppl.value * reference - ppl.value * model, None, places)
        difference = Value(ppl.value - ref_ppl.value, linear.stderr, linear.stderr_independent)
    a, b = model[both], reference[both]
    varies = len(a) and np.ptp(a) and np.ptp(b)  # the std of a constant may be 1e-17
    delta = np.exp(model) - np.exp(reference)
    kld = columns["kld"]
    return AgainstReference(
        ref_ppl=ref_ppl,
        ln_ppl_ratio=ratio,
        correlation=float(np.corrcoef(a, b)[0, 1]) if varies else None,
        ppl_ratio=exp_mean(ratio),
        ppl_difference=difference,
        kld=mean_with_errors(kld, None, places),
        kld_percentiles=percentiles_of(kld[np.isfinite(kld)]),
        delta_p=mean_with_errors(delta, None, places),
        delta_p_rms=root_of_mean(mean_with_errors(delta**2, None, places)),
        delta_p_percentiles=percentiles_of(delta[both]),
        same_top=mean_with_errors(columns["same_top"], both, places),
    )


def text_rates(logprob: Mean, n_bytes: float, n_words: float) -> TextRates | None:
    """Rates over bytes and words of a mean log-probability (nats per token); None if nothing was
    scored.

    Their errors treat the numbers of bytes and words per token as exact.
    """
    if logprob.value is None or not n_bytes or not n_words:
        return None

    def per(units: float) -> Value:
        return with_errors(
            -logprob.total / units, logprob, lambda error: error * (logprob.tokens / units)
        )

    nats = per(n_bytes)
    bits = with_errors(
        -logprob.total / n_bytes / math.log(2), nats, lambda error: error / math.log(2)
    )
    return TextRates(bits, exp_mean(nats), exp_mean(per(n_words)), n_bytes, n_words)


def block_sums(columns: Mapping[str, NDArray[Any]], places: Places) -> BlockSums:
    """Return the sums by block of the scores that can be compared between models."""
    values = {"nll": -columns["logprob"].astype(np.float64)}
    values |= {name: columns[name] for name in ("kld", "same_top") if name in columns}
    sums: dict[str, tuple[float, ...]] = {}
    whole: list[str] = []
    for name, scores in values.items():
        finite = np.isfinite(scores)
        sums[name] = tuple(np.bincount(places.block, np.where(finite, scores, 0)).tolist())
        if (
            name == "same_top"
            and not np.isfinite(columns.get("ref_logprob", columns["logprob"])).all()
        ):
            continue  # argmax of nan is some token
        if finite.all() and (name != "same_top" or "nll" in whole):
            whole.append(name)
    return BlockSums(
        tuple(np.bincount(places.block).tolist()), **sums, whole=tuple(whole), length=places.length
    )


def sampled(
    columns: Mapping[str, NDArray[Any]], window: NDArray[Any], starts: Sequence[int], available: int
) -> Sampled:
    """Errors of the means of spread windows as means of all windows of their text.

    ``window`` [N]: number of the window of each entry of the ``columns`` [N]; ``starts``: text
    index at which each window starts; ``available``: number of windows of the text.
    """
    in_text_order = np.argsort(starts)
    tokens = np.bincount(window, minlength=len(starts))[in_text_order]

    def error(scores: NDArray[Any] | None) -> float | None:
        if scores is None or not np.isfinite(scores).all():
            return None
        sums = np.bincount(window, scores.astype(np.float64), len(starts))[in_text_order]
        return sampling_error(sums, tokens, available)

    return Sampled(error(columns["logprob"]), error(columns.get("kld")))


def sampled_together(parts: Sequence[tuple[Sampled, int]]) -> Sampled:
    """Errors of the means over several texts, from the (errors, number of scored tokens) of each:
    they are independent.

    None where the error of a text is not known.
    """
    total = sum(tokens for _, tokens in parts)

    def together(errors: Sequence[float | None]) -> float | None:
        squares = 0.0
        for error, (_, tokens) in zip(errors, parts, strict=True):
            if error is None:
                return None
            squares += (error * tokens / total) ** 2
        return math.sqrt(squares)

    return Sampled(
        together([part.nll for part, _ in parts]), together([part.kld for part, _ in parts])
    )


def paired_difference(a: BlockSums, b: BlockSums, name: str) -> Value | None:
    """Mean of ``name`` ("nll": ln of the ratio of perplexities; "kld"; "same_top") of a minus the
    mean of b, paired.

    None if a model has no such scores, or some that are not finite, or the windows are not the
    same.
    """
    if name not in a.whole or name not in b.whole or a.tokens != b.tokens:
        return None
    tokens = np.asarray(a.tokens)
    off = np.asarray(getattr(a, name)) - np.asarray(getattr(b, name))
    return Value(float(off.sum()) / int(tokens.sum()), clustered_error(off, tokens, a.length))


def percentiles_of(values: NDArray[Any]) -> dict[str, float]:
    """Percent -> percentile of finite values [N], "min" and "max" too, interpolated linearly at (N
    - 1) p as llama.cpp does; empty without values.
    """
    if not len(values):
        return {}
    quantiles = np.quantile(
        values.astype(np.float64), [0.0, *(percent / 100 for percent in PERCENTS), 1.0]
    )
    return dict(zip(PERCENTILES, quantiles.tolist(), strict=True))


def curve_over_position(
    position: NDArray[Any], nll: NDArray[Any], kld: NDArray[Any] | None, places: Places
) -> Curve:
    """Mean loss [N] and KLD [N] by position [N] in the window, in bins whose widths grow with the
    position.

    Early positions change fastest: the loss falls about as fast from 1 to 2 as from 500 to 1,000.
    """
    low, high = int(position.min()), int(position.max()) + 1
    edges = np.unique(np.geomspace(low + 1, high + 1, CURVE_BINS + 1).round().astype(np.int64)) - 1
    place = np.searchsorted(edges, position, side="right") - 1
    bins, blocks = len(edges) - 1, int(places.block.max()) + 1

    def by_bin(values: NDArray[Any]) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        finite = np.isfinite(values)
        own, kept = place[finite], values[finite].astype(np.float64)
        cell, cells = own * blocks + places.block[finite], bins * blocks
        sums = np.bincount(cell, kept, cells).reshape(bins, blocks)
        counts = np.bincount(cell, minlength=cells).reshape(bins, blocks)
        totals = zip(np.bincount(own, kept, bins), np.bincount(own, minlength=bins), strict=True)
        return tuple(float(total / n) if n else None for total, n in totals), tuple(
            clustered_error(s, n, places.length) if np.count_nonzero(n) >= LEAST_BLOCKS else None
            for s, n in zip(sums, counts, strict=True)
        )

    (losses, loss_errors), of_kld = by_bin(nll), (None, None) if kld is None else by_bin(kld)
    return Curve(tuple(edges.tolist()), losses, of_kld[0], loss_errors, of_kld[1])
