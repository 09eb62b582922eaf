"""Points of scatter plots: a clump, equal points and odd labels."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from compare_q.eval.plots import scatter, style
from compare_q.eval.plots.points import Point
from compare_q.eval.results import ModelResult


def clump(count: int, *, spread: float) -> list[Point]:
    """A cloud around 4 bpw with that standard deviation, and two points far away that keep the axes wide."""
    rng = random.Random(count)
    cloud = [Point(f"G{i % 5} variant{i}", rng.gauss(4, spread), rng.gauss(7, spread / 20)) for i in range(count - 2)]
    return [*cloud, Point("bf16", 16, 6.8), Point("EXL3 2.0", 2, 7.4)]


CASES = {
    "clump": clump(30, spread=0.2),
    "zero": [Point("bf16", 0.0, 0.0)],
    "same x": [Point(f"EXL3 v{i}", 4.0, 7.4 + 0.01 * i) for i in range(8)],
    "identical": [Point("EXL3 4.0", 4.0, 7.4), Point("AWQ g128", 4.0, 7.4), Point("AWQ g64", 4.0, 7.4)],
    "odd labels": [Point("_x $a$ b$", 1, 1), Point("", 2, 2), Point("[a]", 3, 3), Point("L" * 90 + " m" * 90, 4, 4)],
}


def draw(points: list[Point], **keys: Any) -> Figure:
    """Return the plot of these points, each with the look of a model of its label."""
    found = style.looks_of([ModelResult.of(point.label, "fake") for point in points])
    points = [replace(point, look=look) for point, look in zip(points, found, strict=True)]
    return scatter.scatter_plot(points, x_label="x", y_label="y", title="Model", subtitle="data", **keys)
