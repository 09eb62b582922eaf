"""What a scatter plot shows of a run: its points and lines, which points belong together, and which no other beats."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from compare_q.eval.plots import looks, measures
from compare_q.eval.plots.measures import Measure, Size
from compare_q.eval.results.run_result import MARK, TextResult

MARKED = f" ({MARK}: ran otherwise than its checkpoint asks)"
"""The explanation of marked labels in a subtitle."""
UNQUANTIZED_BITS = 15.5
"""Bits per weight from which a row counts as unquantized; bf16 and float16 have 16."""
NO_BARS = "no error bars: errors of percentiles are not known"
NEAR = 1.2
"""Unquantized points stay where they are if they are at most so many times as large as the largest quantized one."""
GAP = 0.1
"""Share of the width of the quantized points between the largest of them and the unquantized ones."""
ALIKE = 1.005
"""Sizes that differ by less count as equal: global scales make NVFP4 of 4.5 bits 4.501, which no reader sees."""
RANGE = 3
"""Points of a series that are named by the first and the last of them."""


@dataclass(frozen=True)
class Point:
    """One model: label ("EXL3 4.0 [h8]"), x its size (bits per weight or GiB), y its perplexity, KLD or accuracy.

    ``shown``: how the plot writes y (empty: with three decimals); ``error``: half the length of the error bar (None:
    there is no bar); ``more``: a larger y is better; ``number``: of the model in its run, which the artists' ids have.
    """

    label: str
    x: float
    y: float
    shown: str = ""
    error: float | None = None
    group: str = ""
    unquantized: bool = False
    more: bool = False
    number: int = 0

    @property
    def cost(self) -> float:
        """y as a number of which less is better."""
        return -self.y if self.more else self.y

    @property
    def split(self) -> tuple[str, str]:
        """(group, text beside the point); ``group`` empty: the label's first word."""
        return looks.split_label(self.label, self.group)


@dataclass(frozen=True)
class Level:
    """A horizontal line at y, and its name; dashed, or dotted for a noise floor."""

    y: float
    name: str
    dotted: bool = False


def points_of(text: TextResult, size: Size, measure: Measure) -> tuple[list[Point], list[str]]:
    """(points of the plot of a measure over a size, one line for each model that cannot be drawn)."""
    drawn, left_out = [], []
    for number, model in enumerate(text.models):
        x, y = size.of(model), measure.of(model)
        if x is None or y is None:
            missing = size.name if y is not None else measure.name
            left_out.append(f"{model.label}: not in the plot: {missing} unknown")
        else:
            error = measures.error_of(text, model, measure)[0]
            shown = "reference: 0" if measure.kld and model.is_reference else measures.value_text(y, error, measure)
            bits = model.storage.bpw_layer
            unquantized = bits is not None and bits >= UNQUANTIZED_BITS
            own = model.marked_label, x, y, shown, error, model.group, unquantized, measure.more, number
            drawn.append(Point(*own))
    return drawn, left_out


def points_within(points: Sequence[Point], max_x: float, max_y: float) -> list[Point]:
    """The points with finite x and y, neither above its limit, in their order."""
    finite = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    return [p for p in finite if p.x <= max_x and p.y <= max_y]


def levels_of(text: TextResult, measure: Measure) -> list[Level]:
    """The horizontal line at the reference's perplexity or accuracy, or at the noise floor's KLD."""
    if measure.more:
        heights = [measure.of(model) for model in text.models if model.is_reference]
        return [Level(height, f"reference {height:.1f}") for height in heights if height is not None]
    if not measure.kld:
        reference = finite_reference(text)
        return [] if reference is None else [Level(reference, f"reference {reference:.2f}")]
    floor = text.noise_floor
    floor_height = measure.of(floor) if floor else None
    if floor is None or not floor_height:
        return []
    name = looks.short_labels([floor.label, *(model.label for model in text.models)])[0]
    return [Level(floor_height, f"noise floor ({name}) {floor_height:.2g}", dotted=True)]


def finite_reference(text: TextResult) -> float | None:
    """The reference's perplexity; None also where it is infinite, as where it excludes a token of the text."""
    ppl = text.reference_ppl
    return ppl if ppl is not None and math.isfinite(ppl) else None


