"""How the divergence of single tokens is spread: a row for each model, of quartiles or a histogram.

KLD is on a logarithmic axis: it runs over seven powers of ten within one text.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from compare_q.eval.plots import looks, style
from compare_q.eval.plots.looks import split_label
from compare_q.eval.plots.points import marked_subtitle
from compare_q.eval.plots.style import Theme
from compare_q.eval.results.run_result import ModelResult, TextResult
from compare_q.eval.stats.distributions import Histogram

TITLE = "KL divergence of single tokens"
MOST_DECADES = 4.0
"""With more, only the powers of ten have a tick."""
BOXES = "box: median and quartiles; whiskers: 1 to 99 %; marker: mean; tick: maximum"
RIDGES = "share of tokens by KLD, all at one scale; marker: mean"
ROW, MARGINS = 0.3, 3.0
"""Inches: height of each model's row, and of what is above and below all rows."""
LABEL_WIDTH, LETTERS = 2.3, 80
"""Inches that the labels of the rows take at most, and letters that a line of the heading then holds."""
COLUMN = 57
"""Points that a column of numbers takes."""
SMALLEST = 1e-8
"""Nats; smaller values are roundings of float32, and lie beyond the left end of an axis."""
RIDGE = 1.9
"""Height of the highest bin of all models, in rows."""
CUT = 1e-3
"""The largest share of a model's tokens that the lowest bin may pool."""


class Spread(NamedTuple):
    """How the KLD (nats) of a model's tokens is spread; ``number``: of the model in its run, for the artists' ids."""

    number: int
    model: ModelResult
    mean: float
    percentiles: dict[str, float]
    histogram: Histogram


def spreads_of(text: TextResult) -> list[Spread]:
    """How the KLD of single tokens is spread for each model of which that is known, the smallest mean first."""
    spreads = []
    for number, model in enumerate(text.models):
        against = model.estimates.against if model.estimates else None
        if against and against.kld_percentiles and against.kld.value is not None:
            known = against.kld.value, against.kld_percentiles, against.kld_histogram
            spreads.append(Spread(number, model, *known))
    return sorted(spreads, key=lambda spread: (spread.mean, spread.model.marked_label))


def spread_plot(text: TextResult, *, title: str = "", dark: bool = False) -> Figure:
    """A row a model, the smallest mean first: quartiles, whiskers, mean, maximum, and their numbers at the right.

    A whisker that begins at 0 or below comes out of the left edge, without its cap.
    """
    spreads = _known(text)
    shown = [x for s in spreads for x in (s.mean, s.percentiles["1"], s.percentiles["max"]) if x >= SMALLEST]
    if not shown:
        raise ValueError("no token has a KLD above 0")
    left = min(shown) / 1.5
    with _rows(text, spreads, (left, max(shown) * 1.5), BOXES, title, dark=dark) as (axes, theme, styles):
        for i, (spread, (colour, marker)) in enumerate(zip(spreads, styles, strict=True)):
            number, p = spread.number, spread.percentiles
            at = {name: max(value, left) for name, value in p.items()}
            box: dict[str, Any] = {"color": colour, "alpha": 0.45, "lw": 0, "zorder": 3, "gid": f"box-{number}"}
            axes.barh(i, at["75"] - at["25"], 0.56, at["25"], **box)
            axes.plot([at["1"], at["99"]], [i, i], color=colour, lw=1.3, zorder=2, gid=f"whisker-{number}")
            ends = [at[x] for x in ("1", "99") if at[x] == p[x]]
            caps = axes.plot(ends, [i] * len(ends), "|", color=colour, ms=8, mew=1.3, zorder=2)[0]
            caps.set_gid(f"cap-{number}")
            axes.plot([at["50"]] * 2, [i - 0.28, i + 0.28], color=theme.ink, lw=1.8, zorder=4, gid=f"median-{number}")
            axes.plot(at["max"], i, "|", color=theme.muted, alpha=0.8, ms=6, gid=f"max-{number}")
            _draw_mean(axes, i, spread, colour, marker, theme)
            write_numbers(axes, i, [short(x) for x in (p["50"], spread.mean, p["99"], p["max"])], theme, number)
        write_numbers(axes, -1, ("median", "mean", "p99", "max"), theme)
    return axes.figure.get_figure(root=True)


