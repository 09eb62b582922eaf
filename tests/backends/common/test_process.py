"""A process that ends with the process that started it; keeping an engine's output in a log, and what went wrong in
it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compare_q.backends.common.process import root_cause
from tests.support import ROOT
from tests.support.processes import runs, wait_until

CHILD = """
import os, sys, time
from compare_q.backends.common import process
process.die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
time.sleep(60)
"""


@pytest.mark.engine
def test_a_killed_parent_takes_its_child_with_it() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.kill()
        parent.wait()
        wait_until(lambda: not runs(child))


FAILED_START = """\
(MainProcess pid=1) WARNING 11-21 05:52:13 [base.py:380] ValueError: Tokenizer not available
(VllmWorker-0 pid=3) ERROR 11-21 05:50:58 [multiproc_executor.py:953] WorkerProc failed to start.
(VllmWorker-0 pid=3) ERROR 11-21 05:50:58 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=3) ERROR 11-21 05:50:58 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=3) ERROR 11-21 05:50:58 [executor.py:953] ValueError: Available memory on node 0 is too small
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_root_cause_is_the_first_real_error() -> None:
    assert root_cause(FAILED_START) == "ValueError: Available memory on node 0 is too small"


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
    """In a process of its own: pytest's own capture stands in for sys.stdout here."""
    log = tmp_path / "log"
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == ["before", "after one", "after two"]
    assert ran.stderr == ""
    assert sorted(log.read_text().split()) == sorted(["child", "descriptor", "python"] * 2 + ["one", "two"])
