"""The reference store: it returns what was written, can grow, and stays valid after a kill."""

from __future__ import annotations

import math
import multiprocessing
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from compare_q.backends.common import storage
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.message_text import dtype_name
from compare_q.backends.reference.head import Head
from compare_q.backends.reference.recorder import Recorder
from compare_q.backends.reference.store import (
    STORE_MANIFEST,
    UNFINISHED,
    Reader,
    abandon,
    begin,
    discard,
    forget,
    is_free,
    key_in,
    key_of,
    open_reference,
    recorded,
    seal,
    tidy,
)
from tests.support.flips import KilledError, flips, killed_at
from tests.support.stores import (
    HEAD,
    IDENTITY,
    KEY,
    digest,
    digests,
    numbers,
    record,
    state_store,
    store_of,
    window_of,
)
from tests.support.toy import refusal

INF = math.inf
NAN = math.nan


def contents_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_unchanged(folder: Path, before: dict[str, bytes]) -> None:
    """Assert that a folder still has these files, except that its manifest may be another one."""
    for name, data in before.items():
        if name != STORE_MANIFEST:
            assert (folder / name).read_bytes() == data, name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three windows of states."""
    return state_store(tmp_path / "store", windows=3).path


def some(windows: Iterable[int]) -> list[str]:
    """Return the digests of windows."""
    return list(map(digest, windows))


def store_with(folder: Path, windows: Iterable[int]) -> Path:
    """Make a sealed store of these windows of states, and return its folder."""
    numbered = list(windows)
    record(folder, numbered)
    seal(folder, IDENTITY, some(numbered))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def record_logits(folder: Path, windows: list[int], logits: torch.Tensor | None = None) -> None:
    begin(folder, IDENTITY)
    recorder = Recorder(folder, KEY, digests(windows), "logits", "its head is a Strange")
    if logits is None:
        logits = numbers(3, 300)
    for window in windows:
        recorder.write(window, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    weight = numbers(300, 4, dtype=dtype)
    states = [numbers(3, 4, seed=3, dtype=dtype), numbers(5, 4, seed=5, dtype=dtype)]
    recorder = Recorder(folder, "", digests([0, 1]), "states")
    head = Head(300, "bfloat16", 30.0, 0.25)
    recorder.write(1, states[1])  # windows come in the order in which they finish
    recorder.write(0, states[0])
    recorder.write_head((weight, None, head))
    seal(folder, IDENTITY, some([0, 1]))
    store = Reader(folder)
    assert (store.contents, store.reason, store.head) == ("states", "", head)
    assert store.windows.keys() == set(some([0, 1]))
    assert store.identity == IDENTITY
    for window in (0, 1):
        assert store.window(digest(window)).dtype == dtype
        assert torch.equal(store.window(digest(window)), states[window])
        assert store.n_rows(digest(window)) == len(states[window])
    stored_weight, bias = store.weight(0, 300, "cpu")
    assert stored_weight.dtype == dtype
    assert torch.equal(stored_weight, weight)
    assert bias is None
    sizes = {}
    for file in sorted(folder.glob("*.safetensors")):
        sizes[file.name.rsplit(".", 2)[0]] = file.stat().st_size
    assert list(sizes) == ["head.000000", f"row.{digest(0)}", f"row.{digest(1)}"]
    assert len(list(folder.iterdir())) == len(sizes) + 1  # the manifest
    assert store.stored_bytes == sum(sizes.values())
    assert store.window_bytes(digest(1)) == sizes[f"row.{digest(1)}"]
    assert store.window_bytes(digest(2)) == 0
    assert store.bytes_of(some([1])) == sizes["head.000000"] + sizes[f"row.{digest(1)}"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_kept_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Logits keep the engine's dtype, with values that float16 cannot hold, infinities and NaN."""
    largest = torch.finfo(dtype).max
    logits = torch.tensor([[1 + 2**-11, -largest, 0.1, -INF], [38.25, largest / 2, 1e-7, NAN]]).to(
        dtype
    )
    record_logits(tmp_path / "store", [0], logits)
    seal(tmp_path / "store", IDENTITY, some([0]))
    store = Reader(tmp_path / "store")
    assert (store.contents, store.reason) == ("logits", "its head is a Strange")
    assert store.head == Head(4, dtype_name(dtype))
    assert store.window(digest(0)).dtype == dtype
    assert torch.equal(store.window(digest(0)).view(torch.uint8), logits.view(torch.uint8))
    assert "head lacks entries between 0 and 3" in refusal(store.weight, 0, 3, "cpu")


