"""Mean loss or KLD by position in the window: one line per model, labelled at its right end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray

from compare_q.eval.plots import labels, looks, measures, points, style
from compare_q.eval.plots.looks import LineStyle, line_styles, split_label
from compare_q.eval.plots.style import Theme
from compare_q.eval.results import ModelResult, TextResult
from compare_q.eval.stats.estimates import Curve

HEIGHT, NAME, MOST_NAMES = 7.8, 0.12, 50
"""Height of the figure, and of each further line if there are more than ``MOST_NAMES`` (inches)."""
LARGEST, PITCH, NAME_WIDTH = 10.5, 0.62, 3.5
"""Names: largest font (points), its share of the height that a name has, and their largest width (inches)."""
BAND_ALPHA = 0.18
LONG = 20_000
"""Longest window (tokens) with ticks between the powers of ten."""
X_LABEL = "Position in the window (tokens before it)"


@dataclass(frozen=True)
class Line:
    """One model's line: values ``y`` [B] at the bins' positions ``x`` [B], NaN where nothing is drawn.

    ``band``: one standard error below and above [B] each; None unless two neighbouring bins have an error.
    ``number``: index of the model, for the artists' ids.  ``look``: None for a grey line.
    """

    number: int
    model: ModelResult
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    band: tuple[NDArray[np.float64], NDArray[np.float64]] | None
    look: LineStyle | None


def by_position(text: TextResult, *, kld: bool = False, title: str | None = None, dark: bool = False) -> Figure:
    """Return the plot of the loss, or of KLD; the reference has a thicker line, above all others.

    ValueError without a value.  On a logarithmic axis values that are not above 0 leave a gap; a linear axis of KLD
    begins at 0.
    """
    known = {number: m.estimates.curve for number, m in enumerate(text.models) if m.estimates}
    values = [value for curve in known.values() for value in (curve.kld if kld else curve.nll) or ()]
    log_y = kld and style.is_wide(value for value in values if value is not None)
    styles = _styles(text, list(known), style.DARK if dark else style.LIGHT)
    lines = [_line(text, number, curve, list(known.values()), styles.get(number), kld=kld, log_y=log_y)
             for number, curve in known.items() if (curve.kld if kld else curve.nll)]  # fmt: skip
    if not any(np.isfinite(line.y).any() for line in lines):
        raise ValueError("no model has scores by position")
    banded = sorted((line for line in lines if line.look and line.band), key=lambda line: not line.model.reference)
    banded = banded if kld else banded[:1]  # the band of the loss is mostly about the text, and the same for all rows
    subtitle = points.subtitle_of([text], [line.model.marked_label for line in lines])
    if grey := sum(line.look is None for line in lines):
        subtitle += (
            f"\nin colour: the reference, the noise floor, and rows that no other row beats; grey: the {grey} others"
        )
    if banded and not kld:
        subtitle += (
            f"\nband: ± one standard error of {banded[0].model.marked_label}, most of it the text, which all rows share"
        )
    elif banded:
        subtitle += "\nbands: ± one standard error"
    if title is None:
        title = f"{'KL divergence' if kld else 'Loss'} by position in the window"
    height = HEIGHT + NAME * max(len(lines) - MOST_NAMES, 0)
    with style.canvas(height, title, subtitle, dark=dark) as (figure, axes, theme):
        y_label = measures.kld_axis(text) if kld else "Loss (nats, mean over tokens)"
        axes.set(xscale="log", yscale="log" if log_y else "linear", xlabel=X_LABEL, ylabel=y_label)
        axes.margins(x=0.02, y=0.05)
        names = looks.short_labels([line.model.marked_label for line in lines])
        texts = [_draw(axes, line, name, theme, band=line in banded) for line, name in zip(lines, names, strict=True)]
        axes.autoscale_view()
        if kld and not log_y:
            axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
        style.log_ticks(axes.xaxis, sparse=max(curve.edges[-1] for curve in known.values()) > LONG)
        if log_y:
            style.log_ticks(axes.yaxis)
        drawn = [(line, np.flatnonzero(np.isfinite(line.y))) for line in lines]
        ends = [(line.x[shown[-1]], line.y[shown[-1]]) for line, shown in drawn if len(shown)]
        _place_names(figure, axes, [each for each in texts if each is not None], ends)
    return figure


def _styles(text: TextResult, numbers: Sequence[int], theme: Theme) -> dict[int, LineStyle]:
    """Return the style of each model with a coloured line, the same for loss and KLD."""
    models = [text.models[number] for number in numbers]
    best = points.front_labels(text)
    schemes = [points.scheme_of(*split_label(model.marked_label, model.group)) for model in models]
    matters = [model.marked_label in best or model is text.noise_floor for model in models]
    ranked = sorted(range(len(models)), key=lambda i: (not models[i].reference, not matters[i]))
    must = sum(model.reference or matter for model, matter in zip(models, matters, strict=True))
    coloured = looks.distinguishable(schemes, ranked, must)
    styles = line_styles([schemes[i] for i in coloured], [models[i].bpw_layer for i in coloured], theme)
    return {numbers[i]: look for i, look in zip(coloured, styles, strict=True)}


def _line(
    text: TextResult, number: int, curve: Curve, curves: Sequence[Curve], look: LineStyle | None, *, kld: bool,
    log_y: bool,
) -> Line:  # fmt: skip
    """Return a model's line, without the bins in which no model has a score; these are no gaps."""
    alike = [other.nll for other in curves if other.edges == curve.edges]
    scored = np.array([any(value is not None for value in bins) for bins in zip(*alike, strict=True)], np.bool_)
    first, last = np.array(curve.edges[:-1]), np.array(curve.edges[1:]) - 1
    values, errors = (curve.kld, curve.kld_stderr) if kld else (curve.nll, curve.nll_stderr)
    y = np.array([np.nan if value is None or (log_y and value <= 0) else value for value in values or ()])[scored]
    error = np.array([np.nan if e is None else e for e in errors or [None] * len(scored)], np.float64)[scored]
    low, high = np.maximum(y - error, np.minimum(y, 0.0)), y + error
    if log_y:  # the error of the logarithm
        low, high = y * np.exp(-error / y), y * np.exp(error / y)
    known = np.isfinite(y + error)
    band = (low, high) if (known[1:] & known[:-1]).any() else None
    return Line(number, text.models[number], np.sqrt(first * last)[scored], y, band, look)


