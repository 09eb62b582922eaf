"""Place the labels of a scatter plot: each is next to its point and covers nothing.

Every label has places around its point.  The labels take turns: each moves to its cheapest place
while the others stay.  Random costs, which shrink from round to round, let them leave places that
are only locally best (simulated annealing).  All shapes are boxes [x0, y0, x1, y1] in pixels, one
per row of an array: labels, markers, and lines as rows of dots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

Boxes = NDArray[np.float64]

FONT_SIZES: tuple[float, ...] = (10.5, 9.0, 7.5, 6.0)
"""In points.  The largest size at which all labels fit is taken."""
FEW_LABELS = 15
"""If there are more labels, the largest size is not tried."""
LABEL_PADDING = (8, 4)
"""Pixels kept free around a label, in width and height."""
RINGS = np.array([1, 5, 10, 16, 24, 34, 46, 60, 78, 100, 130, 170, 220, 280, 350])
"""Pixels between a marker and the places of its label."""
LEADER_FROM = 14.0
"""A line joins marker and label if they are more than this many pixels apart."""
NEIGHBOUR_MARGIN = 3.0
"""Another marker is about as near as the label's own if it is less than this many pixels further
away."""
NEIGHBOUR_REACH = 30.0
"""Pixels: if the label's own marker is further away, other markers are compared with this distance.
A marker at ``NEIGHBOUR_REACH + NEIGHBOUR_MARGIN`` or beyond is thus never about as near."""
FAR = 50.0
"""Pixels between marker and label at which the cost of a further pixel is tripled."""
DOT = 8.0
"""Pixels between the dots that stand for a line."""
FREE_OF_MARKERS = 60
"""Pixels around the name of a horizontal line; markers that are further away do not matter."""
NAME_PLACES = 40
"""Number of places of the name of a horizontal line on each side of the line."""
NEAREST = 120
"""Largest number of places of a label that are compared."""
ALL_PLACES = 5000
"""Largest number of places of all labels together.

Every place is compared with every other one.
"""
MANY_LABELS = 60
"""If there are more labels, only the smallest size and one arrangement are tried."""
MOST_LABELS = 100
"""Largest number of labels in a picture.

Without a limit 300 labels would take 6 GB and many minutes.
"""
OVERLAPS = 8
"""In the table of pairs of places: added where two labels overlap.

Smaller numbers count what their leaders cross.
"""

# Costs of a place, where a pixel between marker and label costs 1.
OVERLAP_COST = 1e4
"""A label on another label, a marker or a name."""
MARKER_COST = 200.0
"""A leader through a marker."""
LEADER_COST = 600.0
"""A leader through a label or another leader."""
NEIGHBOUR_COST = 25.0
"""Another marker about as near as the label's own."""
HEIGHT_COST = 1.0
"""A pixel above or below the point."""
LINE_COST = 0.1
"""One dot under the label; more dots cost the square of their number."""

ROUNDS = 40
"""Number of rounds of moves in an arrangement."""
HEAT = 100.0
"""Scale of the random costs in the first round of moves.

Without them the pictures of 41 rows had up to 7 crossings of leaders instead of 1 or 2, and labels
were up to 1.5 times as far from their markers.
"""
TRIALS = 5
"""Number of arrangements of few labels, each with another order of turns.

The cheapest is taken.
"""


class Places(NamedTuple):
    """Places that a label may have: boxes [P, 4], and the cost of each alone [P]."""

    boxes: Boxes
    costs: NDArray[np.float64]


class PairTable(NamedTuple):
    """Conflicts between any two places of different labels.

    ``first_rows`` [N]: row of each label's first place among the places of all labels.
    ``conflicts`` [M, M]: see ``_conflicts``.
    """

    first_rows: NDArray[np.intp]
    conflicts: NDArray[np.uint8]


