"""The table of a run: title, columns with cells, footnotes, legend and closing sentences.

Terminal, Markdown, report and notebooks all show a ``Table``.  A run of several texts has columns
for the KLD and PPL of each text, next to the columns for all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ranking import best_labels
from ..results import ModelResult, RunResult, option_texts
from .columns import COLUMNS, Column, column_of
from .findings import verdict
from .legend import column_footnotes, legend
from .notes import footnotes
from .numbers import bound_text, decimals_of_error, error_text, number_text
from .precision_sentences import advice
from .row_marks import BEST, label_of, machine_letters

EARLIER = "*"
"""After seconds that an earlier run measured."""
MEASURED_EARLIER = ("seconds", "speed", "load")
"""The columns of such seconds."""
FEW_TEXTS = 3
"""The largest number of texts whose PPLs are, next to their KLDs, in the table by default."""
LABEL = "label"
"""The column that a narrow terminal keeps whole."""
STDERR = "_stderr"
"""The end of the name of a column's errors, after the column's name."""
LEFT_OUT_LAST = (
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
"""Columns and errors that a narrow terminal leaves out after those with a ``left_out_rank``, in
this order."""
RANK_OF_TOP_ERROR = 8
"""The ``left_out_rank`` of the error of ``same_top``."""
FINER_PPL = 2
"""Decimals of PPL beyond those of its error, which is mostly about the text: rows of one table
differ far less."""
LONGEST_SLICE_NAME = 14
"""Characters of a text's name in a header, if that is enough to distinguish the texts."""


@dataclass(frozen=True)
class Cell:
    """The text of a number, of its standard error and of the marks after it; or words.

    Each may be empty.
    """

    value: str
    error: str = ""
    is_best: bool = False
    marks: str = ""

    @property
    def shown(self) -> str:
        """The value, with its mark if it is the best."""
        if self.is_best:
            return BEST + self.value
        return self.value

    @property
    def plus_minus(self) -> str:
        """The error as written after the value; empty without one."""
        if self.error:
            return f" ± {self.error}"
        return ""


@dataclass(frozen=True)
class FilledColumn:
    """A column with a cell for each row, and with a footnote, which may be empty."""

    column: Column
    cells: tuple[Cell, ...]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with all its sentences, for every writer.

    Attributes:
        title: what was measured.
        columns: all have the same number of cells.
        notes: footnotes on this table.
        legend: the meanings of the marks in this table.
        finding: the closing sentences, one paragraph each.
        advice: lines on what to type for more precise KLDs; only terminals print them.
        left_out_first: columns and errors (``..._stderr``) that a narrow terminal leaves out, the
            first one first.
    """

    title: str
    columns: tuple[FilledColumn, ...]
    notes: tuple[str, ...]
    legend: tuple[str, ...] = ()
    finding: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    left_out_first: tuple[str, ...] = ()

    def legend_of(self, columns: Sequence[FilledColumn]) -> tuple[str, ...]:
        """Return the meanings of the marks, and the notes on these columns."""
        notes = [filled.note for filled in columns if filled.note]
        return (*self.legend, *notes)


def table_of(run: RunResult, names: Sequence[str] | None = None) -> Table:
    """Return the table of a run with the columns of these names; None: the default columns."""
    left_out_first: list[str] = []
    if names is None:
        names = default_columns(run)
        # Columns that a user chose are all printed.
        left_out_first = order_of_leaving_out(names)
    title = run.subtitle
    if len(run.texts) > 1:
        text_names = ", ".join(text.name for text in run.texts)
        title = f"{len(run.texts)} texts: {text_names}"
    return Table(
        title=title,
        columns=tuple(columns_of(run, names)),
        notes=tuple(footnotes(run, names)),
        legend=tuple(legend(run)),
        finding=(verdict(run),),
        advice=tuple(advice(run)),
        left_out_first=tuple(left_out_first),
    )


def order_of_leaving_out(names: Sequence[str]) -> list[str]:
    """Return what a narrow terminal leaves out of a default table, the first one first.

    These are columns, and errors of columns: columns of slices, from the last to the first, then
    ranked columns, then ``LEFT_OUT_LAST``.  Names that the table does not have do no harm.
    """
    ranks = {}
    klds_of_slices = []
    others_of_slices = []
    for name in names:
        column = column_of(name)
        if column.left_out_rank:
            ranks[name] = column.left_out_rank
        if column.slice and name.startswith("kld"):
            klds_of_slices.append(name)
        elif column.slice:
            others_of_slices.append(name)
    if "same_top" in names:
        ranks[f"same_top{STDERR}"] = RANK_OF_TOP_ERROR
    order = [*reversed(others_of_slices), *reversed(klds_of_slices)]
    order += sorted(ranks, key=lambda name: ranks[name])
    order += [name for name in LEFT_OUT_LAST if name not in ranks]
    return order


def default_columns(run: RunResult) -> list[str]:
    """Return the names of a run's columns without ``--columns``, in a terminal of any width."""
    names = []
    for column in COLUMNS:
        # Rows on one machine may name it differently: a column of its one letter says nothing.
        is_useless = column.name == "where" and not machine_letters(run)
        if column.is_default(run) and not is_useless:
            names.append(column.name)
        if column.name == "kld":
            names += columns_of_texts(run)
    return names


