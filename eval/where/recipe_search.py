"""Find the recipe for each target: the prefix of the greedy order that reaches it, measured.

With 16 bits, the prefix is bisected between scored ones, and its KLD is measured.  With 8 bits, no
model has these weights, and its KLD is a forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...backends.common.message_text import amount
from . import recipe, recipe_lists
from .front import Front
from .recipe import FULL_BITS, KeptPart, Target
from .results import Recipe

NO_PARTS = "no share is above 0 for certain; more windows (-r) would show smaller shares"


def recipes_of(front: Front, targets: Sequence[Target], keep_bits: int) -> list[Recipe]:
    """Return the recipe for each target; scores the prefixes that a recipe needs."""
    recipes = []
    for target in targets:
        if keep_bits == FULL_BITS:
            recipes.append(measured_recipe(front, target))
        else:
            recipes.append(forecast_recipe(front, target))
    return recipes


def measured_recipe(front: Front, target: Target) -> Recipe:
    """Return the recipe with parts as in the reference."""
    counts = sorted({0, *front.counts})
    notes: list[str] = []
    if not front.order:
        notes.append(NO_PARTS)
    count: int | None
    if target.key == "bpw":
        count = count_for_size(front, front.order, target.value)
    else:
        count = recipe.shortest_prefix(counts, front.kld_of, target.value)
    is_reached = count is not None
    if count is None:
        count = lowest(front, counts)
    # Scores the prefix if it is one between the others.
    if count is not None and front.kld_of(count) is None:
        notes.append(f"KLD n/a: {front.sums(count).reason}")
    return recipe_of(front, target, 16, front.order[: count or 0], is_reached, notes)


def lowest(front: Front, counts: Sequence[int]) -> int | None:
    """Return the number of parts with the smallest KLD; None if no KLD is known."""
    klds = {}
    for count in counts:
        kld = front.kld_of(count)
        if kld is not None:
            klds[count] = kld
    if not klds:
        return None
    return min(klds, key=lambda count: klds[count])


def count_for_size(front: Front, order: Sequence[KeptPart], bits_per_weight: float) -> int:
    """Return how many parts of the order fit into a size."""
    n_weights = sum(module.n_weights for module in front.modules)
    sizes = []
    for count in range(len(order) + 1):
        sizes.append(front.bits(order[:count]) / n_weights)
    return recipe.longest_prefix(sizes, bits_per_weight + recipe.ROUNDING)


def forecast_recipe(front: Front, target: Target) -> Recipe:
    """Return the recipe with parts in 8 bits, whose KLD is a forecast."""
    order = recipe.greedy_order(front.part_rows, front.modules, recipe.FEWER_BITS)
    n_left_out = len(front.order) - len(order)
    notes = ["the KLD in 8 bits is a forecast that was not measured"]
    if n_left_out:
        notes.append(
            f"{amount(n_left_out, 'part')} without a forecast left out: weights of unknown or "
            "several numbers of bits, or of 8 and more"
        )
    if any(recipe.is_float(module.weights) for module in front.modules):
        notes.append("4-bit floating point counts as 4 bits, although its steps are not uniform")
    if not front.order:
        notes.append(NO_PARTS)

    def kld_of(count: int) -> float | None:
        forecast = front.forecast(order[:count])
        if forecast is None:
            return None
        return forecast.value

    count: int | None
    if target.key == "bpw":
        count = count_for_size(front, order, target.value)
    else:
        count = recipe.shortest_prefix(range(len(order) + 1), kld_of, target.value)
    is_reached = count is not None
    if count is None:
        count = len(order)
    return recipe_of(front, target, 8, order[:count], is_reached, notes)


def recipe_of(
    front: Front,
    target: Target,
    keep_bits: Literal[8, 16],
    kept: Sequence[KeptPart],
    is_reached: bool,
    notes: Sequence[str],
) -> Recipe:
    """Return a recipe; ``kept``: a scored prefix of the order, or with 8 bits any one."""
    names: list[str] = []
    for part in kept:
        names += part.row.modules
    kld = None
    if keep_bits == FULL_BITS:
        kld = front.measured(len(kept))
    found = Recipe(
        target=str(target),
        keep_bits=keep_bits,
        is_reached=is_reached,
        parts=tuple(part.row.name for part in kept),
        modules=tuple(names),
        bits=front.bits(kept),
        kld=kld,
        forecast=front.forecast(kept),
        notes=tuple(notes),
    )
    if not is_reached or not names:
        return found
    lists, list_notes = recipe_lists.lists_of(found, front.modules)
    return found.updated(lists=tuple(lists), notes=(*notes, *list_notes))
