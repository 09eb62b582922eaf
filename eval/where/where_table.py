"""The tables of ``compare-q where`` with notes and sentences, and rows for CSV and pandas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ...backends.common.message_text import amount
from ..common.terminal import say
from ..table import csv_text as csv_writer
from ..table import markdown
from ..table.columns import Column
from ..table.numbers import KLD_DIGITS, error_text, number_text, number_with_error
from ..table.tables import LABEL, Cell, FilledColumn, Table
from ..table.terminal_table import least_width, leave_out, print_columns, size_column
from . import recipe_text
from .results import FrontRow, Measured, PartRow, WhereResult
from .shares import FEWEST_OF_INTERVAL

NOT_TOLD = "~"
"""After the percentage of a share whose interval holds 0."""
STOPPED = "*"
"""After the number of windows of a part that was scored in fewer windows than others."""
MOST_ROWS = 40
"""Rows that a terminal shows; files have all rows."""
MOST_NAMES = 3
"""Parts that a sentence names."""
LEFT_OUT_FIRST = ("windows", "weights", "kld")
"""Columns that a narrow terminal leaves out, in this order."""
NUMBER = 0
"""``digits`` of columns of numbers, whose cells are made here."""
COLUMNS = (
    Column(LABEL, "part", "the modules", wraps=True),
    Column("weights", "weights", "number of weights", digits=NUMBER),
    Column("bpw", "bits /\nweight", "stored bits per weight, with scales", digits=NUMBER),
    Column("share", "share\nnats", "", digits=NUMBER),
    Column("percent", "% of\nKLD", "the share in percent of the whole KLD", digits=NUMBER),
    Column("kld", "KLD\nleft", "KLD with the part restored", digits=NUMBER),
    Column("windows", "windows", "in which the part was scored", digits=NUMBER),
)
FRONT_COLUMNS = (
    Column(LABEL, "as in the reference", "parts that are restored", wraps=True),
    Column("kld", "KLD\nleft", "KLD with these parts restored", digits=NUMBER),
    Column("forecast", "KLD minus\nshares", "whole KLD minus the shares", digits=NUMBER),
    Column("bpw", "bits /\nweight", "stored bits of all exchangeable weights", digits=NUMBER),
)
FRONT_TITLE = "the parts with the largest shares per added bit, restored together:"
SHARE = "share: KLD that vanishes if the part is as in the reference; its ± is one standard error"
SHARE_ONLY = (
    "share: KLD of the reference with the part quantized alone; its ± is one standard error"
)
NO_INTERVALS = (
    f"no intervals: fewer than {FEWEST_OF_INTERVAL} windows have none; -r 8 or more gives useful "
    "ones"
)
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def table_of_parts(result: WhereResult) -> Table:
    """Return the table, the part with the largest share first."""
    columns = []
    rows = result.ranked
    for column in COLUMNS:
        # With --only, the KLD is the share.
        if column.name == "kld" and result.only:
            continue
        cells = tuple(cells_of_row(row)[column.name] for row in rows)
        columns.append(FilledColumn(column, cells))
    return Table(
        title=title_of(result),
        columns=tuple(columns),
        notes=tuple(notes_of(result)),
        finding=tuple(sentences(result)),
        left_out_first=LEFT_OUT_FIRST,
    )


def title_of(result: WhereResult) -> str:
    """Return the title: which models, and on what."""
    if result.title:
        return result.title
    return f"KLD of {result.quantized.label} from {result.reference.label}; {result.subtitle}"


def cells_of_row(row: PartRow) -> dict[str, Cell]:
    """Return name of a column -> cell of a part."""
    return {
        LABEL: Cell(row.name),
        "weights": Cell(short_count(row.n_weights)),
        "bpw": Cell(number_text(row.bits_per_weight, 2)),
        "share": measured_cell(row.share),
        "percent": percent_cell(row),
        "kld": Cell(value_text(row.kld)),
        "windows": windows_cell(row),
    }


def short_count(number: int) -> str:
    """Return a number of weights with three digits or more: 663k, 1.77M."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def measured_cell(measured: Measured | None) -> Cell:
    """Return the cell of a KLD with its error."""
    if measured is None:
        return Cell("n/a")
    return Cell(number_text(measured.value, KLD_DIGITS), error_text(measured.stderr))


def value_text(measured: Measured | None) -> str:
    """Return a KLD without its error."""
    if measured is None:
        return "n/a"
    return number_text(measured.value, KLD_DIGITS)


