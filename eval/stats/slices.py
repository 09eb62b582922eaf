"""Scores of slices: named sets of a model's scored tokens, each given by a mask over the entries.

A slice has some statistics of the whole row (``eval/stats/row_statistics.py``), over fewer tokens.
Its error is the error of a ratio: the sum over the slice's tokens, divided by their number, where
both vary between the blocks of the row.  Blocks without a token of the slice are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..text.slice_names import BEGIN, REST, SURE, UNSURE
from .uncertainty import (
    LEAST_BLOCKS,
    Array,
    BlockAssignment,
    Columns,
    Count,
    Error,
    Mean,
    Value,
    mean_with_errors,
    perplexity,
)

Mask = NDArray[np.bool_]
SURE_FROM = np.float32(math.log(0.9))
"""Smallest log-probability of the reference's most probable token at which the reference is sure.

Both thresholds are rounded as the scores are, so that a probability of exactly 0.9 is sure, and 0.5
is not unsure.
"""
UNSURE_BELOW = np.float32(math.log(0.5))
BEGIN_LENGTH = 256
"""Number of tokens at the beginning of a window that are the slice ``begin``."""


@dataclass(frozen=True)
class Slice:
    """Statistics of the tokens of a slice; None for what is not known.

    ``tokens`` counts the finite log-probabilities; ``kld`` (nats) and ``same_top`` (a share from 0
    to 1) leave out the same entries as those of the whole row.  Standard errors are None if fewer
    than ``LEAST_BLOCKS`` blocks of the row have entries of the slice.
    """

    tokens: Count
    ppl: Annotated[float, Field(gt=0)] | None = None
    ppl_stderr: Error | None = None
    kld: float | None = None
    kld_stderr: Error | None = None
    same_top: float | None = None
    same_top_stderr: Error | None = None


def summarize(columns: Columns, mask: Mask, assignment: BlockAssignment) -> Slice:
    """Return the statistics of one slice.

    ``columns`` [N]: the scores of a model (``StoredScores.columns``).
    ``mask`` [N]: True for the entries of the slice.
    ``assignment``: the blocks of the entries of the whole row.
    """
    logprob = columns["logprob"]
    ppl = perplexity(masked_mean(logprob, mask, assignment))
    kld = Value(None)
    if "kld" in columns:
        mean_kld = masked_mean(columns["kld"], mask, assignment)
        kld = Value(mean_kld.value, mean_kld.stderr)
    same_top = Value(None)
    if "ref_logprob" in columns and "same_top" in columns:
        # If the reference's logits are nan, argmax returns some token.
        both_finite = np.isfinite(logprob) & np.isfinite(columns["ref_logprob"])
        mean_top = masked_mean(columns["same_top"], mask & both_finite, assignment)
        same_top = Value(mean_top.value, mean_top.stderr)
    return Slice(
        tokens=ppl.tokens,
        ppl=ppl.value,
        ppl_stderr=ppl.stderr,
        kld=kld.value,
        kld_stderr=kld.stderr,
        same_top=same_top.value,
        same_top_stderr=same_top.stderr,
    )


def masked_mean(values: Array, mask: Mask, assignment: BlockAssignment) -> Mean:
    """Return the mean of the finite ``values`` [N] where ``mask`` [N].

    Its error is None if too few blocks have such a value.
    """
    mean = mean_with_errors(values, mask, assignment)
    used = mask & np.isfinite(values)
    entries_by_block = np.bincount(assignment.block[used])
    if np.count_nonzero(entries_by_block) < LEAST_BLOCKS:
        return replace(mean, stderr=None)
    return mean


def by_confidence(columns: Columns, *, is_reference: bool = False) -> dict[str, Mask]:
    """Return the masks [N] of the tokens at which the reference is sure, and at which it is unsure.

    ``is_reference``: the columns are the reference's own.  The result is empty without a reference.
    An entry whose highest probability is not finite is in neither mask.
    """
    name = "ref_top1_logprob"
    if is_reference:
        name = "top1_logprob"
    if name not in columns:
        return {}
    highest = columns[name].astype(np.float32)
    finite = np.isfinite(highest)
    return {
        SURE: finite & (highest >= SURE_FROM),
        UNSURE: finite & (highest < UNSURE_BELOW),
    }


def by_position(position: Array) -> dict[str, Mask]:
    """Return the masks [N] of the first tokens of the windows and of the other ones.

    ``position`` [N]: of the tokens in their windows.
    """
    is_begin = np.asarray(position < BEGIN_LENGTH)
    return {BEGIN: is_begin, REST: ~is_begin}
