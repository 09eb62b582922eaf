"""``--from a.json --from b.json``: finished runs of one text, from several machines or caches, as one run.

Merged is only what can stand in one table: the same windows and vocabulary, by their digests, and one reference.  A
reference that was measured on each machine is the same one where model, engine, options and versions agree: then every
row keeps the KLD against the reference of its own machine, the table says so, and no KLDs of two machines are paired.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.common.errors import InputError
from eval.results import results_json
from eval.results.digits import PPL_DIGITS, cell
from eval.results.results_json import Part, StoredRun
from eval.results.run_result import ModelResult, RunResult

WINDOWS = ("text_tokens", "method", "windows", "window_length", "scored_tokens")
"""What is said of windows that differ."""
DESCRIPTIVE = ("label", "key", "contents", "contents_reason", "vocab_size", "head_dtype", "bytes", "bytes_a_token")
"""What a reference's description holds beside what it depends on."""
MEANING = {
    "content": "model",
    "version": "compare_q's method of measuring",
    "reference": "compare_q's method of recording",
}
"""Parts of a reference's identity whose names do not say what they are."""


@dataclass(frozen=True)
class Source:
    """One file: its name, its run, and the report's inspection (JSON types) or None."""

    name: str
    run: StoredRun
    inspection: Any = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The runs in it: itself, or those that it was merged from."""
        run = self.run
        labels = tuple(model.label for model in run.models)
        return run.parts or (Part(self.name, labels, run.origin, run.reference, run.reference_ppl),)


def load(files: Sequence[Path]) -> tuple[StoredRun, Any]:
    """(the run, its inspection as JSON types or None) of one file, or of several merged.

    InputError in one line for what cannot stand in one table, with the file and what to do.
    """
    resolved = [file.resolve() for file in files]
    for file, path in zip(files, resolved, strict=True):
        if resolved.count(path) > 1:
            raise InputError(f"--from: {file}: is given twice; name each run once")
    found = [results_json.load(file) for file in files]
    if len(found) == 1:
        return found[0]
    sources = [Source(name, *each) for name, each in zip(names_of(files), found, strict=True)]
    for other in sources[1:]:
        check_windows(sources[0], other)
    check_references(sources)
    return merged(sources)


def names_of(files: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the files apart: ``results.json`` often is the name of both."""
    parts = [file.resolve().parts for file in files]
    for length in range(1, max(map(len, parts))):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(file) for file in files]


def check_windows(first: Source, other: Source) -> None:
    """InputError unless both are of the same tokens."""
    one, two = first.run.data, other.run.data
    for source in (first, other):
        if not isinstance(source.run.data.get("windows_sha256"), str):
            raise InputError(
                f"--from: {source.name}: does not say which windows it is of (windows_sha256); run it again"
            )
    if one.get("vocabulary_sha256") != two.get("vocabulary_sha256"):
        raise InputError(f"--from: {other.name}: its tokenizer is another than that of {first.name}; merge runs of one")
    if one["windows_sha256"] != two["windows_sha256"]:
        off = [f"{name} {two.get(name)} and {one.get(name)}" for name in WINDOWS if one.get(name) != two.get(name)]
        raise InputError(
            f"--from: {other.name}: its windows are others than those of {first.name} "
            f"({', '.join(off) or 'another text'}); merge runs of one data spec and one text"
        )


def check_references(sources: Sequence[Source]) -> None:
    """InputError unless all KL divergences are against one reference, wherever it was measured."""
    found = [(s.name, part.reference) for s in sources for part in s.parts if part.reference is not None]
    for name, other in found[1:]:
        first_name, first = found[0]
        if first.get("key") is not None and first.get("key") == other.get("key"):
            continue
        # A copy of a model on another machine has files of another time, and so another "model".
        known = {"model"} if first.get("content") and other.get("content") else {"content"}
        left_out = {*DESCRIPTIVE, *known}
        one, two = ({key: value for key, value in each.items() if key not in left_out} for each in (first, other))
        off = [key for key in (one | two) if one.get(key) != two.get(key)]
        if off == ["hardware"]:
            continue
        differing = ", ".join(MEANING.get(key, key) for key in off) or "key"
        raise InputError(
            f"--from: {name}: its KL divergences are against {other['label']!r}, and those of {first_name} against "
            f"{first['label']!r}, which is another reference (they differ in {differing}); measure one of the runs "
            "again with the other's reference: keep its store with -lf PATH, copy that, and give it with -lf to a run "
            "that marks none"
        )


