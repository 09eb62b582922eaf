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
from ...backends.worker.protocol import (
    CallCommand,
    Command,
    Done,
    Failed,
    Message,
    SampleCommand,
    ScoreCommand,
    TrialsCommand,
)
from .progress import Progress, Show, message_display

IN_PROCESS_VARIABLE = "COMPARE_Q_IN_PROCESS"
"""Environment variable: do all work in the driver's own process, for debugging."""
WORKER_POLL_S = 0.2
"""Seconds between two checks of whether a silent worker was killed."""
WORKER_CLOSE_S = 30.0
"""Seconds that an engine may take to close before it is killed; its scores are committed by then.
"""
ENGINE_PROCESS_END_S = 5.0
"""Seconds that an engine process may take to end by itself."""
ENGINE_PROCESS_STATUS_S = 0.5
"""Seconds to wait for the exit status of an engine process after the loss of a worker, since a kill
may end both."""
LOG_TAIL = 1 << 20
"""Bytes at the end of a log that are searched for the cause of a failure."""


def in_process() -> bool:
    """Return True if all work is to be done in the driver's own process."""
    return os.environ.get(IN_PROCESS_VARIABLE, "") not in ("", "0")


def command(module: str, *words: object, python: str = sys.executable) -> list[str]:
    """Return the command line of a module, in ``environment``."""
    # -P ignores a folder ``compare_q`` in the working directory.
    return [python, "-P", "-m", module, *[str(word) for word in words]]


