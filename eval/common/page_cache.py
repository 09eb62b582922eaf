"""Read files into the system's page cache before a model is loaded from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ...backends.common import machine

LARGEST_SHARE = 0.5
"""Most of the available memory that one model's files may take.

Larger files might be dropped again before the model is loaded from them.
"""
CHUNK_BYTES = 8 << 20


def read_ahead(files: Sequence[Path], check: Callable[[], None]) -> None:
    """Read files, so that the next reader finds them in memory.

    ``check`` is called before each chunk, and raises an error that ends the reading.  Nothing is
    read if the available memory is too small, or unknown.  OSError for a file that cannot be read.
    """
    sizes = [file.stat().st_size for file in files]
    if sum(sizes) > LARGEST_SHARE * machine.available_bytes():
        return
    buffer = bytearray(CHUNK_BYTES)
    for file, size in zip(files, sizes, strict=True):
        with file.open("rb", buffering=0) as stream:
            for begin in range(0, size, CHUNK_BYTES):
                check()
                # The ends of a file, and of a chunk, may be in memory alone: the fingerprint of the
                # model has read the file's, and the system reads on after a chunk.
                middle = (begin + min(begin + CHUNK_BYTES, size)) // 2
                # Copying what is in memory would slow down a model that loads meanwhile.
                if not is_in_memory(stream.fileno(), middle):
                    os.preadv(stream.fileno(), [buffer], begin)


def is_in_memory(descriptor: int, position: int) -> bool:
    """Return True if a byte of an open file is in the page cache; False if that is not known."""
    try:
        os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
    except (OSError, AttributeError):
        # It is not, or this system or file system cannot tell.
        return False
    return True
