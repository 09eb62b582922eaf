"""Looking at a finished figure: its artists by kind, and distances between boxes in pixels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.transforms import Bbox


def artists_of_kind(figure: Figure, kind: str) -> list[Any]:
    """The artists of a kind ("label", "point", "bar", ...), in the order in which they were drawn."""
    return list(figure.findobj(lambda artist: (artist.get_gid() or "").rpartition("-")[0] == kind))


def boxes_of(figure: Figure, kind: str = "label") -> list[Bbox]:
    """The boxes of the artists of a kind."""
    return extents(artists_of_kind(figure, kind))


def pixels_apart(box: Bbox, other: Bbox) -> float:
    """Pixels between the boxes, below 0 if they overlap."""
    return float(max(box.x0 - other.x1, other.x0 - box.x1, box.y0 - other.y1, other.y0 - box.y1))


def smallest_gap(boxes: Sequence[Bbox], others: Sequence[Bbox] | None = None) -> float:
    """Pixels between the two that are closest to each other (of one box of each, or of any two)."""
    pairs = itertools.combinations(boxes, 2) if others is None else itertools.product(boxes, others)
    return min((pixels_apart(*pair) for pair in pairs), default=math.inf)


def extents(artists: Sequence[Any]) -> list[Bbox]:
    """Their boxes."""
    return [artist.get_window_extent() for artist in artists]


def is_within(box: Bbox, outer: Bbox) -> bool:
    """Whether a box lies in another."""
    return bool(outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1)
