"""Means over the position in the window: a line a model, named at its right end."""

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
from compare_q.eval.plots.looks import LineStyle, line_styles, split_label, told_apart
from compare_q.eval.plots.measures import BPW, KLD, PPL
from compare_q.eval.plots.style import Theme
from compare_q.eval.results.run_result import ModelResult, TextResult
from compare_q.eval.stats.distributions import Curve

HEIGHT, NAME, MOST_NAMES = 7.8, 0.12, 50
"""Inches: height of the figure, and what it grows by for each line beyond so many, whose names have room."""
LARGEST, PITCH = 10.5, 0.62
"""Largest font of the names (points), and the share of a name's height that its font takes."""
NAME_WIDTH = 3.5
"""Inches that the names take at most; longer ones have a smaller font."""
BAND_ALPHA = 0.18
LONG = 20_000
"""Tokens of a window from which positions have numbers at powers of ten alone, since others would touch."""
X_LABEL = "Position in the window (tokens before it)"


@dataclass(frozen=True)
class Line:
    """One model's line, of which bin i is the mean over positions ``edges[i]`` to ``edges[i + 1] - 1``; None: no score
    is there.  ``errors``: standard errors, None where they are not known; empty: nowhere.  ``scored``: whether any
    model has a score in the bin; other bins are left out, and are no gaps.  ``number``: of the model in its run, which
    the artists' ids have.  Its ``look`` is None if it is grey."""

    number: int
    model: ModelResult
    edges: tuple[int, ...]
    scored: NDArray[np.bool_]
    values: tuple[float | None, ...]
    errors: tuple[float | None, ...]
    look: LineStyle | None

    def path(self, log_y: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(x, y) of the bins, x in the middle of each on a logarithmic axis; y nan where there is nothing to draw."""
        first, last = np.array(self.edges[:-1]), np.array(self.edges[1:]) - 1
        y = [np.nan if value is None or (log_y and value <= 0) else value for value in self.values]
        return np.sqrt(first * last)[self.scored], np.array(y, dtype=np.float64)[self.scored]

    def band(self, log_y: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """One standard error below and above the bins, nan where it is not known; None if no two neighbours have one.

        On a logarithmic axis the error is that of the logarithm; on a linear one nothing goes below 0.
        """
        y = self.path(log_y)[1]
        errors = self.errors or [None] * len(self.values)
        error = np.array([np.nan if each is None else each for each in errors], dtype=np.float64)[self.scored]
        if not np.isfinite(y + error)[1:][np.isfinite(y + error)[:-1]].any():
            return None
        if log_y:
            return y * np.exp(-error / y), y * np.exp(error / y)
        return np.maximum(y - error, np.minimum(y, 0.0)), y + error


def lines_of(text: TextResult, theme: Theme, *, kld: bool) -> list[Line]:
    """The lines of the models that have a curve of this kind; a model has one style in both kinds."""
    kld_points, ppl_points = (points.points_of(text, BPW, measure)[0] for measure in (KLD, PPL))
    best = {point.label for point in points.pareto_front(kld_points or ppl_points)}
    curves = [(number, model, model.estimates.curve) for number, model in enumerate(text.models) if model.estimates]
    models = [model for _, model, _ in curves]
    schemes = [points.scheme_of(*split_label(model.marked_label, model.group)) for model in models]
    matters = [model.marked_label in best or model is text.noise_floor for model in models]
    ranked = sorted(range(len(models)), key=lambda i: (not models[i].is_reference, not matters[i]))
    must = sum(model.is_reference or matter for model, matter in zip(models, matters, strict=True))
    coloured = told_apart(schemes, ranked, must)
    styles = line_styles([schemes[i] for i in coloured], [models[i].storage.bpw_layer for i in coloured], theme)
    looks = dict(zip(coloured, styles, strict=True))
    lines = [
        Line(
            number,
            model,
            curve.edges,
            scored_bins([each for _, _, each in curves if each.edges == curve.edges]),
            (curve.kld if kld else curve.nll) or (),
            (curve.kld_stderr if kld else curve.nll_stderr) or (),
            looks.get(i),
        )
        for i, (number, model, curve) in enumerate(curves)
    ]
    return [line for line in lines if line.values]


def scored_bins(curves: Sequence[Curve]) -> NDArray[np.bool_]:
    """Which bins [n] of curves with the same edges hold a score: a text may have only the last of each 8,192 tokens."""
    return np.array(
        [any(each is not None for each in found) for found in zip(*(curve.nll for curve in curves), strict=True)],
        np.bool_,
    )


def by_position(text: TextResult, *, kld: bool = False, title: str = "", dark: bool = False) -> Figure:
    """Loss, or KLD, over the position in the window; the reference's line is thicker, above all others, and named.

    On a logarithmic axis values that are not above 0 leave a gap; a linear one of KLD begins at 0.
    """
    lines = lines_of(text, style.DARK if dark else style.LIGHT, kld=kld)
    if not lines:
        raise ValueError("no model has scores by position")
    log_y = kld and style.is_wide(value for line in lines for value in line.values if value is not None)
    grey = sum(line.look is None for line in lines)
    subtitle = points.marked_subtitle(text, [line.model.marked_label for line in lines])
    if grey:
        subtitle += (
            f"\nin colour: the reference, the noise floor, and rows that no other row beats; grey: the {grey} others"
        )
    banded = sorted(
        (line for line in lines if line.look and line.band(log_y)), key=lambda line: not line.model.is_reference
    )
    if banded and not kld:
        banded = banded[:1]  # the other rows have about the same, from the same text
        subtitle += (
            f"\nband: ± one standard error of {banded[0].model.marked_label}, most of it the text, which all rows share"
        )
    elif banded:
        subtitle += "\nbands: ± one standard error"
    title = title or f"{'KL divergence' if kld else 'Loss'} by position in the window"
    height = HEIGHT + NAME * max(len(lines) - MOST_NAMES, 0)
    with style.canvas(height, title, subtitle, dark=dark) as (figure, axes, theme):
        y_label = measures.kld_axis(text) if kld else "Loss (nats, mean over tokens)"
        axes.set(xscale="log", yscale="log" if log_y else "linear", xlabel=X_LABEL, ylabel=y_label)
        axes.margins(x=0.02, y=0.05)
        names = looks.short_labels([line.model.marked_label for line in lines])
        texts: list[Text] = []
        ends: list[tuple[float, float]] = []
        for line, name in zip(lines, names, strict=True):
            x, y = line.path(log_y)
            is_reference, grey_look = line.model.is_reference, LineStyle(to_hex(style.paper_of(theme.muted, theme)))
            look = line.look or grey_look
            width, order = (3.0, 2.5) if is_reference else (1.9, 2.0) if line.look else (1.0, 1.8)
            drawn = axes.plot(x, y, lw=width, zorder=order, color=look.colour, gid=f"line-{line.number}")[0]
            drawn.set_linestyle((0, look.dashes) if look.dashes else "-")
            if line in banded:
                low, high = line.band(log_y) or (y, y)
                band = axes.fill_between(x, low, high, color=look.colour, alpha=BAND_ALPHA, lw=0, zorder=order - 1)
                band.set_gid(f"band-{line.number}")
            known = np.flatnonzero(np.isfinite(y))
            if len(known):
                ends.append((x[known[-1]], y[known[-1]]))
                name += " (reference)" if is_reference else ""
                texts.append(axes.text(1.04, 0.5, name, transform=axes.transAxes, va="center"))
                ink = style.ink_of(look.colour, theme) if line.look else theme.muted
                texts[-1].set(color=ink, gid=f"label-{line.number}")
        if not ends:
            raise ValueError("no model has a value to draw by position")
        axes.autoscale_view()
        if kld and not log_y:
            axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
        style.log_ticks(axes.xaxis, sparse=max(line.edges[-1] for line in lines) > LONG)
        if log_y:
            style.log_ticks(axes.yaxis)
        _name(figure, axes, texts, ends)
    return figure


def _name(figure: Figure, axes: Axes, texts: Sequence[Text], ends: Sequence[tuple[float, float]]) -> None:
    """Moves each name to the height of its line's end, or as near as the others leave room, and joins them."""
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
