"""The reference on disk: what is written comes back, and what is missing or damaged is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.common.dtypes import dtype_name
from backends.common.head import Head
from backends.reference.store import MANIFEST, Reader, Writer, seal, window_file
from tests.support.stores import HEAD, IDENTITY, WEIGHT, numbers, state_store
from tests.support.toy import refusal

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    building, folder = tmp_path / "building", tmp_path / "store"
    building.mkdir()
    weight, states = numbers(300, 4, dtype=dtype), [numbers(n, 4, seed=n, dtype=dtype) for n in (3, 5)]
    writer = Writer(building, "states")
    writer.window(1, states[1])  # windows come in the order in which they finish
    writer.window(0, states[0])
    writer.head(0, weight, None)
    head = Head(300, "bfloat16", 30.0, 0.25)
    writer.close(head)
    seal(building, folder, IDENTITY, 2)
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
    assert sorted(file.name for file in files) == ["head.000000.safetensors", window_file(0), window_file(1)]
    assert store.stored_bytes == sum(file.stat().st_size for file in files)


def test_a_slice_of_a_wider_tensor_is_kept_alone(tmp_path: Path) -> None:
    """Neither columns nor rows of what it was cut from, nor its gradient."""
    building = tmp_path / "building"
    building.mkdir()
    whole = numbers(10, 8).requires_grad_()
    writer = Writer(building, "states")
    writer.window(0, whole[2:5, ::2])
    writer.head(0, WEIGHT, None)
    writer.close(HEAD)
    seal(building, tmp_path / "store", {}, 1)
    assert torch.equal(Reader(tmp_path / "store").window(0), whole.detach()[2:5, ::2])
    assert (tmp_path / "store" / window_file(0)).stat().st_size < 3 * 4 * 4 + 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_kept_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """In the engine's own dtype; of bfloat16 and float32 also those that float16 cannot hold."""
    largest = torch.finfo(dtype).max
    logits = torch.tensor([[1 + 2**-11, -largest, 0.1], [38.25, largest / 2, 1e-7]]).to(dtype)
    building, folder = tmp_path / "building", tmp_path / "store"
    building.mkdir()
    writer = Writer(building, "logits", "its head is a Strange")
    writer.window(0, logits)
    writer.close(Head(3, dtype_name(dtype)))
    seal(building, folder, IDENTITY, 1)
    store = Reader(folder)
    assert (store.contents, store.reason) == ("logits", "its head is a Strange")
    assert store.window(0).dtype == dtype
    assert torch.equal(store.window(0), logits)
    assert "head lacks entries between 0 and 3" in refusal(store.weight, 0, 3, "cpu")


def test_logits_that_are_not_finite_stay_what_they_are(tmp_path: Path) -> None:
    """A masked token or a NaN is the model's own and is counted later."""
    building = tmp_path / "building"
    building.mkdir()
    writer = Writer(building, "logits")
    writer.window(0, torch.tensor([[0.5, -INF, INF, NAN]]))
    writer.close(Head(4, "float32"))
    seal(building, tmp_path / "store", {}, 1)
    *kept, last = Reader(tmp_path / "store").window(0)[0].tolist()
    assert kept == [0.5, -INF, INF]
    assert math.isnan(last)


def piece_by_piece(building: Path, weight: torch.Tensor, bias: Any) -> None:
    """Two writers: one writes window 0 and entries 200 to 300, the other window 1 and entries 0 to 200."""
    building.mkdir()
    for window, first, last in ((0, 200, 300), (1, 0, 200)):
        writer = Writer(building, "states")
        writer.window(window, numbers(3, 4, seed=window))
        writer.head(first, weight[first:last], None if bias is None else bias[first:last])
        writer.close(HEAD)


@pytest.mark.parametrize("has_bias", [True, False])
def test_several_processes_make_one_store(tmp_path: Path, has_bias: bool) -> None:
    weight, bias = numbers(300, 4), numbers(300) if has_bias else None
    piece_by_piece(tmp_path / "building", weight, bias)
    assert len(list((tmp_path / "building").glob("part.*.jsonl"))) == 2
    seal(tmp_path / "building", tmp_path / "store", IDENTITY, 2)
    names = {"head.000000.safetensors", "head.000200.safetensors", window_file(0), window_file(1), MANIFEST}
    assert {file.name for file in (tmp_path / "store").iterdir()} == names
    store = Reader(tmp_path / "store")
    store.verify()
    assert torch.equal(store.window(0), numbers(3, 4, seed=0))
    assert torch.equal(store.window(1), numbers(3, 4, seed=1))
    inside = [(0, 300), (0, 200), (200, 300), (199, 201), (150, 250), (0, 1), (299, 300), (10, 20)]
    nothing = [(0, 0), (100, 100), (200, 200), (300, 300)]  # for a rank that holds nothing but padding
    for first, last in inside + nothing:
        found, found_bias = store.weight(first, last, "cpu")
        assert torch.equal(found, weight[first:last])  # shapes too: [0, 4] of nothing
        if bias is None:
            assert found_bias is None
        else:
            assert found_bias is not None
            assert torch.equal(found_bias, bias[first:last])
    assert [begin for begin, _, _ in store.head_parts(150, 250)] == [150, 200]
    assert [begin for begin, _, _ in store.head_parts(200, 210)] == [200]


def test_a_head_that_lacks_a_piece(tmp_path: Path) -> None:
    piece_by_piece(tmp_path / "building", numbers(250, 4), None)  # entries 250 to 300 are nowhere
    seal(tmp_path / "building", tmp_path / "store", IDENTITY, 2)
    store = Reader(tmp_path / "store")
    assert len(store.weight(100, 250, "cpu")[0]) == 150
    text = refusal(store.weight, 100, 251, "cpu")
    assert text == f"{store.path}: the reference's head lacks entries between 100 and 251; delete it"


def test_verify_looks_at_every_file(tmp_path: Path) -> None:
    store = state_store(tmp_path / "store", windows=3)
    done: list[int] = []
    store.verify(lambda: done.append(1))
    assert len(done) == 4
    Reader(tmp_path / "store").verify()


def test_verify_finds_a_missing_and_a_short_file(tmp_path: Path) -> None:
    store = state_store(tmp_path / "store", windows=3)
    file = store.path / window_file(1)
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file}: damaged" in refusal(store.verify)
    file.unlink()
    assert f"{file}: missing from the reference" in refusal(store.verify)
    file.mkdir()
    assert f"{file}: is no file" in refusal(store.verify)
