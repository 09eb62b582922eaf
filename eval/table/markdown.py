"""The table as Markdown for posting: GitHub and Reddit render it alike; every column, what was found, and the footnotes
as a list."""

from __future__ import annotations

import re
from collections.abc import Sequence

from compare_q.backends.common.messages import printable
from compare_q.eval.results import RunResult
from compare_q.eval.table.columns import Cell, Filled, timing_columns
from compare_q.eval.table.registry import WORDS
from compare_q.eval.table.tables import tables_of
from compare_q.eval.table.verdict import verdict

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~^&])")
"""Letters that GitHub or Reddit would read as markup in the middle of a line (^: superscript)."""


def markdown_text(
    results: RunResult, names: Sequence[str] | None = None, *, by_text: bool = False, timing: bool = False
) -> str:
    """Title, table (of the columns of these names) and footnotes; ``by_text``: of several texts a table each, below
    its name; with ``timing`` also where the seconds went."""
    lines: list[str] = []
    found = tables_of(results, names, by_text=by_text)
    for table in found:
        lines += [f"### {escaped(table.heading)}", ""] if table.heading else []
        if table.error:
            lines += [f"failed: {escaped(table.error)}", ""]
        else:
            lines += [f"**{escaped(table.title)}**", "", *table_lines(table.columns), ""]
            lines += [escaped(verdict(results)), ""] if len(found) == 1 else []
            lines += [*(f"- {escaped(note)}" for note in [*table.notes, *table.legend_of(table.columns)]), ""]
    lines += [*table_lines(timing_columns(results)), ""] if timing else []
    return "\n".join(lines if len(found) == 1 else [*lines, escaped(verdict(results)), ""])


def table_lines(found: Sequence[Filled]) -> list[str]:
    """The lines of a table of these columns, of which there is at least one."""
    return [
        markdown_row([escaped(each.column.title) for each in found]),
        markdown_row([":--" if each.column.name in WORDS else "--:" for each in found]),
        *(markdown_row([markdown_cell(each, i) for each in found]) for i in range(len(found[0].cells))),
    ]


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
