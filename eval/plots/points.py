"""Data of a scatter plot: points, horizontal lines, which points belong together, and the Pareto front."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from compare_q.backends.common.messages import unicode
from compare_q.eval.plots import looks, measures
from compare_q.eval.plots.measures import KLD, PPL, Measure, Size
from compare_q.eval.results import MARK, ModelResult, TextResult

MARKED = f" ({MARK}: ran otherwise than its checkpoint asks)"
"""Explanation of marked labels, for a subtitle."""
UNQUANTIZED_BITS = 15.5
"""Models with at least this many bits per weight are unquantized; bf16 and float16 have 16."""
NO_BARS = "no error bars: errors of percentiles are not known"
NEAR = 1.2
"""Unquantized points keep their x if it is at most this many times that of the largest quantized one."""
GAP = 0.1
"""Distance between the largest quantized point and unquantized ones, as a share of the quantized points' width."""
ALIKE = 1.005
"""Sizes that differ by less are equal: with its global scales, NVFP4 of 4.5 bits has 4.501."""
RANGE = 3
"""A subtitle names this many points of a series, or more, by the first and the last."""


@dataclass(frozen=True)
class Point:
    """One model: label ("EXL3 4.0 [h8]"), x its size (bits per weight or GiB), y its perplexity, KLD or accuracy.

    ``shown``: y as text (empty: with three decimals).  ``error``: half the length of the error bar; None: no bar.
    ``more``: larger y are better.  ``number``: index of the model in its run, for the ids of artists.
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
        """Return y, negated if larger values are better."""
        return -self.y if self.more else self.y

    @property
    def split(self) -> tuple[str, str]:
        """Return (group, name within the group)."""
        return looks.split_label(self.label, self.group)


@dataclass(frozen=True)
class Level:
    """A named horizontal line at y: dashed, or dotted for a noise floor."""

    y: float
    name: str
    dotted: bool = False


def points_of(texts: Sequence[TextResult], size: Size, measure: Measure) -> tuple[list[Point], list[str]]:
    """Return (points of a measure over a size, one line for each model that cannot be drawn).

    Of several texts, a point is the mean over the texts.
    """
    drawn, left_out = [], []
    for number, model in enumerate(models_of(texts)):
        x, y = size.of(model), measures.mean_over_texts(texts, number, measure)[0]
        if x is None or y.value is None:
            missing = size.name if y.value is not None else measure.name
            left_out.append(f"{model.label}: not in the plot: {missing} unknown")
            continue
        is_zero = measure.kld and model.reference
        shown = "reference: 0" if is_zero else measures.value_text(y.value, y.stderr, measure)
        bits = model.bpw_layer
        unquantized = bits is not None and bits >= UNQUANTIZED_BITS
        label, group = model.marked_label, model.group
        drawn.append(Point(label, x, y.value, shown, y.stderr, group, unquantized, measure.more, number))
    return drawn, left_out


def models_of(texts: Sequence[TextResult]) -> list[ModelResult]:
    """Return the first result of each model, if there is one from a text on which it did not fail."""
    rows = zip(*(text.models for text in texts if not text.error), strict=True)
    return [min(models, key=lambda model: bool(model.error)) for models in rows]


def points_within(points: Sequence[Point], max_x: float, max_y: float) -> list[Point]:
    """Return the points with finite x and y that are not above the limits."""
    finite = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    return [p for p in finite if p.x <= max_x and p.y <= max_y]


def levels_of(texts: Sequence[TextResult], measure: Measure) -> list[Level]:
    """Return the horizontal line at the reference's perplexity or accuracy, or at the noise floor's KLD."""
    models = models_of(texts)
    if measure.more:
        heights = [mean_of(texts, measure, number) for number, model in enumerate(models) if model.reference]
        return [Level(height, f"reference {height:.1f}") for height in heights if height is not None]
    if not measure.kld:
        reference = finite_reference(texts)
        return [] if reference is None else [Level(reference, f"reference {reference:.2f}")]
    floor = next((text.noise_floor for text in texts if text.noise_floor), None)
    height = mean_of(texts, measure, [model.label for model in models].index(floor.label)) if floor else None
    if floor is None or not height:
        return []
    name = looks.short_labels([floor.label, *(model.label for model in models)])[0]
    return [Level(height, f"noise floor ({name}) {height:.2g}", dotted=True)]


def mean_of(texts: Sequence[TextResult], measure: Measure, number: int) -> float | None:
    """Return the mean over the texts of the model with this index."""
    return measures.mean_over_texts(texts, number, measure)[0].value


def finite_reference(texts: Sequence[TextResult]) -> float | None:
    """Return the reference's perplexity (the geometric mean over several texts); None if unknown or infinite."""
    ppls = [text.reference_ppl for text in texts if text.error or not text.is_answers or len(texts) == 1]
    known = [ppl for ppl in ppls if ppl is not None and math.isfinite(ppl)]
    if not known or len(known) < len(ppls):
        return None
    return known[0] if len(known) == 1 else math.exp(math.fsum(map(math.log, known)) / len(known))


