"""The processes of a test, found by their environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MODULE = b"compare_q.backends.worker.engine_process"
"""The module that an engine process runs."""


def processes_of(cache: Path) -> list[int]:
    """Return the process ids of engine processes and workers of runs that use this cache, in
    ascending order.
    """
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if MODULE in words and str(cache).encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def workers_of(cache: Path) -> list[int]:
    """Return the process ids of the workers that an engine process of such runs has forked."""
    found = processes_of(cache)
    return [number for number in found if parent_of(number) in found]


def parent_of(number: int) -> int | None:
    """Return the id of a process's parent; None if the process does not exist."""
    with suppress(OSError):
        return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def runs(number: int) -> bool:
    """True if a process runs; False for a process that has ended but was not waited for."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until(true: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait until ``true()`` is true; AssertionError after ``seconds``."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