@pytest.mark.parametrize("has_bias", [True, False])
def test_several_processes_make_one_store(tmp_path: Path, has_bias: bool) -> None:
    """Two ranks: entries 200 to 300 with window 0, entries 0 to 200 with window 1."""
    weight = numbers(300, 4)
    bias = None
    if has_bias:
        bias = numbers(300)

    def head_of(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor | None, Head]:
        if bias is None:
            return weight[first:last], None, HEAD
        return weight[first:last], bias[first:last], HEAD

    folder = tmp_path / "store"
    begin(folder, IDENTITY)
    for window, first, last in ((0, 200, 300), (1, 0, 200)):
        with pytest.raises(ModelError, match="not kept"):
            seal(folder, IDENTITY, some([0, 1]))  # a part of the head is missing
        assert recorded(folder, some([0, 1])) == set()
        recorder = Recorder(folder, KEY, digests([0, 1]), "states")
        recorder.write(window, numbers(3, 4, seed=window))
        recorder.write_head(head_of(first, last), first)
    padding = head_of(300, 300)  # a rank may have nothing else
    Recorder(folder, KEY, {}, "states").write_head(padding, 300)
    seal(folder, IDENTITY, some([0, 1]))
    store = Reader(folder)
    store.verify()
    assert torch.equal(store.window(digest(0)), numbers(3, 4, seed=0))
    assert torch.equal(store.window(digest(1)), numbers(3, 4, seed=1))
    inside = [(0, 300), (0, 200), (200, 300), (199, 201), (150, 250), (0, 1), (299, 300), (10, 20)]
    nothing = [(0, 0), (100, 100), (200, 200), (300, 300)]  # for a rank that holds only padding
    for first, last in inside + nothing:
        entries, bias_entries = store.weight(first, last, "cpu")
        assert torch.equal(entries, weight[first:last])  # shapes too: [0, 4] of nothing
        if bias is None:
            assert bias_entries is None
        else:
            assert torch.equal(bias_entries, bias[first:last])
    text = refusal(store.weight, 100, 301, "cpu")
    assert text.startswith(
        f"{store.path}: the reference's head lacks entries between 100 and 301; "
    )


def record_slowly(folder: Path, first: int) -> None:
    """Record every second window, one after the other; run in a separate process."""
    record(folder, range(first, 60, 2))


@pytest.mark.engine
def test_two_processes_record_and_one_is_killed(tmp_path: Path) -> None:
    """After a SIGKILL, the written windows count, and the next run records the missing ones."""
    folder = tmp_path / "store"
    begin(folder, IDENTITY)
    context = multiprocessing.get_context("fork")
    one = context.Process(target=record_slowly, args=(folder, 0))
    two = context.Process(target=record_slowly, args=(folder, 1))
    one.start()
    two.start()
    while len(list(folder.glob("row.*"))) < 20 and one.is_alive():
        pass
    one.kill()
    for process in (one, two):
        process.join()
    assert two.exitcode == 0
    complete = recorded(folder, some(range(60)))
    assert complete >= set(some(range(1, 60, 2)))
    record(folder, [window for window in range(60) if digest(window) not in complete])
    seal(folder, IDENTITY, some(range(60)))
    store = Reader(folder)
    store.verify()
    for window in range(60):
        assert torch.equal(store.window(digest(window)), numbers(3, 4, seed=window))
    assert len(names(folder)) == 60 + 2


