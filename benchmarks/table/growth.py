"""How wall time and memory of a table grow with models and windows."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.table import run


@dataclass(frozen=True)
class Point:
    """One table: the shape and number of its models, and its windows (count, length, stride)."""

    shape: shapes.Shape
    models: int = 2
    windows: tuple[int, int, int] = (64, 2048, 512)


SHAPE = shapes.Shape(1024, 8, 8, 4, 2816, 128_256, 32_768)
SMALL_SHAPE = shapes.SHAPES["toy"]
SIZES_OF_SERIES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "models": ((1, 5, 10, 20), (1, 2, 4)),
    "windows": ((64, 256, 586), (16, 64)),
}
"""Series -> its sizes for a GPU, and the small ones that two cores measure in minutes."""


def points(series: str, small: bool) -> Iterator[tuple[int, Point]]:
    """Yield (size, table) of a series."""
    sizes, small_sizes = SIZES_OF_SERIES[series]
    base = Point(SHAPE)
    if small:
        sizes = small_sizes
        base = Point(SMALL_SHAPE, windows=(16, 256, 128))
    _, length, stride = base.windows
    for size in sizes:
        if series == "models":
            yield size, replace(base, models=size)
        else:
            yield size, replace(base, windows=(size, length, stride))


def measured(
    series: str, small: bool, folder: Path, plan_of: Callable[[Point, Path], run.Plan]
) -> Iterator[dict[str, Any]]:
    """Yield wall time, its parts and peaks of memory of one table per size."""
    for size, point in points(series, small):
        models = folder / "models"
        shapes.make_apart(models, point.shape)
        table = run.run_table(plan_of(point, models))
        shutil.rmtree(models)
        rows = table.get("rows", [])
        yield {
            series: size,
            "rows": len(rows),
            "windows": point.windows,
            "error": table.get("error"),
            "wall_seconds": table["wall_seconds"],
            "load_seconds": seconds_of(rows, "load"),
            "scoring_seconds": seconds_of(rows, "scoring"),
            "peak_device_mib": table.get("peak_device_mib"),
            "peak_host_mib": table.get("peak_host_mib"),
        }


def seconds_of(rows: Sequence[dict[str, Any]], part: str) -> float:
    """Return the seconds of a part in all rows that have it."""
    total: float = 0
    for row in rows:
        seconds = row["seconds"][part]
        if seconds is not None:
            total += seconds
    return total
