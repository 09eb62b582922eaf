"""The tables of a run, which terminal, Markdown, report and notebooks show: their columns, cells and footnotes.

A run of several texts has one table with all of them side by side; the report also has one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compare_q.eval.ranking import best_labels
from compare_q.eval.results import ModelResult, RunResult, TextResult, option_texts
from compare_q.eval.table import notes
from compare_q.eval.table.columns import COLUMNS, Column, named
from compare_q.eval.table.notes import BEST
from compare_q.eval.table.numbers import error_text, number_text

EARLIER = "*"
"""After seconds that an earlier run measured."""
OF_TEXT = ("ppl", "kld")
"""Columns of each text in a table of several texts, by default."""
LABEL, STDERR = "label", "_stderr"
"""The column that a narrow terminal keeps whole, and what follows a column's name in the name of its errors."""
LAST_SPARE = (
    "kernel", "where", f"ppl{STDERR}", "size", "vram_gib", "non_finite", "same_top", f"kld{STDERR}",
    "bpw_layer", "phase",
)  # fmt: skip
"""Names of columns and errors that a narrow terminal leaves out after those with a ``Column.spare``, in this order."""
TOP_ERROR = 8
"""``Column.spare`` of the error of ``same_top``."""
LONGEST_NAME = 14
"""Characters of a text's name in a header, if that is enough to distinguish the texts."""
MEANS = -1
"""The block of the means over all texts."""


@dataclass(frozen=True)
class Cell:
    """The text of a number, of its standard error and of the marks after it; or words.  Each may be empty."""

    value: str
    error: str = ""
    is_best: bool = False
    marks: str = ""

    @property
    def shown(self) -> str:
        """The value, with its mark if it is the best."""
        return f"{BEST}{self.value}" if self.is_best else self.value

    @property
    def plus_minus(self) -> str:
        """The error as written after the value; empty without one."""
        return f" ± {self.error}" if self.error else ""


@dataclass(frozen=True)
class Filled:
    """A column with a cell for each row."""

    column: Column
    cells: tuple[Cell, ...]
    block: int = 0  # columns of a block stay together; 0: models; 1, 2, ...: texts; -1: means over the texts
    note: str = ""  # a footnote on the column


@dataclass(frozen=True)
class Table:
    """A table: its title, columns and footnotes."""

    title: str
    columns: list[Filled]
    notes: list[str]  # notes on this table
    legend: list[str]  # meanings of the marks in this table
    spare: tuple[str, ...]  # columns and errors (..._stderr) that a narrow terminal leaves out, the last one first

    def legend_of(self, columns: Sequence[Filled]) -> list[str]:
        """Return the meanings of the marks, and the notes on these columns."""
        return [*self.legend, *(each.note for each in columns if each.note)]


def table_of(run: RunResult, names: Sequence[str] | None = None) -> Table:
    """Return the table of a run with the columns of these names; None: the default columns."""
    return table_of_text(run.texts[0], names) if len(run.texts) == 1 else table_of_texts(run, names)


def table_of_text(text: TextResult, names: Sequence[str] | None) -> Table:
    """Return the table of a text that has rows."""
    columns = columns_of(text, usual_columns(text) if names is None else names)
    shown = {each.column.name: each.column.spare for each in columns}
    spare = {name: number for name, number in shown.items() if number}
    if "same_top" in shown:
        spare |= {f"same_top{STDERR}": TOP_ERROR}
    first = sorted(spare, key=lambda name: spare[name])
    order = (*(name for name in reversed(LAST_SPARE) if name not in spare), *reversed(first)) if names is None else ()
    return Table(text.subtitle, columns, notes.footnotes(text, shown), notes.legend(text), order)


def usual_columns(text: TextResult) -> list[str]:
    """Return the names of the columns of a text's table by default, if it is wide enough."""
    one_machine = not notes.machine_letters(text)
    return [each.name for each in COLUMNS if each.is_usual(text) and not (each.name == "where" and one_machine)]


