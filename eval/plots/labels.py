"""Places for labels: none overlaps another label, a point, or the name of a line.

In a scatter plot each label in turn, the most crowded first, moves to the cheapest of many places around its point,
five times over.  Boxes are [x0, y0, x1, y1] and segments [xa, ya, xb, yb], in pixels, y upwards, one per row of an
array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from numpy.typing import NDArray

PixelRows = NDArray[np.float64]

FONT_SIZES = (10.5, 9.0, 7.5, 6.0)
"""Points; the first size at which all labels fit is taken."""
PADDING = np.array([-6, -3, 6, 3])
"""Pixels kept free around a label."""
LEADER_FROM = 12.0
"""Pixels between a point and its label; if they are farther apart, a line joins them."""
COSTS = np.array([150.0, 25.0, 8.0, 20.0, 200.0, 0.1])
"""Costs of a place for a label, each times its number: a leader through a label or point, two leaders that cross, a
line through the label, another point about as near as the label's own, another point beside it while its own is far
away, a pixel between label and point."""
BESIDE = 14.0
"""Pixels: a label so near to a point seems to be its name."""
FAR = 80.0
"""Pixels: a line's name that is this far from every point is far enough."""


def place_labels(
    axes: Axes,
    marks: Sequence[Line2D],
    texts: Sequence[Text],
    names: Sequence[Text] = (),
    others: Sequence[Line2D] = (),
) -> None:
    """Moves each label to a free place, flush with its point, with a leader if that is far away.

    ``names``: of horizontal lines, each at its line's height, which first take free places along them; ``others``:
    marks of points that have no label, but are not to be covered.
    """
    if not marks:
        return
    spots = np.array([mark.get_window_extent().extents for mark in marks])
    drawn = [_segments(axes, line) for line in axes.lines]
    lines = np.vstack([np.empty((0, 4)), *drawn])
    named = _place_names(axes, names, spots, lines)
    named = np.vstack([named, *(np.array([mark.get_window_extent().extents]) for mark in others)])
    boxes, clear = _fit(axes, texts, spots, lines, named)
    to_data, centres = axes.transData.inverted(), (boxes[:, :2] + boxes[:, 2:]) / 2
    leaders = to_data.transform(_leaders(boxes, spots).reshape(-1, 2)).reshape(-1, 2, 2)
    sides = np.sign(centres[:, 0] - np.clip(centres[:, 0], spots[:, 0], spots[:, 2]))  # left -1, right 1
    for i in np.flatnonzero(clear):
        flush = {-1: "right", 0: "center", 1: "left"}[sides[i]]
        texts[i].set(position=to_data.transform(centres[i]), multialignment=flush)
        if _gaps(boxes[i : i + 1], spots[i : i + 1]) > LEADER_FROM:
            (leader,) = axes.plot(*leaders[i].T, color=marks[i].get_color(), lw=0.8, alpha=0.7, zorder=3)
            leader.set_gid(str(texts[i].get_gid()).replace("label", "leader"))
    for i in np.flatnonzero(~clear):
        texts[i].remove()
    if not clear.all():
        note = f"no room for {(~clear).sum()} of {len(texts)} labels"
        axes.annotate(note, (1, 1.01), xycoords="axes fraction", ha="right")


