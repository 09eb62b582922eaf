"""Shared memory of a worker's processes is deleted after they were killed, and nobody else's is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory as python_shared_memory
from pathlib import Path

import pytest

from compare_q.backends.worker import shared_memory

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this system")

CREATE = """
import mmap, sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
model = open(sys.argv[1], "rb")
weights = mmap.mmap(model.fileno(), 0, access=mmap.ACCESS_READ)
print(memory.name, flush=True)
time.sleep(60)
"""


@pytest.fixture
def model() -> Iterator[Path]:
    """A user's model in /dev/shm."""
    file = Path(f"/dev/shm/a model of {os.getpid()}.safetensors")
    file.write_bytes(b"weights")
    yield file
    file.unlink(missing_ok=True)


def start(model: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process with its own group and resource tracker; return it, and its shared memory."""
    process = subprocess.Popen(
        [sys.executable, "-c", CREATE, str(model)],
        stdout=subprocess.PIPE,
        text=True,
        # kill() ends the whole group, which must not include the test.
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, Path("/dev/shm", process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process with its resource tracker, which would delete its shared memory."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("noted", [True, False])
def test_files_of_a_killed_group_are_deleted(model: Path, tmp_path: Path, noted: bool) -> None:
    """They are known from maps before the kill, or from a note that was written before it."""
    process, file = start(model)
    if noted:
        shared_memory.note(process.pid, str(tmp_path))
        kill(process)
        files = shared_memory.files_of_worker(process.pid, str(tmp_path))
    else:
        files = shared_memory.files_of_worker(process.pid, str(tmp_path))
        kill(process)
    assert file.exists()
    assert files == {str(file)}
    shared_memory.remove(files)
    assert not file.exists()
    assert model.exists()


def test_a_file_that_another_process_maps_stays(model: Path) -> None:
    process, file = start(model)
    memory = python_shared_memory.SharedMemory(file.name)
    files = shared_memory.files_of_group(process.pid)
    kill(process)
    assert shared_memory.remove(files) == {str(file)}
    assert file.exists()
    memory.close()
    memory.unlink()
    shared_memory.remove(files)


def test_notes_are_written_when_a_file_appears(model: Path, tmp_path: Path) -> None:
    """A note has the files of its group, and keeps those that are no longer mapped."""
    notes = shared_memory.Notes()
    notes.update({})
    process, file = start(model)
    notes.update({process.pid: str(tmp_path)})
    assert shared_memory.noted_files(str(tmp_path)) == {str(file)}
    kill(process)
    shared_memory.note(process.pid, str(tmp_path))
    assert shared_memory.noted_files(str(tmp_path)) == {str(file)}
    (tmp_path / shared_memory.NOTE).unlink()
    notes.update({process.pid: str(tmp_path)})  # once more after a new file
    notes.update({process.pid: str(tmp_path / "nothing")})
    assert shared_memory.remove({str(file)}) == set()
    assert not file.exists()


def test_files_of_this_process_are_not_a_workers(tmp_path: Path) -> None:
    memory = python_shared_memory.SharedMemory(create=True, size=4096)
    file = f"/dev/shm/{memory.name}"
    shared_memory.note(os.getpgrp(), str(tmp_path))
    shared_memory.note(os.getpgrp(), "")
    assert file in shared_memory.noted_files(str(tmp_path))
    assert file not in shared_memory.files_of_worker(-1, str(tmp_path))
    memory.close()
    assert file in shared_memory.files_of_worker(-1, str(tmp_path))
    memory.unlink()
    assert shared_memory.files_of_worker(-1, str(tmp_path / "nothing")) == set()


def test_a_semaphore_that_nobody_maps_yet_is_its_creators(model: Path) -> None:
    process, file = start(model)
    mine = Path(f"/dev/shm/sem.loky-{process.pid}-a1_b")
    other = Path(f"/dev/shm/sem.loky-{os.getpid()}-a1_b")
    # The creator's process id is in the name, because no map shows an unmapped semaphore.
    for semaphore in (mine, other):
        semaphore.touch()
    assert shared_memory.files_of_group(process.pid) == {str(file), str(mine)}
    kill(process)
    assert shared_memory.remove({str(file), str(mine)}) == set()
    assert other.exists()
    other.unlink()


def test_without_a_folder_no_note_is_written_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder, a user's, may have a file of the same name."""
    monkeypatch.chdir(tmp_path)
    shared_memory.write_note("", {"/dev/shm/psm_1"})
    assert list(tmp_path.iterdir()) == []
    Path(shared_memory.NOTE).write_text("/dev/shm/psm_1")
    assert shared_memory.noted_files("") == set()
    assert "/dev/shm/psm_1" not in shared_memory.files_of_worker(-1, "")


def test_a_note_cannot_name_other_files(tmp_path: Path) -> None:
    # A user's model, a path below an allowed prefix, and a file outside /dev/shm.
    (tmp_path / shared_memory.NOTE).write_text(
        "/dev/shm/model.safetensors\n/dev/shm/psm_/x\n/etc/passwd\n"
    )
    assert shared_memory.noted_files(str(tmp_path)) == set()
