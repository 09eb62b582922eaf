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
from compare_q.eval.results.run_result import TextResult

HEIGHT, MARGIN = 7.8, 0.2
"""Inches: height of the figure, and margin around its contents."""
LARGEST, SMALLEST, PITCH = 10.5, 5.0, 0.62
"""Largest and smallest font of the names (points), and the share of a name's height that its font takes."""
NAME_WIDTH = 3.5
"""Inches that the names take at most; longer ones have a smaller font."""
X_LABEL = "Position in the window (tokens before it)"


@dataclass(frozen=True)
class Line:
    """One model: bin i is the mean over positions ``edges[i]`` to ``edges[i + 1] - 1``; None: no score is there.

    Without values it is not drawn, but has a style that no other line gets.

    The ``bold`` line is the reference's: it is thicker, above all others, and its name says so.  ``size``: orders the
    shades of one scheme.  ``matters``: it keeps its colour where there are more lines than can be told apart.
    ``number``: of the model in its run, which the artists' ids have.
    """

    label: str
    edges: tuple[int, ...]
    values: tuple[float | None, ...]
    bold: bool = False
    group: str = ""
    size: float | None = None
    matters: bool = False
    number: int = 0


def by_position(text: TextResult, *, kld: bool = False, title: str = "", dark: bool = False) -> Figure:
    """Loss, or KLD, over the position in the window; a model has one style in both."""
    kld_points, ppl_points = (points.points_of(text, BPW, measure)[0] for measure in (KLD, PPL))
    best = {point.label for point in points.pareto_front(kld_points or ppl_points)}
    lines = []
    for number, model in enumerate(text.models):
        curve = model.estimates.curve if model.estimates else None
        values = None if curve is None else curve.kld if kld else curve.nll
        if curve is not None:
            look = model.is_reference, model.group, model.storage.bpw_layer
            matters = model.marked_label in best or model is text.noise_floor
            lines.append(Line(model.marked_label, curve.edges, values or (), *look, matters, number))
    grey = count_of_grey(lines)
    others = f"in colour: the reference, the noise floor, and rows that no other row beats; grey: the {grey} others"
    return over_position(
        lines,
        y_label=measures.kld_axis(text) if kld else "Loss (nats, mean over tokens)",
        title=title or f"{'KL divergence' if kld else 'Loss'} by position in the window",
        subtitle=points.marked_subtitle(text, [line.label for line in lines]) + (f"\n{others}" if grey else ""),
        dark=dark,
        log_y=kld and style.is_wide(value for line in lines for value in line.values if value is not None),
        from_zero=kld,
    )


def over_position(
    lines: Sequence[Line], *, y_label: str, title: str, subtitle: str = "", dark: bool = False, log_y: bool = False,
    from_zero: bool = False,
) -> Figure:  # fmt: skip
    """The finished plot; on a logarithmic y axis values that are not above 0 leave a gap; a linear one can begin at 0.

    Where there is no room for all names, the lines that end nearest to a named line have none, and a note counts them.
    """
    if not any(line.values for line in lines):
        raise ValueError("no model has scores by position")
    with style.canvas(HEIGHT, title, subtitle, dark=dark) as (figure, axes, theme):
        axes.set(xscale="log", yscale="log" if log_y else "linear", xlabel=X_LABEL, ylabel=y_label)
        axes.margins(x=0.02, y=0.05)
        styles = _styles(lines, theme)
        texts: list[Text] = []
        ends: list[tuple[float, float]] = []
        first = 0
        names = looks.short_labels([line.label for line in lines])
        for i, line in enumerate(lines):
            if not line.values:
                continue
            x, y = _path(line, log_y)
            width, order = (3.0, 2.5) if line.bold else (1.9, 2.0) if i in styles else (1.0, 1.8)
            drawn = axes.plot(x, y, lw=width, zorder=order, gid=f"line-{line.number}")[0]
            look = styles.get(i, LineStyle(to_hex(style.paper_of(theme.muted, theme))))
            drawn.set(color=look.colour, linestyle=(0, look.dashes) if look.dashes else "-")
            known = np.flatnonzero(np.isfinite(y))
            if len(known):
                first = len(ends) if line.bold else first
                ends.append((x[known[-1]], y[known[-1]]))
                name = names[i] + (" (reference)" if line.bold else "")
                texts.append(axes.text(1.04, 0.5, name, transform=axes.transAxes, va="center"))
                ink = style.ink_of(look.colour, theme) if i in styles else theme.muted
                texts[-1].set(color=ink, gid=f"label-{line.number}")
        if not ends:
            raise ValueError("no model has a value to draw by position")
        axes.autoscale_view()
        if from_zero and not log_y:
            axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
        style.log_ticks(axes.xaxis)
        if log_y:
            style.log_ticks(axes.yaxis)
        _name(figure, axes, texts, ends, first)
    return figure