def environment(python: str = sys.executable) -> dict[str, str]:
    """Return the environment in which ``python`` finds this compare_q.

    Another Python must not see the packages next to an installed compare_q.  It gets a folder with
    a link to compare_q.
    """
    root = Path(compare_q.__file__).resolve().parent.parent
    if Path(python) != Path(sys.executable) and not (root / "pyproject.toml").is_file():
        from .cache import default_root

        # One link per installation: a second one with the same cache must not run this code.
        digest = hashlib.sha256(bytes(root)).hexdigest()[:16]
        link = default_root() / "code" / digest / "compare_q"
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(root / "compare_q")
        root = link.parent
    paths = [str(root)]
    inherited_paths = os.environ.get("PYTHONPATH")
    if inherited_paths:
        paths.append(inherited_paths)
    return {**machine.DEFAULTS, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


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
        output: Any = self.log
        verbose_word = ""
        if verbose:
            output = sys.stderr
            verbose_word = "1"
        words = (theirs.fileno(), os.getpid(), engine, verbose_word)
        gpu_variables = {}
        if visible is not None:
            gpu_variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        try:
            self.process = subprocess.Popen(
                command("compare_q.backends.worker.engine_process", *words, python=python),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=environment(python) | gpu_variables,
                # It survives kill -9 of the driver's group, to end processes of engines.
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
            self.process.wait(ENGINE_PROCESS_END_S)
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
        """Return the engine process for these arguments; start one if there is none that runs.

        The key includes everything that an engine reads while it is imported: the environment and
        the visible GPUs.
        """
        key = (python, engine, visible, verbose, tuple(sorted(os.environ.items())))
        with self.lock:
            running = self.running.get(key)
            if running is not None and running.process.poll() is not None:
                running.end()
                running = None
            if running is None:
                running = EngineProcess(python, engine, visible, verbose=verbose)
                self.running[key] = running
            return running

    def close(self) -> None:
        """End all engine processes, and delete their logs."""
        with self.lock:
            while self.running:
                process = self.running.popitem()[1]
                process.end()
                process.log.close()


PROCESSES = EngineProcesses()


class WorkerProcess:
    """A worker of this machine (``eval/run/workers.py``), forked by an engine process.

    It is forked once the engine is imported.
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
        self.python = python or sys.executable
        self.log_file = log_file
        self.group = 0
        self.killed = threading.Event()
        self.status: int | None = None
        with ExitStack() as open_files:
            self.log: IO[bytes] = open_files.enter_context(self.open_log())
            self.log_start = self.log.seek(0, os.SEEK_END)
            self.engine_process = PROCESSES.get(self.python, engine, visible, verbose=verbose)
            self.channel, theirs = Pipe()
            output: Any = self.log
            if verbose:
                output = sys.stderr
            descriptors = (theirs.fileno(), output.fileno())
            began = str(time.time()).encode()
            # ``messages`` reports an engine process that has died.
            with theirs, suppress(OSError):
                socket.send_fds(self.engine_process.socket, [began], descriptors)
            open_files.pop_all()  # ``close`` closes the log

    def open_log(self) -> IO[bytes]:
        """Open the log, or a temporary file for the output that explains a failure.

        InputError if it cannot be written: no worker starts without a log.
        """
        try:
            if self.log_file:
                return self.log_file.open("a+b")
            return tempfile.TemporaryFile()
        except OSError as error:
            raise InputError(
                f"python: {self.python}: cannot be started: {one_line(error)}"
            ) from None

    def perform(self, command: Command, silence_s: float, show: Show) -> Any:
        """Return the result of a command; ``show`` gets its messages on the way."""
        return result_of(self.messages(command, silence_s), show)

    def messages(self, command: Command, silence_s: float) -> Iterator[Message]:
        """Yield the messages of a command; the last one is ``Done`` or ``Failed``.

        ModelError if the worker dies, or sends nothing for ``silence_s`` seconds; StoppedError if
        it was killed.
        """
        if self.group:
            # Errors that were logged before, and caught, do not explain this command's failure.
            self.log_start = os.fstat(self.log.fileno()).st_size
        with suppress(OSError):  # reading reports that it has died
            self.channel.send_bytes(protocol.encoded(command))
        message: Message | None = None
        while not isinstance(message, Done | Failed):
            try:
                message = self.next_message(time.monotonic() + silence_s)
            except TimeoutError:
                self.kill()
                failure = "did not load"
                if isinstance(command, ScoreCommand):
                    failure = "finished no window"
                elif isinstance(command, SampleCommand):
                    failure = "sampled no token"
                elif isinstance(command, TrialsCommand):
                    failure = "finished no trial"
                hint = self.log_hint()
                raise ModelError(
                    f"{failure} for {silence_s:.0f} s, and was ended (--deadline){hint}"
                ) from None
            if message is None or self.status is not None:
                raise self.death()
            if self.group or not isinstance(message, Done):
                yield message
            else:
                # A worker's first message, sent when it begins, is not the result of the command.
                self.begin(message.value)
                message = None

    def begin(self, value: Mapping[str, Any]) -> None:
        """Note the worker's process group; InputError if it runs other code than this run."""
        self.group = value["pid"]
        if self.killed.is_set():
            # ``kill`` was called before the group was known.
            self.kill()
        folder, digest = value["code"]
        expected_folder, expected_digest = machine.code()
        if digest != expected_digest:
            raise InputError(
                f"python: {self.python}: runs another compare_q, {folder}, "
                f"than {expected_folder} was as this run began; start it "
                "again if that was changed since; else uninstall the other one there, or run that"
            )

    def next_message(self, until: float) -> Message | None:
        """Return the next message; None after the last one.

        TimeoutError if none comes before ``until``, a time of ``time.monotonic``.
        """
        while not self.channel.poll(self.poll_seconds(until)):
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

    @staticmethod
    def poll_seconds(until: float) -> float:
        """Return the seconds to wait for a message at once: short, so that ``kill`` is noticed."""
        remaining_s = until - time.monotonic()
        return max(min(remaining_s, WORKER_POLL_S), 0.0)

    def death(self) -> CompareQError:
        """Return why it ended during a command; StoppedError if ``kill`` ended it."""
        if self.killed.is_set():
            return StoppedError()
        status = self.status
        loss = ""
        engine_process_line = ""
        if status is None:
            # The engine process reports how a worker ended, unless it has died too.
            with suppress(subprocess.TimeoutExpired):
                status = self.engine_process.process.wait(timeout=ENGINE_PROCESS_STATUS_S)
            loss = "was lost with its engine process, which "
            engine_process_line = explaining_line(self.engine_process.log)
        end = "is gone"
        if status is not None:
            end = ending(status)
        memory = ""
        if status == -signal.SIGKILL:
            memory = ", as the system does when memory is full"
        return ModelError(f"its worker {loss}{end}{memory}{engine_process_line}{self.log_hint()}")

    def log_hint(self) -> str:
        """Return the log line that best explains a failure of this worker, and the log's path."""
        line = explaining_line(self.log, self.log_start)
        if self.log_file:
            return f"{line} (log: {self.log_file})"
        return line

    def kill(self) -> None:
        """End the worker, and everything that its engine has started, at once; from any thread."""
        self.killed.set()
        if self.group and self.status is None:
            end_group(self.group)

    def close(self) -> None:
        """Let the worker end, and end it if the engine process does not report its end in time."""
        with suppress(OSError):
            self.channel.send_bytes(b"")
        if self.group:
            seconds = WORKER_CLOSE_S
            if self.killed.is_set():
                seconds = 0.0
            self.end_within(seconds)
            # Returns at once if the worker has ended.  A killed worker takes a moment.
            self.end_within(WORKER_CLOSE_S)
        # Also without a group: a worker that is forked later finds a closed channel, and ends.
        self.channel.close()
        self.log.close()

    def end_within(self, seconds: float) -> None:
        """Wait for the exit status; kill the worker if it sends nothing for ``seconds``."""
        with suppress(TimeoutError, ModelError):
            # ``next_message`` sets the status when the engine process reports it.
            while self.status is None:
                message = self.next_message(time.monotonic() + seconds)
                if message is None:
                    break
        if self.status is None:
            self.kill()


def result_of(
    messages: Iterator[Message], show: Show, failure: type[CompareQError] = ModelError
) -> Any:
    """Return the result of a command from its messages, and show those on the way.

    ``failure``: the error to raise if the command failed.
    """
    for message in messages:
        if isinstance(message, Done):
            return message.value
        if isinstance(message, Failed):
            raise failure(message.reason)
        show(message)
    raise ModelError("its worker ended before its work was done")


def explaining_line(log: IO[bytes], start: int = 0) -> str:
    """Return ": " and the line of a log, from ``start`` on, that best explains a failure.

    The result is empty if the log has no such line.
    """
    text = ""
    with suppress(ValueError):  # another thread has closed the log of an engine process
        log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL, start))
        text = log.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cause = step_without_end(text)
    if not cause:
        cause = fatal_error_in(lines)
    if not cause:
        cause = root_cause(text)
    if not cause and lines:
        cause = lines[-1]
    if not cause:
        return ""
    return f": {cause[:300]}"


