"""Scores in segments: committed scores come back bit for bit, and only for their own windows.

Segments and records that are damaged or in the wrong folder are not used, and do not stop a run.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as safetensors

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common import storage
from compare_q.backends.scoring import segments
from compare_q.backends.scoring.segments import ALONE, SCORE_COLUMNS, commit, committed, load
from tests.support.flips import KilledError, flips, killed_at
from tests.support.scores import random_scores, random_windows
from tests.support.toy import refusal

TAG = "0123456789abcdef"
OTHER = "fedcba9876543210"


def pairs(
    windows: list[Window], names: Any = segments.SCORE_COLUMNS, seed: int = 0
) -> list[tuple[Window, TokenScores]]:
    return [(window, random_scores(window, names, seed)) for window in windows]


def named(windows: Iterable[Window]) -> set[str]:
    """Return the digests of windows."""
    return {window.digest for window in windows}


def segment_files(folder: Path) -> list[Path]:
    """Return the files of segments that are read, in the order of their names."""
    return segments.scores_folder(folder).tensor_files(segments.SEGMENT_TAG)


def by_hand(file: Path) -> dict[str, dict[str, bytes]]:
    """Return digest -> column -> bytes of a segment, parsed by safetensors' specification."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = json.loads(header.pop("__metadata__")["compare_q"])
    columns: dict[str, dict[str, bytes]] = {}
    for name, entry in header.items():
        begin = 8 + length + entry["data_offsets"][0]
        size = {"F32": 4, "BOOL": 1}[entry["dtype"]]
        for window, count, _ in metadata["windows"]:
            end = begin + count * size
            columns.setdefault(window, {})[name] = data[begin:end]
            begin = end
        assert begin == 8 + length + entry["data_offsets"][1]
    return columns


REFERENCE = ("ref_logprob", "ref_top1_logprob", "kld", "same_top")


def same(one: TokenScores, other: TokenScores) -> bool:
    """True if scores are equal bit for bit, with the same columns absent."""
    return one.window == other.window and bits_of(one) == bits_of(other)


def bits_of(scores: TokenScores) -> dict[str, tuple[Any, bytes]]:
    """Return the dtype and the bytes of each column, without absent columns."""
    bits = {}
    for name in SCORE_COLUMNS:
        column = getattr(scores, name)
        if column is not None:
            bits[name] = (column.dtype, column.tobytes())
    return bits


@pytest.mark.parametrize("seed", range(8))
def test_what_is_committed_comes_back(tmp_path: Path, seed: int) -> None:
    """Random windows in random groups and order, some columns absent, are read in two ways."""
    rng = np.random.default_rng(seed)
    windows = random_windows(int(rng.integers(1, 30)), seed)
    names = ["logprob", *(name for name in list(SCORE_COLUMNS)[1:] if rng.random() < 0.6)]
    tag = ALONE
    if set(names) & set(REFERENCE):
        tag = TAG
    original = {window.digest: scores for window, scores in pairs(windows, names, seed)}
    order = list(rng.permutation(len(windows)))
    files = []
    while order:
        n_windows = int(rng.integers(1, 6))
        group = [windows[index] for index in order[:n_windows]]
        order = order[n_windows:]
        scored = [(window, original[window.digest]) for window in group]
        file = commit(tmp_path, tag, scored, "s", 1.0)
        if file:
            files.append(file)
    assert committed(tmp_path, tag) == set(original)
    loaded = load(tmp_path, tag, windows)
    assert loaded.scores.keys() == original.keys()
    for window, scores in original.items():
        assert same(loaded.scores[window], scores)
    assert loaded.damaged == ()
    assert loaded.sessions == {"s": pytest.approx(len(files))}
    columns_by_hand: dict[str, dict[str, bytes]] = {}
    for file in files:
        columns_by_hand.update(by_hand(file))
    assert columns_by_hand.keys() == original.keys()
    for window, columns in columns_by_hand.items():
        assert set(columns) == set(names)
        for name, data in columns.items():
            assert getattr(original[window], name).tobytes() == data


