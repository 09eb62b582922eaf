"""Engine processes: models share one process without harming each other; no process outlives the driver, and no unsafe
process is forked."""

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
from compare_q.backends.worker.messages import LoadCommand, encoded
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
    """A list of the engines whose engine processes are started; "fake" is ``fake_engine.MadeEngine``."""
    found, command = [], processes.command

    def noted(module: str, descriptor: int, driver: int, engine: str, verbose: str, python: str) -> list[str]:
        found.extend([engine] if engine != backends.TOKENIZING else [])  # not the process that decodes the worst tokens
        return command(module, descriptor, driver, engine, verbose, python=python)

    monkeypatch.setenv(backends.OUTSIDE, fake_engine.MADE)
    monkeypatch.setattr(processes, "command", noted)
    return found


@pytest.fixture
def rows(
    compare_q: Callable[..., Ran], write_specs: Callable[..., tuple[Path, Path]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, launched: list[str],
) -> Callable[..., Rows]:  # fmt: skip
    """Run models, each in its own worker, and return their rows by label.

    One more model is scored beforehand: then the text is tokenized, and there are results even if all models fail.
    """

    def run(*models: dict[str, Any]) -> Rows:
        cached = fake("cached", boost=7.0)
        data, specs = write_specs([cached])
        with monkeypatch.context() as in_this_process:
            in_this_process.setenv(backends.OUTSIDE, fake_engine.LOCATION)
            assert compare_q("-d", data, "-m", specs).status == 0
        monkeypatch.setenv(processes.ENVIRONMENT, "0")
        data, specs = write_specs([cached, *models])
        ran = compare_q("-d", data, "-m", specs, "-o", tmp_path / "r.json")
        found = json.loads((tmp_path / "r.json").read_text())["models"]
        rows = Rows({model["label"]: model for model in found})
        rows.err = ran.err
        return rows

    return run


def assert_right(found: Rows, *labels: str) -> None:
    """Assert that these models have a uniform model's perplexity, and that no worker reports an import of its own."""
    assert "imported" not in found.err
    for label in labels:
        row = found[label]
        assert (row["error"], row["ppl"]) == (None, pytest.approx(500.0, rel=1e-6))


def test_what_one_model_does_to_its_worker_harms_no_other(rows: Callable[..., Rows], launched: list[str]) -> None:
    memory = "; the engine says: CUDA out of memory. Tried to allocate 2.00 GiB."
    bad = {"abort": "was ended by SIGABRT", "memory": memory, "error": "told to fail after 2 windows"}
    bad_loads = {
        "segfault": "was ended by SIGSEGV: Fatal Python error: Segmentation fault",
        "killed": "was ended by SIGKILL, as the system does when memory is full",
        "huge": "out of memory: ",
    }
    others = [fake(label, seconds=size / 1e6) for size, label in enumerate((*bad_loads, "thread", "child", "good"))]
    found = rows(*(fake(each, fail=2, failure=each) for each in bad), *others)
    for label, reason in (bad | bad_loads).items():
        assert reason in found[label]["error"]
    assert found["memory"]["error"].startswith("out of memory")
    assert found["memory"]["error"].endswith(memory)
    assert_right(found, "thread", "child", "good")
    assert launched == ["fake"]
    (only,) = [process for key, process in PROCESSES.running.items() if key[1] == "fake"]
    assert only.process.poll() is None


def test_a_worker_ends_with_what_its_engine_has_left(
    rows: Callable[..., Rows], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that an engine started are ended, and its threads are not waited for.  The driver kills no worker."""
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
        found = rows(fake("slow", seconds=1.0), fake("good"))
    assert "its worker was lost with its engine process, which was ended by SIGKILL" in found["slow"]["error"]
    assert_right(found, "good")
    assert launched == ["fake", "fake"]
    assert not {*killed} & {*processes_of(own_cache)}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this system")
@pytest.mark.parametrize("victim", ["worker", "engine process"])
def test_shared_memory_of_killed_processes_is_deleted(rows: Callable[..., Rows], own_cache: Path, victim: str) -> None:
    """If the engine process is killed, too, the next one deletes what its worker has left, and the worker's folder."""
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
    """The worker, which waits for jobs, and the process that its engine has started end with the driver."""
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
def test_the_drivers_end_ends_an_import(own_cache: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """The import ends at once, even during C code."""
    monkeypatch.setenv(IMPORT, "long")
    monkeypatch.setenv(backends.OUTSIDE, fake_engine.MADE)
    wait = f"while not __import__('os').path.exists({str(own_cache / 'importing')!r}): time.sleep(0.01)"
    code = DRIVER.format(end=f"{wait}\n{end}")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as driver:
        wait_until((own_cache / "importing").exists)
        if end:
            driver.kill()
        assert driver.wait(4.0 if end else 60.0) == (-signal.SIGKILL if end else 0)
    wait_until(lambda: not processes_of(own_cache), 60.0)


def test_who_shares_an_engine_process(tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)

    def get(engine: str = "", python: object = sys.executable, visible: tuple[str, ...] | None = None) -> EngineProcess:
        return PROCESSES.get(str(python), engine, visible, verbose=False)

    first = get()
    assert get() is first
    others = [get("fake"), get(python=python), get(visible=("0",))]
    monkeypatch.setenv("AN_ENGINE_MAY_READ_THIS", "1")
    others.append(get())
    assert len({each.process.pid for each in (first, *others)}) == len(launched) == 5
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
    found = rows(fake("good"), fake("uniform", seconds=1e-6))
    for label in ("good", "uniform"):
        assert (found[label]["error"], found[label]["ppl"]) == (None, pytest.approx(500.0, rel=1e-6))
        (line,) = [line for line in found.err.splitlines() if line.startswith(f"{label}: ") and "imported" in line]
        assert "Python threads run" in line
    assert launched == ["fake"]


def test_an_engine_that_dies_of_its_import_is_its_models_failure(
    rows: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IMPORT, "death")
    error = rows(fake("good"))["good"]["error"]
    gone = "its worker was lost with its engine process, which was ended by SIGSEGV"
    assert f"{gone}: Fatal Python error: Segmentation fault" in error
