"""The table of a run, which terminal, Markdown, report and notebooks show: its columns, cells and
footnotes.

A run of several texts has columns for the KLD and PPL of each text, next to the columns for all
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ranking import best_labels
from ..results import ModelResult, RunResult, option_texts
from . import notes
from .columns import COLUMNS, Column, named
from .notes import BEST
from .numbers import decimals_of_error, error_text, number_text

EARLIER = "*"
"""After seconds that an earlier run measured."""
FEW_TEXTS = 3
"""The largest number of texts whose PPLs are, next to their KLDs, in the table by default."""
LABEL, STDERR = "label", "_stderr"
"""The column that a narrow terminal keeps whole, and what follows a column's name in the name of
its errors."""
LAST_SPARE = (
    "kernel",
    "where",
    f"ppl{STDERR}",
    "size",
    "vram_gib",
    "non_finite",
    "same_top",
    f"kld{STDERR}",
    "bpw_layer",
    "phase",
)
"""Names of columns and errors that a narrow terminal leaves out after those with a
``Column.spare``, in this order."""
TOP_ERROR = 8
"""``Column.spare`` of the error of ``same_top``."""
FINER = 2
"""Decimals of PPL beyond those of its error, which is mostly about the text: rows of one table
differ far less."""
LONGEST_NAME = 14
"""Characters of a text's name in a header, if that is enough to distinguish the texts."""


@dataclass(frozen=True)
class Cell:
    """The text of a number, of its standard error and of the marks after it; or words.  Each may be
    empty.
    """

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
    note: str = ""  # a footnote on the column


@dataclass(frozen=True)
class Table:
    """The table of a run: its title, columns and footnotes."""

    title: str
    columns: list[Filled]
    notes: list[str]  # notes on this table
    legend: list[str]  # meanings of the marks in this table
    spare: tuple[
        str, ...
    ]  # columns and errors (..._stderr) that a narrow terminal leaves out, the last one first

    def legend_of(self, columns: Sequence[Filled]) -> list[str]:
        """Return the meanings of the marks, and the notes on these columns."""
        return [*self.legend, *(each.note for each in columns if each.note)]


def table_of(run: RunResult, names: Sequence[str] | None = None) -> Table:
    """Return the table of a run with the columns of these names; None: the default columns."""
    columns = columns_of(run, usual_columns(run) if names is None else names)
    shown = [each.column for each in columns]
    order = () if names is not None else spare_of(shown)
    title = run.subtitle
    if len(run.texts) > 1:
        title = f"{len(run.texts)} texts: {', '.join(text.name for text in run.texts)}"
    return Table(
        title,
        columns,
        notes.footnotes(run, [column.name for column in shown]),
        notes.legend(run),
        order,
    )


def spare_of(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the columns and errors of a default table that a narrow terminal leaves out, the last
    one first.
    """
    spare = {column.name: column.spare for column in columns if column.spare}
    if any(column.name == "same_top" for column in columns):
        spare[f"same_top{STDERR}"] = TOP_ERROR
    first = sorted(spare, key=lambda name: spare[name])
    last = [name for name in reversed(LAST_SPARE) if name not in spare]
    of_kld = [column.name for column in columns if column.slice and column.name.startswith("kld")]
    of_others = [column.name for column in columns if column.slice and column.name not in of_kld]
    return (*last, *reversed(first), *of_kld, *of_others)


def usual_columns(run: RunResult) -> list[str]:
    """Return the names of the columns of a run's table by default, if it is wide enough."""
    one_machine = not notes.machine_letters(run)
    names = []
    for column in COLUMNS:
        if column.is_usual(run) and not (column.name == "where" and one_machine):
            names.append(column.name)
        if column.name == "kld":
            names += of_texts(run)
    return names


def of_texts(run: RunResult) -> list[str]:
    """Return the names of the columns of each text: KLDs, and PPLs if there are no KLDs or few
    texts.
    """
    texts = [text.name for text in run.texts]
    if len(texts) == 1:
        return []
    klds = [f"kld:{text}" for text in texts if run.reference is not None]
    ppls = [f"ppl:{text}" for text in texts if not klds or len(texts) <= FEW_TEXTS]
    return [*klds, *ppls]


def columns_of(run: RunResult, names: Sequence[str]) -> list[Filled]:
    """Return columns with a cell for each model; a failed model has "failed" in its first number."""
    numbers = [name for name in names if named(name).digits is not None]
    first = "ppl" if "ppl" in numbers else next(iter(numbers), "")
    letters, said, found = notes.machine_letters(run), notes.column_notes(run), []
    options = [model.engine_options for model in run.models]
    known = set[str]().union(*options)
    different = {
        name
        for name in known
        if any(each.get(name, ...) != options[0].get(name, ...) for each in options)
    }
    for column in with_short_headers(list(map(named, names))):
        column = with_digits_of_errors(column, run.models)
        best, cells = best_labels(run.models, column.best) if column.best else frozenset(), []
        for model in run.models:
            if column.name == "label":
                cells.append(Cell(notes.label_of(model)))
            elif model.blocks is None:
                cells.append(Cell("failed" if column.name == first else ""))
            elif column.name == "options":
                own = {
                    name: value for name, value in model.engine_options.items() if name in different
                }
                cells.append(Cell(", ".join(option_texts(own)) or "-"))
            elif column.name == "where" and letters:
                cells.append(Cell(letters.get(model.where or "", "n/a")))
            else:
                cells.append(cell_of(column, model, is_best=model.label in best))
        found.append(Filled(column, tuple(cells), note=said.get(column.name, "")))
    return found


def with_digits_of_errors(column: Column, models: Sequence[ModelResult]) -> Column:
    """Return the column without decimals that are smaller than the errors of all its numbers: 294,
    not 294.45, ± 26.

    All numbers of a column have the same decimals.  PPL has ``FINER`` more than its error.
    """
    if column.digits is None or not column.error:
        return column
    more = FINER if column.name.partition(":")[0] == "ppl" else 0
    needed = []
    for model in models:
        is_shown = model.blocks is not None and not (
            model.reference and column.of_reference is not None
        )
        if is_shown and column.value(model) is not None:
            stderr = column.stderr(model)
            if not stderr:
                return column
            needed.append(decimals_of_error(column.times * stderr) + more)
    return replace(column, digits=min([column.digits, max(needed, default=column.digits)]))


def with_short_headers(columns: Sequence[Column]) -> list[Column]:
    """Return the columns; long names of slices are shortened in the headers, if they stay
    different.
    """
    names = {column.slice for column in columns if column.slice}
    short = {
        name: name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
        for name in names
    }
    if len(set(short.values())) < len(names):
        return list(columns)
    shortened = []
    for column in columns:
        if column.slice:
            header = column.header.replace(column.slice, short[column.slice])
            column = replace(column, header=header)
        shortened.append(column)
    return shortened


def cell_of(column: Column, model: ModelResult, *, is_best: bool = False) -> Cell:
    """Return the cell of a measured model."""
    value = column.value(model)
    if column.digits is None:
        return Cell(value or "n/a")
    if column.of_reference is not None and model.reference:
        return Cell("ref")
    if value is None:
        return Cell("n/a")
    shown = column.times * value + column.plus
    stderr = column.stderr(model)
    number = f"{shown:+,.{column.digits}f}" if column.signed else number_text(shown, column.digits)
    marks = EARLIER if model.from_cache and column.name in ("seconds", "speed", "load") else ""
    return Cell(
        number, error_text(None if stderr is None else column.times * stderr), is_best, marks
    )
