"""Mean loss or KLD by position in the window: one line per model, labelled at its right end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray

from ..results import ModelResult, RunResult
from ..stats.curve import Curve
from . import measures, picture_style, points
from .picture_style import Look, Theme

HEIGHT_OF_FEW_LINES = 7.8
"""Height of a picture of at most ``MOST_COLOURED`` lines (inches)."""
HEIGHT_OF_LINE = 0.06
"""Increase of the height for each further line (inches)."""
MOST_COLOURED = 12
"""Maximum number of coloured lines."""
LARGEST_FONT = 10.5
"""Largest font of the names (points)."""
FONT_SHARE = 0.7
"""Largest share of a font in the height that the axes have for each name."""
NAME_WIDTH = 3.5
"""Largest width of the names (inches)."""
NAME_START = 1.04
"""Left end of the names; 0 and 1 are the sides of the axes."""
LEADER_BEND = 1.005
"""End of the level part of a leader, in the same unit: just outside of the axes."""
LEADER_END = 1.035
"""Right end of a leader, in the same unit: just before the name."""
AT_LEAST_THIS = " (at least)"
"""After the name of a row whose KLD is a bound."""
X_LABEL = "Position in the window (tokens before it)"
GREY_NOTE = (
    "\nin colour: the reference, the noise floor, and rows that no other row beats; "
    "grey: the {} others"
)


class Line(NamedTuple):
    """One model's line.

    Values ``y`` and errors [B] are at the bins' positions ``x``; NaN where nothing is drawn.
    ``number``: index of the model, for the artists' ids.  ``colour`` None: grey.
    """

    number: int
    model: ModelResult
    look: Look
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    error: NDArray[np.float64]
    colour: str | None
    dashes: tuple[float, ...]


def by_position(
    run: RunResult, *, kld: bool = False, title: str | None = None, dark: bool = False
) -> Figure:
    """Return the plot of the loss, or of KLD; the reference has a thicker line, above all others.

    ValueError without a value.  On a logarithmic axis values that are not above 0 leave a gap; a
    linear axis of KLD begins at 0.
    """
    log_y = kld and _spans_decades(run)
    palette = picture_style.LIGHT
    if dark:
        palette = picture_style.DARK
    lines = _lines(run, palette, kld=kld, log_y=log_y)
    if not lines:
        raise ValueError("no model has scores by position")
    labels = [line.model.marked_label for line in lines]
    with_band = []
    for line in lines:
        if _has_band(line, kld=kld):
            with_band.append(line)
    subtitle = points.subtitle_of(run, labels) + _notes(lines, with_band, kld=kld)
    y_label = "Loss (nats, mean over tokens)"
    heading = "Loss by position in the window"
    if kld:
        y_label = measures.kld_axis(run)
        heading = "KL divergence by position in the window"
    if title is not None:
        heading = title
    height = HEIGHT_OF_FEW_LINES + HEIGHT_OF_LINE * max(len(lines) - MOST_COLOURED, 0)
    with picture_style.canvas(height, heading, subtitle, dark=dark) as (figure, axes, theme):
        axes.set(xscale="log", xlabel=X_LABEL, ylabel=y_label)
        if log_y:
            axes.set_yscale("log")
        axes.margins(x=0.02, y=0.05)
        texts = []
        for line, name in zip(lines, picture_style.names_of(labels), strict=True):
            if kld and line.model.has_bound:
                name += AT_LEAST_THIS
            texts.append(_draw_line(axes, line, name, theme))
        for line in with_band:
            _draw_band(axes, line, log_y=log_y)
        axes.autoscale_view()
        if kld and not log_y:
            axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
        picture_style.log_ticks(axes.xaxis)
        if log_y:
            picture_style.log_ticks(axes.yaxis)
        looks = [line.look for line in lines if line.colour]
        picture_style.draw_legend(axes, looks, theme, below=figure, markers=False)
        # Last, since the names are placed to the pixel.
        _place_names(figure, axes, lines, texts)
    return figure


def _spans_decades(run: RunResult) -> bool:
    """Return True if the KLDs by position need a logarithmic axis."""
    klds: list[float] = []
    for model in run.models:
        if model.curve and model.curve.kld:
            for kld in model.curve.kld:
                if kld is not None:
                    klds.append(kld)
    return picture_style.is_wide(klds)


def _has_band(line: Line, *, kld: bool) -> bool:
    """Return True if the errors of a line are drawn."""
    # The error of a loss is mostly that of the text, and about the same for all rows: one band, the
    # reference's, shows it.
    is_chosen = kld or line.model.reference
    return bool(line.colour and is_chosen and np.isfinite(line.error).any())


def _notes(lines: Sequence[Line], with_band: Sequence[Line], *, kld: bool) -> str:
    """Return the lines of the subtitle about colours and bands; empty or with a line break."""
    notes = ""
    n_grey = sum(line.colour is None for line in lines)
    if n_grey:
        notes += GREY_NOTE.format(n_grey)
    if with_band:
        notes += "\nbands: ± one standard error"
        if not kld:
            notes += ", most of it the text, which all rows share"
    return notes


def _lines(run: RunResult, theme: Theme, *, kld: bool, log_y: bool) -> list[Line]:
    """Return the line of each model that has values.

    Lines of one family differ by their dashes.  Bins without a score of any model are left out and
    are not gaps.
    """
    curves = {number: model.curve for number, model in enumerate(run.models) if model.curve}
    looks = picture_style.looks_of(run.models)
    coloured = _coloured(run, list(curves))
    lines = []
    for number, curve in curves.items():
        y, error = _values(curve, kld=kld, log_y=log_y)
        # The geometric mean of a bin's first and last position.
        x = np.sqrt(np.array(curve.edges[:-1]) * (np.array(curve.edges[1:]) - 1))
        is_scored = _scored_bins(curve.edges, list(curves.values()))
        colour = None
        dashes: tuple[float, ...] = ()
        if number in coloured:
            colour = theme.families[looks[number].colour]
            kin = [n for n in coloured if looks[n].family == looks[number].family]
            dashes = picture_style.DASHES[kin.index(number) % len(picture_style.DASHES)]
        if np.isfinite(y).any():
            line = Line(
                number,
                run.models[number],
                looks[number],
                x[is_scored],
                y[is_scored],
                error[is_scored],
                colour,
                dashes,
            )
            lines.append(line)
    return lines


def _values(
    curve: Curve, *, kld: bool, log_y: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (the values of a curve, their errors) [B]; NaN where a value cannot be drawn."""
    values: Sequence[float | None] | None = curve.nll
    errors = curve.nll_stderr
    if kld:
        values = curve.kld
        errors = curve.kld_stderr
    y = np.array(values or [np.nan] * len(curve.nll), np.float64)
    if log_y:
        y[y <= 0] = np.nan
    else:
        # Infinite values would stretch a linear axis.  On a logarithmic one they are kept, and the
        # line leaves the picture.
        y[np.isinf(y)] = np.nan
    error = np.array(errors or [np.nan] * len(y), np.float64)
    return y, error