def percent_cell(row: PartRow) -> Cell:
    """Return the cell of the percentage, with a mark if the share cannot be told from 0."""
    if row.percent is None:
        return Cell("n/a")
    marks = ""
    if row.is_told_from_zero is False:
        marks = NOT_TOLD
    return Cell(number_text(row.percent.value, 1), marks=marks)


def windows_cell(row: PartRow) -> Cell:
    """Return the cell of the number of windows, with a mark if the part stopped."""
    marks = ""
    if row.stopped:
        marks = STOPPED
    return Cell(f"{row.windows:,}", marks=marks)


def notes_of(result: WhereResult) -> list[str]:
    """Return the notes below the table."""
    lines = []
    for row in result.rows:
        if row.reason:
            lines.append(f"{row.name}: n/a: {row.reason}")
    if result.whole_reason:
        lines.append(f"{result.quantized.label}: KLD n/a: {result.whole_reason}")
    if result.only:
        lines.append(SHARE_ONLY)
    else:
        lines.append(SHARE)
    if any(row.is_told_from_zero is False for row in result.rows):
        lines.append(f"{NOT_TOLD}: cannot be told from 0: its 95 % interval holds 0")
    if any(row.stopped for row in result.rows):
        lines.append(
            f"{STOPPED}: its share is certainly small, so that it was scored in fewer windows"
        )
    shares = [row.share for row in result.rows if row.share is not None]
    if any(share.stderr is None for share in shares):
        lines.append("no errors: one window has none; -r 8 or more gives useful ones")
    elif any(share.low is None for share in shares):
        lines.append(NO_INTERVALS)
    if result.unmatched_weights:
        total = short_count(result.n_weights)
        unmatched = short_count(result.unmatched_weights)
        lines.append(f"{unmatched} of {total} quantized weights are in no part")
    lines += [f"activations: {line}" for line in result.activations]
    lines += result.notes
    return lines


def sentences(result: WhereResult) -> list[str]:
    """Return the closing sentences: the whole, the largest parts, and the sum."""
    lines = []
    if result.whole is not None:
        whole = number_with_error(result.whole.value, result.whole.stderr, "nats")
        lines.append(
            f"{result.quantized.label} has a KLD of {whole} from {result.reference.label}."
        )
    lines += sentences_on_largest(result)
    lines += sentence_on_sum(result)
    return lines


def sentences_on_largest(result: WhereResult) -> list[str]:
    """Return sentences on the largest shares, and on which of them are above 0 for certain."""
    rows = [row for row in result.ranked if row.share is not None and row.percent is not None]
    if not rows:
        return []
    if rows[0].is_told_from_zero is None:
        return [
            f"The largest shares: {names_with_percent(rows)}. Whether they are above 0 is not "
            "known, because the windows are too few (-r 8 or more)."
        ]
    if is_below_zero(rows[0]):
        return ["No share is above 0."]
    lines = []
    if not is_above_zero(rows[0]):
        lines.append(
            f"The largest share, {names_with_percent(rows[:1])}, cannot be told from 0; more "
            "windows (-r) would show smaller shares."
        )
    certain = [row for row in rows if is_above_zero(row)]
    if certain:
        lines.append(f"The largest shares that can be told from 0: {names_with_percent(certain)}.")
    return lines


def is_above_zero(row: PartRow) -> bool:
    """Return True if the share of a part is above 0 for certain."""
    return bool(row.is_told_from_zero) and row.share is not None and row.share.value > 0


def is_below_zero(row: PartRow) -> bool:
    """Return True if the share of a part is below 0 for certain."""
    return bool(row.is_told_from_zero) and row.share is not None and row.share.value < 0


def names_with_percent(rows: Sequence[PartRow]) -> str:
    """Return the names of the first rows, with their percentages."""
    words = []
    for row in rows[:MOST_NAMES]:
        assert row.percent is not None
        words.append(f"{row.name} ({row.percent.value:.0f} %)")
    return ", ".join(words)


def sentence_on_sum(result: WhereResult) -> list[str]:
    """Return a sentence on the sum of the shares, which is not the whole KLD."""
    total = result.sum_of_shares
    if total is None or result.whole is None:
        return []
    sum_text = number_text(total, KLD_DIGITS)
    whole_text = number_text(result.whole.value, KLD_DIGITS)
    return [
        f"The shares add up to {sum_text}, and the whole KLD is {whole_text}; they need not be "
        "equal, since errors of different parts may cancel or increase each other."
    ]


