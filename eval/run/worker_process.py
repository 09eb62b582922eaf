"""A worker from the driver's side: start it, give it a job, read its messages, end it.

The worker is ``backends/worker/__main__.py``, run by the Python of the model's engine.  It gets this process's own
``backends`` on its path and nothing else of this process's Python, and is refused if it runs any other code.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import backends
from backends.common import machine
from backends.common.engine_log import root_cause
from backends.common.errors import InputError, ModelError, StoppedError
from backends.common.lifeline import WORKER
from backends.common.messages import one_line
from backends.worker.messages import (
    JOB,
    AnswerJob,
    Done,
    Ready,
    ScoreJob,
    parse_message,
)
from backends.worker.serving import LAST
from backends.worker.supervisor import ENDING, end_group
from eval.common import processes
from eval.run.workers import Deadline, Wanted

POLL_S = 0.2
LONGEST_LINE = 1 << 24
"""Bytes of one message; a worker that sends more is ended."""
CLOSE_S = 30.0
"""Seconds that an engine may take to close, after which it is ended; its scores are there already."""
LOG_TAIL = 1 << 20
TOGETHER_S = 0.5
"""Seconds in which a signal to all processes of a run reaches each of them: systemd and Slurm end runs by one."""


def code_path(python: str) -> str:
    """What PYTHONPATH must be for a worker: the folder of ``backends``, before what the user has set.

    An installed compare_q lies among other packages, which another Python must not see: that gets a folder with a link,
    of its own for each place where a compare_q is installed.
    """
    root = Path(backends.__file__).resolve().parent.parent
    if Path(python) != Path(sys.executable) and not (root / "pyproject.toml").is_file():
        from eval.common.cache import default_root

        linked = default_root() / "code" / hashlib.sha256(bytes(root)).hexdigest()[:16] / "backends"
        linked.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            linked.symlink_to(root / "backends")
        root = linked.parent
    return os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))


class WorkerProcess:
    """One worker of this machine (``eval/run/workers.py`` says what its methods do for whom)."""

    def __init__(self, wanted: Wanted) -> None:
        self.python, self.log_file = wanted.python or sys.executable, wanted.log_file
        log_file = wanted.log_file
        self.log_start = log_file.stat().st_size if log_file is not None and log_file.is_file() else 0
        self.group = 0
        self.killed = threading.Event()
        self.has_died = False
        self.unread = bytearray()
        self.process: Any = None
        self.messages = self.lifeline = -1

    def start(self) -> None:
        """Start the process; InputError if its Python cannot be started."""
        try:
            environment = {**os.environ, "PYTHONPATH": code_path(self.python), WORKER: "1"}
            output: Any = sys.stderr.fileno() if self.log_file is None else self.log_file.open("ab")
        except OSError as error:
            raise InputError(f"python: {self.python}: cannot be started: {one_line(error)}") from None
        read, write = os.pipe()
        wait, lifeline = os.pipe()
        command = processes.command("backends.worker", write, wait, python=self.python)
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=(write, wait), env=environment
            )
        except OSError as error:
            os.close(read)
            os.close(lifeline)
            raise InputError(f"python: {self.python}: cannot be started: {error.strerror}") from None
        finally:
            os.close(write)
            os.close(wait)
            if self.log_file is not None:
                output.close()
        self.messages, self.lifeline = read, lifeline

    @property
    def is_alive(self) -> bool:
        """Whether the process is there, and has not closed its channel: the supervisor ends up to 0.1 s later."""
        if self.process is None or self.process.poll() is not None or self.killed.is_set():
            return False
        channel = select.poll()
        channel.register(self.messages, 0)
        return not channel.poll(0)

    def perform(self, job: Any, deadline: Deadline) -> Iterator[Any]:
        """The messages of one job, the last of which says how it ended; ModelError if the worker dies or is silent.

        The job is sent when the first message is asked for.
        """
        with suppress(BrokenPipeError):  # it has died, which reading tells
            self.process.stdin.write(JOB.dump_json(job) + b"\n")
            self.process.stdin.flush()
        works = {ScoreJob: "finished no window", AnswerJob: "finished no answer"}.get(type(job))
        limit, longest, done = deadline.window_s if works else deadline.load_s, 0.0, False
        while True:
            began = time.monotonic()
            line = self.line(began + limit)
            if done and not line:  # its scores are there, whatever becomes of its engine
                return
            self.has_died = not line
            if line is None:
                self.kill()
                raise ModelError(
                    f"{works or 'did not load'} for {limit:.0f} s, and was ended (--deadline){self.told()}"
                )
            if not line and (self.killed.is_set() or (self.ending() in ENDING and self.killed.wait(TOGETHER_S))):
                raise StoppedError("interrupted")
            if not line:
                raise ModelError(f"its worker {self.cause_of_death()}{self.told()}")
            message = parse_message(line)
            if isinstance(message, Ready):
                self.group = message.group
                self.check_code(*message.code)
                continue
            yield message
            if isinstance(message, LAST):
                return
            done = done or isinstance(message, Done)
            longest = max(longest, time.monotonic() - began)
            limit = CLOSE_S if done else max(deadline.window_s, deadline.patience * longest)

    def line(self, until: float) -> bytes | None:
        """The next line; empty at the end of all lines, None if none comes in time."""
        while True:
            end = self.unread.find(b"\n")
            if end >= 0:
                line = bytes(self.unread[:end])
                del self.unread[: end + 1]
                return line
            if len(self.unread) > LONGEST_LINE:
                self.kill()
                raise ModelError("its worker sent a message without an end")
            if select.select([self.messages], [], [], max(min(until - time.monotonic(), POLL_S), 0.0))[0]:
                data = os.read(self.messages, 1 << 16)
                if not data:
                    return b""
                self.unread += data
            elif time.monotonic() >= until:
                return None

    def check_code(self, folder: str, digest: str) -> None:
        """InputError unless the worker runs the code of this process: what is cached under its version must be its."""
        ours, expected = machine.code()
        if digest == expected:
            return
        if folder == ours:
            raise InputError(f"{ours}: compare_q was changed while it ran; start it again")
        raise InputError(
            f"python: {self.python}: runs another compare_q, {folder or 'an older one'}, in place of {ours}; "
            "uninstall that one there, or run the one that is installed there"
        )

    def ending(self) -> signal.Signals | None:
        """The signal that has ended the process, once it has ended; None if none has."""
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(timeout=CLOSE_S)
            with suppress(ValueError):
                return signal.Signals(-status if status < 0 else status - 128)
        return None

    def cause_of_death(self) -> str:
        """How the process ended, in words."""
        if (number := self.ending()) is not None:
            full = ", as the system does when memory is full" if number == signal.SIGKILL else ""
            return f"was ended by {number.name}{full}"
        status = self.process.returncode
        return "closed its channel" if status is None else f"ended with status {status}"

    def told(self) -> str:
        """The most telling line that the engine has logged in this worker, and where the log is."""
        if self.log_file is None:
            return ""
        text = ""
        with suppress(OSError), self.log_file.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL, self.log_start))
            text = log.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        fatal = next((line for line in lines if line.startswith("Fatal Python error")), "")
        cause = fatal or root_cause(text) or (lines[-1] if lines else "")
        return f": {cause[:300]} (log: {self.log_file})" if cause else f" (log: {self.log_file})"

    def kill(self) -> None:
        """End the worker, and everything that its engine has started, at once; from any thread."""
        self.killed.set()
        if self.process is None:
            return
        if self.group:
            end_group(self.group)
        else:  # it has not said yet which group it is
            self.process.kill()

    def close(self) -> None:
        """Let the worker end by itself, and end it if it does not."""
        if self.process is None:
            return
        with suppress(OSError):
            self.process.stdin.close()
        if not self.killed.is_set():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=CLOSE_S)
        status = self.process.poll()
        if status is None or status < 0:  # else the supervisor has ended the group, whose number may be another's now
            self.kill()
        os.close(self.lifeline)  # the supervisor ends what is left of the group
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=CLOSE_S)
        os.close(self.messages)
