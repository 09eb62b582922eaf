"""Data of a scatter plot: points, horizontal lines, which points belong together, and the Pareto
front.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple

from ...backends.common.message_text import unicode
from ..results import MARK, RunResult
from . import measures, picture_style
from .measures import KLD, PPL, Measure, Size
from .picture_style import Look

NOT_AS_REQUESTED = f"{MARK}: not run as requested"
"""Explanation of marked labels, for a subtitle."""
ALIKE = 1.005
"""Sizes that differ by less are equal: with its global scales, NVFP4 of 4.5 bits has 4.501."""
NO_LOOK = Look()


@dataclass(frozen=True)
class Point:
    """One model."""

    label: str  # "EXL3 4.0 [h8]"
    x: float  # its size, in bits per weight or GiB
    y: float  # its perplexity or KLD
    shown: str = ""  # y as text; empty: with three decimals
    error: float | None = None  # half the length of the error bar; None for no bar
    look: Look = NO_LOOK
    unquantized: bool = False
    number: int = 0  # index of the model in its run, for the ids of artists
    paired: bool = True  # the error is that of the difference from the reference


class Level(NamedTuple):
    """A named horizontal line at y: dashed, or dotted for a noise floor."""

    y: float
    name: str
    dotted: bool = False


def points_of(run: RunResult, size: Size, measure: Measure) -> tuple[list[Point], list[str]]:
    """Return (points of a measure over a size, one line for each model that cannot be drawn)."""
    drawn = []
    left_out = []
    for number, (model, look) in enumerate(
        zip(run.models, picture_style.looks_of(run.models), strict=True)
    ):
        x = size.of(model)
        y = measure.of(model)
        if x is None or y is None:
            missing = size.name if y is not None else measure.name
            left_out.append(f"{model.label}: not in the plot: {missing} unknown")
            continue
        error, is_paired = measures.error_of(run, model, measure)
        shown = measures.value_text(y, error, measure)
        if measure.kld and model.reference:
            shown = "reference: 0"
        point = Point(
            model.marked_label,
            x,
            y,
            shown,
            error,
            look,
            unquantized=not model.is_quantized,
            number=number,
            paired=is_paired,
        )
        drawn.append(point)
    return drawn, left_out


def levels_of(run: RunResult, measure: Measure) -> list[Level]:
    """Return the horizontal line at the reference's perplexity, or at the noise floor's KLD."""
    if not measure.kld:
        reference = finite_reference(run)
        return [] if reference is None else [Level(reference, f"reference {reference:.2f}")]
    floor = run.noise_floor
    height = None if floor is None else measure.of(floor)
    if floor is None or not height:
        return []
    name = picture_style.names_of([floor.label])[0]
    return [Level(height, f"noise floor ({name}) {height:.2g}", dotted=True)]


def finite_reference(run: RunResult) -> float | None:
    """Return the reference's perplexity; None if it is unknown or infinite."""
    ppl = run.reference_ppl
    return ppl if ppl is not None and math.isfinite(ppl) else None


def reference_name(run: RunResult) -> str:
    """Return the last part of the name of the reference's folder or repository; its label if it has
    no row.
    """
    for model in run.models:
        place = model.spec.get("model_dir")
        if model.reference and isinstance(place, str) and PurePath(place).name:
            return unicode(PurePath(place).name)
    return unicode(str(run.reference["label"])) if run.reference else ""


def error_note(points: Sequence[Point], measure: Measure) -> str:
    """Return what the error bars of these points show; empty without bars, unless the measure has
    no error.

    The error of a perplexity is mostly about the choice of text, which all models share, so it
    would suggest that no two neighbours differ.  Bars therefore show the error of the ratio to the
    reference's perplexity where it is known.
    """
    barred = [point for point in points if point.error is not None]
    alone = [point.label for point in barred if not point.paired]
    if measure.is_percentile:
        return "no error bars: errors of percentiles are not known"
    words = "ratio to the reference's" + (
        f" ({', '.join(alone)}: of the perplexity)" if alone else ""
    )
    if len(alone) == len(barred):
        words = "perplexity (mostly common to all)"
    what = "mean" if measure.kld else words
    return (
        f"error bars, where longer than the marker: one standard error of the {what}"
        if barred
        else ""
    )


def subtitle_of(run: RunResult, labels: Collection[str]) -> str:
    """Return what the windows are, and the meaning of the mark if one of the labels has it."""
    if any(MARK in label for label in labels):
        return f"{run.subtitle} ({NOT_AS_REQUESTED})"
    return run.subtitle


def series(points: Sequence[Point]) -> list[list[Point]]:
    """Return the lists of quantized points that a line joins: one scheme, in order of size, of at
    least two sizes.

    A scheme is a family and the form of its labels.  Numbers in labels count as equal, and so do
    llama.cpp's sizes of one mixture: "2.0 bpw" and "4.0 bpw" are one scheme, "Q3_K_M" and "Q6_K"
    too, but "Q4_0" is another one.
    """
    members: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in sorted(points, key=lambda p: p.x):
        if not point.unquantized:
            mixture = re.sub(r"(?<=_K)_(XS|S|M|L|XL)\b", "", re.sub(r"\s*\[.*", "", point.label))
            members[point.look.family, re.sub(r"\d+(\.\d+)?", "#", mixture)].append(point)
    return [own for own in members.values() if own[-1].x > ALIKE * own[0].x]


def dominates(other: Point, one: Point) -> bool:
    """Return True if another point is as small and better, or as good and smaller."""
    gain = one.y - other.y
    return other.x <= ALIKE * one.x if gain > 0 else gain == 0 and ALIKE * other.x < one.x


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the quantized points that no other one dominates, by size.  Equal points are all on
    the front.
    """
    quantized = sorted((p for p in points if not p.unquantized), key=lambda p: p.x)
    return [one for one in quantized if not any(dominates(other, one) for other in quantized)]


def nearest_to_front(points: Sequence[Point], most: int) -> list[int]:
    """Return the indices of at most ``most`` points: unquantized ones, then those that the fewest
    others dominate.
    """
    quantized = [p for p in points if not p.unquantized]

    def dominating(i: int) -> int:
        """Return how many points dominate this one."""
        if points[i].unquantized:
            return -1
        return sum(dominates(other, points[i]) for other in quantized)

    indices = list(range(len(points)))
    if len(points) > most:
        indices = sorted(indices, key=dominating)[:most]
    return sorted(indices)


def at_edge(points: Sequence[Point]) -> tuple[list[Point], float | None]:
    """Return (the points, with unquantized ones moved near the quantized ones; their new x, None if
    nothing moved).

    They move if they are more than 1.2 times as large.  Otherwise the space from 8 to 16 bits would
    fill half the plot.
    """
    sizes = [p.x for p in points if not p.unquantized]
    others = [p.x for p in points if p.unquantized]
    if not sizes or not others or min(others) <= 1.2 * max(sizes):
        return list(points), None
    edge = max(sizes) + 0.1 * max(max(sizes) - min(sizes), max(sizes) / 2)
    return [replace(p, x=edge) if p.unquantized else p for p in points], edge


def front_labels(run: RunResult) -> set[str]:
    """Return the marked labels on the front of KLD over bits per weight, or of perplexity without
    any KLD.
    """
    kld, ppl = (points_of(run, measures.BPW, measure)[0] for measure in (KLD, PPL))
    return {point.label for point in pareto_front(kld or ppl)}