def table_of_front(result: WhereResult) -> Table | None:
    """Return the table of the parts that were restored together; None if there were none."""
    if not result.front:
        return None
    cells: dict[str, list[Cell]] = {column.name: [] for column in FRONT_COLUMNS}
    n_before = 0
    notes = []
    for row in result.front:
        names = ", ".join(row.parts[n_before:])
        if n_before:
            names = f"and {names}"
        n_before = len(row.parts)
        cells[LABEL].append(Cell(names))
        cells["kld"].append(measured_cell(row.kld))
        cells["forecast"].append(Cell(value_text(row.forecast)))
        cells["bpw"].append(Cell(number_text(bits_per_weight(row, result), 2)))
        if row.reason:
            notes.append(f"{names}: n/a: {row.reason}")
    columns = [FilledColumn(column, tuple(cells[column.name])) for column in FRONT_COLUMNS]
    return Table(title=FRONT_TITLE, columns=tuple(columns), notes=tuple(notes))


def bits_per_weight(row: FrontRow, result: WhereResult) -> float | None:
    """Return the stored bits per exchangeable weight of a row of the front."""
    if not result.n_weights:
        return None
    return row.bits / result.n_weights


def print_result(result: WhereResult, console: Console) -> None:
    """Print both tables, the notes, the sentences and the recipes."""
    table = table_of_parts(result)
    print_table(table, console)
    say(*table.notes, console=console)
    front = table_of_front(result)
    if front is not None:
        say("", console=console)
        print_columns(console, front.title, [size_column(filled) for filled in front.columns])
        say(*front.notes, console=console)
    say("", *table.finding, console=console)
    recipe_text.print_recipes(result, console)


def markdown_of(result: WhereResult) -> str:
    """Return both tables, the sentences, the notes and the recipes as Markdown."""
    text = markdown.markdown_text(table_of_parts(result))
    front = table_of_front(result)
    if front is not None:
        text += "\n" + markdown.markdown_text(front)
    return text + recipe_text.markdown_of(result)


def print_table(table: Table, console: Console) -> None:
    """Print the first rows of the table, with as many columns as fit."""
    n_rows = len(table.columns[0].cells)
    columns = []
    for filled in table.columns:
        shown = FilledColumn(filled.column, filled.cells[:MOST_ROWS])
        columns.append(size_column(shown))
    titles: list[str] = []
    for name in table.left_out_first:
        if least_width(columns) <= console.width:
            break
        titles += [column.filled.column.title for column in columns if column.name == name]
        columns = leave_out(columns, [name])
    print_columns(console, table.title, columns)
    if n_rows > MOST_ROWS:
        rest = amount(n_rows - MOST_ROWS, "smaller part")
        say(f"and {rest}; --csv and --markdown have all", console=console)
    if titles:
        line = f"left out in {console.width} columns: {', '.join(titles)}; --csv has them"
        say(line, console=console)


def rows_of(result: WhereResult) -> list[dict[str, Any]]:
    """Return the numbers of every part, in the order of the model, as in CSV and pandas."""
    return [values_of(row) for row in result.rows]


def values_of(row: PartRow) -> dict[str, Any]:
    """Return name -> value of a part: nats, bits, and percent of the whole KLD."""
    return {
        "part": row.name,
        "kind": row.kind,
        "layer": row.layer,
        "n_weights": row.n_weights,
        "bits_per_weight": row.bits_per_weight,
        **values_of_measured("share", row.share),
        **values_of_measured("percent", row.percent),
        **values_of_measured("kld", row.kld),
        "told_from_zero": row.is_told_from_zero,
        "windows": row.windows,
        "stopped": row.stopped,
        "reason": row.reason,
        "modules": " ".join(row.modules),
    }


def values_of_measured(name: str, measured: Measured | None) -> dict[str, float | None]:
    """Return a number, its error and the ends of its interval by their names; None if unknown."""
    names = (name, f"{name}_stderr", f"{name}_low", f"{name}_high")
    if measured is None:
        return dict.fromkeys(names)
    values = (measured.value, measured.stderr, measured.low, measured.high)
    return dict(zip(names, values, strict=True))


def csv_text(result: WhereResult) -> str:
    """Return a line for each part as CSV."""
    rows: Sequence[dict[str, Any]] = rows_of(result)
    return csv_writer.csv_text(rows, list(rows[0]))
