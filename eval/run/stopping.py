"""A run that is interrupted ends at once, and still yields what it has finished."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from backends.worker.engine_process import ENDING
from eval.run.hosts import Hosts, Running

Item = TypeVar("Item")
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


@dataclass(frozen=True)
class Turn:
    """A model's place among those of the run, from 0; ``begun`` is called once it has GPUs: the next one may come."""

    place: int
    begun: Callable[[], None] = lambda: None

    def over(self, _: object) -> None:
        """The next one may come, whatever became of this one."""
        self.begun()


def concurrently(hosts: Hosts, items: Sequence[Item], work: Callable[[Item, Turn], None]) -> None:
    """Do ``work`` on every item, in their order, twice as many at a time as there are GPUs: some score, and as many
    load beside them, or wait with what they could do before.

    The work is done in threads, so that an interrupt, which comes to the main thread, ends all workers first, and what
    they were doing yields rows that say so.
    """
    if hosts.in_process:
        for place, item in enumerate(items):
            work(item, Turn(place))
        return
    with ThreadPoolExecutor(2 * hosts.devices.slots) as pool:
        futures: list[Future[None]] = []
        try:
            for place, item in enumerate(items):
                begun = threading.Event()
                turn = Turn(place, begun.set)
                futures.append(pool.submit(work, item, turn))
                futures[-1].add_done_callback(turn.over)
                begun.wait()
                for future in futures:
                    if future.done():
                        future.result()
            for future in futures:
                future.result()
        except BaseException:
            hosts.running.stop()
            pool.shutdown(cancel_futures=True)
            raise
