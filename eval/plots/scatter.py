"""Scatter plot of a quality measure (perplexity, KLD) over the size of a model (bits, GiB)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
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
ARROW = f"arrow: {measures.BOUND_NOTE}"
CARD_ARROW = "arrow: at least"
"""The meaning of arrows, on a card."""
ARROW_LENGTH = 24.0
"""Length of the arrow above a bound, from the middle of the marker (points)."""
HEIGHT_OF_FEW_POINTS = 8.4
"""Height of a picture of at most ``labels.FEW_LABELS`` points (inches)."""
HEIGHT_OF_POINT = 0.12
"""Increase of the height for each further point (inches)."""
MARKER_SIZE = 9.0
"""Size of a marker (points)."""
RING = 5.0
"""Growth of a covered marker (points); if several markers cover it, it grows less for each."""
COVERED = 10.0
"""Distance (pixels) below which a marker covers one that was drawn earlier."""
SHARE_BELOW_ZERO = 0.045
"""Share of a linear axis below y = 0."""
ZERO_DECADES = 0.1
"""Height of a logarithmic axis below the smallest value, as a share of its decades."""
NEGLIGIBLE = 0.01
"""A logarithmic axis ends at this share of the smallest value of a quantized model.

The rest is linear down to 0, so that a noise floor far below does not stretch the axis.
"""
WRAP_MANY = 24
"""Characters per line of a label, if there are many."""
WRAP_FEW = 28
"""Characters per line of a label, if there are at most ``labels.FEW_LABELS``."""
NAMES_ON_CARD = 8
"""Largest number of points on a card that all have labels.

With more, only the ends of the Pareto front have labels.
"""
CARD_MARGIN = 0.25
"""Share of the data's height that is free above it and below it on a card with all labels."""
CARD_CHARACTERS = 70
"""Characters of the longest line of a card's heading."""
MOST_TICKS = 16
"""Maximum number of ticks of the y axis."""
MOST_CARD_TICKS = 7
"""Maximum number of ticks of the y axis of a card."""


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
    points = _points_within(run, size, measure, max_x, max_y)
    if not points:
        raise ValueError(f"no model has both {measure.name} and {size.name} within the limits")
    levels = [level for level in data.levels_of(run, measure) if level.y <= max_y]
    scale = _scale_of(points, measure, log_y)
    y_label = measure.axis
    if measure.kld:
        y_label = measures.kld_axis(run, measure)
    # The subtitle is about perplexity and its errors, also where the excess is drawn.
    if card:
        subtitle = _card_subtitle(run, points, origin)
    else:
        subtitle = _subtitle(run, points, measure)
    reference_ppl = None
    if measure is PPL and log_y is None:
        reference_ppl = data.finite_reference(run)
    if reference_ppl:
        scale = "percent"
        y_label = EXCESS_AXIS
        points = [_as_excess(point, reference_ppl) for point in points]
        levels = [level._replace(y=100 * (level.y / reference_ppl - 1)) for level in levels]
    if title is None:
        title = _title_of(run, measure, card=card)
    # The reference's label in results of others may have several lines; the first one is shown.
    end_of_label = "\n"
    if card:
        # A card has no room for what is in parentheses.
        end_of_label = " ("
    return scatter_plot(
        points,
        x_label=size.axis.partition(end_of_label)[0],
        y_label=y_label.partition(end_of_label)[0],
        title=title,
        subtitle=subtitle,
        dark=dark,
        levels=levels,
        scale=scale,
        card=card,
    )


def _points_within(
    run: RunResult, size: Size, measure: Measure, max_x: float, max_y: float
) -> list[Point]:
    """Return the finite points of a run within the limits."""
    points, _ = data.points_of(run, size, measure)
    points_within = []
    for point in points:
        is_within = point.x <= max_x and point.y <= max_y
        if is_within and math.isfinite(point.x) and math.isfinite(point.y):
            points_within.append(point)
    return points_within


def _scale_of(points: Sequence[Point], measure: Measure, log_y: bool | None) -> str:
    """Return the scale of the y axis, as ``scatter_plot`` takes it; ``log_y`` None: it depends."""
    is_log = log_y
    if is_log is None:
        is_log = is_wide(point.y for point in points)
    if is_log:
        return "log"
    if measure.kld:
        return "zero"
    return "linear"