def grown(folder: Path, windows: Iterable[int]) -> None:
    """Do as a run that needs these windows: record the missing ones, and seal the store."""
    needed = list(windows)
    begin(folder, IDENTITY)
    complete = recorded(folder, some(needed))
    missing = [window for window in needed if digest(window) not in complete]
    if missing:
        record(folder, missing)
    seal(folder, IDENTITY, some(needed))


def test_a_store_grows_by_windows_of_other_texts(tmp_path: Path) -> None:
    """The windows come in any order, and the store's own windows do not change."""
    folder = store_with(tmp_path / "store", [5, 2])
    before = contents_of(folder)
    record(folder, [9, 2, 1, 7], seed=9)
    assert Reader(folder).windows.keys() == set(some([2, 5]))
    seal(folder, {**IDENTITY, "label": "other label"}, some([9, 1, 5]))
    store = Reader(folder)
    store.verify()
    assert store.windows.keys() == set(some([1, 2, 5, 7, 9]))
    assert store.identity["label"] == "other label"
    assert_unchanged(folder, before)
    assert torch.equal(store.window(digest(2)), numbers(3, 4, seed=2))  # it was not replaced
    assert torch.equal(store.window(digest(9)), numbers(3, 4, seed=18))
    # The second recording of window 2 is deleted.
    assert names(folder) == {STORE_MANIFEST, *store.manifest.files}
    assert store.manifest.made
    grown(folder, [0, 9])
    assert Reader(folder).windows.keys() == set(some([0, 1, 2, 5, 7, 9]))
    before = contents_of(folder)
    record(folder, [0, 1], closed=False)
    seal(folder, IDENTITY, some([0, 1]))
    assert contents_of(folder) == before


def test_a_recording_identifies_a_windows_numbers_and_the_head(tmp_path: Path) -> None:
    """It stays the same while the store grows, and if the same numbers are recorded again."""
    store = Reader(store_with(tmp_path / "one" / "store", [0, 1]))
    recording = store.recording(digest(0))
    assert len(recording) == 16
    assert recording != store.recording(digest(1))
    assert store.recording(digest(2)) == ""
    grown(store.path, [4])
    assert Reader(store.path).recording(digest(0)) == recording
    assert Reader(store_with(tmp_path / "two" / "store", [0])).recording(digest(0)) == recording
    other_numbers = tmp_path / "numbers"
    record(other_numbers, [0], seed=1)
    seal(other_numbers, IDENTITY, some([0]))
    assert Reader(other_numbers).recording(digest(0)) != recording
    other_head = store_of(tmp_path / "head", numbers(300, 4, seed=1), windows=1)
    assert other_head.recording(digest(0)) != recording


def listed_files(manifest: bytes) -> bytes:
    """Return the part of a manifest's text that lists its files."""
    return manifest.partition(b'"files"')[2].partition(b'"sha256"')[0]


