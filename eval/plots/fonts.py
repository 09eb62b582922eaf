"""Characters of labels that pictures cannot show: those that the font lacks, and control
characters.

Imports no matplotlib, because the command line uses it around all outputs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...backends.common.message_text import printable

MISSING = re.compile(r"Glyph (\d+) .*missing from ")
"""Matplotlib's warning about a character, which it gives once for each character and each label."""
MOST_SHOWN = 8
"""Largest number of missing characters that the line shows."""


@contextmanager
def one_line_on_missing(say: Callable[[str], object]) -> Iterator[None]:
    """Say in one line which characters the font lacks, instead of matplotlib's warnings; other
    warnings stay.
    """
    missing: dict[str, None] = {}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", MISSING.pattern)
            yield
    finally:
        for warning in caught:
            found = MISSING.match(str(warning.message))
            if found:
                missing[chr(int(found[1]))] = None
            else:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        if missing:
            say(in_words("".join(missing)))


def in_words(characters: str) -> str:
    """Return the line about characters that the font of pictures lacks."""
    shown = " ".join(printable(each) for each in characters[:MOST_SHOWN])
    if len(characters) > MOST_SHOWN:
        shown += f" and {len(characters) - MOST_SHOWN} more"
    return f"the font of the pictures lacks {shown}; a box is drawn for each of them"


def harmless(text: str) -> str:
    """Return the lines of a text with control characters escaped, which no SVG may hold."""
    return "\n".join(map(printable, text.split("\n")))
