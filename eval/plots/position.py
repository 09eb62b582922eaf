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
from . import measures, picture_style, points
from .picture_style import Look, Theme

HEIGHT, MORE = 7.8, 0.06
"""Height (inches), and its increase for each line beyond the first ``MOST``."""
LARGEST, PITCH, NAME_WIDTH = 10.5, 0.7, 3.5
"""Bounds of the names: largest font (points), its share of a name's height, largest width (inches).
"""
MOST = 12
"""Maximum number of coloured lines."""
X_LABEL = "Position in the window (tokens before it)"
GREY = "\nin colour: the reference, the noise floor, and rows that no other row beats; grey: the {} others"


class Line(NamedTuple):
    """One model's line: values ``y`` and errors [B] at the bins' positions ``x``; NaN where nothing
    is drawn.
    """

    number: int  # index of the model, for the artists' ids
    model: ModelResult
    look: Look
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    error: NDArray[np.float64]
    colour: str | None  # None: grey
    dashes: tuple[float, ...]


def by_position(
    run: RunResult, *, kld: bool = False, title: str | None = None, dark: bool = False
) -> Figure:
    """Return the plot of the loss, or of KLD; the reference has a thicker line, above all others.

    ValueError without a value.  On a logarithmic axis values that are not above 0 leave a gap; a
    linear axis of KLD begins at 0.
    """
    curves = [model.curve for model in run.models if model.curve]
    values = [value for curve in curves for value in (curve.kld if kld else curve.nll) or ()]
    log_y = kld and picture_style.is_wide(value for value in values if value is not None)
    lines = _lines(run, picture_style.DARK if dark else picture_style.LIGHT, kld=kld, log_y=log_y)
    if not lines:
        raise ValueError("no model has scores by position")
    labels = [line.model.marked_label for line in lines]
    grey = sum(line.colour is None for line in lines)
    # the band of the loss is mostly about the text, and the same for all rows
    banded = [
        line
        for line in lines
        if line.colour and (kld or line.model.reference) and np.isfinite(line.error).any()
    ]
    bands = "\nbands: ± one standard error" + (
        "" if kld else ", most of it the text, which all rows share"
    )
    subtitle = (
        points.subtitle_of(run, labels)
        + (GREY.format(grey) if grey else "")
        + (bands if banded else "")
    )
    if title is None:
        title = f"{'KL divergence' if kld else 'Loss'} by position in the window"
    height = HEIGHT + MORE * max(len(lines) - MOST, 0)
    with picture_style.canvas(height, title, subtitle, dark=dark) as (figure, axes, theme):
        y_label = measures.kld_axis(run) if kld else "Loss (nats, mean over tokens)"
        axes.set(xscale="log", yscale="log" if log_y else "linear", xlabel=X_LABEL, ylabel=y_label)
        axes.margins(x=0.02, y=0.05)
        texts = [
            _draw(axes, line, name, theme)
            for line, name in zip(lines, picture_style.names_of(labels), strict=True)
        ]
        for number, _, _, x, y, error, colour, _ in banded:
            low, high = np.maximum(y - error, np.minimum(y, 0.0)), y + error
            if log_y:  # the error of the logarithm
                low, high = y * np.exp(-error / y), y * np.exp(error / y)
            axes.fill_between(
                x, low, high, color=colour, alpha=0.18, lw=0, zorder=1, gid=f"band-{number}"
            )
        axes.autoscale_view()
        if kld and not log_y:
            axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
        picture_style.log_ticks(axes.xaxis)
        if log_y:
            picture_style.log_ticks(axes.yaxis)
        picture_style.draw_legend(
            axes, [line.look for line in lines if line.colour], theme, below=figure, markers=False
        )
        _place_names(figure, axes, lines, texts)
    return figure


