"""Scatter plot of a quality measure (perplexity, KLD, accuracy) over the size of a model (bits per weight, GiB).

Every point carries its name and value; ``labels.place_labels`` finds their places.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from compare_q.eval.plots import labels, looks, measures, style
from compare_q.eval.plots.looks import Styles
from compare_q.eval.plots.measures import BPW, PPL, Measure, Size
from compare_q.eval.plots.points import (
    Level,
    Point,
    at_edge,
    ends_of_groups,
    error_note,
    finite_reference,
    front_in_words,
    levels_of,
    pareto_front,
    points_of,
    points_within,
    series,
    subtitle_of,
)
from compare_q.eval.plots.style import Theme, is_wide
from compare_q.eval.results import TextResult

EXCESS_AXIS = "Perplexity above the reference's"
HEIGHT, MORE = 8.4, 0.06
"""Height (inches), and what each point beyond the first ``looks.MOST_FULL`` adds to it."""
MARKER_SIZE = 9.0
"""Points."""
RING, CARD_RING = 8.0, 5.0
"""How much larger a marker is than one that covers it (points; less for each further one), in a plot and on a card."""
COVERED = 10.0
"""A point is covered by every later point that is nearer than this (pixels)."""
FLOOR = 0.045
"""Share of the axis below y = 0, or below the smallest y of a logarithmic axis: room for half a marker."""
MOST_TICKS, MOST_SPARSE = 16, 7
"""With more ticks than this, in a plot and on a card, only powers of ten have one."""
NEAREST, NEAREST_SPARSE = 0.035, 0.075
"""Smallest distance between two ticks, in a plot and on a card, as a share of the axis."""


def scatter_figure(
    *texts: TextResult, size: Size = BPW, measure: Measure = PPL, max_x: float = math.inf, max_y: float = math.inf,
    title: str | None = None, dark: bool = False, log_y: bool | None = None, card: bool = False,
) -> Figure:  # fmt: skip
    """Return the plot of a measure over a size, of several texts of the mean over them; ValueError without a point.

    ``title`` None: it names the measure.  ``log_y`` None: the y axis is logarithmic if values span more than a decade
    and a half.  Accuracy is always linear; perplexity is drawn as the excess over the reference's, if that is known.
    """
    shown = points_within(points_of(texts, size, measure)[0], max_x, max_y)
    if not shown:
        raise ValueError(f"no model has both {measure.name} and {size.name} within the limits")
    reference = finite_reference(texts) if measure is PPL and log_y is None else None
    wide = is_wide(point.y for point in shown)
    best = front_in_words(pareto_front(shown), shown)
    bold = f"bold: the best of their size or smaller: {best}" if best else ""
    bars = error_note(texts, shown, measure)
    below = (subtitle_of(texts, [point.label for point in shown]), bars, bold)
    levels = [level for level in levels_of(texts, measure) if level.y <= max_y]
    y_label, near = measures.kld_axis(texts[0], measure) if measure.kld else measure.axis, None
    if reference:
        shown, levels, near = excesses(reference, shown, levels)
        y_label = EXCESS_AXIS if math.isinf(near) else f"{EXCESS_AXIS} (logarithmic; linear near 0)"
    return scatter_plot(
        shown,
        x_label=size.axis.partition(" (" if card else "\n")[0],
        y_label=y_label.partition(" (" if card else "\n")[0],
        title=f"{measure.title} of quantized models" if title is None else title,
        subtitle=subtitle_of(texts, []) if card else "\n".join(filter(None, below)),
        dark=dark,
        levels=levels,
        from_zero=measure.kld,
        log_y=wide and near is None and not measure.more if log_y is None else log_y,
        near=near,
        card=card,
    )


def scatter_plot(
    points: Sequence[Point], *, x_label: str, y_label: str, title: str, subtitle: str = "", dark: bool = False,
    levels: Sequence[Level] = (), from_zero: bool = False, log_y: bool = False,
    near: float | None = None, card: bool = False,
) -> Figure:  # fmt: skip
    """Return the finished plot, in which labels of points on the Pareto front are bold.

    ``from_zero``: a linear y axis starts at 0.  ``log_y``: values that are not above 0 are hollow markers at a tick of
    their own.  ``near``: y are percentages, on an axis that is linear up to this value and logarithmic beyond it
    (infinite: all linear).  ``card``: a small plot that labels only the front.  Unquantized points far to the right are
    drawn at the edge, after a break of the axis.
    """
    if log_y and not any(p.y > 0 for p in points):
        raise ValueError("nothing above 0 for a logarithmic axis")
    unquantized = {style.tick_text(float(f"{p.x:.3g}")) for p in points if p.unquantized}
    points, edge = at_edge(sorted(points, key=lambda p: (p.x, p.y, p.label)))
    tall = HEIGHT + MORE * max(len(points) - looks.MOST_FULL, 0)
    height, width, characters = (*style.CARD[::-1], 70) if card else (tall, style.WIDTH, style.CHARACTERS)
    with style.canvas(height, title, subtitle, dark=dark, characters=characters, width=width) as (figure, axes, theme):
        styles = looks.group_styles([p.split[0] for p in points], theme.ink)
        axes.set(xlabel=x_label, ylabel=y_label)
        set_limits(axes, points, levels, log_y=log_y, near=near, sparse=card)
        if from_zero and not log_y:
            axes.set_ylim(bottom=min(0.0, *(p.y for p in points)) - FLOOR * axes.get_ylim()[1])
        if edge is not None:
            name = unquantized.pop() if len(unquantized) == 1 else "unquantized"
            _draw_edge(axes, max(p.x for p in points if not p.unquantized), edge, name, theme)
        names = _draw_levels(axes, levels, theme)
        _draw_groups(axes, points, styles)
        marks, texts = _draw_points(axes, points, styles, theme, card=card)
        style.freeze_layout(figure)
        _draw_errors(axes, points, marks)
        named = [text is not None for text in texts]
        silent = [mark for mark, is_named in zip(marks, named, strict=True) if not is_named]
        speaking = [mark for mark, is_named in zip(marks, named, strict=True) if is_named]
        labels.place_labels(axes, speaking, [text for text in texts if text is not None], names, silent)
    return figure


def _draw_levels(axes: Axes, levels: Sequence[Level], theme: Theme) -> list[Text]:
    """Draw the horizontal lines, and return their names, which are not placed yet."""
    names = []
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    for i, level in enumerate(levels):
        if low < level.y < high:
            dashes: Any = (0, (1, 2)) if level.dotted else (0, (6, 4))
            width = 1.6 if level.dotted else 1.1
            axes.plot(
                [left, right], [level.y] * 2, color=theme.muted, ls=dashes, lw=width, zorder=1.5, gid=f"level-{i}"
            )
            name = axes.text((left + right) / 2, level.y, level.name, ha="center", va="center", size=10.5)
            name.set(
                color=theme.muted, gid=f"level-name-{i}", path_effects=style.halo(theme), in_layout=False, zorder=5
            )
            names.append(name)
    return names


def _draw_edge(axes: Axes, last: float, edge: float, name: str, theme: Theme) -> None:
    """Draw the vertical line of the unquantized points with its tick, and a break of the axis after ``last``."""
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= last]
    axes.set_xticks([*ticks, edge], [*axes.xaxis.get_major_formatter().format_ticks(ticks), name])
    axes.set_xlim(low, high)
    axes.plot([edge] * 2, axes.get_ylim(), color=theme.grid, lw=6, zorder=0.9, gid="edge-0", solid_capstyle="butt")
    broken = (last + edge) / 2
    behind = {"facecolor": theme.paper, "edgecolor": "none", "pad": 0}  # wider, it would cover the ticks' numbers
    axes.text(broken, 0, "//", transform=axes.get_xaxis_transform(), ha="center", va="center", color=theme.muted,
              bbox=behind, size=11, zorder=1, gid="break-0", in_layout=False)  # fmt: skip


def _draw_groups(axes: Axes, points: Sequence[Point], styles: Styles) -> None:
    """Draw a dotted line through the points of each scheme, and the legend beside the axes."""
    handles, ranked = [], sorted(styles, key=str.casefold)
    joined = series([p for p in points if p.y > 0 or axes.get_yscale() != "log"])
    for group in ranked:
        colour, marker = styles[group]
        own = [members for members in joined if members[0].split[0] == group]
        line: dict[str, Any] = {"color": colour, "ls": ":" if own else "", "lw": 1.3}
        for members in own:
            gid = f"series-{members[0].number}"
            axes.plot([p.x for p in members], [p.y for p in members], alpha=0.75, zorder=2, gid=gid, **line)
        handles.append(Line2D([], [], marker=marker, ms=MARKER_SIZE, **line))
    columns = math.ceil(len(handles) / 30)
    legend = axes.legend(handles, ["-"] * len(handles), loc="upper left", bbox_to_anchor=(1.01, 1.01), ncols=columns)
    for text, group in zip(legend.get_texts(), ranked, strict=True):
        text.set_text(textwrap.fill(group, 24))  # not passed above, as a legend hides labels that start with "_"


def _draw_points(
    axes: Axes, points: Sequence[Point], styles: Styles, theme: Theme, *, card: bool
) -> tuple[list[Line2D], list[Text | None]]:
    """Draw each point; return the markers and their labels, which are not placed yet (None: no label).

    A card labels only points of the front, without values, and only the ends of a long series.
    """
    marks: list[Line2D] = []
    texts: list[Text | None] = []
    best = pareto_front(points)
    heights = [zero(axes) if p.y <= 0 and axes.get_yscale() == "log" else p.y for p in points]
    spots = axes.transData.transform([(point.x, y) for point, y in zip(points, heights, strict=True)])
    names = looks.drawn_names([(point.label, point.group) for point in points])
    for i, (point, y, name) in enumerate(zip(points, heights, names, strict=True)):
        colour, marker = styles[point.split[0]]
        face, edge, width = (colour, theme.paper, 0.8) if y == point.y else (theme.paper, colour, 1.8)
        covering = int((np.hypot(*(spots[i + 1 :] - spots[i]).T) < COVERED).sum())
        # enlarge covered markers so that their rims stay visible
        size = MARKER_SIZE + (CARD_RING if card else RING) * covering**0.75
        mark = axes.plot(point.x, y, marker, color=colour, ms=size, mfc=face, mec=edge, mew=width, clip_on=False)[0]
        mark.set(zorder=4, gid=f"point-{point.number}")
        marks.append(mark)
        if card and point not in ends_of_groups(best):
            texts.append(None)
            continue
        value = "" if card else f"\n{point.shown or f'{point.y:.3f}'}"
        lines = f"{textwrap.fill(name, 24)}{value}"
        text = axes.text(point.x, y, lines, ha="center", va="center")
        text.set(color=style.ink_of(colour, theme), zorder=5, gid=f"label-{point.number}")
        text.set(path_effects=style.halo(theme), linespacing=1.05, in_layout=False)
        text.set_fontweight("bold" if point in best else "normal")
        texts.append(text)
    return marks, texts


def _draw_errors(axes: Axes, points: Sequence[Point], marks: Sequence[Line2D]) -> None:
    """Draw a thin bar of one standard error up and down behind each point, unless its marker hides the bar."""
    low, high = axes.get_ylim()
    for point, mark in zip(points, marks, strict=True):
        if not point.error or not low < point.y < high:
            continue
        ends = max(point.y - point.error, low), point.y + point.error
        (_, below), (_, above) = axes.transData.transform([(point.x, end) for end in ends])
        box = mark.get_window_extent()
        if below < box.y0 or above > box.y1:
            bar = axes.plot([point.x] * 2, ends, color=mark.get_color(), lw=1.1, marker="_", ms=6, mew=1.1)[0]
            bar.set(zorder=3, gid=f"bar-{point.number}")


def excesses(
    reference: float, points: Sequence[Point], levels: Sequence[Level]
) -> tuple[list[Point], list[Level], float]:
    """Return (points and levels as percent above the reference, the percentage up to which the axis is linear).

    On an inverse hyperbolic sine axis equal steps are equal factors, but equal differences near 0.  It is nearly linear
    up to the smallest excess or error (the larger of both) of a quantized point, and wholly (infinite) if the excesses
    span less than a decade and a half.
    """
    percents = [
        replace(p, y=100 * (p.y / reference - 1), error=100 * p.error / reference if p.error else p.error)
        for p in points
    ]
    sizes = [max(abs(p.y), p.error or 0.0) for p in percents if not p.unquantized]
    near = min(max(min(sizes), 1e-3), 10.0) if is_wide(sizes) else math.inf
    return percents, [replace(level, y=100 * (level.y / reference - 1)) for level in levels], near


def percent_ticks(near: float, low: float, high: float, most: int) -> list[float]:
    """Return ticks between ``low`` and ``high`` percent: 0, and 1, 2 and 5 times the powers of ten from ``near`` on.

    With more than ``most`` ticks, only the powers of ten.
    """
    decades = range(math.floor(math.log10(near)), math.ceil(math.log10(max(near, -low, high))) + 1)
    for factors in (1, 2, 5), (1,):
        steps = [f * 10.0**d for d in decades for f in factors if f * 10.0**d >= 0.7 * near]
        shown = [e for e in (*(-step for step in steps), 0.0, *steps) if low <= e <= high]
        if len(shown) <= most:
            break
    return shown


def set_limits(
    axes: Axes, points: Sequence[Point], levels: Sequence[Level], *, log_y: bool, near: float | None, sparse: bool,
) -> None:  # fmt: skip
    """Set scale, limits and ticks of the y axis, with room for all points, error bars and levels.

    ``sparse``: ticks only at powers of ten.
    """
    heights = [p.y for p in points] + [level.y for level in levels]
    heights += [p.y + sign * p.error for p in points if p.error for sign in (1, -1)]
    excess_is_wide = near is not None and math.isfinite(near)
    if log_y:
        lowest = min(p.y for p in points if p.y > 0)
        heights = [max(y, lowest / 2) for y in heights if y > 0]  # a bar may reach down to 0
        axes.set_yscale("log")
    elif excess_is_wide:
        axes.set_yscale("asinh", linear_width=near)
    axes.update_datalim([(p.x, heights[0]) for p in points] + [(points[0].x, y) for y in heights])
    axes.autoscale_view()
    axes.autoscale(False)
    if log_y:
        style.log_ticks(axes.yaxis, sparse=sparse)
        if any(p.y <= 0 for p in points):  # a tick for 0 below all others
            low, high = axes.get_ylim()
            ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
            axes.set_ylim(bottom=low / (high / low) ** (2 * FLOOR))
            texts = ["0", *axes.yaxis.get_major_formatter().format_ticks(ticks)]
            write_ticks(axes, [zero(axes), *ticks], texts, zero(axes), sparse=sparse)
    elif excess_is_wide:
        ticks = percent_ticks(near or 0.0, *axes.get_ylim(), MOST_SPARSE if sparse else MOST_TICKS)
        write_ticks(axes, ticks, [percent(tick) for tick in ticks], 0.0, sparse=sparse)
        axes.minorticks_off()
    elif near is not None:
        axes.yaxis.set_major_locator(MaxNLocator(4 if sparse else 8, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(lambda value, _: percent(value))


def percent(excess: float) -> str:
    """Return the text of a tick: +10 %."""
    return f"{'+' if excess > 0 else ''}{style.tick_text(excess)} %"


def write_ticks(axes: Axes, ticks: Sequence[float], texts: Sequence[str], first: float, *, sparse: bool) -> None:
    """Write the ticks, without those whose texts would touch the text of the tick ``first``."""
    heights = axes.transAxes.inverted().transform(axes.transData.transform([(1, y) for y in (first, *ticks)]))[:, 1]
    away = np.abs(heights[1:] - heights[0])
    kept = [i for i, gap in enumerate(away) if gap < 1e-9 or gap > (NEAREST_SPARSE if sparse else NEAREST)]
    axes.set_yticks([ticks[i] for i in kept], [texts[i] for i in kept])


def zero(axes: Axes) -> float:
    """Return the y at which a logarithmic axis shows 0."""
    low, high = axes.get_ylim()
    return float(low * (high / low) ** FLOOR)
