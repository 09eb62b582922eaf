"""The statistics of a row: the fields of results.json that are computed from token scores.

**Against a reference**, llama.cpp's statistics (tools/perplexity): with a = -ln q(token), b = -ln
p_ref(token), ln(PPL(Q)/PPL(ref)) = mean(a - b), and its error is the error of that mean, which is a
paired error.  The error of PPL(Q) - PPL(ref) is the error of the mean of PPL(Q) a - PPL(ref) b.
The change of probability is q(token) - p_ref(token).

A new statistic needs an average in ``averages_of`` and a field of the same name in
``RowStatistics``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from ...backends.base import KldKind
from ..common.stored import Number, Positive, Stored
from .block_sums import BlockSums, block_sums
from .curve import Curve, curve_over_position
from .slices import Slice
from .uncertainty import (
    Array,
    BlockAssignment,
    Columns,
    Count,
    Error,
    Mean,
    Perplexity,
    Value,
    exp_mean,
    mean_with_errors,
    perplexity,
    root_of_mean,
    with_errors,
)

PERCENTS = (0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
"""llama.cpp's percentiles of KLD and of the change of probability, and both quartiles."""
PERCENTILES = ("min", *(f"{percent:g}" for percent in PERCENTS), "max")
COUNT_FIELDS = {
    "ppl": {"logprob_sum": "logprob_sum", "tokens": "tokens", "non_finite": "non_finite"},
    "ref_ppl": {"ref_ppl_tokens": "tokens"},
    "kld": {"kld_sum": "total", "kld_tokens": "tokens", "kld_non_finite": "non_finite"},
}
"""Average -> field of a row -> attribute of the average; a row has no counts of other averages."""

Average = Perplexity | Mean | Value
TextSize = tuple[float, float]
"""Bytes (UTF-8) and words of the scored tokens together, each as often as it was scored."""


def all_or_none(percentiles: dict[str, float]) -> dict[str, float]:
    """ValueError unless all percentiles are known, or none is: the plot needs all."""
    if percentiles and set(percentiles) != set(PERCENTILES):
        raise ValueError(f"must have the percentiles {', '.join(PERCENTILES)}")
    return percentiles


Percentiles = Annotated[dict[str, float], AfterValidator(all_or_none)]
"""Percent ("50"), "min" and "max" -> value; empty if not known."""


class RowStatistics(Stored):
    """The fields of a row of results.json that are computed from its token scores.

    Errors (``..._stderr``) are standard errors from the blocks of the text.
    """

    ppl: Positive | None = Field(
        default=None, description="perplexity; None also if it is too large for a number"
    )
    ppl_stderr: Error | None = Field(
        default=None, description="its error: mostly the choice of text, common to all rows"
    )
    ppl_stderr_independent: Error | None = Field(
        default=None, description="its error if tokens were independent"
    )
    logprob_sum: Number = Field(
        default=None, description="sum of the finite log-probabilities, nats"
    )
    tokens: Count | None = Field(
        default=None, description="scored tokens with a finite log-probability"
    )
    non_finite: Count | None = Field(
        default=None, description="scored tokens without one, which means leave out"
    )
    ln_ppl_ratio: Number = Field(default=None, description="ln(PPL / PPL of the reference)")
    ln_ppl_ratio_stderr: Error | None = Field(default=None, description="its paired error")
    ppl_ratio: Number = Field(default=None, description="PPL / PPL of the reference")
    ppl_ratio_stderr: Error | None = Field(default=None, description="its paired error")
    kld: Number = Field(
        default=None, description="mean KL(reference || model), nats per token; 0 for the reference"
    )
    kld_stderr: Error | None = Field(default=None, description="its error, nats")
    kld_kind: KldKind = Field(
        default="exact",
        description="what its KLDs are: exact; an estimate, whose error contains that of the "
        "estimation; or a bound, which the KLD is at least",
    )
    kld_median: Number = Field(default=None, description="median of the tokens' KLDs, nats")
    kld_p99: Number = Field(default=None, description="99th percentile of the tokens' KLDs, nats")
    kld_p99_9: Number = Field(
        default=None, alias="kld_p99.9", description="99.9th percentile of the tokens' KLDs, nats"
    )
    kld_max: Number = Field(default=None, description="largest KLD of a token, nats")
    kld_sum: Number = Field(default=None, description="sum of the finite KLDs, nats")
    kld_tokens: Count | None = Field(default=None, description="tokens with a finite KLD")
    kld_non_finite: Count | None = Field(
        default=None, description="tokens without one, which the mean leaves out"
    )
    same_top: Number = Field(
        default=None, description="share of tokens with the reference's most probable token"
    )
    same_top_stderr: Error | None = Field(default=None, description="its error")
    top1: Number = Field(
        default=None,
        description="share of tokens of the text that are the model's most probable ones",
    )
    entropy: Number = Field(
        default=None, description="mean entropy of the model's predictions, nats"
    )
    bits_per_byte: Number = Field(
        default=None, description="loss in bits per byte of the text (UTF-8)"
    )
    byte_perplexity: Number = Field(default=None, description="perplexity per byte")
    word_perplexity: Number = Field(default=None, description="perplexity per word")
    ref_ppl: Positive | None = Field(
        default=None,
        description="the reference's perplexity on the tokens that both have a finite "
        "log-probability of",
    )
    ref_ppl_tokens: Count | None = Field(default=None, description="number of these tokens")
    ppl_difference: Number = Field(
        default=None, description="PPL - PPL of the reference on these tokens"
    )
    ppl_difference_stderr: Error | None = Field(default=None, description="its paired error")
    correlation: Number = Field(
        default=None, description="correlation of both models' losses; None if one is constant"
    )
    delta_p: Number = Field(
        default=None,
        description="mean change of a token's probability: the model's minus the reference's",
    )
    delta_p_stderr: Error | None = Field(default=None, description="its error")
    delta_p_rms: Number = Field(
        default=None, description="root of the mean square of these changes"
    )
    delta_p_rms_stderr: Error | None = Field(default=None, description="its error")
    ln_ppl_stderr_of_text: Error | None = Field(
        default=None,
        description="error of ln PPL as that of all windows of the text, of which these are a "
        "sample",
    )
    kld_stderr_of_text: Error | None = Field(
        default=None, description="error of the KLD as that of all windows of the text, nats"
    )
    kld_percentiles: Percentiles = Field(
        default={}, description="percentiles of the tokens' KLDs, nats"
    )
    delta_p_percentiles: Percentiles = Field(default={}, description="percentiles of these changes")
    slices: dict[str, Slice] = Field(
        default={}, description="statistics of named parts of the scored tokens"
    )
    blocks: BlockSums | None = Field(
        default=None, description="sums by block of the text: differences of two rows"
    )
    curve: Curve | None = Field(default=None, description="means by position in the window")

    def computed(self) -> dict[str, Any]:
        """Return the fields that were set: those that the scores did not give are left out."""
        fields = {}
        for name in type(self).model_fields:
            if name in self.model_fields_set:
                fields[name] = getattr(self, name)
        return fields