def ridge_plot(text: TextResult, *, title: str = "", dark: bool = False) -> Figure:
    """The histograms of all models, the smallest mean first, at one scale; a marker at each mean."""
    spreads = _known(text)
    edges, shares, note = binned_shares([spread.histogram for spread in spreads])
    limits = float(edges[0]), float(edges[-1])
    with _rows(text, spreads, limits, RIDGES, title, dark=dark, above=1 + RIDGE, note=note) as (axes, theme, styles):
        for i, (spread, (colour, marker)) in enumerate(zip(spreads, styles, strict=True)):
            number, heights = spread.number, i - RIDGE * shares[i] / shares.max()
            fill: dict[str, Any] = {"color": style.paper_of(colour, theme), "gid": f"fill-{number}"}
            axes.stairs(heights, edges, baseline=i, fill=True, zorder=2 + i / 1000, **fill)
            steps = axes.stairs(heights, edges, baseline=None, color=colour, lw=1.3, zorder=2 + (i + 0.5) / 1000)
            steps.set_gid(f"ridge-{number}")
            if limits[0] <= spread.mean <= limits[1]:
                _draw_mean(axes, i, spread, colour, marker, theme)
            write_numbers(axes, i, [short(spread.mean)], theme, number)
        write_numbers(axes, -1, ["mean"], theme)
    return axes.figure.get_figure(root=True)


def _known(text: TextResult) -> list[Spread]:
    spreads = spreads_of(text)
    if not spreads:
        raise ValueError("no model was compared with a reference")
    return spreads


