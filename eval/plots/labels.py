"""Place the labels of a scatter plot: each is next to its point and covers nothing.

Every label has places around its point.  The labels take turns: each moves to its cheapest place
while the others stay.  Random costs, which shrink from round to round, let them leave places that
are only locally best (simulated annealing).  All shapes are boxes [x0, y0, x1, y1] in pixels, one
per row of an array: labels, markers, and lines as rows of dots.
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
"""Pixels between marker and label at which a further pixel costs three times as much as next to the
marker."""
DOT = 8.0
"""Pixels between the dots that stand for a line."""
NEAREST = 120
"""Largest number of places of a label that are compared."""
ALL_PLACES = 5000
"""Largest number of places of all labels together, because every place is compared with every other
one."""
MANY = 60
"""If there are more labels, only the smallest size and one arrangement are tried."""
MOST_LABELS = 100
"""Largest number of labels in a picture.  Without a limit 300 labels would take 6 GB and many
minutes."""
OVERLAPS = 8
"""In the table of pairs of places: added where two labels overlap.  Smaller numbers count what
their leaders cross."""
OVERLAP, MARKER, LEADER, BESIDE, HEIGHT, LINE = 1e4, 200.0, 600.0, 25.0, 1.0, 0.1
"""Costs, where a pixel between marker and label costs 1: a label on a label or marker; a leader
through a marker; a leader through a label or leader; another marker as near as the label's own; a
pixel above or below the point; dots under the label, squared."""
HEAT = 100.0
"""Scale of the random costs in the first round of moves, which let labels leave places that are
only locally best."""
ROUNDS = tuple(
    (OVERLAP * 0.002 ** max(1 - k / 32, 0), HEAT * max(1 - k / 36, 0)) for k in range(40)
)
"""Cost of an overlap, which grows, and scale of the random costs, which falls to 0, in each round
of moves."""
TRIALS = 5
"""Number of arrangements of few labels, each with another order of turns.  The cheapest is taken.
"""


def place_labels(
    axes: Axes,
    texts: Sequence[Text],
    marks: Sequence[Line2D],
    names: Sequence[Text] = (),
    unnamed: int = 0,
) -> None:
    """Move each label next to its marker, with a leader if it is far away; labels that fit nowhere
    are removed.

    ``marks``: the labels' markers, then other markers that must stay visible.  ``names``: names of
    horizontal lines, which are placed first, at free places along their lines.  ``unnamed``: the
    number of markers that have no label for lack of room.
    """
    spots = np.array([mark.get_window_extent().extents for mark in marks])
    dots = np.vstack(
        [_dots(line.get_transform().transform(line.get_xydata()), axes.bbox) for line in axes.lines]
    )
    obstacles = np.vstack([spots, *(_place_name(axes, name, spots) for name in names)])
    sizes_to_try = FONT_SIZES[len(texts) > FEW :]
    trials = TRIALS
    if len(texts) > MANY:
        sizes_to_try = FONT_SIZES[-1:]
        trials = 1
    for size in sizes_to_try:
        for text in texts:
            text.set_fontsize(size)
        sizes = [np.array(text.get_window_extent().size) + PADDING for text in texts]
        most = min(NEAREST, ALL_PLACES // len(texts))
        places = [
            _places(i, each, axes.bbox, obstacles, dots, most) for i, each in enumerate(sizes)
        ]
        boxes, fits = _arrange(places, spots[: len(texts)], trials)
        if fits.all():
            break
    to_data = axes.transData.inverted()
    for text, mark, box, spot, is_clear in zip(texts, marks, boxes, spots, fits, strict=False):
        middle = (box[0] + box[2]) / 2
        text.set(position=to_data.transform((box[:2] + box[2:]) / 2))
        text.set_multialignment(
            "right" if middle < spot[0] else "left" if middle > spot[2] else "center"
        )
        if not is_clear:
            text.remove()
        elif _gaps(box[None], spot[None])[0, 0] > LEADER_FROM:
            ends = to_data.transform(_leaders(box[None], spot).reshape(2, 2))
            gid = str(text.get_gid()).replace("label", "leader")
            axes.plot(*ends.T, color=mark.get_color(), lw=0.8, alpha=0.7, zorder=3, gid=gid)
    missing = int((~fits).sum()) + unnamed
    if missing:
        note = f"no room for {missing} of {len(texts) + unnamed} labels"
        axes.annotate(note, (1, 1.01), xycoords="axes fraction", ha="right")


def _dots(path: Boxes, area: Bbox) -> Boxes:
    """Return dots [N, 4] at the points of a path [M, 2] and along its lines, where they are in the
    area; in pixels.
    """
    found = [path[((path >= area.min) & (path <= area.max)).all(axis=1)]]
    for a, b in pairwise(path):
        ends = _part_inside(a, b, area)
        if ends is not None:
            start, end = ends
            found.append(np.linspace(start, end, 1 + int(np.hypot(*(end - start)) / DOT)))
    return np.tile(np.vstack(found), 2)


def _part_inside(start: Boxes, end: Boxes, area: Bbox) -> tuple[Boxes, Boxes] | None:
    """Return the ends [2] of the part of a line that is in the area; None if no part of it is.

    A value that is too large for a number, or below 0 on a logarithmic axis, has no finite place.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        step = end - start
    if not np.isfinite(step).all():
        return None
    first = 0.0
    last = 1.0
    for axis in (0, 1):
        low = area.min[axis] - start[axis]
        high = area.max[axis] - start[axis]
        if step[axis] == 0:
            if low > 0 or high < 0:
                return None
            continue
        enters, leaves = sorted((low / step[axis], high / step[axis]))
        first = max(first, enters)
        last = min(last, leaves)
    if first > last:
        return None
    # The bounds hold even where rounding of huge numbers would miss the area.
    inside = np.clip([start + first * step, start + last * step], area.min, area.max)
    return inside[0], inside[1]