def _draw(axes: Axes, line: Line, name: str, theme: Theme, *, band: bool) -> Text | None:
    """Draw a line with its band, and return its name, which is not placed yet; None without a value."""
    look = line.look or LineStyle(to_hex(style.paper_of(theme.muted, theme)))
    width, order = (3.0, 2.5) if line.model.reference else (1.9, 2.0) if line.look else (1.0, 1.8)
    drawn = axes.plot(line.x, line.y, lw=width, zorder=order, color=look.colour, gid=f"line-{line.number}")[0]
    drawn.set_linestyle((0, look.dashes) if look.dashes else "-")
    if band and line.band:
        area = axes.fill_between(line.x, *line.band, color=look.colour, alpha=BAND_ALPHA, lw=0, zorder=order - 1)
        area.set_gid(f"band-{line.number}")
    if not np.isfinite(line.y).any():
        return None
    name += " (reference)" if line.model.reference else ""
    text = axes.text(1.04, 0.5, name, transform=axes.transAxes, va="center")
    text.set(color=style.ink_of(look.colour, theme) if line.look else theme.muted, gid=f"label-{line.number}")
    return text


def _place_names(figure: Figure, axes: Axes, texts: Sequence[Text], ends: Sequence[tuple[float, float]]) -> None:
    """Move each name to the height of its line's end, or as near as the others leave room, and join the two."""
    size = min(LARGEST, PITCH * 72 * axes.get_position().height * figure.get_figheight() / len(texts))
    wide = max(text.get_window_extent().width / float(text.get_fontsize()) for text in texts) / style.DPI
    for text in texts:
        text.set_fontsize(min(size, NAME_WIDTH / wide))
    style.freeze_layout(figure)
    spots = axes.transData.transform(ends)
    gap = max(text.get_window_extent().height for text in texts) + 1
    places = labels.spread_out(spots[:, 1], gap, axes.bbox.y0, axes.bbox.y1)
    for text, spot, place in zip(texts, spots, places, strict=True):
        text.set_y((place - axes.bbox.y0) / axes.bbox.height)
        path = axes.transAxes.inverted().transform([spot, (axes.bbox.x1, spot[1]), (axes.bbox.x1, place)])
        path[1:, 0] = 1.005, 1.035
        leader = {"color": text.get_color(), "lw": 0.7, "alpha": 0.7, "clip_on": False, "zorder": 1.5}
        (line,) = axes.plot(*path.T, transform=axes.transAxes, **leader)
        line.set_gid(str(text.get_gid()).replace("label", "leader"))