@pytest.mark.parametrize("kind", ["exact", "estimate", "bound"])
def test_the_kind_of_the_kld_comes_back(tmp_path: Path, kind: Any) -> None:
    """Only files with another kind than exact have a version that older readers ignore."""
    windows = random_windows(3)
    scored = []
    for window, scores in pairs(windows):
        scored.append((window, replace(scores, kld_kind=kind)))
    file = commit(tmp_path, TAG, scored, "s", 1.0)
    assert file is not None
    header, _ = storage.header_of(file)
    assert header["version"] == {"exact": 4, "estimate": 5, "bound": 5}[kind]
    loaded = load(tmp_path, TAG, windows)
    assert [scores.kld_kind for scores in loaded.scores.values()] == [kind] * 3
    # Without their reference, scores have no KLD of any kind.
    alone = load(tmp_path, ALONE, windows)
    assert [scores.kld_kind for scores in alone.scores.values()] == ["exact"] * 3
    # The kind stays with the rest of a segment.
    segments.forget(tmp_path, {windows[0].digest})
    rest = load(tmp_path, TAG, windows)
    assert [scores.kld_kind for scores in rest.scores.values()] == [kind] * 2


def test_windows_of_one_segment_keep_their_own_kinds(tmp_path: Path) -> None:
    windows = random_windows(3)
    kinds: tuple[Any, ...] = ("bound", "exact", "estimate")
    scored = []
    for (window, scores), kind in zip(pairs(windows), kinds, strict=True):
        scored.append((window, replace(scores, kld_kind=kind)))
    commit(tmp_path, TAG, scored, "s", 1.0)
    loaded = load(tmp_path, TAG, windows)
    found = [loaded.scores[window.digest].kld_kind for window in windows]
    assert found == list(kinds)


def test_a_segment_with_an_unknown_kind_is_damaged(tmp_path: Path) -> None:
    windows = random_windows(2)
    scored = []
    for window, scores in pairs(windows):
        scored.append((window, replace(scores, kld_kind="guess")))  # type: ignore[arg-type]
    file = commit(tmp_path, TAG, scored, "s", 1.0)
    loaded = load(tmp_path, TAG, windows)
    assert (loaded.scores, loaded.damaged) == ({}, (file,))


def test_segments_of_several_references_lie_beside_each_other(tmp_path: Path) -> None:
    windows = random_windows(6)
    digests = [window.digest for window in windows]
    one = pairs(windows[:4], seed=1)
    two = pairs(windows[2:], seed=2)
    alone = pairs(windows[3:5], seed=3)
    commit(tmp_path, TAG, one, "one", 4.0)
    commit(tmp_path, OTHER, two, "two", 4.0)
    commit(tmp_path, ALONE, alone, "alone", 2.0)
    assert committed(tmp_path, TAG) == set(digests[:4])
    assert committed(tmp_path, OTHER) == set(digests[2:])
    assert committed(tmp_path, "f" * 16) == set()
    assert committed(tmp_path, ALONE) == set(digests)
    assert load(tmp_path, TAG, windows).scores.keys() == set(digests[:4])
    # TAG and OTHER have four windows each: the first by name.
    loaded = load(tmp_path, ALONE, windows)
    assert loaded.scores.keys() == set(digests)
    assert loaded.sessions.keys() == {"one", "two"}
    for window, scores in one:
        assert same(loaded.scores[window.digest], segments.columns_for(ALONE, scores))
    few = load(tmp_path, ALONE, windows[3:5])  # both have all of these; ALONE counts first
    assert few.sessions == {"alone": 2.0}
    assert same(few.scores[digests[3]], segments.columns_for(ALONE, alone[0][1]))


def test_segments_of_a_tag_that_0_3_wrote_are_ignored(tmp_path: Path) -> None:
    """They belong to the folder, so that clearing the cache deletes them, but nobody reads them."""
    windows = random_windows(2)
    file = commit(tmp_path, f"{TAG}-more", pairs(windows), "s", 1.0)
    assert not committed(tmp_path, TAG)
    assert not committed(tmp_path, ALONE)
    loaded = load(tmp_path, TAG, windows)
    assert (loaded.scores, loaded.damaged) == ({}, ())
    assert segments.scores_folder(tmp_path).own_files() == [file]


def test_no_segment_serves_another_window(tmp_path: Path) -> None:
    """Not a window with another token, other scored positions or fewer tokens.

    Windows that are not requested are left out.
    """
    windows = random_windows(4, longest=10)
    commit(tmp_path, TAG, pairs(windows), "s", 4.0)
    ids = windows[1].token_ids
    spans = windows[1].spans
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
        assert (loaded.scores.keys(), loaded.damaged) == (named(windows[:1]), ())
        commit(tmp_path, TAG, pairs([other]), "t", 1.0)
        assert load(tmp_path, TAG, [windows[0], other]).scores.keys() == named([windows[0], other])


