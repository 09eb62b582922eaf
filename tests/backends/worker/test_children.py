"""Processes of an engine that die while it works."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from backends.worker.children import watched

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("how", "gold"),
    [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSEGV, "was ended by SIGSEGV"), (None, None)],
)
def test_a_death_is_told_and_a_good_end_is_not(how: signal.Signals | None, gold: str | None) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(60 if how else 0.2,), name="core")
    child.start()
    told, heard = [], threading.Event()

    def tell(reason: str) -> None:
        told.append(reason)
        heard.set()

    with watched(tell):
        if how is not None:
            assert child.pid is not None
            os.kill(child.pid, how)
            assert heard.wait(10)
        else:
            child.join()
            time.sleep(1)
    assert told == ([] if gold is None else [f"core, a process of its engine, {gold}"])


def test_nobody_is_watched_afterwards() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    told: list[str] = []
    with watched(told.append):
        pass
    child.kill()
    child.join()
    time.sleep(1)
    assert told == []
