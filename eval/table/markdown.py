"""A table as Markdown that GitHub and Reddit render alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...backends.common.message_text import printable
from .tables import Cell, FilledColumn, Table

MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~^&])")
"""Characters that GitHub or Reddit would read as markup in the middle of a line (^: superscript).
"""


def markdown_text(table: Table) -> str:
    """Return title, table, closing sentences and footnotes."""
    lines = [f"**{escaped(table.title)}**", ""]
    lines += markdown_lines(table.columns)
    lines.append("")
    for sentence in table.finding:
        lines.append(escaped(sentence))
    lines.append("")
    lines += note_lines(table)
    return "\n".join(lines) + "\n"


def markdown_lines(columns: Sequence[FilledColumn]) -> list[str]:
    """Return the lines of a Markdown table; the best of a column is bold."""
    titles = []
    alignments = []
    for filled in columns:
        titles.append(escaped(filled.column.title))
        if filled.column.wraps:
            alignments.append(":--")
        else:
            alignments.append("--:")
    lines = [markdown_row(titles), markdown_row(alignments)]
    for cells in zip(*[filled.cells for filled in columns], strict=True):
        lines.append(markdown_row([markdown_cell(cell) for cell in cells]))
    return lines


def markdown_row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def markdown_cell(cell: Cell) -> str:
    """Return a cell with its marks and error."""
    text = escaped(cell.shown + cell.marks)
    if cell.is_best:
        text = f"**{text}**"
    return text + cell.plus_minus


def note_lines(table: Table) -> list[str]:
    """Return the footnotes and the meanings of marks as lines of a Markdown list."""
    lines = []
    for note in (*table.notes, *table.legend_of(table.columns)):
        lines.append(f"- {escaped(note)}")
    return lines


def escaped(words: str) -> str:
    """Return the words on one line, so that Markdown shows them unchanged."""
    # A line break would end the row of a table.
    line = " ".join(words.split())
    return MARKUP.sub(r"\\\1", printable(line))