def test_a_window_is_found_by_its_digest_under_another_index(tmp_path: Path) -> None:
    """Another run may have other texts before it, or two texts with this window."""
    windows = random_windows(3)
    scored = pairs(windows)
    commit(tmp_path, TAG, scored, "s", 4.0)
    later = replace(windows[2], index=40)
    loaded = load(tmp_path, TAG, [later])
    assert loaded.scores.keys() == {windows[2].digest}
    assert same(loaded.scores[windows[2].digest], replace(scored[2][1], window=40))
    again = [windows[0], replace(windows[0], index=7), later]
    loaded = load(tmp_path, TAG, again)
    assert loaded.scores.keys() == named([windows[0], windows[2]])
    assert same(loaded.scores[windows[0].digest], scored[0][1])
    n_scored = [window.n_scored for window in windows]
    share = (n_scored[0] + n_scored[2]) / sum(n_scored)  # the equal windows count once
    assert loaded.sessions == {"s": pytest.approx(4.0 * share)}


def test_scores_compared_with_other_numbers_of_a_window_are_not_used(tmp_path: Path) -> None:
    """They are used if the reference has the same numbers, or no longer has the window."""
    windows = random_windows(3)
    first, second, third = (window.digest for window in windows)
    old = dict.fromkeys((first, second, third), "0123456789abcdef")
    commit(tmp_path, TAG, pairs(windows, seed=1), "old", 1.0, old)
    # The store has recorded one window again, and lost one.
    now = {first: old[first], second: "ffffffffffffffff"}
    assert committed(tmp_path, TAG, old) == {first, second, third}
    assert committed(tmp_path, TAG, now) == {first, third}
    assert committed(tmp_path, TAG) == {first, second, third}
    assert load(tmp_path, TAG, windows, now).scores.keys() == {first, third}
    assert load(tmp_path, TAG, windows, {first: ""}).scores.keys() == {second, third}
    # These columns do not depend on the reference.
    assert committed(tmp_path, ALONE, now) == {first, second, third}
    assert load(tmp_path, ALONE, windows, now).scores.keys() == {first, second, third}
    new = pairs(windows[1:2], seed=2)
    commit(tmp_path, TAG, new, "new", 1.0, now)
    loaded = load(tmp_path, TAG, windows, now)
    assert loaded.scores.keys() == {first, second, third}
    assert same(loaded.scores[second], new[0][1])
    assert loaded.sessions.keys() == {"old", "new"}
    assert segments.recordings(tmp_path, TAG, named(windows)) == {
        first: {old[first]},
        second: {old[second], now[second]},
        third: {old[third]},
    }
    assert segments.recordings(tmp_path, OTHER, named(windows)) == {}


