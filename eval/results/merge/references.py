"""Which references of two runs are one, so that KL divergences against them can stand in one table.

References whose rows have the same scores to the last bit are one.  Otherwise a reference that each machine measured
for itself counts as one where model, engine, options and versions agree: then every row keeps the KLD against the
reference of its own machine, the table says so, and no KLDs of two machines are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backends.common.errors import InputError
from backends.common.messages import printable, shortened
from eval.results.merge.rows import is_same
from eval.results.merge.sources import Source
from eval.results.run_result import ModelResult, StoredRun

DESCRIPTIVE = ("label", "key", "contents", "contents_reason", "vocab_size", "head_dtype", "bytes", "bytes_a_token")
"""Keys of a reference's description that its numbers do not depend on."""
MEANING = {
    "content": "model",
    "version": "compare_q's method of measuring",
    "reference": "compare_q's method of recording",
}
"""Key of a reference's description -> its name in messages, where the key does not say it."""
METHOD = ("version", "reference", "vocabulary")
"""Keys that differ where KL divergences were measured in another way: the same scores do not tell."""


def with_shared_references(sources: Sequence[Source]) -> list[Source]:
    """The sources, with one description for all references whose rows are the same (``is_same``)."""
    known: list[tuple[ModelResult, dict[str, Any]]] = []
    chosen: dict[Any, dict[str, Any]] = {}
    for source in sources:
        described = {part.reference.get("key"): part.reference for part in source.parts if part.reference}
        for row in (model for model in source.run.models if model.is_reference):
            key = row.reference_key or (source.run.reference or {}).get("key")
            if key in described:
                same = (found for other, found in known if is_same(row, other) and has_method(found, described[key]))
                chosen[key] = next(same, described[key])
                known.append((row, chosen[key]))
    return [replace(source, run=with_references(source.run, chosen)) for source in sources]


def has_method(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether KL divergences against two references were measured in the same way."""
    return all(one.get(key) == other.get(key) for key in METHOD)


def with_references(run: StoredRun, chosen: dict[Any, dict[str, Any]]) -> StoredRun:
    """The run with other descriptions of its references: key -> the description in its place."""

    def described(reference: dict[str, Any] | None) -> dict[str, Any] | None:
        return chosen.get(reference.get("key"), reference) if reference else reference

    return replace(
        run,
        reference=described(run.reference),
        parts=tuple(replace(part, reference=described(part.reference)) for part in run.parts),
        models=tuple(
            replace(model, reference_key=str(chosen.get(model.reference_key, {}).get("key") or model.reference_key))
            for model in run.models
        ),
    )


def check_references(sources: Sequence[Source]) -> None:
    """InputError unless all KL divergences are against one reference, wherever it was measured."""
    found = [(s.name, part.reference) for s in sources for part in s.parts if part.reference is not None]
    for name, other in found[1:]:
        first_name, first = found[0]
        if first.get("key") is not None and first.get("key") == other.get("key"):
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
