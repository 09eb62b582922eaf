"""Files between driver and node: whole, checked, in an order that no end can harm, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.common.errors import ModelError
from backends.reference.store import MANIFEST, Reader, begin, seal
from backends.scoring import segments
from eval.cluster import parcels
from eval.cluster.parcels import Outbox, StoreCopy, is_seen, keep, pieces
from eval.common.cache import Cache
from tests.support.scores import random_scores, random_windows
from tests.support.stores import IDENTITY, record, state_store, window_of

WINDOWS = random_windows(4)


def sent(outbox: Outbox, *folders: tuple[str, Path]) -> list[str]:
    """The names of what is waiting, each of which is kept in these folders."""
    found = list(outbox.waiting())
    for parcel in found:
        keep(dict(folders), parcel)
    return [name for _, name, _ in found]


def test_scores_come_back_bit_for_bit_and_once(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    outbox = Outbox({"scores": there})
    scores = [(window, random_scores(window)) for window in WINDOWS]
    segments.commit(there, segments.ALONE, scores[:2], "one", 1.0)
    assert len(sent(outbox, ("scores", here))) == 1
    segments.write_record(there, "one", {"load_seconds": 1.0})
    segments.commit(there, segments.ALONE, scores[2:], "one", 1.0)
    (there / "notes.txt").write_text("a user's own")
    assert [name.split(".")[0] for name in sent(outbox, ("scores", here))] == ["record", "alone"]
    assert sent(outbox, ("scores", here)) == []
    for file in here.iterdir():
        assert file.read_bytes() == (there / file.name).read_bytes()
    assert segments.committed(here, segments.ALONE) == frozenset(range(4))


def test_a_recording_that_came_in_parts_is_the_store_that_it_would_have_been(tmp_path: Path) -> None:
    there, store = tmp_path / "there", tmp_path / "store"
    outbox = Outbox({"record": there})
    begin(store, IDENTITY)
    for first in (0, 2):  # the second share has the head
        record(there, range(first, first + 2), closed=first == 2)
        sent(outbox, ("record", store))
    seal(store, IDENTITY, 4)
    whole = state_store(tmp_path / "whole", windows=4)
    assert Reader(store).manifest.files == whole.manifest.files
    Reader(store).verify()


@pytest.mark.parametrize(
    ("purpose", "name", "reason"),
    [
        ("scores", "../evil.json", "no worker writes"),
        ("scores", "row.000000.safetensors", "no worker writes"),
        ("elsewhere", "record.one.json", "no worker writes"),
        ("scores", f"alone.{'0' * 40}.safetensors", "another checksum"),
    ],
)
def test_what_a_node_may_not_send_is_refused(tmp_path: Path, purpose: str, name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        keep({"scores": tmp_path / "scores"}, (purpose, name, b"x"))
    assert list(tmp_path.rglob("*")) == []


def copied(copy: StoreCopy, store: Path) -> list[str]:
    """Send what a copy lacks; the names."""
    missing = copy.missing()
    assert missing is not None
    for name in missing:
        for piece, last in pieces(store / name):
            copy.add(name, piece, last=last)
    copy.close()
    return missing


def test_a_store_is_copied_once_and_then_what_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "PIECE", 100)  # files of several pieces
    store, cache = state_store(tmp_path / "store"), Cache(tmp_path / "node")
    origin = (store.path / MANIFEST).read_bytes()
    first, second = StoreCopy(cache, origin), StoreCopy(cache, origin)
    assert first.missing() == list(store.manifest.files)
    assert second.missing() is None, "one worker of a node copies at a time"
    first.lock.release()
    assert copied(first, store.path) == list(store.manifest.files)
    Reader(first.folder).verify()
    assert Reader(first.folder).manifest.files == store.manifest.files
    assert copied(StoreCopy(cache, origin), store.path) == []
    record(store.path, [2])
    seal(store.path, IDENTITY, 3)
    grown = StoreCopy(cache, (store.path / MANIFEST).read_bytes())
    assert copied(grown, store.path) == [window_of(store.path, 2).name]
    assert Reader(grown.folder).n_windows == 3


def test_a_file_that_was_damaged_on_its_way_is_not_kept(tmp_path: Path) -> None:
    store = state_store(tmp_path / "store")
    copy = StoreCopy(Cache(tmp_path / "node"), (store.path / MANIFEST).read_bytes())
    names = copy.missing() or []
    data = (store.path / names[0]).read_bytes()
    with pytest.raises(ModelError, match="another checksum"):
        copy.add(names[0], data[:-1] + bytes([data[-1] ^ 1]), last=True)
    assert names[0] not in [file.name for file in copy.folder.iterdir()]


def test_a_store_is_seen_where_it_is_the_same_one_and_whole(tmp_path: Path) -> None:
    store, other = state_store(tmp_path / "store"), state_store(tmp_path / "other", windows=3)
    origin = (store.path / MANIFEST).read_bytes()
    assert is_seen(store.path, origin)
    assert not is_seen(other.path, origin)
    assert not is_seen(tmp_path / "nowhere", origin)
    window_of(store.path, 1).unlink()
    assert not is_seen(store.path, origin)
