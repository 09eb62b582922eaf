"""The results of several texts <-> results.json of format 6; and any results.json or report.html -> results.

    {"format": 6, <the keys of ORIGIN>, "title": ..., "texts": [...], "means": [...]}

A text is ``{"name": ..., "error": null, "data": ..., "subtitle": ..., "reference": ..., "models": [...]}`` with the
keys of format 5; of a text that failed there are only its ``name`` and its ``error``.  ``means`` has an object for each
model: ``label``, ``mean_kld`` (nats), ``mean_kld_stderr``, ``mean_ppl``, ``mean_ppl_stderr``, null where not known; it
is made from the texts, and not read.  A report.html of several texts holds ``{"texts": <this object>, "inspections":
[...]}``, with the excerpts of each text, or null.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.common.errors import InputError
from backends.common.messages import printable
from eval.common.files import replacing
from eval.results import results_json
from eval.results.merge import runs as merge
from eval.results.results_json import FORMAT_OF_TEXTS
from eval.results.run_result import ORIGIN, StoredRun
from eval.results.texts import TextResult, TextsResult


@dataclass(frozen=True)
class StoredTexts(TextsResult):
    """A finished run of several texts that was read back; ``origin`` (``ORIGIN``) goes unchanged into every copy.

    The run of each text is a ``StoredRun`` with the same origin.
    """

    origin: dict[str, Any] = field(default_factory=dict)


def texts_json(result: TextsResult, command: Sequence[str]) -> dict[str, Any]:
    """The results of several texts as JSON types (the module's docstring)."""
    origin = result.origin if isinstance(result, StoredTexts) else results_json.origin_now(command)
    return {
        "format": FORMAT_OF_TEXTS,
        **origin,
        "title": result.title,
        "texts": [
            {"name": text.name, "error": text.error or None, **(results_json.text_json(text.run) if text.run else {})}
            for text in result.texts
        ],
        "means": [means_json(result, label) for label in result.labels],
    }


def means_json(result: TextsResult, label: str) -> dict[str, Any]:
    """A model's macro means over the texts."""
    kld, ppl = result.mean_kld(label), result.mean_ppl(label)
    return {
        "label": label,
        "mean_kld": kld.value,
        "mean_kld_stderr": kld.stderr,
        "mean_ppl": ppl.value,
        "mean_ppl_stderr": ppl.stderr,
    }


def from_json(raw: Any) -> StoredTexts:
    """The results of a results.json of several texts; InputError in one line if it is none, or damaged."""
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_OF_TEXTS:
        raise InputError("not a results.json of several texts of compare_q")
    with results_json.damage_in_one_line():
        origin, title = {key: raw[key] for key in ORIGIN}, raw.get("title")
        if not isinstance(title, str | None):
            raise ValueError("title: is no text")
        if not (isinstance(raw["texts"], list) and all(isinstance(text, dict) for text in raw["texts"])):
            raise ValueError("texts: must be a list of objects")
        found = StoredTexts(tuple(text_of(text, origin) for text in raw["texts"]), title, origin)
        check(found)
        return found


def text_of(raw: dict[str, Any], origin: dict[str, Any]) -> TextResult:
    """One text; ValueError, KeyError or ValidationError if it is damaged."""
    name, error = raw["name"], raw["error"]
    if not isinstance(name, str) or not name:
        raise ValueError("texts: a text has no name")
    if error is not None:
        if not isinstance(error, str) or not error or "models" in raw:
            raise ValueError(f"{name}: error: does not go with the rest")
        return TextResult(name, None, error)
    with results_json.damage_in_one_line(f"{name}: "):
        return TextResult(name, results_json.run_of_text(raw, origin))


def check(result: StoredTexts) -> None:
    """ValueError for results that no run of several texts writes."""
    names = [text.name for text in result.texts]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError("texts: fewer than two" if len(names) < 2 else "texts: two have one name")
    if not result.runs:
        raise ValueError("texts: none has results")
    for text in result.texts:
        if text.run is not None and tuple(model.label for model in text.run.models) != result.labels:
            raise ValueError(f"{text.name}: models: are not the models of {names[0]}")


def write_json(result: TextsResult, file: Path, command: Sequence[str]) -> None:
    """Write results.json atomically."""
    with replacing(file) as part:
        part.write_text(json.dumps(texts_json(result, command), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def load(files: Sequence[Path]) -> tuple[StoredRun | StoredTexts, Any]:
    """(the results, their inspection) of one results.json or report.html, or of several of one text, merged.

    The inspection is JSON types or None, and for several texts a list with that of each text.
    InputError in one line for files that are damaged, or that cannot stand in one table.
    """
    if len(files) == 1:
        raw, is_report = results_json.read(files[0])
        found = raw.get("texts") if is_report and isinstance(raw, dict) else raw
        if isinstance(found, dict) and found.get("format") == FORMAT_OF_TEXTS:
            try:
                result = from_json(found)
                kept = raw.get("inspections") if is_report else [None] * len(result.texts)
                return result, checked_inspections(kept, result)
            except InputError as error:
                raise InputError(f"{printable(files[0])}: {error}") from None
    return merge.load(files)


def checked_inspections(found: Any, result: TextsResult) -> list[Any]:
    """The excerpts of each text of a report; InputError in one line if they are damaged."""
    if not isinstance(found, list) or len(found) != len(result.texts):
        raise InputError("the report's excerpts are damaged: inspections: not one for each text; write it again")
    models = len(result.labels)
    return [results_json.checked_inspection(each, models) for each in found]
