"""Means of a model's scores by position in the window."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .uncertainty import (
    LEAST_BLOCKS,
    Array,
    BlockAssignment,
    Count,
    Error,
    low_frequency_error,
)

CURVE_BINS = 32


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
        """ValueError for edges that do not increase, or if bins and values differ in number."""
        # The first edge is above 0: the first token of a window, at position 0, is not scored.
        for low, high in itertools.pairwise((0, *self.edges)):
            if low >= high:
                raise ValueError("its edges do not increase")
        bins = max(len(self.edges) - 1, 0)
        for values in (self.nll, self.kld, self.nll_stderr, self.kld_stderr):
            if values is not None and len(values) != bins:
                raise ValueError(f"has {len(values)} values for {bins} bins")


def curve_over_position(
    position: Array, nll: Array, kld: Array | None, assignment: BlockAssignment
) -> Curve:
    """Return the mean loss [N] and KLD [N] by position [N] in the window.

    The widths of the bins grow with the position, because early positions change fastest: the loss
    falls about as fast from 1 to 2 as from 500 to 1,000.
    """
    first = int(position.min())
    end = int(position.max()) + 1
    # The edges are evenly spaced in log(position + 1).
    spaced = np.geomspace(first + 1, end + 1, CURVE_BINS + 1)
    # In short windows several edges are rounded to one position, which is one edge.
    edges = np.unique(spaced.round().astype(np.int64)) - 1
    bin_of_score = np.searchsorted(edges, position, side="right") - 1
    n_bins = len(edges) - 1
    nll_means, nll_errors = means_by_bin(nll, bin_of_score, n_bins, assignment)
    if kld is None:
        return Curve(tuple(edges.tolist()), nll_means, None, nll_errors, None)
    kld_means, kld_errors = means_by_bin(kld, bin_of_score, n_bins, assignment)
    return Curve(tuple(edges.tolist()), nll_means, kld_means, nll_errors, kld_errors)


def means_by_bin(
    scores: Array, bin_of_score: Array, n_bins: int, assignment: BlockAssignment
) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    """Return the mean of the finite scores [N] of each bin, and its standard error."""
    finite = np.isfinite(scores)
    finite_scores = scores[finite].astype(np.float64)
    bins = bin_of_score[finite]
    n_blocks = int(assignment.block.max()) + 1
    # A cell holds the scores of one bin in one block: the sums of all cells in one pass.
    cell = bins * n_blocks + assignment.block[finite]
    n_cells = n_bins * n_blocks
    sums = np.bincount(cell, finite_scores, n_cells).reshape(n_bins, n_blocks)
    counts = np.bincount(cell, minlength=n_cells).reshape(n_bins, n_blocks)
    bin_totals = np.bincount(bins, finite_scores, n_bins)
    bin_counts = np.bincount(bins, minlength=n_bins)
    means: list[float | None] = []
    errors: list[float | None] = []
    for number in range(n_bins):
        mean = None
        if bin_counts[number]:
            mean = float(bin_totals[number] / bin_counts[number])
        means.append(mean)
        error = None
        if np.count_nonzero(counts[number]) >= LEAST_BLOCKS:
            error = low_frequency_error(sums[number], counts[number], assignment.length)
        errors.append(error)
    return tuple(means), tuple(errors)
