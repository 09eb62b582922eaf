"""Scores in segments: committed scores come back bit for bit, and only for their own windows.  Segments and records
that are damaged, in the wrong folder or from elsewhere are not used, and do not stop a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common import storage
from compare_q.backends.scoring import segments
from compare_q.backends.scoring.segments import ALONE, COLUMNS, commit, committed, load
from tests.support.flips import KilledError, flips, killed_at
from tests.support.scores import random_scores, random_windows

TAG, OTHER = "0123456789abcdef", "fedcba9876543210"


def pairs(windows: list[Window], names: Any = segments.COLUMNS, seed: int = 0) -> list[tuple[Window, TokenScores]]:
    return [(window, random_scores(window, names, seed)) for window in windows]


def by_hand(file: Path) -> dict[int, dict[str, bytes]]:
    """Return window -> column -> bytes of a segment, parsed by the description of safetensors' format."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = json.loads(header.pop("__metadata__")["compare_q"])
    found: dict[int, dict[str, bytes]] = {}
    for name, entry in header.items():
        at, size = 8 + length + entry["data_offsets"][0], {"F32": 4, "BOOL": 1}[entry["dtype"]]
        for index, count, _ in metadata["windows"]:
            found.setdefault(index, {})[name] = data[at : at + count * size]
            at += count * size
        assert at == 8 + length + entry["data_offsets"][1]
    return found


REFERENCE = ("ref_logprob", "ref_top1_logprob", "kld", "same_top")


def same(*scores: TokenScores) -> bool:
    """True if scores are equal bit for bit, with the same columns absent."""
    columns = [[getattr(each, name) for name in COLUMNS] for each in scores]
    a, b = ([column if column is None else (column.dtype, column.tobytes()) for column in each] for each in columns)
    return scores[0].window == scores[1].window and a == b


@pytest.mark.parametrize("seed", range(8))
def test_what_is_committed_comes_back(tmp_path: Path, seed: int) -> None:
    """Random windows in random groups and order, some columns absent; they are read by compare_q and by hand."""
    rng = np.random.default_rng(seed)
    windows = random_windows(int(rng.integers(1, 30)), seed)
    names = ["logprob", *(name for name in list(segments.COLUMNS)[1:] if rng.random() < 0.6)]
    tag = TAG if set(names) & set(REFERENCE) else ALONE
    given = {window.index: scores for window, scores in pairs(windows, names, seed)}
    order, files = list(rng.permutation(len(windows))), []
    while order:
        taken, order = order[: (size := int(rng.integers(1, 6)))], order[size:]
        file = commit(tmp_path, tag, [(windows[index], given[index]) for index in taken], "s", 1.0)
        files += [file] if file else []
    assert committed(tmp_path, tag) == set(given)
    loaded = load(tmp_path, tag, windows)
    assert loaded.scores.keys() == given.keys()
    assert all(same(loaded.scores[index], given[index]) for index in given)
    assert loaded.damaged == ()
    assert loaded.sessions == {"s": pytest.approx(len(files))}
    read = {index: columns for file in files for index, columns in by_hand(file).items()}
    assert {index: set(columns) for index, columns in read.items()} == {index: set(names) for index in given}
    for index, columns in read.items():
        assert all(getattr(given[index], name).tobytes() == data for name, data in columns.items())


def test_segments_of_several_references_lie_beside_each_other(tmp_path: Path) -> None:
    windows = random_windows(6)
    one, two, alone = pairs(windows[:4], seed=1), pairs(windows[2:], seed=2), pairs(windows[3:5], seed=3)
    commit(tmp_path, TAG, one, "one", 4.0)
    commit(tmp_path, OTHER, two, "two", 4.0)
    commit(tmp_path, ALONE, alone, "alone", 2.0)
    assert committed(tmp_path, TAG) == {0, 1, 2, 3}
    assert committed(tmp_path, OTHER) == {2, 3, 4, 5}
    assert committed(tmp_path, "f" * 16) == set()
    assert committed(tmp_path, ALONE) == {0, 1, 2, 3, 4, 5}
    assert sorted(load(tmp_path, TAG, windows).scores) == [0, 1, 2, 3]
    loaded = load(tmp_path, ALONE, windows)  # TAG and OTHER have four windows each: the first by name
    assert sorted(loaded.scores) == [0, 1, 2, 3, 4, 5]
    assert loaded.sessions.keys() == {"one", "two"}
    assert all(same(loaded.scores[index], segments.asked_for(one[index][1], ALONE)) for index in (0, 1, 2, 3))
    few = load(tmp_path, ALONE, windows[3:5])  # both have all of these; ALONE counts first
    assert few.sessions == {"alone": 2.0}
    assert same(few.scores[3], segments.asked_for(alone[0][1], ALONE))


