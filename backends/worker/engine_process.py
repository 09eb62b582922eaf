"""An engine process: it imports an engine once, and forks a worker for each model.

The driver starts one engine process for each pair of a Python and an engine
(``eval/common/processes.py``).  An engine process uses no GPU.  Each worker leads a process group.
When the worker ends, the engine process kills the rest of the group, deletes its temporary files
and shared memory, and sends the driver the exit status.  When the driver ends, even by kill -9, the
engine process does the same for all workers, and ends.  If the engine process itself is killed, the
user's next one deletes what its workers have left.

If the engine process cannot be forked after importing its engine (``fork_blockers``), it restarts
itself without the engine, and its workers import the engine themselves.  The workers of an engine
process without an engine do the same.
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

from ..common.process import WORKER, die_with_parent, fork_blockers
from . import shared_memory, temporary

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request the end of a run.  If one reaches all processes of a run, the driver decides
what to do."""
LEAVE = signal.SIGUSR1
"""Signal that ends an import, sent by the driver, or by the system when the driver ends.  Later,
closing the socket ends this process."""
REQUEST_BYTES = 1 << 10
"""Largest request of a worker: the time, as text."""


class Running(NamedTuple):
    """A running worker: its channel to the driver, and its folder for temporary files.

    The folder is "" if the worker uses the user's.
    """

    channel: Connection
    folder: str


Workers = dict[int, Running]
"""Running workers by process id, which is also the id of their process group."""


class Fork(NamedTuple):
    """The inputs of a fork of the engine process that becomes a worker."""

    running: Running
    log: int  # descriptor of the worker's log
    requested: float  # when the driver requested the worker, in seconds since 1970


def main(
    descriptor: str, driver: str, engine: str, verbose: str, import_note: str = ""
) -> NoReturn:
    """Serve the driver, a process id, at the other end of a socket until the driver ends.

    ``import_note``: after a restart, the reason that workers import their engine themselves;
    otherwise empty.
    """
    faulthandler.enable()  # a crash logs its traceback
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)  # a program that an import starts must not keep the socket open
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the driver may have inherited SIG_IGN
    signal_actions = ignore_ending_signals()
    refusal = missing_package()
    if engine and not refusal:
        import_engine(engine, int(driver), verbose=bool(verbose))
        blockers = fork_blockers()
        if blockers:
            import_note = (
                f"its engine is imported for this model alone, because {'; '.join(blockers)}"
            )
            control.set_inheritable(True)
            for number, action in signal_actions.items():
                signal.signal(number, action)
            os.execv(sys.executable, [*sys.orig_argv[:-2], "", verbose, import_note])
    signal.signal(LEAVE, signal.SIG_IGN)
    delete_abandoned()
    engine_process = os.getpid()
    workers = Workers()
    fork = None
    try:
        fork = serve_forks(control, refusal, workers)
    finally:
        if fork is None:
            end_all(workers)
            # Again: an engine process that was killed during this run may have had processes that
            # lived on for a while.
            delete_abandoned()
    if fork is None:
        os._exit(0)  # skip the cleanup of libraries, which takes seconds
    status = 1
    try:
        others = [control, *(other.channel for other in workers.values())]
        become_worker(engine_process, fork.log, signal_actions, others)
        run_worker(fork, import_note)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # do not unwind the stack, and do not join threads that the engine left


def ignore_ending_signals() -> dict[int, Any]:
    """Ignore the ``ENDING`` signals; return number -> the action before."""
    actions: dict[int, Any] = {}
    for number in ENDING:
        actions[number] = signal.signal(number, signal.SIG_IGN)
    return actions


def run_worker(fork: Fork, import_note: str) -> None:
    """Perform the driver's commands in a fork that has become a worker."""
    temporary.use(fork.running.folder)
    from . import worker

    worker.serve(fork.running.channel, fork.requested, import_note)
    # os._exit does not call these functions, in which libraries clean up.
    atexit._run_exitfuncs()