def _place_name(axes: Axes, name: Text, spots: Boxes) -> Boxes:
    """Move the name of a horizontal line along it, to where it covers no marker; return its box
    [4].
    """
    width, height = np.array(name.get_window_extent().size) + PADDING
    y = axes.transData.transform(name.get_position())[1]
    starts = np.linspace(axes.bbox.x0 + 2, axes.bbox.x1 - width, 40)
    boxes = np.array(
        [(x, y + up, x + width, y + up + height) for up in (1, -height - 1) for x in starts]
    )
    outside = (boxes[:, 1] < axes.bbox.y0) | (boxes[:, 3] > axes.bbox.y1)
    best = boxes[np.argmax(np.minimum(_gaps(boxes, spots).min(axis=1), 60) - 1000 * outside)]
    name.set(position=axes.transData.inverted().transform((best[:2] + best[2:]) / 2))
    return np.asarray(best)


def _places(
    own: int, size: Boxes, area: Bbox, obstacles: Boxes, dots: Boxes, most: int
) -> tuple[Boxes, Boxes]:
    """Return (places [P, 4] of a label of this size [2], the cost of each place alone [P]), the
    cheapest first.

    ``own``: the row of its marker in ``obstacles``; ``most``: the largest P.
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
    cost += OVERLAP * (around == 0).sum(axis=1) + LINE * _touching(boxes, dots).sum(axis=1) ** 2
    cost += BESIDE * (around < np.minimum(distance, 30)[:, None] + 3).sum(axis=1)
    cost += MARKER * _crossed(_leaders(boxes, spot), others).sum(axis=1) * (distance > LEADER_FROM)
    best = np.argsort(cost, kind="stable")[:most]
    return boxes[best], cost[best]


def _arrange(
    places: Sequence[tuple[Boxes, Boxes]], spots: Boxes, trials: int
) -> tuple[Boxes, NDArray[np.bool_]]:
    """Return (a place for each label [N, 4], which of them cover no other label and no marker [N]).

    ``trials``: how many arrangements are made; the cheapest is returned.
    """
    counts = [len(boxes) for boxes, _ in places]
    firsts = np.cumsum(
        [0, *counts[:-1]]
    )  # the row of each label's first place among the places of all labels
    pairs = _pairs([boxes for boxes, _ in places], spots, firsts)
    random = np.random.default_rng(0)

    def costs(i: int, chosen: NDArray[np.intp], pressure: float) -> Boxes:
        """The cost [P] of each place of a label while the other labels stay."""
        with_others = pairs[firsts[i] : firsts[i] + counts[i], firsts + chosen]
        overlaps = (with_others >= OVERLAPS).sum(axis=1)
        crossings = (with_others % OVERLAPS).sum(axis=1)
        return np.asarray(places[i][1] + pressure * overlaps + LEADER / 2 * crossings)

    least = np.inf
    best = np.zeros(len(places), np.intp)
    best_costs = np.zeros(len(places))
    for _ in range(trials):
        chosen = np.zeros(len(places), np.intp)
        order = random.permutation(len(places))
        for pressure, heat in ROUNDS:
            for i in order:
                found = costs(i, chosen, pressure)
                chosen[i] = np.argmin(found - heat * random.gumbel(size=len(found)))
        total = np.array([costs(i, chosen, OVERLAP)[chosen[i]] for i in range(len(places))])
        if total.sum() < least:
            least = total.sum()
            best = chosen
            best_costs = total
    return np.array(
        [boxes[i] for (boxes, _), i in zip(places, best, strict=True)]
    ), best_costs < OVERLAP


def _pairs(boxes: Sequence[Boxes], spots: Boxes, firsts: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Return for all places [M, M] of all labels, two at a time: how often their leaders cross a
    label or a leader, and ``OVERLAPS`` more if the labels overlap; 0 for two places of one label.

    ``boxes``: the places of each label [P, 4]; ``firsts``: the row of each label's first place.
    """
    own = list(zip(boxes, spots, strict=True))
    leaders = [_leaders(places, spot) for places, spot in own]
    drawn = [_gaps(places, spot[None]) > LEADER_FROM for places, spot in own]
    hulls = [np.vstack([places, spot]) for places, spot in own]
    reach = np.array([[*hull[:, :2].min(axis=0), *hull[:, 2:].max(axis=0)] for hull in hulls])
    count = sum(map(len, boxes))
    pairs = np.zeros((count, count), np.uint8)
    for i, j in np.argwhere(np.triu(_touching(reach, reach), 1)):
        found = _touching(boxes[i], boxes[j]) * np.uint8(OVERLAPS)
        found += _crossed(leaders[i], boxes[j]) & drawn[i]
        found += (_crossed(leaders[j], boxes[i]) & drawn[j]).T
        found += _meet(leaders[i], leaders[j]) & drawn[i] & drawn[j].T
        rows = slice(firsts[i], firsts[i] + len(boxes[i]))
        columns = slice(firsts[j], firsts[j] + len(boxes[j]))
        pairs[rows, columns] = found
        pairs[columns, rows] = found.T
    return pairs


