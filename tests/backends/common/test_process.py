"""A process that ends with the process that started it."""

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
process.die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
time.sleep(60)
"""


def test_a_killed_parent_takes_its_child_with_it() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.kill()
        parent.wait()
        wait_until(lambda: not runs(child))


def test_a_child_that_comes_too_late_ends_at_once() -> None:
    """The process that it takes for its parent is not its parent any more."""
    ran = subprocess.run([sys.executable, "-c", CHILD, "1"], cwd=ROOT, capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (-signal.SIGKILL, b"")
    assert os.getpid() != 1
