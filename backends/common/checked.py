"""JSON that carries its own checksum: a manifest, a line of a journal, the record of a session.

The last entry of the object is ``sha256``, the SHA-256 of all bytes before it, so that every flipped bit is found, and
the file stays JSON that anybody can read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

TAIL = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n')
TAIL_BYTES = 80


def dump(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    """An object of at least one entry, none of which is called ``sha256``, with its checksum; ends with a newline."""
    body = json.dumps(dict(value), indent=indent)[:-1].rstrip().encode()
    return body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def is_checked(data: bytes) -> bool:
    """Whether these bytes end with a checksum, right or wrong."""
    return TAIL.fullmatch(data[-TAIL_BYTES:]) is not None


def load(data: bytes) -> dict[str, Any]:
    """The object without its checksum; ValueError if it has none, or if any byte is another one."""
    tail = TAIL.fullmatch(data[-TAIL_BYTES:])
    if tail is None:
        raise ValueError("it has no checksum")
    if hashlib.sha256(data[:-TAIL_BYTES]).hexdigest().encode() != tail[1]:
        raise ValueError("it does not have the checksum that it carries")
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
