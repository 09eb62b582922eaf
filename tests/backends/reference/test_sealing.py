"""A store grows, survives a kill at any moment, and is deleted without anything else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from backends.common import owned
from backends.common.errors import ModelError
from backends.common.head import Head
from backends.reference.store import (
    MANIFEST,
    Reader,
    Writer,
    building_of,
    discard,
    recorded,
    remove,
    seal,
    tidy,
    window_file,
)  # fmt: skip
from tests.support.flips import KilledError, killed_at
from tests.support.stores import (
    IDENTITY,
    WEIGHT,
    contents_of,
    numbers,
    record,
    state_store,
)  # fmt: skip
from tests.support.toy import refusal


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def grown(folder: Path, windows: int) -> None:
    """A run that asks for so many windows: records what is missing, and makes the store of it."""
    building = building_of(folder, IDENTITY)
    there = Reader(folder).manifest.windows if (folder / MANIFEST).is_file() else frozenset()
    wanted = set(range(windows)) - there - recorded(building, folder)
    if wanted:
        record(building, sorted(wanted))
    seal(building, folder, IDENTITY, windows)


def test_a_store_grows(tmp_path: Path) -> None:
    """Windows that it has stay as they are."""
    folder = state_store(tmp_path / "store", windows=2).path
    before = contents_of(folder)
    building = building_of(folder, IDENTITY)
    record(building, [1, 2, 3], seed=9)
    record(building, [6], seed=9)
    seal(building, folder, {**IDENTITY, "label": "other label"}, 4)
    store = Reader(folder)
    store.verify()
    assert (store.n_windows, store.identity["label"]) == (4, "other label")
    after = contents_of(folder)
    assert {name: after[name] for name in before if name != MANIFEST} == {
        name: data for name, data in before.items() if name != MANIFEST
    }
    assert torch.equal(store.window(6), numbers(3, 4, seed=15))  # behind a gap, and kept for a run that closes it
    assert names(tmp_path) == {"store"}
    assert store.manifest.made
    grown(folder, 6)
    assert Reader(folder).n_windows == 7


def test_a_store_of_fewer_windows_than_it_has_stays(tmp_path: Path) -> None:
    folder = state_store(tmp_path / "store", windows=5).path
    before = contents_of(folder)
    record(building_of(folder, IDENTITY), [0, 1], closed=False)
    seal(building_of(folder, IDENTITY), folder, IDENTITY, 2)
    assert contents_of(folder) == before


@pytest.mark.parametrize("change", ["weight", "facts", "contents", "identity"])
def test_shares_of_another_model_do_not_get_into_a_store(tmp_path: Path, change: str) -> None:
    folder, building = state_store(tmp_path / "store").path, tmp_path / "building"
    before, identity = contents_of(folder), dict(IDENTITY)
    if change == "weight":
        record(building, [2], weight=WEIGHT + 1)
    elif change == "facts":
        record(building, [2], head=Head(300, "float32", scale=2.0))
    elif change == "contents":
        building.mkdir()
        writer = Writer(building, "logits")
        writer.window(2, numbers(3, 300))
        writer.close(Head(300, "float32"))
    else:
        record(building, [2])
        identity["windows"] = "abd"
        assert "another reference is there" in refusal(seal, building, folder, identity, 3)
        assert contents_of(folder) == before
        return
    with pytest.raises(ModelError, match=f"delete {folder}, so that the reference is made again") as caught:
        seal(building, folder, identity, 3)
    assert len(str(caught.value).splitlines()) == 1
    assert contents_of(folder) == before


@pytest.mark.parametrize("begin", [0, 2])
def test_a_kill_at_any_moment_leaves_the_old_store_and_the_next_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: int
) -> None:
    """Of every run that is killed before its n-th operation on a file, and of the run after it."""
    gold = state_store(tmp_path / "gold", windows=4).path
    for operation in range(100):
        place = tmp_path / str(operation)
        place.mkdir()
        folder = place / "store"
        if begin:
            state_store(folder, windows=begin)
        old = contents_of(folder) if begin else {}
        with killed_at(operation, monkeypatch):
            try:
                grown(folder, 4)
                ended = True
            except KilledError:
                ended = False
        if folder.exists() and (folder / MANIFEST).exists():
            store = Reader(folder)
            store.verify()
            assert store.n_windows in (begin, 4)
        assert all((folder / name).read_bytes() == data for name, data in old.items() if name != MANIFEST)
        again = building_of(folder, IDENTITY)
        with monkeypatch.context() as patched:
            patched.setattr(owned, "began", lambda pid: 1)  # the killed process is gone
            grown(folder, 4)
            discard(again)
        found, expected = contents_of(folder), contents_of(gold)
        for store in (found, expected):
            store[MANIFEST] = store[MANIFEST].partition(b'"made"')[2].partition(b'"files"')[2]
        assert found == expected, operation
        assert names(place) == {"store"}
        shutil.rmtree(place)
        if ended:
            break
    assert ended
    assert operation > 10


def test_a_window_that_was_moved_before_a_kill_is_not_recorded_again(tmp_path: Path) -> None:
    folder, building = state_store(tmp_path / "store").path, tmp_path / "building"
    record(building, [2, 3])
    (building / window_file(2)).rename(folder / window_file(2))
    assert Reader(folder).n_windows == 2
    assert recorded(building) == {3}
    assert recorded(building, folder) == {2, 3}
    seal(building, folder, IDENTITY, 4)
    Reader(folder).verify()
    assert Reader(folder).n_windows == 4


def test_what_writers_left_is_discarded_once_the_store_has_it(tmp_path: Path) -> None:
    folder, building = state_store(tmp_path / "store").path, tmp_path / "building"
    tidy(building, folder)
    record(building, [1, 2], closed=False)
    tidy(building, folder)
    assert recorded(building) == {1}  # and window 2, once there is a head
    (building / window_file(2)).unlink()
    tidy(building, folder)
    assert not building.exists()
    building.mkdir()  # of a model that did not load
    tidy(building, tmp_path / "nowhere")
    assert not building.exists()


def test_a_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    """Empty, or appeared while the run went on; a folder that we made goes with the store."""
    folder = tmp_path / "users"
    folder.mkdir()
    state_store(folder)
    (folder / "notes.txt").write_text("mine")
    remove(folder)
    assert names(folder) == {"notes.txt"}
    (folder / "notes.txt").unlink()
    state_store(folder)
    remove(folder)
    assert names(folder) == set()
    made = state_store(tmp_path / "deep" / "ours").path
    remove(made)
    assert not made.exists()
    remove(made)  # nothing there is fine
    (state_store(made).path / "notes.txt").write_text("mine")
    remove(made)
    assert names(made) == {"notes.txt"}


def test_a_users_file_is_not_replaced(tmp_path: Path) -> None:
    """Not where it has the name of a window, and not where it is a link with that name."""
    folder, building = tmp_path / "users", tmp_path / "building"
    folder.mkdir()
    for kind in ("file", "link"):
        file = folder / window_file(1)
        if kind == "file":
            file.write_text("mine")
        else:
            file.unlink()
            (tmp_path / "mine").write_text("mine")
            file.symlink_to(tmp_path / "mine")
        record(building, range(2))
        text = refusal(seal, building, folder, IDENTITY, 2)
        assert text == f"{file}: is in the way of the reference, and was not made by compare_q; move it away"
        assert names(folder) == {file.name}
        assert file.read_text() == "mine"
        discard(building)
    (tmp_path / "file").write_text("mine")
    record(building, range(2))
    assert "is no folder; give another path" in refusal(seal, building, tmp_path / "file", IDENTITY, 2)


def test_only_what_the_manifest_lists_is_deleted(tmp_path: Path) -> None:
    folder = state_store(tmp_path / "store").path
    others = {window_file(7), "head.000300.safetensors", "part.x.jsonl", "notes.txt", ".hidden"}
    for name in others:
        (folder / name).write_text("mine")
    (folder / "deep").mkdir()
    remove(folder)
    assert names(folder) == {*others, "deep"}


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    folder, outside = state_store(tmp_path / "store").path, tmp_path / "outside"
    outside.write_bytes((folder / window_file(1)).read_bytes())
    (folder / window_file(1)).unlink()
    (folder / window_file(1)).symlink_to(outside)
    link = tmp_path / "link"
    link.symlink_to(folder)
    before = names(folder)
    for call in (remove, discard):
        if call is remove:
            assert "compare_q deletes nothing through links" in refusal(call, link)
        else:
            call(link)
        assert names(folder) == before
        assert link.is_symlink()
    remove(folder)
    assert names(folder) == {window_file(1)}
    assert outside.exists()
    (folder / MANIFEST).symlink_to(outside)
    assert "compare_q deletes nothing through links" in refusal(remove, folder)


@pytest.mark.parametrize("content", [b"", b'{"version": 2, "files": {"notes.txt": {}}}', None])
def test_a_damaged_manifest_names_nothing_that_may_be_deleted(tmp_path: Path, content: bytes | None) -> None:
    folder = state_store(tmp_path / "store").path
    good = bytearray((folder / MANIFEST).read_bytes())
    good[40] ^= 1
    (folder / MANIFEST).write_bytes(good if content is None else content)
    before = contents_of(folder)
    text = refusal(remove, folder)
    assert text == (
        f"{folder / MANIFEST}: cannot be read, and so does not say which files are the store's; "
        "delete the store yourself"
    )
    assert contents_of(folder) == before
    discard(folder)  # in the cache, where all with our names is ours
    assert not folder.exists()


def test_a_folder_on_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a volume that is mounted there: files are copied, each whole or not at all."""
    folder, building = tmp_path / "store", tmp_path / "building"
    replace = owned.os.replace

    def across(source: Path, target: Path) -> None:
        if Path(source).parent != Path(target).parent:
            raise OSError(18, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr(owned.os, "replace", across)
    record(building, range(3))
    seal(building, folder, IDENTITY, 3)
    Reader(folder).verify()
    assert names(tmp_path) == {"store"}