def error_note(text: TextResult, labels: Collection[str], measure: Measure) -> str:
    """What the error bars of these models show; empty if there are no bars, unless the measure has no error.

    The error of a perplexity is mostly the text's, and common to all models: bars of that error would say that no two
    neighbours differ.  So the error of the ratio to the reference's perplexity is drawn where it is known, and for the
    same reason the error of the difference from the reference's accuracy.
    """
    bars = "error bars, where longer than the marker: one standard error of"
    if not labels or measure.percentile:
        return NO_BARS if measure.percentile else ""
    if measure.kld:
        return f"{bars} the mean"
    own = "accuracy" if measure.more else "perplexity"
    alone = [m.label for m in text.models if m.marked_label in labels and not measures.error_of(text, m, measure)[1]]
    if len(alone) == len(labels):
        return f"{bars} the {own} (mostly common to all)"
    apart = f" ({', '.join(alone)}: of the {own})" if alone else ""
    return f"{bars} {measure.distance}{apart}"


def marked_subtitle(text: TextResult, labels: Collection[str]) -> str:
    """The run's subtitle, and the meaning of the mark where one of these labels has it."""
    return text.subtitle + (MARKED if any(MARK in label for label in labels) else "")


def series(points: Sequence[Point]) -> list[list[Point]]:
    """Quantized points of one scheme in order of size, each list of two or more sizes: they are joined by a line.

    A scheme is a group and the form of its names: "2.0 bpw" and "4.0 bpw", "Q3_K_M" and "Q6_K", but not "Q4_0".
    """
    members: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in sorted(points, key=lambda p: p.x):
        if not point.unquantized:
            members[scheme_of(*point.split)].append(point)
    return [own for own in members.values() if own[-1].x > ALIKE * own[0].x]


def scheme_of(group: str, name: str) -> tuple[str, str]:
    """Group and form of a name: numbers count as equal, and so do llama.cpp's sizes of one mixture."""
    return group, re.sub(r"\d+(\.\d+)?", "#", re.sub(r"(?<=_K)_(XS|S|M|L|XL)$", "", name))


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The quantized points that no other quantized point beats: none is as small and better, or as good and smaller.

    In order of size; equal points are all on it.
    """
    quantized = sorted((p for p in points if not p.unquantized), key=lambda p: (p.x, p.cost))

    def beats(other: Point, one: Point) -> bool:
        if other.cost < one.cost:
            return other.x <= ALIKE * one.x
        return other.cost == one.cost and ALIKE * other.x < one.x

    return [one for one in quantized if not any(beats(other, one) for other in quantized)]


def ends_of_groups(front: Sequence[Point]) -> list[Point]:
    """The points of a front, but of more than ``RANGE`` of one group the first and the last alone."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in front:
        groups[point.split[0]].append(point)
    return [p for own in groups.values() for p in (own if len(own) <= RANGE else (own[0], own[-1]))]


def front_in_words(front: Sequence[Point], points: Sequence[Point]) -> str:
    """``EXL3 2.0 bpw to EXL3 6.0 bpw, GGUF Q8_0``: a front by groups, in the order in which they first lie on it."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in front:
        groups[point.split[0]].append(point)
    return ", ".join(group_in_words(group, members, points) for group, members in groups.items())


def group_in_words(group: str, members: Sequence[Point], points: Sequence[Point]) -> str:
    """The points of one group that are on a front: the first and the last of them where all between are on it, too."""
    names = [" ".join(p.label.split()) for p in members]
    between = [p for p in points if p.split[0] == group and members[0].x <= p.x <= members[-1].x]
    one_scheme = len({scheme_of(*p.split) for p in members}) == 1
    if len(members) >= RANGE and one_scheme and len(between) == len(members):
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


def at_edge(points: Sequence[Point]) -> tuple[list[Point], float | None]:
    """(the points, with unquantized ones just beside the quantized ones; where that is, None if nothing was moved).

    Else half of a plot's width lies between 8 and 16 bits, where nothing is.
    """
    sizes = [p.x for p in points if not p.unquantized]
    others = [p.x for p in points if p.unquantized]
    if not sizes or not others or min(others) <= NEAR * max(sizes):
        return list(points), None
    edge = max(sizes) + GAP * max(max(sizes) - min(sizes), max(sizes) / 2)
    return [replace(p, x=edge) if p.unquantized else p for p in points], edge
