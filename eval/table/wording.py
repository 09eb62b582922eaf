"""Lists, shares, ratios and the names of texts in words, for sentences and footnotes of a table."""

from __future__ import annotations

from collections.abc import Sequence

from ..results import RunResult
from .numbers import two_digits

MOST_NAMED_ROWS = 3
"""The largest number of rows that are all named.  Of more rows, the first ones are named, or the
best and the worst."""


def joined_words(words: Sequence[str]) -> str:
    """Return ``a, b and c``, from one word or more."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def first_words_and_count(words: Sequence[str]) -> str:
    """Return ``a, b and c``; of more than four the first three, and the number of the others."""
    # The fourth of four words is named instead of counted: no list ends in "1 more".
    if len(words) <= MOST_NAMED_ROWS + 1:
        return joined_words(words)
    number = len(words) - MOST_NAMED_ROWS
    return joined_words([*words[:MOST_NAMED_ROWS], f"{number} more"])


def share_in_words(share: float) -> str:
    """Return a share in percent with one decimal; only 1 is 100 %."""
    percent = f"{100 * share:.1f} %"
    if percent == "100.0 %" and share < 1:
        return "over 99.9 %"
    return percent


def precision_in_words(share: float) -> str:
    """Return a relative error in percent, with two significant digits."""
    return f"{two_digits(100 * share):g} %"


def ratio_in_words(ratio: float) -> str:
    """Return a ratio with two significant digits, or three near 1: 4.1, 170, 1.04."""
    if 1 <= ratio < 1.1:
        return f"{ratio:.3g}"
    return f"{two_digits(ratio):,g}"


def texts_of(run: RunResult) -> str:
    """Return "text", or "texts" if the run has several."""
    if len(run.texts) == 1:
        return "text"
    return "texts"


def possessive_of_texts(run: RunResult) -> str:
    """Return "text's", or "texts'" if the run has several."""
    if len(run.texts) == 1:
        return "text's"
    return "texts'"


def with_text_name(run: RunResult, name: str, note: str) -> str:
    """Return a note on one text, which begins with the text's name if the run has several."""
    if len(run.texts) > 1:
        return f"{name}: {note}"
    return note
