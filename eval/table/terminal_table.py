"""The table in a terminal: as many columns as fit its width, then notes or the legend.

The label stays whole as long as another column or error can be left out (``Table.left_out_first``)
that is not in ``IMPORTANT``; then labels are shortened in the middle.  Numbers are never cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ...backends.common.message_text import printable
from ..common.terminal import say
from .columns import column_of
from .tables import LABEL, STDERR, FilledColumn, Table

MARGIN = 2
"""Characters of the table's box at the left and the right."""
LEAST_LABEL = 12
"""Least width of a label in characters.  If a label has less room than this, it does not wrap, and
lines are longer than the terminal is wide."""
LEAST_WORDS = 14
"""Least width in characters of other words that wrap."""
SHORT_LABEL = 24
"""Characters of the shortest form of a label."""
IMPORTANT = ("size", "bpw_layer", "same_top", f"kld{STDERR}", f"ppl{STDERR}")
"""Columns and errors that are worth a shorter label."""
HINT_AT_NOTES = "what the columns and marks mean: --notes"
ERRORS = "±: one standard error for other texts like this one"
ERRORS_OF_PPL = (
    "; rows share most of the error of PPL, so that KLD and differences of rows (--pairs) are "
    "known far better"
)


class SizedColumn(NamedTuple):
    """A column as the terminal shows it: header, cells, and its width and least width in
    characters.

    A label wraps only if its whole width does not fit although all columns that may be left out
    are.
    """

    filled: FilledColumn
    width: int
    least: int
    header: str
    cells: list[Text]

    @property
    def name(self) -> str:
        """The name of the column."""
        return self.filled.column.name


def show(table: Table, console: Console, *, notes: bool = False) -> None:
    """Print the table with as many columns as fit, and its notes.

    ``notes``: also print the meanings of columns and marks.
    """
    columns, left_out = fitting_columns(table, console.width)
    print_columns(console, table.title, columns)
    say(*left_out_line(table, left_out, console.width), *table.notes, console=console)
    if not notes:
        say(*errors_in_words(columns), HINT_AT_NOTES, console=console)
        return
    filled_columns = [column.filled for column in columns]
    meanings = []
    for filled in filled_columns:
        meanings.append(f"{filled.column.title}: {filled.column.note}")
    say("", *meanings, *table.legend_of(filled_columns), console=console)


def conclude(table: Table, console: Console) -> None:
    """Print the closing sentences, and what to type for more precise KLDs."""
    say("", *table.finding, *table.advice, console=console)


def errors_in_words(columns: Sequence[SizedColumn]) -> list[str]:
    """Return a line on the errors in the columns; none if they have no errors."""
    names = []
    for column in columns:
        if any(cell.error for cell in column.filled.cells):
            names.append(column.name)
    if not names:
        return []
    # A new user took the error of PPL, which rows share, for a fault of the rows.
    if "ppl" in names and len(names) > 1:
        return [ERRORS + ERRORS_OF_PPL]
    return [ERRORS]


def size_column(filled: FilledColumn) -> SizedColumn:
    """Return a column as it is printed."""
    if filled.column.wraps:
        return size_words(filled)
    return size_numbers(filled)


def size_words(filled: FilledColumn) -> SizedColumn:
    """Return a column of words as it is printed."""
    # Strangers write labels and names: no control character may reach the terminal.
    header = printable(filled.column.title)
    texts = [printable(cell.value) for cell in filled.cells]
    width = widest([header, *texts])
    least = width
    if filled.column.name != LABEL:
        least = min(width, LEAST_WORDS)
    # rich reads square brackets in a str as markup.
    cells = [Text(text) for text in texts]
    return SizedColumn(filled, width, least, header, cells)


def size_numbers(filled: FilledColumn) -> SizedColumn:
    """Return a column of numbers as it is printed: flush right, then errors or marks flush left."""
    lines = [printable(line) for line in filled.column.header.split("\n")]
    numbers = [printable(cell.shown) for cell in filled.cells]
    suffixes = []
    for cell in filled.cells:
        if cell.error:
            suffixes.append(f"±{cell.error}")
        else:
            suffixes.append(cell.marks)
    suffix_width = widest(suffixes)
    # A header that is longer than the numbers reaches over the errors at their right.
    number_width = max(widest(numbers), widest(lines) - suffix_width)
    cells = []
    for cell, number, suffix in zip(filled.cells, numbers, suffixes, strict=True):
        style = ""
        if cell.is_best:
            style = "bold"
        text = Text(flush_right(number, number_width), style)
        cells.append(text.append(suffix, "not bold"))
    header = "\n".join(flush_right(line, number_width) for line in lines)
    width = number_width + suffix_width
    return SizedColumn(filled, width, width, header, cells)


def widest(texts: Sequence[str]) -> int:
    """Return the width of the widest text in characters of a terminal; 0 without texts."""
    return max((cell_len(text) for text in texts), default=0)


def flush_right(text: str, width: int) -> str:
    """Return a text after spaces that fill ``width`` characters of a terminal."""
    return " " * (width - cell_len(text)) + text


