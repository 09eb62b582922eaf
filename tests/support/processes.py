"""The environment in which a test starts compare_q as a user does, and the processes of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from compare_q.eval.common.processes import IN_PROCESS_VARIABLE

MODULE = b"compare_q.backends.worker.engine_process"
"""The module that an engine process runs."""


def users_environment(**changes: str) -> dict[str, str]:
    """Return the environment for the command line in another process, with these changes.

    ``conftest.py`` lets engines run in the process of the tests.  A user's run starts workers.
    """
    environment = {**os.environ, **changes}
    environment.pop(IN_PROCESS_VARIABLE, None)
    return environment


def processes_of(cache: Path) -> list[int]:
    """Return the ids of engine processes and workers of runs that use this cache, sorted."""
    ids = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if MODULE in words and str(cache).encode() in (folder / "environ").read_bytes():
                ids.append(int(folder.name))
    return sorted(ids)


def workers_of(cache: Path) -> list[int]:
    """Return the process ids of the workers that an engine process of such runs has forked."""
    ids = processes_of(cache)
    return [process for process in ids if parent_of(process) in ids]


def stat_fields(process: int) -> list[str]:
    """Return what ``/proc`` says about a process after its name, which may contain anything.

    The first fields are its state and its parent; FileNotFoundError if it does not exist.
    """
    _, _, fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    return fields.split()


def parent_of(process: int) -> int | None:
    """Return the id of a process's parent; None if the process does not exist."""
    with suppress(OSError):
        return int(stat_fields(process)[1])
    return None


def runs(process: int) -> bool:
    """True if a process runs; False for a process that has ended but was not waited for."""
    with suppress(FileNotFoundError):
        return stat_fields(process)[0] not in "ZX"
    return False


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait until ``condition()`` is true; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
