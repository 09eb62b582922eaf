"""A run that is interrupted ends at once, and still yields what it has finished."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from backends.worker.supervisor import ENDING
from eval.run.hosts import Hosts, Running
from eval.run.spares import Turn

Item = TypeVar("Item")
AGAIN_S = 1.0
"""Seconds after which the same signal interrupts once more, if nothing ends the run yet."""


class InterruptedRun(KeyboardInterrupt):
    """A signal that asks a run to end; ``signal`` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class Ending(Protocol):
    """Remembers the signal that has ended a run early."""

    signal: int


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


@contextmanager
def interrupts_end(ending: Ending, running: Running) -> Iterator[None]:
    """An interrupt ends the block, is noted in ``ending``, and goes no further: the rows so far are shown."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        running.stop()
        ending.signal = getattr(interrupt, "signal", signal.SIGINT)


def concurrently(hosts: Hosts, items: Sequence[Item], work: Callable[[Item, Turn], None]) -> None:
    """Do ``work`` on every item, in their order, on as many at a time as the run has GPUs.

    As many again may have begun, and wait for GPUs with what they could do before.  The work is done in threads, so
    that an interrupt, which comes to the main thread, ends all workers first, and what they were doing yields rows that
    say so.
    """
    if hosts.in_process:
        for place, item in enumerate(items):
            work(item, Turn(place, lambda: None))
        return
    slots = hosts.devices.slots
    waiting = threading.Semaphore(slots)
    with ThreadPoolExecutor(3 * slots) as pool:  # those that wait, that score, and that close their engine
        futures: list[Future[None]] = []
        try:
            for place, item in enumerate(items):
                waiting.acquire()
                for future in futures:
                    if future.done():
                        future.result()
                turn = Turn(place, once(waiting.release))
                futures.append(pool.submit(work, item, turn))
                futures[-1].add_done_callback(turn.over)
            for future in futures:
                future.result()
        except BaseException:
            hosts.running.stop()
            pool.shutdown(cancel_futures=True)
            raise


def once(function: Callable[[], None]) -> Callable[[], None]:
    """A function that calls another one the first time that it is called, and never again."""
    calls = itertools.count()
    return lambda: function() if next(calls) == 0 else None