def _gaps(a: Boxes, b: Boxes) -> Boxes:
    """Return the distances [A, B] between boxes; 0 where they touch or overlap."""
    a, b = a.T[:, :, None], b.T[:, None]
    return np.asarray(np.hypot(*np.maximum(np.maximum(a[:2] - b[2:], b[:2] - a[2:]), 0)))


def _touching(a: Boxes, b: Boxes) -> NDArray[np.bool_]:
    """Return which boxes [A, 4] touch or overlap which boxes [B, 4]."""
    a = a.T[:, :, None]
    b = b.T[:, None]
    return np.asarray((a[0] <= b[2]) & (b[0] <= a[2]) & (a[1] <= b[3]) & (b[1] <= a[3]))


def _leaders(boxes: Boxes, spot: Boxes) -> Boxes:
    """Return the lines [P, 4] from the middle of a marker [4] to the nearest places in boxes [P,
    4].
    """
    centre = (spot[:2] + spot[2:]) / 2
    ends = np.clip(centre, boxes[:, :2], boxes[:, 2:])
    return np.hstack([np.broadcast_to(centre, ends.shape), ends])


def _crossed(lines: Boxes, boxes: Boxes) -> NDArray[np.bool_]:
    """Return which lines [A, 4] go through which boxes [B, 4]."""
    start, end = lines[:, None, :2], lines[:, None, 2:]
    middle, half = (boxes[:, :2] + boxes[:, 2:]) / 2, (boxes[:, 2:] - boxes[:, :2]) / 2
    is_near = (np.abs(middle - (start + end) / 2) <= half + np.abs(end - start) / 2).all(axis=2)
    normal = (end - start)[..., ::-1] * (-1, 1)
    is_on_line = np.abs((normal * (middle - start)).sum(axis=2)) <= (np.abs(normal) * half).sum(
        axis=2
    )
    return np.asarray(is_near & is_on_line)


def _meet(a: Boxes, b: Boxes) -> NDArray[np.bool_]:
    """Return which lines [A, 4] cross which lines [B, 4]; touching ends do not."""

    def sides(lines: Boxes, points: Boxes) -> Boxes:
        """On which side of each line [A, 4] each point [B, 2] is: above or below 0."""
        along, to = (lines[:, 2:] - lines[:, :2])[:, None], points - lines[:, None, :2]
        return np.asarray(along[..., 0] * to[..., 1] - along[..., 1] * to[..., 0])

    apart = sides(a, b[:, :2]) * sides(a, b[:, 2:]) < 0
    return np.asarray(apart & (sides(b, a[:, :2]) * sides(b, a[:, 2:]) < 0).T)
