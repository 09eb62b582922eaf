"""How the divergence of single tokens is spread: a row of quartiles for each model, and histograms, one or all.

KLD is on a logarithmic axis: it runs over seven powers of ten within one text.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from compare_q.eval.plots import looks, style
from compare_q.eval.plots.looks import split_label
from compare_q.eval.plots.style import Theme
from compare_q.eval.results.run_result import ModelResult, TextResult
from compare_q.eval.stats.distributions import Histogram

TITLE, X_LABEL = "KL divergence of single tokens", "KL divergence of single tokens (nats)"
BOXES = "box: median and quartiles; whiskers: 1 to 99 %; marker: mean; tick: maximum"
ROW, MARGINS, SINGLE = 0.3, 3.0, 5.6
"""Inches: height of each model's row, of what is above and below all rows, and of the histogram of one model."""
LABEL_WIDTH, LETTERS = 2.3, 80
"""Inches that the labels of the rows take at most, and letters that a line of the heading then holds."""
LEGEND = 62.0
"""Points from the axes to the legend: ticks, and two lines of the axis' name."""
LABEL_LETTERS = 50
"""Letters of a label in a line of the heading, even if all are W."""
COLUMN = 57
"""Points that a column of numbers takes."""
SMALLEST = 1e-8
"""Nats; smaller values are roundings of float32, and lie beyond the left end of an axis."""
COLUMNS = ("median", "mean", "p99", "max")
RIDGE = 1.9
"""Height of the highest bin of all models, in rows."""
CUT = 1e-3
"""The largest share of a model's tokens that the lowest bin may pool."""


@dataclass(frozen=True)
class Divergence:
    """One model's KLD (nats): its label, its mean, its percentiles (``distributions.percentiles_of``), its histogram.

    ``group``: models of one group have one colour; empty: the label's first word.  ``number``: of the model in its run,
    which the artists' ids have.
    """

    label: str
    mean: float
    percentiles: dict[str, float]
    histogram: Histogram
    group: str = ""
    number: int = 0


def has_spread(model: ModelResult) -> bool:
    """Whether it is known how the KLD of its tokens is spread, and not only its mean."""
    return bool(model.estimates and model.estimates.against and model.estimates.against.kld_percentiles)


def divergence_of(model: ModelResult, number: int = 0) -> Divergence:
    """How the KLD of a model that has one is spread; ValueError if it has none."""
    against = model.estimates.against if model.estimates else None
    if against is None or against.kld.value is None:
        raise ValueError(f"{model.label}: has no KLD")
    kld = against.kld.value, against.kld_percentiles, against.kld_histogram
    return Divergence(model.marked_label, *kld, model.group, number)


def floor_of(text: TextResult) -> Divergence | None:
    """How the KLD of the noise floor is spread; None without one."""
    return divergence_of(text.noise_floor) if text.noise_floor and has_spread(text.noise_floor) else None


def spread_plot(
    models: Sequence[Divergence], *, title: str, subtitle: str = "", floor: Divergence | None = None, dark: bool = False
) -> Figure:
    """A row a model, the smallest mean first: quartiles, whiskers, mean, maximum, and their numbers at the right.

    A whisker that begins at 0 or below comes out of the left edge, without its cap.  ``floor``: has a line.
    """
    ranked = _ranked(models)
    shown = [x for m in ranked for x in (m.mean, *(m.percentiles[p] for p in ("1", "max"))) if x >= SMALLEST]
    if not shown:
        raise ValueError("no token has a KLD above 0")
    with style.canvas(_height(title, len(ranked)), title, f"{subtitle}\n{BOXES}", dark=dark, letters=LETTERS) as drawn:
        figure, axes, theme = drawn
        axes.set(xscale="log", xlabel=X_LABEL, xlim=(min(shown) / 1.5, max(shown) * 1.5))
        style.log_ticks(axes.xaxis)
        colours = _rows(axes, ranked, theme, floor)
        for i, (model, (colour, marker)) in enumerate(zip(ranked, colours, strict=True)):
            number, p = model.number, model.percentiles
            at = {name: max(value, axes.get_xlim()[0]) for name, value in p.items()}
            box: dict[str, Any] = {"color": colour, "alpha": 0.45, "lw": 0, "zorder": 3, "gid": f"box-{number}"}
            axes.barh(i, at["75"] - at["25"], 0.56, at["25"], **box)
            ends = [x for x in ("1", "99") if at[x] == p[x]]
            axes.plot([at["1"], at["99"]], [i, i], color=colour, lw=1.3, zorder=2, gid=f"whisker-{number}")
            axes.plot(
                [at[x] for x in ends], [i] * len(ends), "|", color=colour, ms=8, mew=1.3, zorder=2, gid=f"cap-{number}"
            )
            axes.plot([at["50"]] * 2, [i - 0.28, i + 0.28], color=theme.ink, lw=1.8, zorder=4, gid=f"median-{number}")
            axes.plot(at["max"], i, "|", color=theme.muted, alpha=0.8, ms=6, gid=f"max-{number}")
            axes.plot(
                model.mean, i, marker, color=colour, ms=7, mec=theme.paper, mew=0.8, zorder=5, gid=f"mean-{number}"
            )
            write_numbers(axes, i, [_short(value) for value in (p["50"], model.mean, p["99"], p["max"])], theme, number)
        write_numbers(axes, -1, COLUMNS, theme)
        style.freeze_layout(figure)
        if floor is not None:
            name_floor(axes, floor.label, floor.mean, theme, [model.label for model in ranked])
    return figure


