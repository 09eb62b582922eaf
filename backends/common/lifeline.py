"""A process that ends when the process that started it ends, however that came about: by kill -9 too."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
POLL_S = 0.5
"""Seconds between two looks for the parent, where the system does not tell of its end."""


def die_with_parent(parent: int) -> None:
    """End this process by SIGKILL when the process ``parent``, which started it, has ended, or at once if it has.

    Linux sends the signal when the parent's *thread* that started this process ends: start processes from a thread that
    lives as long as they do.  Processes that this one starts do not inherit the signal, and must call this themselves.
    Elsewhere a thread looks for the parent, which does not help while C code holds the interpreter.
    """
    if not told_by_the_system():
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the system was asked
        os.kill(os.getpid(), signal.SIGKILL)


def told_by_the_system() -> bool:
    """Ask Linux for a SIGKILL at the parent's end; False where that is not to be had."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
