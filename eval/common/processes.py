"""Engine processes and their forks: a worker for each model, and a process for each function of ours.

The driver imports no engine and no torch.  Whatever needs them is done by a process that an engine process
(``backends/worker/engine_process.py``) forks: the driver then answers at once, nothing that a library prints reaches
the terminal, and a library that crashes or runs out of memory is one line.  Jobs go in and messages come out as JSON
(``backends/worker/messages.py``); large data travels as files.  No process outlives the driver.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import math
import os
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
from compare_q import backends
from compare_q.backends.common import machine
from compare_q.backends.common.errors import CompareQError, InputError, ModelError, StoppedError
from compare_q.backends.common.messages import one_line
from compare_q.backends.common.process import root_cause
from compare_q.backends.worker.engine_process import LEAVE, end_group
from compare_q.backends.worker.messages import (
    CallCommand,
    Ended,
    Failed,
    Ready,
    Returned,
    encoded,
    ending,
    parse_message,
)
from compare_q.eval.common.progress import Progress, Tell, ToldProgress, shown

ENVIRONMENT = "COMPARE_Q_IN_PROCESS"
POLL_S = 0.2
CLOSE_S = 30.0
"""Seconds that an engine may take to close, after which it is ended; its scores are there already."""
END_S = 5.0
"""Seconds that an engine process may take to see that the driver wants it no more."""
LOG_TAIL = 1 << 20
TOGETHER_S = 0.5
"""Seconds in which a killed engine process is seen to have ended, after its workers."""


def in_process() -> bool:
    """Whether all work is to be done in the driver's own process, for debugging: ``$COMPARE_Q_IN_PROCESS`` is 1."""
    return os.environ.get(ENVIRONMENT, "") not in ("", "0")


def command(module: str, *words: object, python: str = sys.executable) -> list[str]:
    """The command line that runs a module of ours with this Python, or another; ``environment`` goes with it.

    -P: a folder ``compare_q`` in the working directory is not ours.
    """
    return [python, "-P", "-m", module, *map(str, words)]


def environment(python: str = sys.executable) -> dict[str, str]:
    """The environment of a process of ours, which finds this very ``compare_q``, before what the user has set.

    An installed compare_q lies among other packages, which another Python must not see: that gets a folder with a link,
    of its own for each place where a compare_q is installed.
    """
    root = Path(compare_q.__file__).resolve().parent.parent
    if Path(python) != Path(sys.executable) and not (root / "pyproject.toml").is_file():
        from compare_q.eval.common.cache import default_root

        linked = default_root() / "code" / hashlib.sha256(bytes(root)).hexdigest()[:16] / "compare_q"
        linked.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            linked.symlink_to(root / "compare_q")
        root = linked.parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}


class EngineProcess:
    """An engine process of this machine, which is running from now on; InputError if its Python cannot be started.

    ``engine``: the name of the engine that it imports, empty: none; ``visible``: the GPUs that this sees meanwhile,
    None: those that the driver sees; ``verbose``: the engine prints on the terminal.
    """

    def __init__(self, python: str, engine: str, visible: Sequence[str] | None, *, verbose: bool) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - ``close`` closes it
        words = (theirs.fileno(), os.getpid(), engine, "1" if verbose else "")
        output: Any = sys.stderr if verbose else self.log
        seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
        try:
            self.process = subprocess.Popen(
                command("compare_q.backends.worker.engine_process", *words, python=python), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, pass_fds=(theirs.fileno(),), env=environment(python) | seen,
                process_group=0,  # kill -9 of the driver's group leaves it to end what engines have started
            )  # fmt: skip
        except OSError as error:
            self.socket.close()
            self.log.close()
            raise InputError(f"python: {python}: cannot be started: {one_line(error)}") from None
        finally:
            theirs.close()

    def close(self) -> None:
        """End it, and everything that it has forked."""
        self.socket.close()
        self.process.send_signal(LEAVE)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.process.kill()
        self.process.wait()
        self.log.close()


