"""What a scatter plot shows: points and horizontal lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eval.plots import grouping


@dataclass(frozen=True)
class Point:
    """One model: label ("EXL3 4.0 [h8]"), x its size (bits per weight or GiB), y its perplexity, KLD or accuracy.

    ``shown``: how the plot writes y (empty: with three decimals); ``error``: half the length of the error bar (None:
    there is no bar); ``more``: a larger y is better.
    """

    label: str
    x: float
    y: float
    shown: str = ""
    error: float | None = None
    group: str = ""
    unquantized: bool = False
    more: bool = False

    @property
    def cost(self) -> float:
        """y as a number of which less is better."""
        return -self.y if self.more else self.y

    @property
    def split(self) -> tuple[str, str]:
        """(group, text beside the point); ``group`` empty: the label's first word."""
        return grouping.split_label(self.label, self.group)


@dataclass(frozen=True)
class Level:
    """A horizontal line at y, and its name; dashed, or dotted for a noise floor."""

    y: float
    name: str
    dotted: bool = False


def points_within(points: Sequence[Point], max_x: float | None, max_y: float | None) -> list[Point]:
    """The points with finite x and y, neither above its limit (None: no limit), in their order."""
    finite = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    return [p for p in finite if (max_x is None or p.x <= max_x) and (max_y is None or p.y <= max_y)]
