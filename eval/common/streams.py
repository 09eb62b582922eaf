"""Standard streams of a command line: one that cannot be written, or that nobody reads, ends no run."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class Forgetful(io.FileIO):
    """A stream that forgets what cannot be written; ``error`` says why, but where only the reader has gone."""

    error = ""

    def write(self, data: Any) -> int:
        """Bytes written, or all of them where they are forgotten."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.error = self.error or error.strerror or str(error)
            return memoryview(data).nbytes


def opened(descriptor: int, encoding: str = "utf-8") -> io.TextIOWrapper:
    """Text for a descriptor; a name that is no text must not end a run, and so is escaped."""
    raw = Forgetful(descriptor, "w", closefd=descriptor > 2)
    by_line = descriptor != 1 or raw.isatty()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=by_line)


def make_safe() -> None:
    """Once, before files are opened, which else get the numbers of standard streams that are closed (``>&-``)."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = opened(1, sys.stdout.encoding if sys.stdout else "utf-8")
    sys.stderr = opened(2, sys.stderr.encoding if sys.stderr else "utf-8")


def lost() -> str:
    """Why not all that was printed on standard output has arrived there; empty if it has, or if nobody reads it."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, Forgetful) else ""
