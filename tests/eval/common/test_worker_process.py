"""A worker as a process: the code that it runs, and the meaning of signals to it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from compare_q import backends
from compare_q.backends.common.errors import InputError, ModelError, StoppedError
from compare_q.backends.worker.protocol import CallCommand, InspectEngine
from compare_q.eval.common import processes
from compare_q.eval.common.processes import WorkerProcess
from tests.support import ROOT
from tests.support.processes import wait_until, workers_of
from tests.support.toy import planned, refusal

pytestmark = pytest.mark.engine
CODE = Path(backends.__file__).resolve().parent
LEAVE_A_FILE = CallCommand(
    function="tests.eval.common.test_worker_process:leave_a_file", arguments={}
)
QUESTION = InspectEngine(planned("a", "fake", "none", 1))


def copy_of_the_code(folder: Path, added: str = "") -> Path:
    """Copy ``compare_q`` as an installation has it, with ``added`` at the end of a file."""
    copied = folder / "compare_q"
    for source, target in (("compare_q", "."), ("eval", "eval"), ("backends", "backends")):
        shutil.copytree(
            ROOT / source, copied / target, ignore=shutil.ignore_patterns("__pycache__")
        )
    with (copied / "backends" / "scoring" / "token_statistics.py").open("a") as file:
        file.write(added)
    return copied / "backends"


def test_each_installation_has_a_link_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second installation with the same cache must not run the first one's code."""
    for name in ("first", "second", "first"):
        installed = tmp_path / name / "compare_q"
        installed.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(
            processes, "compare_q", SimpleNamespace(__file__=str(installed / "__init__.py"))
        )
        root, *others = processes.environment("/another/python")["PYTHONPATH"].split(":")
        # Nothing else that is installed there may be imported.
        assert str(installed.parent) not in [root, *others]
        assert (Path(root) / "compare_q").resolve() == installed


def test_a_worker_that_cannot_be_started_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link to the code or the log cannot be written, or the Python does not exist."""
    monkeypatch.setattr(
        processes,
        "compare_q",
        SimpleNamespace(__file__=str(tmp_path / "compare_q" / "__init__.py")),
    )
    (tmp_path / "file").touch()
    # Files of other tests must not be closed later.
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for cache, log_file, python in (
        ("file", "log", "/other"),
        ("x", "file/log", "/other"),
        ("x", "log", "/none"),
    ):
        monkeypatch.setenv("COMPARE_Q_CACHE", str(tmp_path / cache))
        text = refusal(WorkerProcess, python, log_file=tmp_path / log_file)
        assert text.startswith(f"python: {python}: cannot be started: ")
        assert ("Not a directory" in text) == (python == "/other")
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("added", ["", "# edited\n"])
def test_a_worker_with_other_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: str
) -> None:
    """Code is compared by content: a copy of the same code is accepted."""
    copied = copy_of_the_code(tmp_path, added)
    monkeypatch.setattr(
        processes, "environment", lambda python: {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    worker = WorkerProcess()
    try:
        if not added:
            assert worker.perform(QUESTION, 60.0, ignore)["installed"]
            return
        with pytest.raises(InputError) as refused:
            worker.perform(QUESTION, 60.0, ignore)
    finally:
        worker.close()
    assert str(refused.value) == (
        f"python: {sys.executable}: runs another compare_q, {copied}, "
        f"than {CODE} was as this run began; start it "
        "again if that was changed since; else uninstall the other one there, or run that"
    )


def test_a_python_that_cannot_run_our_code_says_why(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no such module' >&2\nexit 3\n")
    python.chmod(0o755)
    worker = WorkerProcess(str(python), "fake", log_file=tmp_path / "log")
    try:
        with pytest.raises(ModelError) as died:
            worker.perform(QUESTION, 60.0, ignore)
    finally:
        worker.close()
    assert str(died.value) == (
        "its worker was lost with its engine process, which ended with status 3: no such module "
        f"(log: {tmp_path / 'log'})"
    )


@pytest.mark.parametrize("when", ["before it is there", "at work"])
def test_a_worker_that_is_killed_was_interrupted(tmp_path: Path, when: str) -> None:
    """No process is left, whether or not the worker has performed a command before."""
    worker = WorkerProcess(log_file=tmp_path / "log")
    if when == "at work":
        assert worker.perform(QUESTION, 60.0, ignore)["installed"]
    worker.kill()
    with pytest.raises(StoppedError, match="interrupted"):
        worker.perform(QUESTION, 60.0, ignore)
    worker.close()
    wait_until(lambda: not workers_of(Path(os.environ["COMPARE_Q_CACHE"])))


def leave_a_file(_: object) -> str:
    """Leave a temporary file in a worker, as vLLM does if it is interrupted; return its folder."""
    descriptor, name = tempfile.mkstemp(prefix="vllm_dist_")
    os.close(descriptor)
    return str(Path(name).parent)


@pytest.mark.parametrize("end", ["kill", "kill -9", "close"])
def test_a_worker_leaves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """They are in a folder of its own, below the user's TMPDIR."""
    # Short, since the path of a Unix socket has at most 107 bytes.
    mine = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("TMPDIR", str(mine))
    worker = WorkerProcess(log_file=tmp_path / "log")
    folder = Path(worker.perform(LEAVE_A_FILE, 60.0, ignore))
    assert folder.parent == mine
    assert list(folder.iterdir())
    if end == "kill":
        worker.kill()
    elif end == "kill -9":
        os.kill(worker.group, signal.SIGKILL)
    worker.close()
    wait_until(lambda: not folder.exists())
    assert list(mine.iterdir()) == []
    mine.rmdir()


def test_a_long_tmpdir_is_used_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in it would make the paths of an engine's sockets longer than the system allows."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    worker = WorkerProcess(log_file=tmp_path / "log")
    assert worker.perform(LEAVE_A_FILE, 60.0, ignore) == str(long)
    worker.close()


def ignore(message: object) -> None:
    """Show nothing."""
