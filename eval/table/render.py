"""The table of a run as text: in a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ...backends.common.message_text import printable
from ..common.terminal import say
from ..results import RunResult
from . import layout, precision_sentences
from .columns import fields_of, values_of
from .findings import verdict
from .tables import Filled, Table, table_of

NOTES = "what the columns and marks mean: --notes"
ERRORS = "±: one standard error for other texts like this one"
OF_PPL = "; rows share most of the error of PPL, so that KLD and differences of rows (--pairs) are known far better"
MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~^&])")
"""Characters that GitHub or Reddit would read as markup in the middle of a line (^: superscript).
"""
FORMULAS = tuple("=+-@\t\r＝＋－＠")
"""First characters of a text that spreadsheets run; the last four are the full-width signs."""


def show(
    run: RunResult, console: Console, names: Sequence[str] | None = None, *, notes: bool = False
) -> None:
    """Print the table with as many columns as fit, and its notes.

    ``names``: of columns, which are all printed; ``notes``: also print the meanings of columns and
    marks.
    """
    table = table_of(run, names)
    columns, left_out = layout.fitting(table, console.width)
    layout.print_columns(console, table.title, columns)
    say(*layout.left_out_line(table, left_out, console.width), *table.notes, console=console)
    if not notes:
        say(*errors_in_words(columns), NOTES, console=console)
        return
    filled = [each.filled for each in columns]
    meanings = [f"{each.column.title}: {each.column.note}" for each in filled]
    say("", *meanings, *table.legend_of(filled), console=console)


def errors_in_words(columns: Sequence[layout.Drawn]) -> list[str]:
    """Return a line on the errors in the columns; none if they have no errors."""
    with_errors = [
        each.filled.column.name for each in columns if any(cell.error for cell in each.filled.cells)
    ]
    if not with_errors:
        return []
    if "ppl" in with_errors and len(with_errors) > 1:
        return [ERRORS + OF_PPL]
    return [ERRORS]


def conclude(run: RunResult, console: Console) -> None:
    """Print the closing sentences of a run, and what to type for more precise KLDs."""
    say("", verdict(run), *precision_sentences.advice(run), console=console)


def markdown_text(run: RunResult, names: Sequence[str] | None = None) -> str:
    """Return title, table, closing sentences and footnotes as Markdown that GitHub and Reddit
    render alike.

    ``names``: of columns.
    """
    table = table_of(run, names)
    lines = [
        f"**{escaped(table.title)}**",
        "",
        *markdown_lines(table.columns),
        "",
        escaped(verdict(run)),
        "",
    ]
    return "\n".join([*lines, *note_lines(table), ""])


def note_lines(table: Table) -> list[str]:
    """Return the footnotes and the meanings of marks as lines of a Markdown list."""
    return [f"- {escaped(note)}" for note in [*table.notes, *table.legend_of(table.columns)]]


def markdown_lines(columns: Sequence[Filled]) -> list[str]:
    """Return the lines of a Markdown table; the best of a column is bold."""
    rows = [
        [escaped(each.column.title) for each in columns],
        [":--" if each.column.wraps else "--:" for each in columns],
    ]
    for cells in zip(*(each.cells for each in columns), strict=True):
        texts = [(escaped(cell.shown + cell.marks), cell) for cell in cells]
        rows.append(
            [(f"**{text}**" if cell.is_best else text) + cell.plus_minus for text, cell in texts]
        )
    return [f"| {' | '.join(row)} |" for row in rows]


def escaped(words: str) -> str:
    """Return the words on one line, so that Markdown shows them unchanged."""
    return MARKUP.sub(r"\\\1", printable(" ".join(words.split())))


def csv_text(run: RunResult, names: Sequence[str] | None = None) -> str:
    """Return the columns of these names, with their errors, as CSV; None: all fields with one
    value, and the notes.

    Text has no control characters, and begins with an apostrophe if a spreadsheet would run it.
    """
    rows: list[dict[str, Any]] = []
    for model in run.models:
        rows.append({**values_of(model, names), "notes": "; ".join(model.notes)})
    fields = list(rows[0]) if names is None else fields_of(names)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fields, extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        words = {name: printable(value) for name, value in row.items() if isinstance(value, str)}
        formulas = {
            name: f"'{shown}" for name, shown in words.items() if row[name].startswith(FORMULAS)
        }
        writer.writerow(row | words | formulas)
    return stream.getvalue()
