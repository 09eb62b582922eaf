"""A process that ends with the process that started it: told by the system, or by looking for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.processes import runs, wait_until

pytestmark = pytest.mark.engine
CHILD = """
import os, sys, time
from compare_q.backends.common import process
if sys.argv[2] == "polling":
    process.told_by_the_system = lambda: False
    process.POLL_S = 0.05
process.die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]])
time.sleep(60)
"""


@pytest.mark.parametrize("way", ["told", "polling"])
def test_a_killed_parent_takes_its_child_with_it(way: str) -> None:
    command = [sys.executable, "-c", PARENT, CHILD, way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.kill()
        parent.wait()
        wait_until(lambda: not runs(child))


def test_a_child_that_comes_too_late_ends_at_once() -> None:
    """The process that it takes for its parent is not its parent any more."""
    ran = subprocess.run([sys.executable, "-c", CHILD, "1", "told"], cwd=ROOT, capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (-signal.SIGKILL, b"")
    assert os.getpid() != 1
