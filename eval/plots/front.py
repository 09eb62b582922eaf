"""Which points belong together, and which no other point beats: series of one scheme, and the Pareto front."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from eval.plots.scatter_points import Point

NEAR = 1.2
"""Unquantized points stay where they are if they are at most so many times as large as the largest quantized one."""
GAP = 0.1
"""Share of the width of the quantized points between the largest of them and the unquantized ones."""
WIDE = 10**1.5
"""An axis is logarithmic if the largest value above 0 is more than so many times the smallest: on such an axis there is
no place for 0, and a third of the largest value looks like nothing beside it."""
ALIKE = 1.005
"""Sizes that differ by less count as equal: global scales make NVFP4 of 4.5 bits 4.501, which no reader sees."""
RANGE = 3
"""Points of a series that are named by the first and the last of them."""


def series(points: Sequence[Point]) -> list[list[Point]]:
    """Quantized points of one scheme in order of size, each list of two or more sizes: they are joined by a line.

    A scheme is a group and the form of its names: "2.0 bpw" and "4.0 bpw", "Q3_K_M" and "Q6_K", but not "Q4_0".
    """
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in sorted(points, key=lambda each: each.x):
        if not point.unquantized:
            found[scheme_of(*point.split)].append(point)
    return [members for members in found.values() if members[-1].x > ALIKE * members[0].x]


def scheme_of(group: str, name: str) -> tuple[str, str]:
    """Group and form of a name: numbers count as equal, and so do llama.cpp's sizes of one mixture."""
    return group, re.sub(r"\d+(\.\d+)?", "#", re.sub(r"(?<=_K)_(XS|S|M|L|XL)$", "", name))


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The quantized points that no other quantized point beats: none is as small and better, or as good and smaller.

    In order of size; equal points are all on it.
    """
    quantized = sorted((each for each in points if not each.unquantized), key=lambda each: (each.x, each.cost))

    def beats(other: Point, one: Point) -> bool:
        if other.cost < one.cost:
            return other.x <= ALIKE * one.x
        return other.cost == one.cost and ALIKE * other.x < one.x

    return [one for one in quantized if not any(beats(other, one) for other in quantized)]


def in_words(front: Sequence[Point], points: Sequence[Point]) -> str:
    """``EXL3 2.0 bpw to EXL3 6.0 bpw, GGUF Q8_0``: a front by groups, in the order in which they first lie on it."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in front:
        groups[point.split[0]].append(point)
    return ", ".join(group_in_words(group, members, points) for group, members in groups.items())


def group_in_words(group: str, members: Sequence[Point], points: Sequence[Point]) -> str:
    """The points of one group that are on a front: the first and the last of them where all between are on it, too."""
    names = [" ".join(each.label.split()) for each in members]
    between = [each for each in points if each.split[0] == group and members[0].x <= each.x <= members[-1].x]
    if (
        len(members) >= RANGE
        and len({scheme_of(*each.split) for each in members}) == 1
        and len(between) == len(members)
    ):
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


def at_edge(points: Sequence[Point]) -> tuple[list[Point], float | None]:
    """(the points, with unquantized ones just beside the quantized ones; where that is, None if nothing was moved).

    Else half of a plot's width lies between 8 and 16 bits, where nothing is.
    """
    sizes = [each.x for each in points if not each.unquantized]
    others = [each.x for each in points if each.unquantized]
    if not sizes or not others or min(others) <= NEAR * max(sizes):
        return list(points), None
    edge = max(sizes) + GAP * max(max(sizes) - min(sizes), max(sizes) / 2)
    return [replace(each, x=edge) if each.unquantized else each for each in points], edge
