"""The table in a terminal: as many columns as there is room for, labels and kernels wrapped where that is little."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backends.common.messages import printable
from eval.results.run_result import RunResult
from eval.table.columns import Column, kernel_of, label_of, number_columns, possible_extras
from eval.table.footnotes import footnotes
from eval.table.timing import HEADERS as HEADERS_OF_TIMING
from eval.table.timing import timing_rows

HEADERS = ("label", "kernel")
TEXT = 26
"""Letters that label and kernel together keep, before a further column of numbers is shown."""
MARGIN = 2
"""Letters that the table's box takes left and right."""


def show(run: RunResult, console: Console) -> None:
    """Print the table and its footnotes."""
    console.print(rich_table(run, console.width))
    for note in footnotes(run):
        console.print(printable(note), markup=False, highlight=False, soft_wrap=True)


def show_timing(run: RunResult, console: Console) -> None:
    """Print where the seconds of every row went."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in HEADERS_OF_TIMING:
        drawn.add_column(header, justify="left" if header == "label" else "right", overflow="fold")
    for label, *cells in timing_rows(run):
        drawn.add_row(Text(printable(label)), *cells)
    console.print(drawn)


def rich_table(run: RunResult, width: int) -> Table:
    """The table for a terminal of so many columns."""
    words = [(printable(label_of(model)), printable(kernel_of(model))) for model in run.models]
    natural = sum(max(len(HEADERS[i]), *(len(names[i]) for names in words)) for i in range(len(HEADERS)))
    numbers, room = columns_that_fit(run, width, natural)
    gap = 1 if room - natural > len(numbers) else 0  # beside the one of the box
    drawn = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, gap, 0, 0),
        title=Text(printable(run.subtitle)),
        title_justify="left",
    )
    for header in HEADERS:
        drawn.add_column(header, overflow="fold")
    texts = [aligned_cells(column) for column in numbers]
    for _, header, _ in texts:
        drawn.add_column(header, no_wrap=True)
    for names, *row in zip(words, *(cells for _, _, cells in texts), strict=True):
        drawn.add_row(*map(Text, names), *row)
    return drawn


def columns_that_fit(run: RunResult, width: int, natural: int) -> tuple[list[Column], int]:
    """(columns of numbers, letters left for label and kernel); ``natural``: letters that label and kernel want."""
    chosen: list[str] = []
    numbers = number_columns(run, chosen)
    for extra in possible_extras(run):
        more = number_columns(run, [*chosen, extra])
        if width_left(more, width) < min(natural, TEXT):
            break
        chosen.append(extra)
        numbers = more
    return numbers, width_left(numbers, width)


def width_left(numbers: list[Column], width: int) -> int:
    """Letters of the terminal's width that these columns leave to label and kernel."""
    return width - MARGIN - len(HEADERS) + 1 - sum(1 + aligned_cells(column)[0] for column in numbers)


def aligned_cells(column: Column) -> tuple[int, str, list[Text]]:
    """(width, header, cells): numbers flush right, their errors flush left behind them."""
    lines = column.header.split("\n")
    errors = [f"±{cell.error}" if cell.error else "" for cell in column.cells]
    behind = max(map(len, errors), default=0)
    before = max(*(len(cell.shown) for cell in column.cells), max(map(len, lines)) - behind)
    texts = [
        Text(f"{cell.shown:>{before}}", "bold" if cell.is_best else "").append(off, "not bold")
        for cell, off in zip(column.cells, errors, strict=True)
    ]
    return before + behind, "\n".join(f"{line:>{before}}" for line in lines), texts