def place_labels(
    axes: Axes,
    texts: Sequence[Text],
    marks: Sequence[Line2D],
    names: Sequence[Text] = (),
    unnamed: int = 0,
) -> None:
    """Move each label next to its marker, with a leader if it is far away.

    Labels that fit nowhere are removed, and a note has their number.  ``marks``: the labels'
    markers, then other markers that must stay visible.  ``names``: names of horizontal lines, which
    are placed first, at free places along their lines.  ``unnamed``: the number of markers that
    have no label for lack of room.
    """
    markers = np.array([mark.get_window_extent().extents for mark in marks])
    dots = np.vstack([_dots_of(line, axes.bbox) for line in axes.lines])
    obstacles = markers
    for name in names:
        obstacles = np.vstack([obstacles, _place_name(axes, name, markers)])
    missing = unnamed
    # A card of many rows names only quantized rows, and may lack such rows.
    if texts:
        boxes, fits = _boxes_of_labels(texts, axes.bbox, markers, obstacles, dots)
        missing += int((~fits).sum())
        # ``marks`` has more items, which have no label.
        labelled = zip(texts, marks, markers, boxes, fits, strict=False)
        for text, mark, marker, box, is_clear in labelled:
            _move_label(axes, text, marker, box)
            if not is_clear:
                text.remove()
            elif _gaps(box[None], marker[None])[0, 0] > LEADER_FROM:
                _draw_leader(axes, text, mark, marker, box)
    if missing:
        note = f"no room for {missing} of {len(texts) + unnamed} labels"
        axes.annotate(note, (1, 1.01), xycoords="axes fraction", ha="right")


def _boxes_of_labels(
    texts: Sequence[Text], area: Bbox, markers: Boxes, obstacles: Boxes, dots: Boxes
) -> tuple[Boxes, NDArray[np.bool_]]:
    """Return (a place for each label [N, 4], which of them cover nothing [N]).

    Sets the largest font size at which all labels fit, or else the smallest one.
    """
    font_sizes = FONT_SIZES
    trials = TRIALS
    if len(texts) > MANY_LABELS:
        font_sizes = FONT_SIZES[-1:]
        trials = 1
    elif len(texts) > FEW_LABELS:
        font_sizes = FONT_SIZES[1:]
    for font_size in font_sizes:
        for text in texts:
            text.set_fontsize(font_size)
        places = _places_of_labels(texts, area, obstacles, dots)
        boxes, fits = _arrange(places, markers[: len(texts)], trials)
        if fits.all():
            break
    return boxes, fits


