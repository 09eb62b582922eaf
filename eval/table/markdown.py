"""The table as Markdown for posting: GitHub and Reddit render it alike; every column, and the footnotes as a list."""

from __future__ import annotations

import re
from pathlib import Path

from backends.common.messages import printable
from eval.common.files import replacing
from eval.results.run_result import RunResult
from eval.table.columns import Cell, kernel_of, label_of, number_columns, possible_extras
from eval.table.footnotes import footnotes
from eval.table.timing import HEADERS, timing_rows

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~^&])")
"""Letters that GitHub or Reddit would read as markup in the middle of a line (^: superscript)."""


def markdown_text(run: RunResult, *, timing: bool = False) -> str:
    """Subtitle, table and footnotes; with ``timing`` also where the seconds went."""
    numbers = number_columns(run, possible_extras(run))
    headers = ["label", "kernel", *(column.header.replace("\n", " ").replace("- ", "-") for column in numbers)]
    lines = [
        f"**{escaped(run.subtitle)}**",
        "",
        markdown_row(headers),
        markdown_row([":--", ":--", *["--:"] * len(numbers)]),
    ]
    for i, model in enumerate(run.models):
        names = [escaped(label_of(model)), escaped(kernel_of(model))]
        lines.append(markdown_row([*names, *(markdown_cell(column.cells[i]) for column in numbers)]))
    lines += ["", *(f"- {escaped(note)}" for note in footnotes(run)), ""]
    if timing:
        lines += [markdown_row([*HEADERS]), markdown_row([":--", *["--:"] * (len(HEADERS) - 1)])]
        lines += [*(markdown_row(list(map(escaped, cells))) for cells in timing_rows(run)), ""]
    return "\n".join(lines)


def markdown_row(cells: list[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def markdown_cell(cell: Cell) -> str:
    """A number with its error; the best in bold."""
    value = escaped(cell.shown)
    return (f"**{value}**" if cell.is_best else value) + (f" ± {cell.error}" if cell.error else "")


def escaped(words: str) -> str:
    """The words on one line, so that they render unchanged."""
    return SPECIAL.sub(r"\\\1", printable(" ".join(words.split())))


def write(run: RunResult, file: Path, *, timing: bool = False) -> None:
    """Write the table atomically."""
    with replacing(file) as part:
        part.write_text(markdown_text(run, timing=timing), encoding="utf-8")
