"""Keeping an engine's output in a log, and which processes may be forked."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from compare_q.backends.common import process
from tests.support import ROOT

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from compare_q.backends.common.process import captured
print("before")
for word in ("one", "two"):
    try:
        with captured(Path(sys.argv[1])):
            print("python", word)
            os.write(2, b"descriptor\\n")
            subprocess.run([sys.executable, "-c", "print('child')"], check=True)
            1 / 0
    except ZeroDivisionError:
        print("after", word)
"""


def test_capture_holds_python_c_and_children_and_ends_on_errors(tmp_path: Path) -> None:
    """In a separate process, because pytest replaces sys.stdout in this one."""
    log = tmp_path / "log"
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines() == ["before", "after one", "after two"]
    assert ran.stderr == ""
    assert sorted(log.read_text().split()) == sorted(
        ["child", "descriptor", "python"] * 2 + ["one", "two"]
    )


FORKS = """
import sys
from compare_q.backends.common import process
process.TRIAL_S = 2.0
print(*process.fork_blockers() or ["none"], sep=" and ", flush=True)
"""
IN_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(9,), name="mine", daemon=True).start()
"""
COMPUTED = """
import {0}
for _ in range(3):
    {0}.exp({0}.ones((500, 500)) @ {0}.ones((500, 500)))
"""
FORKS_FAIL = """
import os, sys
sys.modules["torch"] = None
os.register_at_fork(after_in_child=lambda: os._exit(5))
"""
FORKS_HANG = """
import os, time
os.register_at_fork(after_in_child=lambda: time.sleep(60))
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "none"),
        (IN_A_THREAD, "Python threads run (mine)"),
        ("import torch", "none"),
        (COMPUTED.format("numpy"), "none"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "CUDA is initialised"),
        (FORKS_FAIL, "a trial fork that multiplies matrices ended with status 5"),
        (FORKS_HANG, "a trial fork hangs when it multiplies matrices"),
    ],
    ids=["bare", "thread", "imported torch", "OpenBLAS", "CUDA", "fails", "hangs"],
)
def test_why_a_process_may_not_be_forked(code: str, reason: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}\n{FORKS}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.strip() == reason, ran.stderr


@pytest.mark.parametrize(("answer", "started"), [(0, True), (process.NOT_INITIALIZED, False)])
def test_libcuda_says_whether_cuda_was_started(
    monkeypatch: pytest.MonkeyPatch, answer: int, started: bool
) -> None:
    """CUDA is also detected if torch has not used it; a driver that is only loaded is accepted."""
    monkeypatch.setitem(sys.modules, "torch", None)
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: driver)
    assert process.has_started_cuda() is started


# vLLM also logs errors that it survives, such as a plugin that does not load.
CAUGHT = """\
(EngineCore pid=7) ERROR 11-28 18:00:00 [__init__.py:72] Failed to load plugin x
(EngineCore pid=7) ERROR 11-28 18:00:00 [__init__.py:72] ModuleNotFoundError: No module named 'x'
WARNING 11-28 18:00:01 [a.py:1] ImportError: an optional kernel
"""
DIED = """\
(Worker pid=8) ERROR 11-28 18:00:02 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=8) ERROR 11-28 18:00:02 [multiproc_executor.py:953] ValueError: too few blocks
(EngineCore pid=7) ERROR 11-28 18:00:03 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-28 18:00:03 [core.py:1510] Exception: WorkerProc initialization failed \
due to an exception
"""


@pytest.mark.parametrize(
    ("log", "gold"),
    [
        ("", None),
        (DIED, "ValueError: too few blocks"),
        (CAUGHT + DIED, "ValueError: too few blocks"),
        (CAUGHT, "ModuleNotFoundError: No module named 'x'"),
        (
            "RuntimeError: Engine core initialization failed. See root cause above.\nKeyError: 'a'",
            "KeyError: 'a'",
        ),
        (
            "INFO EngineCore encountered a fatal error.\ntorch.OutOfMemoryError: full",
            "torch.OutOfMemoryError: full",
        ),
    ],
)
def test_the_error_that_ended_a_process(log: str, gold: str | None) -> None:
    assert process.root_cause(log) == gold