def _styles(lines: Sequence[Line], theme: Theme) -> dict[int, LineStyle]:
    """The styles of the lines that have a colour."""
    schemes = [points.scheme_of(*split_label(line.label, line.group)) for line in lines]
    ranked = sorted(range(len(lines)), key=lambda i: (not lines[i].bold, not lines[i].matters))
    kept = told_apart(schemes, ranked, sum(line.bold or line.matters for line in lines))
    looks = line_styles([schemes[i] for i in kept], [lines[i].size for i in kept], theme)
    return dict(zip(kept, looks, strict=True))


def count_of_grey(lines: Sequence[Line]) -> int:
    """How many lines ``over_position`` draws without a colour."""
    kept = _styles(lines, style.LIGHT)
    return sum(bool(line.values) and i not in kept for i, line in enumerate(lines))


def _path(line: Line, log_y: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(x, y) of a line's bins, x in the middle of each on a logarithmic axis; y nan where there is nothing to draw."""
    first, last = np.array(line.edges[:-1]), np.array(line.edges[1:]) - 1
    y = [np.nan if value is None or (log_y and value <= 0) else value for value in line.values]
    return np.sqrt(first * last), np.array(y, dtype=np.float64)


def _name(figure: Figure, axes: Axes, texts: Sequence[Text], ends: Sequence[tuple[float, float]], first: int) -> None:
    """Moves each name to the height of its line's end, or as near as the others leave room, and joins them.

    If there is not room for all, the ``first`` line has its name, then the one that ends farthest from all named lines.
    """
    size = min(LARGEST, max(SMALLEST, PITCH * 72 * axes.get_position().height * HEIGHT / len(texts)))
    wide = max(text.get_window_extent().width / float(text.get_fontsize()) for text in texts) / style.DPI
    for text in texts:
        text.set_fontsize(min(size, NAME_WIDTH / wide))
    style.freeze_layout(figure)
    spots = axes.transData.transform(ends)
    gap = max(text.get_window_extent().height for text in texts) + 1
    kept = _farthest(spots[:, 1], first, int(axes.bbox.height / gap) + 1)
    places = dict(zip(kept, labels.spread_out(spots[kept, 1], gap, axes.bbox.y0, axes.bbox.y1), strict=True))
    for i, (text, spot) in enumerate(zip(texts, spots, strict=True)):
        if i not in places:
            text.remove()
            continue
        text.set_y((places[i] - axes.bbox.y0) / axes.bbox.height)
        path = axes.transAxes.inverted().transform([spot, (axes.bbox.x1, spot[1]), (axes.bbox.x1, places[i])])
        path[1:, 0] = 1.005, 1.035
        leader = {"color": text.get_color(), "lw": 0.7, "alpha": 0.7, "clip_on": False, "zorder": 1.5}
        (line,) = axes.plot(*path.T, transform=axes.transAxes, **leader)
        line.set_gid(str(text.get_gid()).replace("label", "leader"))
    if len(kept) < len(texts):
        note = f"no room for {len(texts) - len(kept)} of {len(texts)} names"
        figure.text(
            1 - MARGIN / style.WIDTH, MARGIN / HEIGHT, note, ha="right", va="bottom", size=LARGEST, gid="note-0"
        )


def _farthest(heights: NDArray[np.float64], first: int, room: int) -> list[int]:
    """Indices of at most ``room`` of these heights [N], in order: ``first``, then the one farthest from all taken."""
    taken, away = [first], np.abs(heights - heights[first])
    while len(taken) < min(room, len(heights)):
        away[taken] = -1.0
        taken.append(int(np.argmax(away)))
        away = np.minimum(away, np.abs(heights - heights[taken[-1]]))
    return sorted(taken)