@pytest.mark.parametrize("first", [0, 2])
def test_a_kill_at_any_moment_leaves_the_old_store_and_the_next_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A run is killed before its n-th operation on a file, for every n, and another run follows."""
    gold = contents_of(store_with(tmp_path / "gold" / "store", range(4)))
    for operation in range(100):
        folder = tmp_path / str(operation) / "store"
        folder.parent.mkdir()
        old = {}
        if first:
            store_with(folder, range(first))
            old = contents_of(folder)
        ended = False
        with suppress(KilledError), killed_at(operation, monkeypatch):
            grown(folder, range(4))
            ended = True
        if (folder / STORE_MANIFEST).exists():
            store = Reader(folder)
            store.verify()
            assert store.windows.keys() in (set(some(range(first))), set(some(range(4))))
        assert_unchanged(folder, old)
        assert is_free(folder) or first or (folder / STORE_MANIFEST).exists()
        grown(folder, range(4))
        tidy(folder)
        contents = contents_of(folder)
        contents[STORE_MANIFEST] = listed_files(contents[STORE_MANIFEST])
        assert contents == {**gold, STORE_MANIFEST: listed_files(gold[STORE_MANIFEST])}, operation
        shutil.rmtree(folder.parent)
        if ended:
            break
    assert ended
    assert operation > 5


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """An existing folder is kept, and so are a user's files, links and folders with any name."""
    folder = tmp_path / "users"
    folder.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("mine")
    assert is_free(folder)
    assert is_free(tmp_path / "nowhere")
    assert not is_free(outside)
    state_store(folder)
    discard(folder)
    assert names(folder) == set()
    ours = state_store(tmp_path / "deep" / "ours").path
    discard(ours)
    assert not ours.exists()
    discard(ours)  # a missing folder is accepted
    state_store(ours)
    files_of_store = names(ours)
    digest = "0" * 40
    for name in (
        "notes.txt",
        "row.000007.safetensors",
        f"mine.{digest}.safetensors",
        "part.x.jsonl",
        ".hidden",
    ):
        (ours / name).write_text("mine")
    (ours / f"row.000008.{digest}.safetensors").symlink_to(outside)
    (ours / f"row.000009.{digest}.safetensors").mkdir()
    mine = names(ours) - files_of_store
    assert len(mine) == 7
    assert not is_free(ours)
    discard(ours)
    assert names(ours) == mine
    assert outside.read_text() == "mine"
    assert "is no folder; give another path" in refusal(begin, outside, IDENTITY)