def columns_of_texts(run: RunResult) -> list[str]:
    """Return the names of the columns of each text.

    These are KLDs, and PPLs if there are no KLDs or few texts.
    """
    if len(run.texts) == 1:
        return []
    klds = []
    ppls = []
    for text in run.texts:
        klds.append(f"kld:{text.name}")
        ppls.append(f"ppl:{text.name}")
    if run.reference is None:
        return ppls
    if len(run.texts) <= FEW_TEXTS:
        return klds + ppls
    return klds


def columns_of(run: RunResult, names: Sequence[str]) -> list[FilledColumn]:
    """Return columns with a cell for each model.

    A failed model has "failed" in its PPL, or in its first number without that column.
    """
    columns = [column_of(name) for name in names]
    notes = column_footnotes(run)
    failures = column_of_failures(columns)
    filled_columns = []
    for column in with_short_headers(columns):
        column = with_digits_of_errors(column, run.models)
        failed_cell = Cell("")
        if column.name == failures:
            failed_cell = Cell("failed")
        cells = cells_of(column, run, failed_cell)
        filled_columns.append(FilledColumn(column, tuple(cells), notes.get(column.name, "")))
    return filled_columns


def column_of_failures(columns: Sequence[Column]) -> str:
    """Return the name of the column in which a failed model has "failed"; empty without any."""
    numbers = [column.name for column in columns if column.digits is not None]
    if "ppl" in numbers:
        return "ppl"
    return next(iter(numbers), "")


def cells_of(column: Column, run: RunResult, failed_cell: Cell) -> list[Cell]:
    """Return the cells of a column; ``failed_cell``: of every failed model."""
    best: frozenset[str] = frozenset()
    if column.best:
        best = best_labels(run.models, column.best)
    options: set[str] = set()
    if column.name == "options":
        options = differing_options(run.models)
    letters: dict[str, str] = {}
    if column.name == "where":
        letters = machine_letters(run)
    cells = []
    for model in run.models:
        if column.name == LABEL:
            cell = Cell(label_of(model))
        elif model.blocks is None:
            cell = failed_cell
        elif column.name == "options":
            cell = Cell(options_text(model, options))
        elif letters:
            cell = Cell(letters.get(model.where or "", "n/a"))
        else:
            cell = cell_of(column, model, is_best=model.label in best)
        cells.append(cell)
    return cells


def differing_options(models: Sequence[ModelResult]) -> set[str]:
    """Return the names of the engine options that not all rows share."""
    names: set[str] = set()
    if not models:
        return names
    first = models[0].engine_options
    for model in models:
        options = model.engine_options
        for name in options.keys() | first.keys():
            # A row without an option differs from one whose option is None.
            if options.get(name, ...) != first.get(name, ...):
                names.add(name)
    return names


def options_text(model: ModelResult, names: set[str]) -> str:
    """Return a row's engine options of these names; a dash without any."""
    options = {name: value for name, value in model.engine_options.items() if name in names}
    if not options:
        return "-"
    return ", ".join(option_texts(options))


def with_digits_of_errors(column: Column, models: Sequence[ModelResult]) -> Column:
    """Return the column without decimals that are smaller than the errors of all its numbers: 294,
    not 294.45, ± 26.

    All numbers of a column have the same decimals.  PPL has ``FINER_PPL`` more than its error.
    """
    if column.digits is None or not column.error:
        return column
    finer = 0
    if column.name.partition(":")[0] == "ppl":
        finer = FINER_PPL
    digits = []
    for model in models:
        is_by_definition = model.reference and column.of_reference is not None
        if model.blocks is None or is_by_definition or column.value(model) is None:
            continue
        stderr = column.stderr(model)
        # The decimals of a number without an error are not known to be too many.
        if not stderr:
            return column
        digits.append(decimals_of_error(column.times * stderr) + finer)
    return replace(column, digits=min([column.digits, max(digits, default=column.digits)]))


def with_short_headers(columns: Sequence[Column]) -> list[Column]:
    """Return the columns with long names of slices shortened in the headers, if they stay
    different.
    """
    short_names = {}
    for column in columns:
        if column.slice:
            short_names[column.slice] = short_name(column.slice)
    # Two texts must not have the same header.
    if len(set(short_names.values())) < len(short_names):
        return list(columns)
    shortened = []
    for column in columns:
        if column.slice:
            header = column.header.replace(column.slice, short_names[column.slice])
            column = replace(column, header=header)
        shortened.append(column)
    return shortened


def short_name(name: str) -> str:
    """Return a name of a slice with at most ``LONGEST_SLICE_NAME`` characters."""
    if len(name) <= LONGEST_SLICE_NAME:
        return name
    return f"{name[: LONGEST_SLICE_NAME - 1]}…"


def cell_of(column: Column, model: ModelResult, *, is_best: bool = False) -> Cell:
    """Return the cell of a measured model."""
    value = column.value(model)
    if column.digits is None:
        return Cell(value or "n/a")
    if column.of_reference is not None and model.reference:
        return Cell("ref")
    if value is None:
        return Cell("n/a")
    number = column.times * value + column.plus
    if column.shows_kld and model.has_bound:
        text = bound_text(number, column.digits)
    elif column.signed:
        text = f"{number:+,.{column.digits}f}"
    else:
        text = number_text(number, column.digits)
    error = ""
    stderr = column.stderr(model)
    if stderr is not None:
        error = error_text(column.times * stderr)
    marks = ""
    if model.from_cache and column.name in MEASURED_EARLIER:
        marks = EARLIER
    return Cell(text, error, is_best, marks)