class EngineProcesses:
    """The engine processes of this driver, which it keeps until its end, by what makes one differ from another."""

    def __init__(self) -> None:
        self.running: dict[tuple[Any, ...], EngineProcess] = {}
        self.lock = threading.Lock()
        atexit.register(self.close)

    def get(self, python: str, engine: str, visible: Sequence[str] | None, *, verbose: bool) -> EngineProcess:
        """The one that a worker is forked by, started now if there is none, or if it has died.

        What an engine reads when it is imported is the same for all its models: the driver's environment and the GPUs
        of the run are part of the key.
        """
        key = (python, engine, visible, verbose, tuple(sorted(os.environ.items())))
        with self.lock:
            found = self.running.get(key)
            if found is None or found.process.poll() is not None:
                found = self.running[key] = EngineProcess(python, engine, visible, verbose=verbose)
            return found

    def close(self) -> None:
        """End all of them."""
        with self.lock:
            while self.running:
                self.running.popitem()[1].close()


PROCESSES = EngineProcesses()


class WorkerProcess:
    """One worker of this machine, forked by an engine process (``eval/run/hosts.py`` says what its methods do).

    ``group``: its process group, 0 as long as it is not there; ``status``: how it ended, None if that is not known.
    """

    def __init__(
        self, python: str | None = None, engine: str = "", visible: Sequence[str] | None = None, *,
        log_file: Path | None = None, verbose: bool = False,
    ) -> None:  # fmt: skip
        """Have it forked once its engine is imported; InputError if its Python cannot be started.

        ``log_file``: takes what the engine prints, None: a file that is read if the worker dies, or if it is
        ``verbose`` the terminal; the others are as of ``EngineProcess``.
        """
        self.python, self.log_file = python or sys.executable, log_file
        self.group, self.killed = 0, threading.Event()
        self.status: int | None = None
        with ExitStack() as opened:
            try:
                file: Any = log_file.open("a+b") if log_file else tempfile.TemporaryFile()  # noqa: SIM115
            except OSError as error:
                raise InputError(f"python: {self.python}: cannot be started: {one_line(error)}") from None
            self.log: IO[bytes] = opened.enter_context(file)
            self.log_start = self.log.seek(0, os.SEEK_END)
            self.engine_process = PROCESSES.get(self.python, engine, visible, verbose=verbose)
            self.channel, theirs = Pipe()
            descriptors = theirs.fileno(), (sys.stderr if verbose else self.log).fileno()
            with theirs, suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self.engine_process.socket, [str(time.time()).encode()], descriptors)
            opened.pop_all()

    def perform(self, job: Any, silence_s: float, show: Tell) -> Any:
        """Do one job: what it returns, while what it tells is shown."""
        return outcome(self.messages(job, silence_s), show)

    def messages(self, job: Any, silence_s: float) -> Iterator[Any]:
        """The messages of one job; the last one is ``Returned`` or ``Failed``.

        ModelError if the worker dies or is silent for so long.
        """
        with suppress(OSError):  # that a worker has died, is told by reading
            self.channel.send_bytes(encoded(job))
        message: Any = None
        while not isinstance(message, Returned | Failed):
            try:
                message = self.next_message(time.monotonic() + silence_s)
            except TimeoutError:
                self.kill()
                what = {"score": "finished no window", "answer": "finished no answer"}.get(job.type, "did not load")
                text = f"{what} for {silence_s:.0f} s, and was ended (--deadline){self.last_words()}"
                raise ModelError(text) from None
            if message is None or isinstance(message, Ended):
                raise self.death()
            if isinstance(message, Ready):
                self.group = message.group
                if self.killed.is_set():
                    self.kill()
                self.check_code(*message.code)
            else:
                yield message

    def next_message(self, until: float) -> Any:
        """The next message, None where no more will come; TimeoutError if none comes in time."""
        while not self.channel.poll(max(min(until - time.monotonic(), POLL_S), 0.0)):
            if self.killed.is_set() and not self.group:  # it is not there yet
                return None
            if time.monotonic() >= until:
                raise TimeoutError
        try:
            message = parse_message(self.channel.recv_bytes())
        except (EOFError, OSError):  # closed, ended in the midst of a message, or without an end
            return None
        if isinstance(message, Ended):
            self.status = message.status
        return message

    def check_code(self, folder: str, digest: str) -> None:
        """InputError unless the worker runs the code of this process: what is cached under its version must be its."""
        ours, expected = machine.code()
        if digest != expected:
            raise InputError(
                f"python: {self.python}: runs another compare_q, {folder}, than {ours} was as this run began; start it "
                "again if that was changed since; else uninstall the other one there, or run that"
            )

    def death(self) -> CompareQError:
        """Why it has ended in the midst of a job; StoppedError if that was asked for."""
        if self.killed.is_set():
            return StoppedError()
        status, lost, told = self.status, "", ""
        if status is None:
            with suppress(subprocess.TimeoutExpired):
                status = self.engine_process.process.wait(timeout=TOGETHER_S)
            lost, told = "was lost with its engine process, which ", most_telling(self.engine_process.log)
        how = "is gone" if status is None else ending(status)
        memory = ", as the system does when memory is full" if status == -signal.SIGKILL else ""
        return ModelError(f"its worker {lost}{how}{memory}{told}{self.last_words()}")

    def last_words(self) -> str:
        """The most telling line that the engine has logged in this worker, and where the log is."""
        return most_telling(self.log, self.log_start) + (f" (log: {self.log_file})" if self.log_file else "")

    def kill(self) -> None:
        """End the worker, and everything that its engine has started, at once; from any thread."""
        self.killed.set()
        if self.group and self.status is None:
            end_group(self.group)

    def close(self) -> None:
        """Let the worker end by itself, and end it if it does not."""
        if self.group:
            with suppress(OSError):
                self.channel.send_bytes(b"")
            for seconds in (0.0 if self.killed.is_set() else CLOSE_S, CLOSE_S):
                if not self.has_ended(seconds):  # its engine process is gone, or it does not end
                    self.kill()
        self.channel.close()  # one that has not been forked yet will find no job
        self.log.close()

    def has_ended(self, seconds: float) -> bool:
        """Whether the engine process says, within so many seconds, that the worker has ended."""
        until = time.monotonic() + seconds
        with suppress(TimeoutError, ModelError):
            while self.status is None and self.next_message(until) is not None:
                pass
        return self.status is not None


