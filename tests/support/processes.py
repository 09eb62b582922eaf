"""The processes of a test, found by their environment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def processes_of(cache: Path) -> list[int]:
    """Workers of the runs that use this cache, supervisors included, in the order of their numbers."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"backends.worker" in words and str(cache).encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def group_of(number: int) -> int | None:
    """The process group of a process; None if there is no such process."""
    with suppress(OSError):
        return os.getpgid(number)
    return None


def wait_until(true: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait for something to come true; AssertionError if it does not."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
