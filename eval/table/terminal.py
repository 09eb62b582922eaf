"""The table in a terminal: as many columns as there is room for, labels and kernels wrapped where that is little.

Several texts stand beside each other; where they do not fit, without errors, and then in several tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from compare_q.backends.common.messages import printable
from compare_q.eval.results import RunResult
from compare_q.eval.table.columns import Filled, timing_columns, without
from compare_q.eval.table.registry import BY_NAME, LABEL, WORDS
from compare_q.eval.table.tables import Table, tables_of
from compare_q.eval.table.verdict import verdict

TEXT = 26
"""Letters that columns of words together keep, before a further column of numbers is shown."""
NOTES = "what the columns and marks mean: --notes"
MARGIN = 2
"""Letters that the table's box takes left and right."""


def show(
    results: RunResult,
    console: Console,
    names: Sequence[str] | None = None,
    *,
    by_text: bool = False,
    notes: bool = False,
) -> None:
    """Print the tables, and what is special to them; ``by_text``: of several texts a table each, below its name.

    ``notes``: also what the columns and marks mean.
    """
    meanings: dict[str, None] = {}
    for place, table in enumerate(tables_of(results, names, by_text=by_text)):
        if table.heading:
            heading(console, table.heading)
        elif place:
            console.print()
        shown: list[Filled] = []
        may_squeeze = names is None and not any(each.block for each in table.columns)
        for number, columns in enumerate(fitting(table, console.width)):
            width = console.width if may_squeeze else max(console.width, least_width(columns))
            show_columns(console, "" if number else table.title, columns, width)
            shown += columns
        for line in [f"failed: {table.error}"] if table.error else table.notes:
            say(console, line)
        meanings |= dict.fromkeys([*map(meaning, shown), *table.legend_of(shown)])
    if meanings and notes:
        console.print()
    for line in meanings if notes else [NOTES] * bool(meanings):
        say(console, line)


def meaning(filled: Filled) -> str:
    """What a column has."""
    column = BY_NAME[filled.column.name]
    return f"{column.title}: {column.means}"


def show_timing(results: RunResult, console: Console) -> None:
    """Print where the seconds of every row went."""
    show_columns(console, "", timing_columns(results), console.width)


def conclude(results: RunResult, console: Console) -> None:
    """Print what was found, the last line of a run."""
    console.print()
    say(console, verdict(results))


def show_columns(console: Console, title: str, columns: Sequence[Filled], width: int) -> None:
    """Print a table in lines of so many letters, whatever the terminal has."""
    own, console.width = console.width, width
    console.print(rich_table(title, columns, width))
    console.width = own


def say(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def heading(console: Console, name: str) -> None:
    """Print the name of a text above what is about it alone."""
    console.print(f"\n== {printable(name)} ==", markup=False, highlight=False, soft_wrap=True)


def fitting(table: Table, width: int) -> list[list[Filled]]:
    """The columns of one table that fits so many letters; where none does, of several ones, each with the label."""
    narrow = table.columns
    for kept in range(len(table.spare), -1, -1):
        narrow = without(table.columns, table.spare[kept:])
        if least_width(narrow) <= width:
            return [narrow] if narrow else []
    if not any(each.block for each in table.columns):
        return [narrow]
    first, *others = ([*block] for _, block in itertools.groupby(table.columns, key=lambda each: each.block))
    split = [first]
    for block in others:
        if least_width([*split[-1], *block]) <= width or [each.column.name for each in split[-1]] == [LABEL]:
            split[-1] += block
        else:
            split.append([table.columns[0], *block])
    return split


@dataclass(frozen=True)
class Drawn:
    """A column as the terminal has it: its width in letters, header and cells.  Words may wrap, numbers may not."""

    is_words: bool
    width: int
    header: str
    cells: list[Text]


def rich_table(title: str, columns: Sequence[Filled], width: int) -> RichTable:
    """The table of these columns, of which there is at least one, for a terminal of so many letters."""
    shown = list(map(drawn, columns))
    gap = 1 if width - sum(widths(columns)) >= len(columns) else 0  # beside the one of the box
    table = RichTable(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, gap, 0, 0),
        title=Text(printable(title)),
        title_justify="left",
    )
    for each in shown:
        header = Text("\n".join(map(printable, each.header.split("\n"))))  # a text's name is no markup
        table.add_column(header, overflow="fold", no_wrap=not each.is_words)
    for row in zip(*(each.cells for each in shown), strict=True):
        table.add_row(*row)
    return table


def widths(columns: Sequence[Filled]) -> tuple[int, int]:
    """(letters of the columns of words if nothing in them wraps, letters of everything else)."""
    shown = list(map(drawn, columns))
    words = sum(each.width for each in shown if each.is_words)
    return words, MARGIN + len(shown) - 1 + sum(each.width for each in shown if not each.is_words)


def least_width(columns: Sequence[Filled]) -> int:
    """Letters below which columns would be cut off: all of the numbers, and ``TEXT`` of the words."""
    words, others = widths(columns)
    return others + min(words, TEXT)


def drawn(filled: Filled) -> Drawn:
    """Words; or numbers flush right, their errors, or marks, flush left behind them."""
    title = filled.column.title
    if filled.column.name in WORDS:
        texts = [Text(printable(cell.value)) for cell in filled.cells]
        return Drawn(True, max([len(title), *map(len, texts)]), title, texts)
    lines = filled.column.header.split("\n")
    shown = [printable(cell.shown) for cell in filled.cells]
    errors = [f"±{cell.error}" if cell.error else cell.marks for cell in filled.cells]
    behind = max(map(len, errors), default=0)
    before = max([*map(len, shown), max(map(len, lines)) - behind])
    texts = [
        Text(f"{value:>{before}}", "bold" if cell.is_best else "").append(off, "not bold")
        for value, cell, off in zip(shown, filled.cells, errors, strict=True)
    ]
    return Drawn(False, before + behind, "\n".join(f"{line:>{before}}" for line in lines), texts)