def merged(sources: Sequence[Source]) -> tuple[StoredRun, Any]:
    """One run of checked sources, in their order, and its inspection."""
    parts = [part for source in sources for part in source.parts]
    references = [part.reference for part in parts if part.reference is not None]
    rows = Rows(sources, references)
    for source in sources:
        rows.add(source)
    run = StoredRun(
        data=sources[0].run.data,
        subtitle=sources[0].run.subtitle,
        models=tuple(rows.models),
        reference=references[0] if references else None,
        title=next((source.run.title for source in sources if source.run.title), None),
        origin=common([part.origin for part in parts]),
        parts=tuple(replace(part, labels=rows.labels(source, part)) for source in sources for part in source.parts),
    )
    return run, inspection(sources, rows)


class Rows:
    """The rows of a merged run, as they come together.

    ``models``; ``origins``: the name of the source that each is from; ``places``: (source, label there) -> number of
    the row.
    """

    def __init__(self, sources: Sequence[Source], references: Sequence[dict[str, Any]]) -> None:
        self.models: list[ModelResult] = []
        self.origins: list[str] = []
        self.places: dict[tuple[str, str], int] = {}
        self.compared = bool(references)
        self.several = len({each.get("key") for each in references}) > 1
        models = [model for source in sources for model in source.run.models]
        self.marked = {model.scores_key for model in models if model.is_reference and model.scores_key}

    def add(self, source: Source) -> None:
        """All rows of a source; one that is there already, by the key of its scores, is not added again."""
        for model in source.run.models:
            place = next((i for i, other in enumerate(self.models) if is_same(model, other)), None)
            if place is None:
                place = len(self.models)
                self.models.append(self.prepared(model, source))
                self.origins.append(source.name)
            else:
                self.models[place] = self.joined(place, model, source)
            self.places[source.name, model.label] = place

    def prepared(self, model: ModelResult, source: Source) -> ModelResult:
        """A row as it stands in the merged table: its label its own, and said what its run could not know."""
        notes, taken = list(model.notes), {other.label for other in self.models}
        labels = itertools.chain([model.label], (f"{model.label} ({i})" for i in itertools.count(2)))
        label = next(label for label in labels if label not in taken)
        is_reference = model.is_reference or model.scores_key in self.marked
        reference = source.run.reference
        if model.error:
            notes.append(f"failed in {source.name}, on {'; '.join(part.where for part in source.parts)}")
        elif label != model.label:
            notes.append(f"called {model.label!r} in {source.name}, measured on {model.where or 'an unknown machine'}")
        if self.compared and reference is None and not (model.error or is_reference):
            notes.append(f"no KLD: {source.name} has no reference; measure it again with one")
        key = model.reference_key or (reference or {}).get("key") or ""
        key = key if self.several and (model.kld or is_reference) else ""
        return replace(model, label=label, is_reference=is_reference, reference_key=key, notes=tuple(notes))

    def joined(self, place: int, again: ModelResult, source: Source) -> ModelResult:
        """A row that a further source has too; it says so where that one calls it otherwise, or measured otherwise."""
        kept = self.models[place]
        if kept.kld is None and again.kld is not None:  # that one has a reference
            return replace(self.prepared(again, source), label=kept.label, notes=again.notes)
        notes = list(kept.notes)
        if again.label != kept.label:
            notes.append(f"called {again.label!r} in {source.name}")
        one, other = (model.ppl.value if model.ppl else None for model in (kept, again))
        if one != other:
            notes.append(f"{source.name} measured it as well, with PPL {cell(other, PPL_DIGITS)}")
        return replace(kept, notes=tuple(dict.fromkeys(notes)))

    def labels(self, source: Source, part: Part) -> tuple[str, ...]:
        """The rows here that come from a part of a source."""
        places = [self.places[source.name, label] for label in part.labels if (source.name, label) in self.places]
        return tuple(self.models[place].label for place in places if self.origins[place] == source.name)


