"""Place the labels of a scatter plot: each is next to its point and covers nothing.

Every label has places around its point.  The labels take turns: each moves to its cheapest place while the others stay.
Random costs, which shrink from round to round, let them leave places that are only locally best (simulated annealing).
All shapes are boxes [x0, y0, x1, y1] in pixels, one per row of an array: labels, markers, and lines as rows of dots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

Boxes = NDArray[np.float64]
Pairs = dict[int, tuple[NDArray[np.bool_], Boxes]]
"""Other label -> for P places of this label and Q of the other: which overlap, and the cost of their leaders [P, Q]."""

FONT_SIZES = (10.5, 9.0, 7.5, 6.0)
"""In points.  The largest size at which all labels fit is taken."""
FEW = 15
"""If there are more labels, the largest size is not tried."""
PADDING = 8, 4
"""Pixels kept free around a label, in width and height."""
RINGS = np.array([1, 5, 10, 16, 24, 34, 46, 60, 78, 100, 130, 170, 220, 280, 350])
"""Pixels between a marker and the places of its label."""
LEADER_FROM = 14.0
"""A line joins marker and label if they are more than this many pixels apart."""
FAR = 50.0
"""Pixels between marker and label at which a further pixel costs three times as much as next to the marker."""
DOT = 8.0
"""Pixels between the dots that stand for a line."""
NEAREST = 120
"""Number of places of a label that are compared."""
OVERLAP, MARKER, LEADER, BESIDE, HEIGHT, LINE = 1e4, 200.0, 600.0, 25.0, 1.0, 0.1
"""Costs, where a pixel between marker and label costs 1: a label on a label or marker; a leader through a marker; a
leader through a label or leader; another marker as near as the label's own; a pixel above or below the point; dots
under the label, squared."""
HEAT = 100.0
"""Scale of the random costs in the first round of moves, which let labels leave places that are only locally best."""
ROUNDS = tuple((OVERLAP * 0.002 ** max(1 - k / 32, 0), HEAT * max(1 - k / 36, 0)) for k in range(40))
"""Cost of an overlap, which grows, and scale of the random costs, which falls to 0, in each round of moves."""
TRIALS = 5
"""Number of arrangements, each with another order of turns.  The cheapest is taken."""


def place_labels(axes: Axes, texts: Sequence[Text], marks: Sequence[Line2D], names: Sequence[Text] = ()) -> None:
    """Move each label next to its marker, with a leader if it is far away; labels that fit nowhere are removed.

    ``marks``: the labels' markers, then other markers that must stay visible.  ``names``: names of horizontal lines,
    which are placed first, at free places along their lines.
    """
    spots = np.array([mark.get_window_extent().extents for mark in marks])
    dots = np.vstack([_dots(axes.transData.transform(line.get_xydata())) for line in axes.lines])
    obstacles = np.vstack([spots, *(_place_name(axes, name, spots) for name in names)])
    for size in FONT_SIZES[len(texts) > FEW :]:
        for text in texts:
            text.set_fontsize(size)
        sizes = [np.array(text.get_window_extent().size) + PADDING for text in texts]
        places = [_places(i, each, axes.bbox, obstacles, dots) for i, each in enumerate(sizes)]
        boxes, fits = _arrange(places, spots[: len(texts)])
        if fits.all():
            break
    to_data = axes.transData.inverted()
    for text, mark, box, spot, is_clear in zip(texts, marks, boxes, spots, fits, strict=False):
        middle = (box[0] + box[2]) / 2
        text.set(position=to_data.transform((box[:2] + box[2:]) / 2))
        text.set_multialignment("right" if middle < spot[0] else "left" if middle > spot[2] else "center")
        if not is_clear:
            text.remove()
        elif _gaps(box[None], spot[None])[0, 0] > LEADER_FROM:
            ends = to_data.transform(_leaders(box[None], spot).reshape(2, 2))
            gid = str(text.get_gid()).replace("label", "leader")
            axes.plot(*ends.T, color=mark.get_color(), lw=0.8, alpha=0.7, zorder=3, gid=gid)
    if not fits.all():
        note = f"no room for {(~fits).sum()} of {len(texts)} labels"
        axes.annotate(note, (1, 1.01), xycoords="axes fraction", ha="right")


def _dots(path: Boxes) -> Boxes:
    """Return the dots [N, 4] along a path [M, 2]."""
    steps = [np.linspace(a, b, 1 + int(np.hypot(*(b - a)) / DOT)) for a, b in pairwise(path)]
    return np.tile(np.vstack([path, *steps]), 2)


def _place_name(axes: Axes, name: Text, spots: Boxes) -> Boxes:
    """Move the name of a horizontal line along it, to where it covers no marker; return its box [4]."""
    width, height = np.array(name.get_window_extent().size) + PADDING
    y = axes.transData.transform(name.get_position())[1]
    starts = np.linspace(axes.bbox.x0 + 2, axes.bbox.x1 - width, 40)
    boxes = np.array([(x, y + up, x + width, y + up + height) for up in (1, -height - 1) for x in starts])
    outside = (boxes[:, 1] < axes.bbox.y0) | (boxes[:, 3] > axes.bbox.y1)
    best = boxes[np.argmax(np.minimum(_gaps(boxes, spots).min(axis=1), 60) - 1000 * outside)]
    name.set(position=axes.transData.inverted().transform((best[:2] + best[2:]) / 2))
    return np.asarray(best)


def _places(own: int, size: Boxes, area: Bbox, obstacles: Boxes, dots: Boxes) -> tuple[Boxes, Boxes]:
    """Return (places [P, 4] of a label of this size [2], the cost of each place alone [P]), the cheapest first.

    ``own``: the row of its marker in ``obstacles``.
    """
    spot, others = obstacles[own], np.delete(obstacles, own, axis=0)
    half, reach, centre = size / 2, (spot[2:] - spot[:2]) / 2, (spot[:2] + spot[2:]) / 2
    sides = np.linspace(-1, 1, 7)
    rim = np.array([(x, y) for x in sides for y in sides if max(abs(x), abs(y)) == 1])
    centres = np.vstack([centre + rim * (half + reach + ring) for ring in RINGS])
    centres = centres[((centres >= area.min + half) & (centres <= area.max - half)).all(axis=1)]
    boxes = np.hstack([centres - half, centres + half])
    distance, around = _gaps(boxes, spot[None])[:, 0], _gaps(boxes, others)
    off = np.abs(centres[:, 1] - centre[1])
    cost = distance * (1 + distance / FAR) + HEIGHT * np.maximum(off - half[1], 0) + off / 10
    cost += centres[:, 0] < centre[0]
    cost += OVERLAP * (around == 0).sum(axis=1) + LINE * (_gaps(boxes, dots) == 0).sum(axis=1) ** 2
    cost += BESIDE * (around < np.minimum(distance, 30)[:, None] + 3).sum(axis=1)
    cost += MARKER * _crossed(_leaders(boxes, spot), others).sum(axis=1) * (distance > LEADER_FROM)
    best = np.argsort(cost, kind="stable")[:NEAREST]
    return boxes[best], cost[best]


def _arrange(places: Sequence[tuple[Boxes, Boxes]], spots: Boxes) -> tuple[Boxes, NDArray[np.bool_]]:
    """Return (a place for each label [N, 4], which of them cover no other label and no marker [N])."""
    pairs = _pair_costs([boxes for boxes, _ in places], spots)
    random, count = np.random.default_rng(0), len(places)
    least, best = np.inf, (np.zeros(count, np.intp), np.zeros(count))
    for _ in range(TRIALS):
        chosen, order = np.zeros(count, np.intp), random.permutation(count)
        for pressure, heat in ROUNDS:
            for i in order:
                costs = _costs(places[i][1], pairs[i], chosen, pressure)
                chosen[i] = np.argmin(costs - heat * random.gumbel(size=len(costs)))
        total = np.array([_costs(own, pairs[i], chosen, OVERLAP)[chosen[i]] for i, (_, own) in enumerate(places)])
        if total.sum() < least:
            least, best = total.sum(), (chosen, total)
    return np.array([boxes[i] for (boxes, _), i in zip(places, best[0], strict=True)]), best[1] < OVERLAP


def _pair_costs(boxes: Sequence[Boxes], spots: Boxes) -> list[Pairs]:
    """Return the costs of each label and those that it can touch; ``boxes``: the places of each label [P, 4]."""
    own = list(zip(boxes, spots, strict=True))
    leaders = [_leaders(places, spot) for places, spot in own]
    drawn = [_gaps(places, spot[None]) > LEADER_FROM for places, spot in own]
    hulls = [np.vstack([places, spot]) for places, spot in own]
    reach = np.array([[*hull[:, :2].min(axis=0), *hull[:, 2:].max(axis=0)] for hull in hulls])
    pairs: list[Pairs] = [{} for _ in boxes]
    for i, j in np.argwhere(np.triu(_gaps(reach, reach) == 0, 1)):
        through = (_crossed(leaders[i], boxes[j]) & drawn[i]) + (_crossed(leaders[j], boxes[i]) & drawn[j]).T * 1
        cost = LEADER / 2 * (through + (_meet(leaders[i], leaders[j]) & drawn[i] & drawn[j].T))
        overlap = _gaps(boxes[i], boxes[j]) == 0
        pairs[i][j], pairs[j][i] = (overlap, cost), (overlap.T, cost.T)
    return pairs


def _costs(own: Boxes, pairs: Pairs, chosen: NDArray[np.intp], pressure: float) -> Boxes:
    """Return the cost [P] of each place of a label while other labels stay; ``own``: the cost of each place alone."""
    total = own.copy()
    for j, (overlap, cost) in pairs.items():
        total += pressure * overlap[:, chosen[j]] + cost[:, chosen[j]]
    return total


def _gaps(a: Boxes, b: Boxes) -> Boxes:
    """Return the distances [A, B] between boxes; 0 where they touch or overlap."""
    a, b = a.T[:, :, None], b.T[:, None]
    return np.asarray(np.hypot(*np.maximum(np.maximum(a[:2] - b[2:], b[:2] - a[2:]), 0)))


def _leaders(boxes: Boxes, spot: Boxes) -> Boxes:
    """Return the lines [P, 4] from the middle of a marker [4] to the nearest places in boxes [P, 4]."""
    centre = (spot[:2] + spot[2:]) / 2
    ends = np.clip(centre, boxes[:, :2], boxes[:, 2:])
    return np.hstack([np.broadcast_to(centre, ends.shape), ends])


def _crossed(lines: Boxes, boxes: Boxes) -> NDArray[np.bool_]:
    """Return which lines [A, 4] go through which boxes [B, 4]."""
    start, end = lines[:, None, :2], lines[:, None, 2:]
    middle, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2
    is_near = (np.abs(middle - (start + end) / 2) <= half + np.abs(end - start) / 2).all(axis=2)
    normal = (end - start)[..., ::-1] * (-1, 1)
    is_on_line = np.abs((normal * (middle - start)).sum(axis=2)) <= (np.abs(normal) * half).sum(axis=2)
    return np.asarray(is_near & is_on_line)


def _meet(a: Boxes, b: Boxes) -> NDArray[np.bool_]:
    """Return which lines [A, 4] cross which lines [B, 4]; touching ends do not."""

    def sides(lines: Boxes, points: Boxes) -> Boxes:
        """On which side of each line [A, 4] each point [B, 2] is: above or below 0."""
        along, to = (lines[:, 2:] - lines[:, :2])[:, None], points - lines[:, None, :2]
        return np.asarray(along[..., 0] * to[..., 1] - along[..., 1] * to[..., 0])

    apart = sides(a, b[:, :2]) * sides(a, b[:, 2:]) < 0
    return np.asarray(apart & (sides(b, a[:, :2]) * sides(b, a[:, 2:]) < 0).T)