def _title_of(run: RunResult, measure: Measure, *, card: bool) -> str:
    """Return the title of a plot; a card's title names the reference."""
    if card:
        name = data.reference_name(run)
        if name:
            return f"{name}, quantized"
    return f"{measure.title} of quantized models"


def _subtitle(run: RunResult, points: Sequence[Point], measure: Measure) -> str:
    """Return the lines below the title of a plot, except those of a card."""
    labels_shown = [point.label for point in points]
    notes = [data.subtitle_of(run, labels_shown), data.error_note(points, measure), BOLD]
    if any(point.is_bound for point in points):
        notes.append(ARROW)
    return "\n".join(note for note in notes if note)


def _card_subtitle(run: RunResult, points: Sequence[Point], origin: str) -> str:
    """Return the lines below the title of a card."""
    notes = []
    if origin:
        notes.append(origin)
    has_mark = any(MARK in point.label for point in points)
    # With more points, a card labels only a few, and perhaps none that has the mark.
    if has_mark and len(points) <= NAMES_ON_CARD:
        notes.append(data.NOT_AS_REQUESTED)
    if any(point.is_bound for point in points):
        notes.append(CARD_ARROW)
    lines = (run.subtitle, "; ".join(notes))
    return "\n".join(line for line in lines if line)


def _as_excess(point: Point, reference_ppl: float) -> Point:
    """Return a point whose perplexity is the excess over the reference's in percent."""
    error = point.error
    if error:
        error = 100 * error / reference_ppl
    return replace(point, y=100 * (point.y / reference_ppl - 1), error=error)


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
    if scale == "log" and not any(point.y > 0 for point in points):
        raise ValueError("nothing above 0 for a logarithmic axis")
    unquantized_sizes = _unquantized_sizes(points)
    points, edge = data.at_edge(sorted(points, key=lambda point: (point.x, point.y, point.label)))
    has_few_names = len(points) <= NAMES_ON_CARD
    n_labels = min(len(points), labels.MOST_LABELS)
    height = HEIGHT_OF_FEW_POINTS + HEIGHT_OF_POINT * max(n_labels - labels.FEW_LABELS, 0)
    width = picture_style.WIDTH
    characters = picture_style.CHARACTERS
    if card:
        width, height = picture_style.CARD_SIZE
        characters = CARD_CHARACTERS
    with picture_style.canvas(
        height, title, subtitle, dark=dark, characters=characters, width=width
    ) as (figure, axes, theme):
        axes.set(xlabel=x_label, ylabel=y_label)
        # Where a logarithmic axis becomes linear; 0 if no part of it is, and for other axes.
        linear_below = _set_scale(axes, points, scale)
        marks = _draw_points(axes, points, theme)
        names = _draw_levels(axes, levels, theme)
        if card and has_few_names:
            axes.margins(y=CARD_MARGIN)
        axes.autoscale_view()
        axes.autoscale(False)
        _set_bottom(axes, points, scale, linear_below)
        _set_y_ticks(axes, scale, linear_below, card=card)
        picture_style.draw_legend(axes, [point.look for point in points], theme)
        if edge is not None:
            name = "unquantized"
            if len(unquantized_sizes) == 1:
                name = unquantized_sizes.pop()
            last = max(point.x for point in data.quantized_points(points))
            _draw_edge(axes, last, edge, name, theme)
        texts = _draw_labels(axes, points, theme, card=card and not has_few_names)
        # From here on artists are placed to the pixel.
        picture_style.freeze_layout(figure)
        _enlarge_covered(axes, points, marks)
        labelled_marks = []
        other_marks = []
        for i, mark in enumerate(marks):
            if i in texts:
                labelled_marks.append(mark)
            else:
                other_marks.append(mark)
        unnamed = len(other_marks)
        # A card with many points labels few points on purpose, and no note counts the others.
        if card:
            unnamed = 0
        labels.place_labels(
            axes, list(texts.values()), labelled_marks + other_marks, names, unnamed
        )
    return figure


