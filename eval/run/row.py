"""The statistics of a row of results.json, from the estimates of its scores: one line for each
field.
"""

from __future__ import annotations

from typing import Any

from ..stats.estimates import AgainstReference, Estimates, Sampled, TextRates


def fields_of(estimates: Estimates) -> dict[str, Any]:
    """The fields of ``eval.results.ModelResult`` that hold these estimates."""
    fields: dict[str, Any] = {
        "ppl": estimates.ppl.value,
        "ppl_stderr": estimates.ppl.stderr,
        "ppl_stderr_independent": estimates.ppl.stderr_independent,
        "logprob_sum": estimates.ppl.logprob_sum,
        "tokens": estimates.ppl.tokens,
        "non_finite": estimates.ppl.non_finite,
        "blocks": estimates.blocks,
        "curve": estimates.curve,
    }
    if estimates.top1 is not None:
        fields["top1"] = estimates.top1.value
    if estimates.entropy is not None:
        fields["entropy"] = estimates.entropy.value
    if estimates.rates is not None:
        fields |= of_rates(estimates.rates)
    if estimates.against is not None:
        fields |= against_reference(estimates.against)
    if estimates.sampled is not None:
        fields |= of_sample(estimates.sampled)
    return fields


def of_rates(rates: TextRates) -> dict[str, Any]:
    """The fields in units of the text."""
    return {
        "bits_per_byte": rates.bits_per_byte.value,
        "byte_perplexity": rates.byte_perplexity.value,
        "word_perplexity": rates.word_perplexity.value,
    }


def against_reference(against: AgainstReference) -> dict[str, Any]:
    """The fields of a model that was compared with a reference."""
    return {
        "ref_ppl": against.ref_ppl.value,
        "ref_ppl_tokens": against.ref_ppl.tokens,
        "ln_ppl_ratio": against.ln_ppl_ratio.value,
        "ln_ppl_ratio_stderr": against.ln_ppl_ratio.stderr,
        "ppl_ratio": against.ppl_ratio.value,
        "ppl_ratio_stderr": against.ppl_ratio.stderr,
        "ppl_difference": against.ppl_difference.value,
        "ppl_difference_stderr": against.ppl_difference.stderr,
        "correlation": against.correlation,
        "kld": against.kld.value,
        "kld_stderr": against.kld.stderr,
        "kld_sum": against.kld.total,
        "kld_tokens": against.kld.tokens,
        "kld_non_finite": against.kld.non_finite,
        "kld_median": against.kld_percentiles.get("50"),
        "kld_p99": against.kld_percentiles.get("99"),
        "kld_p99_9": against.kld_percentiles.get("99.9"),
        "kld_max": against.kld_percentiles.get("max"),
        "kld_percentiles": against.kld_percentiles,
        "delta_p": against.delta_p.value,
        "delta_p_stderr": against.delta_p.stderr,
        "delta_p_rms": against.delta_p_rms.value,
        "delta_p_rms_stderr": against.delta_p_rms.stderr,
        "delta_p_percentiles": against.delta_p_percentiles,
        "same_top": against.same_top.value,
        "same_top_stderr": against.same_top.stderr,
    }


def of_sample(sampled: Sampled) -> dict[str, Any]:
    """The errors of spread windows as a sample of the text."""
    return {"ln_ppl_stderr_of_text": sampled.nll, "kld_stderr_of_text": sampled.kld}
