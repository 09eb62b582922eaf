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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import compare_q
from compare_q import backends
from compare_q.backends.common import machine
from compare_q.backends.common.errors import CompareQError, InputError, ModelError, NoMemoryError, StoppedError
from compare_q.backends.common.messages import one_line
from compare_q.backends.common.process import root_cause
from compare_q.backends.worker.engine_process import ENDING, end_group
from compare_q.backends.worker.failures import ending
from compare_q.backends.worker.messages import (
    AnswerJob,
    CallJob,
    Ended,
    Failed,
    Ready,
    Returned,
    ScoreJob,
    encoded,
    parse_message,
)
from compare_q.eval.common.progress import Progress, Tell, ToldProgress, shown

ENVIRONMENT = "COMPARE_Q_IN_PROCESS"
POLL_S = 0.2
LONGEST_MESSAGE = 1 << 28
"""Bytes of one message; a worker that sends more is ended."""
CLOSE_S = 30.0
"""Seconds that an engine may take to close, after which it is ended; its scores are there already."""
END_S = 5.0
"""Seconds that an engine process may take to see that the driver wants it no more."""
LOG_TAIL = 1 << 20
TOGETHER_S = 0.5
"""Seconds in which a signal to all processes of a run reaches each of them: systemd and Slurm end runs by one."""


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


@dataclass(frozen=True)
class Wanted:
    """What a worker is wanted for: the model's ``label``, its ``engine`` (empty: none is imported before), and the
    ``python`` of that, None for compare_q's own.

    ``log_file``: takes what the engine prints, None: the terminal; ``gpus``: how many it will get, 0 without GPUs;
    ``resources``: what else its place must have, by the model's spec; ``visible``: the GPUs of the run, which its
    engine sees while it is imported, None: those that the driver sees.
    """

    label: str
    engine: str = ""
    python: str | None = None
    log_file: Path | None = None
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    visible: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Deadline:
    """Seconds that a worker may be silent: ``load_s`` until its model is loaded, ``window_s`` between two windows.

    The second is at least ``patience`` times the longest wait so far.
    """

    load_s: float = 3600.0
    window_s: float = 1800.0
    patience: float = 20.0


class EngineProcess:
    """An engine process of this machine, which is running from now on; InputError if its Python cannot be started.

    ``engine``: the name of the engine that it imports; empty: none, so that what it forks imports its engine itself.
    """

    def __init__(self, python: str, engine: str, visible: Sequence[str] | None, *, verbose: bool) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.engine = engine
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - ``close`` closes it
        lifeline, self.lifeline = os.pipe()
        words = (theirs.fileno(), lifeline, engine, "1" if verbose else "")
        output: Any = sys.stderr if verbose else self.log
        seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
        try:
            self.process = subprocess.Popen(
                command("compare_q.backends.worker.engine_process", *words, python=python), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, pass_fds=(theirs.fileno(), lifeline), env=environment(python) | seen,
                process_group=0,  # kill -9 of the driver's group leaves it to end what engines have started
            )  # fmt: skip
        except OSError as error:
            self.hang_up()
            self.log.close()
            raise InputError(f"python: {python}: cannot be started: {one_line(error)}") from None
        finally:
            theirs.close()
            os.close(lifeline)

    def hang_up(self) -> None:
        """Have it end, as it does when the driver is gone."""
        self.socket.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def fork(self, descriptors: list[int], why: str) -> None:
        """Have it fork a process that reads jobs from the first of these, and writes messages there, and prints to the
        third; how it ended, the engine process writes to the second.  ``why``: as of ``serving.Server``.
        """
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.socket, [json.dumps({"asked": time.time(), "why": why}).encode()], descriptors)

    def close(self) -> None:
        """End it, and everything that it has forked."""
        self.hang_up()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@dataclass
class EngineProcesses:
    """The engine processes of this driver, which it keeps until its end, by what makes one differ from another.

    ``refused``: why an engine's workers cannot be forked after importing it.
    """

    running: dict[tuple[Any, ...], EngineProcess] = field(default_factory=dict)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, wanted: Wanted, *, verbose: bool) -> EngineProcess:
        """The one that a worker is forked by, started now if there is none, or if it has died.

        What an engine reads when it is imported is the same for all its models: the driver's environment and the GPUs
        of the run are part of the key.
        """
        python = wanted.python or sys.executable
        engine = "" if (python, wanted.engine) in self.refused else wanted.engine
        key = (python, engine, wanted.visible, verbose, tuple(sorted(os.environ.items())))
        with self.lock:
            found = self.running.get(key)
            if found is None or found.process.poll() is not None:
                found = self.running[key] = EngineProcess(python, engine, wanted.visible, verbose=verbose)
            return found

    def refuse(self, python: str, process: EngineProcess, why: str) -> None:
        """From now on workers of an engine import it themselves; its engine process, which told why, ends."""
        with self.lock:
            self.refused.setdefault((python, process.engine), why)
            self.running = {key: each for key, each in self.running.items() if each is not process}
        process.close()

    def close(self) -> None:
        """End all of them."""
        with self.lock:
            ended, self.running = list(self.running.values()), {}
        for each in ended:
            each.close()