def statistics_of(
    columns: Columns,
    assignment: BlockAssignment,
    position: Array,
    text_size: TextSize | None = None,
    kld_kind: KldKind = "exact",
) -> RowStatistics:
    """Return a row's statistics; what the scores do not give is not set.

    ``columns`` [N]: the scores of one model; only ``logprob`` is mandatory.  ``assignment``: the
    blocks of the entries.  ``position`` [N]: of the entries in their windows.  ``kld_kind``: of the
    column ``kld``.
    """
    fields: dict[str, Any] = {}
    if "kld" in columns:
        fields["kld_kind"] = kld_kind
    for name, average in averages_of(columns, assignment, text_size).items():
        fields |= average_fields(name, average)
    if "kld" in columns and kld_kind != "estimate":
        # Percentiles of bounds are bounds, since no bound of a token exceeds the token's KLD.
        # Percentiles of estimates are not percentiles of KLDs: single values are far off, and may
        # be negative.
        kld = columns["kld"]
        fields |= kld_percentile_fields(percentiles_of(kld[np.isfinite(kld)]))
    if "ref_logprob" in columns:
        pairs = paired_logprobs(columns)
        changes = pairs.probability_changes()
        fields["delta_p_percentiles"] = percentiles_of(changes[pairs.both_finite])
        fields["correlation"] = pairs.correlation()
    nll = -columns["logprob"]
    fields["blocks"] = block_sums(columns, assignment)
    fields["curve"] = curve_over_position(position, nll, columns.get("kld"), assignment)
    return RowStatistics(**fields)


def average_fields(name: str, average: Average) -> dict[str, Any]:
    """Return the fields of a row that an average sets: its value, and the errors and counts that a
    row has.
    """
    fields: dict[str, Any] = {name: average.value}
    errors = {
        f"{name}_stderr": average.stderr,
        f"{name}_stderr_independent": average.stderr_independent,
    }
    for field, error in errors.items():
        if field in RowStatistics.model_fields:
            fields[field] = error
    for field, attribute in COUNT_FIELDS.get(name, {}).items():
        fields[field] = getattr(average, attribute)
    return fields


def averages_of(
    columns: Columns, assignment: BlockAssignment, text_size: TextSize | None = None
) -> dict[str, Average]:
    """Return the averages of a row, each with both errors, by the names of their fields.

    Averages that need other scores than ``columns`` [N] has are left out.
    """
    logprob = columns["logprob"]
    mean_logprob = mean_with_errors(logprob, None, assignment)
    averages: dict[str, Average] = {"ppl": perplexity(mean_logprob)}
    if "top1" in columns:
        averages["top1"] = mean_with_errors(columns["top1"], np.isfinite(logprob), assignment)
    if "entropy" in columns:
        averages["entropy"] = mean_with_errors(columns["entropy"], None, assignment)
    # The size of the text is that of all scored tokens, also of those that the mean leaves out.
    if text_size is not None and not mean_logprob.non_finite:
        averages |= text_rates(mean_logprob, text_size)
    if "ref_logprob" in columns:
        averages |= compared_averages(columns, assignment)
    if "kld" in columns:
        averages["kld"] = mean_with_errors(columns["kld"], None, assignment)
    return averages


