"""Helpers for messages of one line, and for text of unknown origin that a terminal shows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, line separators, characters that change the direction of text, lone surrogates."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or an empty string if no known name is close; case is ignored."""
    lowered = {each.lower(): each for each in known}
    close = [lowered[each] for each in difflib.get_close_matches(name.lower(), list(lowered), n=1)]
    return f" (did you mean {close[0]!r}?)" if close else ""


def printable(text: object) -> str:
    """The text on one line, each ``CONTROL`` escaped as in Python, so that it cannot move the cursor or add a line."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def unicode(text: str) -> str:
    """The text as valid Unicode for JSON and pictures: bytes of a name that are not UTF-8 are escaped."""
    return text.encode(errors="backslashreplace").decode()


def shortened(text: str, limit: int = 200) -> str:
    """The text, cut at ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's text with white space folded, cut at ``limit`` characters; its type if it has no text."""
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
    """``bfloat16`` for ``torch.bfloat16`` and for ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
