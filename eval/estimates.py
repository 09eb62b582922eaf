"""Per-token scores -> estimates.  numpy only; sums and counts travel, one division at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_EXPONENT = math.log(1.7e308)


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(-logprob_sum / tokens); None if nothing finite was scored, or if it overflows.

    ``tokens`` counts the finite log-probabilities (nats) that are in the sum; ``non_finite`` those left out of it.
    """

    value: float | None
    logprob_sum: float
    tokens: int
    non_finite: int


@dataclass(frozen=True)
class Mean:
    """``value`` = total / tokens; None if no entry was finite.  ``non_finite`` counts the entries left out of both."""

    value: float | None
    total: float
    tokens: int
    non_finite: int


@dataclass(frozen=True)
class Estimates:
    """What a model's scores say of it; None for what it has no scores of.

    ``kld``: KL(reference || model), nats, over all scored positions; an infinite or undefined one is left out and
    counted.  ``entropy``: of the model's distribution, nats, likewise.  ``top1``: share of the positions at which the
    real token is the model's most probable one, of those with a finite log-probability.  ``same_top``: share at which
    model and reference have the same most probable token, of those at which both log-probabilities are finite.
    ``ref_ppl``: the reference's perplexity on the same positions, from its own logits.
    """

    ppl: Perplexity
    kld: Mean | None
    same_top: Mean | None
    top1: Mean | None
    entropy: Mean | None
    ref_ppl: Perplexity | None


def perplexity(logprob: NDArray[np.float32]) -> Perplexity:
    """Perplexity of float32 log-probabilities of any shape, summed in float64."""
    finite = np.isfinite(logprob)
    total, tokens = float(logprob[finite].sum(dtype=np.float64)), int(finite.sum())
    known = tokens > 0 and -total / tokens < LARGEST_EXPONENT
    return Perplexity(math.exp(-total / tokens) if known else None, total, tokens, int(finite.size - tokens))


def mean(values: NDArray[Any], finite: NDArray[np.bool_] | None = None) -> Mean:
    """Mean of float32 or bool values [N], summed in float64, over the finite ones (and, of those, where ``finite``)."""
    used = np.isfinite(values) if finite is None else np.isfinite(values) & finite
    total, tokens = float(values[used].sum(dtype=np.float64)), int(used.sum())
    return Mean(total / tokens if tokens else None, total, tokens, int(used.size - tokens))


def summarize(columns: Mapping[str, NDArray[Any]]) -> Estimates:
    """All estimates of one model's columns [N] (``StoredScores.columns``), of which only ``logprob`` must be there."""
    finite = np.isfinite(columns["logprob"])
    # Where the reference is nan, its most probable token is whatever argmax made of that.
    both = finite & np.isfinite(columns.get("ref_logprob", columns["logprob"]))

    def of(name: str, where: NDArray[np.bool_] | None = None) -> Mean | None:
        return mean(columns[name], where) if name in columns else None

    reference = perplexity(columns["ref_logprob"]) if "ref_logprob" in columns else None
    return Estimates(
        perplexity(columns["logprob"]), of("kld"), of("same_top", both), of("top1", finite), of("entropy"), reference
    )
