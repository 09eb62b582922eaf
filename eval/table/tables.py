"""The tables of a run, which terminal, Markdown, report and notebooks show.

A run of one text has one table.  A run of several texts has one with all of them side by side, or one for each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from compare_q.eval.results import ModelResult, RunResult, TextResult
from compare_q.eval.table import notes
from compare_q.eval.table.columns import (
    BY_NAME,
    OF_ANSWERS,
    OF_TEXT,
    Cell,
    Filled,
    filled,
    mean_of,
    spare_columns,
    usual_columns,
)
from compare_q.eval.table.numbers import error_text, number_text

LONGEST_NAME = 14
"""Characters of a text's name in a header, if that is enough to distinguish the texts."""
MEANS = -1
"""The block of the means over all texts."""


@dataclass(frozen=True)
class Table:
    """A table: its ``title``, columns and footnotes; for a text that failed only the ``error``.

    Attributes:
        heading: the name of its text, if each of several texts has a table.
        notes: notes that are special to it.
        legend: meanings of its marks.
        column_notes: notes on columns, by their names.
        spare: columns, and errors of columns (``..._stderr``), that a narrow terminal leaves out, the last one first.
    """

    heading: str = ""
    title: str = ""
    columns: list[Filled] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    legend: list[str] = field(default_factory=list)
    column_notes: dict[str, str] = field(default_factory=dict)
    spare: tuple[str, ...] = ()
    error: str = ""

    def legend_of(self, columns: Sequence[Filled]) -> list[str]:
        """Return the meanings of the marks, and the notes on these columns."""
        shown = {each.column.name for each in columns}
        return [*self.legend, *(note for name, note in self.column_notes.items() if name in shown)]


def tables_of(run: RunResult, names: Sequence[str] | None = None, *, by_text: bool = False) -> list[Table]:
    """Return the tables of a run with the columns of these names; None: the default columns.

    ``by_text``: a table for each of several texts.
    """
    if len(run.texts) == 1 or by_text:
        several = len(run.texts) > 1
        return [table_of_text(text, names, heading=text.name if several else "") for text in run.texts]
    title = f"{len(run.texts)} texts: {', '.join(text.name for text in run.texts)}"
    columns = columns_of_texts(run, names)
    said = [*notes.notes_of_texts(run), *notes_of_columns(run.scored[0], columns)]
    return [Table("", title, columns, said, notes.legend_of_texts(run), spare=("kld_stderr", "ppl_stderr"))]


def table_of_text(text: TextResult, names: Sequence[str] | None = None, *, heading: str = "") -> Table:
    """Return the table of one text."""
    if text.error:
        return Table(heading, error=text.error)
    columns = filled(text, usual_columns(text) if names is None else names)
    said = [*notes.footnotes(text), *notes_of_columns(text, columns)]
    spare = spare_columns(text) if names is None else ()
    return Table(heading, text.subtitle, columns, said, notes.legend(text), notes.column_notes(text), spare)


def notes_of_columns(text: TextResult, columns: Sequence[Filled]) -> list[str]:
    """Return the notes on single rows for columns that not every table has."""
    return notes.kv_size_notes(text) if any(each.column.name == "kv_mb" for each in columns) else []


def without(columns: Sequence[Filled], left_out: Collection[str]) -> list[Filled]:
    """Return the columns without those of these names; ``..._stderr`` leaves out the errors of a column."""
    return [
        replace(each, cells=tuple(replace(cell, error="") for cell in each.cells))
        if f"{each.column.name}_stderr" in left_out else each
        for each in columns if each.column.name not in left_out
    ]  # fmt: skip


def columns_of_texts(run: RunResult, names: Sequence[str] | None = None) -> list[Filled]:
    """Return the columns of all texts side by side: about the models, about each text, and means.

    ``names`` None: label, kernel, sizes, and of every text PPL and KLD, or accuracy if it is a task of questions.
    """
    rows = [[model for model in run.of_label(label) if model is not None] for label in run.labels]
    models = run.scored[0].updated(  # of each model the first row that did not fail
        models=tuple(next((model for model in each if not model.error), each[0]) for each in rows)
    )
    compared = any(text.reference for text in run.scored)
    usual = [name for name in usual_columns(models) if BY_NAME[name].per_model and not BY_NAME[name].spare]
    chosen = [*usual, *OF_TEXT[: 1 + compared]] if names is None else names
    of_models = [name for name in chosen if BY_NAME[name].per_model and name != "label"]
    of_text = [name for name in chosen if not BY_NAME[name].per_model]
    columns = filled(models, ["label", *of_models])
    for block, (text, header) in enumerate(zip(run.texts, short_names([text.name for text in run.texts]), strict=True)):
        own = OF_ANSWERS[: 1 + 2 * compared] if text.is_answers else OF_TEXT[: 1 + compared]
        columns += text_columns(text, run.labels, header, own if names is None else of_text, block + 1)
    return columns + [mean_column(run, name) for name in of_text if name in OF_TEXT]


def text_columns(
    text: TextResult, labels: Sequence[str], header: str, names: Sequence[str], block: int
) -> list[Filled]:
    """Return a text's columns, with its name in their headers.  Cells of a failed text or model are n/a."""
    models = text.models or tuple(ModelResult.of(label, "", error=text.error) for label in labels)
    return [
        Filled(
            replace(each.column, header=f"{header}\n{each.column.title}"),
            tuple(Cell("n/a") if m.error else cell for m, cell in zip(models, each.cells, strict=True)),
            block,
        )
        for each in filled(text.updated(models=models), names)
    ]


def mean_column(run: RunResult, name: str) -> Filled:
    """Return the column of the macro means of "ppl" or "kld"."""
    column, cells = BY_NAME[name], []
    for label in run.labels:
        mean = mean_of(run, label, name)
        is_reference = all(model and model.reference and not model.error for model in run.of_label(label))
        value = number_text(mean.value, column.digits or 0)
        cells.append(Cell("ref") if name == "kld" and is_reference else Cell(value, error_text(mean.stderr)))
    return Filled(replace(column, header=f"mean\n{column.title}"), tuple(cells), MEANS)


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names for headers: long ones are cut, unless two would be the same."""
    cut = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    return cut if len(set(cut)) == len(cut) else list(names)
