"""The columns of a table of several texts: what a model is, then each text's values, then the means over the texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.results.digits import error_text, number_text
from eval.results.results_json import flat_json
from eval.results.run_result import ModelResult, RunResult
from eval.results.texts import TextResult, TextsResult
from eval.stats.uncertainty import Value
from eval.table.columns import Cell, Filled, always_shown, filled, value_of
from eval.table.registry import BY_NAME, LABEL, OF_MODEL

OF_TEXT = ("ppl", "kld")
"""What a table has of every text, unless columns are chosen."""
OF_ANSWERS = ("acc", "flips", "kld")
"""What it has of answers to questions, whose PPL is over wrong ones too."""
LONGEST_NAME = 14
"""Letters of a text's name in a header, if the names can be told apart by so many."""


@dataclass(frozen=True)
class Blocks:
    """Columns that stand together: what ``models`` are, each text's, the ``means``; all have the same rows."""

    models: list[Filled]
    texts: list[list[Filled]]
    means: list[Filled]

    @property
    def all(self) -> list[Filled]:
        """All columns, in their order."""
        return [*self.models, *(column for block in self.texts for column in block), *self.means]

    def without_errors(self, of: Sequence[str]) -> Blocks:
        """The same columns without the errors of these measures."""
        return Blocks(self.models, [stripped(block, of) for block in self.texts], stripped(self.means, of))


def stripped(block: Sequence[Filled], of: Sequence[str]) -> list[Filled]:
    """Columns without the errors of these measures."""
    return [
        replace(each, cells=tuple(replace(cell, error="") for cell in each.cells)) if each.column.name in of else each
        for each in block
    ]


def blocks(result: TextsResult, names: Sequence[str] | None = None) -> Blocks:
    """The columns of these names; None: label, kernel, sizes, and of every text PPL and KLD, of answers accuracy."""
    models, chosen = models_of(result), names is not None
    compared = any(run.reference for run in result.runs)
    if names is None:
        names = [*(name for name in always_shown(models) if name in OF_MODEL), *OF_TEXT[: 1 + compared]]
    of_text = [name for name in names if name not in OF_MODEL]
    headers = short_names([text.name for text in result.texts])
    return Blocks(
        filled(models, [LABEL, *(name for name in names if name in OF_MODEL and name != LABEL)]),
        [
            text_block(result, text, header, of_text if chosen else columns_of(text, compared=compared))
            for text, header in zip(result.texts, headers, strict=True)
        ],
        [mean_column(result, name) for name in of_text if name in OF_TEXT],
    )


def columns_of(text: TextResult, *, compared: bool) -> tuple[str, ...]:
    """The columns of a text of which none were chosen; ``compared``: with a reference."""
    return OF_ANSWERS[: 1 + 2 * compared] if text.is_answers else OF_TEXT[: 1 + compared]


def models_of(result: TextsResult) -> RunResult:
    """A run that says what the models are: each one's first row that did not fail."""
    rows = [[model for model in result.of_label(label) if model is not None] for label in result.labels]
    models = tuple(next((model for model in each if not model.error), each[0]) for each in rows)
    return replace(result.runs[0], models=models)


def text_block(result: TextsResult, text: TextResult, header: str, names: Sequence[str]) -> list[Filled]:
    """A text's columns, with its name above; where the text or a model failed, every cell is n/a."""
    if text.run is None:
        found = [Filled(BY_NAME[name], (Cell("n/a"),) * len(result.labels)) for name in names]
    else:
        models = text.run.models
        found = [
            replace(each, cells=tuple(Cell("n/a") if m.error else c for m, c in zip(models, each.cells, strict=True)))
            for each in filled(text.run, names)
        ]
    return [replace(each, column=replace(each.column, header=f"{header}\n{each.column.title}")) for each in found]


def mean_column(result: TextsResult, name: str) -> Filled:
    """The macro means of PPL or KLD."""
    column = BY_NAME[name]
    means = [mean_of(result, label, name) for label in result.labels]
    is_reference = [
        all(model and model.is_reference and not model.error for model in result.of_label(label))
        for label in result.labels
    ]
    return Filled(
        replace(column, header=f"mean\n{column.title}"),
        tuple(
            Cell("ref")
            if name == "kld" and own
            else Cell(number_text(mean.value, column.digits or 0), error_text(mean.stderr))
            for mean, own in zip(means, is_reference, strict=True)
        ),
    )


def mean_of(result: TextsResult, label: str, name: str) -> Value:
    """A model's macro mean of PPL or KLD."""
    return result.mean_kld(label) if name == "kld" else result.mean_ppl(label)


def short_names(names: Sequence[str]) -> list[str]:
    """The names for headers, cut where they are long, unless they could not be told apart then."""
    cut = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    return cut if len(set(cut)) == len(cut) else list(names)


def ordered(result: TextsResult, key: str | None) -> TextsResult:
    """The models of every text sorted by a column (None: as they are), unknown values last.

    ``kld:NAME`` sorts by the column of the text of that name; ``kld`` and ``ppl`` by the mean over the texts, other
    columns by the plain mean of the texts' values.  The smallest first, but the largest where more is better.
    """
    if key is None:
        return result
    name, _, of = key.partition(":")
    column = BY_NAME[name]

    def place(label: str) -> tuple[bool, float | str]:
        if not of and name in OF_TEXT:
            value: Any = mean_of(result, label, name).value
        else:
            value = joined_value(result, label, name, of)
        if isinstance(value, str):
            return not value, value.casefold()
        return value is None, 0.0 if value is None else -value if column.more else value

    order = {label: number for number, label in enumerate(sorted(result.labels, key=place))}
    return replace(result, texts=tuple(in_order(text, order) for text in result.texts))


def joined_value(result: TextsResult, label: str, name: str, of: str) -> Any:
    """A model's value of a column for one text, or its mean over the texts; of words the first."""
    found: list[Any] = []
    for text in result.texts:
        if not of or text.name == of:
            model = model_of(text, label)
            known_of = None if model is None or text.run is None else flat_json(model, text.run)
            found.append(None if model is None or known_of is None else value_of(BY_NAME[name], model, known_of))
    known = [value for value in found if value is not None]
    if name in OF_MODEL or any(isinstance(value, str) for value in known):
        return known[0] if known else None
    return sum(known) / len(known) if known and len(known) == len(found) else None


def model_of(text: TextResult, label: str) -> ModelResult | None:
    """A model's result for a text; None if either of them failed."""
    models = text.run.models if text.run is not None else ()
    return next((model for model in models if model.label == label and not model.error), None)


def in_order(text: TextResult, order: dict[str, int]) -> TextResult:
    """The text with its models in this order."""
    if text.run is None:
        return text

    def place(model: ModelResult) -> int:
        return order[model.label]

    return replace(text, run=replace(text.run, models=tuple(sorted(text.run.models, key=place))))
