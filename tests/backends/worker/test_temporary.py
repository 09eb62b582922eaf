"""A folder for temporary files is deleted although killed processes still write into it."""

from __future__ import annotations

import shutil
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