def _lines(run: RunResult, theme: Theme, *, kld: bool, log_y: bool) -> list[Line]:
    """Return the line of each model that has values; of too many, only those that matter have a
    colour.

    Lines of one family differ by their dashes.  Bins without a score of any model are left out and
    are not gaps.
    """
    curves = {number: model.curve for number, model in enumerate(run.models) if model.curve}
    best, found = points.front_labels(run), picture_style.looks_of(run.models)
    matters = [n for n in curves if run.models[n].reference or run.models[n] is run.noise_floor]
    matters += [n for n in curves if run.models[n].marked_label in best]
    coloured = list(curves) if len(curves) <= MOST else matters[:MOST]
    lines = []
    for number, curve in curves.items():
        values, errors = (curve.kld, curve.kld_stderr) if kld else (curve.nll, curve.nll_stderr)
        y = np.array(values or [np.nan] * len(curve.nll), np.float64)
        y[y <= 0 if log_y else np.isinf(y)] = np.nan
        alike = [other.nll for other in curves.values() if other.edges == curve.edges]
        scored = np.array(
            [any(value is not None for value in bins) for bins in zip(*alike, strict=True)],
            np.bool_,
        )
        x = np.sqrt(np.array(curve.edges[:-1]) * (np.array(curve.edges[1:]) - 1))
        error = np.array(errors or [np.nan] * len(y), np.float64)
        kin = [n for n in coloured if found[n].family == found[number].family]
        colour = theme.families[found[number].colour] if number in kin else None
        dashes = (
            picture_style.DASHES[kin.index(number) % len(picture_style.DASHES)] if colour else ()
        )
        if np.isfinite(y).any():
            drawn = x[scored], y[scored], error[scored]
            lines.append(Line(number, run.models[number], found[number], *drawn, colour, dashes))
    return lines


def _draw(axes: Axes, line: Line, name: str, theme: Theme) -> Text:
    """Draw a line, with a dot where it is a single bin, and return its name, which is not placed
    yet.
    """
    width, order = (3.0, 2.5) if line.model.reference else (1.9, 2.0) if line.colour else (1.0, 1.8)
    colour, alpha = line.colour or theme.muted, None if line.colour else 0.5
    dashes: Any = (0, line.dashes) if line.dashes else "-"
    axes.plot(
        line.x,
        line.y,
        ls=dashes,
        lw=width,
        zorder=order,
        color=colour,
        alpha=alpha,
        gid=f"line-{line.number}",
    )
    known = np.pad(np.isfinite(line.y), 1)
    lone = known[1:-1] & ~known[:-2] & ~known[2:]
    axes.plot(
        line.x[lone],
        line.y[lone],
        "o",
        ms=1.5 * width,
        color=colour,
        alpha=alpha,
        gid=f"lone-{line.number}",
    )
    name += " (reference)" if line.model.reference else ""
    text = axes.text(
        1.04, 0.5, name, transform=axes.transAxes, va="center", gid=f"label-{line.number}"
    )
    text.set_color(picture_style.ink_of(line.colour, theme) if line.colour else theme.muted)
    return text


def _place_names(figure: Figure, axes: Axes, lines: Sequence[Line], texts: Sequence[Text]) -> None:
    """Move each name to the height of its line's end, or as near as other names allow, and join
    name and line.
    """
    ends = [
        (line.x[i], line.y[i]) for line in lines for i in np.flatnonzero(np.isfinite(line.y))[-1:]
    ]
    size = min(
        LARGEST, PITCH * 72 * axes.get_position().height * figure.get_figheight() / len(texts)
    )
    wide = (
        max(text.get_window_extent().width / float(text.get_fontsize()) for text in texts)
        / picture_style.DPI
    )
    for text in texts:
        text.set_fontsize(min(size, NAME_WIDTH / wide))
    picture_style.freeze_layout(figure)
    spots = axes.transData.transform(ends)
    gap = max(text.get_window_extent().height for text in texts) + 1
    places = _spread_out(spots[:, 1], gap, axes.bbox.y0, axes.bbox.y1)
    for text, spot, place in zip(texts, spots, places, strict=True):
        text.set_y((place - axes.bbox.y0) / axes.bbox.height)
        path = axes.transAxes.inverted().transform(
            [spot, (axes.bbox.x1, spot[1]), (axes.bbox.x1, place)]
        )
        path[1:, 0] = 1.005, 1.035
        gid = str(text.get_gid()).replace("label", "leader")
        leader = {
            "color": text.get_color(),
            "lw": 0.7,
            "alpha": 0.7,
            "clip_on": False,
            "zorder": 1.5,
            "gid": gid,
        }
        axes.plot(*path.T, transform=axes.transAxes, **leader)


def _spread_out(
    wanted: NDArray[np.float64], gap: float, low: float, high: float
) -> NDArray[np.float64]:
    """Return places [N] in [low, high], at least ``gap`` apart, in the order of the wanted ones
    [N].

    Places that touch have the mean of the wanted ones.
    """
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    runs: list[list[float]] = []
    for each in wanted[order] - steps:
        runs.append([each])
        while len(runs) > 1 and np.mean(runs[-2]) > np.mean(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    pooled = np.concatenate([np.full(len(run), np.mean(run)) for run in runs])
    return np.asarray((np.clip(pooled, low, max(low, high - steps[-1])) + steps)[np.argsort(order)])
