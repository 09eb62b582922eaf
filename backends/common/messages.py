"""Helpers for error messages of one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or an empty string where nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's text with all white space folded, cut at ``limit`` characters; its type where it has no text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}..."


def bytes_in_words(size: float) -> str:
    """A number of bytes, e.g. ``16.1 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
