"""The tables of a run as text: in a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from compare_q.backends.common.messages import printable
from compare_q.eval.results import RunResult
from compare_q.eval.table.columns import named, values_of
from compare_q.eval.table.tables import Filled, Table, table_of
from compare_q.eval.table.verdict import verdict

WORDS_WIDTH = 26
"""Characters that columns of words together keep before a further column of numbers is shown."""
NOTES = "what the columns and marks mean: --notes"
MARGIN = 2
"""Characters of the table's box at the left and the right."""
MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~^&])")
"""Characters that GitHub or Reddit would read as markup in the middle of a line (^: superscript)."""
FORMULAS = tuple("=+-@\t\r＝＋－＠")
"""First characters of a text that spreadsheets run; the last four are the full-width signs."""


def show(run: RunResult, console: Console, names: Sequence[str] | None = None, *, notes: bool = False) -> None:
    """Print the table with as many columns as fit, and its notes.

    ``names``: of columns, which are all printed; ``notes``: also print the meanings of columns and marks.
    """
    table, filled = table_of(run, names), list[Filled]()
    may_squeeze = names is None and not any(each.block for each in table.columns)
    for number, columns in enumerate(fitting(table, [*map(drawn, table.columns)], console.width)):
        width = console.width if may_squeeze else max(console.width, least_width(columns))
        print_columns(console, "" if number else table.title, columns, width)
        filled += [each.filled for each in columns]
    for line in table.notes:
        say(console, line)
    means = [named(each.column.name) for each in filled]  # without the names of several texts in their headers
    meanings = [*(f"{column.title}: {column.note}" for column in means), *table.legend_of(filled)]
    if notes:
        console.print()
    for line in dict.fromkeys(meanings if notes else [NOTES]):
        say(console, line)


def conclude(run: RunResult, console: Console) -> None:
    """Print the closing sentences of a run."""
    console.print()
    say(console, verdict(run))


def heading(console: Console, name: str) -> None:
    """Print the name of a text as a heading."""
    console.print()
    say(console, f"== {name} ==")


