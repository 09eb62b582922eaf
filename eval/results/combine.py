"""``show a.json b.json``: the rows of several finished runs in one table."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable
from compare_q.backends.scoring.segments import DIVERGENCES_SUFFIX
from compare_q.eval.results import results_json
from compare_q.eval.results.run_result import ModelResult, Results, TextResult
from compare_q.eval.specs import reading


def load(files: Sequence[Path]) -> Results:
    """The results of one file, or the rows of several files in one run.

    InputError in one line for files that are damaged, and for files that ``combine`` refuses.
    """
    resolved = list(map(os.path.realpath, files))
    for file, path in zip(files, resolved, strict=True):
        if resolved.count(path) > 1:
            raise InputError(f"{printable(file)}: is given twice; name each run once")
    loaded = [results_json.load(file) for file in files]
    if len(loaded) == 1:
        return loaded[0]
    return combine({printable(file): results for file, results in zip(files, loaded, strict=True)})


def combine(runs: Mapping[str, Results]) -> Results:
    """One run with the rows of all ``runs`` (file -> its results), in their order; a row that two of them have is there
    once.

    InputError with the file, and with what differs, unless all runs have the same texts, tokenizer, windows, right
    answers and reference.
    """
    (first_file, first), *others = runs.items()
    for file, run in others:
        if len(run.texts) != len(first.texts):
            raise InputError(f"{file}: its number of texts differs from {first_file}'s ({len(run.texts)}, not "
                             f"{len(first.texts)})")  # fmt: skip
        for text, own in zip(first.texts, run.texts, strict=True):
            if text.error or own.error:
                raise InputError(f"{file if own.error else first_file}: its text {own.name} failed; run it again")
            off = next((what for what, digest in identity(text).items() if identity(own)[what] != digest), None)
            if off:
                found, wanted = described(own, off), described(text, off)
                raise InputError(f"{file}: its {off} is not that of {first_file} ({found}, not {wanted})")
    texts = tuple(
        replace(text, models=unique_rows([model for run in runs.values() for model in run.texts[i].models]))
        for i, text in enumerate(first.texts)
    )
    return Results(texts, title=first.title, origin=shared_origin([run.origin or {} for run in runs.values()]))


def identity(text: TextResult) -> dict[str, str | None]:
    """What rows must share to be comparable -> its digest; that of the windows covers method and scored positions."""
    return {
        "tokenizer": text.data.get("vocabulary_sha256"),
        "cut into windows": text.data.get("windows_sha256"),
        "key of right answers": (text.data.get("answers") or {}).get("key_sha256"),
        "reference": (text.reference or {}).get("key"),
    }


def described(text: TextResult, what: str) -> str:
    """A name for one of the things of ``identity``, as far as it has any, and the beginning of its digest."""
    names = {
        "cut into windows": f"{text.data.get('windows')} windows by method {text.data.get('method')}, ",
        "reference": f"{text.reference['label']}, " if text.reference else "",
    }
    return f"{names.get(what, '')}{(identity(text)[what] or 'none')[:12]}"


def unique_rows(models: Sequence[ModelResult]) -> tuple[ModelResult, ...]:
    """The rows without those that are there already, by the key of their scores.

    A row with ``--divergences`` takes the place of the same row without, and a measured row that of a failed one of the
    same label.  Other rows of one label get a number: "label (2)".
    """
    rows: list[ModelResult] = []
    for model in models:
        place = next((i for i, row in enumerate(rows) if is_same(row, model)), len(rows))
        if place == len(rows):
            taken = {row.label for row in rows}
            names = (model.label if i == 1 else f"{model.label} ({i})" for i in itertools.count(1))
            rows.append(replace(model, label=next(name for name in names if name not in taken)))
        elif rows[place].error or model.scores_key == rows[place].scores_key + DIVERGENCES_SUFFIX:
            rows[place] = replace(model, label=rows[place].label)
    return tuple(rows)


def is_same(one: ModelResult, other: ModelResult) -> bool:
    """Whether two rows have the same scores, or have one label and no scores in one of them."""
    if one.error or other.error:
        return one.label == other.label
    return one.scores_key.removesuffix(DIVERGENCES_SUFFIX) == other.scores_key.removesuffix(DIVERGENCES_SUFFIX)


def shared_origin(origins: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``ORIGIN`` of a combined run: the last date, and what all runs share; no command."""
    first, *others = origins

    def shared(key: str) -> dict[str, Any]:
        return {
            name: value for name, value in first[key].items() if all(each[key].get(name) == value for each in others)
        }

    return {
        "created": max(each["created"] for each in origins),
        "command": [],
        "commit": first["commit"] if all(each["commit"] == first["commit"] for each in others) else None,
        "versions": shared("versions"),
        "hardware": shared("hardware"),
    }


def masked(results: Results, mask: str | None) -> Results:
    """The results with the models alone that a mask leaves; the reference's row stays."""
    named = reading.matching(results.labels, mask)
    return replace(results, texts=tuple(
        replace(text, models=tuple(model for model in text.models if model.label in named or model.is_reference))
        for text in results.texts
    ))  # fmt: skip
