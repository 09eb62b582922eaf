"""The process between the driver and a worker: when either ends, it ends the worker and all that the engine started.

The driver starts this process, which forks the worker into a process group of its own before anything is imported
that starts threads.  From then on it holds 8 MB and does nothing but wait: a worker that is stopped, that hangs in a
kernel or that holds Python's lock cannot stop it from seeing the end of the driver.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

from backends.common.lifeline import die_with_parent

POLL_S = 0.1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a run to end; what comes of one that reaches all processes of a run, the driver decides."""


def become_worker(messages: int, lifeline: int) -> None:
    """Return in the worker, a child of this process; this process waits, and exits with the worker's status.

    ``messages``: the channel, whose end tells the driver at once that the worker has ended; ``lifeline``: the reading
    end of a pipe whose writing end only the driver has, so that it closes with the driver.
    """
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)
        os.close(lifeline)
        die_with_parent(supervisor)
        return
    os.close(messages)
    for ignored in ENDING:
        signal.signal(ignored, signal.SIG_IGN)
    with suppress(OSError):  # the worker has done so itself, and may have started another program
        os.setpgid(worker, worker)
    os._exit(wait(worker, lifeline))


def wait(worker: int, lifeline: int) -> int:
    """Wait until the worker ends or the driver is gone, then end the worker's group; returns an exit status.

    A worker that a signal has ended gives 128 and the number of the signal, as in a shell.
    """
    while True:
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            end_group(worker)
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if select.select([lifeline], [], [], POLL_S)[0]:  # closed: nobody ever writes to it
            end_group(worker)
            os.waitpid(worker, 0)
            return 1


def end_group(group: int) -> None:
    """Kill every process of a group; none is left is fine."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
