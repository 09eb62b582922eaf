"""Which references of two runs are one, so that KL divergences against them can stand in one table.

References are one if their rows have the same scores to the last bit (``rows.is_same``) and KLDs against them are
measured in one way.  Otherwise a reference that two runs measured counts as one where model, engine, options and
versions agree: then every row keeps the KLD against the reference of its own run, the table says so, and no KLDs
against two of them are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from backends.common.errors import InputError
from backends.common.messages import printable, shortened
from eval.results.merge.rows import is_same
from eval.results.merge.sources import Source
from eval.results.run_result import SAME_AS, ModelResult, Part

DESCRIPTIVE = (
    "label", "key", SAME_AS, "contents", "contents_reason", "vocab_size", "head_dtype", "bytes", "bytes_a_token",
)  # fmt: skip
"""Keys of a reference's description that its numbers do not depend on."""
MEANING = {
    "content": "model",
    "version": "compare_q's method of measuring",
    "reference": "compare_q's method of recording",
}
"""Key of a reference's description -> its name in messages, where the key does not say it."""
METHOD = ("version", "reference", "vocabulary")
"""Keys that differ where KL divergences were measured in another way: the same scores do not tell."""


def same_references(sources: Sequence[Source]) -> dict[str, str]:
    """Key of each reference -> one key for all that are the same, its own for the others."""
    chosen: dict[str, str] = {}
    known: list[tuple[ModelResult, dict[str, Any]]] = []
    for source in sources:
        references = [part.reference for part in source.parts if part.reference is not None]
        described: dict[str, dict[str, Any]] = {each["key"]: each for each in references if each.get("key")}
        for key, each in described.items():
            chosen = united(chosen, key, each.get(SAME_AS) or key)
        for row in (model for model in source.run.models if model.is_reference):
            reference = described.get(source.reference_key(row))
            if reference is None:
                continue
            for other, first in known:
                if is_same(row, other) and all(reference.get(key) == first.get(key) for key in METHOD):
                    chosen = united(chosen, reference["key"], first["key"])
            known.append((row, reference))
    return chosen


def united(chosen: Mapping[str, str], one: str, other: str) -> dict[str, str]:
    """The map in which two keys, and all that are the same as one of them, have the key that ``other`` has."""
    known = {one: one, other: other, **chosen}
    return {key: known[other] if value == known[one] else value for key, value in known.items()}


def with_same(part: Part, chosen: Mapping[str, str]) -> Part:
    """The part, whose reference says which one it is the same as."""
    key = (part.reference or {}).get("key")
    same = chosen.get(key, key) if key else key
    return part if same == key else replace(part, reference={**(part.reference or {}), SAME_AS: same})


def check_references(sources: Sequence[Source], chosen: Mapping[str, str]) -> None:
    """InputError unless all KL divergences are against one reference, wherever it was measured."""
    found = [(s.name, part.reference) for s in sources for part in s.parts if part.reference is not None]
    for name, other in found[1:]:
        first_name, first = found[0]
        keys = [chosen.get(each["key"]) if each.get("key") else None for each in (first, other)]
        if keys[0] is not None and keys[0] == keys[1]:
            continue
        # The files of a copy of a model on another machine have other times, and so another "model".
        known = {"model"} if first.get("content") and other.get("content") else {"content"}
        left_out = {*DESCRIPTIVE, *known}
        one, two = ({key: value for key, value in each.items() if key not in left_out} for each in (first, other))
        off = [key for key in (one | two) if one.get(key) != two.get(key)]
        if off == ["hardware"] or not (off or "content" in known):  # on another machine, or on another of that kind
            continue
        differing = shortened(printable(", ".join(MEANING.get(key, key) for key in off))) or "key"
        raise InputError(
            f"--from: {name}: its KL divergences are against {other['label']!r}, and the KL divergences of "
            f"{first_name} are against {first['label']!r}, which is another reference (they differ in {differing}); "
            "measure one of the runs again with the other's reference: keep the reference store with -lf PATH, copy "
            "it, and give it with -lf to a run that marks no reference"
        )
