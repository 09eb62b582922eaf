"""How wall time and memory of a table grow with models and windows."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.table import run


@dataclass(frozen=True)
class Point:
    """One table: the shape of its models, how many there are, and its windows (count, length,
    stride).
    """

    shape: shapes.Shape
    models: int = 2
    windows: tuple[int, int, int] = (64, 2048, 512)


WHOLE, SMALL = shapes.Shape(1024, 8, 8, 4, 2816, 128_256, 32_768), shapes.SHAPES["toy"]
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "models": ((1, 5, 10, 20), (1, 2, 4)),
    "windows": ((64, 256, 586), (16, 64)),
}
"""Series -> its sizes for a GPU, and the small ones that two cores measure in minutes."""


def points(series: str, small: bool) -> Iterator[tuple[int, Point]]:
    """(size, table) of a series."""
    base = Point(SMALL, windows=(16, 256, 128)) if small else Point(WHOLE)
    for size in SIZES[series][small]:
        _, length, stride = base.windows
        changed = {
            "models": replace(base, models=size),
            "windows": replace(base, windows=(size, length, stride)),
        }
        yield size, changed[series]


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
        parts: dict[str, list[float]] = {
            part: [row["seconds"][part] for row in rows if row["seconds"][part] is not None]
            for part in ("load", "scoring")
        }
        yield {
            series: size,
            "rows": len(rows),
            "windows": point.windows,
            "error": table.get("error"),
            "wall_seconds": table["wall_seconds"],
            **{f"{part}_seconds": sum(each) for part, each in parts.items()},
            "peak_device_mib": table.get("peak_device_mib"),
            "peak_host_mib": table.get("peak_host_mib"),
        }