def _unquantized_sizes(points: Sequence[Point]) -> set[str]:
    """Return the distinct sizes of the unquantized points, as texts of ticks.

    They have three digits, so that nearly equal sizes are one text.  If there is only one, it is
    the tick at the edge, where these points are drawn.
    """
    texts = set()
    for point in points:
        if point.unquantized:
            texts.add(picture_style.tick_text(float(f"{point.x:.3g}")))
    return texts


def _enlarge_covered(axes: Axes, points: Sequence[Point], marks: Sequence[Line2D]) -> None:
    """Enlarge markers that later ones cover, so that their rims stay visible."""
    spots = axes.transData.transform([(point.x, point.y) for point in points])
    for i, mark in enumerate(marks):
        distances = np.hypot(*(spots[i + 1 :] - spots[i]).T)
        covering = int((distances < COVERED).sum())
        mark.set_markersize(MARKER_SIZE + RING * covering**0.75)


def _set_bottom(axes: Axes, points: Sequence[Point], scale: str, linear_below: float) -> None:
    """Set the lower end of an axis that shows 0, a little below it, so that markers are whole."""
    if scale != "zero" and not (scale == "log" and linear_below):
        return
    space = linear_below / 2
    if not space:
        space = SHARE_BELOW_ZERO * axes.get_ylim()[1]
    axes.set_ylim(bottom=min(0.0, *(point.y for point in points)) - space)


def _set_y_ticks(axes: Axes, scale: str, linear_below: float, *, card: bool) -> None:
    """Set the ticks of the y axis, except of a linear one that does not show percentages."""
    text: Callable[[float], str] = picture_style.tick_text
    if scale == "percent":
        text = percent_text
    most = MOST_TICKS
    intervals = 8
    if card:
        most = MOST_CARD_TICKS
        intervals = 4
    if scale == "log" or linear_below:
        picture_style.log_ticks(axes.yaxis, linear_below=linear_below, most=most, text=text)
    elif scale == "percent":
        axes.yaxis.set_major_locator(MaxNLocator(intervals, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(lambda value, _: text(value))


def _set_scale(axes: Axes, points: Sequence[Point], scale: str) -> float:
    """Set the scale of the y axis; return the y below which a logarithmic axis is linear.

    0 if there is none.  Percentages are linear up to the smallest excess or error (the larger of
    both) of a quantized point.
    """
    if scale == "log":
        return _set_log_scale(axes, points)
    if scale != "percent":
        return 0.0
    excesses = []
    for point in data.quantized_points(points):
        excesses.append(max(abs(point.y), point.error or 0.0))
    if not is_wide(excesses):
        return 0.0
    linear_below = min(max(min(excesses), 1e-3), 10.0)
    axes.set_yscale("symlog", linthresh=linear_below, linscale=0.8)
    return linear_below


def _set_log_scale(axes: Axes, points: Sequence[Point]) -> float:
    """Set a logarithmic scale; return the y below which it is linear, 0 if all values are above."""
    positive = [point.y for point in points if point.y > 0]
    positive_of_quantized = [point.y for point in data.quantized_points(points) if point.y > 0]
    least = min(positive_of_quantized, default=0.0)
    linear_below = max(min(positive), 1e-6 * max(positive), NEGLIGIBLE * least)
    if min(point.y for point in points) >= linear_below:
        axes.set_yscale("log")
        return 0.0
    decades = math.log10(max(positive) / linear_below)
    axes.set_yscale("symlog", linthresh=linear_below, linscale=max(ZERO_DECADES * decades, 0.1))
    return linear_below


def percent_text(excess: float) -> str:
    """Return the text of a tick: +10 %."""
    text = f"{picture_style.tick_text(excess)} %"
    if excess > 0:
        return f"+{text}"
    return text


def _draw_points(axes: Axes, points: Sequence[Point], theme: Theme) -> list[Line2D]:
    """Draw points with bars of one standard error, and a line through the points of a scheme."""
    marks = []
    lowest = min((point.y for point in points if point.y > 0), default=0.0)
    for point in points:
        colour = theme.families[point.look.colour]
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
            gid=f"point-{point.number}",
        )
        if point.is_bound:
            picture_style.draw_arrow(
                axes, (point.x, point.y), (0, ARROW_LENGTH), colour, f"bound-{point.number}"
            )
        if point.error:
            low = point.y - point.error
            if axes.get_yscale() == "log":
                # Such an axis has no place for 0 and below.
                low = max(low, lowest / 2)
            high = point.y + point.error
            if point.is_bound:
                # Above it is the arrow.
                high = point.y
            axes.plot(
                [point.x, point.x],
                [low, high],
                color=colour,
                lw=1.1,
                marker="_",
                ms=6,
                mew=1.1,
                zorder=3,
                gid=f"bar-{point.number}",
            )
    for scheme in data.lines_of_schemes(points):
        axes.plot(
            [point.x for point in scheme],
            [point.y for point in scheme],
            ":",
            color=theme.families[scheme[0].look.colour],
            lw=1.3,
            alpha=0.75,
            zorder=2,
            gid=f"series-{scheme[0].number}",
        )
    return marks


def _draw_levels(axes: Axes, levels: Sequence[Level], theme: Theme) -> list[Text]:
    """Draw the horizontal lines, and return their names, which are not placed yet."""
    names = []
    for number, level in enumerate(levels):
        dashes = (6, 4)
        width = 1.1
        if level.dotted:
            dashes = (1, 2)
            width = 1.6
        axes.axhline(
            level.y,
            color=theme.muted,
            ls=(0, dashes),
            lw=width,
            zorder=1.5,
            gid=f"level-{number}",
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
            gid=f"level-name-{number}",
            path_effects=picture_style.halo(theme),
            in_layout=False,
            zorder=5,
        )
        names.append(name)
    return names


def _draw_edge(axes: Axes, last: float, edge: float, name: str, theme: Theme) -> None:
    """Draw the vertical line of the unquantized points with its tick.

    The axis has a break after ``last``.
    """
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= last]
    words = axes.xaxis.get_major_formatter().format_ticks(ticks)
    axes.set_xticks([*ticks, edge], [*words, name])
    axes.set_xlim(low, high)
    axes.axvline(edge, color=theme.grid, lw=6, zorder=0.9, gid="edge-0")
    # A box with a margin would cover the ticks' numbers.
    box = {"facecolor": theme.paper, "edgecolor": "none", "pad": 0}
    axes.text(
        (last + edge) / 2,
        0,
        "//",
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="center",
        color=theme.muted,
        bbox=box,
        size=11,
        zorder=1,
        gid="break-0",
        in_layout=False,
    )


