"""Pictures: points of scatter plots, the published table, and functions to inspect a figure."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.transforms import Bbox

from compare_q.eval.plots import picture_style, scatter
from compare_q.eval.plots.points import Point
from compare_q.eval.results import ModelResult, RunResult
from tests.support import ROOT

FLOOR = "bf16 vLLM, noise"
MARKED = "NVFP4 W4A4 as run"


@functools.cache
def real_run() -> RunResult:
    """The published table, with all rows."""
    return RunResult.read(ROOT / "results" / "h200" / "table" / "results.json")


def clump(count: int, *, spread: float) -> list[Point]:
    """Return a cloud around 4 bpw, and two distant points that widen the axes.

    ``spread``: standard deviation of the sizes in the cloud.
    """
    rng = random.Random(count)
    points = []
    for i in range(count - 2):
        x = rng.gauss(4, spread)
        y = rng.gauss(7, spread / 20)
        points.append(Point(f"G{i % 5} variant{i}", x, y))
    return [*points, Point("bf16", 16, 6.8), Point("EXL3 2.0", 2, 7.4)]


CASES = {
    "clump": clump(30, spread=0.2),
    "zero": [Point("bf16", 0.0, 0.0)],
    "same x": [Point(f"EXL3 v{i}", 4.0, 7.4 + 0.01 * i) for i in range(8)],
    "identical": [
        Point("EXL3 4.0", 4.0, 7.4),
        Point("AWQ g128", 4.0, 7.4),
        Point("AWQ g64", 4.0, 7.4),
    ],
    "odd labels": [
        # matplotlib leaves labels with "_" at the front out of legends, and reads $a$ as a formula.
        Point("_x $a$ b$", 1, 1),
        Point("", 2, 2),
        Point("[a]", 3, 3),
        Point("L" * 90 + " m" * 90, 4, 4),
    ],
}


def draw(points: list[Point], **keys: Any) -> Figure:
    """Return the plot of these points, each with the look of a model of its label."""
    looks = picture_style.looks_of([ModelResult.of(point.label, "fake") for point in points])
    points_with_looks = []
    for point, look in zip(points, looks, strict=True):
        points_with_looks.append(replace(point, look=look))
    return scatter.scatter_plot(
        points_with_looks, x_label="x", y_label="y", title="Model", subtitle="data", **keys
    )


def artists_of_kind(figure: Figure, kind: str) -> list[Any]:
    """Return the artists of a kind ("label", "point", "bar", ...), in drawing order."""
    artists = []
    for artist in figure.findobj():
        kind_of_artist, _, _ = (artist.get_gid() or "").rpartition("-")
        if kind_of_artist == kind:
            artists.append(artist)
    return artists


def texts_of(figure: Figure, kind: str) -> list[str]:
    """Return the texts of the artists of a kind."""
    return [artist.get_text() for artist in artists_of_kind(figure, kind)]


def legend_of(figure: Figure) -> list[str]:
    """Return the texts of the legends of a figure."""
    names = []
    for legend in figure.findobj(Legend):
        names += [text.get_text() for text in legend.get_texts()]
    return names


def boxes_of(figure: Figure, kind: str = "label") -> list[Bbox]:
    """Return the boxes of the artists of a kind."""
    return [artist.get_window_extent() for artist in artists_of_kind(figure, kind)]


def pixels_apart(box: Bbox, other: Bbox) -> float:
    """Return the pixels between two boxes, below 0 if they overlap."""
    return float(max(box.x0 - other.x1, other.x0 - box.x1, box.y0 - other.y1, other.y0 - box.y1))


def smallest_gap(boxes: Sequence[Bbox], others: Sequence[Bbox] | None = None) -> float:
    """Return the pixels between the closest two boxes: one of each list, or any two of one list."""
    if others is None:
        pairs = list(itertools.combinations(boxes, 2))
    else:
        pairs = list(itertools.product(boxes, others))
    return min((pixels_apart(box, other) for box, other in pairs), default=math.inf)


def is_within(box: Bbox, outer: Bbox) -> bool:
    """True if a box is inside another box."""
    return bool(
        outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1
    )
