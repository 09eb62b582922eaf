"""``--from a.json --from b.json``: finished runs of one text, from several machines or caches, as one run.

Only runs that can stand in one table are merged: the same windows and vocabulary, by their digests, and one reference
(``references.py``); ``rows.py`` says which rows of two runs are one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.common.errors import InputError
from backends.common.messages import printable, shortened
from eval.results import results_json
from eval.results.merge.references import check_references, same_references, with_same
from eval.results.merge.rows import MergedRows
from eval.results.merge.sources import Source
from eval.results.run_result import StoredRun

WINDOWS = ("text_tokens", "method", "windows", "window_length", "scored_tokens")
"""The keys of a run's data with which an error message tells windows apart."""


def load(files: Sequence[Path]) -> tuple[StoredRun, Any]:
    """(the run, its inspection as JSON types or None) of one file, or of several merged.

    InputError in one line for runs that cannot stand in one table, with the file and the remedy.
    """
    resolved = list(map(os.path.realpath, files))
    for file, path in zip(files, resolved, strict=True):
        if resolved.count(path) > 1:
            raise InputError(f"--from: {printable(file)}: is given twice; name each run once")
    found = [results_json.load(file) for file in files]
    if len(found) == 1:
        return found[0]
    sources = [Source(name, *each) for name, each in zip(short_names(files), found, strict=True)]
    for other in sources[1:]:
        check_windows(sources[0], other)
    chosen = same_references(sources)
    check_references(sources, chosen)
    return merged_run(sources, chosen)


def short_names(files: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the files apart: ``results.json`` often is the name of both."""
    parts = [Path(os.path.realpath(file)).parts for file in files]
    for length in range(1, max(map(len, parts))):
        names = [printable("/".join(each[-length:])) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [printable(file) for file in files]


def check_windows(first: Source, other: Source) -> None:
    """InputError unless both are of the same tokens."""
    one, two = first.run.data, other.run.data
    for source in (first, other):
        if not isinstance(source.run.data.get("windows_sha256"), str):
            raise InputError(
                f"--from: {source.name}: does not say which windows it scored (windows_sha256); run it again"
            )
    if one.get("vocabulary_sha256") != two.get("vocabulary_sha256"):
        raise InputError(
            f"--from: {other.name}: its tokenizer differs from the tokenizer of {first.name}; "
            "merge runs with one tokenizer"
        )
    if one["windows_sha256"] != two["windows_sha256"]:
        pairs = [(name, two.get(name), one.get(name)) for name in WINDOWS if one.get(name) != two.get(name)]
        off = [shortened(printable(f"{name} {theirs} and {ours}"), 60) for name, theirs, ours in pairs]
        raise InputError(
            f"--from: {other.name}: its windows differ from the windows of {first.name} "
            f"({', '.join(off) or 'another text'}); merge runs of one data spec and one text"
        )
    keys = [(each.get("answers") or {}).get("key_sha256") for each in (one, two)]
    if keys[0] != keys[1]:
        raise InputError(
            f"--from: {other.name}: has other right answers to the same questions than {first.name}; "
            "run one of them again"
        )


def merged_run(sources: Sequence[Source], chosen: Mapping[str, str]) -> tuple[StoredRun, Any]:
    """One run of checked sources, in their order, and its inspection; ``chosen``: as ``same_references`` gives it."""
    parts = [part for source in sources for part in source.parts]
    references = [part.reference for part in parts if part.reference is not None]
    rows = MergedRows(sources, chosen)
    for source in sources:
        rows.add(source)
    run = StoredRun(
        data=sources[0].run.data,
        subtitle=sources[0].run.subtitle,
        models=rows.finished(),
        reference=references[0] if references else None,
        title=next((source.run.title for source in sources if source.run.title), None),
        origin=common_origin([part.origin for part in parts]),
        parts=tuple(
            replace(with_same(part, chosen), labels=rows.labels(source, part))
            for source in sources for part in source.parts
        ),
    )  # fmt: skip
    return run, merged_inspection(sources, rows)


def common_origin(origins: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``ORIGIN`` of a merged run: what all its parts share, and the date of the last part; no command."""

    def shared(key: str) -> dict[str, Any]:
        first, *others = (dict(origin.get(key) or {}) for origin in origins)
        return {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}

    commits = {origin.get("commit") for origin in origins}
    return {
        "created": max(str(origin.get("created")) for origin in origins),
        "command": [],
        "commit": commits.pop() if len(commits) == 1 else None,
        "versions": shared("versions"),
        "hardware": shared("hardware"),
    }


def merged_inspection(sources: Sequence[Source], rows: MergedRows) -> dict[str, Any] | None:
    """The excerpts of all reports, in the order of the merged rows; None if no source is a report with excerpts."""
    worst: list[Any] = [None] * len(rows.models)
    passages: dict[tuple[Any, ...], dict[str, Any]] = {}
    for source in sources:
        if source.inspection is None:
            continue
        places = [rows.places[source.name, model.label] for model in source.run.models]
        for place, found in zip(places, source.inspection["worst"], strict=True):
            worst[place] = worst[place] or found
        for passage in source.inspection["passages"]:
            add_passage(passages, passage, places, rows)
    return {"passages": list(passages.values()), "worst": worst} if any(worst) else None


def add_passage(
    passages: dict[tuple[Any, ...], dict[str, Any]], passage: dict[str, Any], places: Sequence[int], rows: MergedRows
) -> None:
    """Put a passage's numbers at the merged rows of its models; passages of one text and reference become one."""
    size = len(rows.models)
    measured = [place for place, found in zip(places, passage["logprob"], strict=True) if found is not None]
    keys = {rows.models[place].reference_key for place in measured} - {""}
    name = (passage["window"], passage["position"], len(passage["tokens"]), *sorted(keys))
    empty = {**passage, "logprob": [None] * size, "kld": [None] * size}
    kept = passages.setdefault(name, empty)
    kept["ref_logprob"] = kept["ref_logprob"] or passage["ref_logprob"]
    for column in ("logprob", "kld"):
        for place, found in zip(places, passage[column], strict=True):
            kept[column][place] = kept[column][place] or found
