"""Files of log-probabilities are read once, and again after a change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.base import Window
from compare_q.backends.common import storage
from compare_q.backends.common.errors import InputError
from compare_q.backends.scores_file import kept_lines
from compare_q.backends.scores_file.kept_lines import lines_of
from compare_q.backends.scores_file.rollouts_engine import RolloutsEngine
from compare_q.backends.scores_file.scores_file_engine import ScoresFileEngine
from tests.support import rollouts, scores_files

WINDOW = Window.scored_from(0, np.array([5, 3, 4], np.int32))


class Reader:
    """Yields the words of a file, and counts how often it is read."""

    def __init__(self) -> None:
        self.n_reads = 0

    def read(self, file: Path) -> Iterator[str]:
        self.n_reads += 1
        for word in file.read_text().split():
            if word == "wrong":
                raise InputError(f"{file}: wrong")
            yield word


def write_before(file: Path, text: str, seconds: float) -> None:
    """Write a file whose last change was so many seconds ago."""
    file.write_text(text)
    changed = file.stat().st_mtime - seconds
    os.utime(file, (changed, changed))


def test_a_file_is_read_again_only_after_a_change(tmp_path: Path) -> None:
    file = tmp_path / "a"
    reader = Reader()
    read = reader.read
    for text, seconds in (("a b", 60), ("c d", 30), ("e", 30)):
        write_before(file, text, seconds)
        n_reads = reader.n_reads
        for _ in range(3):
            assert list(lines_of(read, file)) == text.split()
        assert reader.n_reads == n_reads + 1


def test_a_file_that_has_just_been_written_is_read_each_time(tmp_path: Path) -> None:
    """A second change may have the same time."""
    file = tmp_path / "a"
    reader = Reader()
    file.write_text("a b")
    for _ in range(2):
        assert list(lines_of(reader.read, file)) == ["a", "b"]
    assert reader.n_reads == 2


def test_large_files_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_lines, "LARGEST_KEPT_BYTES", 2)
    file = tmp_path / "a"
    reader = Reader()
    write_before(file, "a b", 60)
    for _ in range(2):
        assert list(lines_of(reader.read, file)) == ["a", "b"]
    assert reader.n_reads == 2


def test_a_fault_is_reported_each_time(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_before(file, "a wrong", 60)
    read = Reader().read
    for _ in range(2):
        with pytest.raises(InputError):
            list(lines_of(read, file))


def test_engines_share_arrays_that_cannot_be_changed(tmp_path: Path) -> None:
    line = {
        "window": WINDOW.digest,
        "logprob": [-0.5, -2.5],
        "top_ids": [[3, 7], [7, 8]],
        "top_logprobs": [[-0.5, -1.25], [-0.25, -2.0]],
    }
    file = scores_files.write(tmp_path / "s.jsonl", [line])
    write_before(file, file.read_text(), 60)
    assert storage.file_state(file) is not None
    (scores,) = ScoresFileEngine.lines(file)
    (again,) = ScoresFileEngine.lines(file)
    assert again is scores
    assert scores.top is not None
    rollout_file = rollouts.write(tmp_path / "r.jsonl", [rollouts.line_of([5], [7], [-0.5])])
    write_before(rollout_file, rollout_file.read_text(), 60)
    (rollout,) = RolloutsEngine.lines(rollout_file)
    (rollout_again,) = RolloutsEngine.lines(rollout_file)
    assert rollout_again is rollout
    for array in (
        scores.logprob,
        scores.top.ids,
        scores.top.logprobs,
        rollout.token_ids,
        rollout.logprobs,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