def test_nothing_is_deleted_through_a_link(folder: Path, tmp_path: Path) -> None:
    before = contents_of(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert "compare_q deletes nothing through links" in refusal(discard, link)
    (folder / STORE_MANIFEST).rename(tmp_path / "manifest")
    (folder / STORE_MANIFEST).symlink_to(tmp_path / "manifest")
    assert "compare_q deletes nothing through links" in refusal(discard, folder)
    assert contents_of(folder) == before
    assert link.is_symlink()


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_found(folder: Path) -> None:
    for file, position in flips([folder / STORE_MANIFEST], seed=3):
        assert refusal(Reader, folder).startswith(f"{file}: not a reference store: "), position
    good = (folder / STORE_MANIFEST).read_bytes()
    for length in range(len(good)):
        (folder / STORE_MANIFEST).write_bytes(good[:length])
        with pytest.raises(InputError):
            Reader(folder)
    for other in (b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": ' + b"9" * 5000):
        (folder / STORE_MANIFEST).write_bytes(other)
        assert refusal(Reader, folder).startswith(
            f"{folder / STORE_MANIFEST}: not a reference store: "
        )


@pytest.mark.parametrize("kind", ["row", "head"])
def test_every_flipped_bit_of_a_file_is_found(folder: Path, kind: str) -> None:
    for file, position in flips(sorted(folder.glob(f"{kind}.*")), seed=4):
        problem = f"{file}: damaged: its checksum is not the one in its name"
        assert refusal(Reader(folder).verify).startswith(f"{problem}; "), position
    done: list[int] = []
    Reader(folder).verify(advance=lambda: done.append(1))
    assert len(done) == 4
    Reader(folder).verify(some([1]), lambda: done.append(1))
    assert len(done) == 4 + 2  # the window and the head


def test_only_a_runs_windows_are_verified(folder: Path) -> None:
    file = window_of(folder, digest(2))
    file.write_bytes(b"")
    Reader(folder).verify(some([0, 1]))
    assert refusal(Reader(folder).verify, some([2])).startswith(f"{file}: damaged: ")


def test_a_missing_window_or_head_makes_no_store(tmp_path: Path) -> None:
    """The message has the number of missing windows, and one of them."""
    folder = tmp_path / "store"
    with pytest.raises(ModelError, match=f"1 of 1 windows .* {digest(0)} "):
        seal(folder, IDENTITY, some([0]))
    record(folder, [0, 2], closed=False)
    with pytest.raises(ModelError, match=f"3 of 5 windows .* {digest(1)} "):
        seal(folder, IDENTITY, some([0, 1, 2, 3, 4]))
    with pytest.raises(ModelError, match="head was not kept"):  # the writer has not finished
        seal(folder, IDENTITY, some([0]))
    assert not (folder / STORE_MANIFEST).exists()


def test_a_killed_run_records_one_of_its_windows_again_until_the_head_is_written(
    tmp_path: Path,
) -> None:
    """The run that records this window also writes the head.

    In a store, this head is compared with the store's.
    """
    folder = tmp_path / "store"
    record(folder, [3, 0, 8], closed=False)
    assert recorded(folder, some([0, 3, 5, 8])) == set(some([0, 3]))
    record(folder, [8])
    assert recorded(folder, some([0, 3, 5, 8])) == set(some([0, 3, 8]))
    seal(folder, IDENTITY, some([0, 3, 8]))
    record(folder, [4, 6], closed=False)
    assert recorded(folder, some([0, 4, 5, 6])) == set(some([0, 4]))
    record(folder, [6])
    assert recorded(folder, some([0, 4, 5, 6])) == set(some([0, 4]))
    record(folder, [6], weight=numbers(300, 4, seed=1))
    with pytest.raises(ModelError, match="another head"):
        seal(folder, IDENTITY, some([6]))


def test_files_of_another_run_are_ignored_and_kept(tmp_path: Path) -> None:
    """Two runs record different windows of one reference at once."""
    folder = tmp_path / "store"
    record(folder, [0, 1, 2], closed=False)
    before = contents_of(folder)
    damaged = window_of(folder, digest(1))
    damaged.write_bytes(before[damaged.name][:-1])
    assert recorded(folder, some([7, 8])) == set()
    assert recorded(folder, some([2, 7])) == set()  # this run's only window is recorded again
    assert names(folder) == before.keys()
    assert recorded(folder, some([1, 2])) == set()
    assert names(folder) == before.keys() - {damaged.name}  # its own damaged file
    assert abandon(folder, some([2, 7])) == len(before[damaged.name])
    assert names(folder) == {UNFINISHED, window_of(folder, digest(0)).name}
    assert abandon(folder, some([7])) == 0


def test_windows_that_cannot_be_kept_are_deleted_alone(folder: Path) -> None:
    """The store's windows stay, and so do those that another run is recording."""
    before = contents_of(folder)
    record(folder, [1, 6, 7], seed=1)
    abandon(folder, some([0, 1, 6]))
    assert names(folder) == before.keys() | {window_of(folder, digest(7)).name}
    for name, data in before.items():
        assert (folder / name).read_bytes() == data


def test_windows_of_another_store_are_not_taken(tmp_path: Path) -> None:
    """A file from another reference's folder is ignored: its header has that reference's key."""
    mine = tmp_path / "mine"
    other = tmp_path / "other"
    record(mine, [0], closed=False)
    record(other, [0, 1], seed=7, identity={**IDENTITY, "model": "def"})
    assert key_in(mine) == key_of(IDENTITY)
    assert key_in(other) == key_of({"model": "def"})
    for file in other.glob("*.safetensors"):
        shutil.copy(file, mine)
    record(mine, [1])
    assert recorded(mine, some([0, 1])) == set(some([0, 1]))
    seal(mine, IDENTITY, some([0, 1]))
    assert torch.equal(Reader(mine).window(digest(1)), numbers(3, 4, seed=1))
    assert len(list(mine.glob("*.safetensors"))) == 6
    assert key_in(mine) == key_of(IDENTITY)
    assert key_in(tmp_path / "nowhere") == ""


def test_a_store_forgets_windows(folder: Path) -> None:
    """The others stay, whether the store has them or another run is recording them."""
    before = contents_of(folder)
    record(folder, [1, 6, 7], seed=1, closed=False)
    new = window_of(folder, digest(7))
    forget(folder, some([1, 6, 9]))
    store = Reader(folder)
    store.verify()
    assert store.windows.keys() == set(some([0, 2]))
    assert torch.equal(store.window(digest(2)), numbers(3, 4, seed=2))
    assert store.head == Head(300, "float32")
    assert names(folder) == {STORE_MANIFEST, *store.manifest.files, new.name}
    for name in store.manifest.files:
        assert (folder / name).read_bytes() == before[name]
    assert recorded(folder, some([0, 1, 2])) == set(some([0, 2]))
    grown(folder, [1])
    assert torch.equal(Reader(folder).window(digest(1)), numbers(3, 4, seed=1))


@pytest.mark.parametrize(
    "reason", ["no window left", "damaged head", "missing head", "damaged manifest"]
)
def test_a_store_that_is_of_no_use_is_deleted(folder: Path, reason: str) -> None:
    (head,) = folder.glob("head.*")
    windows = some([1])
    if reason == "no window left":
        windows = some([0, 1, 2, 5])
    elif reason == "damaged head":
        head.write_bytes(head.read_bytes()[:-1])
    elif reason == "missing head":
        head.unlink()
    else:
        (folder / STORE_MANIFEST).write_text("{")
        (folder / "mine").touch()  # nobody knows any more who made the folder
    forget(folder, windows)
    assert not list(folder.glob("*.safetensors"))
    assert not (folder / STORE_MANIFEST).exists()
    assert folder.exists() == (reason == "damaged manifest")
    forget(folder, windows)  # again, without effect


@pytest.mark.parametrize("windows", [[1, 2], [0, 1, 2]])
def test_a_kill_while_windows_are_forgotten_leaves_a_whole_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: list[int]
) -> None:
    """A run is killed before its n-th operation on a file, for every n.

    Another run then forgets the windows, or needs them.
    """
    remaining = [window for window in range(3) if window not in windows]
    ended = False
    for operation in range(100):
        folder = store_with(tmp_path / str(operation) / "store", range(3))
        with suppress(KilledError), killed_at(operation, monkeypatch):
            forget(folder, some(windows))
            ended = True
        if (folder / STORE_MANIFEST).exists():
            store = Reader(folder)
            store.verify()
            assert store.windows.keys() in (set(some(range(3))), set(some(remaining)))
        again = folder.with_name("again")
        if folder.exists():
            shutil.copytree(folder, again)
            forget(again, some(windows))
            assert bool(list(again.glob("row.*"))) == bool(remaining)
            if remaining:
                assert Reader(again).windows.keys() == set(some(remaining))
        grown(folder, range(3))
        store = Reader(folder)
        store.verify()
        for window in range(3):
            assert torch.equal(store.window(digest(window)), numbers(3, 4, seed=window))
        assert not list(folder.glob(".*"))
        if ended:
            break
    assert ended
    assert operation > 3


def test_a_store_of_0_3_is_refused_and_not_deleted(folder: Path) -> None:
    """Its windows were numbered."""
    for file in folder.glob("row.*"):
        _, window, checksum, suffix = file.name.split(".")
        file.rename(folder / f"row.{int(window, 16):06d}.{checksum}.{suffix}")
    files = {}
    for file in folder.glob("*.safetensors"):
        files[file.name] = file.stat().st_size
    content = storage.load((folder / STORE_MANIFEST).read_bytes())
    (folder / STORE_MANIFEST).write_bytes(storage.dump({**content, "version": 3, "files": files}))
    before = contents_of(folder)
    for refused in (
        lambda: Reader(folder),
        lambda: open_reference(folder),
        lambda: begin(folder, IDENTITY),
        lambda: recorded(folder, some([0])),
        lambda: seal(folder, IDENTITY, some([0])),
        lambda: abandon(folder, some([0])),
    ):
        message = refusal(refused)
        assert message.startswith(f"{folder / STORE_MANIFEST}: layout 3, this compare_q reads 4; ")
        assert "\n" not in message
    assert contents_of(folder) == before