def missing_package() -> str:
    """Return the package that this Python lacks to run any worker, and how to install it.

    Empty if none is missing.  Then kernels that workers compile are also kept apart for each CPU,
    which needs the same import.
    """
    try:
        from ..common import machine
        from . import worker  # noqa: F401 - imported before the first fork
    except ModuleNotFoundError as missing:
        install = f"{sys.executable} -m pip install numpy pydantic safetensors"
        return f"python: {sys.executable} lacks {missing.name}: {install}"
    machine.keep_compiled_kernels_apart()
    return ""


def import_engine(engine: str, driver: int, *, verbose: bool) -> None:
    """Import what loading a model imports.

    Errors are ignored, because loading reports them more clearly.  If the driver ends, the system
    ends this process, even in the middle of C code.
    """
    from ... import backends

    die_with_parent(driver, LEAVE)
    # Imports leave hardly any garbage, and looking for it takes a sixth of vLLM's 10 s.
    gc.disable()
    with suppress(Exception):
        backends.engine_class(engine).import_engine(verbose=verbose)
    # Collections while a model loads would look through everything that was imported: 1.9 s.
    gc.freeze()
    gc.enable()


def serve_forks(control: socket.socket, refusal: str, workers: Workers) -> Fork | None:
    """Fork workers when the driver requests them, and reap them; None when the driver has ended.

    It also returns in each fork, with the ``Fork``.  ``refusal``: why no worker can run in this
    Python; otherwise empty.
    """
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    # SIGCHLD has a handler, because Python writes only handled signals into the pipe.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write)
    notes = shared_memory.Notes()
    while True:
        seconds = None
        if workers:
            seconds = shared_memory.WATCH_S
        ready, _, _ = select.select([control.fileno(), wakeup_read], [], [], seconds)
        notes.update({group: worker.folder for group, worker in workers.items()})
        if wakeup_read in ready:
            os.read(wakeup_read, 1 << 12)
            reap(workers)
        if control.fileno() not in ready:
            continue
        requested, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES, 2)
        if not requested:
            return None
        # Programs that an engine starts must not hold a channel open.
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        channel = Connection(descriptors[0])
        log = descriptors[1]
        sys.stdout.flush()  # otherwise the fork would print what is buffered once more
        if refusal:
            os.close(log)
            send_failed(channel, reason=refusal)
            continue
        running = Running(channel, temporary.new_folder())
        try:
            worker = os.fork()
        except OSError as error:  # too many processes: only this worker fails
            os.close(log)
            temporary.remove(running.folder)
            send_failed(channel, reason=f"its worker cannot be forked: {error.strerror}")
            continue
        if worker == 0:
            signal.set_wakeup_fd(-1)
            os.close(wakeup_read)
            os.close(wakeup_write)
            return Fork(running, log, float(requested))
        os.close(log)
        # The worker does the same, and may have started another program by now.
        with suppress(OSError):
            os.setpgid(worker, worker)
        workers[worker] = running


def become_worker(
    parent: int, log: int, signal_actions: Mapping[int, Any], others: list[Any]
) -> None:
    """Make this fork a worker: its own process group and log, default signals.

    ``signal_actions``: of the ``ENDING`` signals before the engine process ignored them.
    ``others``: the engine process's socket and the channels of other workers, which are closed.
    """
    os.setpgid(0, 0)
    die_with_parent(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(LEAVE, signal.SIG_DFL)
    # Ctrl-C ends a worker like any other program.
    for number, action in signal_actions.items():
        if action == signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN)
        else:
            signal.signal(number, signal.SIG_DFL)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    for other in others:
        other.close()
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
    """Send the driver the exit status of workers that have ended, and kill their groups.

    The temporary files and the shared memory of these workers are deleted before the message.
    """
    for worker in list(workers):
        ended, status = os.waitpid(worker, os.WNOHANG)
        if not ended:
            continue
        channel, folder = workers.pop(worker)
        shared_files = end_worker(worker, folder)
        delete_left(shared_files, folder)
        send_failed(channel, status=os.waitstatus_to_exitcode(status))


def send_failed(channel: Connection, **fields: Any) -> None:
    """Send ``Failed``, the last message of a channel, and close the channel.

    The message is encoded here, because a Python may lack pydantic (``missing_package``).
    """
    # The driver may have closed its end.
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


# python -m compare_q.backends.worker.engine_process SOCKET DRIVER ENGINE VERBOSE
if __name__ == "__main__":
    main(*sys.argv[1:])
