"""Write the table of a run: other folders still call the writers by these names."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ..common.terminal import say
from ..results import RunResult
from . import markdown, terminal_table
from .csv_text import csv_of_run as csv_text
from .findings import verdict
from .markdown import escaped, markdown_lines, note_lines
from .precision_sentences import advice
from .tables import table_of

__all__ = [
    "conclude",
    "csv_text",
    "escaped",
    "markdown_lines",
    "markdown_text",
    "note_lines",
    "show",
]


def show(
    run: RunResult, console: Console, names: Sequence[str] | None = None, *, notes: bool = False
) -> None:
    """Print the table with the columns of these names, and its notes."""
    terminal_table.show(table_of(run, names), console, notes=notes)


def conclude(run: RunResult, console: Console) -> None:
    """Print the closing sentences of a run, and what to type for more precise KLDs."""
    say("", verdict(run), *advice(run), console=console)


def markdown_text(run: RunResult, names: Sequence[str] | None = None) -> str:
    """Return the table with the columns of these names, the closing sentences and the notes."""
    return markdown.markdown_text(table_of(run, names))
