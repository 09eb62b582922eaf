"""Read files of unknown origin: regular files only, of limited size, with checked JSON.

Every fault is an InputError in one line that begins with the file's name.  Three kinds of input are
refused: pipes and devices; JSON that Python cannot read or pass on (nested a thousand deep, an
integer of 5,000 digits, a lone surrogate); and JSON that readers understand differently (a
duplicate key, NaN).
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import Any

from .errors import InputError
from .message_text import bytes_in_words, one_line, printable, shortened

LARGEST = 100_000_000
"""Largest JSON file and report, in bytes; also the largest header that safetensors' own reader
accepts."""
DEEPEST = 64
"""Largest number of nested brackets."""
TOO_DEEP = f"brackets are nested more than {DEEPEST} deep"
LARGEST_INTEGER = 10**40
"""Largest absolute value of an integer; model configs use up to 10 ** 30, which means "no limit".
"""
SURROGATE = re.compile("[\ud800-\udfff]")
BYTE_ORDER_MARK = "\ufeff"
exists, is_file, is_folder = os.path.exists, os.path.isfile, os.path.isdir
"""Unlike Path's methods, these return False for an invalid path and for a path without permission.
"""


def expanded(name: str) -> Path:
    """The path with ``~`` and ``~user`` replaced; InputError for a user whose home folder is not
    known.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        user = Path(name).parts[0]
        raise InputError(
            f"{name}: the home folder of {user} is not known; write the path out"
        ) from None


def check_unicode(key: str, *paths: Path | str | None) -> None:
    """Raise InputError, beginning with ``key``, for a path that JSON cannot hold."""
    for path in paths:
        if SURROGATE.search(str(path)):
            raise InputError(f"{key}: {printable(path)}: has bytes that are not UTF-8; rename it")


def _open_without_waiting(name: str, flags: int) -> int:
    """Open a file; a named pipe without a writer is opened at once, and never becomes the terminal."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)


def open_regular(file: Path) -> BufferedReader:
    """A regular file, opened for reading bytes; a pipe or a device is refused without waiting for
    it.
    """
    try:
        stream = open(file, "rb", opener=_open_without_waiting)  # noqa: SIM115
    except FileNotFoundError:
        raise InputError(f"{printable(file)}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise InputError(f"{printable(file)}: cannot be read: {reason(error)}") from None
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise InputError(f"{printable(file)}: cannot be read: it is a pipe or a device")
    return stream


def check_no_pipes(folder: Path) -> None:
    """InputError if a folder holds a pipe or a device, or a link to one: other libraries would wait
    for it forever.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # the code that reads the folder reports the error
        return
    for entry in entries:
        if exists(entry.path) and not (is_file(entry.path) or is_folder(entry.path)):
            raise InputError(f"{printable(entry.path)}: cannot be read: it is a pipe or a device")


def reason(error: Exception) -> str:
    """Return the reason that the system gives for an error, without the name of the file."""
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)


def read_bytes(file: Path, largest: int = LARGEST) -> bytes:
    """The content of a regular file of at most ``largest`` bytes."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            found, most = bytes_in_words(size), bytes_in_words(largest)
            raise InputError(
                f"{printable(file)}: too large: {found}, and at most {most} are read of such a file"
            )
        try:
            return stream.read(size)
        except OSError as error:
            raise InputError(f"{printable(file)}: cannot be read: {reason(error)}") from None


def read_json(file: Path, *, strict: bool = True) -> Any:
    """The JSON in a file; ``strict`` as for ``parsed``."""
    return parsed(read_bytes(file), printable(file), strict=strict)


def read_object(file: Path, *, strict: bool = True) -> dict[str, Any]:
    """The JSON object in a file; ``strict`` as for ``parsed``."""
    found = read_json(file, strict=strict)
    if not isinstance(found, dict):
        raise InputError(f"{printable(file)}: must hold a JSON object")
    return found


def parsed(content: bytes, where: str, *, strict: bool = True) -> Any:
    """JSON from UTF-8; InputError that begins with ``where``.

    ``strict`` refuses NaN, infinities and duplicate keys.  Model configs have them: Mamba 2's have
    ``"time_step_limit": [0.0, Infinity]``, and Transformers takes the last of two keys.
    """
    try:
        found = json.loads(content.decode(), object_pairs_hook=object_of if strict else None)
        check_values(found, strict=strict)
        return found
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: "
        raise InputError(
            f"{where}: {place if error.doc.strip() else ''}not valid JSON: {fault(error)}"
        ) from None
    except UnicodeDecodeError as error:
        bad = f"{error.reason} at byte {error.start:,}"
        raise InputError(
            f"{where}: cannot be read: not UTF-8 text: {bad}; save it as UTF-8"
        ) from None
    except RecursionError:
        raise InputError(f"{where}: {TOO_DEEP}") from None
    except ValueError:  # Python converts at most 4,300 digits to an integer
        raise InputError(f"{where}: an integer of thousands of digits") from None


def fault(error: json.JSONDecodeError) -> str:
    """Return the fault in invalid JSON: the name of a frequent mistake, or the expected and the
    actual characters.
    """
    at = error.pos + error.doc.startswith(",", error.pos)  # Python 3.13 points at the comma
    rest = error.doc[at:].lstrip()
    if not error.doc.strip():
        return "there is nothing in it"
    if not rest:
        return "it ends too early"
    if rest[0] == BYTE_ORDER_MARK:
        return "a byte order mark; save it as UTF-8 without one"
    if error.doc[:at].rstrip().endswith(",") and rest[0] in "}]":
        return "a comma with nothing after it"
    if rest.startswith(("//", "/*", "#")):
        return "a comment, which JSON does not have"
    there = re.match(r"\w+|.", rest)
    return (
        f"{error.msg}, not {there[0]}" if there and error.msg.startswith("Expecting") else error.msg
    )


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs; InputError for a duplicate key, because json would keep only
    the last value.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise InputError(f"{shortened(printable(twice))}: stands twice in one object")
    return found


def check_values(value: Any, *, strict: bool = True, depth: int = 0, key: str = "") -> None:
    """Raise InputError for JSON that is too deep, with too large integers, lone surrogates or, if
    ``strict``, NaN.

    ``key``: the key of the value, or of the list that contains it.
    """
    if isinstance(value, dict | list):
        if depth == DEEPEST:
            raise InputError(TOO_DEEP)
        for name, each in (
            value.items() if isinstance(value, dict) else ((key, each) for each in value)
        ):
            check_values(name, strict=strict, depth=depth + 1)
            check_values(each, strict=strict, depth=depth + 1, key=name)
    elif isinstance(value, str):
        if not value.isascii() and SURROGATE.search(value):
            raise InputError("no Unicode text: half of a surrogate pair")
    elif isinstance(value, float):
        if strict and not math.isfinite(value):
            raise InputError(
                f"{f'{shortened(printable(key))}: ' if key else ''}{value} is not a number in JSON"
            )
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise InputError(f"an integer beyond {LARGEST_INTEGER:.0e}")