def spread_out(wanted: PixelRows, gap: float, low: float, high: float) -> PixelRows:
    """Places [N] in [low, high], at least ``gap`` apart, in the order of those wanted [N], as near to these as they can
    be (least squares: the mean of places that touch is the mean of the places that were wanted for them)."""
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    runs: list[list[float]] = []
    for each in wanted[order] - steps:
        runs.append([each])
        while len(runs) > 1 and np.mean(runs[-2]) > np.mean(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    places = np.empty(len(wanted))
    pooled = np.concatenate([np.full(len(run), np.mean(run)) for run in runs])
    places[order] = np.clip(pooled, low, max(low, high - steps[-1])) + steps
    return places


def _segments(axes: Axes, line: Line2D) -> PixelRows:
    path = axes.transData.transform(line.get_xydata())
    return np.hstack([path[:-1], path[1:]])


def _place_names(axes: Axes, names: Sequence[Text], spots: PixelRows, lines: PixelRows) -> PixelRows:
    """Moves each name along its line, above or below it, to where least is in the way; the boxes of the names."""
    taken = np.empty((0, 4))
    for name in names:
        box = np.array(name.get_window_extent().extents) + PADDING
        (width, height), y = box[2:] - box[:2], float((box[1] + box[3]) / 2)
        low, high = axes.bbox.x0 + 6, axes.bbox.x1 - width
        shifts = [(x, y + side * (height / 2 + 1) - height / 2) for x in np.linspace(high, low, 80) for side in (1, -1)]
        corners = np.array(shifts)
        options = np.hstack([corners, corners + box[2:] - box[:2]])
        options = options[(options[:, 1] > axes.bbox.y0) & (options[:, 3] < axes.bbox.y1)]
        near = np.minimum(_gaps(options, np.vstack([spots, taken])).min(axis=1, initial=FAR), FAR)
        best = options[np.argmin(COSTS[2] * _through(lines, options).sum(axis=0) - near)]
        name.set(position=axes.transData.inverted().transform((best[:2] + best[2:]) / 2))
        taken = np.vstack([taken, best])
    return taken


def _fit(
    axes: Axes, texts: Sequence[Text], spots: PixelRows, lines: PixelRows, named: PixelRows
) -> tuple[PixelRows, NDArray[np.bool_]]:
    """Sets the largest font in which all labels fit; the boxes [N, 4] of the labels, and which labels fit [N]."""
    home = [text.get_position() for text in texts]
    for size in FONT_SIZES:
        for text, position in zip(texts, home, strict=True):
            text.set(fontsize=size, position=position)
        boxes = np.array([text.get_window_extent().extents for text in texts]) + PADDING
        boxes = _arrange(boxes, np.array(axes.bbox.extents), spots, lines, named)
        clear = np.isfinite(boxes[:, 0]) & ~np.tril(_gaps(boxes, boxes) == 0, -1).any(axis=1)
        if clear.all():
            break
    return boxes, clear


def _arrange(boxes: PixelRows, area: PixelRows, spots: PixelRows, lines: PixelRows, named: PixelRows) -> PixelRows:
    """Moves one label [N, 4] at a time, the most crowded first, to its cheapest free place (nan: there is none)."""
    order = np.argsort(-(_gaps(spots, spots) < 150).sum(axis=1), kind="stable")
    places = [_places(i, box, area, spots, named) for i, box in enumerate(boxes)]
    boxes = np.full_like(boxes, np.nan)
    for i in np.tile(order, 5):
        taken = (_gaps(places[i], np.delete(boxes, i, axis=0)) == 0).sum(axis=1)
        options = places[i][taken == min(taken, default=0)][:200]  # the nearest are enough
        boxes[i] = options[np.argmin(_costs(i, options, boxes, spots, lines))] if len(options) else np.nan
    return boxes


def _places(i: int, box: PixelRows, area: PixelRows, spots: PixelRows, named: PixelRows) -> PixelRows:
    """Boxes [P, 4] for label i, as large as this one, in the area, clear of points and names, the nearest first."""
    half, reach = (box[2:] - box[:2]) / 2, (spots[i, 2:] - spots[i, :2]) / 2 + 1
    steps = np.arange(-3, 4) / 3
    rim = sorted(((x, y) for x in -steps for y in steps if max(abs(x), abs(y)) == 1), key=lambda xy: np.abs(xy).sum())
    rings = [(spots[i, :2] + spots[i, 2:]) / 2 + np.array(rim) * (half + reach + 2 * step**1.5) for step in range(40)]
    low, high = area[:2] + half, area[2:] - half
    grid = np.mgrid[low[0] : high[0] : half[0], low[1] : high[1] : half[1]].reshape(2, -1).T
    centres = np.vstack([*rings, grid])
    centres = centres[np.all((centres >= low) & (centres <= high), axis=1)]
    boxes = np.hstack([centres - half, centres + half])
    boxes = boxes[(_gaps(boxes, np.vstack([spots, named])) > 0).all(axis=1)]
    return boxes[np.argsort(_gaps(boxes, spots)[:, i], kind="stable")]


def _costs(i: int, options: PixelRows, boxes: PixelRows, spots: PixelRows, lines: PixelRows) -> PixelRows:
    """Cost [P] of label i in each box of options [P, 4], the other labels being where boxes [N, 4] say."""
    others, strangers = np.delete(boxes, i, axis=0), np.delete(spots, i, axis=0)
    distance = _gaps(options, spots[i : i + 1])[:, 0]
    leaders, other_leaders = _leaders(options, spots[i : i + 1]), _leaders(others, strangers)
    covered = _through(leaders, np.vstack([others, strangers])).sum(axis=1)
    covered += _through(other_leaders, options).sum(axis=0)
    crossed, on_lines = _crossings(leaders, other_leaders).sum(axis=1), _through(lines, options).sum(axis=0)
    away = _gaps(options, strangers)
    ambiguous = (away < 1.5 * distance[:, None] + BESIDE).sum(axis=1)
    wrong = (away < np.minimum(BESIDE, distance / 2)[:, None]).sum(axis=1)
    return np.asarray(COSTS @ np.stack([covered, crossed, on_lines, ambiguous, wrong, distance]))


def _gaps(a: PixelRows, b: PixelRows) -> PixelRows:
    """Distances [A, B] between boxes; 0 where they touch or overlap."""
    a, b = a.T[:, :, None], b.T[:, None]
    return np.asarray(np.hypot(*np.maximum(np.maximum(a[:2] - b[2:], b[:2] - a[2:]), 0)))


def _leaders(boxes: PixelRows, spots: PixelRows) -> PixelRows:
    """Segments [N, 4] from the centres of spots ([N, 4] or [1, 4]) to the nearest places in boxes [N, 4]."""
    centres = np.broadcast_to((spots[:, :2] + spots[:, 2:]) / 2, (len(boxes), 2))
    return np.hstack([centres, np.clip(centres, boxes[:, :2], boxes[:, 2:])])


def _through(segments: PixelRows, boxes: PixelRows) -> NDArray[np.bool_]:
    """Which segments touch which boxes [S, B]: those that are between the sides in both directions at once."""
    start, way = segments.T[:2, :, None], (segments[:, 2:] - segments[:, :2]).T[:, :, None] + 1e-9
    one, other = (boxes.T[:2, None] - start) / way, (boxes.T[2:, None] - start) / way
    enter, leave = np.maximum(*np.minimum(one, other)), np.minimum(*np.maximum(one, other))
    return np.asarray((enter <= leave) & (leave >= 0) & (enter <= 1))


def _crossings(a: PixelRows, b: PixelRows) -> NDArray[np.bool_]:
    """Which segments of a cross which of b [A, B]: the lines through them meet between the ends of both."""
    start, way = a.T[:2, :, None] - b.T[:2, None], (a[:, 2:] - a[:, :2]).T[:, :, None]
    other = (b[:, 2:] - b[:, :2]).T[:, None]
    across = way[0] * other[1] - way[1] * other[0] + 1e-9
    on_a = (start[1] * other[0] - start[0] * other[1]) / across
    on_b = (start[1] * way[0] - start[0] * way[1]) / across
    return np.asarray((on_a > 0) & (on_a < 1) & (on_b > 0) & (on_b < 1))