def is_same(one: ModelResult, other: ModelResult) -> bool:
    """Whether two rows are of the same scores: of one model, engine, options, versions, hardware and reference.

    Or of one model with and without a reference, whose losses are then the same to the last bit.
    """
    if one.scores_key and one.scores_key == other.scores_key:
        return True
    alone = (one.kld is None) != (other.kld is None) and not (one.is_reference or other.is_reference)
    same = (one.label, one.engine, one.where) == (other.label, other.engine, other.where)
    sums = [(model.ppl.logprob_sum, model.ppl.tokens) if model.ppl else None for model in (one, other)]
    return alone and same and sums[0] is not None and sums[0] == sums[1]


def common(origins: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``report.ORIGIN`` of a merged run: what all its parts share, and the date of the last one; no command."""

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


def notes(run: RunResult) -> list[str]:
    """Footnotes of a merged run: its parts, in which versions they differ, and what their KLDs are against."""
    if not isinstance(run, StoredRun) or not run.parts:
        return []
    found = [f"{part.file} ({part.created[:10]}, {part.where}; rows: {len(part.labels)})" for part in run.parts]
    versions = {name: None for part in run.parts for name in part.versions}
    off = [
        f"{name} " + ", ".join(part.versions.get(name, "none") for part in run.parts)
        for name in versions if len({part.versions.get(name) for part in run.parts}) > 1
    ]  # fmt: skip
    return [
        f"merged from {len(run.parts)} runs: {'; '.join(found)}",
        *([f"their versions differ, in this order: {'; '.join(off)}"] if off else []),
        *reference_notes(run),
    ]


def reference_notes(run: StoredRun) -> list[str]:
    """What has to be said where each machine had its own reference: how far these are apart."""
    first: dict[Any, Part] = {}
    for part in run.parts:
        if part.reference is not None:
            first.setdefault(part.reference.get("key"), part)
    if len(first) < 2:
        return []
    found = [f"{cell(part.reference_ppl, PPL_DIGITS)} on {part.where} ({part.file})" for part in first.values()]
    known = [part.reference_ppl for part in first.values() if part.reference_ppl]
    apart = f", {100 * (max(known) / min(known) - 1):.3f} % apart" if len(known) == len(first) else ""
    return [
        "KLD and same top of each row are against the reference as the row's own machine computes it (the same model, "
        f"engine and options), PPL {'; '.join(found)}{apart}; those of two machines are not paired, and have no star"
    ]


def inspection(sources: Sequence[Source], rows: Rows) -> dict[str, Any] | None:
    """The excerpts of all reports, each model's where it is now; None if no source is a report that holds any."""
    worst: list[Any] = [None] * len(rows.models)
    passages: dict[tuple[Any, ...], dict[str, Any]] = {}
    for source in sources:
        if source.inspection is None:
            continue
        places = [rows.places[source.name, model.label] for model in source.run.models]
        try:
            for place, found in zip(places, source.inspection["worst"], strict=True):
                worst[place] = worst[place] or found
            for passage in source.inspection["passages"]:
                add_passage(passages, passage, places, rows)
        except (KeyError, TypeError, ValueError):
            raise InputError(f"--from: {source.name}: the report's excerpts are damaged; write it again") from None
    return {"passages": list(passages.values()), "worst": worst} if any(worst) else None


def add_passage(
    passages: dict[tuple[Any, ...], dict[str, Any]], passage: dict[str, Any], places: Sequence[int], rows: Rows
) -> None:
    """Put a passage's numbers where its models are now; reports share one if tokens and reference are the same."""
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