def ridge_plot(
    models: Sequence[Divergence], *, title: str, subtitle: str = "", floor: Divergence | None = None, dark: bool = False
) -> Figure:
    """The histograms of all models, the smallest mean first, at one scale; a marker at each mean."""
    ranked = _ranked(models)
    edges, shares, note = binned_shares([model.histogram for model in ranked])
    subtitle = f"{subtitle}\nshare of tokens by KLD, all at one scale; marker: mean"
    with style.canvas(_height(title, len(ranked) + 1), title, subtitle, dark=dark, letters=LETTERS) as drawn:
        figure, axes, theme = drawn
        _bin_axis(axes, edges, note)
        colours = _rows(axes, ranked, theme, floor, top=-RIDGE - 1)
        for i, (model, (colour, marker)) in enumerate(zip(ranked, colours, strict=True)):
            number, heights = model.number, i - RIDGE * shares[i] / shares.max()
            fill: dict[str, Any] = {"color": style.paper_of(colour, theme), "gid": f"fill-{number}"}
            axes.stairs(heights, edges, baseline=i, fill=True, zorder=2 + i / 1000, **fill)
            steps = axes.stairs(heights, edges, baseline=None, color=colour, lw=1.3, zorder=2 + (i + 0.5) / 1000)
            steps.set_gid(f"ridge-{number}")
            if edges[0] <= model.mean <= edges[-1]:
                mean: dict[str, Any] = {
                    "color": colour,
                    "ms": 7,
                    "mec": theme.paper,
                    "mew": 0.8,
                    "gid": f"mean-{number}",
                }
                axes.plot(model.mean, i, marker, zorder=4, clip_on=False, **mean)
            write_numbers(axes, i, [_short(model.mean)], theme, number)
        write_numbers(axes, -1, ["mean"], theme)
        style.freeze_layout(figure)
        if floor is not None:
            name_floor(axes, floor.label, floor.mean, theme, [model.label for model in ranked])
    return figure


def histogram_plot(
    model: Divergence, *, title: str, subtitle: str = "", floor: Divergence | None = None, dark: bool = False
) -> Figure:
    """The histogram of one model, its median and mean, and the outline of the noise floor's histogram."""
    compared = [floor] if floor is not None and floor.label != model.label else []
    edges, shares, note = binned_shares([one.histogram for one in (model, *compared)])
    name = textwrap.fill(model.label, LABEL_LETTERS)
    with style.canvas(SINGLE, title, f"{name}\n{subtitle}", dark=dark) as (figure, axes, theme):
        _bin_axis(axes, edges, note)
        axes.set(ylabel="Share of tokens in a bin", ylim=(0, 1.15 * shares.max()))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        group = split_label(model.label, model.group)[0]
        colour = looks.group_styles([group], theme.ink)[group][0]
        axes.stairs(shares[0], edges, fill=True, color=colour, alpha=0.55, zorder=2)
        own, *others = looks.short_labels([one.label for one in (model, *compared)])
        axes.stairs(shares[0], edges, color=colour, lw=1.4, zorder=3, gid="share-0", label=own)
        for other, heights in zip(others, shares[1:], strict=True):
            name = f"noise floor ({other})"
            axes.stairs(heights, edges, color=theme.muted, lw=1.3, ls=":", zorder=3, gid="share-1", label=name)
        marks = sorted([(model.percentiles["50"], "median"), (model.mean, "mean")])
        for (x, name), side in zip(marks, ("right", "left"), strict=True):
            if edges[0] <= x <= edges[-1]:
                axes.axvline(
                    x, color=theme.ink, lw=1.2, ls="-" if name == "median" else "--", zorder=4, gid=f"{name}-0"
                )
                text = axes.annotate(f"{name} {_short(x)}", (x, 1.1 * shares.max()), (6 if side == "left" else -6, 0),
                                     textcoords="offset points", ha=side, va="center", size=10.5)  # fmt: skip
                text.set(path_effects=style.halo(theme), zorder=5, gid="label-0")
        if compared:
            below = axes.transAxes + ScaledTranslation(0, -LEGEND / 72, figure.dpi_scale_trans)
            columns = 2 if sum(len(words) for words in axes.get_legend_handles_labels()[1]) <= LETTERS * 0.8 else 1
            axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=below, ncols=columns)
        style.freeze_layout(figure)
    return figure


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


