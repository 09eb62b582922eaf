"""``show a.json b.json``: finished runs of one text, from several machines or caches, as one run.

Only runs that can stand in one table are merged: the same windows and vocabulary, by their digests, and one reference.
A row that several runs have appears once.  References are one if their rows have the same scores to the last bit
(``is_same``) and KLDs against them are measured in one way.  Otherwise a reference that two runs measured counts as one
where model, engine, options and versions agree: then every row keeps the KLD against the reference of its own run, the
table says so, and no KLDs against two of them are paired.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable, shortened
from compare_q.backends.scoring.segments import DIVERGENCES_SUFFIX
from compare_q.eval.results import results_json
from compare_q.eval.results.digits import PPL_DIGITS, number_text
from compare_q.eval.results.run_result import (
    SAME_AS,
    Inspection,
    ModelResult,
    Part,
    Passage,
    Results,
    TextResult,
    with_parts,
)
from compare_q.eval.specs import reading
from compare_q.eval.stats.estimates import Estimates

WINDOWS = ("text_tokens", "method", "windows", "window_length", "scored_tokens")
"""The keys of a run's data with which an error message tells windows apart."""
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


@dataclass(frozen=True)
class Source:
    """One file: its name, the runs in it (itself, or those that it was merged from), its only text, whose rows have the
    keys of the references that they are or that their KLDs are against, and the report's excerpts or None."""

    name: str
    parts: tuple[Part, ...]
    text: TextResult
    title: str | None = None
    excerpts: Inspection | None = None

    @property
    def references(self) -> list[dict[str, Any]]:
        """The references of its runs."""
        return [part.reference for part in self.parts if part.reference is not None]


def source_of(name: str, results: Results, excerpts: Inspection | None) -> Source:
    """A file's results of one text; a row's key is "" where the file does not say it."""
    (text,) = results.texts
    whole = Part(name, results.labels, results.origin or {}, text.reference, text.reference_ppl)
    parts = results.parts or (whole,)
    keys = {part.reference_key or "" for part in parts if part.reference is not None}
    only = keys.pop() if len(keys) == 1 else ""
    models = tuple(replace(model, reference_key=model.reference_key or only) for model in text.models)
    return Source(name, parts, replace(text, models=models), results.title, excerpts)


def load(files: Sequence[Path]) -> tuple[Results, list[Inspection | None]]:
    """(the results, the excerpts of each text or None) of one file, or of several of one text, merged.

    InputError in one line for files that are damaged, or that cannot stand in one table, with the file and the remedy.
    """
    resolved = list(map(os.path.realpath, files))
    for file, path in zip(files, resolved, strict=True):
        if resolved.count(path) > 1:
            raise InputError(f"{printable(file)}: is given twice; name each run once")
    loaded = [results_json.load(file) for file in files]
    if len(loaded) == 1:
        return loaded[0]
    for file, (results, _) in zip(files, loaded, strict=True):
        if len(results.texts) > 1:
            raise InputError(
                f"{printable(file)}: holds several texts, which are not merged with other runs; name this file alone"
            )
    sources = [
        source_of(name, results, excerpts)
        for name, (results, (excerpts,)) in zip(short_names(files), loaded, strict=True)
    ]
    for other in sources[1:]:
        check_windows(sources[0], other)
    chosen = same_references(sources)
    check_references(sources, chosen)
    return merged_run(sources, chosen)


