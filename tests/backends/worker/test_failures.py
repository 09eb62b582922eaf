"""Messages after out-of-memory errors and dead processes, and MKL's choice of kernels before a
model loads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from compare_q.backends.worker import worker
from compare_q.backends.worker.protocol import Failed
from tests.support import ROOT, mkl


@pytest.mark.engine
@pytest.mark.parametrize(
    ("how", "gold"),
    [
        (signal.SIGKILL, "was ended by SIGKILL"),
        (signal.SIGSEGV, "was ended by SIGSEGV"),
        (None, None),
    ],
)
def test_a_death_is_told_and_a_good_end_is_not(
    how: signal.Signals | None, gold: str | None
) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(60 if how else 0.2,), name="core")
    child.start()
    told: list[str] = []
    heard = threading.Event()

    def send(message: Failed) -> None:
        told.append(message.reason)
        heard.set()

    with worker.watched_children(send):
        if how is not None:
            assert child.pid is not None
            os.kill(child.pid, how)
            assert heard.wait(10)
        else:
            child.join()
            time.sleep(1)
    assert told == ([] if gold is None else [f"core, a process of its engine, {gold}"])


LOADS = """
from tests.support.fake_engine import FakeEngine
from tests.support.toy import planned
from compare_q.backends.worker import messages, worker
FakeEngine.load = lambda self: print(mkl.cpu_type())
worker.Worker(0.0).load(messages.LoadCommand(planned("m", "fake", "none", 100, {})), print)
"""
IS_IMPORTED_BY_A_RANK = "import compare_q.backends.vllm.extension; print(mkl.cpu_type())"


@pytest.mark.skipif(
    mkl.address() is None,
    reason="the MKL of this torch, if it has one, finds the CPU in another way",
)
@pytest.mark.parametrize("code", [LOADS, IS_IMPORTED_BY_A_RANK], ids=["worker", "rank"])
def test_mkl_knows_the_cpu_before_a_model_loads(code: str) -> None:
    """Otherwise, with torch 2.10 to 2.13 on an Intel CPU, one thread's part of the first window may
    be off by 8e-5.
    """
    ran = subprocess.run(
        [sys.executable, "-c", f"from tests.support import mkl; print(mkl.cpu_type())\n{code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, ran.stdout.split())
    assert before == -1 < after
