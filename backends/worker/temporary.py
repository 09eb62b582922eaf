"""Folders for temporary files: one per worker, deleted by the engine process after its end.

If vLLM is killed or interrupted, it does not delete its files ``vllm_dist_*``.  An engine process
and its workers hold a lock in each folder.  If they are all killed, the next engine process of the
user finds the folder without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress

PREFIX = "cq-"
LOCK = "lock"
SOCKET_PATH = 107
"""Length of the longest path of a Unix socket on Linux, in bytes."""
SOCKET_NAME = 37
"""Bytes that an engine appends for a socket: a slash and a UUID in vLLM; multiprocessing needs 32,
torch 35."""
ATTEMPTS = 20
PAUSE_S = 0.05
"""Seconds between attempts: processes that were just killed may still write a file."""
locks: dict[str, int] = {}
"""Descriptors of the locks that this process holds, by folder.  Its forks hold them, too."""


def new_folder() -> str:
    """Create a folder in the user's folder for temporary files; "" if that is impossible.

    It is also impossible if the paths of sockets in the new folder would be too long for the
    system.
    """
    try:
        folder = tempfile.mkdtemp(prefix=PREFIX)
    except OSError:  # a full disk, for example; the engine may not need the folder
        return ""
    if len(os.fsencode(folder)) + SOCKET_NAME > SOCKET_PATH:
        os.rmdir(folder)
        return ""
    with suppress(OSError):  # without a lock, the folder is left alone after a kill
        hold(folder)
    return folder


def hold(folder: str) -> None:
    """Lock a new folder while this process or one of its forks lives."""
    begun = os.path.join(folder, f"{LOCK}.new")
    descriptor = os.open(begun, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    # Renamed when it is locked: no process finds it without its lock.
    os.rename(begun, os.path.join(folder, LOCK))
    locks[folder] = descriptor


def abandoned() -> Iterator[str]:
    """Yield the user's folders whose processes have all been killed.

    Each is locked while it is yielded.
    """
    parent = tempfile.gettempdir()
    try:
        names = os.listdir(parent)
    except OSError:
        return
    for name in names:
        folder = os.path.join(parent, name)
        if not name.startswith(PREFIX) or folder in locks:
            continue
        try:
            descriptor = locked(folder)
        except OSError:  # no lock file, a lock that a process holds, or another user's folder
            continue
        try:
            yield folder
        finally:
            os.close(descriptor)


def locked(folder: str) -> int:
    """Lock an existing folder of the user, and return the lock's descriptor.

    OSError if that is impossible.
    """
    if os.lstat(folder).st_uid != os.getuid():
        raise PermissionError(folder)
    descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def release(folder: str) -> None:
    """Give up the lock of a folder that the next engine process shall delete."""
    if folder in locks:
        os.close(locks.pop(folder))


def use(folder: str) -> None:
    """Make ``folder`` the folder for temporary files of this process and its children.

    "" changes nothing.
    """
    if folder:
        os.environ["TMPDIR"] = folder
        # tempfile has read TMPDIR if any import has created a file.
        tempfile.tempdir = folder


def remove(folder: str) -> None:
    """Delete the folder of a worker whose processes have been killed; "" deletes nothing."""
    if not folder:
        return
    release(folder)
    for _ in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        time.sleep(PAUSE_S)
