"""What a worker can do before its model's turn: import the engine, and read the model's files into the page cache."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import backends
from backends.base import LoadRequest
from backends.common import machine
from backends.common.errors import ModelError

IMPORT_NICE, READ_NICE = 10, 19
"""Priorities: importing gets a tenth of a core that the model at work wants, reading what nobody wants."""
PIECE = 1 << 23
"""Bytes that are read at once."""
CHECKED = 1 << 28
"""Bytes between two looks at the memory."""
SHARE = 0.5
"""Of the memory that is available, this much may become page cache of files that nobody reads yet."""
RESERVE = 2 << 30
"""Bytes of available memory below which nothing more is read ahead."""


def import_engine(engine: str, request: LoadRequest) -> None:
    """Import what loading the model will import, at a low priority: the cores are those of the model that scores.

    ModelError if that has touched a GPU, which is not this worker's yet.  What cannot be imported, loading says better.
    """

    def work() -> None:
        stand_back(IMPORT_NICE)
        with suppress(Exception):
            backends.engine_class(engine).import_engine(request)

    thread = threading.Thread(target=work)  # a thread's low priority ends with it; a process's cannot be raised again
    thread.start()
    thread.join()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ModelError("importing its engine has touched a GPU")


class ReadAhead:
    """Reads files in a thread of low priority, so that loading them meets the page cache."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.n_read = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        if files:
            self.thread.start()

    def stop(self) -> None:
        """Read no more: the model is being loaded."""
        self.over.set()

    def _read(self) -> None:
        stand_back(READ_NICE)
        most = budget(machine.available_memory())
        piece = memoryview(bytearray(PIECE))
        checked = 0
        for file in self.files:
            with suppress(OSError), file.open("rb", buffering=0) as stream:
                while not self.over.is_set() and self.n_read < most and (count := stream.readinto(piece)):
                    self.n_read += count
                    if self.n_read - checked >= CHECKED:
                        checked, most = self.n_read, min(most, self.n_read + budget(machine.available_memory()))


def stand_back(nice: int) -> None:
    """Give this thread a lower priority, which also orders its I/O, where each thread has its own: on Linux."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def budget(available: int | None) -> int:
    """How many bytes may be read ahead with so many available; 0 where memory is short, or that is not known."""
    return 0 if available is None or available < RESERVE else int(SHARE * available)