def _places_of_labels(
    texts: Sequence[Text], area: Bbox, obstacles: Boxes, dots: Boxes
) -> list[Places]:
    """Return the places of each label at its font size; label i has marker i of ``obstacles``."""
    most = min(NEAREST, ALL_PLACES // len(texts))
    places = []
    for marker_row, text in enumerate(texts):
        size = np.array(text.get_window_extent().size) + LABEL_PADDING
        places.append(_places(marker_row, size, area, obstacles, dots, most))
    return places


def _move_label(axes: Axes, text: Text, marker: Boxes, box: Boxes) -> None:
    """Move a label into its box, with its lines aligned towards the marker."""
    middle = (box[0] + box[2]) / 2
    x, y = axes.transData.inverted().transform((box[:2] + box[2:]) / 2)
    text.set_position((x, y))
    if middle > marker[2]:
        text.set_multialignment("left")
    elif middle < marker[0]:
        text.set_multialignment("right")
    else:
        text.set_multialignment("center")


def _draw_leader(axes: Axes, text: Text, mark: Line2D, marker: Boxes, box: Boxes) -> None:
    """Draw the line from a marker to its label."""
    ends = _leaders(box[None], marker).reshape(2, 2)
    x, y = axes.transData.inverted().transform(ends).T
    gid = str(text.get_gid()).replace("label", "leader")
    axes.plot(x, y, color=mark.get_color(), lw=0.8, alpha=0.7, zorder=3, gid=gid)


def _dots_of(line: Line2D, area: Bbox) -> Boxes:
    """Return dots [N, 4] at the points of a line and between them, where they are in the area."""
    path = line.get_transform().transform(line.get_xydata())
    is_inside = ((path >= area.min) & (path <= area.max)).all(axis=1)
    parts = [path[is_inside]]
    for start, end in pairwise(path):
        # Cut first: a line that leaves the axes may be millions of pixels long.
        ends = _part_inside(start, end, area)
        if ends is not None:
            first, last = ends
            length = np.hypot(*(last - first))
            parts.append(np.linspace(first, last, 1 + int(length / DOT)))
    # A dot is a box whose corners are the same.
    return np.tile(np.vstack(parts), 2)


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


def _place_name(axes: Axes, name: Text, markers: Boxes) -> Boxes:
    """Move the name of a horizontal line to where it covers no marker; return its box [4].

    It stays above or below the line.
    """
    width, height = np.array(name.get_window_extent().size) + LABEL_PADDING
    _, level = axes.transData.transform(name.get_position())
    starts = np.linspace(axes.bbox.x0 + 2, axes.bbox.x1 - width, NAME_PLACES)
    places = []
    for bottom in (level + 1, level - (height + 1)):
        for start in starts:
            places.append((start, bottom, start + width, bottom + height))
    boxes = np.array(places)
    is_outside = (boxes[:, 1] < axes.bbox.y0) | (boxes[:, 3] > axes.bbox.y1)
    nearest_marker = _gaps(boxes, markers).min(axis=1)
    space = np.minimum(nearest_marker, FREE_OF_MARKERS) - 1000 * is_outside
    box = boxes[np.argmax(space)]
    x, y = axes.transData.inverted().transform((box[:2] + box[2:]) / 2)
    name.set_position((x, y))
    return np.asarray(box)


def _places(
    marker_row: int, size: Boxes, area: Bbox, obstacles: Boxes, dots: Boxes, most: int
) -> Places:
    """Return the places of a label of this size [2], the cheapest first.

    ``marker_row``: the row of its marker in ``obstacles``.  ``most``: largest number of places.
    """
    marker = obstacles[marker_row]
    others = np.delete(obstacles, marker_row, axis=0)
    half = size / 2
    centres = _centres_around(marker, half, area)
    boxes = np.hstack([centres - half, centres + half])
    costs = _costs_alone(boxes, centres, half, marker, others, dots)
    cheapest = np.argsort(costs, kind="stable")[:most]
    return Places(boxes[cheapest], costs[cheapest])


def _centres_around(marker: Boxes, half: Boxes, area: Bbox) -> Boxes:
    """Return the centres [P, 2] of boxes of half a size [2] around a marker, inside the area."""
    centre = (marker[:2] + marker[2:]) / 2
    reach = (marker[2:] - marker[:2]) / 2
    sides = np.linspace(-1, 1, 7)
    rim = []
    for x in sides:
        for y in sides:
            if max(abs(x), abs(y)) == 1:
                rim.append((x, y))
    rings = [centre + np.array(rim) * (half + reach + ring) for ring in RINGS]
    centres = np.vstack(rings)
    is_inside = (centres >= area.min + half) & (centres <= area.max - half)
    return np.asarray(centres[is_inside.all(axis=1)])


def _costs_alone(
    boxes: Boxes, centres: Boxes, half: Boxes, marker: Boxes, others: Boxes, dots: Boxes
) -> NDArray[np.float64]:
    """Return the cost [P] of each box [P, 4] of a label without regard to the other labels.

    ``centres`` [P, 2], ``half`` [2]: of the boxes.  ``others``: obstacles except its own marker.
    """
    distance = _gaps(boxes, marker[None])[:, 0]
    to_others = _gaps(boxes, others)
    middle = (marker[:2] + marker[2:]) / 2
    rise = np.abs(centres[:, 1] - middle[1])
    n_covered = (to_others == 0).sum(axis=1)
    n_dots = _touching(boxes, dots).sum(axis=1)
    neighbour_limit = np.minimum(distance, NEIGHBOUR_REACH) + NEIGHBOUR_MARGIN
    n_neighbours = (to_others < neighbour_limit[:, None]).sum(axis=1)
    n_crossed = _crossed(_leaders(boxes, marker), others).sum(axis=1)
    costs = distance * (1 + distance / FAR)
    costs += HEIGHT_COST * np.maximum(rise - half[1], 0)
    # Of two places as good, the one nearer to the point's height, and the right one.
    costs += rise / 10
    costs += centres[:, 0] < middle[0]
    costs += OVERLAP_COST * n_covered + LINE_COST * n_dots**2
    costs += NEIGHBOUR_COST * n_neighbours
    costs += MARKER_COST * n_crossed * (distance > LEADER_FROM)
    return np.asarray(costs)


def _arrange(
    places: Sequence[Places], markers: Boxes, trials: int
) -> tuple[Boxes, NDArray[np.bool_]]:
    """Return (a place for each label [N, 4], which of them cover no other label and no marker [N]).

    ``trials``: how many arrangements are made; the cheapest is returned.
    """
    table = _pair_table(places, markers)
    random = np.random.default_rng(0)
    least = np.inf
    best = np.zeros(len(places), np.intp)
    best_costs = np.zeros(len(places))
    for _ in range(trials):
        chosen = _anneal(places, table, random)
        costs = np.zeros(len(places))
        for i in range(len(places)):
            costs[i] = _costs_beside_others(i, places, table, chosen, OVERLAP_COST)[chosen[i]]
        if costs.sum() < least:
            least = costs.sum()
            best = chosen
            best_costs = costs
    boxes = []
    for label, place in zip(places, best, strict=True):
        boxes.append(label.boxes[place])
    return np.array(boxes), best_costs < OVERLAP_COST


def _anneal(
    places: Sequence[Places], table: PairTable, random: np.random.Generator
) -> NDArray[np.intp]:
    """Return a place for each label [N], as its index: each label moves once in every round."""
    chosen = np.zeros(len(places), np.intp)
    order = random.permutation(len(places))
    for number in range(ROUNDS):
        # An overlap costs more from round to round, and the random costs fall to 0.
        pressure = OVERLAP_COST * 0.002 ** max(1 - number / 32, 0)
        heat = HEAT * max(1 - number / 36, 0)
        for i in order:
            costs = _costs_beside_others(i, places, table, chosen, pressure)
            chosen[i] = np.argmin(costs - heat * random.gumbel(size=len(costs)))
    return chosen


def _costs_beside_others(
    i: int,
    places: Sequence[Places],
    table: PairTable,
    chosen: NDArray[np.intp],
    overlap_cost: float,
) -> NDArray[np.float64]:
    """Return the cost [P] of each place of label ``i`` while the others stay at their places."""
    first = table.first_rows[i]
    rows = slice(first, first + len(places[i].boxes))
    # [P, N]: label i's places and the labels' chosen places.  The column of label i itself is 0,
    # because the table has no conflicts between places of one label.
    conflicts = table.conflicts[rows, table.first_rows + chosen]
    overlaps = (conflicts >= OVERLAPS).sum(axis=1)
    crossings = (conflicts % OVERLAPS).sum(axis=1)
    # Half of the cost, since both labels have it.
    return np.asarray(places[i].costs + overlap_cost * overlaps + LEADER_COST / 2 * crossings)


def _pair_table(places: Sequence[Places], markers: Boxes) -> PairTable:
    """Return the table of all pairs of places of different labels."""
    counts = []
    reaches = []
    for label, marker in zip(places, markers, strict=True):
        counts.append(len(label.boxes))
        reaches.append(_reach(label.boxes, marker))
    first_rows = np.cumsum([0, *counts[:-1]])
    conflicts = np.zeros((sum(counts), sum(counts)), np.uint8)
    reach = np.array(reaches)
    # Labels whose reaches do not touch have no conflict at any of their places.
    for i, j in np.argwhere(np.triu(_touching(reach, reach), 1)):
        rows = slice(first_rows[i], first_rows[i] + counts[i])
        columns = slice(first_rows[j], first_rows[j] + counts[j])
        pairs = _conflicts(places[i].boxes, markers[i], places[j].boxes, markers[j])
        conflicts[rows, columns] = pairs
        conflicts[columns, rows] = pairs.T
    return PairTable(first_rows, conflicts)


def _reach(boxes: Boxes, marker: Boxes) -> Boxes:
    """Return the smallest box [4] around the places of a label and its marker."""
    shapes = np.vstack([boxes, marker])
    return np.array([*shapes[:, :2].min(axis=0), *shapes[:, 2:].max(axis=0)])


def _conflicts(
    boxes: Boxes, marker: Boxes, other_boxes: Boxes, other_marker: Boxes
) -> NDArray[np.uint8]:
    """Return for the places of two labels [P, Q] how often their leaders cross a label or leader.

    ``OVERLAPS`` more if the labels overlap.
    """
    leaders = _leaders(boxes, marker)
    other_leaders = _leaders(other_boxes, other_marker)
    has_leader = _gaps(boxes, marker[None]) > LEADER_FROM
    other_has_leader = (_gaps(other_boxes, other_marker[None]) > LEADER_FROM).T
    conflicts = _touching(boxes, other_boxes) * np.uint8(OVERLAPS)
    conflicts += _crossed(leaders, other_boxes) & has_leader
    conflicts += _crossed(other_leaders, boxes).T & other_has_leader
    conflicts += _meet(leaders, other_leaders) & has_leader & other_has_leader
    return np.asarray(conflicts)


def _gaps(a: Boxes, b: Boxes) -> Boxes:
    """Return the distances [A, B] between boxes; 0 where they touch or overlap."""
    a = a.T[:, :, None]
    b = b.T[:, None]
    dx, dy = np.maximum(np.maximum(a[:2] - b[2:], b[:2] - a[2:]), 0)
    return np.asarray(np.hypot(dx, dy))


def _touching(a: Boxes, b: Boxes) -> NDArray[np.bool_]:
    """Return which boxes [A, 4] touch or overlap which boxes [B, 4]."""
    a = a.T[:, :, None]
    b = b.T[:, None]
    return np.asarray((a[0] <= b[2]) & (b[0] <= a[2]) & (a[1] <= b[3]) & (b[1] <= a[3]))


def _leaders(boxes: Boxes, marker: Boxes) -> Boxes:
    """Return the lines [P, 4] from the middle of a marker [4] to the nearest points in boxes."""
    centre = (marker[:2] + marker[2:]) / 2
    ends = np.clip(centre, boxes[:, :2], boxes[:, 2:])
    return np.hstack([np.broadcast_to(centre, ends.shape), ends])


def _crossed(lines: Boxes, boxes: Boxes) -> NDArray[np.bool_]:
    """Return which lines [A, 4] go through which boxes [B, 4].

    They do if they overlap along x, along y and across the line (separating axes).
    """
    start = lines[:, None, :2]
    end = lines[:, None, 2:]
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    half = (boxes[:, 2:] - boxes[:, :2]) / 2
    is_near = (np.abs(middle - (start + end) / 2) <= half + np.abs(end - start) / 2).all(axis=2)
    normal = (end - start)[..., ::-1] * (-1, 1)
    distance = np.abs((normal * (middle - start)).sum(axis=2))
    is_on_line = distance <= (np.abs(normal) * half).sum(axis=2)
    return np.asarray(is_near & is_on_line)


def _meet(a: Boxes, b: Boxes) -> NDArray[np.bool_]:
    """Return which lines [A, 4] cross which lines [B, 4]; touching ends do not."""
    b_ends_differ = _sides(a, b[:, :2]) * _sides(a, b[:, 2:]) < 0
    a_ends_differ = _sides(b, a[:, :2]) * _sides(b, a[:, 2:]) < 0
    return np.asarray(b_ends_differ & a_ends_differ.T)


def _sides(lines: Boxes, points: Boxes) -> Boxes:
    """Return on which side of each line [A, 4] each point [B, 2] is: above or below 0 [A, B]."""
    along = (lines[:, 2:] - lines[:, :2])[:, None]
    to_point = points - lines[:, None, :2]
    return np.asarray(along[..., 0] * to_point[..., 1] - along[..., 1] * to_point[..., 0])