PROCESSES = EngineProcesses()
atexit.register(PROCESSES.close)


class WorkerProcess:
    """One worker of this machine, forked by an engine process (``eval/run/hosts.py`` says what its methods do).

    ``group``: its process group, 0 as long as it is not there; ``end``: how it ended, as far as that is known;
    ``sources``: where messages still come from: the worker's channel, and the pipe that tells of its end.
    """

    def __init__(self, wanted: Wanted, log: IO[bytes] | None = None) -> None:
        self.wanted, self.python, self.log_file, self.log = (
            wanted,
            wanted.python or sys.executable,
            wanted.log_file,
            log,
        )
        self.log_start = self.log_file.stat().st_size if self.log_file and self.log_file.is_file() else 0
        self.group = 0
        self.killed = threading.Event()
        self.sources: list[Connection] = []
        self.channel: Connection | None = None
        self.end: Ended | None = None
        self.engine_process: EngineProcess | None = None

    def start(self) -> None:
        """Have it forked once its engine is imported; InputError if its Python cannot be started."""
        why = PROCESSES.refused.get((self.python, self.wanted.engine), "")
        with ExitStack() as closing:
            output: Any = self.log or sys.stderr
            try:
                if self.log_file is not None:
                    output = closing.enter_context(self.log_file.open("ab"))
                verbose = self.log_file is None and self.log is None
                self.engine_process = PROCESSES.get(self.wanted, verbose=verbose)
            except OSError as error:
                raise InputError(f"python: {self.python}: cannot be started: {one_line(error)}") from None
            self.channel, theirs = Pipe()
            ending, told = Pipe(duplex=False)
            self.sources = [self.channel, ending]
            with theirs, told:
                self.engine_process.fork([theirs.fileno(), told.fileno(), output.fileno()], why)

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job: between jobs nothing but its end is told."""
        return len(self.sources) == 2 and not self.killed.is_set() and not wait(self.sources, 0)

    def perform(self, job: Any, deadline: Deadline, show: Tell) -> Any:
        """Do one job: what it returns, while what it tells is shown.

        ModelError if it fails, or if the worker dies or is silent.
        """
        return outcome(self.messages(job, deadline), show)

    def messages(self, job: Any, deadline: Deadline) -> Iterator[Any]:
        """The messages of one job; the last one is ``Returned`` or ``Failed``.

        ModelError if the worker dies or is silent; but if its scores are there by then, the messages end.
        """
        self.send(job)
        works = {ScoreJob: "finished no window", AnswerJob: "finished no answer"}.get(type(job))
        limit, longest, done = deadline.window_s if works else deadline.load_s, 0.0, False
        while True:
            began = time.monotonic()
            try:
                message = self.next_message(began + limit)
            except TimeoutError:
                self.kill()
                if done:  # its scores are there, whatever becomes of its engine
                    return
                text = f"{works or 'did not load'} for {limit:.0f} s, and was ended (--deadline)"
                raise ModelError(f"{text}{self.last_words()}") from None
            if isinstance(message, Ready):
                self.group = message.group
                if self.killed.is_set():
                    self.kill()
                self.check_code(*message.code)
                continue
            if message is None or isinstance(message, Ended):
                if done:
                    return
                if self.is_begun_anew(message):
                    self.send(job)
                    continue
                raise self.death()
            yield message
            if isinstance(message, Returned | Failed):
                return
            done = done or message.kind == "done"
            longest = max(longest, time.monotonic() - began)
            limit = CLOSE_S if done else max(deadline.window_s, deadline.patience * longest)

    def send(self, job: Any) -> None:
        """Give it a job; a worker that has died is told of by reading."""
        if self.channel is not None:
            with suppress(OSError):
                self.channel.send_bytes(encoded(job))

    def is_begun_anew(self, message: Ended | None) -> bool:
        """Whether a worker that ended before it was there comes once more: by a process that imports no engine.

        So it does where the engine process cannot fork, which it says, or is gone, as one is that dies of importing its
        engine.
        """
        process, refused = self.engine_process, message.refused if message is not None else ""
        if self.group or self.killed.is_set() or process is None or not process.engine or (message and not refused):
            return False
        if refused:
            PROCESSES.refuse(self.python, process, refused)
        else:
            self.wanted = replace(self.wanted, engine="")
        self.close_channels()
        self.start()
        return True

    def next_message(self, until: float) -> Any:
        """The next message, None where no more will come; TimeoutError if none comes in time.

        What the worker has sent comes before what is told of its end.
        """
        while self.sources:
            ready = wait(self.sources, max(min(until - time.monotonic(), POLL_S), 0.0))
            if ready:
                source = next(each for each in self.sources if each in ready)
                try:
                    message = parse_message(source.recv_bytes(LONGEST_MESSAGE))
                except (EOFError, OSError):  # closed, ended in the midst of a message, or without an end
                    self.sources.remove(source)
                    source.close()
                    continue
                self.end = message if isinstance(message, Ended) else None
                return message
            if self.killed.is_set() and not self.group:
                break  # it is not there yet
            if time.monotonic() >= until:
                raise TimeoutError
        return None

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
        status = None if self.end is None else self.end.status
        asked_to_end = status is not None and -status in ENDING
        if self.killed.is_set() or (asked_to_end and self.killed.wait(TOGETHER_S)):
            return StoppedError("interrupted")
        if status is not None or self.engine_process is None:
            return ModelError(f"its worker {ending_in_words(status or 0)}{self.last_words()}")
        with suppress(subprocess.TimeoutExpired):
            status = self.engine_process.process.wait(timeout=TOGETHER_S)
        how = "is gone" if status is None else ending_in_words(status)
        told = most_telling(text_of(self.engine_process.log))
        return ModelError(f"its worker was lost with its engine process, which {how}{told}{self.last_words()}")

    def last_words(self) -> str:
        """The most telling line that the engine has logged in this worker, and where the log is."""
        text = "" if self.log is None else text_of(self.log)
        with suppress(OSError):
            if self.log_file is not None:
                with self.log_file.open("rb") as log:
                    text = text_of(log, self.log_start)
        return most_telling(text) + (f" (log: {self.log_file})" if self.log_file is not None else "")

    def kill(self) -> None:
        """End the worker, and everything that its engine has started, at once; from any thread."""
        self.killed.set()
        if self.group and self.end is None:
            end_group(self.group)

    def close(self) -> None:
        """Let the worker end by itself, and end it if it does not."""
        if self.channel is not None:
            self.sources = [each for each in self.sources if each is not self.channel]
            self.channel.close()
        if self.group and not self.has_ended(0.0 if self.killed.is_set() else CLOSE_S):
            self.kill()  # its engine process is gone, or it does not end
            self.has_ended(CLOSE_S)
        self.close_channels()

    def has_ended(self, seconds: float) -> bool:
        """Whether the engine process says, within so many seconds, that the worker has ended."""
        until = time.monotonic() + seconds
        with suppress(TimeoutError, ModelError):
            while self.end is None and self.next_message(until) is not None:
                pass
        return self.end is not None

    def close_channels(self) -> None:
        """Close what leads to the worker: one that has not been forked yet will find no job."""
        for each in self.sources:
            each.close()
        self.sources = []


def outcome(messages: Iterator[Any], show: Tell, failure: type[CompareQError] = ModelError) -> Any:
    """What a job returns, while what its worker tells on its way is shown; ``failure`` with its reason if it fails."""
    done = False
    for message in messages:
        if isinstance(message, Returned):
            return message.value
        if isinstance(message, Failed):
            raise (NoMemoryError if message.memory else failure)(message.reason)
        done = done or message.kind == "done"
        show(message.kind, message.content)
    if not done:
        raise ModelError("its worker ended before its work was done")
    return None


def ending_in_words(status: int) -> str:
    """How a process ended, by its exit status: minus its number for a signal; and what SIGKILL may mean."""
    return ending(status) + (", as the system does when memory is full" if status == -signal.SIGKILL else "")


def text_of(log: IO[bytes], start: int = 0) -> str:
    """The end of what was logged from a place on."""
    with suppress(ValueError):  # another thread has closed the log of an engine process
        log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL, start))
        return log.read().decode(errors="replace")
    return ""


def most_telling(text: str) -> str:
    """The line of a log that says most of what went wrong, after a colon; empty without one."""
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
    job, forever = CallJob(f"{__name__}:{called.__name__}", call), Deadline(load_s=math.inf)
    with tempfile.TemporaryFile() as log, ExitStack() as phases:
        worker = WorkerProcess(Wanted(what, backends.TOKENIZING), log)
        phases.callback(worker.close)
        phases.callback(worker.kill)  # it has said its last word, or nobody waits for it
        worker.start()
        try:
            return outcome(worker.messages(job, forever), phases.enter_context(shown(progress)), InputError)
        except ModelError as error:
            raise InputError(f"{what}: {error}") from None


def called(tell: Tell, *, module: str, name: str, arguments: Mapping[str, Any], told: bool) -> Any:
    """What a function returns, called in a process apart; InputError with its reason in one line."""
    os.environ[ENVIRONMENT] = "1"
    function = getattr(importlib.import_module(module), name)
    try:
        return function(**arguments, **({"progress": ToldProgress(tell)} if told else {}))
    except CompareQError:
        raise
    except OSError as error:
        raise InputError(one_line(error)) from error
    except Exception as error:  # a bug, in compare_q or in a library
        traceback.print_exc()
        raise InputError(f"{name}: {type(error).__name__}: {one_line(error)}") from error
