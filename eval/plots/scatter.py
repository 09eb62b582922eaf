"""Scatter plot of a quality measure (perplexity, KLD, accuracy) over the size of a model (bits per weight, GiB).

Every point carries its name and value; ``eval/plots/labels.py`` finds places for them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from eval.plots import front, grouping, labels, style, y_axis
from eval.plots.grouping import Styles
from eval.plots.scatter_points import Level, Point
from eval.plots.style import Theme
from eval.plots.y_axis import Excess

HEIGHT, MORE = 8.4, 0.06
"""Inches, and those for each point beyond the first ``grouping.MOST_FULL``: labels stand nearer to their points."""
MARKER_SIZE = 9.0
"""Points."""
RING, CARD_RING = 8.0, 5.0
"""Points: a marker is so much larger than the marker that covers it (less for each further one), on a card less."""
COVERED = 10.0
"""Pixels, half a marker: a point is covered by every later point that is nearer."""


def scatter_plot(
    points: Sequence[Point], *, x_label: str, y_label: str, title: str, subtitle: str = "", dark: bool = False,
    levels: Sequence[Level] = (), from_zero: bool = False, to_scale: float = -math.inf, log_y: bool = False,
    excess: Excess | None = None, card: bool = False,
) -> Figure:  # fmt: skip
    """The finished plot.  A y far above all others is drawn hollow on the upper edge, and its label says so; a
    logarithmic axis shows every y above 0 to scale, and any other y hollow at a tick of its own; on the scale of an
    ``excess`` every y has its place.

    ``from_zero`` starts a linear y axis at 0; a y up to ``to_scale`` always counts as to scale.  Unquantized points far
    to the right stand at the edge, behind a break of the axis.  Labels of points that no other beats are bold; a
    ``card``, small and with large letters, has no other labels.
    """
    if not points:
        raise ValueError("no points to plot")
    if log_y and not any(p.y > 0 for p in points):
        raise ValueError("nothing above 0 for a logarithmic axis")
    unquantized = {style.tick_text(float(f"{p.x:.3g}")) for p in points if p.unquantized}
    points, edge = front.at_edge(sorted(points, key=lambda p: (p.x, p.y, p.label)))
    tall = HEIGHT + MORE * max(len(points) - grouping.MOST_FULL, 0)
    height, width, letters = (*style.CARD[::-1], 70) if card else (tall, style.WIDTH, style.LETTERS)
    with style.canvas(height, title, subtitle, dark=dark, letters=letters, width=width) as (figure, axes, theme):
        styles = grouping.group_styles([p.split[0] for p in points], theme.ink)
        axes.set(xlabel=x_label, ylabel=y_label)
        top = y_axis.ceiling([p.y for p in points], math.inf if log_y or excess else to_scale)
        y_axis.set_limits(axes, points, levels, top, excess or log_y, sparse=card)
        if from_zero and not log_y:
            axes.set_ylim(bottom=min(0.0, *(p.y for p in points)) - y_axis.FLOOR * axes.get_ylim()[1])
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
    """The lines right across, and their names, each still on its line."""
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
    """The line on which unquantized points stand, a tick of that name, and a break of the axis behind the ``last``."""
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= last]
    axes.set_xticks([*ticks, edge], [*axes.xaxis.get_major_formatter().format_ticks(ticks), name])
    axes.set_xlim(low, high)
    axes.plot([edge] * 2, axes.get_ylim(), color=theme.grid, lw=6, zorder=0.9, gid="edge-0", solid_capstyle="butt")
    broken = (last + edge) / 2
    axes.text(broken, 0, "//", transform=axes.get_xaxis_transform(), ha="center", va="center", color=theme.muted,
              backgroundcolor=theme.paper, size=11, zorder=1, gid="break-0", in_layout=False)  # fmt: skip


def _draw_groups(axes: Axes, points: Sequence[Point], styles: Styles) -> None:
    """A dotted line through the points of each scheme, and the legend, outside the axes, where it covers nothing."""
    handles, ranked = [], sorted(styles, key=str.casefold)
    joined = front.series([p for p in points if p.y > 0 or axes.get_yscale() != "log"])
    for group in ranked:
        colour, marker = styles[group]
        own = [members for members in joined if members[0].split[0] == group]
        line: dict[str, Any] = {"color": colour, "ls": ":" if own else "", "lw": 1.3}
        for members in own:
            axes.plot([p.x for p in members], [p.y for p in members], alpha=0.75, zorder=2, **line)
        handles.append(Line2D([], [], marker=marker, ms=MARKER_SIZE, **line))
    columns = math.ceil(len(handles) / 30)
    legend = axes.legend(handles, ["-"] * len(handles), loc="upper left", bbox_to_anchor=(1.01, 1.01), ncols=columns)
    for text, group in zip(legend.get_texts(), ranked, strict=True):
        text.set_text(textwrap.fill(group, 24))  # not passed above, as a legend hides labels that start with "_"


def _draw_points(
    axes: Axes, points: Sequence[Point], styles: Styles, theme: Theme, *, card: bool
) -> tuple[list[Line2D], list[Text | None]]:
    """Each point with its label, which lies on the point until ``labels.place_labels`` moves it.

    On a card only points that no other beats have a label, without a value.
    """
    marks: list[Line2D] = []
    texts: list[Text | None] = []
    best = front.pareto_front(points)
    high = axes.get_ylim()[1]
    heights = [y_axis.zero(axes) if p.y <= 0 and axes.get_yscale() == "log" else min(p.y, high) for p in points]
    spots = axes.transData.transform([(point.x, y) for point, y in zip(points, heights, strict=True)])
    names = grouping.drawn_names([(point.label, point.group) for point in points])
    for i, (point, y, name) in enumerate(zip(points, heights, names, strict=True)):
        colour, marker = styles[point.split[0]]
        face, edge, width = (colour, theme.paper, 0.8) if y == point.y else (theme.paper, colour, 1.8)
        covering = int((np.hypot(*(spots[i + 1 :] - spots[i]).T) < COVERED).sum())
        # of points at about one place, each shows around the next
        size = MARKER_SIZE + (CARD_RING if card else RING) * covering**0.75
        mark = axes.plot(point.x, y, marker, color=colour, ms=size, mfc=face, mec=edge, mew=width, clip_on=False)[0]
        mark.set(zorder=4, gid=f"point-{i}")
        marks.append(mark)
        if card and point not in best:
            texts.append(None)
            continue
        note = " (off the scale)" if y < point.y else ""
        value = "" if card else f"\n{point.shown or f'{point.y:.3f}'}{note}"
        lines = f"{textwrap.fill(name, 24)}{value}"
        text = axes.text(point.x, y, lines, ha="center", va="center")
        text.set(color=style.ink_of(colour, theme), zorder=5, gid=f"label-{i}")
        text.set(path_effects=style.halo(theme), linespacing=1.05, in_layout=False)
        text.set_fontweight("bold" if point in best else "normal")
        texts.append(text)
    return marks, texts


def _draw_errors(axes: Axes, points: Sequence[Point], marks: Sequence[Line2D]) -> None:
    """A thin bar of one error up and down behind each point that is drawn to scale, unless its marker hides the bar."""
    low, high = axes.get_ylim()
    for i, (point, mark) in enumerate(zip(points, marks, strict=True)):
        if not point.error or not low < point.y < high:
            continue
        ends = max(point.y - point.error, low), point.y + point.error
        (_, below), (_, above) = axes.transData.transform([(point.x, end) for end in ends])
        box = mark.get_window_extent()
        if below < box.y0 or above > box.y1:
            bar = axes.plot([point.x] * 2, ends, color=mark.get_color(), lw=1.1, marker="_", ms=6, mew=1.1)[0]
            bar.set(zorder=3, gid=f"bar-{i}")
