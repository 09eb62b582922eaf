"""The y axis of a scatter plot: its scale, its limits, its ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from eval.plots import style
from eval.plots.front import WIDE
from eval.plots.scatter_points import Level, Point

FLOOR = 0.045
"""Share of the axis below y = 0, or below the smallest y of a logarithmic axis: room for half a marker."""
MOST_TICKS, MOST_SPARSE = 16, 7
"""With more ticks at 1, 2 and 5 times the powers of ten, of a plot and of a card, only the powers have one."""
NEAREST, NEAREST_SPARSE = 0.035, 0.075
"""Share of the axis that is between two ticks, of a plot and of a card, at least: the height of their letters."""


def is_wide(values: Iterable[float]) -> bool:
    """Whether the values above 0 need a logarithmic axis; else an axis from 0 shows how many times as large each is."""
    above = [value for value in values if value > 0]
    return bool(above) and max(above) > WIDE * min(above)


@dataclass(frozen=True)
class Excess:
    """A scale for values around a ``reference`` > 0: equal steps are equal factors of the excess over the reference.

    Excesses below ``near``, a share of the reference, are nearly to scale, on both sides of it: the inverse hyperbolic
    sine.  The rows of results/h200/table that differ by 0.35 to 15,000 % from the reference share three quarters of it.
    ``near`` infinite: all are to scale.
    """

    reference: float
    near: float

    def height(self, y: Any) -> NDArray[np.float64]:
        """Value -> height on the axis."""
        excess = np.asarray(y, dtype=np.float64) / self.reference - 1
        return excess if math.isinf(self.near) else np.arcsinh(excess / self.near)

    def value(self, height: Any) -> NDArray[np.float64]:
        """Height on the axis -> value."""
        found = np.asarray(height, dtype=np.float64)
        return np.asarray(self.reference * (1 + (found if math.isinf(self.near) else self.near * np.sinh(found))))

    def ticks(self, low: float, high: float, *, sparse: bool) -> tuple[list[float], list[str]]:
        """(values, texts): 0 %, and 1, 2 and 5 times the powers of ten from about ``near`` on, in percent."""
        ends = [100 * (y / self.reference - 1) for y in (low, high)]
        if math.isinf(self.near):
            steps = MaxNLocator(4 if sparse else 8, steps=[1, 2, 2.5, 5, 10]).tick_values(*ends)
            shown = [float(step) for step in steps if ends[0] <= step <= ends[1]]
        else:
            shown = self._logarithmic(ends, MOST_SPARSE if sparse else MOST_TICKS)
        texts = [f"{'+' if e > 0 else ''}{style.tick_text(e)} %" for e in shown]
        return [self.reference * (1 + e / 100) for e in shown], texts

    def _logarithmic(self, ends: Sequence[float], most: int) -> list[float]:
        """Percents between the ends: 0, and on both sides 1, 2 and 5 times the powers of ten; these alone if many."""
        first, largest = 100 * self.near, max(100 * self.near, *map(abs, ends))
        decades = range(math.floor(math.log10(first)), math.ceil(math.log10(largest)) + 1)
        for factors in (1, 2, 5), (1,):
            steps = [f * 10.0**d for d in decades for f in factors if f * 10.0**d >= 0.7 * first]
            shown = [e for e in (*(-step for step in steps), 0.0, *steps) if ends[0] <= e <= ends[1]]
            if len(shown) <= most:
                break
        return shown


def excess_over(reference: float, points: Sequence[Point]) -> Excess:
    """The scale on which the quantized points can be told apart, and no further than their errors allow.

    It is nearly to scale up to the smallest excess or error, whichever is larger, of a quantized point; and wholly if
    these are not far apart.
    """
    sizes = [max(abs(p.y - reference), p.error or 0.0) for p in points if not p.unquantized] or [0.0]
    if not is_wide(sizes):
        return Excess(reference, math.inf)
    return Excess(reference, min(max(min(sizes) / reference, 1e-5), 0.1))


def ceiling(values: Sequence[float], least: float) -> float:
    """The largest value to draw to scale: with a larger one, half of the values would share a tenth of the axis."""
    ranked = sorted(values)
    for below, value in zip(ranked[(len(ranked) - 1) // 2 :], ranked[(len(ranked) + 1) // 2 :], strict=False):
        if 0 < 10 * (below - ranked[0]) < value - ranked[0] and value > max(1.5 * below, least):
            return below
    return ranked[-1]


def set_limits(
    axes: Axes, points: Sequence[Point], levels: Sequence[Level], top: float, scale: Excess | bool, *, sparse: bool
) -> None:
    """Room for all points up to the top, their error bars, and the levels (not those among points off the scale).

    ``scale``: an excess, or whether the axis is logarithmic; ``sparse``: ticks at the powers of ten alone.
    """
    all_to_scale = top >= max(p.y for p in points)
    heights = [min(p.y, top) for p in points] + [level.y for level in levels if all_to_scale or level.y <= top]
    heights += [p.y + sign * p.error for p in points if p.error and p.y <= top for sign in (1, -1)]
    if isinstance(scale, Excess):
        axes.set_yscale("function", functions=(scale.height, scale.value))
    elif scale:
        lowest = min(p.y for p in points if p.y > 0)
        heights = [max(y, lowest / 2) for y in heights if y > 0]  # a bar may reach down to 0
        axes.set_yscale("log")
    axes.update_datalim([(p.x, heights[0]) for p in points] + [(points[0].x, y) for y in heights])
    axes.autoscale_view()
    axes.autoscale(False)
    if isinstance(scale, Excess):
        limits = axes.get_ylim()
        ticks, texts = scale.ticks(*limits, sparse=sparse)
        write_ticks(axes, ticks, texts, scale.reference, sparse=sparse)
        axes.set_ylim(*limits)
    elif scale:
        style.log_ticks(axes.yaxis, sparse=sparse)
        make_room_for_zero(axes, points, sparse=sparse)


def make_room_for_zero(axes: Axes, points: Sequence[Point], *, sparse: bool) -> None:
    """A tick for 0 below a logarithmic axis that has points at 0 or below."""
    if all(p.y > 0 for p in points):
        return
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    axes.set_ylim(bottom=low / (high / low) ** (2 * FLOOR))
    texts = ["0", *axes.yaxis.get_major_formatter().format_ticks(ticks)]
    write_ticks(axes, [zero(axes), *ticks], texts, zero(axes), sparse=sparse)


def write_ticks(axes: Axes, ticks: Sequence[float], texts: Sequence[str], first: float, *, sparse: bool) -> None:
    """The ticks, without those whose texts would touch that of the ``first``, which is one of them."""
    heights = axes.transAxes.inverted().transform(axes.transData.transform([(1, y) for y in (first, *ticks)]))[:, 1]
    away = np.abs(heights[1:] - heights[0])
    kept = [i for i, gap in enumerate(away) if gap < 1e-9 or gap > (NEAREST_SPARSE if sparse else NEAREST)]
    axes.set_yticks([ticks[i] for i in kept], [texts[i] for i in kept])


def zero(axes: Axes) -> float:
    """The y at which a logarithmic axis shows 0."""
    low, high = axes.get_ylim()
    return float(low * (high / low) ** FLOOR)
