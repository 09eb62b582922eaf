"""Engine processes: models share one without harming each other, and none outlives the driver.

No process that is unsafe to fork is forked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compare_q import backends
from compare_q.backends.worker import shared_memory, temporary
from compare_q.backends.worker.protocol import LoadCommand, encoded
from compare_q.eval.common import processes
from compare_q.eval.common.processes import PROCESSES, EngineProcess, WorkerProcess
from tests.support import ROOT, fake_engine
from tests.support.comparisons import fake
from tests.support.fake_engine import IMPORT
from tests.support.processes import parent_of, processes_of, runs, wait_until, workers_of
from tests.support.toy import Ran, planned

pytestmark = pytest.mark.engine


class Rows(dict[str, dict[str, Any]]):
    """Models by their labels; ``err``: what the run printed."""

    err = ""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines whose engine processes are started; "fake" is ``fake_engine.MadeEngine``."""
    engines: list[str] = []
    command = processes.command

    def noting_command(
        module: str, descriptor: int, driver: int, engine: str, verbose: str, python: str
    ) -> list[str]:
        if engine != backends.TOKENIZING:  # the process that decodes the worst tokens
            engines.append(engine)
        return command(module, descriptor, driver, engine, verbose, python=python)

    monkeypatch.setenv(backends.OUTSIDE, fake_engine.MADE)
    monkeypatch.setattr(processes, "command", noting_command)
    return engines


@pytest.fixture
def rows(
    compare_q: Callable[..., Ran],
    write_specs: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launched: list[str],
) -> Callable[..., Rows]:
    """A function that runs models, each in its own worker, and returns their rows by label.

    One more model is scored beforehand: then the text is tokenized, and there are results even if
    all models fail.
    """

    def run(*models: dict[str, Any]) -> Rows:
        cached = fake("cached", boost=7.0)
        data, specs = write_specs([cached])
        with monkeypatch.context() as in_this_process:
            in_this_process.setenv(backends.OUTSIDE, fake_engine.LOCATION)
            assert compare_q("-d", data, "-m", specs).status == 0
        monkeypatch.setenv(processes.IN_PROCESS_VARIABLE, "0")
        data, specs = write_specs([cached, *models])
        ran = compare_q("-d", data, "-m", specs, "-o", tmp_path / "r.json")
        models_in_results = json.loads((tmp_path / "r.json").read_text())["models"]
        rows = Rows({model["label"]: model for model in models_in_results})
        rows.err = ran.err
        return rows

    return run


def assert_uniform(row: dict[str, Any]) -> None:
    """Assert that a model has a uniform model's perplexity."""
    assert row["error"] is None
    # A uniform model's perplexity is the size of its vocabulary.
    assert row["ppl"] == pytest.approx(500.0, rel=1e-6)


def assert_right(rows: Rows, *labels: str) -> None:
    """Assert that these models were scored, and that no worker imported its engine itself."""
    assert "imported" not in rows.err
    for label in labels:
        assert_uniform(rows[label])


def test_what_one_model_does_to_its_worker_harms_no_other(
    rows: Callable[..., Rows], launched: list[str]
) -> None:
    memory = "; the engine says: CUDA out of memory. Tried to allocate 2.00 GiB."
    bad = {
        "abort": "was ended by SIGABRT",
        "memory": memory,
        "error": "told to fail after 2 windows",
    }
    bad_loads = {
        "segfault": "was ended by SIGSEGV: Fatal Python error: Segmentation fault",
        "killed": "was ended by SIGKILL, as the system does when memory is full",
        "huge": "out of memory: ",
    }
    models = [fake(label, fail=2, failure=label) for label in bad]
    for size, label in enumerate((*bad_loads, "thread", "child", "good")):
        models.append(fake(label, seconds=size / 1e6))
    results = rows(*models)
    for label, reason in (bad | bad_loads).items():
        assert reason in results[label]["error"]
    assert results["memory"]["error"].startswith("out of memory")
    assert results["memory"]["error"].endswith(memory)
    assert_right(results, "thread", "child", "good")
    assert launched == ["fake"]
    (only,) = [process for key, process in PROCESSES.running.items() if key[1] == "fake"]
    assert only.process.poll() is None


