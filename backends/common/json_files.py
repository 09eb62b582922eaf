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

LARGEST_JSON_BYTES = 100_000_000
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
# Unlike Path's methods, these return False for an invalid path and for a path without permission.
exists = os.path.exists
is_file = os.path.isfile
is_folder = os.path.isdir


def expanded(name: str) -> Path:
    """Return the path with ``~`` and ``~user`` replaced; InputError for an unknown home folder."""
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
    """Open a file without waiting for the other end of a named pipe.

    A terminal does not become this process's controlling terminal.
    """
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)


def open_regular(file: Path) -> BufferedReader:
    """Open a regular file to read bytes; a pipe or a device is refused without waiting for it."""
    try:
        stream = open(file, "rb", opener=_open_without_waiting)  # noqa: SIM115
    except FileNotFoundError:
        raise InputError(f"{printable(file)}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise InputError(f"{printable(file)}: cannot be read: {reason(error)}") from None
    # The open file is checked, not its path, which may lead to another file by now.
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise InputError(f"{printable(file)}: cannot be read: it is a pipe or a device")
    return stream


def check_no_pipes(folder: Path) -> None:
    """InputError if a folder holds a pipe or a device, or a link to one.

    Other libraries would wait for it forever.
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
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)


def read_bytes(file: Path, largest: int = LARGEST_JSON_BYTES) -> bytes:
    """Return the content of a regular file of at most ``largest`` bytes."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise InputError(
                f"{printable(file)}: too large: {bytes_in_words(size)}, and at most "
                f"{bytes_in_words(largest)} are read of such a file"
            )
        # The file may grow: at most the checked size is read.
        try:
            return stream.read(size)
        except OSError as error:
            raise InputError(f"{printable(file)}: cannot be read: {reason(error)}") from None


def read_json(file: Path, *, strict: bool = True) -> Any:
    """Return the JSON in a file; ``strict`` as for ``parsed``."""
    return parsed(read_bytes(file), printable(file), strict=strict)


def read_object(file: Path, *, strict: bool = True) -> dict[str, Any]:
    """Return the JSON object in a file; ``strict`` as for ``parsed``."""
    value = read_json(file, strict=strict)
    if not isinstance(value, dict):
        raise InputError(f"{printable(file)}: must hold a JSON object")
    return value


def parsed(content: bytes, where: str, *, strict: bool = True) -> Any:
    """Return the value of JSON in UTF-8; InputError that begins with ``where``.

    ``strict`` refuses NaN, infinities and duplicate keys.  Model configs have them: Mamba 2's have
    ``"time_step_limit": [0.0, Infinity]``, and Transformers takes the last of two keys.
    """
    try:
        return value_of(content, where, strict=strict)
    except json.JSONDecodeError as error:
        place = ""
        if error.doc.strip():
            place = f"line {error.lineno}, column {error.colno}: "
        raise InputError(f"{where}: {place}not valid JSON: {fault(error)}") from None


def parsed_line(content: bytes, where: str, *, strict: bool = True) -> Any:
    """Return the value in one line of a file of JSON Lines, as ``parsed`` does.

    ``where`` ends with the number of the line: "FILE: line 3".
    """
    try:
        return value_of(content.rstrip(b"\r\n"), where, strict=strict)
    except json.JSONDecodeError as error:
        place = ""
        if error.doc.strip():
            place = f", column {error.colno}"
        in_words = fault(error, is_line=True)
        raise InputError(f"{where}{place}: not valid JSON: {in_words}") from None


def value_of(content: bytes, where: str, *, strict: bool) -> Any:
    """Return the value of JSON in UTF-8, as ``parsed`` does; JSONDecodeError for invalid JSON."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=object_of if strict else None)
        check_values(value, strict=strict)
        return value
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: cannot be read: not UTF-8 text: {error.reason} at byte {error.start:,}; "
            "save it as UTF-8"
        ) from None
    except RecursionError:
        raise InputError(f"{where}: {TOO_DEEP}") from None
    except ValueError:  # Python converts at most 4,300 digits to an integer
        raise InputError(f"{where}: an integer of thousands of digits") from None


def fault(error: json.JSONDecodeError, *, is_line: bool = False) -> str:
    """Return the fault in invalid JSON: a frequent mistake, or expected and actual characters.

    ``is_line``: the JSON is a line of a file of JSON Lines.
    """
    at = error.pos
    if error.doc.startswith(",", at):  # Python 3.13 points at the comma
        at += 1
    remainder = error.doc[at:].lstrip()
    if not error.doc.strip():
        return "there is nothing in it"
    if not remainder:
        return "it ends too early"
    if remainder[0] == BYTE_ORDER_MARK:
        return "a byte order mark; save it as UTF-8 without one"
    if error.doc[:at].rstrip().endswith(",") and remainder[0] in "}]":
        return "a comma with nothing after it"
    if remainder.startswith(("//", "/*", "#")):
        return "a comment, which JSON does not have"
    if error.msg == "Extra data" and is_line:
        return "a second value; write each value on a line of its own"
    if error.msg == "Extra data":
        return "a second value; this file must hold one, unlike files of JSON Lines"
    word = re.match(r"\w+|.", remainder)
    if word and error.msg.startswith("Expecting"):
        return f"{error.msg}, not {word[0]}"
    return error.msg


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs; InputError for a duplicate key.

    json would keep only the last value of the key.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise InputError(f"{shortened(printable(duplicate))}: stands twice in one object")
    return value


def check_values(value: Any, *, strict: bool = True, depth: int = 0, key: str = "") -> None:
    """Raise InputError for values in JSON that other programs cannot read.

    They are values nested too deep, large integers, lone surrogates and, if ``strict``, NaN and
    infinities.  ``key``: the key of the value, or of the list that contains it.
    """
    if isinstance(value, dict | list):
        if depth == DEEPEST:
            raise InputError(TOO_DEEP)
        if isinstance(value, dict):
            for name, item in value.items():
                check_values(name, strict=strict, depth=depth + 1)
                check_values(item, strict=strict, depth=depth + 1, key=name)
        else:
            for item in value:
                # Most items of a long list are numbers, and the call would take most of the time.
                if type(item) is float and math.isfinite(item):
                    continue
                if type(item) is int and -LARGEST_INTEGER <= item <= LARGEST_INTEGER:
                    continue
                check_values(item, strict=strict, depth=depth + 1, key=key)
    elif isinstance(value, str):
        # Most texts are ASCII, and isascii is much faster than the search.
        if not value.isascii() and SURROGATE.search(value):
            raise InputError("no Unicode text: half of a surrogate pair")
    elif isinstance(value, float):
        if strict and not math.isfinite(value):
            place = ""
            if key:
                place = f"{shortened(printable(key))}: "
            raise InputError(f"{place}{value} is not a number in JSON")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise InputError(f"an integer beyond {LARGEST_INTEGER:.0e}")
