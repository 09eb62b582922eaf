"""``--from a.json --from b.json``: finished runs of one text, from several machines or caches, as one run.

Only runs that can stand in one table are merged: the same windows and vocabulary, by their digests, and one reference.
A reference that each machine measured for itself counts as one where model, engine, options and versions agree: then
every row keeps the KLD against the reference of its own machine, the table says so, and no KLDs of two machines are
paired.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.common.errors import InputError
from backends.common.messages import printable, shortened
from backends.worker.segment_names import MORE
from eval.results import results_json
from eval.results.digits import PPL_DIGITS, number_text
from eval.results.run_result import ModelResult, Part, StoredRun

WINDOWS = ("text_tokens", "method", "windows", "window_length", "scored_tokens")
"""The keys of a run's data with which an error message tells windows apart."""
DESCRIPTIVE = ("label", "key", "contents", "contents_reason", "vocab_size", "head_dtype", "bytes", "bytes_a_token")
"""Keys of a reference's description that its numbers do not depend on."""
MEANING = {
    "content": "model",
    "version": "compare_q's method of measuring",
    "reference": "compare_q's method of recording",
}
"""Key of a reference's description -> its name in messages, where the key does not say it."""


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

    InputError in one line for runs that cannot stand in one table, with the file and the remedy.
    """
    resolved = [file.resolve() for file in files]
    for file, path in zip(files, resolved, strict=True):
        if resolved.count(path) > 1:
            raise InputError(f"--from: {printable(file)}: is given twice; name each run once")
    found = [results_json.load(file) for file in files]
    if len(found) == 1:
        return found[0]
    sources = [Source(name, *each) for name, each in zip(short_names(files), found, strict=True)]
    for other in sources[1:]:
        check_windows(sources[0], other)
    check_references(sources)
    return merged_run(sources)


def short_names(files: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the files apart: ``results.json`` often is the name of both."""
    parts = [file.resolve().parts for file in files]
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
        if off == ["hardware"]:
            continue
        differing = shortened(printable(", ".join(MEANING.get(key, key) for key in off))) or "key"
        raise InputError(
            f"--from: {name}: its KL divergences are against {other['label']!r}, and the KL divergences of "
            f"{first_name} are against {first['label']!r}, which is another reference (they differ in {differing}); "
            "measure one of the runs again with the other's reference: keep the reference store with -lf PATH, copy "
            "it, and give it with -lf to a run that marks no reference"
        )


def merged_run(sources: Sequence[Source]) -> tuple[StoredRun, Any]:
    """One run of checked sources, in their order, and its inspection."""
    parts = [part for source in sources for part in source.parts]
    references = [part.reference for part in parts if part.reference is not None]
    rows = MergedRows(sources, references)
    for source in sources:
        rows.add(source)
    run = StoredRun(
        data=sources[0].run.data,
        subtitle=sources[0].run.subtitle,
        models=tuple(rows.models),
        reference=references[0] if references else None,
        title=next((source.run.title for source in sources if source.run.title), None),
        origin=common_origin([part.origin for part in parts]),
        parts=tuple(replace(part, labels=rows.labels(source, part)) for source in sources for part in source.parts),
    )
    return run, merged_inspection(sources, rows)


class MergedRows:
    """The rows of a merged run, as they come together.

    ``models``: the rows; ``origins``: the name of each row's source; ``places``: (source, label there) -> number of the
    row.
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
        """Add all rows of a source; a row that another source has too (``is_same``) is not added again."""
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
        """A row for the merged table: with a label that no other row has, and notes about its run."""
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
        """A row that a further source has too; a note says where its label or its PPL differ there."""
        kept = self.models[place]
        has_reference = kept.kld is None and again.kld is not None
        has_more = again.scores_key.endswith(MORE) and not kept.scores_key.endswith(MORE)
        if has_reference or has_more:  # the further source alone has it
            return replace(self.prepared(again, source), label=kept.label, notes=again.notes)
        notes = list(kept.notes)
        if again.label != kept.label:
            notes.append(f"called {again.label!r} in {source.name}")
        one, other = (model.ppl.value if model.ppl else None for model in (kept, again))
        if one != other:
            notes.append(f"{source.name} measured it as well, with PPL {number_text(other, PPL_DIGITS)}")
        return replace(kept, notes=tuple(dict.fromkeys(notes)))

    def labels(self, source: Source, part: Part) -> tuple[str, ...]:
        """The rows here that come from a part of a source."""
        places = [self.places[source.name, label] for label in part.labels if (source.name, label) in self.places]
        return tuple(self.models[place].label for place in places if self.origins[place] == source.name)


def is_same(one: ModelResult, other: ModelResult) -> bool:
    """Whether two rows have the same scores: of one model, engine, options, versions, hardware and reference.

    The same model with and without a reference, or with and without ``--divergences``, counts as well: its losses are
    then the same to the last bit.
    """
    keys = [model.scores_key.removesuffix(MORE) for model in (one, other)]
    if keys[0] and keys[0] == keys[1]:
        return True
    alone = (one.kld is None) != (other.kld is None) and not (one.is_reference or other.is_reference)
    same = (one.label, one.engine, one.where) == (other.label, other.engine, other.where)
    sums = [(model.ppl.logprob_sum, model.ppl.tokens) if model.ppl else None for model in (one, other)]
    return alone and same and sums[0] is not None and sums[0] == sums[1]


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
