"""Segments and records that are damaged, in the wrong place or somebody else's: none serves, none stops a run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import numpy as safetensors

from compare_q.backends.base import TokenScores
from compare_q.backends.common import storage
from compare_q.backends.scoring import segments
from compare_q.backends.scoring.segments import commit, load
from tests.backends.scoring.test_segments import TAG, pairs
from tests.support.flips import KilledError, flips, killed_at
from tests.support.scores import random_windows, same

WINDOWS = random_windows(6, longest=12)
GIVEN = {window.index: scores for window, scores in pairs(WINDOWS)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Windows 0-1, 2 and 3-5 in a segment each, and two records."""
    for some in ([0, 1], [2], [3, 4, 5]):
        commit(tmp_path, TAG, [(WINDOWS[index], GIVEN[index]) for index in some], "s", 1.0)
    segments.write_record(tmp_path, "s", {"label": "W4A16", "load_seconds": 1.5})
    segments.write_record(tmp_path, "t", {"label": "W4A16", "load_seconds": 2.5})
    return tmp_path


def read(folder: Path) -> tuple[dict[int, TokenScores], set[Path]]:
    """(scores, each as it was committed, damaged files)."""
    loaded = load(folder, TAG, WINDOWS)
    assert all(same(scores, GIVEN[index]) for index, scores in loaded.scores.items())
    return loaded.scores, set(loaded.damaged)


def test_every_flipped_bit_is_found(folder: Path) -> None:
    """A segment's windows are missing and a record is not there; all else is, and no number is another one."""
    whole, held = segments.records(folder), {}
    for file in sorted(folder.iterdir()):
        other = file.rename(folder / "away")
        held[file] = (GIVEN.keys() - read(folder)[0].keys(), whole.keys() - segments.records(folder).keys())
        other.rename(file)
    for file, position in flips(sorted(held), seed=1):
        found, damaged = read(folder)
        windows, sessions = held[file]
        assert (found.keys(), damaged) == (GIVEN.keys() - windows, {file}), position
        assert segments.records(folder) == {name: each for name, each in whole.items() if name not in sessions}
    assert read(folder)[1] == set()


def test_files_under_another_name_are_found(folder: Path) -> None:
    """Of another digest, of another reference, of another session."""
    segment, record = sorted(folder.glob(f"{TAG}.*"))[0], folder / "record.s.json"
    whole = read(folder)[0].keys()
    for file, name, tag in (
        (segment, f"{TAG}.{'0' * 40}.safetensors", TAG),
        (segment, f"{'f' * 16}.{segment.name.split('.')[1]}.safetensors", "f" * 16),
        (record, "record.u.json", TAG),
    ):
        other = file.rename(folder / name)
        loaded = load(folder, tag, WINDOWS)
        assert set(loaded.damaged) == {other}
        assert (loaded.scores.keys() == whole) == (file == record)
        assert "u" not in loaded.records
        other.rename(file)


def with_digest(folder: Path, data: bytes) -> Path:
    """A segment of window 2 that has the right digest in its name, whatever it is."""
    file = folder / f"{TAG}.{hashlib.sha256(data).hexdigest()[:40]}.safetensors"
    file.write_bytes(data)
    return file


def metadata(change: dict[str, Any]) -> bytes:
    """A segment of window 2 whose metadata are changed, or of which nothing but {"x": 1} is there."""
    made = {
        "version": 2, "tag": TAG, "session": "s", "seconds": 1.0,
        "windows": [[2, WINDOWS[2].n_scored, segments.digest_of(WINDOWS[2])]],
    }  # fmt: skip
    columns = {name: getattr(GIVEN[2], name) for name in segments.COLUMNS}
    return safetensors.save(columns, metadata=storage.facts_line(change if "x" in change else made | change))


HOSTILE = [
    b"", b"\0" * 8, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}", b"\x02" + b"\0" * 7 + b"[]",
    safetensors.save({"logprob": GIVEN[2].logprob}),
    safetensors.save({"logprob": GIVEN[2].logprob}, metadata={"compare_q": "[" * 100_000}),
    *map(metadata, ({"x": 1}, {"version": 1}, {"tag": "alone"}, {"windows": 7}, {"seconds": "soon"})),
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_strange_content_under_a_right_digest_is_found(tmp_path: Path, data: bytes) -> None:
    file = with_digest(tmp_path, data)
    loaded = load(tmp_path, TAG, WINDOWS)
    assert (loaded.scores, loaded.damaged) == ({}, (file,))
    commit(tmp_path, TAG, [(WINDOWS[2], GIVEN[2])], "s", 1.0)
    assert 2 in load(tmp_path, TAG, WINDOWS).scores


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"[" * 100_000, b'{"session": "s", "record": 1}'])
def test_strange_records_are_found(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "record.s.json").write_bytes(data)
    assert segments.records(tmp_path) == {}
    assert load(tmp_path, TAG, WINDOWS).damaged == (tmp_path / "record.s.json",)


def test_only_what_is_ours_is_read_and_deleted(folder: Path, tmp_path: Path) -> None:
    """A user's file, a folder, a pipe and a link stay, whoever asks, and do no harm."""
    outside = tmp_path / "outside"
    outside.mkdir()
    target, digest = outside / "kept.safetensors", "0" * 40
    target.write_bytes(b"a user's own")
    (folder / f"{TAG}.{digest}.safetensors").symlink_to(target)
    (folder / f"{TAG}.1{digest[1:]}.safetensors").mkdir()
    os.mkfifo(folder / "record.pipe.json")
    (folder / "notes.txt").write_text("mine")
    strange = {path.name for path in folder.iterdir()} - {path.name for path in segments.own_files(folder)}
    assert len(strange) == 5
    assert read(folder)[1] == set()
    storage.delete(segments.own_files(folder))
    assert {path.name for path in folder.iterdir()} == strange
    assert target.read_bytes() == b"a user's own"
    (outside / "link").symlink_to(folder)
    commit(folder, TAG, [(WINDOWS[2], GIVEN[2])], "s", 1.0)
    assert segments.own_files(outside / "link") == []


def test_a_kill_at_any_moment_loses_only_what_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second session scores what is missing, and then all is what it would have been; nothing is left behind."""
    for operation in range(40):
        folder = tmp_path / str(operation)
        with killed_at(operation, monkeypatch) as done:
            try:
                segments.write_record(folder, "s", {"label": "W4A16"})
                for window in WINDOWS:
                    commit(folder, TAG, [(window, GIVEN[window.index])], "s", 1.0)
                ended = True
            except KilledError:
                ended = False
        there, damaged = read(folder)
        assert damaged == set()
        assert there.keys() == segments.committed(folder, TAG)
        assert list(there) == list(range(max(0, done.count("replace") - 1)))
        for window in WINDOWS:
            if window.index not in there:
                commit(folder, TAG, [(window, GIVEN[window.index])], "t", 1.0)
        assert read(folder)[0].keys() == GIVEN.keys()
        storage.sweep(folder)
        assert not list(folder.glob(".*"))
        if ended:
            break
    assert ended
