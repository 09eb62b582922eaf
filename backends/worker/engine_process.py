"""An engine process: it imports an engine once, and forks a worker for each model.

The driver starts one engine process for each pair of a Python and an engine (``eval/common/processes.py``).  An engine
process uses no GPU.  Each worker leads a process group.  When the worker ends, the engine process kills the rest of the
group, deletes its temporary files and shared memory, and sends the driver the exit status.  When the driver ends, even
by kill -9, the engine process does the same for all workers, and ends.  If the engine process itself is killed, the
user's next one deletes what its workers have left.

If the engine process cannot be forked after importing its engine (``fork_blockers``), it restarts itself without the
engine, and its workers import the engine themselves.  The workers of an engine process without an engine do the same.
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
from typing import Any, NamedTuple, NoReturn

from compare_q.backends.common.process import WORKER, die_with_parent, fork_blockers
from compare_q.backends.worker import shared_memory, temporary

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request the end of a run.  If one reaches all processes of a run, the driver decides what to do."""
LEAVE = signal.SIGUSR1
"""Signal that ends an import, sent by the driver, or by the system when the driver ends.  Later, closing the socket
ends this process."""


class Running(NamedTuple):
    """A running worker: its channel to the driver, and its folder for temporary files ("": the user's)."""

    channel: Connection
    folder: str


Workers = dict[int, Running]
"""Running workers by process id, which is also the id of their process group."""


def main(descriptor: str, driver: str, engine: str, verbose: str, alone: str = "") -> NoReturn:
    """Serve the driver, a process id, at the other end of a socket until the driver ends.

    ``alone``: after a restart, the reason that workers import their engine themselves; otherwise empty.
    """
    faulthandler.enable()  # a crash logs its traceback
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)  # a program that an import starts must not keep the socket open
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
    delete_abandoned()
    gc.collect()
    gc.freeze()  # collections while vLLM loads would scan the imported heap (1.9 s)
    me, code, workers, forked = os.getpid(), 1, Workers(), None
    try:
        forked = serve_forks(control, refusal, workers)
    finally:
        if forked is None:
            end_all(workers)
            # Again: an engine process that was killed during this run may have had processes that lived on for a while.
            delete_abandoned()
    if forked is None:
        os._exit(0)  # skip the cleanup of libraries, which takes seconds
    try:  # this is a fork
        running, log, requested = forked
        become_worker(me, log, before, [control, *(other.channel for other in workers.values())])
        temporary.use(running.folder)
        from compare_q.backends.worker import worker

        worker.serve(running.channel, requested, alone)
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # do not unwind the stack, and do not join threads that the engine left running


def missing_package() -> str:
    """Return the package that this Python lacks to run any worker, and how to install it; empty if none is missing."""
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


def serve_forks(control: socket.socket, refusal: str, workers: Workers) -> tuple[Running, int, float] | None:
    """Fork workers when the driver requests them, and reap them; None when the driver has ended.

    In each fork, return its channel and folder, its log, and when it was requested.  ``refusal``: why no worker can run
    in this Python; otherwise empty.
    """
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking)
    notes = shared_memory.Notes()
    while True:
        seconds = shared_memory.WATCH_S if workers else None
        ready = select.select([control.fileno(), woken], [], [], seconds)[0]
        notes.update({group: worker.folder for group, worker in workers.items()})
        if woken in ready:
            os.read(woken, 1 << 12)
            reap(workers)
        if control.fileno() not in ready:
            continue
        requested, descriptors, _, _ = socket.recv_fds(control, 1 << 10, 2)
        if not requested:
            return None
        for each in descriptors:
            os.set_inheritable(each, False)  # programs that an engine starts must not hold a channel open
        channel, log = Connection(descriptors[0]), descriptors[1]
        sys.stdout.flush()
        reason, worker = refusal, -1
        folder = "" if refusal else temporary.new_folder()
        try:
            worker = -1 if refusal else os.fork()
        except OSError as error:  # too many processes: only this worker fails
            reason = f"its worker cannot be forked: {error.strerror}"
        if worker == 0:
            signal.set_wakeup_fd(-1)
            os.close(woken)
            os.close(waking)
            return Running(channel, folder), log, float(requested)
        os.close(log)
        if reason:
            temporary.remove(folder)
            send_failed(channel, reason=reason)
        else:
            with suppress(OSError):  # the worker does the same, and may have started another program by now
                os.setpgid(worker, worker)
            workers[worker] = Running(channel, folder)


def become_worker(parent: int, log: int, before: Mapping[int, Any], others: list[Any]) -> None:
    """Make this fork a worker with its own process group and log, default signals, and no descriptors of other workers.

    ``before``: actions of the ``ENDING`` signals before the engine process ignored them.
    """
    os.setpgid(0, 0)
    die_with_parent(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(LEAVE, signal.SIG_DFL)
    for number, action in before.items():  # Ctrl-C ends a worker like any other program
        signal.signal(number, signal.SIG_IGN if action == signal.SIG_IGN else signal.SIG_DFL)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    for each in others:
        each.close()
    os.environ[WORKER] = "1"


def end_all(workers: Workers) -> None:
    """Kill the groups of all workers, and delete their temporary files and shared memory."""
    shared_files = {}
    for group, worker in workers.items():
        shared_files[group] = end_worker(group, worker.folder)
    for group, worker in workers.items():
        with suppress(ChildProcessError):
            os.waitpid(group, 0)
        delete_left(shared_files[group], worker.folder)


def delete_abandoned() -> None:
    """Delete what workers of killed engine processes have left."""
    for folder in temporary.abandoned():
        delete_left(shared_memory.noted_files(folder), folder)


def delete_left(shared_files: set[str], folder: str) -> None:
    """Delete what the processes of a worker have left, after they were killed.

    The folder, with its note, stays if a file is still mapped: the next engine process tries again.
    """
    mapped_files = shared_memory.remove(shared_files)
    if mapped_files:
        shared_memory.write_note(folder, mapped_files)
        temporary.release(folder)
    else:
        temporary.remove(folder)


def reap(workers: Workers) -> None:
    """Kill the rest of the groups of workers that have ended, and send the driver each worker's exit status.

    The temporary files and the shared memory of these workers are deleted first.
    """
    for worker in list(workers):
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            channel, folder = workers.pop(worker)
            shared_files = end_worker(worker, folder)
            delete_left(shared_files, folder)
            send_failed(channel, status=os.waitstatus_to_exitcode(status))


def send_failed(channel: Connection, **fields: Any) -> None:
    """Send ``Failed``, the last message of a channel, and close it; it is encoded here without pydantic."""
    with channel, suppress(OSError):
        channel.send_bytes(json.dumps({"type": "failed", **fields}).encode())


def end_worker(group: int, folder: str) -> set[str]:
    """Kill the processes of a worker's group; return the files of shared memory that they leave."""
    # Stopped first: between a look at its maps and its end, a process could create another file.
    signal_group(group, signal.SIGSTOP)
    files = shared_memory.files_of_worker(group, folder)
    end_group(group)
    return files


def end_group(group: int) -> None:
    """Kill every process of a group, if there is one."""
    signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: int) -> None:
    """Send a signal to every process of a group, if there is one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":  # python -m compare_q.backends.worker.engine_process SOCKET DRIVER ENGINE VERBOSE
    main(*sys.argv[1:])
