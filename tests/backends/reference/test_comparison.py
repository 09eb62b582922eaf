"""Reads from a store: windows ahead of their use, and the logits of a model's shard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference import comparison
from compare_q.backends.reference import store as reference_store
from compare_q.backends.reference.comparison import Comparison, Piece, ReferenceWindows, StoredRows
from compare_q.backends.reference.head import Head, head_logits
from compare_q.backends.reference.recorder import Recorder
from compare_q.backends.reference.store import Reader, open_reference, seal
from tests.support.stores import (
    IDENTITY,
    KEY,
    digest,
    digests,
    numbers,
    record,
    state_store,
    store_of,
)
from tests.support.toy import refusal


class Counting(Reader):
    """A store that records which windows were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[int] = []

    def window(self, window: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        self.read.append(int(window, 16))
        return super().window(window, begin, end)


def whole(window: int, n_scored: int = 3) -> StoredRows:
    return StoredRows(window, n_scored, 0, n_scored)


def counting(folder: Path, count: int) -> Counting:
    return Counting(state_store(folder, count).path)


def with_memory_for_three(store: Counting, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Return a store of six windows, half of which may be read ahead."""
    n_bytes = sum(map(store.window_bytes, store.windows))
    monkeypatch.setattr(comparison, "AHEAD_BYTES", n_bytes // 2)
    return store


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
@pytest.mark.parametrize("ahead_bytes", [0, 1 << 29])
def test_windows_come_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[int], ahead_bytes: int
) -> None:
    monkeypatch.setattr(comparison, "AHEAD_BYTES", ahead_bytes)
    store = counting(tmp_path / "store", 6)
    windows = ReferenceWindows(store, digests(order), pin=False)
    for window in order:
        assert torch.equal(windows.get(whole(window)), numbers(3, 4, seed=window))
    windows.close()
    assert sorted(store.read) == [0, 1, 2, 3, 4, 5]  # each exactly once


def test_windows_are_read_ahead_within_the_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three windows are read ahead of the one in use."""
    store = with_memory_for_three(counting(tmp_path / "store", 6), monkeypatch)
    windows = ReferenceWindows(store, digests(range(6)), pin=False)
    windows.get(whole(0))
    assert list(windows.futures) == [Piece(0, 0), Piece(1, 0), Piece(2, 0), Piece(3, 0)]
    windows.get(whole(3))
    assert list(windows.futures)[4:] == [Piece(4, 0), Piece(5, 0)]
    windows.close()
    monkeypatch.setattr(comparison, "AHEAD_BYTES", 0)  # at least one window
    windows = ReferenceWindows(store, digests(range(6)), pin=False)
    windows.get(whole(4))  # a run that resumes there reads no earlier window
    assert set(windows.futures) == {Piece(4, 0), Piece(5, 0)}
    windows.close()


def test_the_first_windows_may_be_read_before_their_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are read ahead; a damaged one is reported where it is used."""
    store = with_memory_for_three(counting(tmp_path / "store", 6), monkeypatch)
    damaged = store.path / store.windows[digest(5)]
    damaged.write_bytes(bytes(damaged.stat().st_size))
    order = [4, 0, 5, 1, 2]
    windows = ReferenceWindows(store, digests(order), pin=False)
    windows.read_ahead()
    # Of the damaged one, only the header.
    assert store.read == [4, 0]
    for window in (4, 0):
        assert torch.equal(windows.get(whole(window)), numbers(3, 4, seed=window))
    assert f"row.{digest(5)}" in refusal(windows.get, whole(5))
    for window in (1, 2):
        assert torch.equal(windows.get(whole(window)), numbers(3, 4, seed=window))
    windows.close()
    assert store.read == [4, 0, 1, 2]  # each once
    assert windows.is_of(Reader(store.path), digests(order))
    assert not windows.is_of(store, digests([4, 0, 5, 1]))
    # The same windows, of another recording.
    other = state_store(tmp_path / "other", 6)
    assert not windows.is_of(other, digests(order))
    store.windows[digest(4)] = "row.other.safetensors"
    assert not windows.is_of(Reader(store.path), digests(order))


def test_a_long_window_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pieces of 250 rows: two are read ahead, earlier ones are dropped.

    Any rows may be read again.
    """
    record(tmp_path, [1, 2])
    states = numbers(1000, 4, seed=9)
    Recorder(tmp_path, KEY, digests([0]), "states").write(0, states)
    seal(tmp_path, IDENTITY, [digest(0), digest(1), digest(2)])
    monkeypatch.setattr(comparison, "PIECE_BYTES", (16_000 + 1000) // 4)  # plus a header
    monkeypatch.setattr(comparison, "AHEAD_BYTES", 4000)
    windows = ReferenceWindows(Reader(tmp_path), digests(range(3)), pin=False)
    for begin, end in ((0, 10), (240, 270), (100, 900), (999, 1000), (0, 1000), (3, 4)):
        assert torch.equal(windows.get(StoredRows(0, 1000, begin, end)), states[begin:end])
        held = {piece.number for piece in windows.futures if piece.window == 0}
        assert min(held) == begin // 250
    assert torch.equal(windows.get(whole(2)), numbers(3, 4, seed=2))
    windows.drop(0)
    assert {piece.window for piece in windows.futures} == {1, 2}
    with pytest.raises(
        ModelError, match="window 0: the reference has 1000 positions, the window 999"
    ):
        windows.get(StoredRows(0, 999, 900, 999))
    windows.close()


def test_a_dropped_window_is_forgotten_and_can_be_read_again(tmp_path: Path) -> None:
    store = counting(tmp_path / "store", 2)
    windows = ReferenceWindows(store, digests(range(2)), pin=False)
    for window in (0, 1):
        windows.get(whole(window))
        windows.drop(window)
    assert windows.futures == {}
    windows.drop(0)  # a second time does nothing
    assert torch.equal(windows.get(whole(0)), numbers(3, 4, seed=0))
    windows.close()
    assert store.read.count(0) == 2
    with pytest.raises(RuntimeError):  # a closed reader cannot read
        windows.get(whole(1))


@pytest.mark.parametrize(
    "windows",
    [range(20), range(0, 60, 6), [41, 7, 7, 59, 0]],
    ids=["the first share of three", "every sixth", "in another order"],
)
@pytest.mark.parametrize("ahead_bytes", [0, 400, 1 << 29])
def test_only_windows_that_are_scored_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: Sequence[int], ahead_bytes: int
) -> None:
    """A replica scores a share of a store's 60 windows.

    Others are not read, and none is in memory afterwards.
    """
    monkeypatch.setattr(comparison, "AHEAD_BYTES", ahead_bytes)
    store = counting(tmp_path / "store", 60)
    share = digests(windows)
    ahead = ReferenceWindows(store, share, pin=False)
    for window in share:
        assert torch.equal(ahead.get(whole(window)), numbers(3, 4, seed=window))
        assert {piece.window for piece in ahead.futures} <= share.keys()
        ahead.drop(window)
    assert ahead.futures == {}
    ahead.close()
    assert store.read == list(share)  # each once, in the order of scoring


def test_a_window_is_found_by_its_digest_under_any_index(tmp_path: Path) -> None:
    """Two texts may have equal windows, and a run may number the store's windows in another way."""
    store = state_store(tmp_path / "store", 3)
    windows = ReferenceWindows(store, {7: digest(2), 9: digest(0), 10: digest(2)}, pin=False)
    for index, seed in ((7, 2), (9, 0), (10, 2)):
        assert torch.equal(windows.get(whole(index)), numbers(3, 4, seed=seed))
        windows.drop(index)
    assert windows.futures == {}
    windows.close()
    absent = ReferenceWindows(store, {0: digest(5)}, pin=False)
    assert f"row.{digest(5)}" in refusal(absent.get, whole(0))
    absent.close()


CPU = torch.device("cpu")


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_shard_is_its_part_of_the_whole_vocabulary(tmp_path: Path, has_bias: bool) -> None:
    weight = numbers(50, 4)
    bias = None
    if has_bias:
        bias = numbers(50, seed=1)
    head = Head(50, "float32", 30.0, 0.5)
    store = store_of(tmp_path / "store", weight, bias, head=head)
    exact = head_logits(head, store.window(digest(1)), weight, bias)
    all_entries = Comparison(store, digests([1]), (0, 50), CPU)
    torch.testing.assert_close(all_entries.logits([StoredRows(1, 3, 0, 3)]), exact)
    for first, last in ((0, 20), (20, 50), (50, 50)):
        part = Comparison(store, digests([1]), (first, last), CPU)
        torch.testing.assert_close(part.logits([StoredRows(1, 3, 1, 3)]), exact[1:, first:last])
        part.close()
    all_entries.close()


def test_a_shard_of_stored_logits(tmp_path: Path) -> None:
    """The shard is cut from the stored logits; the store does not have a head."""
    folder = tmp_path / "store"
    reference_store.begin(folder, IDENTITY)
    logits = numbers(4, 8)
    Recorder(folder, KEY, digests([0]), "logits", "its head is a Strange").write(0, logits)
    seal(folder, IDENTITY, [digest(0)])
    store = open_reference(folder)
    compared = Comparison(store, digests([0]), (2, 5), CPU)
    assert compared.head is None
    assert torch.equal(compared.logits([StoredRows(0, 4, 1, 3)]), logits[1:3, 2:5])
    compared.close()


def test_a_head_is_shared_only_if_it_is_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "COMPARED_ENTRIES", 7)  # chunks that do not divide the range
    weight = numbers(50, 4).bfloat16()
    store = store_of(tmp_path / "store", weight)
    assert comparison.is_same_weight(store, weight, 0, 50)
    assert comparison.is_same_weight(store, weight[20:], 20, 50)  # a rank's share
    assert not comparison.is_same_weight(store, weight, 20, 50)
    assert not comparison.is_same_weight(store, weight.float(), 0, 50)
    for changed in (0, 6, 7, 49):
        other = weight.clone()
        other[changed, 3] += 1
        assert not comparison.is_same_weight(store, other, 0, 50)
    assert not comparison.is_same_weight(
        store_of(tmp_path / "bias", weight, torch.zeros(50)), weight, 0, 50
    )


def test_no_store_at_all(tmp_path: Path) -> None:
    save_file({"lm_head.weight": numbers(5, 8)}, tmp_path / "model.safetensors")
    (tmp_path / "logits.safetensors.rows").mkdir()
    (tmp_path / "notes").write_text("no safetensors")
    os.mkfifo(tmp_path / "pipe")  # opening the pipe must not block
    for name in ("nowhere", "", "logits.safetensors", "model.safetensors", "notes", "pipe"):
        path = tmp_path / name
        assert refusal(open_reference, path).startswith(
            f"{path}: holds no reference: there is no reference.json; "
        )