def _coloured(run: RunResult, numbers: Sequence[int]) -> list[int]:
    """Return the numbers of the models whose lines have a colour.

    All of them, if they are at most ``MOST_COLOURED``.  Otherwise the reference and the noise
    floor, then the models on the Pareto front, until the limit is reached.
    """
    if len(numbers) <= MOST_COLOURED:
        return list(numbers)
    front = points.front_labels(run)
    important = []
    for number in numbers:
        model = run.models[number]
        if model.reference or model is run.noise_floor:
            important.append(number)
    for number in numbers:
        if run.models[number].marked_label in front:
            important.append(number)
    return important[:MOST_COLOURED]


def _scored_bins(edges: tuple[int, ...], curves: Sequence[Curve]) -> NDArray[np.bool_]:
    """Return which of these bins [B] have a score in one of the curves of the same bins."""
    is_scored = np.zeros(max(len(edges) - 1, 0), np.bool_)
    for curve in curves:
        if curve.edges == edges:
            is_scored |= np.array([loss is not None for loss in curve.nll], np.bool_)
    return is_scored


def _draw_line(axes: Axes, line: Line, name: str, theme: Theme) -> Text:
    """Draw a line, with a dot where it is a single bin; return its name, which is not placed."""
    if line.model.reference:
        width = 3.0
        order = 2.5
        name += " (reference)"
    elif line.colour:
        width = 1.9
        order = 2.0
    else:
        width = 1.0
        order = 1.8
    colour = theme.muted
    text_colour = theme.muted
    alpha: float | None = 0.5
    if line.colour:
        colour = line.colour
        text_colour = picture_style.ink_of(line.colour, theme)
        alpha = None
    dashes: Any = "-"
    if line.dashes:
        dashes = (0, line.dashes)
    drawn: dict[str, Any] = {"color": colour, "alpha": alpha}
    axes.plot(line.x, line.y, ls=dashes, lw=width, zorder=order, gid=f"line-{line.number}", **drawn)
    is_finite = np.pad(np.isfinite(line.y), 1)
    is_lone = is_finite[1:-1] & ~is_finite[:-2] & ~is_finite[2:]
    axes.plot(
        line.x[is_lone], line.y[is_lone], "o", ms=1.5 * width, gid=f"lone-{line.number}", **drawn
    )
    text = axes.text(
        NAME_START, 0.5, name, transform=axes.transAxes, va="center", gid=f"label-{line.number}"
    )
    text.set_color(text_colour)
    return text


