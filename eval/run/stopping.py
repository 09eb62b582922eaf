"""A run that is interrupted ends at once, and still yields what it has finished."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from eval.run.hosts import Hosts

Item = TypeVar("Item")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedRun(KeyboardInterrupt):
    """A signal that asks a run to end; ``signal`` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class Ending(Protocol):
    """Remembers the signal that has ended a run early."""

    signal: int


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt as Ctrl-C does."""

    def interrupt(number: int, _: Any) -> None:
        raise InterruptedRun(number)

    before = {number: signal.signal(number, interrupt) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_end(ending: Ending) -> Iterator[None]:
    """An interrupt ends the block, is noted in ``ending``, and goes no further: the rows so far are shown."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        ending.signal = getattr(interrupt, "signal", signal.SIGINT)


def concurrently(hosts: Hosts, items: Sequence[Item], work: Callable[[Item], None]) -> None:
    """Do ``work`` on every item, on as many at a time as the run has GPUs.

    The work is done in threads, so that an interrupt, which comes to the main thread, ends all workers first, and what
    they were doing yields rows that say so.
    """
    if hosts.in_process:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(hosts.devices.slots) as pool:
        try:
            for future in [pool.submit(work, item) for item in items]:
                future.result()
        except BaseException:
            hosts.running.stop()
            pool.shutdown(cancel_futures=True)
            raise