def test_segments_of_a_tag_that_0_3_wrote_are_ignored(tmp_path: Path) -> None:
    """They belong to the folder, so that clearing the cache deletes them, but nobody reads them."""
    windows = random_windows(2)
    file = commit(tmp_path, f"{TAG}-more", pairs(windows), "s", 1.0)
    assert not committed(tmp_path, TAG)
    assert not committed(tmp_path, ALONE)
    loaded = load(tmp_path, TAG, windows)
    assert (loaded.scores, loaded.damaged) == ({}, ())
    assert segments.own_files(tmp_path) == [file]


def test_no_segment_serves_another_window(tmp_path: Path) -> None:
    """Not a window with another token, other scored positions or fewer tokens; unrequested windows are left out."""
    windows = random_windows(4, longest=10)
    commit(tmp_path, TAG, pairs(windows), "s", 4.0)
    ids, spans = windows[1].token_ids, windows[1].spans
    token = ids.copy()
    token[0] += 1
    changed = [
        Window(1, token, spans),
        Window.scored_from(1, ids[:-1]),
        Window(1, ids, ((1, 2),)),
        Window(1, np.append(ids, np.int32(3)), spans),
    ]
    for other in changed:
        loaded = load(tmp_path, TAG, [windows[0], other])
        assert (sorted(loaded.scores), loaded.damaged) == ([0], ())
        commit(tmp_path, TAG, pairs([other]), "t", 1.0)
        assert sorted(load(tmp_path, TAG, [windows[0], other]).scores) == [0, 1]


WINDOWS = random_windows(6, longest=12)
GIVEN = {window.index: scores for window, scores in pairs(WINDOWS)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three segments, of the windows 0-1, 2 and 3-5, and two records."""
    for some in ([0, 1], [2], [3, 4, 5]):
        commit(tmp_path, TAG, [(WINDOWS[index], GIVEN[index]) for index in some], "s", 1.0)
    segments.write_record(tmp_path, "s", {"label": "W4A16", "load_seconds": 1.5})
    segments.write_record(tmp_path, "t", {"label": "W4A16", "load_seconds": 2.5})
    return tmp_path


def read(folder: Path) -> tuple[dict[int, TokenScores], set[Path]]:
    """Return (scores, damaged files); assert that each score is as it was committed."""
    loaded = load(folder, TAG, WINDOWS)
    assert all(same(scores, GIVEN[index]) for index, scores in loaded.scores.items())
    return loaded.scores, set(loaded.damaged)


def test_every_flipped_bit_is_found(folder: Path) -> None:
    """The windows or the record of the damaged file are missing; everything else is read, and no number differs."""
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


def test_a_kill_at_any_moment_loses_only_what_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run scores the missing windows; then all windows have scores, and no temporary file is left."""
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


def test_whole_files_under_another_key_are_neither_read_nor_deleted(folder: Path) -> None:
    """The files were copied by hand, or by a repair of the file system; the digests of the windows are equal."""
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    assert read(folder)[0].keys() == GIVEN.keys()
    assert read(other) == ({}, set())
    assert segments.records(other) == {}
    assert not segments.committed(other, TAG)
    assert segments.foreign(other) == sum(file.suffix == ".safetensors" for file in folder.iterdir())
    assert not segments.foreign(folder)
    commit(other, TAG, [(WINDOWS[0], GIVEN[WINDOWS[0].index])], "t", 1.0)
    assert read(other)[0].keys() == {WINDOWS[0].index}
