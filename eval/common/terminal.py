"""Lines of prose for people to read: a terminal gets them broken between words, a file or pipe gets
them whole.
"""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ...backends.common.message_text import printable

WORD = re.compile(r" *[^ ]+(?: ±(?: [^ ]+)?)?(?: (?:%|(?:s|nats|bpw|[kMG]i?B)\b)[^ ]*)?")
"""A word and the spaces before it; a number has its error and its unit."""
INDENT = "  "
"""Before the further lines of a broken line, after the line's own indent."""


def say(*lines: str, console: Console | None = None) -> None:
    """Print each line, by default on standard output, without markup; only spaces become line
    breaks.

    A line is broken only if it goes to a terminal.
    """
    console = console or Console()
    for line in map(printable, lines):
        console.print(
            Text(broken(line, console.width) if console.is_terminal else line), soft_wrap=True
        )


def broken(line: str, width: int) -> str:
    """Return the line with a line break before each word that would end beyond ``width``; no word
    is broken.
    """
    indent = re.match(" *", line)[0] + INDENT  # type: ignore[index]
    lines = [""]
    for word in WORD.findall(line):
        if lines[-1].strip() and cell_len(lines[-1] + word) > width:
            lines.append(indent + word.lstrip(" "))
        else:
            lines[-1] += word
    return "\n".join(lines)