def masked(
    results: Results, excerpts: Sequence[Inspection | None], mask: str | None
) -> tuple[Results, list[Inspection | None]]:
    """What ``load`` returns, with the models alone that a mask leaves; the reference's row stays."""
    named = reading.matching(results.labels, mask)

    def chosen(values: Sequence[Any], models: Sequence[ModelResult]) -> tuple[Any, ...]:
        """Those of ``values``, one for each of ``models``, whose model is left."""
        pairs = zip(values, models, strict=True)
        return tuple(value for value, model in pairs if model.label in named or model.is_reference)

    texts = tuple(replace(text, models=chosen(text.models, text.models)) for text in results.texts)
    kept = [
        own and Inspection(
            tuple(
                replace(each, logprob=chosen(each.logprob, text.models), kld=chosen(each.kld, text.models))
                for each in own.passages
            ),
            chosen(own.worst, text.models),
        )
        for own, text in zip(excerpts, results.texts, strict=True)
    ]  # fmt: skip
    left = replace(results, texts=texts)
    parts = tuple(
        replace(part, labels=tuple(label for label in part.labels if label in left.labels)) for part in left.parts
    )
    return replace(left, parts=parts), kept


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
    one, two = first.text.data, other.text.data
    for source in (first, other):
        if not isinstance(source.text.data.get("windows_sha256"), str):
            raise InputError(f"{source.name}: does not say which windows it scored (windows_sha256); run it again")
    if one.get("vocabulary_sha256") != two.get("vocabulary_sha256"):
        raise InputError(
            f"{other.name}: its tokenizer differs from the tokenizer of {first.name}; merge runs with one tokenizer"
        )
    if one["windows_sha256"] != two["windows_sha256"]:
        pairs = [(name, two.get(name), one.get(name)) for name in WINDOWS if one.get(name) != two.get(name)]
        off = [shortened(printable(f"{name} {theirs} and {ours}"), 60) for name, theirs, ours in pairs]
        raise InputError(
            f"{other.name}: its windows differ from the windows of {first.name} "
            f"({', '.join(off) or 'another text'}); merge runs of one data spec and one text"
        )
    keys = [(each.get("answers") or {}).get("key_sha256") for each in (one, two)]
    if keys[0] != keys[1]:
        raise InputError(
            f"{other.name}: has other right answers to the same questions than {first.name}; run one of them again"
        )


def merged_run(sources: Sequence[Source], chosen: Mapping[str, str]) -> tuple[Results, list[Inspection | None]]:
    """One run of checked sources, in their order, and its excerpts; ``chosen``: as ``same_references`` gives it."""
    rows = MergedRows(sources, chosen)
    for source in sources:
        rows.add(source)
    parts = tuple(
        replace(with_same(part, chosen), labels=rows.labels(source, part))
        for source in sources
        for part in source.parts
    )
    references = [reference for source in sources for reference in source.references]
    text = replace(sources[0].text, models=rows.finished(parts), reference=references[0] if references else None)
    results = Results(
        (text,),
        title=next((source.title for source in sources if source.title), None),
        origin=common_origin([part.origin for part in parts]),
        parts=parts,
    )
    return results, [merged_excerpts(sources, rows)]


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


def merged_excerpts(sources: Sequence[Source], rows: MergedRows) -> Inspection | None:
    """The excerpts of all reports, in the order of the merged rows; None if no source is a report with excerpts.

    Passages of one text and reference become one.
    """
    empty: tuple[None, ...] = (None,) * len(rows.models)
    worst: tuple[Any, ...] = empty
    passages: dict[tuple[Any, ...], Passage] = {}
    for source in sources:
        if source.excerpts is None:
            continue
        places = [rows.places[source.name, model.label] for model in source.text.models]
        worst = with_more(worst, places, source.excerpts.worst)
        for passage in source.excerpts.passages:
            measured = [place for place, own in zip(places, passage.logprob, strict=True) if own is not None]
            keys = {rows.models[place].reference_key for place in measured} - {""}
            name = (passage.window, passage.position, len(passage.tokens), *sorted(keys))
            kept = passages.get(name) or replace(passage, logprob=empty, kld=empty)
            passages[name] = replace(
                kept,
                ref_logprob=kept.ref_logprob or passage.ref_logprob,
                logprob=with_more(kept.logprob, places, passage.logprob),
                kld=with_more(kept.kld, places, passage.kld),
            )
    return Inspection(tuple(passages.values()), worst) if any(worst) else None