def outcome(messages: Iterator[Any], show: Tell, failure: type[CompareQError] = ModelError) -> Any:
    """What a job returns, while what its worker tells on its way is shown; ``failure`` with its reason if it fails."""
    for message in messages:
        if isinstance(message, Returned):
            return message.value
        if isinstance(message, Failed):
            raise failure(message.reason)
        show(message.kind, message.content)
    raise ModelError("its worker ended before its work was done")


def most_telling(log: IO[bytes], start: int = 0) -> str:
    """The line of a log, from a place on, that says most of what went wrong, after a colon; empty without one."""
    text = ""
    with suppress(ValueError):  # another thread has closed the log of an engine process
        log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL, start))
        text = log.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = next((line for line in lines if line.startswith("Fatal Python error")), "")
    cause = fatal or root_cause(text) or (lines[-1] if lines else "")
    return f": {cause[:300]}" if cause else ""


def apart(function: Callable[..., Any], what: str, progress: Progress | None = None, **arguments: Any) -> Any:
    """What ``function(**arguments)`` returns in a process of its own; InputError with its reason if it fails there.

    ``function``: of the top level of a module; arguments and result are JSON types.  With ``progress`` the function
    gets a keyword ``progress``, whose phases are shown here.  ``what``: what is done, if the process dies of it.  The
    process is forked by one that has imported Transformers, which most such functions need.
    """
    if in_process():
        told = {} if progress is None else {"progress": progress}
        return json.loads(json.dumps(function(**json.loads(json.dumps(arguments)), **told)))
    call = {"module": function.__module__, "name": function.__name__, "arguments": arguments,
            "told": progress is not None}  # fmt: skip
    worker = WorkerProcess(engine=backends.TOKENIZING)
    try:
        with shown(progress) as show:
            return outcome(
                worker.messages(CallCommand(f"{__name__}:{called.__name__}", call), math.inf), show, InputError
            )
    except ModelError as error:
        raise InputError(f"{what}: {error}") from None
    finally:
        worker.kill()  # it has said its last word, or nobody waits for it
        worker.close()


def called(tell: Tell, *, module: str, name: str, arguments: Mapping[str, Any], told: bool) -> Any:
    """What a function returns, called in a process apart."""
    os.environ[ENVIRONMENT] = "1"
    function = getattr(importlib.import_module(module), name)
    return function(**arguments, **({"progress": ToldProgress(tell)} if told else {}))