def fatal_error_in(lines: Sequence[str]) -> str:
    """Return Python's line on a crash, such as a segmentation fault; empty without one."""
    for line in lines:
        if line.startswith("Fatal Python error"):
            return line
    return ""


def run_in_subprocess(
    function: Callable[..., Any], what: str, progress: Progress | None = None, **arguments: Any
) -> Any:
    """Return ``function(**arguments)``, all JSON types, called in another process.

    That process has imported Transformers.  InputError with the function's reason if it fails, or
    if the process dies (then with ``what``, the activity).  ``function``: at the top level of a
    module; with ``progress`` it gets a keyword ``progress``, whose phases are shown here.
    """
    if in_process():
        # Through JSON here as well, so that a debugger sees what a subprocess would get.
        keywords = json.loads(json.dumps(arguments))
        if progress is not None:
            keywords["progress"] = progress
        return json.loads(json.dumps(function(**keywords)))
    call = {
        "function": f"{function.__module__}:{function.__name__}",
        "shows": progress is not None,
        "arguments": arguments,
    }
    worker = WorkerProcess(engine=backends.TOKENIZING)
    try:
        with message_display(progress or Progress(quiet=True)) as show:
            call_command = CallCommand(f"{__name__}:{call_function.__name__}", call)
            return result_of(worker.messages(call_command, math.inf), show, InputError)
    except ModelError as error:
        raise InputError(f"{what}: {error}") from None
    finally:
        worker.kill()  # its result has come or is not needed
        worker.close()


def call_function(send: Show, *, function: str, shows: bool, arguments: Mapping[str, Any]) -> Any:
    """Return the result of a function of ``run_in_subprocess``, in the subprocess."""
    # The function may call ``run_in_subprocess``, too: this process has imported Transformers.
    os.environ[IN_PROCESS_VARIABLE] = "1"
    target = pkgutil.resolve_name(function)
    keywords = dict(arguments)
    if shows:
        keywords["progress"] = Progress(send=send)
    return target(**keywords)
