"""The table as Markdown for posting: GitHub and Reddit render it alike; every column, and the footnotes as a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from backends.common.messages import printable
from eval.common.files import replacing
from eval.results.run_result import RunResult
from eval.table.columns import Filled, column_notes, table_columns
from eval.table.footnotes import footnotes
from eval.table.registry import WORDS
from eval.table.timing import HEADERS, timing_rows

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~^&])")
"""Letters that GitHub or Reddit would read as markup in the middle of a line (^: superscript)."""


def markdown_text(run: RunResult, names: Sequence[str] | None = None, *, timing: bool = False) -> str:
    """Subtitle, table (of the columns of these names) and footnotes; with ``timing`` also where the seconds went."""
    found = table_columns(run, names)
    lines = [
        f"**{escaped(run.subtitle)}**",
        "",
        *table_lines(found),
    ]
    notes = [*footnotes(run), *column_notes(run, [each.column.name for each in found])]
    lines += ["", *(f"- {escaped(note)}" for note in notes), ""]
    if timing:
        lines += [*timing_lines(HEADERS, timing_rows(run)), ""]
    return "\n".join(lines)


def table_lines(found: Sequence[Filled]) -> list[str]:
    """The lines of a table of these columns, of which there is at least one."""
    return [
        markdown_row([escaped(each.column.title) for each in found]),
        markdown_row([":--" if each.column.name in WORDS else "--:" for each in found]),
        *(markdown_row([markdown_cell(each, i) for each in found]) for i in range(len(found[0].cells))),
    ]


def timing_lines(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of where seconds went, whose columns of words are ``label`` and ``text``."""
    below = [":--" if header in ("label", "text") else "--:" for header in headers]
    return [markdown_row(list(headers)), markdown_row(below), *(markdown_row(list(map(escaped, row))) for row in rows)]


def markdown_row(cells: list[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def markdown_cell(found: Filled, i: int) -> str:
    """A number with its error; the best in bold."""
    cell = found.cells[i]
    value = escaped(cell.shown + cell.marks)
    return (f"**{value}**" if cell.is_best else value) + (f" ± {cell.error}" if cell.error else "")


def escaped(words: str) -> str:
    """The words on one line, so that they render unchanged."""
    return SPECIAL.sub(r"\\\1", printable(" ".join(words.split())))


def write(run: RunResult, file: Path, names: Sequence[str] | None = None, *, timing: bool = False) -> None:
    """Write the table atomically."""
    with replacing(file) as part:
        part.write_text(markdown_text(run, names, timing=timing), encoding="utf-8")
