"""An engine's own processes: when one of them dies, its engine may wait for it without end."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

POLL_S = 0.5
Told = Callable[[str], None]


@contextmanager
def watched(tell: Told) -> Iterator[None]:
    """In the block, ``tell`` is called once, from another thread, when a process dies that the engine had before.

    Only a death by a signal counts, or an exit status other than 0: an engine may end its helpers.
    """
    children = multiprocessing.active_children()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            for child in children:
                if child.exitcode:
                    tell(f"{child.name}, a process of its engine, {ending(child.exitcode)}")
                    return

    if children:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def ending(status: int) -> str:
    """How a process ended, by Python's exit code: negative for a signal."""
    with suppress(ValueError):
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
