"""A run that is interrupted ends at once, and still yields what it has finished."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from backends.worker.engine_process import ENDING
from eval.run.hosts import Running

AGAIN_S = 1.0
"""Seconds after which the same signal interrupts once more, if nothing ends the run yet."""


class InterruptedRun(KeyboardInterrupt):
    """A signal that asks a run to end; ``signal`` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


@contextmanager
def signals_interrupt(running: Running) -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt as Ctrl-C does; what this process was started to ignore (nohup) stays ignored.

    The first signal interrupts.  From then on to the end of this process others change nothing: an interrupt in the
    midst of another one leaves threading's locks in a wrong state, and what was finished is still to be shown.  Only
    the same signal interrupts once more, as long as nothing has stopped what is ``running``: Python can lose the first.
    """
    first, at = 0, 0.0

    def interrupt(number: int, _: Any) -> None:
        nonlocal first, at
        now = time.monotonic()
        if not first or (number == first and now > at + AGAIN_S and not running.stopped):
            first, at = number, now
            raise InterruptedRun(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():  # Python's own end would let a handler of ours kill the process
            signal.signal(number, signal.SIG_IGN if first else handler)
