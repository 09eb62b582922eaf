"""Data of a scatter plot: points, horizontal lines, lines of schemes, and the Pareto front."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple

from ...backends.base import KldKind
from ...backends.common.message_text import unicode
from ..results import MARK, RunResult
from ..stats.kld_kinds import range_of
from . import measures, picture_style
from .measures import KLD, PPL, Measure, Size
from .picture_style import Look

NOT_AS_REQUESTED = f"{MARK}: not run as requested"
"""Explanation of marked labels, for a subtitle."""
SAME_SIZE = 1.005
"""Sizes of a smaller ratio are equal: with its global scales, NVFP4 of 4.5 bits has 4.501."""
NO_LOOK = Look()


@dataclass(frozen=True)
class Point:
    """One model.

    Attributes:
        label: "EXL3 4.0 [h8]"
        x: its size, in bits per weight or GiB
        y: its perplexity or KLD
        y_text: y as text; empty: with three decimals
        error: half the length of the error bar; None for no bar
        number: index of the model in its run, for the ids of artists
        paired: the error is that of the difference from the reference
        kind: what ``y`` is, if it is a KLD
    """

    label: str
    x: float
    y: float
    y_text: str = ""
    error: float | None = None
    look: Look = NO_LOOK
    unquantized: bool = False
    number: int = 0
    paired: bool = True
    kind: KldKind = "exact"

    @property
    def is_bound(self) -> bool:
        """True if the KLD is at least ``y``."""
        return self.kind == "bound"

    @property
    def largest(self) -> float:
        """The largest perplexity or KLD that ``y`` may stand for, apart from its error."""
        _, largest = range_of(self.y, self.kind, (self.y, self.y))
        return largest


class Level(NamedTuple):
    """A named horizontal line at y: dashed, or dotted for a noise floor."""

    y: float
    name: str
    dotted: bool = False


def points_of(run: RunResult, size: Size, measure: Measure) -> tuple[list[Point], list[str]]:
    """Return (points of a measure over a size, one line for each model that cannot be drawn)."""
    points = []
    left_out = []
    looks = picture_style.looks_of(run.models)
    for number, model in enumerate(run.models):
        x = size.value_of(model)
        y = measure.value_of(model)
        if y is None:
            left_out.append(f"{model.label}: not in the plot: {measure.name} unknown")
            continue
        if x is None:
            left_out.append(f"{model.label}: not in the plot: {size.name} unknown")
            continue
        error, is_paired = measures.error_of(run, model, measure)
        kind: KldKind = "exact"
        if measure.kld:
            kind = model.kld_kind
        y_text = measures.value_text(y, error, measure, is_bound=kind == "bound")
        if measure.kld and model.reference:
            y_text = "reference: 0"
        point = Point(
            model.marked_label,
            x,
            y,
            y_text,
            error,
            looks[number],
            unquantized=not model.is_quantized,
            number=number,
            paired=is_paired,
            kind=kind,
        )
        points.append(point)
    return points, left_out


def levels_of(run: RunResult, measure: Measure) -> list[Level]:
    """Return the horizontal line at the reference's perplexity, or at the noise floor's KLD."""
    if not measure.kld:
        reference_ppl = finite_reference(run)
        if reference_ppl is None:
            return []
        return [Level(reference_ppl, f"reference {reference_ppl:.2f}")]
    floor = run.noise_floor
    if floor is None:
        return []
    height = measure.value_of(floor)
    # A line at 0 would be the axis, and a logarithmic axis has no 0.
    if not height:
        return []
    name = picture_style.names_of([floor.label])[0]
    return [Level(height, f"noise floor ({name}) {height:.2g}", dotted=True)]


def finite_reference(run: RunResult) -> float | None:
    """Return the reference's perplexity; None if it is unknown or infinite."""
    ppl = run.reference_ppl
    if ppl is None or not math.isfinite(ppl):
        return None
    return ppl


def reference_name(run: RunResult) -> str:
    """Return the last part of the name of the reference's folder or repository.

    Without its row it is the label; empty without a reference.
    """
    for model in run.models:
        model_dir = model.spec.get("model_dir")
        if model.reference and isinstance(model_dir, str):
            name = PurePath(model_dir).name
            if name:
                return unicode(name)
    if run.reference:
        return unicode(str(run.reference["label"]))
    return ""


def error_note(points: Sequence[Point], measure: Measure) -> str:
    """Return what the error bars of these points show; empty if there are none.

    The error of a perplexity is mostly about the choice of text, which all models share, so it
    would suggest that no two neighbours differ.  Bars therefore show the error of the ratio to the
    reference's perplexity where it is known.
    """
    if measure.is_percentile:
        return "no error bars: errors of percentiles are not known"
    with_bar = [point for point in points if point.error is not None]
    if not with_bar:
        return ""
    unpaired = [point.label for point in with_bar if not point.paired]
    if measure.kld:
        quantity = "mean"
    elif len(unpaired) == len(with_bar):
        quantity = "perplexity (mostly common to all)"
    elif unpaired:
        quantity = f"ratio to the reference's ({', '.join(unpaired)}: of the perplexity)"
    else:
        quantity = "ratio to the reference's"
    return f"error bars, where longer than the marker: one standard error of the {quantity}"


