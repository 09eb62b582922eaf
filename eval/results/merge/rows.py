"""The rows of a merged run: each appears once, and gives way where another run has more of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backends.worker.segment_names import MORE
from eval.results.digits import PPL_DIGITS, number_text
from eval.results.merge.sources import Source
from eval.results.run_result import ModelResult, Part
from eval.stats.estimates import Estimates


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
        """Add all rows of a source; a row that another source has too (``is_row``) is not added again."""
        for model in source.run.models:
            place = next((i for i, other in enumerate(self.models) if is_row(model, other)), None)
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
        if kept.error and not again.error:
            self.origins[place] = source.name
            row = self.prepared(again, source)
            return replace(row, label=kept.label, notes=(*again.notes, *kept.notes))
        if again.error and not kept.error:
            return replace(kept, notes=(*kept.notes, *self.prepared(again, source).notes))
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
        elif kept.scores_key.removesuffix(MORE) != again.scores_key.removesuffix(MORE):
            notes.append(f"{source.name} measured it as well, with the same scores to the last bit")
        return replace(kept, notes=tuple(dict.fromkeys(notes)))

    def labels(self, source: Source, part: Part) -> tuple[str, ...]:
        """The rows here that come from a part of a source."""
        places = [self.places[source.name, label] for label in part.labels if (source.name, label) in self.places]
        return tuple(self.models[place].label for place in places if self.origins[place] == source.name)


def is_row(one: ModelResult, other: ModelResult) -> bool:
    """Whether two runs' rows are one row of a table: the same scores, or one failed and the other has its label."""
    return is_same(one, other) or (one.label == other.label and bool(one.error) != bool(other.error))


def is_same(one: ModelResult, other: ModelResult) -> bool:
    """Whether two rows have the same scores: of one model, engine, options, versions, hardware and reference.

    Rows of one label, engine and machine whose sums are the same to the last bit count as well, whatever else differs;
    so does the same model with and without a reference, or with and without ``--divergences``.
    """
    keys = [model.scores_key.removesuffix(MORE) for model in (one, other)]
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