def text_rates(logprob: Mean, text_size: TextSize) -> dict[str, Average]:
    """Return the losses in units that no tokenizer changes; none if nothing was scored.

    ``logprob``: nats per token.  The errors treat the numbers of bytes and words per token as
    exact.
    """
    n_bytes, n_words = text_size
    if logprob.value is None or not n_bytes or not n_words:
        return {}
    nats_per_byte = loss_per_unit(logprob, n_bytes)
    bits_per_byte = with_errors(
        -logprob.total / n_bytes / math.log(2), nats_per_byte, lambda error: error / math.log(2)
    )
    return {
        "bits_per_byte": bits_per_byte,
        "byte_perplexity": exp_mean(nats_per_byte),
        "word_perplexity": exp_mean(loss_per_unit(logprob, n_words)),
    }


def loss_per_unit(logprob: Mean, units: float) -> Value:
    """Return the loss in nats per byte or word, from a mean log-probability per token."""
    tokens_per_unit = logprob.tokens / units
    return with_errors(-logprob.total / units, logprob, lambda error: error * tokens_per_unit)


class PairedLogprobs(NamedTuple):
    """Log-probabilities [N] of the real tokens, nats: NaN in both unless both are finite."""

    model: NDArray[np.float64]
    reference: NDArray[np.float64]
    both_finite: NDArray[np.bool_]

    def probability_changes(self) -> NDArray[np.float64]:
        """Return the changes of the tokens' probabilities [N]: model minus reference."""
        changes: NDArray[np.float64] = np.exp(self.model) - np.exp(self.reference)
        return changes

    def correlation(self) -> float | None:
        """Return the correlation of both losses; None if one is constant."""
        model = self.model[self.both_finite]
        reference = self.reference[self.both_finite]
        # Not from the standard deviation: rounding makes that of a constant about 1e-17.
        if not len(model) or not np.ptp(model) or not np.ptp(reference):
            return None
        return float(np.corrcoef(model, reference)[0, 1])


def paired_logprobs(columns: Columns) -> PairedLogprobs:
    """Return both models' log-probabilities where both are finite."""
    model = columns["logprob"].astype(np.float64)
    reference = columns["ref_logprob"].astype(np.float64)
    both_finite = np.isfinite(model) & np.isfinite(reference)
    # NaN instead of infinities: numpy warns about inf - inf.
    return PairedLogprobs(
        np.where(both_finite, model, np.nan), np.where(both_finite, reference, np.nan), both_finite
    )


def compared_averages(columns: Columns, assignment: BlockAssignment) -> dict[str, Average]:
    """Return the averages of a model that need its reference's log-probabilities.

    ``ref_ppl`` is of the tokens with two finite log-probabilities, so that it differs from the
    reference's own perplexity where the model has infinite losses.
    """
    pairs = paired_logprobs(columns)
    ppl = perplexity(mean_with_errors(pairs.model, None, assignment))
    ref_ppl = perplexity(mean_with_errors(pairs.reference, None, assignment))
    ln_ratio = mean_with_errors(pairs.reference - pairs.model, None, assignment)
    difference = Value(None)
    if ppl.value is not None and ref_ppl.value is not None:
        weighted = ref_ppl.value * pairs.reference - ppl.value * pairs.model
        linear = mean_with_errors(weighted, None, assignment)
        difference = Value(ppl.value - ref_ppl.value, linear.stderr, linear.stderr_independent)
    changes = pairs.probability_changes()
    averages: dict[str, Average] = {
        "ref_ppl": ref_ppl,
        "ln_ppl_ratio": ln_ratio,
        "ppl_ratio": exp_mean(ln_ratio),
        "ppl_difference": difference,
        "delta_p": mean_with_errors(changes, None, assignment),
        "delta_p_rms": root_of_mean(mean_with_errors(changes**2, None, assignment)),
    }
    if "same_top" in columns:
        # If the reference's logits are nan, argmax returns some token.
        averages["same_top"] = mean_with_errors(columns["same_top"], pairs.both_finite, assignment)
    return averages


def percentiles_of(values: Array) -> dict[str, float]:
    """Return percent ("50"), "min" and "max" -> percentile of finite values [N].

    Interpolated linearly at (N - 1) p as llama.cpp does; empty without values.
    """
    if not len(values):
        return {}
    shares = [0.0]
    for percent in PERCENTS:
        shares.append(percent / 100)
    shares.append(1.0)
    quantiles = np.quantile(values.astype(np.float64), shares)
    return dict(zip(PERCENTILES, quantiles.tolist(), strict=True))


def kld_percentile_fields(percentiles: dict[str, float]) -> dict[str, Any]:
    """Return the fields of a row that hold the percentiles of its KLDs."""
    return {
        "kld_median": percentiles.get("50"),
        "kld_p99": percentiles.get("99"),
        "kld_p99_9": percentiles.get("99.9"),
        "kld_max": percentiles.get("max"),
        "kld_percentiles": percentiles,
    }
