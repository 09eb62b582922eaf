"""Points of scatter plots, from a table of models to odd cases, and their finished figures."""

from __future__ import annotations

import functools
import random
from typing import Any

from matplotlib.figure import Figure

from compare_q.eval.plots import scatter
from compare_q.eval.plots.points import Point

ROWS = (
    ("bf16", 16.0, 7.324),
    ("EXL3 2.0", 2.0, 9.010),
    ("EXL3 2.5", 2.5, 8.121),
    ("EXL3 3.0 [h6]", 3.0, 7.702),
    ("EXL3 3.5", 3.5, 7.531),
    ("EXL3 4.0", 4.0, 7.431),
    ("EXL3 5.0", 5.0, 7.352),
    ("EXL3 6.0", 6.0, 7.334),
    ("W4A16 g32", 4.63, 7.442),
    ("W4A16 g128", 4.25, 7.508),
    ("NVFP4", 4.5, 7.611),
    ("FP8", 8.0, 7.342),
    ("W8A8", 8.02, 7.351),
    ("GGUF Q2_K", 2.96, 8.402),
    ("GGUF Q3_K_M", 3.91, 7.682),
    ("GGUF Q4_0", 4.55, 7.590),
    ("GGUF Q4_K_M", 4.85, 7.421),
    ("GGUF Q5_K_M", 5.69, 7.360),
    ("GGUF Q6_K", 6.56, 7.338),
    ("GGUF Q8_0", 8.5, 7.327),
)
TABLE = [Point(*row) for row in ROWS]


def clump(count: int, *, spread: float) -> list[Point]:
    """A cloud around 4 bpw with that standard deviation, and two points far away that keep the axes wide."""
    rng = random.Random(count)
    cloud = [Point(f"G{i % 5} variant{i}", rng.gauss(4, spread), rng.gauss(7, spread / 20)) for i in range(count - 2)]
    return [*cloud, Point("bf16", 16, 6.8), Point("EXL3 2.0", 2, 7.4)]


CASES = {
    "table": TABLE,
    "clump": clump(30, spread=0.2),
    "one": [Point("EXL3 4.0", 4.0, 7.4)],
    "zero": [Point("bf16", 0.0, 0.0)],
    "same x": [Point(f"EXL3 v{i}", 4.0, 7.4 + 0.01 * i) for i in range(8)],
    "same y": [Point(f"EXL3 v{i}", 4.0 + i / 10, 7.4) for i in range(8)],
    "identical": [Point("EXL3 4.0", 4.0, 7.4), Point("AWQ g128", 4.0, 7.4), Point("AWQ g64", 4.0, 7.4)],
    "odd labels": [Point("_x $a$ b$", 1, 1), Point("", 2, 2), Point("[a]", 3, 3), Point("L" * 90 + " m" * 90, 4, 4)],
}


@functools.cache
def figure_of(case: str, *, dark: bool = False) -> Figure:
    return draw(CASES[case], dark=dark)


def draw(points: list[Point], **keys: Any) -> Figure:
    return scatter.scatter_plot(
        points, x_label="Bits per weight", y_label="PPL", title="Model", subtitle="data", **keys
    )


KLDS = [Point("bf16", 16, 0.0, "reference"), Point("vLLM bf16", 16, 0.0004, "0.00040"),
        Point("vLLM FP8", 8, 0.02, "0.02000"), Point("vLLM W4A16", 4.5, 0.3, "0.30000")]  # fmt: skip


def draw_kld(points: list[Point], **keys: Any) -> Figure:
    return scatter.scatter_plot(points, x_label="x", y_label="KLD", title="t", from_zero=True, **keys)
