"""Folders for temporary files: one per worker, deleted by the engine process after its end.

If vLLM is killed or interrupted, it does not delete its files ``vllm_dist_*``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time

SOCKET_PATH = 107
"""Length of the longest path of a Unix socket on Linux, in bytes."""
SOCKET_NAME = 37
"""Bytes that an engine appends for a socket: a slash and a UUID in vLLM; multiprocessing needs 32,
torch 35."""
ATTEMPTS = 20
PAUSE_S = 0.05
"""Seconds between attempts: processes that were just killed may still write a file."""


def new_folder() -> str:
    """Create a folder in the user's folder for temporary files; "" if that is impossible.

    It is also impossible if the paths of sockets in the new folder would be too long for the
    system.
    """
    try:
        folder = tempfile.mkdtemp(prefix="cq-")
    except OSError:  # a full disk, for example; the engine may not need the folder
        return ""
    if len(os.fsencode(folder)) + SOCKET_NAME > SOCKET_PATH:
        os.rmdir(folder)
        return ""
    return folder


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
    for _ in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        time.sleep(PAUSE_S)
