"""Regular expressions for many names of modules: one for the same matrix of several layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from ...backends.layers.module_names import NUMBER

PLACE = "{}"
"""Stands for a number in a name without its numbers."""
Numbers = tuple[str, ...]
"""The numbers of a name, or a pattern for several of them."""


def patterns_of(names: Iterable[str], all_names: Collection[str]) -> list[str]:
    r"""Return regular expressions that match these names, and no other of ``all_names``.

    Names that differ in their numbers only share an expression if they are a product, such as the
    same experts of several layers: ``layers\.(2|3)\.mlp\.experts\.\d+\.down_proj``.  ``\d+`` stands
    for all numbers that occur at its place.
    """
    every = numbers_by_template(all_names)
    patterns = []
    for template, members in numbers_by_template(names).items():
        for group in products(members):
            patterns.append(pattern_of(template, group, every[template]))
    return patterns


def numbers_by_template(names: Iterable[str]) -> dict[str, list[Numbers]]:
    """Return name with ``PLACE`` for its numbers -> the numbers of each such name."""
    by_template: dict[str, list[Numbers]] = {}
    for name in names:
        template = NUMBER.sub(PLACE, name)
        by_template.setdefault(template, []).append(tuple(NUMBER.findall(name)))
    return by_template


def products(members: Sequence[Numbers]) -> list[list[list[str]]]:
    """Return the members as products: of each, the numbers at every place.

    Members with the same numbers after the first place are joined last, and so on from the end.
    """
    groups = [[[number] for number in numbers] for numbers in members]
    n_places = len(members[0])
    for place in reversed(range(n_places)):
        joined: dict[str, list[list[str]]] = {}
        for group in groups:
            rest = repr(group[:place] + group[place + 1 :])
            if rest in joined:
                joined[rest][place].extend(group[place])
            else:
                joined[rest] = group
        groups = list(joined.values())
    return groups


def pattern_of(template: str, group: Sequence[Sequence[str]], every: Sequence[Numbers]) -> str:
    r"""Return the expression of a product; ``every``: the numbers of all names of the template.

    ``\d+`` is used only if the names that it matches are all in the product.
    """
    choices = [choice_of(numbers) for numbers in group]
    free: set[int] = set()
    for place, members in enumerate(group):
        others = numbers_at(place, group, every, free)
        if len(others) > 1 and others == set(members):
            choices[place] = r"\d+"
            free.add(place)
    texts = re.escape(template).split(re.escape(PLACE))
    pattern = texts[0]
    for choice, text in zip(choices, texts[1:], strict=True):
        pattern += choice + text
    return pattern


def numbers_at(
    place: int, group: Sequence[Sequence[str]], every: Sequence[Numbers], free: Collection[int]
) -> set[str]:
    """Return the numbers at a place of all names that agree with the product at the other places.

    Names may have any number at the ``free`` places.
    """
    others = set()
    for numbers in every:
        agrees = True
        for index, members in enumerate(group):
            if index != place and index not in free and numbers[index] not in members:
                agrees = False
        if agrees:
            others.add(numbers[place])
    return others


def choice_of(numbers: Sequence[str]) -> str:
    """Return an expression for one of several numbers."""
    if len(numbers) == 1:
        return numbers[0]
    in_order = sorted(numbers, key=int)
    return f"({'|'.join(in_order)})"
