"""How scores are spread over the tokens: percentiles, histogram, confidence of the reference, position in the window.

Everything here is over single tokens, from float32 or bool columns [N]; other means have their errors in
``eval/stats/estimates.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.eval.stats.uncertainty import FEWEST_WAVES, Count, Error, Places, clustered_error

PERCENTS = (0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
"""llama.cpp's percentiles of KLD and of the change of probability, and both quartiles."""
CONFIDENCES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Edges of qbench's five buckets of the reference's largest probability; the last one holds 1.0."""
DECADES, BINS_PER_DECADE = (-8, 2), 8
"""Histogram of log10 KLD: from 1e-8, where float32 rounding begins, to 100 nats."""
CURVE_BINS = 32
LEAST_BLOCKS = FEWEST_WAVES + 1
"""Blocks of the text that a bin needs for an error, which is then known to 35 % or better."""


@dataclass(frozen=True)
class Histogram:
    """``counts[i]``: tokens with KLD in [10 ** e, 10 ** (e + 1 / per_decade)), e = first + i / per_decade.

    ``below``: tokens with less, those at or below 0 included; ``above``: those with more.
    """

    first: int
    per_decade: int
    counts: tuple[Count, ...]
    below: Count
    above: Count


@dataclass(frozen=True)
class Curve:
    """Means over positions in the window: bin i holds positions ``edges[i]`` to ``edges[i + 1] - 1``.

    ``nll`` (nats) and ``kld`` (nats; None without a reference) are None where a bin has no finite score.  Their errors
    are standard errors by the blocks of the text (``eval/stats/uncertainty.py``), None where a bin has scores in fewer
    than ``LEAST_BLOCKS``, and None altogether in results of a compare_q that had none.
    """

    edges: tuple[Count, ...]
    nll: tuple[float | None, ...]
    kld: tuple[float | None, ...] | None = None
    nll_stderr: tuple[Error | None, ...] | None = None
    kld_stderr: tuple[Error | None, ...] | None = None


def percentiles_of(values: NDArray[Any]) -> dict[str, float]:
    """Percent -> percentile of finite values [N], "min" and "max" too, interpolated linearly at (N - 1) p as llama.cpp
    does; empty without values."""
    if not len(values):
        return {}
    quantiles = np.quantile(values.astype(np.float64), [0.0, *(percent / 100 for percent in PERCENTS), 1.0])
    return dict(zip(["min", *(f"{percent:g}" for percent in PERCENTS), "max"], quantiles.tolist(), strict=True))


def histogram_of(kld: NDArray[Any]) -> Histogram:
    """Histogram of finite KLD [N] over equal steps of its logarithm."""
    (low, high), edges = DECADES, (DECADES[1] - DECADES[0]) * BINS_PER_DECADE + 1
    bins = np.power(10.0, np.linspace(low, high, edges))
    place = np.searchsorted(bins, kld.astype(np.float64), side="right")
    counts = np.bincount(place, minlength=edges + 1)
    return Histogram(low, BINS_PER_DECADE, tuple(counts[1:-1].tolist()), int(counts[0]), int(counts[-1]))


def bucket_of(ref_top1_logprob: NDArray[Any]) -> NDArray[np.intp]:
    """Bucket [N] of the reference's largest probability, 0 to 4; ``CONFIDENCES`` are their edges."""
    return np.searchsorted(CONFIDENCES[1:-1], np.exp(ref_top1_logprob.astype(np.float64)), side="right")


def position_bins(position: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """(edges, the bin [N] of each position [N] in the window): bins whose widths grow with the position.

    Early positions change fastest: the loss falls about as fast from 1 to 2 as from 500 to 1,000.
    """
    low, high = int(position.min()), int(position.max()) + 1
    edges = np.unique(np.geomspace(low + 1, high + 1, CURVE_BINS + 1).round().astype(np.int64)) - 1
    return edges, np.searchsorted(edges, position, side="right") - 1


def sums_by_bin(
    place: NDArray[Any], group: NDArray[Any], values: NDArray[Any], bins: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(counts, sums) [bins, groups] of the finite ``values`` [N], by their bin and their group, integers from 0 on [N].

    A group is what varies as a whole: a block of the text, or a window.
    """
    finite, groups = np.isfinite(values), int(group.max()) + 1
    cell = place[finite] * groups + group[finite]
    counts = np.bincount(cell, minlength=bins * groups)
    sums = np.bincount(cell, values[finite].astype(np.float64), minlength=bins * groups)
    return counts.reshape(bins, groups), sums.reshape(bins, groups)


def curve_over_position(
    position: NDArray[Any], nll: NDArray[Any], kld: NDArray[Any] | None, places: Places | None = None
) -> Curve:
    """Mean loss and KLD over position [N] in the window, in ``position_bins``.

    ``places``: of the entries in the text, for errors; None: there are none.
    """
    edges, place = position_bins(position)
    bins = len(edges) - 1

    def means(values: NDArray[Any]) -> tuple[float | None, ...]:
        finite = np.isfinite(values)
        count = np.bincount(place[finite], minlength=bins)
        total = np.bincount(place[finite], values[finite].astype(np.float64), minlength=bins)
        return tuple(float(t / n) if n else None for t, n in zip(total, count, strict=True))

    def errors(values: NDArray[Any]) -> tuple[float | None, ...] | None:
        if places is None:
            return None
        return tuple(
            clustered_error(sums, counts, places.length) if np.count_nonzero(counts) >= LEAST_BLOCKS else None
            for counts, sums in zip(*sums_by_bin(place, places.block, values, bins), strict=True)
        )

    of_kld = (None, None) if kld is None else (means(kld), errors(kld))
    return Curve(tuple(edges.tolist()), means(nll), of_kld[0], errors(nll), of_kld[1])
