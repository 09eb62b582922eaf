"""The table in a terminal: as many columns as there is room for, labels and kernels wrapped where that is little.

Several texts stand beside each other; where they do not fit, without errors, and then in several tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compare_q.backends.common.messages import printable
from compare_q.eval.results.run_result import Part, Results, TextResult
from compare_q.eval.table.columns import (
    OF_TEXT,
    Blocks,
    Filled,
    blocks,
    column_notes,
    narrowed,
    possible_extras,
    table_columns,
    timing_table,
    title_of,
)  # fmt: skip
from compare_q.eval.table.footnotes import footnotes, notes_of_texts
from compare_q.eval.table.registry import LABEL, WORDS

TEXT = 26
"""Letters that columns of words together keep, before a further column of numbers is shown."""
MARGIN = 2
"""Letters that the table's box takes left and right."""


def show(results: Results, console: Console, names: Sequence[str] | None = None, *, by_text: bool = False) -> None:
    """Print the table and its footnotes; ``by_text``: of several texts a table each, below its name."""
    several = len(results.texts) > 1
    if several and not by_text:
        show_texts(results, console, names)
        return
    for text in results.texts:
        if several:
            heading(console, text.name)
        if text.error:
            console.print(f"failed: {printable(text.error)}", markup=False, highlight=False, soft_wrap=True)
        else:
            show_text(text, console, names, results.parts)


def show_text(
    run: TextResult, console: Console, names: Sequence[str] | None = None, parts: Sequence[Part] = ()
) -> None:
    """Print the table and its footnotes; chosen columns stand there all, whatever the terminal's width."""
    found = columns_that_fit(run, console.width) if names is None else table_columns(run, names)
    width = console.width
    console.width = width if names is None else max(width, least_width(found))
    console.print(rich_table(run.subtitle, found, console.width))
    console.width = width
    for note in [*footnotes(run, parts), *column_notes(run, [each.column.name for each in found])]:
        console.print(printable(note), markup=False, highlight=False, soft_wrap=True)


def show_texts(results: Results, console: Console, names: Sequence[str] | None = None) -> None:
    """Print all texts beside each other; where they do not fit, without errors, and then in several tables."""
    width = console.width
    for number, shown in enumerate(tables(blocks(results, names), width)):
        console.width = max(width, least_width(shown))
        console.print(rich_table("" if number else title_of(results), shown, console.width))
        console.width = width
    for note in notes_of_texts(results):
        console.print(printable(note), markup=False, highlight=False, soft_wrap=True)


def tables(all_blocks: Blocks, width: int) -> list[list[Filled]]:
    """The columns of one table that fits so many letters, or of several ones, each with the label."""
    for less in ((), OF_TEXT[:1], OF_TEXT):
        narrow = all_blocks.without_errors(less)
        if fits(narrow.all, width):
            return [narrow.all]
    split = [list(all_blocks.models)]
    for block in filter(None, (*all_blocks.texts, all_blocks.means)):
        if fits([*split[-1], *block], width) or [each.column.name for each in split[-1]] == [LABEL]:
            split[-1] += block
        else:
            split.append([all_blocks.models[0], *block])
    return split


def fits(found: Sequence[Filled], width: int) -> bool:
    """Whether columns leave enough room to those of words."""
    return width_left(found, width) >= min(natural_width(found), TEXT)


def heading(console: Console, name: str) -> None:
    """Print the name of a text above what is about it alone."""
    console.print(f"\n== {printable(name)} ==", markup=False, highlight=False, soft_wrap=True)


def show_timing(results: Results, console: Console) -> None:
    """Print where the seconds of every row went."""
    headers, rows = timing_table(results)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        drawn.add_column(header, justify="left" if header in ("label", "text") else "right", overflow="fold")
    for cells in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(drawn)


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


def columns_that_fit(run: TextResult, width: int) -> list[Filled]:
    """The columns of any table, and as many extras as leave room for labels and kernels."""
    found, extras = table_columns(run), list(possible_extras(run))
    for kept in range(len(extras), -1, -1):
        fitting = narrowed(found, extras[kept:])
        if fits(fitting, width):
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
