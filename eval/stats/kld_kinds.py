"""Comparisons of KLDs that are not exact (``KldKind``).

A row whose KLD is a bound loses at least this, and may lose any amount more: it is never called
better than another row.  An estimate has an error, as every mean over a text, and is compared like
an exact KLD.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

from ...backends.base import KldKind

Relation = Literal["less", "more", "equal"]
ALL_RELATIONS = frozenset[Relation]({"less", "more", "equal"})


def relations_that_follow(first: KldKind, second: KldKind) -> frozenset[Relation]:
    """Return which relations between two numbers hold for the two KLDs that the numbers stand for.

    ``first``, ``second``: their kinds.  If the second number is a limit, it is exact.
    """
    if first != "bound" and second != "bound":
        return ALL_RELATIONS
    if second != "bound":
        return frozenset({"more"})
    if first != "bound":
        return frozenset({"less"})
    return frozenset()


def range_of(kld: float, kind: KldKind, limits: tuple[float, float] | None) -> tuple[float, float]:
    """Return the smallest and the largest KLD on the same tokens that a number of a kind allows.

    ``limits``: the interval of an estimate; None if that is not known.
    """
    if kind == "bound":
        return kld, math.inf
    if kind == "exact":
        return kld, kld
    return limits or (-math.inf, math.inf)


def kind_of_mean(kinds: Collection[KldKind]) -> KldKind | None:
    """Return the kind of a mean over KLDs of these kinds.

    None for bounds and estimates together: their mean is neither.
    """
    inexact = set(kinds) - {"exact"}
    if not inexact:
        return "exact"
    if len(inexact) > 1:
        return None
    return inexact.pop()