WINDOWS = random_windows(6, longest=12)
DIGESTS = [window.digest for window in WINDOWS]
SCORES = {window.digest: scores for window, scores in pairs(WINDOWS)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three segments, of the windows 0-1, 2 and 3-5, and two records."""
    for some in ([0, 1], [2], [3, 4, 5]):
        commit(
            tmp_path, TAG, [(WINDOWS[index], SCORES[DIGESTS[index]]) for index in some], "s", 1.0
        )
    segments.write_record(tmp_path, "s", {"label": "W4A16", "load_seconds": 1.5})
    segments.write_record(tmp_path, "t", {"label": "W4A16", "load_seconds": 2.5})
    return tmp_path


def read(folder: Path) -> tuple[dict[str, TokenScores], set[Path]]:
    """Return (scores, damaged files); assert that each score is as it was committed."""
    loaded = load(folder, TAG, WINDOWS)
    for window, scores in loaded.scores.items():
        assert same(scores, SCORES[window])
    return loaded.scores, set(loaded.damaged)


def test_every_flipped_bit_is_found(folder: Path) -> None:
    """The windows or the record of the damaged file are missing.

    Everything else is read, and no number differs.
    """
    all_records = segments.records(folder)
    content: dict[Path, tuple[set[str], set[str]]] = {}  # the windows and records of each file
    for file in sorted(folder.iterdir()):
        moved = file.rename(folder / "moved")
        windows = SCORES.keys() - read(folder)[0].keys()
        sessions = all_records.keys() - segments.records(folder).keys()
        content[file] = (windows, sessions)
        moved.rename(file)
    for file, position in flips(sorted(content), seed=1):
        scores, damaged = read(folder)
        windows, sessions = content[file]
        assert (scores.keys(), damaged) == (SCORES.keys() - windows, {file}), position
        records = segments.records(folder)
        assert records.keys() == all_records.keys() - sessions
        for session, record in records.items():
            assert record == all_records[session]
    assert read(folder)[1] == set()


def test_a_kill_at_any_moment_loses_only_what_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run scores the missing windows; then no temporary file is left."""
    for operation in range(40):
        folder = tmp_path / str(operation)
        with killed_at(operation, monkeypatch) as done:
            try:
                segments.write_record(folder, "s", {"label": "W4A16"})
                for window in WINDOWS:
                    commit(folder, TAG, [(window, SCORES[window.digest])], "s", 1.0)
                ended = True
            except KilledError:
                ended = False
        scores, damaged = read(folder)
        assert damaged == set()
        assert scores.keys() == segments.committed(folder, TAG)
        assert list(scores) == DIGESTS[: max(0, done.count("replace") - 1)]
        for window in WINDOWS:
            if window.digest not in scores:
                commit(folder, TAG, [(window, SCORES[window.digest])], "t", 1.0)
        assert read(folder)[0].keys() == SCORES.keys()
        storage.sweep(folder)
        assert not list(folder.glob(".*"))
        if ended:
            break
    assert ended


def test_whole_files_under_another_key_are_neither_read_nor_deleted(folder: Path) -> None:
    """The files were copied by hand; the digests of the windows are equal."""
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    assert read(folder)[0].keys() == SCORES.keys()
    assert read(other) == ({}, set())
    assert segments.records(other) == {}
    assert not segments.committed(other, TAG)
    assert segments.n_foreign_segments(other) == len(list(folder.glob("*.safetensors")))
    assert not segments.n_foreign_segments(folder)
    before = sorted(other.iterdir())
    segments.forget(other, DIGESTS)
    assert sorted(other.iterdir()) == before
    commit(other, TAG, [(WINDOWS[0], SCORES[DIGESTS[0]])], "t", 1.0)
    assert read(other)[0].keys() == {DIGESTS[0]}


def test_segments_of_0_3_are_neither_used_nor_deleted(folder: Path) -> None:
    """Version 3 numbered the windows of one text."""
    for file in segment_files(folder):
        facts, _ = storage.header_of(file)
        windows = []
        for window, count, _ in facts["windows"]:
            windows.append([DIGESTS.index(window), count, window[:16]])
        metadata = storage.facts_line({**facts, "version": 3, "windows": windows})
        storage.keep(folder, TAG, [safetensors.save(safetensors.load_file(file), metadata)])
        file.unlink()
    old = set(segment_files(folder))
    assert len(old) == 3
    assert not segments.committed(folder, TAG)
    assert not segments.committed(folder, ALONE)
    assert read(folder) == ({}, set())
    assert segments.n_foreign_segments(folder) == 3
    segments.forget(folder, DIGESTS)
    assert set(segment_files(folder)) == old


def test_damaged_segments_count_as_missing(folder: Path) -> None:
    """The other segments are used, also for windows that a damaged one has."""
    by_n_windows = {len(by_hand(file)): file for file in segment_files(folder)}
    by_n_windows[2].write_bytes(by_n_windows[2].read_bytes()[:-1])
    by_n_windows[1].write_bytes(b"")
    scores, damaged = read(folder)
    assert scores.keys() == set(DIGESTS[3:])
    assert damaged == {by_n_windows[1], by_n_windows[2]}
    assert segments.committed(folder, TAG) == {*DIGESTS[:2], *DIGESTS[3:]}  # by the headers alone
    commit(folder, TAG, [(WINDOWS[1], SCORES[DIGESTS[1]])], "t", 1.0)
    assert read(folder)[0].keys() == {DIGESTS[1], *DIGESTS[3:]}


def test_forgetting_rewrites_shared_segments(folder: Path) -> None:
    """The rest of a segment keeps its scores, recordings and share of the seconds.

    A record without segments stays: its session is about to commit its first one.
    """
    recordings = {WINDOWS[0].digest: "0123456789abcdef"}
    commit(folder, OTHER, pairs(WINDOWS[:1], seed=5), "t", 1.0, recordings)
    alone = pairs(WINDOWS[2:4], seed=6)
    commit(folder, ALONE, alone, "u", 6.0)
    segments.write_record(folder, "u", {"label": "W4A16"})
    segments.write_record(folder, "begun", {"label": "W4A16"})
    untouched = [file for file in segment_files(folder) if DIGESTS[2] not in by_hand(file)]
    segments.forget(folder, [DIGESTS[2], DIGESTS[4], "0" * 32])
    assert read(folder)[0].keys() == {DIGESTS[0], DIGESTS[1], DIGESTS[3], DIGESTS[5]}
    n_scored = [window.n_scored for window in WINDOWS]
    of_three = (n_scored[3] + n_scored[5]) / sum(n_scored[3:])
    loaded = load(folder, TAG, WINDOWS)
    assert loaded.sessions == {"s": pytest.approx(1.0 + of_three)}
    assert segments.committed(folder, OTHER, recordings) == {DIGESTS[0]}
    assert not segments.committed(folder, OTHER, {DIGESTS[0]: "f" * 16})
    (file,) = folder.glob(f"{ALONE}.*")
    assert by_hand(file).keys() == {DIGESTS[3]}
    segment = segments.segment_in(file)
    assert segment is not None
    assert segment.seconds == pytest.approx(6.0 * n_scored[3] / (n_scored[2] + n_scored[3]))
    # The segment of the windows 3 to 5 was rewritten.
    assert sum(file.exists() for file in untouched) == len(untouched) - 1
    assert segments.records(folder).keys() == {"s", "t", "u", "begun"}
    segments.forget(folder, DIGESTS)
    assert [file.name for file in folder.iterdir()] == ["record.begun.json"]


def test_forgetting_deletes_damaged_files_and_no_others(folder: Path) -> None:
    (folder / "notes.txt").touch()
    damaged = segment_files(folder)[0]
    windows = by_hand(damaged).keys()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (folder / "record.t.json").write_text("{")
    segments.forget(folder, [])
    assert read(folder)[0].keys() == SCORES.keys() - windows
    assert read(folder)[1] == set()
    assert segments.records(folder).keys() == {"s"}
    assert (folder / "notes.txt").exists()
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert "compare_q deletes nothing through links" in refusal(segments.forget, link, DIGESTS)
    assert read(folder)[0].keys() == SCORES.keys() - windows


def test_a_kill_while_windows_are_forgotten_loses_no_other_window(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is killed before its n-th operation on a file, for every n, and another run follows."""
    ended = False
    for operation in range(40):
        copy = tmp_path_factory.mktemp(str(operation)) / folder.name  # the name is the key
        shutil.copytree(folder, copy)
        with suppress(KilledError), killed_at(operation, monkeypatch):
            segments.forget(copy, [DIGESTS[1], DIGESTS[3]])
            ended = True
        scores, damaged = read(copy)
        assert scores.keys() >= SCORES.keys() - {DIGESTS[1], DIGESTS[3]}
        assert damaged == set()
        assert load(copy, TAG, WINDOWS).sessions["s"] < 3.0001  # no window counts twice
        # The next run must be able to finish what the killed one began.
        segments.forget(copy, [DIGESTS[1], DIGESTS[3]])
        assert read(copy)[0].keys() == SCORES.keys() - {DIGESTS[1], DIGESTS[3]}
        if ended:
            break
    assert ended
    assert operation > 4


def test_a_segment_that_was_read_before_is_read_again_once_it_has_changed(tmp_path: Path) -> None:
    """A process keeps the headers of old files; later the file has other bytes, or is missing."""
    windows = random_windows(2)
    file = commit(tmp_path, ALONE, pairs(windows), "s", 1.0)
    assert file is not None
    content = file.read_bytes()
    long_ago = time.time() - 3600
    # Only headers of old files are kept; a new file would be read again anyway.
    os.utime(file, (long_ago, long_ago))
    assert committed(tmp_path, ALONE) == named(windows)
    damaged = content.replace(windows[0].digest.encode(), windows[0].digest[::-1].encode())
    file.write_bytes(damaged)
    assert committed(tmp_path, ALONE) == frozenset()
    file.write_bytes(content)
    assert committed(tmp_path, ALONE) == named(windows)
    file.unlink()
    assert committed(tmp_path, ALONE) == frozenset()


def test_many_windows_in_many_segments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 segments of 10 windows each; 100 windows of 100 segments are read."""
    windows = []
    for index in range(20_000):
        token_ids = np.arange(index, index + 4, dtype=np.int32)
        windows.append(Window.scored_from(index, token_ids))
    column = np.zeros(3, np.float32)
    for first in range(0, len(windows), 10):
        scored = []
        for window in windows[first : first + 10]:
            scored.append((window, TokenScores(window.index, column + window.index)))
        commit(tmp_path, ALONE, scored, "s", 1.0)
    began = time.perf_counter()
    assert committed(tmp_path, ALONE) == named(windows)
    listed = time.perf_counter()
    loaded = load(tmp_path, ALONE, windows[::200])
    read_s = time.perf_counter() - listed
    assert loaded.scores.keys() == named(windows[::200])
    for scores in loaded.scores.values():
        assert scores.logprob.tolist() == [scores.window] * 3
    assert len(loaded.used) == 100
    assert loaded.sessions == {"s": pytest.approx(10.0)}
    with capsys.disabled():
        print(f" committed: {listed - began:.2f} s, load of 100 windows: {read_s:.2f} s ")
