"""The reference store: it returns what was written, can grow, stays valid after a kill, and damage is reported."""

from __future__ import annotations

import math
import multiprocessing
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import dtype_name
from compare_q.backends.reference.head import Head
from compare_q.backends.reference.recorder import Recorder
from compare_q.backends.reference.store import MANIFEST, Reader, begin, discard, is_free, recorded, seal, tidy
from tests.support.flips import KilledError, flips, killed_at
from tests.support.stores import HEAD, IDENTITY, numbers, record, state_store
from tests.support.toy import refusal

INF, NAN = math.inf, math.nan


def contents_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three windows of states."""
    return state_store(tmp_path / "store", windows=3).path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def record_logits(folder: Path, windows: list[int], logits: torch.Tensor | None = None) -> None:
    begin(folder, IDENTITY)
    recorder = Recorder(folder, "logits", "its head is a Strange")
    for window in windows:
        recorder.write(window, numbers(3, 300) if logits is None else logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    weight, states = numbers(300, 4, dtype=dtype), [numbers(n, 4, seed=n, dtype=dtype) for n in (3, 5)]
    recorder, head = Recorder(folder, "states"), Head(300, "bfloat16", 30.0, 0.25)
    recorder.write(1, states[1])  # windows come in the order in which they finish
    recorder.write(0, states[0])
    recorder.write_head((weight, None, head))
    seal(folder, IDENTITY, 2)
    store = Reader(folder)
    assert (store.contents, store.reason, store.head, store.n_windows) == ("states", "", head, 2)
    assert store.identity == IDENTITY
    for window in (0, 1):
        assert store.window(window).dtype == dtype
        assert torch.equal(store.window(window), states[window])
    found, bias = store.weight(0, 300, "cpu")
    assert found.dtype == dtype
    assert torch.equal(found, weight)
    assert bias is None
    files = [file for file in folder.iterdir() if file.name != MANIFEST]
    assert [file.name.rsplit(".", 2)[0] for file in sorted(files)] == ["head.000000", "row.000000", "row.000001"]
    assert store.stored_bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_kept_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Logits keep the engine's dtype, even values that float16 cannot hold; non-finite logits are counted later."""
    largest = torch.finfo(dtype).max
    logits = torch.tensor([[1 + 2**-11, -largest, 0.1, -INF], [38.25, largest / 2, 1e-7, NAN]]).to(dtype)
    record_logits(tmp_path / "store", [0], logits)
    seal(tmp_path / "store", IDENTITY, 1)
    store = Reader(tmp_path / "store")
    assert (store.contents, store.reason) == ("logits", "its head is a Strange")
    assert store.head == Head(4, dtype_name(dtype))
    assert store.window(0).dtype == dtype
    assert torch.equal(store.window(0).view(torch.uint8), logits.view(torch.uint8))
    assert "head lacks entries between 0 and 3" in refusal(store.weight, 0, 3, "cpu")


@pytest.mark.parametrize("has_bias", [True, False])
def test_several_processes_make_one_store(tmp_path: Path, has_bias: bool) -> None:
    """Two ranks: one has window 0 and entries 200 to 300, the other window 1 and entries 0 to 200."""
    weight, bias = numbers(300, 4), numbers(300) if has_bias else None
    folder = tmp_path / "store"
    begin(folder, IDENTITY)
    for window, first, last in ((0, 200, 300), (1, 0, 200)):
        with pytest.raises(ModelError, match="was not kept"):
            seal(folder, IDENTITY, 2)  # a part of the head is missing
        assert recorded(folder) == set()
        recorder = Recorder(folder, "states")
        recorder.write(window, numbers(3, 4, seed=window))
        recorder.write_head((weight[first:last], None if bias is None else bias[first:last], HEAD), first)
    Recorder(folder, "states").write_head((weight[:0], None if bias is None else bias[:0], HEAD), 300)  # only padding
    seal(folder, IDENTITY, 2)
    store = Reader(folder)
    store.verify()
    assert torch.equal(store.window(0), numbers(3, 4, seed=0))
    assert torch.equal(store.window(1), numbers(3, 4, seed=1))
    inside = [(0, 300), (0, 200), (200, 300), (199, 201), (150, 250), (0, 1), (299, 300), (10, 20)]
    nothing = [(0, 0), (100, 100), (200, 200), (300, 300)]  # for a rank that holds only padding
    for first, last in inside + nothing:
        found, found_bias = store.weight(first, last, "cpu")
        assert torch.equal(found, weight[first:last])  # shapes too: [0, 4] of nothing
        assert found_bias is None if bias is None else torch.equal(found_bias, bias[first:last])
    text = refusal(store.weight, 100, 301, "cpu")
    assert text.startswith(f"{store.path}: the reference's head lacks entries between 100 and 301; ")