def columns_of(text: TextResult, names: Sequence[str]) -> list[Filled]:
    """Return columns with a cell for each model; a failed model has "failed" in its first number."""
    numbers = [name for name in names if named(name).digits is not None]
    first = "ppl" if "ppl" in numbers else next(iter(numbers), "")
    letters, said, found = notes.machine_letters(text), notes.column_notes(text), []
    options = [model.engine_options for model in text.models]
    known = set[str]().union(*options)
    different = {name for name in known if any(each.get(name, ...) != options[0].get(name, ...) for each in options)}
    for column in map(named, names):
        best, cells = best_labels(text.models, column.best) if column.best else frozenset(), []
        for model in text.models:
            if column.name == "label":
                cells.append(Cell(notes.label_of(model)))
            elif model.blocks is None:
                cells.append(Cell("failed" if column.name == first else ""))
            elif column.name == "options":
                own = {name: value for name, value in model.engine_options.items() if name in different}
                cells.append(Cell(", ".join(option_texts(own)) or "-"))
            elif column.name == "where" and letters:
                cells.append(Cell(letters.get(model.where or "", "n/a")))
            else:
                cells.append(cell_of(column, model, is_best=model.label in best))
        found.append(Filled(column, tuple(cells), note=said.get(column.name, "")))
    return found


def cell_of(column: Column, model: ModelResult, *, is_best: bool = False) -> Cell:
    """Return the cell of a measured model."""
    value, (_, *errors) = column.value(model), column.fields
    if column.digits is None:
        return Cell(value or "n/a")
    if column.of_reference is not None and model.reference:
        return Cell("ref")
    if value is None:
        return Cell("n/a")
    shown, stderr = column.times * value + column.plus, getattr(model, errors[0]) if errors else None
    number = f"{shown:+,.{column.digits}f}" if column.signed else number_text(shown, column.digits)
    marks = EARLIER if model.from_cache and column.name in ("seconds", "speed", "load") else ""
    return Cell(number, error_text(None if stderr is None else column.times * stderr), is_best, marks)


def table_of_texts(run: RunResult, names: Sequence[str] | None) -> Table:
    """Return the table of all texts side by side: columns about the models, about each text, and means.

    ``names`` None: label, kernel, sizes, and for each text PPL and KLD.
    """
    rows = [[model for model in run.of_label(label) if model is not None] for label in run.labels]
    measured = [next((model for model in each if not model.error), each[0]) for each in rows]  # or else a failed row
    models = run.scored[0].updated(models=tuple(measured))
    compared = any(text.reference for text in run.scored)
    usual = [name for name in usual_columns(models) if named(name).per_model and not named(name).spare]
    chosen = [*usual, *OF_TEXT[: 1 + compared]] if names is None else names
    of_models = [name for name in chosen if named(name).per_model and name != "label"]
    of_text = [name for name in chosen if not named(name).per_model]
    columns = [replace(each, note="") for each in columns_of(models, ["label", *of_models])]
    texts = [text.name for text in run.texts]
    short = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in texts]
    headers = short if len(set(short)) == len(short) else texts
    for block, (text, header) in enumerate(zip(run.texts, headers, strict=True), 1):
        own = OF_TEXT[: 1 + compared]
        filled = text.models or tuple(ModelResult.of(label, "", error=text.error) for label in run.labels)
        for each in columns_of(text.updated(models=filled), own if names is None else of_text):
            cells = tuple(Cell("n/a") if m.error else cell for m, cell in zip(filled, each.cells, strict=True))
            columns.append(Filled(replace(each.column, header=f"{header}\n{each.column.title}"), cells, block))
    for column in (named(name) for name in of_text if name in OF_TEXT):
        own_cells = []
        for label in run.labels:
            mean = run.mean_kld(label) if column.name == "kld" else run.mean_ppl(label)
            exact = column.name == "kld" and all(m and m.reference and not m.error for m in run.of_label(label))
            number = number_text(mean.value, column.digits or 0)
            own_cells.append(Cell("ref") if exact else Cell(number, error_text(mean.stderr)))
        columns.append(Filled(replace(column, header=f"mean\n{column.title}"), tuple(own_cells), MEANS))
    said = [f"{text.name}: failed: {text.error}" for text in run.texts if text.error]
    said += notes.once({text.name: [text.subtitle, *notes.footnotes(text)] for text in run.scored})
    said += notes.memory_notes(run.scored[0], of_models)
    legend = [notes.MEANS, *notes.once({text.name: notes.legend(text) for text in run.scored})]
    title = f"{len(run.texts)} texts: {', '.join(texts)}"
    spare = (f"kld{STDERR}", f"ppl{STDERR}", "where", "size", "kernel") if names is None else ()
    return Table(title, columns, said, legend, spare)
