"""A function of ours in a process of its own, which may import what the driver must not: torch, by way of Transformers.

The driver then answers at once, nothing that a library prints reaches the terminal, and a library that crashes or runs
out of memory is one line.  The process gets its job as JSON on its standard input, and sends what it has to say as JSON
lines on a pipe of its own: progress, and last its result or an error.  Both are JSON types, so that large data travels
as files.  It never outlives the driver.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from backends.common import lifeline
from backends.common.errors import CompareQError, InputError
from backends.common.messages import one_line
from eval.common.progress import Phase, Progress

ROOT = Path(__file__).resolve().parents[2]
"""Where ``eval`` and ``backends`` lie: a checkout, or an environment's site-packages."""
ENVIRONMENT = "COMPARE_Q_IN_PROCESS"
EVERY_S = 0.1
"""Seconds between two messages about the progress of one phase: a data set has millions of rows."""
Tell = Callable[[str, Any], None]
"""Sends one message: its kind, and its content as JSON types."""


def in_process() -> bool:
    """Whether all work is to be done in the driver's own process, for debugging: ``$COMPARE_Q_IN_PROCESS`` is 1."""
    return os.environ.get(ENVIRONMENT, "") not in ("", "0")


def apart(function: Callable[..., Any], what: str, progress: Progress | None = None, **arguments: Any) -> Any:
    """What ``function(**arguments)`` returns in a process of its own; InputError with its reason if it fails there.

    ``function``: of the top level of a module; arguments and result are JSON types.  With ``progress`` the function
    gets a keyword ``progress``, whose phases are shown here.  ``what``: what is done, if the process dies of it.
    """
    if in_process():
        told = {} if progress is None else {"progress": progress}
        return json.loads(json.dumps(function(**json.loads(json.dumps(arguments)), **told)))
    named = {"module": function.__module__, "name": function.__name__}
    job = {**named, "arguments": arguments, "told": progress is not None}
    with tempfile.TemporaryFile() as log, started(log) as (process, channel):
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:  # a process that is gone is told of below
            stdin.write(json.dumps(job).encode())
        try:
            return followed(channel, progress)
        except EOFError:
            status = process.wait()
        log.seek(0)
        raise InputError(f"{what}: {death(status, log.read().decode(errors='replace'))}")


def command(module: str, *words: object, python: str = sys.executable) -> list[str]:
    """The command line that runs a module of ours with this Python, or another; ``environment`` goes with this one.

    -P: a folder ``eval`` or ``backends`` in the working directory is not ours.
    """
    return [python, "-P", "-m", module, *map(str, words)]


def environment() -> dict[str, str]:
    """The environment of a process of ours, which finds this very checkout or installation."""
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{others}" if others else str(ROOT)}


@contextmanager
def started(log: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], IO[str]]]:
    """(a new process that waits for its job, what it has to say); it is gone afterwards.  It prints into ``log``."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as channel:
        try:
            process = subprocess.Popen(
                command("eval.common.processes", writing, os.getpid()), stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=(writing,), env=environment(),
            )  # fmt: skip
        finally:
            os.close(writing)
        try:
            yield process, channel
        finally:
            process.kill()  # it has said its last word, or nobody waits for it
            process.wait()


def followed(channel: IO[str], progress: Progress | None) -> Any:
    """The result of a process, whose progress is shown until then; InputError with its reason, EOFError if it died."""
    phase: Phase | None = None
    with ExitStack() as phases:
        for line in channel:
            if not line.endswith("\n"):  # it died in the middle of a word
                break
            kind, content = json.loads(line)
            if kind == "result":
                return content
            if kind == "error":
                raise InputError(content)
            if progress is None:
                continue
            if kind == "phase":
                phase = phases.enter_context(progress.phase(**content))
            elif kind == "end":
                phases.close()
            elif kind == "say":
                progress.say(content)
            elif phase is not None:
                (phase.advance if kind == "advance" else phase.expect)(content)
        raise EOFError


def death(status: int, log: str) -> str:
    """Why a process has ended without a word, from its exit status and what it has printed."""
    if status == -signal.SIGKILL:
        return "its process was killed, as the system does when memory is full; close other programs and try again"
    how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "it printed nothing")
    return f"its process {how}: {one_line(Exception(last))}"


class ToldPhase(Phase):
    """A phase that the driver shows: its progress is told, but not at every unit."""

    def __init__(self, tell: Tell, unit: str) -> None:
        super().__init__(unit, lambda line: tell("say", line))
        self.send, self.waiting, self.last = tell, 0, 0.0

    def advance(self, amount: int = 1) -> None:
        self.waiting += amount
        if (now := time.monotonic()) > self.last + EVERY_S:
            self.flush()
            self.last = now

    def flush(self) -> None:
        """Tell what has not been told yet."""
        self.send("advance", self.waiting)
        self.waiting = 0

    def expect(self, total: int) -> None:
        self.send("expect", total)


class ToldProgress(Progress):
    """Progress that the driver shows."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def say(self, line: str) -> None:
        self.tell("say", line)

    @contextmanager
    def phase(
        self, title: str, *, unit: str = "", total: int | None = None, expected: float | None = None
    ) -> Iterator[Phase]:
        self.tell("phase", {"title": title, "unit": unit, "total": total, "expected": expected})
        phase = ToldPhase(self.tell, unit)
        yield phase
        phase.flush()
        self.tell("end", None)


def result_of(job: Mapping[str, Any], tell: Tell) -> tuple[str, Any]:
    """("result", what the job's function returns) or ("error", its reason in one line)."""
    function = getattr(importlib.import_module(job["module"]), job["name"])
    try:
        return "result", function(**job["arguments"], **({"progress": ToldProgress(tell)} if job["told"] else {}))
    except CompareQError as error:
        return "error", str(error)
    except OSError as error:
        return "error", one_line(error)
    except Exception as error:  # a bug, in compare_q or in a library
        traceback.print_exc()
        return "error", f"{job['name']}: {type(error).__name__}: {one_line(error)}"


def serve(channel: int, parent: int) -> None:
    """Do the job that comes on the standard input of this process, and end it."""
    lifeline.die_with_parent(parent)
    os.set_inheritable(channel, False)
    os.environ[ENVIRONMENT] = "1"
    lock = threading.Lock()
    with open(channel, "w", encoding="utf-8") as stream:

        def tell(kind: str, content: Any) -> None:
            with lock:  # a download tells from threads of its own
                stream.write(json.dumps([kind, content]) + "\n")
                stream.flush()

        tell(*result_of(json.load(sys.stdin), tell))
        os._exit(0)  # without the seconds that libraries take to clean up


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