def record_slowly(folder: Path, first: int) -> None:
    """Record every second window, one after the other; run in a separate process."""
    record(folder, range(first, 60, 2))


@pytest.mark.engine
def test_two_processes_record_and_one_is_killed(tmp_path: Path) -> None:
    """After a SIGKILL at any point, the written windows count, and the next run records the missing ones."""
    folder = tmp_path / "store"
    begin(folder, IDENTITY)
    context = multiprocessing.get_context("fork")
    one, two = (context.Process(target=record_slowly, args=(folder, first)) for first in (0, 1))
    one.start()
    two.start()
    while len(list(folder.glob("row.*"))) < 20 and one.is_alive():
        pass
    one.kill()
    for process in (one, two):
        process.join()
    assert two.exitcode == 0
    there = recorded(folder)
    assert there >= set(range(1, 60, 2))
    record(folder, sorted(set(range(60)) - there))
    seal(folder, IDENTITY, 60)
    Reader(folder).verify()
    assert all(torch.equal(Reader(folder).window(index), numbers(3, 4, seed=index)) for index in range(60))
    assert len(names(folder)) == 60 + 2


def grown(folder: Path, windows: int) -> None:
    """Do as a run that needs ``windows`` windows: record the missing ones, and seal the store."""
    begin(folder, IDENTITY)
    if wanted := set(range(windows)) - recorded(folder):
        record(folder, sorted(wanted))
    seal(folder, IDENTITY, windows)


def test_a_store_grows(tmp_path: Path) -> None:
    """Windows that the store has do not change."""
    folder = state_store(tmp_path / "store", windows=2).path
    before = contents_of(folder)
    record(folder, [1, 2, 3, 6], seed=9)
    assert recorded(folder) == {0, 1, 2, 3}  # 1 is recorded again, to compare the run's head
    record(folder, [6], seed=9)
    assert Reader(folder).n_windows == 2
    seal(folder, {**IDENTITY, "label": "other label"}, 4)
    store = Reader(folder)
    store.verify()
    assert (store.n_windows, store.identity["label"]) == (4, "other label")
    assert all((folder / name).read_bytes() == data for name, data in before.items() if name != MANIFEST)
    assert torch.equal(store.window(1), numbers(3, 4, seed=1))
    assert torch.equal(store.window(6), numbers(3, 4, seed=15))  # after a gap; kept for a run that fills the gap
    assert store.manifest.made
    grown(folder, 6)
    assert Reader(folder).n_windows == 7
    before = contents_of(folder)
    record(folder, [0, 1], closed=False)
    seal(folder, IDENTITY, 2)  # fewer windows than the store has
    assert contents_of(folder) == before