def with_more(kept: Sequence[Any], places: Sequence[int], more: Sequence[Any]) -> tuple[Any, ...]:
    """What is kept of each merged row, or else what there is more at its place."""
    added = dict(zip(places, more, strict=True))
    return tuple(own or added.get(place) for place, own in enumerate(kept))


def same_references(sources: Sequence[Source]) -> dict[str, str]:
    """Key of each reference -> one key for all that are the same, its own for the others."""
    chosen: dict[str, str] = {}
    known: list[tuple[ModelResult, dict[str, Any]]] = []
    for source in sources:
        described: dict[str, dict[str, Any]] = {each["key"]: each for each in source.references if each.get("key")}
        for key, each in described.items():
            chosen = united(chosen, key, each.get(SAME_AS) or key)
        for row in (model for model in source.text.models if model.is_reference):
            reference = described.get(row.reference_key)
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
    found = [(source.name, reference) for source in sources for reference in source.references]
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
            f"{name}: its KL divergences are against {other['label']!r}, and the KL divergences of "
            f"{first_name} are against {first['label']!r}, which is another reference (they differ in {differing}); "
            "measure one of the runs again with the other's reference: keep the reference store with -lf PATH, copy "
            "it, and give it with -lf to a run that marks no reference"
        )


class MergedRows:
    """The rows of a merged run, as they come together.

    ``models``: the rows; ``origins``: the name of each row's source; ``places``: (source, label there) -> number of the
    row; ``failures``: number of a row -> the runs in which it failed, in words, and why.
    """

    def __init__(self, sources: Sequence[Source], chosen: Mapping[str, str]) -> None:
        """``chosen``: key of each reference -> the key of the reference that it is the same as."""
        self.models: list[ModelResult] = []
        self.origins: list[str] = []
        self.places: dict[tuple[str, str], int] = {}
        self.failures: dict[int, list[tuple[str, str]]] = {}
        self.chosen = chosen
        self.marked = {
            model.scores_key: chosen.get(model.reference_key, model.reference_key)
            for source in sources for model in source.text.models if model.is_reference and model.scores_key
        }  # fmt: skip
        references = [reference for source in sources for reference in source.references]
        self.compared = bool(references)
        self.several = len({chosen.get(str(each.get("key")), each.get("key")) for each in references}) > 1

    def add(self, source: Source) -> None:
        """Add all rows of a source; a row that another source has too is joined to it."""
        for model in source.text.models:
            matches = (
                i for test in (is_same, replaces_failed) for i, row in enumerate(self.models) if test(model, row)
            )
            place = next(matches, None)
            if place is None:
                place = len(self.models)
                taken = {other.label for other in self.models}
                names = (model.label if i == 1 else f"{model.label} ({i})" for i in itertools.count(1))
                self.put(place, self.prepared(model, source, next(name for name in names if name not in taken)), source)
            else:
                self.join(place, model, source)
            if model.error:
                run = f"failed in {source.name}, on {'; '.join(part.where for part in source.parts)}"
                self.failures.setdefault(place, []).append((run, model.error))
            self.places[source.name, model.label] = place

    def put(self, place: int, model: ModelResult, source: Source) -> None:
        """Have this row of that source at a place, the next one or one that has a row."""
        self.models[place : place + 1] = [model]
        self.origins[place : place + 1] = [source.name]

    def prepared(self, model: ModelResult, source: Source, label: str) -> ModelResult:
        """A row for the merged table, with that label, and notes about its run."""
        notes = list(model.notes)
        is_reference = model.is_reference or model.scores_key in self.marked
        if label != model.label and not model.error:
            notes.append(f"called {model.label!r} in {source.name}, measured on {model.where or 'an unknown machine'}")
        if self.compared and source.text.reference is None and not (model.error or is_reference):
            notes.append(f"no KLD: {source.name} has no reference; measure it again with one")
        key = self.chosen.get(model.reference_key, model.reference_key) or self.marked.get(model.scores_key, "")
        key = key if self.several and (model.kld or is_reference) else ""
        return replace(model, label=label, is_reference=is_reference, reference_key=key, notes=tuple(notes))

    def join(self, place: int, again: ModelResult, source: Source) -> None:
        """A row that a further source has too; a note says where its label or its PPL differ there."""
        kept = self.models[place]
        if again.error:
            return
        row = self.prepared(again, source, kept.label)
        if kept.error:
            self.put(place, row, source)
            return
        has_reference = kept.kld is None and again.kld is not None
        has_more = again.scores_key.endswith(DIVERGENCES_SUFFIX) and not kept.scores_key.endswith(DIVERGENCES_SUFFIX)
        if has_reference or has_more:  # the further source alone has it
            self.put(place, replace(row, notes=again.notes), source)
            return
        notes = list(kept.notes)
        if again.label != kept.label:
            notes.append(f"called {again.label!r} in {source.name}")
        one, other = (model.ppl.value if model.ppl else None for model in (kept, again))
        if one != other:
            notes.append(f"{source.name} measured it as well, with PPL {number_text(other, PPL_DIGITS)}")
        elif kept.scores_key.removesuffix(DIVERGENCES_SUFFIX) != again.scores_key.removesuffix(DIVERGENCES_SUFFIX):
            notes.append(f"{source.name} measured it as well, with the same scores to the last bit")
        self.models[place] = replace(kept, notes=tuple(dict.fromkeys(notes)))

    def labels(self, source: Source, part: Part) -> tuple[str, ...]:
        """The rows here that come from a part of a source."""
        places = [self.places[source.name, label] for label in part.labels if (source.name, label) in self.places]
        here = (self.models[place].label for place in places if self.origins[place] == source.name)
        return tuple(dict.fromkeys(here))

    def finished(self, parts: Sequence[Part]) -> tuple[ModelResult, ...]:
        """The rows, with notes on the runs in which they failed, and why, where the row itself does not say it."""
        rows = []
        for place, model in enumerate(self.models):
            failed = (run if why == model.error else f"{run}: {why}" for run, why in self.failures.get(place, ()))
            rows.append(replace(model, notes=tuple(dict.fromkeys((*model.notes, *failed)))))
        return with_parts(rows, parts)


