"""The table in a terminal: as many columns as there is room for, labels and kernels wrapped where that is little."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backends.common.messages import printable
from eval.results.run_result import RunResult
from eval.table.columns import Filled, column_notes, narrowed, possible_extras, table_columns
from eval.table.footnotes import footnotes
from eval.table.registry import WORDS
from eval.table.timing import HEADERS as HEADERS_OF_TIMING
from eval.table.timing import timing_rows

TEXT = 26
"""Letters that columns of words together keep, before a further column of numbers is shown."""
MARGIN = 2
"""Letters that the table's box takes left and right."""


def show(run: RunResult, console: Console, names: Sequence[str] | None = None) -> None:
    """Print the table and its footnotes; chosen columns stand there all, whatever the terminal's width."""
    found = columns_that_fit(run, console.width) if names is None else table_columns(run, names)
    width = console.width
    console.width = width if names is None else max(width, least_width(found))
    console.print(rich_table(run.subtitle, found, console.width))
    console.width = width
    for note in [*footnotes(run), *column_notes(run, [each.column.name for each in found])]:
        console.print(printable(note), markup=False, highlight=False, soft_wrap=True)


def show_timing(run: RunResult, console: Console) -> None:
    """Print where the seconds of every row went."""
    console.print(timing_table(HEADERS_OF_TIMING, timing_rows(run)))


def timing_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of where seconds went, whose columns of words are ``label`` and ``text``."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        drawn.add_column(header, justify="left" if header in ("label", "text") else "right", overflow="fold")
    for cells in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in cells))
    return drawn


def rich_table(title: str, found: Sequence[Filled], width: int) -> Table:
    """The table of these columns for a terminal of so many letters; there is at least one column."""
    gap = 1 if width_left(found, width) - natural_width(found) >= len(found) else 0  # beside the one of the box
    drawn = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, gap, 0, 0),
        title=Text(printable(title)),
        title_justify="left",
    )
    rows: list[list[Text]] = [[] for _ in found[0].cells]
    for each in found:
        words = each.column.name in WORDS
        _, header, texts = word_cells(each) if words else aligned_cells(each)
        plain = Text("\n".join(map(printable, header.split("\n"))))  # a text's name is no markup
        drawn.add_column(plain, overflow="fold", no_wrap=not words)
        for row, text in zip(rows, texts, strict=True):
            row.append(text)
    for row in rows:
        drawn.add_row(*row)
    return drawn


def columns_that_fit(run: RunResult, width: int) -> list[Filled]:
    """The columns of any table, and as many extras as leave room for labels and kernels."""
    found, extras = table_columns(run), list(possible_extras(run))
    for kept in range(len(extras), -1, -1):
        fitting = narrowed(found, extras[kept:])
        if width_left(fitting, width) >= min(natural_width(fitting), TEXT):
            break
    return fitting


def least_width(found: Sequence[Filled]) -> int:
    """Letters below which columns would be cut off: all of the numbers, and ``TEXT`` of the words."""
    return -width_left(found, 0) + min(natural_width(found), TEXT)


def natural_width(found: Sequence[Filled]) -> int:
    """Letters that the columns of words take if nothing in them wraps."""
    return sum(word_cells(each)[0] for each in found if each.column.name in WORDS)


def width_left(found: Sequence[Filled], width: int) -> int:
    """Letters of the terminal's width that the columns of numbers leave to those of words."""
    numbers = [each for each in found if each.column.name not in WORDS]
    return width - MARGIN - (len(found) - 1) - sum(aligned_cells(each)[0] for each in numbers)


def word_cells(found: Filled) -> tuple[int, str, list[Text]]:
    """(width, header, cells) of words."""
    texts = [Text(printable(cell.value)) for cell in found.cells]
    return max(len(found.column.title), *map(len, texts)), found.column.title, texts


def aligned_cells(found: Filled) -> tuple[int, str, list[Text]]:
    """(width, header, cells): numbers flush right, their errors, or marks, flush left behind them."""
    lines = found.column.header.split("\n")
    shown = [printable(cell.shown) for cell in found.cells]
    errors = [f"±{cell.error}" if cell.error else cell.marks for cell in found.cells]
    behind = max(map(len, errors), default=0)
    before = max(*map(len, shown), max(map(len, lines)) - behind)
    texts = [
        Text(f"{value:>{before}}", "bold" if cell.is_best else "").append(off, "not bold")
        for value, cell, off in zip(shown, found.cells, errors, strict=True)
    ]
    return before + behind, "\n".join(f"{line:>{before}}" for line in lines), texts