@pytest.mark.parametrize("first", [0, 2])
def test_a_kill_at_any_moment_leaves_the_old_store_and_the_next_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A run is killed before its n-th operation on a file, for every n, and another run follows."""
    gold = contents_of(state_store(tmp_path / "gold" / "store", windows=4).path)
    for operation in range(100):
        folder = tmp_path / str(operation) / "store"
        folder.parent.mkdir()
        if first:
            state_store(folder, windows=first)
        old = contents_of(folder) if first else {}
        ended = False
        with suppress(KilledError), killed_at(operation, monkeypatch):
            grown(folder, 4)
            ended = True
        if (folder / MANIFEST).exists():
            store = Reader(folder)
            store.verify()
            assert store.n_windows in (first, 4)
        assert all((folder / name).read_bytes() == data for name, data in old.items() if name != MANIFEST)
        assert is_free(folder) or first or (folder / MANIFEST).exists()
        grown(folder, 4)
        tidy(folder)
        found = contents_of(folder)
        found[MANIFEST] = found[MANIFEST].partition(b'"files"')[2].partition(b'"sha256"')[0]
        assert found == {**gold, MANIFEST: gold[MANIFEST].partition(b'"files"')[2].partition(b'"sha256"')[0]}, operation
        shutil.rmtree(folder.parent)
        if ended:
            break
    assert ended
    assert operation > 5


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """An existing folder is kept, and so are a user's files, links and folders with any name."""
    folder, outside = tmp_path / "users", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    assert is_free(folder)
    assert is_free(tmp_path / "nowhere")
    assert not is_free(outside)
    state_store(folder)
    discard(folder)
    assert names(folder) == set()
    made = state_store(tmp_path / "deep" / "ours").path
    discard(made)
    assert not made.exists()
    discard(made)  # a missing folder is accepted
    state_store(made)
    digest = "0" * 40
    for name in ("notes.txt", "row.000007.safetensors", f"mine.{digest}.safetensors", "part.x.jsonl", ".hidden"):
        (made / name).write_text("mine")
    (made / f"row.000008.{digest}.safetensors").symlink_to(outside)
    (made / f"row.000009.{digest}.safetensors").mkdir()
    mine = {entry.name for entry in made.iterdir()} - names(state_store(tmp_path / "other" / "ours").path)
    assert not is_free(made)
    discard(made)
    assert names(made) == mine
    assert outside.read_text() == "mine"
    assert "is no folder; give another path" in refusal(begin, outside, IDENTITY)


def test_nothing_is_deleted_through_a_link(folder: Path, tmp_path: Path) -> None:
    link, before = tmp_path / "link", contents_of(folder)
    link.symlink_to(folder)
    assert "compare_q deletes nothing through links" in refusal(discard, link)
    (folder / MANIFEST).rename(tmp_path / "manifest")
    (folder / MANIFEST).symlink_to(tmp_path / "manifest")
    assert "compare_q deletes nothing through links" in refusal(discard, folder)
    assert contents_of(folder) == before
    assert link.is_symlink()


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_found(folder: Path) -> None:
    for file, position in flips([folder / MANIFEST], seed=3):
        assert refusal(Reader, folder).startswith(f"{file}: not a reference store: "), position
    good = (folder / MANIFEST).read_bytes()
    for length in range(len(good)):
        (folder / MANIFEST).write_bytes(good[:length])
        with pytest.raises(InputError):
            Reader(folder)
    for other in (b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": ' + b"9" * 5000):
        (folder / MANIFEST).write_bytes(other)
        assert refusal(Reader, folder).startswith(f"{folder / MANIFEST}: not a reference store: ")


@pytest.mark.parametrize("kind", ["row", "head"])
def test_every_flipped_bit_of_a_file_is_found(folder: Path, kind: str) -> None:
    for file, position in flips(sorted(folder.glob(f"{kind}.*")), seed=4):
        problem = f"{file}: damaged: its checksum is not the one in its name"
        assert refusal(Reader(folder).verify).startswith(f"{problem}; "), position
    done: list[int] = []
    Reader(folder).verify(lambda: done.append(1))
    assert len(done) == 4


def test_a_missing_window_or_head_makes_no_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with pytest.raises(ModelError, match="window 0 was not kept"):
        seal(folder, IDENTITY, 1)
    record(folder, [0, 2], closed=False)
    with pytest.raises(ModelError, match="window 1 was not kept"):
        seal(folder, IDENTITY, 3)
    with pytest.raises(ModelError, match="head was not kept"):  # the writer has not finished
        seal(folder, IDENTITY, 1)
    assert not (folder / MANIFEST).exists()
    assert recorded(folder) == {0}


def test_windows_of_another_store_are_not_taken(tmp_path: Path) -> None:
    """An undamaged file of a store with another key is not read."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    record(mine, [0], closed=False)
    record(other, [0, 1], seed=7)
    for file in other.glob("*.safetensors"):
        shutil.copy(file, mine)
    record(mine, [1])
    assert recorded(mine) == {0, 1}
    seal(mine, IDENTITY, 2)
    assert torch.equal(Reader(mine).window(1), numbers(3, 4, seed=1))
    assert len(list(mine.glob("*.safetensors"))) == 6
