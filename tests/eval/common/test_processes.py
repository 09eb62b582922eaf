"""A function in a separate process: its result, progress and errors arrive; its prints do not."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from compare_q import backends
from compare_q.eval.common import processes
from compare_q.eval.common.processes import run_in_subprocess as run
from compare_q.eval.common.progress import Progress
from tests.support import subprocess_functions as functions
from tests.support.toy import refusal

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def really_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the import of Transformers, which takes seconds and which no function here needs."""
    monkeypatch.delenv(processes.IN_PROCESS_VARIABLE)
    monkeypatch.setattr(backends, "TOKENIZING", "")


def test_result_and_progress(capfd: pytest.CaptureFixture[str]) -> None:
    """Progress is shown as if the function ran here; its prints are not shown."""
    # UTF-8 cannot encode a surrogate that stands alone.
    result = run(functions.busy, "being busy", Progress(), words=["ä", "\ud800", None], rows=30000)
    assert result["words"] == ["ä", "\ud800", None]
    assert result["process"] != os.getpid()
    assert result["nested"] == result["process"]
    out, err = capfd.readouterr()
    assert out == ""
    lines = [re.sub(r"[\d.]+ s$", "0 s", line) for line in err.splitlines()]
    assert lines == ["half way", "counting: 30000 rows in 0 s", "waiting: 0 s", "done"]


def test_errors_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An InputError has the same text as in this process, a bug names the function.

    Both are without traceback.
    """
    reason = "path: x: no such file"
    assert refusal(run, functions.refuse, "refusing", reason=reason) == reason
    message = refusal(run, functions.read, "reading", file=str(tmp_path))
    assert message.startswith("IsADirectoryError: [Errno 21] ")
    assert refusal(run, functions.divide, "dividing") == "ZeroDivisionError: division by zero"
    assert capfd.readouterr() == ("", "")


def test_a_process_that_dies_is_one_line() -> None:
    killed = "was ended by SIGKILL, as the system does when memory is full: the last words"
    aborted = "was ended by SIGABRT: Fatal Python error: Aborted"
    exited = "ended with status 7: the last words"
    for number, gold in ((signal.SIGKILL, killed), (signal.SIGABRT, aborted), (0, exited)):
        message = refusal(run, functions.die, "tokenizing x", number=int(number))
        assert message == f"tokenizing x: its worker {gold}"


def test_one_endless_step_is_ended_by_its_limit() -> None:
    """The step is in C, where Python handles no signals."""
    reason = "its worker ended with status 1: one step did not end within "
    assert refusal(run, functions.hang, "tokenizing x").startswith(f"tokenizing x: {reason}")
