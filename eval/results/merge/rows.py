"""The rows of a merged run: each appears once, also where several runs have it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from backends.scoring.segments import DIVERGENCES_SUFFIX
from eval.results.digits import PPL_DIGITS, number_text
from eval.results.merge.sources import Source
from eval.results.run_result import ModelResult, Part
from eval.stats.estimates import Estimates


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
        rows = [(source, model) for source in sources for model in source.run.models]
        self.marked = {
            model.scores_key: self.reference_key(model, source)
            for source, model in rows if model.is_reference and model.scores_key
        }  # fmt: skip
        references = [part.reference for source in sources for part in source.parts if part.reference is not None]
        self.compared = bool(references)
        self.several = len({chosen.get(str(each.get("key")), each.get("key")) for each in references}) > 1

    def reference_key(self, model: ModelResult, source: Source) -> str:
        """The key of the reference that a row is, or that its KLD is against, or "": one key for the same reference."""
        key = source.reference_key(model)
        return self.chosen.get(key, key)

    def add(self, source: Source) -> None:
        """Add all rows of a source; a row that another source has too (``is_same``, ``gives_way``) is joined to it."""
        for model in source.run.models:
            matches = (i for test in (is_same, gives_way) for i, row in enumerate(self.models) if test(model, row))
            place = next(matches, None)
            if place is None:
                place = len(self.models)
                taken = {other.label for other in self.models}
                names = itertools.chain([model.label], (f"{model.label} ({i})" for i in itertools.count(2)))
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
        if self.compared and source.run.reference is None and not (model.error or is_reference):
            notes.append(f"no KLD: {source.name} has no reference; measure it again with one")
        key = self.reference_key(model, source) or self.marked.get(model.scores_key, "")
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

    def finished(self) -> tuple[ModelResult, ...]:
        """The rows, with notes on the runs in which they failed, and why, where the row itself does not say it."""
        found = []
        for place, model in enumerate(self.models):
            failed = (run if why == model.error else f"{run}: {why}" for run, why in self.failures.get(place, ()))
            found.append(replace(model, notes=tuple(dict.fromkeys((*model.notes, *failed)))))
        return tuple(found)


def gives_way(one: ModelResult, other: ModelResult) -> bool:
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
