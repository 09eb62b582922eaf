"""The help of a command: its usage, and its flags under their headings."""

from __future__ import annotations

import shutil
import textwrap

from .flag_table import COMMANDS, FLAGS, Flag

ARGUMENTS = {
    "show": " FILE ...",
    "flips": " REF NEW ...",
    "where": " REFERENCE QUANTIZED",
    "cache": "",
    "engines": "",
    "windows": " [MODEL ...] -o FILE",
}
"""The arguments in a command's usage, except models."""
EPILOG = "In long flags - and _ are the same. docs/specs.md says more about each flag."
MARGIN = 2
"""Columns before a flag, between a flag and its help, and after the text."""
HELP_COLUMN = 28
"""Column at which the help of flags begins; further left if all flags are shorter."""
NARROWEST = 11
"""Columns that a text has in the narrowest terminal."""


def usage_of(command: str) -> str:
    """Return a command with its arguments, in one line."""
    return f"compare-q {command}{ARGUMENTS.get(command, ' MODEL ...')} [flags]"


def help_of(command: str) -> str:
    """Return the help of a command for the width of this terminal."""
    width = shutil.get_terminal_size().columns - MARGIN
    groups: dict[str, list[Flag]] = {}
    longest = 0
    for heading, flags in FLAGS.items():
        groups[heading] = [flag for flag in flags if command in flag.commands]
        for flag in groups[heading]:
            longest = max(longest, len(title_of(flag)))
    # In a narrow terminal the help begins further left, so that 20 columns remain for it.
    furthest = min(HELP_COLUMN, max(width - 20, 2 * MARGIN))
    column = min(MARGIN + longest + MARGIN, furthest)
    sections = [
        f"usage: {usage_of(command)}",
        paragraph(f"{COMMANDS[command].capitalize()}.", width),
    ]
    for heading, group in groups.items():
        if group:
            lines = [f"{heading}:"]
            for flag in group:
                lines += lines_of(flag, column, width)
            sections.append("\n".join(lines))
    sections.append(paragraph(EPILOG, width))
    return "\n\n".join(sections) + "\n"


def title_of(flag: Flag) -> str:
    """Return the names of a flag and its values: ``-r, --rows N``."""
    if flag.kind == "arguments":
        return flag.metavar[0]
    title = " ".join([", ".join(flag.names), *flag.metavar])
    if flag.kind == "values":
        title += " ..."
    return title


def lines_of(flag: Flag, column: int, width: int) -> list[str]:
    """Return the lines of a flag and its help, which begins at a column.

    The help begins on the next line if the flag is longer.
    """
    title = " " * MARGIN + title_of(flag)
    indent = " " * column
    texts = textwrap.wrap(flag.help, max(width - column, NARROWEST))
    if len(title) + MARGIN <= column:
        lines = [title.ljust(column) + texts[0]]
        remaining = texts[1:]
    else:
        lines = [title]
        remaining = texts
    for text in remaining:
        lines.append(indent + text)
    return lines


def paragraph(text: str, width: int) -> str:
    """Return a text in lines of this width."""
    return textwrap.fill(text, max(width, NARROWEST))