def say(console: Console, line: str) -> None:
    """Print a line without wrapping or markup."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


class Drawn(NamedTuple):
    """A column as the terminal shows it: its width in characters, header and cells.  Only words may wrap."""

    filled: Filled
    width: int
    header: str
    cells: list[Text]


def drawn(filled: Filled) -> Drawn:
    """Return a column as it is shown: words; or numbers flush right, then errors or marks flush left."""
    column = filled.column
    if column.wraps:
        texts = [Text(printable(cell.value)) for cell in filled.cells]
        return Drawn(filled, max([len(column.title), *map(len, texts)]), printable(column.title), texts)
    lines = list(map(printable, column.header.split("\n")))
    shown = [printable(cell.shown) for cell in filled.cells]
    errors = [f"±{cell.error}" if cell.error else cell.marks for cell in filled.cells]
    after = max(map(len, errors), default=0)
    before = max([*map(len, shown), max(map(len, lines)) - after])
    texts = [
        Text(f"{value:>{before}}", "bold" if cell.is_best else "").append(error, "not bold")
        for value, cell, error in zip(shown, filled.cells, errors, strict=True)
    ]
    return Drawn(filled, before + after, "\n".join([f"{line:>{before}}" for line in lines]), texts)


def fitting(table: Table, columns: list[Drawn], width: int) -> list[list[Drawn]]:
    """Return the columns of one table that fits ``width`` characters, or else of several, each with the label."""
    narrow = columns
    for kept in range(len(table.spare), -1, -1):
        left_out = table.spare[kept:]
        narrow = [
            without_errors(each) if f"{each.filled.column.name}_stderr" in left_out else each
            for each in columns if each.filled.column.name not in left_out
        ]  # fmt: skip
        if least_width(narrow) <= width:
            return [narrow] if narrow else []
    if not any(each.block for each in table.columns):
        return [narrow]
    first, *others = ([*block] for _, block in itertools.groupby(columns, key=lambda each: each.filled.block))
    split = [first]
    for block in others:
        if least_width([*split[-1], *block]) <= width or len(split[-1]) == 1:
            split[-1] += block
        else:
            split.append([columns[0], *block])
    return split


def without_errors(column: Drawn) -> Drawn:
    """Return the column with its values and without their errors."""
    return drawn(replace(column.filled, cells=tuple(replace(cell, error="") for cell in column.filled.cells)))


def least_width(columns: Sequence[Drawn]) -> int:
    """Return the width in characters that columns need: all of the numbers, and ``WORDS_WIDTH`` of the words."""
    words = sum([each.width for each in columns if each.filled.column.wraps])
    return MARGIN + len(columns) - 1 + sum([each.width for each in columns]) - words + min(words, WORDS_WIDTH)


def print_columns(console: Console, title: str, columns: Sequence[Drawn], width: int) -> None:
    """Print a table of these columns, at least one, ``width`` characters wide."""
    gap = 1 if width - MARGIN - sum([each.width + 1 for each in columns]) + 1 >= len(columns) else 0
    table = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0), title=Text(printable(title)), title_justify="left"
    )
    for each in columns:
        table.add_column(Text(each.header), overflow="fold", no_wrap=not each.filled.column.wraps)
    for row in zip(*[each.cells for each in columns], strict=True):
        table.add_row(*row)
    own, console.width = console.width, width
    console.print(table)
    console.width = own


def markdown_text(run: RunResult, names: Sequence[str] | None = None) -> str:
    """Return title, table, closing sentences and footnotes as Markdown that GitHub and Reddit render alike.

    ``names``: of columns.
    """
    table = table_of(run, names)
    lines = [f"**{escaped(table.title)}**", "", *markdown_lines(table.columns), "", escaped(verdict(run)), ""]
    lines += [f"- {escaped(note)}" for note in [*table.notes, *table.legend_of(table.columns)]]
    return "\n".join([*lines, ""])


def markdown_lines(columns: Sequence[Filled]) -> list[str]:
    """Return the lines of a Markdown table; the best of a column is bold."""
    rows = [
        [escaped(each.column.title) for each in columns],
        [":--" if each.column.wraps else "--:" for each in columns],
    ]
    for cells in zip(*(each.cells for each in columns), strict=True):
        texts = [(escaped(cell.shown + cell.marks), cell) for cell in cells]
        rows.append([(f"**{text}**" if cell.is_best else text) + cell.plus_minus for text, cell in texts])
    return [f"| {' | '.join(row)} |" for row in rows]


def escaped(words: str) -> str:
    """Return the words on one line, so that Markdown shows them unchanged."""
    return MARKUP.sub(r"\\\1", printable(" ".join(words.split())))


def csv_text(run: RunResult, fields: Sequence[str] | None = None) -> str:
    """Return these fields of every model as CSV; None: all that hold one value, and the notes.

    With several texts there is a line for each text and model, which begins with the text's name; a text that failed
    has one line, with its error if all fields are requested.  Text has no control characters, and begins with an
    apostrophe if a spreadsheet would run it.
    """
    rows: list[dict[str, Any]] = []
    for text in run.texts:
        own = [(values_of(model, fields), "; ".join(model.notes)) for model in text.models]
        rows += [{"text": text.name, **values, "notes": notes} for values, notes in own]
        rows += [{"text": text.name, "error": text.error}] if text.error else []
    names = list(next(row for row in rows if "label" in row))[1:] if fields is None else fields
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*["text"] * (len(run.texts) > 1), *names], extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        words = {name: printable(value) for name, value in row.items() if isinstance(value, str)}
        formulas = {name: f"'{shown}" for name, shown in words.items() if row[name].startswith(FORMULAS)}
        writer.writerow(row | words | formulas)
    return stream.getvalue()
