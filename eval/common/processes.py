"""Engine processes, their workers, and functions that run in a subprocess.

The driver imports no engine and no torch: code that needs them runs in a fork of an engine process
(``backends/worker/engine_process.py``).  The driver therefore starts at once, output of libraries
does not reach the terminal, a crash is reported in one line, and no process outlives the driver.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

import compare_q

from ... import backends
from ...backends.common import machine
from ...backends.common.errors import CompareQError, InputError, ModelError, StoppedError
from ...backends.common.message_text import one_line
from ...backends.common.process import ending, root_cause, step_without_end
from ...backends.worker import protocol
from ...backends.worker.engine_process import LEAVE, end_group
from ...backends.worker.protocol import CallCommand, Command, Done, Failed, Message, ScoreCommand
from .progress import Progress, Show, shown

ENVIRONMENT = "COMPARE_Q_IN_PROCESS"
POLL_S = 0.2
CLOSE_S = 30.0
"""Seconds that an engine may take to close before it is killed; its scores are committed by then.
"""
END_S = 5.0
"""Seconds that an engine process may take to end by itself."""
LOG_TAIL = 1 << 20
TOGETHER_S = 0.5
"""Seconds to wait for the exit status of an engine process after the loss of a worker, since a kill
may end both."""


def in_process() -> bool:
    """Return True if all work is to be done in the driver's own process, for debugging
    (``$COMPARE_Q_IN_PROCESS``).
    """
    return os.environ.get(ENVIRONMENT, "") not in ("", "0")


def command(module: str, *words: object, python: str = sys.executable) -> list[str]:
    """The command line of a module, in ``environment``; -P ignores a folder ``compare_q`` in the
    working directory.
    """
    return [python, "-P", "-m", module, *map(str, words)]


def environment(python: str = sys.executable) -> dict[str, str]:
    """Return the environment in which ``python`` finds this compare_q.

    Another Python must not see the packages next to an installed compare_q.  It gets a folder with
    a link to compare_q.
    """
    root = Path(compare_q.__file__).resolve().parent.parent
    if Path(python) != Path(sys.executable) and not (root / "pyproject.toml").is_file():
        from .cache import default_root

        linked = (
            default_root() / "code" / hashlib.sha256(bytes(root)).hexdigest()[:16] / "compare_q"
        )
        linked.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            linked.symlink_to(root / "compare_q")
        root = linked.parent
    return {
        **machine.DEFAULTS,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
    }


class EngineProcess:
    """A running engine process of this machine; InputError if its Python cannot be started.

    ``engine``: name of the engine that it imports, empty: none; ``visible``: the GPUs that it sees
    while importing, None: all that the driver sees; ``verbose``: it prints on the terminal.
    """

    def __init__(
        self, python: str, engine: str, visible: Sequence[str] | None, *, verbose: bool
    ) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - ``close`` closes it
        words = (theirs.fileno(), os.getpid(), engine, "1" if verbose else "")
        output: Any = sys.stderr if verbose else self.log
        seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
        try:
            self.process = subprocess.Popen(
                command("compare_q.backends.worker.engine_process", *words, python=python),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=environment(python) | seen,
                # survives kill -9 of the driver's group, to end processes of engines
                process_group=0,
            )
        except OSError as error:
            self.socket.close()
            self.log.close()
            raise InputError(f"python: {python}: cannot be started: {one_line(error)}") from None
        finally:
            theirs.close()

    def end(self) -> None:
        """End it and all its workers, which may still read its log."""
        self.socket.close()
        self.process.send_signal(LEAVE)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.process.kill()
        self.process.wait()


class EngineProcesses:
    """The engine processes of this driver, which keeps them until its end."""

    def __init__(self) -> None:
        self.running: dict[tuple[Any, ...], EngineProcess] = {}
        self.lock = threading.Lock()
        atexit.register(self.close)

    def get(
        self, python: str, engine: str, visible: Sequence[str] | None, *, verbose: bool
    ) -> EngineProcess:
        """Return the engine process for these arguments; one is started if there is none, or if it
        has died.

        The key includes everything that an engine reads while it is imported: the environment and
        the visible GPUs.
        """
        key = (python, engine, visible, verbose, tuple(sorted(os.environ.items())))
        with self.lock:
            found = self.running.get(key)
            if found is not None and found.process.poll() is not None:
                found.end()
                found = None
            if found is None:
                found = self.running[key] = EngineProcess(python, engine, visible, verbose=verbose)
            return found

    def close(self) -> None:
        """End all engine processes, and delete their logs."""
        with self.lock:
            while self.running:
                process = self.running.popitem()[1]
                process.end()
                process.log.close()


PROCESSES = EngineProcesses()


class WorkerProcess:
    """A worker of this machine (``eval/run/workers.py``), forked by an engine process once its
    engine is imported.

    ``log_file``: file for the engine's output; None: the terminal if ``verbose``, else a temporary
    file.  ``group``: its process group, 0 until its first message; ``status``: its exit status,
    None until it is known.
    """

    def __init__(
        self,
        python: str | None = None,
        engine: str = "",
        visible: Sequence[str] | None = None,
        *,
        log_file: Path | None = None,
        verbose: bool = False,
    ) -> None:
        """Request it; InputError if its Python cannot be started."""
        self.python, self.log_file = python or sys.executable, log_file
        self.group, self.killed = 0, threading.Event()
        self.status: int | None = None
        with ExitStack() as opened:
            try:
                file: Any = log_file.open("a+b") if log_file else tempfile.TemporaryFile()  # noqa: SIM115
            except OSError as error:
                raise InputError(
                    f"python: {self.python}: cannot be started: {one_line(error)}"
                ) from None
            self.log: IO[bytes] = opened.enter_context(file)
            self.log_start = self.log.seek(0, os.SEEK_END)
            self.engine_process = PROCESSES.get(self.python, engine, visible, verbose=verbose)
            self.channel, theirs = Pipe()
            descriptors = theirs.fileno(), (sys.stderr if verbose else self.log).fileno()
            with (
                theirs,
                suppress(OSError),
            ):  # an engine process that has died is reported by ``messages``
                socket.send_fds(
                    self.engine_process.socket, [str(time.time()).encode()], descriptors
                )
            opened.pop_all()

    def perform(self, command: Command, silence_s: float, show: Show) -> Any:
        """Return the result of a command; ``show`` gets its messages on the way."""
        return outcome(self.messages(command, silence_s), show)

    def messages(self, command: Command, silence_s: float) -> Iterator[Message]:
        """Yield the messages of a command; the last one is ``Done`` or ``Failed``.

        ModelError if the worker dies, or sends nothing for ``silence_s`` seconds; StoppedError if
        it was killed.
        """
        if (
            self.group
        ):  # errors that were logged before, and caught, do not explain this command's failure
            self.log_start = os.fstat(self.log.fileno()).st_size
        with suppress(OSError):  # reading tells whether it has died
            self.channel.send_bytes(protocol.encoded(command))
        message: Message | None = None
        while not isinstance(message, Done | Failed):
            try:
                message = self.next_message(time.monotonic() + silence_s)
            except TimeoutError:
                self.kill()
                what = "finished no window" if isinstance(command, ScoreCommand) else "did not load"
                raise ModelError(
                    f"{what} for {silence_s:.0f} s, and was ended (--deadline){self.log_hint()}"
                ) from None
            if message is None or self.status is not None:
                raise self.death()
            if self.group or not isinstance(message, Done):
                yield message
            else:  # its first message
                self.begin(message.value)
                message = None

    def begin(self, value: Mapping[str, Any]) -> None:
        """Note the worker's process group; InputError unless the worker runs the code that the run
        started with.
        """
        self.group = value["pid"]
        if self.killed.is_set():
            self.kill()
        (folder, digest), (ours, expected) = value["code"], machine.code()
        if digest != expected:
            raise InputError(
                f"python: {self.python}: runs another compare_q, {folder}, than {ours} was as this run began; start it "
                "again if that was changed since; else uninstall the other one there, or run that"
            )

    def next_message(self, until: float) -> Message | None:
        """Return the next message; None after the last one, TimeoutError if none comes ``until``
        then.
        """
        while not self.channel.poll(max(min(until - time.monotonic(), POLL_S), 0.0)):
            if self.killed.is_set() and not self.group:  # it has not been forked yet
                return None
            if time.monotonic() >= until:
                raise TimeoutError
        try:
            message = protocol.parse_message(self.channel.recv_bytes())
        except (EOFError, OSError):  # closed, or cut off in the middle of a message
            return None
        if isinstance(message, Failed):
            self.status = message.status
        return message

    def death(self) -> CompareQError:
        """Return why it ended during a command; StoppedError if ``kill`` ended it."""
        if self.killed.is_set():
            return StoppedError()
        status, lost, hint = self.status, "", ""
        if status is None:
            with suppress(subprocess.TimeoutExpired):
                status = self.engine_process.process.wait(timeout=TOGETHER_S)
            lost, hint = (
                "was lost with its engine process, which ",
                most_telling(self.engine_process.log),
            )
        how = "is gone" if status is None else ending(status)
        memory = ", as the system does when memory is full" if status == -signal.SIGKILL else ""
        return ModelError(f"its worker {lost}{how}{memory}{hint}{self.log_hint()}")

    def log_hint(self) -> str:
        """Return the log line of this worker that best explains a failure, and the path of the log."""
        return most_telling(self.log, self.log_start) + (
            f" (log: {self.log_file})" if self.log_file else ""
        )

    def kill(self) -> None:
        """End the worker, and everything that its engine has started, at once; from any thread."""
        self.killed.set()
        if self.group and self.status is None:
            end_group(self.group)

    def close(self) -> None:
        """Let the worker end, and end it if the engine process does not report its end in time."""
        with suppress(OSError):
            self.channel.send_bytes(b"")
        for seconds in (0.0 if self.killed.is_set() else CLOSE_S, CLOSE_S) if self.group else ():
            with suppress(TimeoutError, ModelError):
                while (
                    self.status is None
                    and self.next_message(time.monotonic() + seconds) is not None
                ):
                    pass
            if self.status is None:
                self.kill()
        self.channel.close()  # a worker that is forked later finds no command
        self.log.close()


def outcome(
    messages: Iterator[Message], show: Show, failure: type[CompareQError] = ModelError
) -> Any:
    """Return the result of a command from its messages, and show those on the way; ``failure`` if
    it failed.
    """
    for message in messages:
        if isinstance(message, Done):
            return message.value
        if isinstance(message, Failed):
            raise failure(message.reason)
        show(message)
    raise ModelError("its worker ended before its work was done")


def most_telling(log: IO[bytes], start: int = 0) -> str:
    """Return ": " and the line of a log, from ``start`` on, that best explains a failure; empty
    without one.
    """
    text = ""
    with suppress(ValueError):  # another thread has closed the log of an engine process
        log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL, start))
        text = log.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = next((line for line in lines if line.startswith("Fatal Python error")), "")
    cause = step_without_end(text) or fatal or root_cause(text) or (lines[-1] if lines else "")
    return f": {cause[:300]}" if cause else ""


def run_in_subprocess(
    function: Callable[..., Any], what: str, progress: Progress | None = None, **arguments: Any
) -> Any:
    """Return ``function(**arguments)``, all JSON types, called in a process that has imported
    Transformers.

    InputError with its reason if it fails, or if the process dies (then with ``what``, the
    activity).  ``function``: at the top level of a module; with ``progress`` it gets a keyword
    ``progress``, whose phases are shown here.
    """
    if in_process():
        more = {} if progress is None else {"progress": progress}
        return json.loads(json.dumps(function(**json.loads(json.dumps(arguments)), **more)))
    call = {
        "function": f"{function.__module__}:{function.__name__}",
        "shows": progress is not None,
        "arguments": arguments,
    }
    worker = WorkerProcess(engine=backends.TOKENIZING)
    try:
        with shown(progress or Progress(quiet=True)) as show:
            command = CallCommand(f"{__name__}:{called.__name__}", call)
            return outcome(worker.messages(command, math.inf), show, InputError)
    except ModelError as error:
        raise InputError(f"{what}: {error}") from None
    finally:
        worker.kill()  # its result has come or is not needed
        worker.close()


def called(send: Show, *, function: str, shows: bool, arguments: Mapping[str, Any]) -> Any:
    """Return the result of a function, in the subprocess."""
    os.environ[ENVIRONMENT] = "1"
    return pkgutil.resolve_name(function)(
        **arguments, **({"progress": Progress(send=send)} if shows else {})
    )
