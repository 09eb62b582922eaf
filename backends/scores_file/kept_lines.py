"""Read a file of log-probabilities once per process, although several parts of a run need it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..common import storage

Line = TypeVar("Line")
LARGEST_KEPT_BYTES = 1 << 29
"""Bytes of the largest file whose lines are kept: they take about half as much memory."""
MOST_KEPT = 2
"""Number of files whose lines are kept."""


def lines_of(read: Callable[[Path], Iterator[Line]], file: Path) -> Iterable[Line]:
    """Return what ``read`` yields of a file, from memory if the file has not changed since.

    The lines must not be changed: others may have them.  The lines of large files, and of files
    that have just been written, are read each time.
    """
    state = storage.file_state(file)
    if state is None:
        return read(file)
    _, size, _ = state
    if size > LARGEST_KEPT_BYTES:
        return read(file)
    return kept_lines(read, file, state)


@functools.lru_cache(maxsize=MOST_KEPT)
def kept_lines(
    read: Callable[[Path], Iterator[Any]], file: Path, _state: tuple[int, int, int]
) -> Sequence[Any]:
    """Return all lines of a file, which are kept as long as the file has this state."""
    return tuple(read(file))
