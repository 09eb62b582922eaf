"""Print lines of prose: broken between words on a terminal, whole into a file or pipe."""

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
    """Print each line, by default on standard output, without markup.

    A line is broken, at spaces only, if it goes to a terminal.
    """
    console = console or Console()
    for line in lines:
        text = printable(line)
        if console.is_terminal:
            text = broken(text, console.width)
        # With soft_wrap, rich itself does not break or crop the line.
        console.print(Text(text), soft_wrap=True)


def broken(line: str, width: int) -> str:
    """Return the line with a line break before each word that would end beyond ``width``.

    No word is broken.
    """
    indent = re.match(" *", line)[0] + INDENT  # type: ignore[index]
    lines = [""]
    for word in WORD.findall(line):
        if lines[-1].strip() and cell_len(lines[-1] + word) > width:
            lines.append(indent + word.lstrip(" "))
        else:
            lines[-1] += word
    return "\n".join(lines)
