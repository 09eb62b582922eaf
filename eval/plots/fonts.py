"""Characters of labels that pictures cannot show: missing in the font, or control characters.

Imports no matplotlib, because the command line uses it around all outputs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...backends.common.message_text import printable

MISSING_GLYPH = re.compile(r"Glyph (\d+) .*missing from ")
"""Matplotlib's warning about a character, which it gives once for each character and each label."""
MOST_CHARACTERS = 8
"""Largest number of missing characters that the line shows."""


@contextmanager
def one_line_on_missing(say: Callable[[str], object]) -> Iterator[None]:
    """Say in one line which characters the font lacks, instead of matplotlib's warnings.

    Other warnings stay.
    """
    # A dict, since it keeps the order.
    missing: dict[str, None] = {}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", MISSING_GLYPH.pattern)
            yield
    finally:
        for warning in caught:
            match = MISSING_GLYPH.match(str(warning.message))
            if match:
                missing[chr(int(match[1]))] = None
            else:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        if missing:
            say(missing_in_words("".join(missing)))


def missing_in_words(characters: str) -> str:
    """Return the line about characters that the font of pictures lacks."""
    names = " ".join(printable(character) for character in characters[:MOST_CHARACTERS])
    if len(characters) > MOST_CHARACTERS:
        names += f" and {len(characters) - MOST_CHARACTERS} more"
    return f"the font of the pictures lacks {names}; a box is drawn for each of them"


def harmless(text: str) -> str:
    """Return the lines of a text with control characters escaped, which no SVG may hold."""
    return "\n".join(printable(line) for line in text.split("\n"))
