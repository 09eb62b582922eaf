"""The place where a variant begins to differ: the first module whose output is above rounding.

The differences of a variant from the first variant are compared with those of a copy of the first
variant with one more bf16 rounding per layer, as in the noise floor, in the same window.  A module
is above rounding if its difference is more than ``ABOVE_ROUNDING`` times the larger of

- the copy's difference at this module;
- one bf16 rounding.

The copy's first rounding is at the end of the first layer, so that in the second layer its
differences are those that one rounding causes.  These count for every module before which the
variant differs by one rounding at most, whatever its layer is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...backends.base import ModuleDifference, ModulePlace
from ...backends.layers.module_names import kind_of
from ...backends.layers.noise import NOISE_SCALE

ABOVE_ROUNDING = 3.0
"""With SmolLM2-135M in bf16, another attention kernel had up to 1.9 times the copy's difference at
one of 696 places, the model in float32 1.9, and a copy with another seed 1.95."""
NOT_KNOWN = "not known: "


class ModuleRatio(NamedTuple):
    """A variant's difference at a module, and that of ``roundings`` alone."""

    place: ModulePlace
    difference: float
    roundings: float

    @property
    def ratio(self) -> float:
        """How many times the effect of roundings the difference is."""
        return self.difference / self.roundings


def where_in_words(
    variant: Sequence[ModuleDifference],
    roundings: Sequence[ModuleDifference],
    *,
    same_engine: bool = True,
) -> str:
    """Return where a variant begins to differ from the first one, in words.

    ``roundings``: differences of the copy with other roundings.  Without ``same_engine``, modules
    of one name may compute something else, so that only whole layers are compared.
    """
    remark = ""
    if not same_engine:
        variant = [difference for difference in variant if difference.place.is_layer]
        remark = "; only whole layers were compared, since the engines differ"
    ratios = list(ratios_of(variant, roundings))
    if not ratios:
        return f"{NOT_KNOWN}the two have no output of the same name and size"
    for number, ratio in enumerate(ratios):
        if ratio.ratio <= ABOVE_ROUNDING:
            continue
        if not same_engine and number == 0:
            return (
                f"{NOT_KNOWN}{place_in_words(ratio.place)} already differs; either the fault is "
                "there, or layers of the two engines return something else"
            )
        return f"from {place_in_words(ratio.place)} on ({size_in_words(ratio)}{remark})"
    return f"{not_reproduced(ratios)}{remark}"


def ratios_of(
    variant: Sequence[ModuleDifference], roundings: Sequence[ModuleDifference]
) -> Iterator[ModuleRatio]:
    """Yield the variant's modules with the effect of roundings, in the order of the variant."""
    of_place = dict(roundings)
    of_kind = first_of_kind(roundings)
    is_near_before = True
    for place, difference in variant:
        # The effect of one rounding, then of those in all layers before.
        expected = of_kind.get(kind_of_place(place), 0.0)
        if not is_near_before:
            expected = of_place.get(place) or expected
        yield ModuleRatio(place, difference, max(expected, NOISE_SCALE))
        if difference > NOISE_SCALE:
            is_near_before = False


def first_of_kind(roundings: Sequence[ModuleDifference]) -> Mapping[ModulePlace, float]:
    """Return kind of module -> the first difference of its modules that is not 0."""
    of_kind: dict[ModulePlace, float] = {}
    for place, difference in roundings:
        if difference > 0:
            of_kind.setdefault(kind_of_place(place), difference)
    return of_kind


def kind_of_place(place: ModulePlace) -> ModulePlace:
    """Return a place with ``*`` for the numbers of its name."""
    return place._replace(name=kind_of(place.name))


def place_in_words(place: ModulePlace) -> str:
    """Return the name of a place: an output, or what a module computes before another one."""
    if place.side == "output":
        return f"the output of {place.name}"
    parent, _, child = place.name.rpartition(".")
    # Attention itself is a function in most models: its output is the input of a projection.
    if "att" in parent.rpartition(".")[2]:
        return f"the attention in {parent}, before {child},"
    return f"the input of {place.name}"


def size_in_words(ratio: ModuleRatio) -> str:
    """Return the size of a difference, and of the effect of roundings."""
    if not math.isfinite(ratio.difference):
        return "values that are not finite"
    return f"{ratio.difference:.2g} of its norm; roundings change it by {ratio.roundings:.2g}"


def not_reproduced(ratios: Sequence[ModuleRatio]) -> str:
    """Return that no module is above rounding, and which is nearest to it."""
    words = "not reproduced: in one window, run eagerly and alone, "
    largest = max(ratios, key=lambda ratio: ratio.ratio)
    if not largest.difference:
        return f"{words}all outputs are equal to the bit"
    return (
        f"{words}no output differs more than {ABOVE_ROUNDING:g} times as much as by roundings "
        f"(at most {largest.ratio:.1f} times, {place_in_words(largest.place).rstrip(',')})"
    )
