"""Files that appear whole or not at all, and what a killed process leaves of them.

A file is written under a temporary name that says whose it is: process id, the time at which that process began (the
kernel's clock ticks since boot, so that another process with the same id is not taken for it) and the machine or
container.  ``sweep`` removes the temporary files whose process is gone.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

TEMPORARY = re.compile(r"\.compare_q\.(\d{1,10})-(\d{1,20})-([0-9a-f]{8})\.[0-9a-f]{8}\.part")
FOREIGN_SECONDS = 86_400
"""A temporary file of another machine or container, whose processes cannot be seen, is kept for a day after its last
change."""


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside the target, which replaces the target when the block ends well and else vanishes."""
    with beside(target) as temporary:
        yield temporary
        os.replace(temporary, target)


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A temporary path beside the target, which vanishes when the block ends."""
    temporary = target.with_name(temporary_name())
    try:
        yield temporary
    finally:
        with suppress(OSError):  # the folder has vanished, say: what went wrong first is what counts
            temporary.unlink()


def temporary_name() -> str:
    """The name of a new file that says whose it is."""
    return f".compare_q.{owner()}.{uuid.uuid4().hex[:8]}.part"


def write_whole(target: Path, data: bytes) -> None:
    """Write a file that a reader finds old or new, never half-written; OSError leaves the old one."""
    with replacing(target) as temporary:
        temporary.write_bytes(data)


def owner() -> str:
    """``<pid>-<began>-<place>`` of this process."""
    return f"{os.getpid()}-{began(os.getpid()) or 0}-{place()}"


def began(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; -1 if only its exit status is left, None if it is not seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return -1 if state in "ZX" else int(fields[18])


def exists(pid: int) -> bool:
    """Whether there is a process of this id, be it another user's that ``/proc`` hides."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@cache
def place() -> str:
    """Eight hexadecimal digits for all that see the same processes: one boot of one machine, in one container."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8"))
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join([os.uname().nodename, *parts]).encode()).hexdigest()[:8]


def is_gone(path: Path) -> bool:
    """Whether a path has a temporary file's name, and its owner is gone."""
    match = TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    if match[3] == place() and began(os.getpid()) is not None:
        now = began(int(match[1]))
        return not exists(int(match[1])) if now is None else now != int(match[2])
    return is_old(path)


def is_old(path: Path) -> bool:
    """Whether a file was last changed more than ``FOREIGN_SECONDS`` ago."""
    with suppress(OSError):
        return time.time() - path.lstat().st_mtime > FOREIGN_SECONDS
    return False


def sweep(folder: Path) -> None:
    """Remove the temporary files in a folder whose owners are gone; what cannot be removed stays."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if is_gone(folder / name) and is_regular(folder / name):
                with suppress(OSError):
                    (folder / name).unlink()


def is_regular(path: Path) -> bool:
    """Whether there is a file that is no link, no folder, no pipe."""
    return size_of(path) is not None


def size_of(path: Path) -> int | None:
    """Bytes of a file that is no link, no folder, no pipe; None where there is none, or none any more."""
    try:
        found = path.lstat()
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