def test_a_worker_ends_with_what_its_engine_has_left(
    rows: Callable[..., Rows], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that an engine started are ended, and its threads are not waited for.

    The driver kills no worker.
    """
    killed: list[Path | None] = []  # only workers of models have a log file
    monkeypatch.setattr(WorkerProcess, "kill", lambda worker: killed.append(worker.log_file))
    assert_right(rows(fake("child"), fake("thread", seconds=1e-6)), "child", "thread")
    assert not any(killed)
    child = int((own_cache / "child").read_text())
    wait_until(lambda: not runs(child))
    assert workers_of(own_cache) == []


def test_a_killed_engine_process_loses_the_row_of_its_worker(
    rows: Callable[..., Rows], launched: list[str], own_cache: Path
) -> None:
    """The next model gets a new engine process."""
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: segments_of(own_cache) > 1)  # the first are the cached model's
        (worker,) = workers_of(own_cache)
        killed.extend((kill_engine_process(worker), worker))

    with beside(kill):
        results = rows(fake("slow", seconds=1.0), fake("good"))
    reason = "its worker was lost with its engine process, which was ended by SIGKILL"
    assert reason in results["slow"]["error"]
    assert_right(results, "good")
    assert launched == ["fake", "fake"]
    assert not {*killed} & {*processes_of(own_cache)}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this system")
@pytest.mark.parametrize("victim", ["worker", "engine process"])
def test_shared_memory_of_killed_processes_is_deleted(
    rows: Callable[..., Rows], own_cache: Path, victim: str
) -> None:
    """If the engine process is killed, too, the next one deletes what its worker has left.

    It also deletes the worker's folder.
    """
    files: list[Path] = []

    def kill() -> None:
        note = own_cache / "queue"
        wait_until(lambda: note.exists() and note.read_text())
        file = Path(note.read_text())
        (worker,) = workers_of(own_cache)
        folder = folder_of(worker)
        wait_until(lambda: str(file) in shared_memory.noted_files(str(folder)))
        assert file.exists()
        if victim == "engine process":
            kill_engine_process(worker)
        else:
            os.kill(worker, signal.SIGKILL)
        files.extend((file, folder))

    with beside(kill):
        found = rows(fake("queue", seconds=1.0), fake("good"))
    assert found["queue"]["error"]
    assert_right(found, "good")
    assert len(files) == 2
    wait_until(lambda: not any(file.exists() for file in files))


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread meanwhile, and wait for its end."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def kill_engine_process(worker: int) -> int:
    """Kill the engine process of a worker, and return its process id."""
    engine_process = parent_of(worker)
    assert engine_process is not None
    os.kill(engine_process, signal.SIGKILL)
    return engine_process


def folder_of(worker: int) -> Path:
    """Return the folder for temporary files of a worker, whose lock it has open."""
    for descriptor in Path(f"/proc/{worker}/fd").iterdir():
        target = descriptor.resolve()
        if target.name == temporary.LOCK and target.parent.name.startswith(temporary.PREFIX):
            return target.parent
    raise AssertionError("the worker has no folder")


def segments_of(cache: Path) -> int:
    """Return the number of score folders that are not empty."""
    return len({file.parent for file in (cache / "scores").glob("*/*.safetensors")})


def test_the_drivers_end_ends_all(own_cache: Path, launched: list[str]) -> None:
    """A worker that waits for jobs ends with the driver, and so does its engine's process."""
    worker = WorkerProcess(engine="fake")
    worker.channel.send_bytes(encoded(LoadCommand(planned("child", "fake", "none", 100))))
    started = own_cache / "child"
    wait_until(lambda: started.exists() and started.read_text())
    worker.engine_process.socket.close()  # as the system does when the driver ends
    assert worker.engine_process.process.wait(60) == 0
    wait_until(lambda: not processes_of(own_cache) and not runs(int(started.read_text())))
    worker.close()


DRIVER = """
import sys, time
from compare_q.eval.common import processes
processes.PROCESSES.get(sys.executable, "fake", None, verbose=False)
{end}
"""


@pytest.mark.parametrize("end", ["", "time.sleep(600)"], ids=["a good end", "kill -9"])
def test_the_drivers_end_ends_an_import(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The import ends at once, even during C code."""
    monkeypatch.setenv(IMPORT, "long")
    monkeypatch.setenv(backends.OUTSIDE, fake_engine.MADE)
    importing = own_cache / "importing"
    wait = f"while not __import__('os').path.exists({str(importing)!r}): time.sleep(0.01)"
    code = DRIVER.format(end=f"{wait}\n{end}")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as driver:
        wait_until(importing.exists)
        if end:
            driver.kill()
            assert driver.wait(4.0) == -signal.SIGKILL
        else:
            assert driver.wait(60.0) == 0
    wait_until(lambda: not processes_of(own_cache), 60.0)


def test_who_shares_an_engine_process(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)

    def get(
        engine: str = "", python: object = sys.executable, visible: tuple[str, ...] | None = None
    ) -> EngineProcess:
        return PROCESSES.get(str(python), engine, visible, verbose=False)

    first = get()
    assert get() is first
    others = [get("fake"), get(python=python), get(visible=("0",))]
    monkeypatch.setenv("AN_ENGINE_MAY_READ_THIS", "1")
    others.append(get())
    pids = {engine_process.process.pid for engine_process in (first, *others)}
    assert len(pids) == 5
    assert len(launched) == 5
    monkeypatch.delenv("AN_ENGINE_MAY_READ_THIS")
    assert get() is first
    first.process.kill()
    first.process.wait()
    assert get() is not first
    assert first.socket.fileno() == -1  # it was ended before another one was started


def test_an_engine_whose_import_starts_a_thread_is_imported_for_each_model(
    rows: Callable[..., Rows], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IMPORT, "thread")
    results = rows(fake("good"), fake("uniform", seconds=1e-6))
    for label in ("good", "uniform"):
        assert_uniform(results[label])
        notes = []
        for line in results.err.splitlines():
            if line.startswith(f"{label}: ") and "imported" in line:
                notes.append(line)
        assert len(notes) == 1
        assert "Python threads run" in notes[0]
    assert launched == ["fake"]


def test_an_engine_that_dies_of_its_import_is_its_models_failure(
    rows: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IMPORT, "death")
    error = rows(fake("good"))["good"]["error"]
    gone = "its worker was lost with its engine process, which was ended by SIGSEGV"
    assert f"{gone}: Fatal Python error: Segmentation fault" in error