def _draw_band(axes: Axes, line: Line, *, log_y: bool) -> None:
    """Draw the standard errors of a line as a band around it."""
    if log_y:
        # The error of the logarithm, since y - error may be below 0.
        low = line.y * np.exp(-line.error / line.y)
        high = line.y * np.exp(line.error / line.y)
    else:
        # A band ends at 0: loss and KLD are not below 0, except a KLD by rounding.
        low = np.maximum(line.y - line.error, np.minimum(line.y, 0.0))
        high = line.y + line.error
    gid = f"band-{line.number}"
    axes.fill_between(line.x, low, high, color=line.colour, alpha=0.18, lw=0, zorder=1, gid=gid)


def _place_names(figure: Figure, axes: Axes, lines: Sequence[Line], texts: Sequence[Text]) -> None:
    """Move each name to the height of its line's end, or as near as other names allow.

    A leader joins name and line.
    """
    _set_font_size(figure, axes, texts)
    picture_style.freeze_layout(figure)
    ends = axes.transData.transform([_end_of(line) for line in lines])
    gap = max(text.get_window_extent().height for text in texts) + 1
    heights = _spread_out(ends[:, 1], gap, axes.bbox.y0, axes.bbox.y1)
    for text, end, height in zip(texts, ends, heights, strict=True):
        text.set_y((height - axes.bbox.y0) / axes.bbox.height)
        ends_of_leader = [end, (axes.bbox.x1, height)]
        (line_x, line_y), (_, name_y) = axes.transAxes.inverted().transform(ends_of_leader)
        # The leader is level from the line's end to the axes' edge, and then goes to the name.
        axes.plot(
            [line_x, LEADER_BEND, LEADER_END],
            [line_y, line_y, name_y],
            transform=axes.transAxes,
            color=text.get_color(),
            lw=0.7,
            alpha=0.7,
            clip_on=False,
            zorder=1.5,
            gid=str(text.get_gid()).replace("label", "leader"),
        )


def _set_font_size(figure: Figure, axes: Axes, texts: Sequence[Text]) -> None:
    """Set the largest font in which all names fit in height and width."""
    axes_height = axes.get_position().height * figure.get_figheight()
    size = min(LARGEST_FONT, FONT_SHARE * 72 * axes_height / len(texts))
    widths_per_point = []
    for text in texts:
        widths_per_point.append(text.get_window_extent().width / float(text.get_fontsize()))
    inches_per_point = max(widths_per_point) / picture_style.DPI
    for text in texts:
        text.set_fontsize(min(size, NAME_WIDTH / inches_per_point))


def _end_of(line: Line) -> tuple[float, float]:
    """Return the last point of a line; ValueError if no point is drawn."""
    finite = np.flatnonzero(np.isfinite(line.y))
    if not len(finite):
        raise ValueError(f"{line.model.label}: no value by position")
    return line.x[finite[-1]], line.y[finite[-1]]


def _spread_out(
    heights: NDArray[np.float64], gap: float, low: float, high: float
) -> NDArray[np.float64]:
    """Return heights [N] in [low, high], at least ``gap`` apart, in the order of ``heights`` [N].

    Names that touch are around the mean of their heights.
    """
    order = np.argsort(heights, kind="stable")
    steps = gap * np.arange(len(heights))
    # Isotonic regression by pooling neighbours: without the gaps, the heights must not fall.
    pools: list[list[float]] = []
    for height in heights[order] - steps:
        pools.append([height])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    means = np.concatenate([np.full(len(pool), np.mean(pool)) for pool in pools])
    inside = np.clip(means, low, max(low, high - steps[-1]))
    return np.asarray((inside + steps)[np.argsort(order)])