@contextmanager
def _rows(
    text: TextResult, spreads: Sequence[Spread], limits: tuple[float, float], explained: str, title: str, *,
    dark: bool, above: float = 1.6, note: str = "",
) -> Iterator[tuple[Axes, Theme, list[tuple[str, str]]]]:  # fmt: skip
    """Axes with a row a model, and colour and marker of each; all is to be drawn within the block.

    ``above``: rows that are free above the first; ``note``: a second line of the axis' name.
    """
    title, labels = title or TITLE, [spread.model.marked_label for spread in spreads]
    subtitle = f"{marked_subtitle(text, labels)}\n{explained}"
    more = max(len(textwrap.wrap(title, LETTERS // 2)) - 1, 0) + (above > 2)
    height = MARGINS + ROW * (len(spreads) + more)
    with style.canvas(height, title, subtitle, dark=dark, letters=LETTERS) as (figure, axes, theme):
        axes.set(xscale="log", xlabel=f"{TITLE} (nats)\n{note}".strip(), xlim=limits)
        style.log_ticks(axes.xaxis, sparse=limits[1] / limits[0] > 10**MOST_DECADES)
        rows = [(spread.model.marked_label, spread.model.group, spread.number) for spread in spreads]
        yield axes, theme, label_rows(axes, rows, theme, -above)
        style.freeze_layout(figure)
        floor = text.noise_floor
        if floor is not None and floor.mean_kld is not None:
            draw_floor(axes, floor.marked_label, floor.mean_kld, theme, labels)


def _draw_mean(axes: Axes, row: int, spread: Spread, colour: str, marker: str, theme: Theme) -> None:
    mean = axes.plot(spread.mean, row, marker, color=colour, ms=7, mec=theme.paper, mew=0.8, zorder=5, clip_on=False)[0]
    mean.set_gid(f"mean-{spread.number}")


def binned_shares(histograms: Sequence[Histogram]) -> tuple[NDArray[np.float64], NDArray[np.float64], str]:
    """(edges [B + 1], shares [N, B] of the tokens in each bin, a note for the axis); each row of shares sums to 1.

    The first bin pools all smaller values: as many bins as hold at most ``CUT`` of each model's tokens together, and at
    least the values below the first edge.  The values above the last edge have a bin, too.
    """
    first, per_decade = histograms[0].first, histograms[0].per_decade
    counts = np.array([[h.below, *h.counts, h.above] for h in histograms], dtype=np.float64)
    shares = counts / counts.sum(axis=1, keepdims=True)
    edges = 10.0 ** (first + np.arange(-1, counts.shape[1]) / per_decade)
    start = max(int((np.cumsum(shares, axis=1).max(axis=0) <= CUT).sum()) - 1, 0)
    stop = int(np.flatnonzero(shares.max(axis=0)).max()) + 1
    pooled = shares[:, : start + 1].sum(axis=1, keepdims=True)
    notes = ["the first bin holds all that is less"] if pooled.max() > CUT else []
    notes += ["the last bin holds all that is more"] if stop == len(edges) - 1 else []
    return edges[start : stop + 1], np.hstack([pooled, shares[:, start + 1 : stop]]), "; ".join(notes)


def label_rows(axes: Axes, rows: Sequence[tuple[str, str, int]], theme: Theme, top: float) -> list[tuple[str, str]]:
    """Rows 0, 1, ... downwards, each with its (label, group, number) at the left; colour and marker of their groups."""
    groups = [split_label(label, group)[0] for label, group, _ in rows]
    styles = looks.group_styles(groups, theme.ink, distinct=False)
    axes.set_ylim(len(rows) - 0.4, top)
    axes.set_yticks(range(len(rows)), looks.short_labels([label for label, _, _ in rows]))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    ticks = axes.get_yticklabels()
    wide = max(tick.get_window_extent().width for tick in ticks) / style.DPI
    axes.tick_params(axis="y", labelsize=float(ticks[0].get_fontsize()) * min(1, LABEL_WIDTH / wide))
    for tick, group, (_, _, number) in zip(ticks, groups, rows, strict=True):
        tick.set(color=style.ink_of(styles[group][0], theme), gid=f"label-{number}")
    return [styles[group] for group in groups]


def draw_floor(axes: Axes, label: str, mean: float, theme: Theme, rows: Sequence[str]) -> None:
    """The noise floor's dotted line, unless it is outside the axes, and its name at the top: right or left of the line,
    or without the label, as there is room.  ``rows``: the labels of the rows."""
    if not axes.get_xlim()[0] <= mean <= axes.get_xlim()[1]:
        return
    axes.axvline(mean, color=theme.muted, ls=(0, (1, 2)), lw=1.6, zorder=3.5, gid="level-0")
    name = axes.annotate("", (mean, axes.get_ylim()[1]), (0, -8), textcoords="offset points", va="center")
    name.set(color=theme.muted, size=10.5, gid="level-name-0", in_layout=False)
    for words, (flush, shift) in itertools.product(
        (f"noise floor ({looks.short_labels([label, *rows])[0]})", "noise floor"), (("left", 6), ("right", -6))
    ):
        name.set(text=f"{words} {short(mean)}", ha=flush, position=(shift, -8))
        box = name.get_window_extent()
        if axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1:
            return


def write_numbers(axes: Axes, row: int, texts: Sequence[str], theme: Theme, number: int = -1) -> None:
    """Columns of numbers right of a row, of which the model's ``number`` is told; row -1 for their heads."""
    for column, text in enumerate(texts):
        place = axes.annotate(text, (1, max(row, -0.9)), (COLUMN * (column + 1), 0), ("axes fraction", "data"),
                              "offset points", ha="right", va="center", size=10)  # fmt: skip
        place.set(color=theme.muted if row < 0 else theme.ink, gid=f"head-{column}" if row < 0 else f"number-{number}")


def short(value: float) -> str:
    """Two or three significant digits, for which a column has room: 0.00154, 12.3, -0.0200; 0 for rounding."""
    if abs(value) < SMALLEST:
        return "0"
    if value < 0:
        return f"-{short(-value)}"
    if value < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
