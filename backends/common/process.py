"""A process for one model: it ends with its parent, can be forked, and writes into a log.

The log replaces the file descriptors 1 and 2, not ``sys.stdout``, because vLLM's processes and C++
code do not write through Python.  Children that start during the capture keep writing to the log.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import InputError

PR_SET_PDEATHSIG = 1
NOT_INITIALIZED = 3
"""Status that libcuda returns before anything in this process has used a GPU."""
TRIAL_S = 10.0
"""Seconds after which a trial fork counts as hanging; it takes some milliseconds."""
WORKER = "COMPARE_Q_WORKER"
"""Environment variable that is set in a process for one model."""
GRACE_S = 2.0
"""Seconds after the limit of a block in which Python may still handle the signal; then the process
ends."""
TIMEOUT = re.compile(r"^Timeout \(([\d:.]+)\)!$", re.MULTILINE)
"""The first line that ``faulthandler`` writes when a limit ends the process."""
EXCEPTION = re.compile(r"\b([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)): (.+)$")
LOGGED_WARNING = re.compile(r"\bWARNING \S+ \S+ \[[^\]]+\] (.+)$")
TRACEBACK = re.compile(r"\s|Traceback|\w+Error: |.* failed$")
FAILED = re.compile(r"(EngineCore|WorkerProc) (failed|hit an exception|encountered a fatal error)")
"""The line that a process of vLLM logs before the traceback of the exception that ends the process.
"""
GENERIC = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|"
    r"EngineCore encountered|root cause"
)
"""Parts of messages of vLLM that only refer to another exception in the log."""


def in_worker() -> bool:
    """True if this process is for one model: then an engine need not start another process."""
    return WORKER in os.environ


@contextmanager
def time_limit(what: str, seconds: float) -> Iterator[None]:
    """InputError if a block of the main thread takes longer.

    Python handles signals only between two steps.  An endless step (``10 ** 10 ** 10``, or a
    tokenizer in C or Rust) therefore ends the worker, and ``step_without_end`` finds the reason in
    its log.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise InputError(f"{what} did not end within {seconds:g} s")

    earlier_action = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        # During a step that does not end, Python calls no handler: then the worker ends.
        if in_worker():
            faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, earlier_action)


def step_without_end(log: str) -> str | None:
    """Return a message if ``time_limit`` ended the process that wrote this log; otherwise None."""
    timeout = TIMEOUT.search(log)
    if timeout is None:
        return None
    return f"one step did not end within {timeout[1]} (h:min:s)"


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have a signal end this process when its ``parent`` ends, or now if the parent has ended.

    Linux sends the signal when the parent's *thread* that started this process ends.  Therefore
    start processes from a thread that lives as long as these processes.  Children do not inherit
    the signal, and must call this themselves.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the prctl call
        os.kill(os.getpid(), number)


def fork_blockers() -> list[str]:
    """Return the reasons why a fork of this process could fail or hang; empty if this process may
    be forked.

    A fork lacks its parent's CUDA context and threads.  Most libraries start new threads after a
    fork.  Others, such as GNU OpenMP after it has computed in several threads, hang in a trial fork
    that computes.
    """
    this_thread = threading.current_thread()
    threads = sorted(thread.name for thread in threading.enumerate() if thread is not this_thread)
    reasons = []
    if threads:
        reasons.append(f"Python threads run ({', '.join(threads)})")
    if has_started_cuda():
        reasons.append("CUDA is initialised")
    if reasons:
        return reasons
    return trial_fork()


def has_started_cuda() -> bool:
    """Return True if torch, or anything else in this process, has initialised CUDA."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    # Other libraries may have initialised CUDA, which libcuda reports.  With RTLD_NOLOAD, a libcuda
    # that is not loaded is an OSError.
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED)
    return False


def trial_fork() -> list[str]:
    """Return why a fork that multiplies matrices in several threads fails; empty if it does not."""
    library = sys.modules.get("torch") or sys.modules.get("numpy")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if library is not None:
                library.exp(library.ones((512, 512)) @ library.ones((512, 512)) / 512)
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + TRIAL_S
    ended, wait_status = os.waitpid(child, os.WNOHANG)
    while ended == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
        ended, wait_status = os.waitpid(child, os.WNOHANG)
    if ended == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return ["a trial fork hangs when it multiplies matrices"]
    status = os.waitstatus_to_exitcode(wait_status)
    if status != 0:
        return [f"a trial fork that multiplies matrices ended with status {status}"]
    return []


def ending(status: int) -> str:
    """Return how a process ended, by Python's exit code, which is negative for a signal."""
    with suppress(ValueError):
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


@contextmanager
def captured(log_file: Path | None) -> Iterator[None]:
    """Append everything that this process and its new children print to ``log_file``.

    None changes nothing.
    """
    if log_file is None:
        yield
        return
    # Flush before each switch, so that buffered output goes to where it was printed.
    sys.stdout.flush()
    sys.stderr.flush()
    saved = (os.dup(1), os.dup(2))
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, log):
            os.close(descriptor)


def is_generic(error: BaseException) -> bool:
    """True if an exception has no text, or only refers to another exception in the log."""
    text = str(error)
    return not text.strip() or GENERIC.search(text) is not None


def root_cause(log: str) -> str | None:
    """Return ``Type: message`` of the first exception in a log; None if there is none.

    Exceptions that only report another one are skipped.  If a process of vLLM logs that it failed,
    earlier exceptions were caught.  Lines of level WARNING are skipped: vLLM logs tracebacks of
    errors that it survives.
    """
    failed = FAILED.search(log)
    if failed:
        log = log[failed.start() :]
    for line in log.splitlines():
        match = EXCEPTION.search(line)
        if match and "WARNING" not in line and not GENERIC.search(line):
            return f"{match[1]}: {match[2].strip()}"
    return None


def warnings_in(log: str) -> list[str]:
    """Return the distinct one-line warnings of a log, without vLLM's tracebacks and prefixes."""
    # A dict, unlike a set, keeps the order of the log.
    warnings: dict[str, None] = {}
    for line in log.splitlines():
        match = LOGGED_WARNING.search(line)
        if match and not TRACEBACK.match(match[1]):
            warnings[match[1].strip()] = None
    return list(warnings)