def subtitle_of(run: RunResult, labels: Collection[str]) -> str:
    """Return what the windows are, and the meaning of the mark if one of the labels has it."""
    if any(MARK in label for label in labels):
        return f"{run.subtitle} ({NOT_AS_REQUESTED})"
    return run.subtitle


def lines_of_schemes(points: Sequence[Point]) -> list[list[Point]]:
    """Return the lists of quantized points that a line joins.

    Each has the points of a scheme in order of size, which differs within it.  A scheme is a family
    and the form of its labels.  Numbers in labels count as equal, and so do llama.cpp's sizes of
    one mixture: "2.0 bpw" and "4.0 bpw" are one scheme, "Q3_K_M" and "Q6_K" too, but "Q4_0" is
    another one.  No line goes through a bound, which may be far below its KLD.
    """
    members_of_scheme: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in sorted(quantized_points(points), key=lambda point: point.x):
        if point.is_bound:
            continue
        members_of_scheme[point.look.family, form_of(point.label)].append(point)
    lines = []
    for members in members_of_scheme.values():
        if members[-1].x > SAME_SIZE * members[0].x:
            lines.append(members)
    return lines


def form_of(label: str) -> str:
    """Return what the labels of a scheme's sizes have in common, with # for each number."""
    without_options = re.sub(r"\s*\[.*", "", label)
    without_size = re.sub(r"(?<=_K)_(XS|S|M|L|XL)\b", "", without_options)
    return re.sub(r"\d+(\.\d+)?", "#", without_size)


def quantized_points(points: Sequence[Point]) -> list[Point]:
    """Return the points of quantized models."""
    return [point for point in points if not point.unquantized]


def dominates(other: Point, one: Point) -> bool:
    """Return True if another point is certainly as small and better, or as good and smaller."""
    return dominates_by(one.y - other.largest, other, one)


def may_dominate(other: Point, one: Point) -> bool:
    """Return True if another point may be as small and better, or as good and smaller."""
    return dominates_by(one.largest - other.y, other, one)


def dominates_by(gain: float, other: Point, one: Point) -> bool:
    """Return True if another point that is better by ``gain`` dominates one by their sizes."""
    if gain > 0:
        return other.x <= SAME_SIZE * one.x
    return gain == 0 and SAME_SIZE * other.x < one.x


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the quantized points that no other one dominates, by size.

    Equal points are all on the front.  A bound, or a point above a bound, is on it only if it would
    be for every KLD that the bounds allow.
    """
    quantized = sorted(quantized_points(points), key=lambda point: point.x)
    front = []
    for point in quantized:
        others = [other for other in quantized if other is not point]
        if not any(may_dominate(other, point) for other in others):
            front.append(point)
    return front


def nearest_to_front(points: Sequence[Point], most: int) -> list[int]:
    """Return the indices of at most ``most`` points, in order.

    They are unquantized ones, then those that the fewest others dominate.
    """
    if len(points) <= most:
        return list(range(len(points)))
    quantized = quantized_points(points)
    ranks = []
    for point in points:
        # Unquantized points are the first, before those that no other dominates.
        rank = -1
        if not point.unquantized:
            rank = sum(dominates(other, point) for other in quantized)
        ranks.append(rank)
    nearest_first = sorted(range(len(points)), key=lambda i: ranks[i])
    return sorted(nearest_first[:most])


def at_edge(points: Sequence[Point]) -> tuple[list[Point], float | None]:
    """Return (the points, the new x of unquantized ones); None if they were not moved.

    Unquantized points move near the quantized ones if they are more than 1.2 times as large.
    Otherwise the space from 8 to 16 bits would fill half the plot.
    """
    quantized_sizes = []
    unquantized_sizes = []
    for point in points:
        if point.unquantized:
            unquantized_sizes.append(point.x)
        else:
            quantized_sizes.append(point.x)
    if not quantized_sizes or not unquantized_sizes:
        return list(points), None
    largest = max(quantized_sizes)
    if min(unquantized_sizes) <= 1.2 * largest:
        return list(points), None
    edge = largest + 0.1 * max(largest - min(quantized_sizes), largest / 2)
    moved = []
    for point in points:
        if point.unquantized:
            moved.append(replace(point, x=edge))
        else:
            moved.append(point)
    return moved, edge


def front_labels(run: RunResult) -> set[str]:
    """Return the marked labels on the front of KLD over bits per weight.

    Without any KLD, the front is that of perplexity.
    """
    points, _ = points_of(run, measures.BPW, KLD)
    if not points:
        points, _ = points_of(run, measures.BPW, PPL)
    return {point.label for point in pareto_front(points)}