def replaces_failed(one: ModelResult, other: ModelResult) -> bool:
    """Whether a row failed in one run, or in both, that otherwise seems the same: of one label, engine and model.

    A failed row has no scores to tell; folders lie elsewhere on another machine, so the last part of the model's path
    has to do.
    """
    names = [PurePosixPath(str(model.spec.get("model_dir", ""))).name for model in (one, other)]
    same = (one.label, one.engine, names[0]) == (other.label, other.engine, names[1])
    return bool(one.error or other.error) and same


def is_same(one: ModelResult, other: ModelResult) -> bool:
    """Whether two rows have the same scores: of one model, engine, options, versions, hardware and reference.

    Rows of one label, engine and machine whose sums are the same to the last bit count as well, whatever their versions
    are; so does the same model with and without a reference, or with and without ``--divergences``.
    """
    keys = [model.scores_key.removesuffix(DIVERGENCES_SUFFIX) for model in (one, other)]
    if keys[0] and keys[0] == keys[1]:
        return True
    if one.estimates is None or other.estimates is None or one.is_reference != other.is_reference:
        return False
    klds = {model.kld.total for model in (one, other) if model.kld}
    return len(klds) < 2 and identity(one, one.estimates) == identity(other, other.estimates)


def identity(model: ModelResult, found: Estimates) -> tuple[Any, ...]:
    """What rows with the same scores share: label, engine, machine, and the sums of losses, entropies and hits."""
    ppl, others = found.ppl, (found.top1, found.entropy)
    return (
        *(model.label, model.engine, model.where, ppl.logprob_sum, ppl.tokens),
        *(None if mean is None else mean.total for mean in others),
    )
