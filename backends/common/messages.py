"""Helpers for error messages of one line, and for text that others wrote and that a terminal shows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, line separators, what turns the direction of text, and halves of surrogate pairs."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or an empty string where nothing is close; small letters and capitals are the same."""
    lowered = {each.lower(): each for each in known}
    close = [lowered[each] for each in difflib.get_close_matches(name.lower(), list(lowered), n=1)]
    return f" (did you mean {close[0]!r}?)" if close else ""


def printable(text: object) -> str:
    """The text on one line, every ``CONTROL`` written as Python writes it: an escape sequence cannot move the cursor,
    nor can a file name pass for a second line."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def unicode(text: str) -> str:
    """The text as JSON and pictures can hold it: a byte of a name that is not UTF-8 is written as Python writes it."""
    return text.encode(errors="backslashreplace").decode()


def shortened(text: str, limit: int = 200) -> str:
    """The text, cut at ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's text with all white space folded, cut at ``limit`` characters; its type where it has no text."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return shortened(text, limit)


def bytes_in_words(size: float) -> str:
    """A number of bytes, e.g. ``16.1 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def dtype_name(dtype: object) -> str:
    """``bfloat16`` for ``torch.bfloat16``; a word that is a name already comes back as it is."""
    return str(dtype).removeprefix("torch.")
