"""A folder for temporary files is deleted although killed processes still write into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.worker import temporary


def test_a_folder_is_deleted_although_a_process_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that appears during a deletion keeps the folder; the next attempt deletes both."""
    folder = tmp_path / "cq-worker"
    folder.mkdir()
    delete = shutil.rmtree
    attempts = []

    def delete_while_a_process_writes(path: str, **flags: Any) -> None:
        delete(path, **flags)
        attempts.append(path)
        if len(attempts) == 1:
            folder.mkdir()
            (folder / "vllm_dist_1").touch()

    monkeypatch.setattr(shutil, "rmtree", delete_while_a_process_writes)
    temporary.remove(str(folder))
    assert not folder.exists()
    assert len(attempts) == 2


LOCKED = """
import time
from compare_q.backends.worker import temporary
print(temporary.new_folder(), flush=True)
time.sleep(60)
"""


def test_folders_of_killed_processes_are_found() -> None:
    """A folder whose process lives is not found, nor a folder without a lock."""
    with tempfile.TemporaryDirectory() as parent:
        environment = {**os.environ, "TMPDIR": parent}
        command = [sys.executable, "-c", LOCKED]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
        assert Path(folder).parent == Path(parent)
        Path(parent, "cq-without-a-lock").mkdir()
        script = "from compare_q.backends.worker import temporary; print(*temporary.abandoned())"
        look = [sys.executable, "-c", script]
        alive = subprocess.run(look, env=environment, capture_output=True, text=True, check=True)
        process.kill()
        process.communicate()
        killed = subprocess.run(look, env=environment, capture_output=True, text=True, check=True)
    assert (alive.stdout.split(), killed.stdout.split()) == ([], [folder])