def _height(title: str, rows: int) -> float:
    """Inches of the figure: for rows, what is above and below them, and each further line of the title."""
    return MARGINS + ROW * (rows + max(len(textwrap.wrap(title, LETTERS // 2)) - 1, 0))


def _ranked(models: Sequence[Divergence]) -> list[Divergence]:
    """The smallest mean first."""
    if not models:
        raise ValueError("no model was compared with a reference")
    return sorted(models, key=lambda model: (model.mean, model.label))


def _rows(
    axes: Axes, ranked: Sequence[Divergence], theme: Theme, floor: Divergence | None, top: float = -1.6
) -> list[tuple[str, str]]:
    """Sets up the rows and the noise floor's line; colour and marker of each row."""
    styles = label_rows(axes, [(model.label, model.group, model.number) for model in ranked], theme, top)
    if floor is not None:
        draw_floor(axes, floor.mean, theme)
    return styles


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


def draw_floor(axes: Axes, mean: float, theme: Theme) -> None:
    """The noise floor's dotted line, unless it is left of the axes."""
    if mean >= axes.get_xlim()[0]:
        axes.axvline(mean, color=theme.muted, ls=(0, (1, 2)), lw=1.6, zorder=3.5, gid="level-0")


def name_floor(axes: Axes, label: str, mean: float, theme: Theme, rows: Sequence[str]) -> None:
    """The name of the noise floor at the top of its line: right or left, or without the label, as there is room.

    ``rows``: the labels of the rows.
    """
    if not axes.get_xlim()[0] <= mean <= axes.get_xlim()[1]:
        return
    name = axes.annotate("", (mean, axes.get_ylim()[1]), (0, -8), textcoords="offset points", va="center")
    name.set(color=theme.muted, size=10.5, gid="level-name-0", in_layout=False)
    for words, (flush, shift) in itertools.product(
        (f"noise floor ({looks.short_labels([label, *rows])[0]})", "noise floor"), (("left", 6), ("right", -6))
    ):
        name.set(text=f"{words} {_short(mean)}", ha=flush, position=(shift, -8))
        box = name.get_window_extent()
        if axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1:
            return


def write_numbers(axes: Axes, row: int, texts: Sequence[str], theme: Theme, number: int = -1) -> None:
    """Columns of numbers right of a row, of which the model's ``number`` is told; row -1 for their heads."""
    for column, text in enumerate(texts):
        place = axes.annotate(text, (1, max(row, -0.9)), (COLUMN * (column + 1), 0), ("axes fraction", "data"),
                              "offset points", ha="right", va="center", size=10)  # fmt: skip
        place.set(color=theme.muted if row < 0 else theme.ink, gid=f"head-{column}" if row < 0 else f"number-{number}")


def _bin_axis(axes: Axes, edges: NDArray[np.float64], note: str) -> None:
    axes.set(xscale="log", xlabel=f"{X_LABEL}\n{note}".strip(), xlim=(edges[0], edges[-1]))
    style.log_ticks(axes.xaxis)


def _short(value: float) -> str:
    """Two or three significant digits, for which a column has room: 0.00154, 12.3, -0.0200; 0 for rounding."""
    if abs(value) < SMALLEST:
        return "0"
    if value < 0:
        return f"-{_short(-value)}"
    if value < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
