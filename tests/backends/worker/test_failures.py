"""Messages after the death of an engine's process, and MKL's kernels before a model loads."""

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
    ("number", "end"),
    [
        (signal.SIGKILL, "was ended by SIGKILL"),
        (signal.SIGSEGV, "was ended by SIGSEGV"),
    ],
)
def test_the_death_of_a_process_is_reported(number: signal.Signals, end: str) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(60,), name="core")
    child.start()
    reasons: list[str] = []
    is_reported = threading.Event()

    def send(message: Failed) -> None:
        reasons.append(message.reason)
        is_reported.set()

    with worker.watched_children(send):
        assert child.pid is not None
        os.kill(child.pid, number)
        assert is_reported.wait(10)
    assert reasons == [f"core, a process of its engine, {end}"]


@pytest.mark.engine
def test_a_process_that_ends_in_order_is_not_reported() -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(0.2,))
    child.start()
    messages: list[Failed] = []
    with worker.watched_children(messages.append):
        child.join()
        time.sleep(2 * worker.POLL_S)
    assert messages == []


LOADS = """
from tests.support.fake_engine import FakeEngine
from tests.support.toy import planned
from compare_q.backends.worker import protocol, worker
FakeEngine.load = lambda self: print(mkl.cpu_type())
worker.Worker(0.0).load(protocol.LoadCommand(planned("m", "fake", "none", 100, {})), print)
"""
IS_IMPORTED_BY_A_RANK = "import compare_q.backends.vllm.extension; print(mkl.cpu_type())"


@pytest.mark.skipif(
    mkl.address() is None,
    reason="the MKL of this torch, if it has one, finds the CPU in another way",
)
@pytest.mark.parametrize("code", [LOADS, IS_IMPORTED_BY_A_RANK], ids=["worker", "rank"])
def test_mkl_knows_the_cpu_before_a_model_loads(code: str) -> None:
    """Otherwise, with torch 2.10 to 2.13 on an Intel CPU, a part of the first window may be wrong.

    One thread's part may then be off by 8e-5.
    """
    ran = subprocess.run(
        [sys.executable, "-c", f"from tests.support import mkl; print(mkl.cpu_type())\n{code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = ran.stdout.split()
    assert int(before) == -1
    assert int(after) > -1
