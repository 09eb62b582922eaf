"""Values of flags: functions that convert a word of the command line.

Each returns the value of a word, or raises an InputError that quotes the word.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from pydantic import ByteSize, TypeAdapter

from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest
from ..plots import measures
from ..table import columns
from ..table.memory_fit import Fit
from ..where import parts, recipe
from ..where.recipe import Target

SIZE = r"\s*\d{0,15}\.?\d{1,15}\s*([kmgtpe]i?b?|b)\s*"
"""A number of bytes with its unit.  Without a unit it is refused: 20 for 20 GB would empty the
cache."""
MEMORY_AND_CONTEXT = r"\s*(\d{0,6}\.?\d{1,6}\s*[mgt]i?b)\s*@\s*(\d+k?)\s*"
"""The value of ``--fit``: two groups."""


def match_of(pattern: str, word: str, expected: str) -> re.Match[str]:
    """Return the match of a whole word, in any case; InputError that states what was expected."""
    match = re.fullmatch(pattern, word, re.IGNORECASE)
    if match is None:
        raise InputError(f"{word!r}: expected {expected}")
    return match


def check_not_empty(word: str) -> None:
    """InputError for a word without characters, as of an unset shell variable.

    As a path it would be the working directory.
    """
    if not word.strip():
        raise InputError("is empty; give it a value")


def text(word: str) -> str:
    """Return a word that is not empty."""
    check_not_empty(word)
    return word


def path(word: str) -> Path:
    """Return a path; InputError for ``-``, which names standard streams in other programs."""
    check_not_empty(word)
    if word == "-":
        raise InputError("- does not name a file; use /dev/stdout or /dev/stdin")
    return Path(word)


def separated(word: str) -> tuple[str, ...]:
    """Return names with commas between; without names, an empty tuple."""
    names = []
    for part in word.split(","):
        name = part.strip()
        if name:
            names.append(name)
    return tuple(names)


def names(word: str) -> tuple[str, ...]:
    """Return names with commas between, from a word that is not empty."""
    check_not_empty(word)
    return separated(word)


def windows(word: str) -> int:
    """``-r``: a number of windows, 0 for ``all``."""
    # Python's int() reads 4,300 digits at most.
    match = match_of(r"(\d{1,4300})|all", word, "a number of windows, or all")
    if match[1] is None:
        return 0
    return int(match[1])


def count(word: str) -> int:
    """A whole number from 1 to 999,999,999."""
    match = match_of(r"0*([1-9]\d{0,8})", word, "a whole number from 1 to 999999999")
    return int(match[1])


def size(word: str) -> int:
    """``--cache-limit``: a number of bytes."""
    match = match_of(SIZE, word, "a size with a unit, for example 20GB or 500MiB")
    return TypeAdapter(ByteSize).validate_python(match[0])


def seconds(word: str) -> float:
    """``--deadline``: a positive number."""
    number = math.nan
    with suppress(ValueError):
        number = float(word)
    # False for NaN and for infinity.
    if 0 < number <= sys.float_info.max:
        return number
    raise InputError(f"{word!r}: expected a positive number of seconds")


def margin(word: str) -> float:
    """``--margin``: 0.01 for ``1%``."""
    share = math.nan
    if word.endswith("%"):
        with suppress(ValueError):
            share = float(word[:-1]) / 100
    # False for NaN.
    if 0 < share < 1:
        return share
    raise InputError(f"{word!r}: expected a percentage above 0 and below 100, such as 1%")


def parts_pattern(word: str) -> str:
    """``--by``: a word, or a regular expression."""
    check_not_empty(word)
    parts.check_pattern(word)
    return word


def recipe_target(word: str) -> Target:
    """``--recipe``: kld=NATS or bpw=BITS."""
    check_not_empty(word)
    return recipe.target_of(word)


def keep_bits(word: str) -> int:
    """``--keep-bits``: 16 or 8."""
    return int(one_of([str(recipe.FULL_BITS), str(recipe.FEWER_BITS)])(word))


def limit(word: str) -> float:
    """``--max_x``, ``--max_y``: any number."""
    try:
        return float(word)
    except ValueError:
        raise InputError(f"invalid float value: {word!r}") from None


def python_of_engine(word: str) -> tuple[str, str]:
    """``--python``: an engine and its Python."""
    match = match_of(r"([^=]+)=(.+)", word, "ENGINE=PYTHON")
    return match[1], match[2]


def fit(word: str) -> Fit:
    """``--fit``: a size of memory, and the column of the memory for a context."""
    match = match_of(MEMORY_AND_CONTEXT, word, "MEMORY@CONTEXT, such as 24GB@32k")
    memory = size(match[1])
    column = columns.column_of(f"memory:{match[2].lower()}")
    return Fit(memory, column, word.strip())


def column_names(word: str) -> tuple[str, ...]:
    """``--columns``: names of columns with commas between."""
    return columns.column_names(separated(word))


def sort_column(word: str) -> str:
    """``--sort``: the name of a column."""
    columns.column_of(word)
    return word


def x_axis(word: str) -> str:
    """``--x-axis``: a word of ``measures.size_of``."""
    measures.size_of(word)
    return word


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """Return a function that accepts only these words."""

    def choice(word: str) -> str:
        if word not in choices:
            raise InputError(f"{word!r} is none of {', '.join(choices)}{nearest(word, choices)}")
        return word

    return choice
