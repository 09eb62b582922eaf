"""What killed writers leave: whole windows go on to count, and nothing that is torn, damaged or of another model."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from backends.common.head import Head
from backends.reference.store import Reader, Writer, recorded, seal, window_file
from tests.support.flips import flips
from tests.support.stores import HEAD, IDENTITY, WEIGHT, numbers, record


def journal_of(building: Path) -> Path:
    (found,) = building.glob("part.*.jsonl")
    return found


def test_windows_of_a_killed_writer_count(tmp_path: Path) -> None:
    """But for one as long as nobody has left a head: a run that goes on has something to run."""
    building = tmp_path / "building"
    assert recorded(building) == set()
    record(building, [0, 1, 4], closed=False)
    assert recorded(building) == {0, 1}
    record(building, [2], closed=False)
    assert recorded(building) == {0, 1, 2}
    record(building, [3, 4])
    assert recorded(building) == {0, 1, 2, 3, 4}
    seal(building, tmp_path / "store", IDENTITY, 5)
    store = Reader(tmp_path / "store")
    store.verify()
    assert [torch.equal(store.window(index), numbers(3, 4, seed=index)) for index in range(5)] == [True] * 5
    assert not building.exists()


def test_files_that_are_not_whole_do_not_count(tmp_path: Path) -> None:
    record(tmp_path, range(4))
    (tmp_path / window_file(1)).unlink()
    data = (tmp_path / window_file(2)).read_bytes()
    (tmp_path / window_file(2)).write_bytes(data[:-1])
    (tmp_path / window_file(7)).write_bytes(data)  # nobody noted it
    assert recorded(tmp_path) == {0, 3}


def test_a_window_that_was_written_twice_is_known_by_its_checksum(tmp_path: Path) -> None:
    """The newer writer's file is there, or the older one's if the newer was killed before it was in place."""
    building, store = tmp_path / "building", tmp_path / "store"
    record(building, range(2), closed=False)
    older = (building / window_file(1)).read_bytes()
    record(building, [1], seed=50)
    assert recorded(building) == {0, 1}
    (building / window_file(1)).write_bytes(older)
    seal(building, store, IDENTITY, 2)
    Reader(store).verify()
    assert torch.equal(Reader(store).window(1), numbers(3, 4, seed=1))


def test_every_flipped_bit_of_a_journal_is_found(tmp_path: Path) -> None:
    """A damaged line is none: a window fewer, or all of them where the first line is the one, and no number changes."""
    record(tmp_path, range(5))
    good = journal_of(tmp_path).read_bytes()
    lines = good.split(b"\n\n")
    ends = [sum(len(line) + 2 for line in lines[: count + 1]) for count in range(len(lines))]
    for _, position in flips([journal_of(tmp_path)], seed=5):
        number = next(count for count, end in enumerate(ends) if position < end)
        found = recorded(tmp_path)
        if good[position : position + 1] == b"\n":  # between two lines, of which one is damaged then
            assert found <= set(range(5))
        elif number == 0:
            assert found == set()
        elif number <= 5:
            assert found == set(range(5)) - {number - 1}
        else:
            assert found == {0, 1, 2, 3}  # no head: the last one is recorded again
    assert recorded(tmp_path) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["row", "head"])
def test_every_flipped_bit_of_what_a_killed_run_left_is_found(tmp_path: Path, kind: str) -> None:
    """The file is of the size that its writer noted; it is made again, and the store is what it would have been."""
    for number in range(20):
        building, store = tmp_path / f"building {number}", tmp_path / f"store {number}"
        record(building, range(4))
        for _ in flips(sorted(building.glob(f"{kind}.*")), seed=number, count=1):
            missing = set(range(4)) - recorded(building)
            assert len(missing) == 1
            record(building, sorted(missing))
            whole = {file.name: file.read_bytes() for file in building.glob("*.safetensors")}
        for name, data in whole.items():  # flips has put the old bytes there
            (building / name).write_bytes(data)
        seal(building, store, IDENTITY, 4)
        Reader(store).verify()


def test_a_journal_that_ends_anywhere(tmp_path: Path) -> None:
    """Cut off at each of its bytes; and a line after a torn one is read."""
    record(tmp_path, range(3), closed=False)
    file = journal_of(tmp_path)
    good, before = file.read_bytes(), 0
    for length in range(0, len(good), 7):
        file.write_bytes(good[:length])
        count = len(recorded(tmp_path))
        assert before <= count <= 2
        before = count
    file.write_bytes(good[:-20] + good[good.rindex(b"\n\n") :])
    assert recorded(tmp_path) == {0, 1}


@pytest.mark.parametrize("change", ["contents", "width", "dtype"])
def test_what_an_earlier_session_kept_otherwise_does_not_count(tmp_path: Path, change: str) -> None:
    building = tmp_path / "building"
    record(building, [0, 1], closed=False)
    if change == "contents":
        writer = Writer(building, "logits", "its head is a Strange")
        writer.window(2, numbers(3, 300))
        writer.close(HEAD)
    else:
        weight = numbers(300, 5) if change == "width" else WEIGHT.bfloat16()
        record(building, [2], weight=weight)
    assert recorded(building) == {2}
    with pytest.raises(ValueError, match="the reference's window 0 was not kept"):
        seal(building, tmp_path / "store", IDENTITY, 3)
    assert not (tmp_path / "store").exists()
    if change == "contents":
        writer = Writer(building, "logits", "its head is a Strange")
        for window in (0, 1):
            writer.window(window, numbers(3, 300))
        writer.close(HEAD)
        seal(building, tmp_path / "store", IDENTITY, 3)
        assert Reader(tmp_path / "store").n_windows == 3


def test_another_head_makes_the_older_share_stale(tmp_path: Path) -> None:
    record(tmp_path, [0, 1])
    record(tmp_path, [2], head=Head(300, "float32", soft_cap=30.0))
    assert recorded(tmp_path) == {2}


def test_a_missing_window_or_head_makes_no_store(tmp_path: Path) -> None:
    building = tmp_path / "building"
    building.mkdir()
    with pytest.raises(ValueError, match="window 0 was not kept"):
        seal(building, tmp_path / "store", IDENTITY, 1)
    record(building, [0, 2], closed=False)
    with pytest.raises(ValueError, match="window 1 was not kept"):
        seal(building, tmp_path / "store", IDENTITY, 3)
    with pytest.raises(ValueError, match="head was not kept"):  # the writer has not come to its end
        seal(building, tmp_path / "store", IDENTITY, 1)
    assert not (tmp_path / "store").exists()
    assert recorded(building) == {0}


def record_slowly(building: Path, first: int) -> None:
    """In a process of its own: every second window, one by one."""
    record(building, range(first, 60, 2))


@pytest.mark.engine
def test_two_processes_record_and_one_is_killed(tmp_path: Path) -> None:
    """By SIGKILL, anywhere; what it had noted counts, and what is missing is recorded after it."""
    building, store = tmp_path / "building", tmp_path / "store"
    building.mkdir()
    context = multiprocessing.get_context("fork")
    one, two = (context.Process(target=record_slowly, args=(building, first)) for first in (0, 1))
    one.start()
    two.start()
    while len(list(building.glob("row.*"))) < 20 and one.is_alive():
        pass
    one.kill()
    for process in (one, two):
        process.join()
    assert two.exitcode == 0
    there = recorded(building)
    assert there >= set(range(1, 60, 2))
    record(building, sorted(set(range(60)) - there))
    seal(building, store, IDENTITY, 60)
    Reader(store).verify()
    for index in range(60):
        assert torch.equal(Reader(store).window(index), numbers(3, 4, seed=index))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
