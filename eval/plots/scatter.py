"""Scatter plot of a quality measure (perplexity, KLD) over the size of a model (bits per weight,
GiB).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from ..results import MARK, RunResult
from . import labels, measures, picture_style
from . import points as data
from .measures import BPW, PPL, Measure, Size
from .picture_style import Theme, is_wide
from .points import Level, Point

EXCESS_AXIS = "Perplexity above the reference's"
BOLD = "bold: no other model is as small and better"
HEIGHT, MORE = 8.4, 0.12
"""Height (inches), and its increase for each point beyond the first ``labels.FEW``."""
MARKER_SIZE, RING, COVERED = 9.0, 5.0, 10.0
"""Size of a marker (points).  Growth of a covered marker (points); if several markers cover it, it
grows less for each.  Distance (pixels) below which a marker covers one that was drawn earlier."""
FLOOR, ZERO = 0.045, 0.1
"""Share of a linear axis below y = 0, and of a logarithmic axis between 0 and the smallest value.
"""
NEGLIGIBLE = 0.01
"""A logarithmic axis ends at this share of the smallest value of a quantized model; the rest is
linear down to 0."""
WRAP = 24, 28
"""Characters per line of a label, if there are many labels and if there are at most ``labels.FEW``.
"""
NAMES_ON_CARD = 8
"""Largest number of points on a card that all have labels; with more, only the ends of the Pareto
front have labels."""
CARD_MARGIN = 0.25
"""Share of the data's height that is free above it and below it on a card where all points have
labels."""
TICKS, CARD_TICKS = 16, 7
"""Maximum number of ticks of the y axis, in a plot and on a card."""


def scatter_figure(
    run: RunResult,
    *,
    size: Size = BPW,
    measure: Measure = PPL,
    max_x: float = math.inf,
    max_y: float = math.inf,
    title: str | None = None,
    dark: bool = False,
    log_y: bool | None = None,
    card: bool = False,
    origin: str = "",
) -> Figure:
    """Return the plot of a measure over a size; ValueError without a point.

    ``title`` None: the title names the measure; on a card it names the reference.  ``origin``:
    where and when the models ran, for a card.  ``log_y`` None: the y axis is logarithmic if values
    span more than a decade and a half.  Perplexity is drawn as the excess over the reference's
    perplexity, if that is known.
    """
    found = data.points_of(run, size, measure)[0]
    shown = [
        p
        for p in found
        if p.x <= max_x and p.y <= max_y and math.isfinite(p.x) and math.isfinite(p.y)
    ]
    if not shown:
        raise ValueError(f"no model has both {measure.name} and {size.name} within the limits")
    levels = [level for level in data.levels_of(run, measure) if level.y <= max_y]
    wide = is_wide(point.y for point in shown) if log_y is None else log_y
    scale = "log" if wide else "zero" if measure.kld else "linear"
    y_label = measures.kld_axis(run, measure) if measure.kld else measure.axis
    notes = [
        data.subtitle_of(run, [point.label for point in shown]),
        data.error_note(shown, measure),
        BOLD,
    ]
    reference = data.finite_reference(run) if measure is PPL and log_y is None else None
    if reference:
        scale, y_label = "percent", EXCESS_AXIS
        levels = [level._replace(y=100 * (level.y / reference - 1)) for level in levels]
        shown = [
            replace(p, y=100 * (p.y / reference - 1), error=p.error and 100 * p.error / reference)
            for p in shown
        ]
    ends = " (" if card else "\n"  # a card's axis is named up to the parenthesis
    if card:
        is_marked = len(shown) <= NAMES_ON_CARD and any(MARK in point.label for point in shown)
        notes = [run.subtitle, "; ".join(filter(None, [origin, data.NOT_AS_REQUESTED * is_marked]))]
        name = data.reference_name(run)
        title = f"{name}, quantized" if title is None and name else title
    return scatter_plot(
        shown,
        x_label=size.axis.partition(ends)[0],
        y_label=y_label.partition(ends)[0],
        title=f"{measure.title} of quantized models" if title is None else title,
        subtitle="\n".join(filter(None, notes)),
        dark=dark,
        levels=levels,
        scale=scale,
        card=card,
    )


def scatter_plot(
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    title: str,
    subtitle: str = "",
    dark: bool = False,
    levels: Sequence[Level] = (),
    scale: str = "linear",
    card: bool = False,
) -> Figure:
    """Return the finished plot, in which labels of points on the Pareto front are bold.

    ``scale``: "linear"; "zero", linear from 0; "log", on which 0 is at the bottom; "percent",
    logarithmic on both sides of 0 if excesses span more than a decade and a half.  ``card``: a
    small plot that labels few points.  Unquantized points far to the right are drawn at the edge,
    after a break of the axis.
    """
    if scale == "log" and not any(p.y > 0 for p in points):
        raise ValueError("nothing above 0 for a logarithmic axis")
    unquantized = {picture_style.tick_text(float(f"{p.x:.3g}")) for p in points if p.unquantized}
    points, edge = data.at_edge(sorted(points, key=lambda p: (p.x, p.y, p.label)))
    height = HEIGHT + MORE * max(min(len(points), labels.MOST_LABELS) - labels.FEW, 0)
    height, width, characters = (
        (*picture_style.CARD[::-1], 70)
        if card
        else (height, picture_style.WIDTH, picture_style.CHARACTERS)
    )
    with picture_style.canvas(
        height, title, subtitle, dark=dark, characters=characters, width=width
    ) as (
        figure,
        axes,
        theme,
    ):
        axes.set(xlabel=x_label, ylabel=y_label)
        near = _set_scale(axes, points, scale)
        marks = _draw_points(axes, points, theme)
        names = _draw_levels(axes, levels, theme)
        few = len(points) <= NAMES_ON_CARD
        if card and few:
            axes.margins(y=CARD_MARGIN)
        axes.autoscale_view()
        axes.autoscale(False)
        if scale == "zero" or (scale == "log" and near):
            floor = near / 2 or FLOOR * axes.get_ylim()[1]
            axes.set_ylim(bottom=min(0.0, *(p.y for p in points)) - floor)
        text = percent if scale == "percent" else picture_style.tick_text
        if scale == "log" or near:
            picture_style.log_ticks(
                axes.yaxis, near=near, most=CARD_TICKS if card else TICKS, text=text
            )
        elif scale == "percent":
            axes.yaxis.set_major_locator(MaxNLocator(4 if card else 8, steps=[1, 2, 2.5, 5, 10]))
            axes.yaxis.set_major_formatter(lambda value, _: text(value))
        picture_style.draw_legend(axes, [point.look for point in points], theme)
        if edge is not None:
            name = unquantized.pop() if len(unquantized) == 1 else "unquantized"
            _draw_edge(axes, max(p.x for p in points if not p.unquantized), edge, name, theme)
        texts = _draw_labels(axes, points, theme, card=card and not few)
        picture_style.freeze_layout(figure)
        spots = axes.transData.transform([(point.x, point.y) for point in points])
        for i, mark in enumerate(marks):  # enlarge covered markers so that their rims stay visible
            covering = int((np.hypot(*(spots[i + 1 :] - spots[i]).T) < COVERED).sum())
            mark.set_markersize(MARKER_SIZE + RING * covering**0.75)
        marks = [marks[i] for i in sorted(range(len(marks)), key=lambda i: i not in texts)]
        unnamed = 0 if card else len(points) - len(texts)
        labels.place_labels(axes, list(texts.values()), marks, names, unnamed)
    return figure


def _set_scale(axes: Axes, points: Sequence[Point], scale: str) -> float:
    """Set the scale of the y axis; return the y below which a logarithmic axis is linear; 0 if
    there is none.

    Percentages are linear up to the smallest excess or error (the larger of both) of a quantized
    point.
    """
    if scale == "log":
        positive = [p.y for p in points if p.y > 0]
        least = min((p.y for p in points if p.y > 0 and not p.unquantized), default=0.0)
        near = max(min(positive), 1e-6 * max(positive), NEGLIGIBLE * least)
        if min(p.y for p in points) >= near:
            axes.set_yscale("log")
            return 0.0
        axes.set_yscale(
            "symlog", linthresh=near, linscale=max(ZERO * math.log10(max(positive) / near), 0.1)
        )
        return near
    sizes = [max(abs(p.y), p.error or 0.0) for p in points if not p.unquantized]
    if scale != "percent" or not is_wide(sizes):
        return 0.0
    near = min(max(min(sizes), 1e-3), 10.0)
    axes.set_yscale("symlog", linthresh=near, linscale=0.8)
    return near


def percent(excess: float) -> str:
    """Return the text of a tick: +10 %."""
    return f"{'+' if excess > 0 else ''}{picture_style.tick_text(excess)} %"


def _draw_points(axes: Axes, points: Sequence[Point], theme: Theme) -> list[Line2D]:
    """Draw each point with a thin bar of one standard error up and down, and a line through the
    points of a scheme.
    """
    marks = []
    lowest = min((p.y for p in points if p.y > 0), default=0.0)
    for point in points:
        colour, gid = theme.families[point.look.colour], f"-{point.number}"
        marks += axes.plot(
            point.x,
            point.y,
            point.look.marker,
            color=colour,
            ms=MARKER_SIZE,
            mec=theme.paper,
            mew=0.8,
            zorder=4,
            clip_on=False,
            gid=f"point{gid}",
        )
        if point.error:
            low = point.y - point.error
            ends = (
                max(low, lowest / 2) if axes.get_yscale() == "log" else low,
                point.y + point.error,
            )
            axes.plot(
                [point.x] * 2,
                ends,
                color=colour,
                lw=1.1,
                marker="_",
                ms=6,
                mew=1.1,
                zorder=3,
                gid=f"bar{gid}",
            )
    for own in data.series(points):
        colour, gid = theme.families[own[0].look.colour], f"series-{own[0].number}"
        axes.plot(
            [p.x for p in own],
            [p.y for p in own],
            ":",
            color=colour,
            lw=1.3,
            alpha=0.75,
            zorder=2,
            gid=gid,
        )
    return marks


def _draw_levels(axes: Axes, levels: Sequence[Level], theme: Theme) -> list[Text]:
    """Draw the horizontal lines, and return their names, which are not placed yet."""
    names = []
    for i, level in enumerate(levels):
        dashes, width = ((1, 2), 1.6) if level.dotted else ((6, 4), 1.1)
        axes.axhline(
            level.y, color=theme.muted, ls=(0, dashes), lw=width, zorder=1.5, gid=f"level-{i}"
        )
        name = axes.text(
            axes.dataLim.x0,
            level.y,
            level.name,
            ha="center",
            va="center",
            size=10.5,
            color=theme.muted,
        )
        name.set(
            gid=f"level-name-{i}", path_effects=picture_style.halo(theme), in_layout=False, zorder=5
        )
        names.append(name)
    return names


def _draw_edge(axes: Axes, last: float, edge: float, name: str, theme: Theme) -> None:
    """Draw the vertical line of the unquantized points with its tick, and a break of the axis after
    ``last``.
    """
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= last]
    axes.set_xticks([*ticks, edge], [*axes.xaxis.get_major_formatter().format_ticks(ticks), name])
    axes.set_xlim(low, high)
    axes.axvline(edge, color=theme.grid, lw=6, zorder=0.9, gid="edge-0")
    behind = {
        "facecolor": theme.paper,
        "edgecolor": "none",
        "pad": 0,
    }  # a wider box would cover the ticks' numbers
    axes.text(
        (last + edge) / 2,
        0,
        "//",
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="center",
        color=theme.muted,
        bbox=behind,
        size=11,
        zorder=1,
        gid="break-0",
        in_layout=False,
    )


def _draw_labels(
    axes: Axes, points: Sequence[Point], theme: Theme, *, card: bool
) -> dict[int, Text]:
    """Return index -> label with name and value, placed on its point; on a ``card`` only names of
    the front's ends.

    Of very many points only those near the front have labels.
    """
    best = data.pareto_front(points)
    ends = [
        *{p.look.family: p for p in best}.values(),
        *{p.look.family: p for p in reversed(best)}.values(),
    ]
    named = data.nearest_to_front(points, labels.MOST_LABELS)
    names = picture_style.names_of([p.label for p in points])
    wrap = WRAP[len(points) <= labels.FEW]
    texts = {}
    for i in named:
        point = points[i]
        if not card or point in ends:
            words = textwrap.fill(names[i], wrap) + (
                "" if card else f"\n{point.shown or f'{point.y:.3f}'}"
            )
            text = axes.text(
                point.x, point.y, words, ha="center", va="center", linespacing=1.05, in_layout=False
            )
            text.set(
                color=picture_style.ink_of(theme.families[point.look.colour], theme),
                path_effects=picture_style.halo(theme),
            )
            text.set(
                fontweight="bold" if point in best else "normal",
                zorder=5,
                gid=f"label-{point.number}",
            )
            texts[i] = text
    return texts
