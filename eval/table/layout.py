"""The layout of a table in a terminal: which columns fit its width, and how wide each of them is.

The label stays whole as long as another column or error can be left out (``Table.spare``) that is
none of ``WANTED``; then labels are shortened in the middle.  Numbers are never cut.
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
from .columns import named
from .tables import LABEL, STDERR, Filled, Table

MARGIN = 2
"""Characters of the table's box at the left and the right."""
LEAST_LABEL, LEAST_WORDS = 12, 14
"""Least widths in characters of a label and of other words that wrap.  If a label has less room
than this, it does not wrap, and lines are longer than the terminal is wide."""


SHORT_LABEL = 24
"""Characters of the shortest form of a label."""
WANTED = ("size", "bpw_layer", "same_top", f"kld{STDERR}", f"ppl{STDERR}")
"""Columns and errors that are worth a shorter label."""


class Drawn(NamedTuple):
    """A column as the terminal shows it: header, cells, and its width and least width in
    characters.

    A label wraps only if its whole width does not fit although all spare columns are left out.
    """

    filled: Filled
    width: int
    least: int
    header: str
    cells: list[Text]


def drawn(filled: Filled) -> Drawn:
    """Return a column as it is shown: words; or numbers flush right, then errors or marks flush
    left.
    """
    column = filled.column
    if column.wraps:
        header, *texts = [
            printable(each) for each in (column.title, *(cell.value for cell in filled.cells))
        ]
        width = max(map(cell_len, [header, *texts]))
        least = width if column.name == LABEL else min(width, LEAST_WORDS)
        return Drawn(filled, width, least, header, list(map(Text, texts)))
    lines = list(map(printable, column.header.split("\n")))
    shown = [printable(cell.shown) for cell in filled.cells]
    errors = [f"±{cell.error}" if cell.error else cell.marks for cell in filled.cells]
    after = max(map(len, errors), default=0)
    before = max([*map(cell_len, shown), max(map(cell_len, lines)) - after])
    cells = [
        Text(" " * (before - cell_len(value)) + value, "bold" if cell.is_best else "").append(
            error, "not bold"
        )
        for value, cell, error in zip(shown, filled.cells, errors, strict=True)
    ]
    header = "\n".join([" " * (before - cell_len(line)) + line for line in lines])
    return Drawn(filled, before + after, before + after, header, cells)


def fitting(table: Table, width: int) -> tuple[list[Drawn], tuple[str, ...]]:
    """Return the columns to print in ``width`` characters, and the names of the columns and errors
    to leave out.
    """
    columns = list(map(drawn, table.columns))
    for kept in range(len(table.spare), -1, -1):
        left_out = table.spare[kept:]
        narrow = without(columns, left_out)
        if least_width(narrow) <= width:
            break
        if kept and table.spare[kept - 1] in WANTED:
            shorter = with_short_labels(narrow, width)
            if least_width(shorter) <= width:
                return shorter, left_out
    return narrow, left_out


def with_short_labels(columns: Sequence[Drawn], width: int) -> list[Drawn]:
    """Return the columns with labels short enough for a table of this width; unchanged if two would
    become equal.
    """
    labels = next((each for each in columns if each.filled.column.name == LABEL), None)
    if labels is None:
        return list(columns)
    room = labels.least - (least_width(columns) - width)
    whole = [cell.value for cell in labels.filled.cells]
    short = [cut_in_middle(printable(label), room) for label in whole]
    if room < SHORT_LABEL or len(set(short)) < len(set(whole)):
        return list(columns)
    cells = tuple(
        replace(cell, value=label) for cell, label in zip(labels.filled.cells, short, strict=True)
    )
    shorter = drawn(replace(labels.filled, cells=cells))
    return [shorter if each is labels else each for each in columns]


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


def without(columns: Sequence[Drawn], left_out: Collection[str]) -> list[Drawn]:
    """Return the columns without those of these names; ``kld_stderr``: the column without its
    errors.
    """
    narrow = []
    for each in columns:
        if each.filled.column.name + STDERR in left_out:
            cells = tuple(replace(cell, error="") for cell in each.filled.cells)
            each = drawn(replace(each.filled, cells=cells))
        narrow += [] if each.filled.column.name in left_out else [each]
    return narrow


def least_width(columns: Sequence[Drawn]) -> int:
    """Return the width in characters of a table whose label and numbers are whole."""
    return MARGIN + len(columns) - 1 + sum([each.least for each in columns])


def widths(columns: Sequence[Drawn], width: int) -> list[int]:
    """Return the width of each column of a table that is ``width`` characters wide, or wider if it
    has to be.
    """
    room, found = width - least_width(columns), []
    for each in columns:
        more = min(max(room, 0), each.width - each.least)
        if each.filled.column.name == LABEL and room < 0 and each.least + room >= LEAST_LABEL:
            more = room
        room -= more
        found.append(each.least + more)
    return found


def print_columns(console: Console, title: str, columns: Sequence[Drawn]) -> None:
    """Print a table of these columns, at least one."""
    chosen, own = widths(columns, console.width), console.width
    total = MARGIN + sum(chosen) + len(chosen) - 1
    gap = 1 if total + len(chosen) <= own else 0
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0))
    for each, characters in zip(columns, chosen, strict=True):
        table.add_column(
            Text(each.header),
            overflow="fold",
            no_wrap=not each.filled.column.wraps,
            width=characters,
        )
    for row in zip(*[each.cells for each in columns], strict=True):
        table.add_row(*row)
    if title:
        say(title, console=console)
    console.width = max(own, total)
    console.print(table)
    console.width = own


def left_out_line(table: Table, left_out: Collection[str], width: int) -> list[str]:
    """Return a line on what the printed table leaves out and how to see it; no line if it is whole."""
    columns = dict.fromkeys(
        each.column.name for each in table.columns if each.column.name in left_out
    )
    errors = dict.fromkeys(
        each.column.name
        for each in table.columns
        if each.column.name + STDERR in left_out
        and each.column.name not in columns
        and any(cell.error for cell in each.cells)
    )
    if not columns and not errors:
        return []
    titles = [
        *(named(name).title for name in columns),
        *(f"the ± of {named(name).title}" for name in errors),
    ]
    names = ", ".join([*columns, *errors])
    return [
        f"left out in {width} columns: {', '.join(titles)}; a wider terminal or --columns '{names}' shows them"
    ]