def _draw_labels(
    axes: Axes, points: Sequence[Point], theme: Theme, *, card: bool
) -> dict[int, Text]:
    """Return index -> label with name and value, placed on its point, in order of the points.

    On a ``card`` there are only names, and only of the front's ends.  Of very many points only
    those near the front have labels.
    """
    front = data.pareto_front(points)
    front_ends = _ends_of_families(front)
    names = picture_style.names_of([point.label for point in points])
    wrap = WRAP_MANY
    if len(points) <= labels.FEW_LABELS:
        wrap = WRAP_FEW
    texts = {}
    for i in data.nearest_to_front(points, labels.MOST_LABELS):
        point = points[i]
        words = textwrap.fill(names[i], wrap)
        if card:
            if point not in front_ends:
                continue
        elif point.y_text:
            words += f"\n{point.y_text}"
        else:
            words += f"\n{point.y:.3f}"
        text = axes.text(
            point.x, point.y, words, ha="center", va="center", linespacing=1.05, in_layout=False
        )
        text.set(
            color=picture_style.ink_of(theme.families[point.look.colour], theme),
            path_effects=picture_style.halo(theme),
            zorder=5,
            gid=f"label-{point.number}",
        )
        if point in front:
            text.set_fontweight("bold")
        texts[i] = text
    return texts


def _ends_of_families(front: Sequence[Point]) -> list[Point]:
    """Return the smallest and the largest point of each family on the front."""
    smallest: dict[str, Point] = {}
    largest: dict[str, Point] = {}
    for point in front:
        smallest.setdefault(point.look.family, point)
        largest[point.look.family] = point
    return [*smallest.values(), *largest.values()]
