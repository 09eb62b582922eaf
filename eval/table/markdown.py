"""The table as Markdown for posting: GitHub and Reddit render it alike; every column, and the footnotes as a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from compare_q.backends.common.messages import printable
from compare_q.eval.common.files import replacing
from compare_q.eval.results.run_result import Results
from compare_q.eval.table.columns import Cell, Filled, blocks, column_notes, table_columns, timing_table, title_of
from compare_q.eval.table.footnotes import footnotes, notes_of_texts
from compare_q.eval.table.registry import WORDS

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~^&])")
"""Letters that GitHub or Reddit would read as markup in the middle of a line (^: superscript)."""


def markdown_text(
    results: Results, names: Sequence[str] | None = None, *, by_text: bool = False, timing: bool = False
) -> str:
    """Title, table (of the columns of these names) and footnotes; ``by_text``: of several texts a table each, below
    its name; with ``timing`` also where the seconds went."""
    several = len(results.texts) > 1
    lines: list[str] = []
    if several and not by_text:
        lines += text_lines(title_of(results), blocks(results, names).all, notes_of_texts(results))
    else:
        for text in results.texts:
            lines += [f"### {escaped(text.name)}", ""] if several else []
            if text.error:
                lines += [f"failed: {escaped(text.error)}", ""]
                continue
            shown = table_columns(text, names)
            columns = [each.column.name for each in shown]
            notes = [*footnotes(text, results.parts), *column_notes(text, columns)]
            lines += text_lines(text.subtitle, shown, notes)
    if timing:
        lines += [*timing_lines(*timing_table(results)), ""]
    return "\n".join(lines)


def text_lines(title: str, shown: Sequence[Filled], notes: Sequence[str]) -> list[str]:
    """The lines of a title, a table and its footnotes."""
    return [f"**{escaped(title)}**", "", *table_lines(shown), "", *(f"- {escaped(note)}" for note in notes), ""]


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


def plain_cell(cell: Cell) -> str:
    """A number with its marks and its error, without markup."""
    return cell.shown + cell.marks + (f" ± {cell.error}" if cell.error else "")


def escaped(words: str) -> str:
    """The words on one line, so that they render unchanged."""
    return SPECIAL.sub(r"\\\1", printable(" ".join(words.split())))


def write(
    results: Results, file: Path, names: Sequence[str] | None = None, *, by_text: bool = False, timing: bool = False
) -> None:
    """Write the table atomically."""
    with replacing(file) as part:
        part.write_text(markdown_text(results, names, by_text=by_text, timing=timing), encoding="utf-8")
