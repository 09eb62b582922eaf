"""An engine process: it imports an engine once, and forks a worker for each model.

The driver has one for each Python and engine (``eval/common/processes.py``).  It touches no GPU.  Each worker leads a
process group.  When the worker ends, the engine process kills the rest of the group and sends the driver the exit
status.  When the driver ends, even by kill -9, the engine process kills all groups and ends.

If it cannot be forked after importing its engine (``fork_blockers``), it restarts itself without the engine, and its
workers import the engine themselves.  So do those of an engine process that has no engine.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from compare_q.backends.common.process import WORKER, die_with_parent, fork_blockers

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end.  The driver decides what to do if one reaches all processes of a run."""
LEAVE = signal.SIGUSR1
"""Sent by the driver, or by the system at the driver's end: ends an import; later the end of the socket does that."""


def main(descriptor: str, driver: str, engine: str, verbose: str, alone: str = "") -> NoReturn:
    """Serve the driver, a process id, at the other end of a socket until the driver ends.

    ``alone``: after a restart, why workers import their engine themselves; else empty.
    """
    faulthandler.enable()  # a crash logs its traceback
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)  # a program that an import starts must not hold it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the driver may have inherited SIG_IGN
    before: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    refusal = missing_package()
    if engine and not refusal:
        import_engine(engine, int(driver), verbose=bool(verbose))
        if blockers := fork_blockers():
            alone = f"its engine is imported for this model alone, because {'; '.join(blockers)}"
            control.set_inheritable(True)
            for number, action in before.items():
                signal.signal(number, action)
            os.execv(sys.executable, [*sys.orig_argv[:-2], "", verbose, alone])
    signal.signal(LEAVE, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # collections while vLLM loads would scan the imported heap (1.9 s)
    ForkServer(control, before, refusal, alone).serve()
    os._exit(0)  # without the seconds that libraries take to clean up


def missing_package() -> str:
    """Return what this Python lacks to run any worker, and how to install it; empty if nothing."""
    try:
        from compare_q.backends.common import machine
        from compare_q.backends.worker import worker  # noqa: F401 - imported before the first fork
    except ModuleNotFoundError as missing:
        install = f"{sys.executable} -m pip install numpy pydantic safetensors"
        return f"python: {sys.executable} lacks {missing.name}: {install}"
    machine.keep_compiled_kernels_apart()
    return ""


def import_engine(engine: str, driver: int, *, verbose: bool) -> None:
    """Import what loading a model imports; errors are ignored, because loading reports them more clearly.

    If the driver ends, the system ends this process, even in the middle of C code.
    """
    from compare_q import backends

    die_with_parent(driver, LEAVE)
    with suppress(Exception):
        backends.engine_class(engine).import_engine(verbose=verbose)


class ForkServer:
    """Forks workers for the driver at the other end of ``control``.

    ``before``: actions of the ``ENDING`` signals before this process ignored them; ``refusal``: why no worker can run
    in this Python, else empty; ``alone``: see ``main``.  ``workers``: process id (also of the group) of each running
    worker, with its channel to the driver.
    """

    def __init__(self, control: socket.socket, before: Mapping[int, Any], refusal: str, alone: str) -> None:
        self.control, self.before, self.refusal, self.alone = control, before, refusal, alone
        self.workers: dict[int, Connection] = {}
        self.woken, self.waking = os.pipe()
        os.set_blocking(self.waking, False)

    def serve(self) -> None:
        """Fork and reap workers until the driver ends, then kill every group."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.waking)
        try:
            while True:
                ready = select.select([self.control.fileno(), self.woken], [], [])[0]
                if self.woken in ready:
                    os.read(self.woken, 1 << 12)
                    self.reap()
                if self.control.fileno() in ready and not self.fork():
                    return
        finally:
            for worker in self.workers:
                end_group(worker)

    def fork(self) -> bool:
        """Fork a worker, as the driver requests; False if the driver has ended."""
        requested, descriptors, _, _ = socket.recv_fds(self.control, 1 << 10, 2)
        if not requested:
            return False
        for each in descriptors:
            os.set_inheritable(each, False)  # programs that an engine starts must not hold a channel open
        channel, log = Connection(descriptors[0]), descriptors[1]
        sys.stdout.flush()
        parent, refusal, worker = os.getpid(), self.refusal, -1
        try:
            worker = -1 if refusal else os.fork()
        except OSError as error:  # too many processes: only this worker fails
            refusal = f"its worker cannot be forked: {error.strerror}"
        if worker == 0:
            self.run_worker(parent, channel, log, float(requested))
        os.close(log)
        if refusal:
            send_failed(channel, reason=refusal)
        else:
            with suppress(OSError):  # the worker does the same, and may have started another program by now
                os.setpgid(worker, worker)
            self.workers[worker] = channel
        return True

    def run_worker(self, parent: int, channel: Connection, log: int, requested: float) -> NoReturn:
        """Perform the driver's commands in this forked process, and end it."""
        code = 1
        try:
            os.setpgid(0, 0)
            die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(LEAVE, signal.SIG_DFL)
            for number, action in self.before.items():  # Ctrl-C ends a worker like other programs
                signal.signal(number, signal.SIG_IGN if action == signal.SIG_IGN else signal.SIG_DFL)
            for output in (1, 2):
                os.dup2(log, output)
            for each in (self.control.fileno(), self.woken, self.waking, log):
                os.close(each)
            for other in self.workers.values():
                other.close()
            os.environ[WORKER] = "1"
            from compare_q.backends.worker import worker

            worker.serve(channel, requested, self.alone)
            atexit._run_exitfuncs()
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # do not unwind the stack, and do not join threads that the engine left running

    def reap(self) -> None:
        """Kill the rest of the groups of workers that have ended, and send the driver each worker's exit status."""
        for worker in list(self.workers):
            ended, status = os.waitpid(worker, os.WNOHANG)
            if ended:
                end_group(worker)
                send_failed(self.workers.pop(worker), status=os.waitstatus_to_exitcode(status))


def send_failed(channel: Connection, **fields: Any) -> None:
    """Send ``Failed``, the last message of a channel, and close it; it is written here without pydantic."""
    with channel, suppress(OSError):
        channel.send_bytes(json.dumps({"type": "failed", **fields}).encode())


def end_group(group: int) -> None:
    """Kill every process of a group, if there is one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":  # python -m compare_q.backends.worker.engine_process SOCKET DRIVER ENGINE VERBOSE
    main(*sys.argv[1:])