def error_note(texts: Sequence[TextResult], points: Sequence[Point], measure: Measure) -> str:
    """Return what the error bars of these points show; empty without bars, unless the measure has no error.

    The error of a perplexity is mostly about the choice of text, which all models share, so it would suggest that no
    two neighbours differ.  Bars therefore show the error of the ratio to the reference's perplexity where it is known,
    and the error of the difference from the reference's accuracy.
    """
    bars = "error bars, where longer than the marker: one standard error of"
    barred = [point for point in points if point.error is not None]
    if not barred or measure.is_percentile:
        return NO_BARS if measure.is_percentile else ""
    if measure.kld:
        return f"{bars} the mean"
    own = "accuracy" if measure.more else "perplexity"
    alone = [p.label for p in barred if not measures.mean_over_texts(texts, p.number, measure)[1]]
    if len(alone) == len(barred):
        return f"{bars} the {own} (mostly common to all)"
    apart = f" ({', '.join(alone)}: of the {own})" if alone else ""
    return f"{bars} the {'difference from' if measure.more else 'ratio to'} the reference's{apart}"


def subtitle_of(texts: Sequence[TextResult], labels: Collection[str]) -> str:
    """Return what the texts are, and the meaning of the mark if one of the labels has it."""
    words = texts[0].subtitle
    if len(texts) > 1:
        words = f"mean of {len(texts)} texts: {', '.join(unicode(text.name) for text in texts)}"
    return words + (MARKED if any(MARK in label for label in labels) else "")


def series(points: Sequence[Point]) -> list[list[Point]]:
    """Return the lists of quantized points that a line joins: one scheme, in order of size, of at least two sizes.

    A scheme is a group and the form of its names: "2.0 bpw" and "4.0 bpw", "Q3_K_M" and "Q6_K", but not "Q4_0".
    """
    members: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in sorted(points, key=lambda p: p.x):
        if not point.unquantized:
            members[scheme_of(*point.split)].append(point)
    return [own for own in members.values() if own[-1].x > ALIKE * own[0].x]


def scheme_of(group: str, name: str) -> tuple[str, str]:
    """Return (group, form of the name): numbers count as equal, and so do llama.cpp's sizes of one mixture."""
    return group, re.sub(r"\d+(\.\d+)?", "#", re.sub(r"(?<=_K)_(XS|S|M|L|XL)$", "", name))


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the quantized points that no other one dominates (as small and better, or as good and smaller), by size.

    Equal points are all on the front.
    """
    quantized = sorted((p for p in points if not p.unquantized), key=lambda p: (p.x, p.cost))

    def dominates(other: Point, one: Point) -> bool:
        if other.cost < one.cost:
            return other.x <= ALIKE * one.x
        return other.cost == one.cost and ALIKE * other.x < one.x

    return [one for one in quantized if not any(dominates(other, one) for other in quantized)]


def front_labels(text: TextResult) -> set[str]:
    """Return the marked labels on the front of KLD over bits per weight, or of perplexity without any KLD."""
    kld, ppl = (points_of([text], measures.BPW, measure)[0] for measure in (KLD, PPL))
    return {point.label for point in pareto_front(kld or ppl)}


def by_group(front: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points of each group, in the order in which the groups first appear."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in front:
        groups[point.split[0]].append(point)
    return groups


def ends_of_groups(front: Sequence[Point]) -> list[Point]:
    """Return the points of a front; of more than ``RANGE`` of one group only the first and the last."""
    return [p for own in by_group(front).values() for p in (own if len(own) <= RANGE else (own[0], own[-1]))]


def front_in_words(front: Sequence[Point], points: Sequence[Point]) -> str:
    """Return ``EXL3 2.0 bpw to EXL3 6.0 bpw, GGUF Q8_0``: the labels on a front, by group.

    A range stands for three or more points of one scheme if all points of the group between its ends are on the front.
    """
    words = []
    for group, members in by_group(front).items():
        names = [" ".join(p.label.split()) for p in members]
        between = [p for p in points if p.split[0] == group and members[0].x <= p.x <= members[-1].x]
        one_scheme = len({scheme_of(*p.split) for p in members}) == 1
        if len(members) >= RANGE and one_scheme and len(between) == len(members):
            names = [f"{names[0]} to {names[-1]}"]
        words += names
    return ", ".join(words)


def at_edge(points: Sequence[Point]) -> tuple[list[Point], float | None]:
    """Return (the points, with unquantized ones moved near the quantized ones; their new x, None if nothing moved).

    Otherwise half of the plot would be the empty space between 8 and 16 bits.
    """
    sizes = [p.x for p in points if not p.unquantized]
    others = [p.x for p in points if p.unquantized]
    if not sizes or not others or min(others) <= NEAR * max(sizes):
        return list(points), None
    edge = max(sizes) + GAP * max(max(sizes) - min(sizes), max(sizes) / 2)
    return [replace(p, x=edge) if p.unquantized else p for p in points], edge
