"""Before anything is computed by several threads, MKL has chosen its kernels (``machine.choose_mkl_kernels``)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT, mkl

LOADS = """
from tests.support.fake_engine import FakeEngine
from tests.support.planned import planned
from compare_q.backends.worker import messages, worker
FakeEngine.load = lambda self: print(mkl.cpu_type())
worker.Worker(0.0).load(messages.LoadCommand(planned("m", "fake", "none", 100, {})), print)
"""
IS_IMPORTED_BY_A_RANK = "import compare_q.backends.vllm.extension; print(mkl.cpu_type())"


@pytest.mark.skipif(mkl.address() is None, reason="the MKL of this torch, if it has one, finds the CPU in another way")
@pytest.mark.parametrize("code", [LOADS, IS_IMPORTED_BY_A_RANK], ids=["worker", "rank"])
def test_mkl_knows_the_cpu_before_a_model_loads(code: str) -> None:
    """torch 2.10 to 2.13 and an Intel CPU: else one thread's share of the first window can be 8e-5 nats off."""
    ran = subprocess.run(
        [sys.executable, "-c", f"from tests.support import mkl; print(mkl.cpu_type())\n{code}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    before, after = map(int, ran.stdout.split())
    assert before == -1 < after
