"""Lines of prose for people to read: a terminal gets them broken between words, a file or pipe gets them whole."""

from __future__ import annotations

import os
import re

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from compare_q.backends.common.messages import printable

INDENT = "  "
"""Before the further lines of a broken line, after the line's own indent."""


def say(*lines: str, console: Console | None = None) -> None:
    """Print each line, by default on standard output, without markup; only spaces become line breaks.

    A line is broken if it goes to a terminal, or if the user sets the variable COLUMNS.  GNU readline, which Python's
    prompt and pytest import, sets COLUMNS and LINES for the programs that they start.
    """
    console = console or Console()
    is_narrow = console.is_terminal or (os.environ.get("COLUMNS", "").isdigit() and "LINES" not in os.environ)
    for line in map(printable, lines):
        console.print(Text(broken(line, console.width) if is_narrow else line), soft_wrap=True)


def broken(line: str, width: int) -> str:
    """Return the line with a line break before each word that would end beyond ``width``; no word is broken."""
    indent = re.match(" *", line)[0] + INDENT  # type: ignore[index]
    lines = [""]
    for word in re.findall(r" *[^ ]+", line):
        if lines[-1].strip() and cell_len(lines[-1] + word) > width:
            lines.append(indent + word.lstrip(" "))
        else:
            lines[-1] += word
    return "\n".join(lines)
