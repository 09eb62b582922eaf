"""An engine process: it imports an engine once, and forks a worker for each model.

The driver has one for each Python and engine (``eval/common/processes.py``).  It touches no GPU, keeps what it has
imported out of the garbage collector's way, and forks a worker, into a process group of its own, whenever the driver
asks for one: a table of twenty toys took 9 to 13 s a row for importing vLLM, and a fork takes some milliseconds.  When
a worker ends, it kills what is left of the worker's group and tells the driver how the worker ended; when the driver
ends, in whatever way, it ends all groups and itself.  Without an engine it forks workers that import theirs themselves;
so does one whose engine no fork would survive, after it has started itself anew.
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
"""The signals that ask a run to end; what comes of one that reaches all processes of a run, the driver decides."""
LEAVE = signal.SIGUSR1
"""The driver is gone, or wants an engine process no more: it ends one that imports; later the socket's end says so."""


def main(descriptor: str, driver: str, engine: str, verbose: str, why: str = "") -> NoReturn:
    """Serve the ``driver``, a process id, at the other end of a socket until that ends.

    ``why``: why workers import their engine themselves, where this process could not be forked after importing it.
    """
    faulthandler.enable()  # a crash says in the log where it was
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)  # a program that an import starts must not hold it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who has started the driver may have ignored it
    before: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    refusal = lacking_package()
    if engine and not refusal:
        import_engine(engine, int(driver), verbose=bool(verbose))
        if blockers := fork_blockers():
            why = f"no process that has imported it can be forked: {'; '.join(blockers)}"
            control.set_inheritable(True)
            for number, action in before.items():
                signal.signal(number, action)
            os.execv(sys.executable, [*sys.orig_argv[:-2], "", verbose, why])
    signal.signal(LEAVE, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a load of vLLM collects eleven times: 1.9 s over an imported heap
    Forks(control, before, refusal, why).serve()
    os._exit(0)  # without the seconds that libraries take to clean up


def lacking_package() -> str:
    """What a Python lacks to run any worker; empty if it lacks nothing."""
    try:
        from compare_q.backends.common import machine
        from compare_q.backends.worker import serving  # noqa: F401 - the workers' code
    except ModuleNotFoundError as missing:
        cure = f"{sys.executable} -m pip install numpy pydantic safetensors"
        return f"python: {sys.executable} lacks {missing.name}: {cure}"
    machine.keep_compiled_kernels_apart()
    return ""


def import_engine(engine: str, driver: int, *, verbose: bool) -> None:
    """Import what loading a model will import; what cannot be imported, loading a model says better.

    The system ends this process when the driver is gone meanwhile, whatever holds the interpreter: a thread that waited
    for the driver's end came to its turn up to 9 s later on busy cores, since importing torch is C code.
    """
    from compare_q import backends

    die_with_parent(driver, LEAVE)
    with suppress(Exception):
        backends.engine_class(engine).import_engine(verbose=verbose)


class Forks:
    """The forks of an engine process: ``workers`` are the process ids of those that are there, which lead their groups,
    each with the channel by which the driver hears of the worker, and in the end how it ended.

    ``before``: what signals that ask a run to end did to this process before it ignored them; ``refusal``: why no
    worker can run in this Python, else empty; ``why``: as of ``main``.
    """

    def __init__(self, control: socket.socket, before: Mapping[int, Any], refusal: str, why: str) -> None:
        self.control, self.before, self.refusal, self.why = control, before, refusal, why
        self.workers: dict[int, Connection] = {}
        self.woken, self.waking = os.pipe()
        os.set_blocking(self.waking, False)

    def serve(self) -> None:
        """Fork and reap until the driver is gone, then end every group."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.waking)
        try:
            while True:
                ready = select.select([self.control.fileno(), self.woken], [], [])[0]
                if self.woken in ready:
                    os.read(self.woken, 1 << 12)
                    self.reap()
                if self.control.fileno() in ready and not self.answer():
                    return
        finally:
            for worker in self.workers:
                end_group(worker)

    def answer(self) -> bool:
        """Fork a worker as the driver asks; False if the driver is gone."""
        asked, descriptors, _, _ = socket.recv_fds(self.control, 1 << 10, 2)
        if not asked:
            return False
        for each in descriptors:
            os.set_inheritable(each, False)  # an engine's own processes must not hold a channel open
        channel, log = Connection(descriptors[0]), descriptors[1]
        sys.stdout.flush()
        parent, refusal, worker = os.getpid(), self.refusal, -1
        try:
            worker = os.fork() if not refusal else -1
        except OSError as error:  # no room for one more process is one worker's failure
            refusal = f"its worker cannot be forked: {error.strerror}"
        if worker == 0:
            self.become_worker(parent, channel, log, float(asked))
        os.close(log)
        if refusal:
            tell(channel, type="failed", reason=refusal)
        else:
            with suppress(OSError):  # the worker does so itself, and may have started another program
                os.setpgid(worker, worker)
            self.workers[worker] = channel
        return True

    def become_worker(self, parent: int, channel: Connection, log: int, asked: float) -> NoReturn:
        """Do the driver's jobs in a forked process, and end it."""
        try:
            os.setpgid(0, 0)
            die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(LEAVE, signal.SIG_DFL)
            for number, action in self.before.items():  # Ctrl-C ends a worker as it does other programs
                signal.signal(number, signal.SIG_IGN if action == signal.SIG_IGN else signal.SIG_DFL)
            for output in (1, 2):
                os.dup2(log, output)
            for each in (self.control.fileno(), self.woken, self.waking, log):
                os.close(each)
            for other in self.workers.values():
                other.close()
            os.environ[WORKER] = "1"
            from compare_q.backends.worker import serving

            serving.serve(channel, asked, self.why)
            atexit._run_exitfuncs()
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without what stands above in the stack, and without waiting for threads that an engine left

    def reap(self) -> None:
        """End what is left of the groups of workers that have ended, and tell the driver how each one ended."""
        for worker in list(self.workers):
            ended, status = os.waitpid(worker, os.WNOHANG)
            if ended:
                end_group(worker)
                tell(self.workers.pop(worker), type="ended", status=os.waitstatus_to_exitcode(status))


def tell(channel: Connection, **message: Any) -> None:
    """Send the driver the last message of a channel (``backends/worker/messages.py``)."""
    with channel, suppress(OSError):
        channel.send_bytes(json.dumps(message).encode())


def end_group(group: int) -> None:
    """Kill every process of a group; none is left is fine."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":  # python -m compare_q.backends.worker.engine_process SOCKET DRIVER ENGINE VERBOSE
    main(*sys.argv[1:])