def fitting_columns(table: Table, width: int) -> tuple[list[SizedColumn], tuple[str, ...]]:
    """Return the columns to print in ``width`` characters, and the names of the columns and errors
    to leave out.
    """
    columns = [size_column(filled) for filled in table.columns]
    order = table.left_out_first
    for count in range(len(order) + 1):
        left_out = order[:count]
        narrow = leave_out(columns, left_out)
        if least_width(narrow) <= width:
            break
        # A shorter label costs less than an important column that would be left out next.
        if count < len(order) and order[count] in IMPORTANT:
            shorter = with_short_labels(narrow, width)
            if least_width(shorter) <= width:
                return shorter, left_out
    return narrow, left_out


def leave_out(columns: Sequence[SizedColumn], names: Collection[str]) -> list[SizedColumn]:
    """Return the columns without those of these names; ``kld_stderr``: the column without its
    errors.
    """
    narrow = []
    for column in columns:
        if column.name in names:
            continue
        if column.name + STDERR in names:
            cells = tuple(replace(cell, error="") for cell in column.filled.cells)
            column = size_column(replace(column.filled, cells=cells))
        narrow.append(column)
    return narrow


def with_short_labels(columns: Sequence[SizedColumn], width: int) -> list[SizedColumn]:
    """Return the columns with labels short enough for a table of this width.

    Unchanged if two labels would become equal, or if they would be too short.
    """
    excess = least_width(columns) - width
    shorter = []
    for column in columns:
        if column.name == LABEL:
            column = with_labels_of(column, column.least - excess)
        shorter.append(column)
    return shorter


def with_labels_of(column: SizedColumn, room: int) -> SizedColumn:
    """Return the column of labels with labels of at most ``room`` characters, if they stay
    different.
    """
    labels = [cell.value for cell in column.filled.cells]
    short_labels = [cut_in_middle(printable(label), room) for label in labels]
    if room < SHORT_LABEL or len(set(short_labels)) < len(set(labels)):
        return column
    cells = []
    for cell, label in zip(column.filled.cells, short_labels, strict=True):
        cells.append(replace(cell, value=label))
    return size_column(replace(column.filled, cells=tuple(cells)))


def cut_in_middle(label: str, room: int) -> str:
    """Return a label without characters in its middle, so that it takes ``room`` characters of a
    terminal.
    """
    if cell_len(label) <= room:
        return label
    middle = len(label) // 2
    head = label[:middle]
    tail = label[middle:]
    while cell_len(head) + 1 + cell_len(tail) > room and (head or tail):
        if len(head) > len(tail):
            head = head[:-1]
        else:
            tail = tail[1:]
    return f"{head}…{tail}"


def least_width(columns: Sequence[SizedColumn]) -> int:
    """Return the width in characters of a table whose label and numbers are whole."""
    return MARGIN + len(columns) - 1 + sum(column.least for column in columns)


def widths(columns: Sequence[SizedColumn], width: int) -> list[int]:
    """Return the width of each column of a table that is ``width`` characters wide, or wider if it
    has to be.
    """
    room = width - least_width(columns)
    column_widths = []
    for column in columns:
        more = min(max(room, 0), column.width - column.least)
        # The label wraps if numbers need its room.
        if column.name == LABEL and room < 0 and column.least + room >= LEAST_LABEL:
            more = room
        room -= more
        column_widths.append(column.least + more)
    return column_widths


def print_columns(console: Console, title: str, columns: Sequence[SizedColumn]) -> None:
    """Print a table of these columns, at least one."""
    console_width = console.width
    column_widths = widths(columns, console_width)
    total = MARGIN + sum(column_widths) + len(columns) - 1
    gap = 0
    if total + len(columns) <= console_width:
        gap = 1
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0))
    for column, width in zip(columns, column_widths, strict=True):
        table.add_column(
            Text(column.header),
            overflow="fold",
            no_wrap=not column.filled.column.wraps,
            width=width,
        )
    for row in zip(*[column.cells for column in columns], strict=True):
        table.add_row(*row)
    if title:
        say(title, console=console)
    # rich cuts the numbers of a table that is wider than its console.
    console.width = max(console_width, total)
    console.print(table)
    console.width = console_width


def left_out_line(table: Table, left_out: Collection[str], width: int) -> list[str]:
    """Return a line on what the printed table leaves out and how to see it; none if it is whole."""
    columns = []
    errors = []
    for filled in table.columns:
        name = filled.column.name
        if name in left_out:
            columns.append(name)
        elif name + STDERR in left_out and any(cell.error for cell in filled.cells):
            errors.append(name)
    if not columns and not errors:
        return []
    titles = []
    for name in columns:
        titles.append(column_of(name).title)
    for name in errors:
        titles.append(f"the ± of {column_of(name).title}")
    names = ", ".join([*columns, *errors])
    remedy = f"a wider terminal or --columns '{names}' shows them"
    return [f"left out in {width} columns: {', '.join(titles)}; {remedy}"]
