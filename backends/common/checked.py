"""Files that carry their own checksum: JSON (a manifest, a line of a journal, the record of a session), and arrays.

Of JSON the last entry of the object is ``sha256``, the SHA-256 of all bytes before it; behind arrays (.npz, whose own
checksums leave out the arrays' names) stands a line with the same.  So every flipped bit is found, and anybody can read
the files.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.common import json_files

TAIL = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n')
TAIL_BYTES = 80
MARK, ARRAYS_TAIL_BYTES = b"\nsha256 ", 72
WRONG = "it does not have the checksum that it carries"


def dump(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    """An object of at least one entry, none of which is called ``sha256``, with its checksum; ends with a newline."""
    body = json.dumps(dict(value), indent=indent)[:-1].rstrip().encode()
    return body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def load(data: bytes) -> dict[str, Any]:
    """The object without its checksum; ValueError if it has none, or if any byte is another one."""
    tail = TAIL.fullmatch(data[-TAIL_BYTES:])
    if tail is None:
        raise ValueError("it has no checksum")
    if hashlib.sha256(data[:-TAIL_BYTES]).hexdigest().encode() != tail[1]:
        raise ValueError(WRONG)
    found = parse(data)
    del found["sha256"]
    return found


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object without a look at its checksum; ValueError for whatever else it may be."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is a JSON {type(found).__name__}, not an object")
    return found


def write_arrays(file: Path, **arrays: Any) -> None:
    """Arrays of any shape, or what numpy makes arrays of, with their checksum."""
    import numpy as np

    with file.open("w+b") as stream:
        np.savez(stream, **arrays)
        stream.seek(0)
        stream.write(MARK + hashlib.file_digest(stream, "sha256").hexdigest().encode())


def read_arrays(file: Path) -> dict[str, Any]:
    """What ``write_arrays`` wrote; ValueError if any byte is another one, InputError if there is no file to read."""
    import numpy as np

    with json_files.open_regular(file) as stream:
        body = os.fstat(stream.fileno()).st_size - ARRAYS_TAIL_BYTES
        if body < 0 or os.pread(stream.fileno(), len(MARK), body) != MARK:  # a file of terabytes is not read for that
            raise ValueError("it has no checksum")
        data = stream.read()
    if hashlib.sha256(memoryview(data)[:body]).hexdigest().encode() != data[body + len(MARK) :]:
        raise ValueError(WRONG)
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)
