"""Pictures: points of scatter plots, the published table of 41 rows on an H200, and functions to
inspect a figure.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure
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
    """Return a cloud around 4 bpw with standard deviation ``spread``, and two distant points that
    widen the axes.
    """
    rng = random.Random(count)
    cloud = [
        Point(f"G{i % 5} variant{i}", rng.gauss(4, spread), rng.gauss(7, spread / 20))
        for i in range(count - 2)
    ]
    return [*cloud, Point("bf16", 16, 6.8), Point("EXL3 2.0", 2, 7.4)]


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
        Point("_x $a$ b$", 1, 1),
        Point("", 2, 2),
        Point("[a]", 3, 3),
        Point("L" * 90 + " m" * 90, 4, 4),
    ],
}


def draw(points: list[Point], **keys: Any) -> Figure:
    """Return the plot of these points, each with the look of a model of its label."""
    found = picture_style.looks_of([ModelResult.of(point.label, "fake") for point in points])
    points = [replace(point, look=look) for point, look in zip(points, found, strict=True)]
    return scatter.scatter_plot(
        points, x_label="x", y_label="y", title="Model", subtitle="data", **keys
    )


def artists_of_kind(figure: Figure, kind: str) -> list[Any]:
    """Return the artists of a kind ("label", "point", "bar", ...), in drawing order."""
    return list(figure.findobj(lambda artist: (artist.get_gid() or "").rpartition("-")[0] == kind))


def boxes_of(figure: Figure, kind: str = "label") -> list[Bbox]:
    """Return the boxes of the artists of a kind."""
    return [artist.get_window_extent() for artist in artists_of_kind(figure, kind)]


def pixels_apart(box: Bbox, other: Bbox) -> float:
    """Return the pixels between two boxes, below 0 if they overlap."""
    return float(max(box.x0 - other.x1, other.x0 - box.x1, box.y0 - other.y1, other.y0 - box.y1))


def smallest_gap(boxes: Sequence[Bbox], others: Sequence[Bbox] | None = None) -> float:
    """Return the pixels between the closest two boxes: one of each list, or any two of one list."""
    pairs = itertools.combinations(boxes, 2) if others is None else itertools.product(boxes, others)
    return min((pixels_apart(*pair) for pair in pairs), default=math.inf)


def is_within(box: Bbox, outer: Bbox) -> bool:
    """True if a box is inside another box."""
    return bool(
        outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1
    )
