"""The reference on disk: what is written comes back, and what is missing or damaged is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backends.common.errors import InputError
from backends.reference import reading
from backends.reference.head import Head, head_logits
from backends.reference.reading import ReferenceWindows, open_reference
from backends.reference.store import MANIFEST, VERSION, Reader, Writer, remove, seal, window_file
from backends.reference.upstream import UpstreamReader
from tests.support.toy import refusal

HEAD = Head(300, "float32")
IDENTITY = {"windows": "abc", "label": "bf16"}
INF, NAN = math.inf, math.nan


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def state_store(folder: Path, rows: int = 2, *, bias: bool = False) -> Reader:
    """A store of states [3, 4] a row, and a head of 300 entries."""
    building = folder.with_name(f"{folder.name}.building")
    building.mkdir()
    writer = Writer(building, "states")
    for row in range(rows):
        writer.window(row, numbers(3, 4, seed=row))
    writer.head(0, numbers(300, 4, seed=100), numbers(300, seed=101) if bias else None)
    writer.close(HEAD)
    seal(building, folder, IDENTITY, rows)
    return Reader(folder)


def flip(file: Path, position: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def edit(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a store's manifest."""
    manifest = json.loads((store / MANIFEST).read_text())
    change(manifest)
    (store / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_states_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    building, folder = tmp_path / "building", tmp_path / "store"
    building.mkdir()
    weight, states = numbers(300, 4, dtype=dtype), [numbers(n, 4, seed=n, dtype=dtype) for n in (3, 5)]
    writer = Writer(building, "states")
    writer.window(1, states[1])  # rows come in the order in which they finish
    writer.window(0, states[0])
    writer.head(0, weight, None)
    head = Head(300, "bfloat16", 30.0, 0.25)
    writer.close(head)
    seal(building, folder, IDENTITY, 2)
    store = Reader(folder)
    assert (store.kind, store.reason, store.head, store.n_windows) == ("states", "", head, 2)
    assert store.identity == IDENTITY
    for row in (0, 1):
        assert store.window(row).dtype == dtype
        assert torch.equal(store.window(row), states[row])
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
    writer.close(Head(3, str(dtype).removeprefix("torch.")))
    seal(building, folder, IDENTITY, 1)
    store = Reader(folder)
    assert (store.kind, store.reason) == ("logits", "its head is a Strange")
    assert store.window(0).dtype == dtype
    assert torch.equal(store.window(0), logits)
    assert "head lacks entries between 0 and 3" in refusal(store.weight, 0, 3, "cpu")


def test_logits_that_are_not_finite_stay_what_they_are(tmp_path: Path) -> None:
    """A masked token or a NaN is the model's own and is counted later."""
    writer = Writer(tmp_path, "logits")
    writer.window(0, torch.tensor([[0.5, -INF, INF, NAN]]))
    writer.close(Head(4, "float32"))
    (tmp_path / "building").mkdir()
    for file in [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.json")]:
        file.rename(tmp_path / "building" / file.name)
    seal(tmp_path / "building", tmp_path / "store", {}, 1)
    *kept, last = Reader(tmp_path / "store").window(0)[0].tolist()
    assert kept == [0.5, -INF, INF]
    assert math.isnan(last)


def piece_by_piece(building: Path, weight: torch.Tensor, bias: Any) -> None:
    """Two writers: one writes row 0 and entries 200 to 300, the other row 1 and entries 0 to 200."""
    building.mkdir()
    for row, first, last in ((0, 200, 300), (1, 0, 200)):
        writer = Writer(building, "states")
        writer.window(row, numbers(3, 4, seed=row))
        writer.head(first, weight[first:last], None if bias is None else bias[first:last])
        writer.close(HEAD)


@pytest.mark.parametrize("has_bias", [True, False])
def test_several_processes_make_one_store(tmp_path: Path, has_bias: bool) -> None:
    weight, bias = numbers(300, 4), numbers(300) if has_bias else None
    piece_by_piece(tmp_path / "building", weight, bias)
    assert len(list((tmp_path / "building").glob("part.*.json"))) == 2
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


def test_logits_from_states_by_hand() -> None:
    """[1, 2] on rows [3, 4], [5, 6], [0, -1]: 11, 17, -2; bias; then 10 tanh(z / 10); then halved."""
    states, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.0, -1.0]])
    bias = torch.tensor([0.5, 0.0, -1.0])
    (plain,) = head_logits(Head(3, "float32"), states, weight, None).tolist()
    assert plain == [11.0, 17.0, -2.0]
    (biased,) = head_logits(Head(3, "float32"), states, weight, bias).tolist()
    assert biased == [11.5, 17.0, -3.0]
    (scaled,) = head_logits(Head(3, "float32", scale=0.5), states, weight, bias).tolist()
    assert scaled == [5.75, 8.5, -1.5]
    gold = [10 * math.tanh(z / 10) for z in (11.5, 17.0, -3.0)]
    (capped,) = head_logits(Head(3, "float32", soft_cap=10.0), states, weight, bias).tolist()
    assert capped == pytest.approx(gold, rel=1e-6)
    (both,) = head_logits(Head(3, "float32", soft_cap=10.0, scale=0.5), states, weight, bias).tolist()
    assert both == pytest.approx([z / 2 for z in gold], rel=1e-6)
    assert states.tolist() == [[1.0, 2.0]]
    assert bias.tolist() == [0.5, 0.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_step_is_rounded_as_models_round_it(dtype: torch.dtype) -> None:
    """Models write out-of-place operations: each result is rounded to the dtype before the next."""
    states, weight = numbers(20, 64, dtype=dtype), numbers(500, 64, seed=1, dtype=dtype)
    bias = numbers(500, seed=2, dtype=dtype)
    product = torch.nn.functional.linear(states, weight, bias)
    capped = torch.tanh(product / 30.0) * 30.0
    assert torch.equal(head_logits(Head(500, "", 30.0, 0.3), states, weight, bias), capped * 0.3)
    assert torch.equal(head_logits(Head(500, "", None, 0.3), states, weight, bias), product * 0.3)
    assert torch.equal(head_logits(Head(500, "", 30.0), states, weight, bias), capped)
    if dtype == torch.bfloat16:  # one rounding at the end would be another number: the order matters here
        assert not torch.equal(capped * 0.3, (torch.tanh(product.float() / 30.0) * 30.0 * 0.3).to(dtype))


def test_a_missing_row_makes_no_store(tmp_path: Path) -> None:
    building = tmp_path / "building"
    building.mkdir()
    with pytest.raises(ValueError, match="window 0 was not kept"):
        seal(building, tmp_path / "store", IDENTITY, 1)
    writer = Writer(building, "states")
    for row in (0, 2):
        writer.window(row, numbers(3, 4))
    with pytest.raises(ValueError, match="window 0 was not kept"):  # the writer has not come to its end
        seal(building, tmp_path / "store", IDENTITY, 3)
    writer.close(HEAD)
    with pytest.raises(ValueError, match="window 1 was not kept"):
        seal(building, tmp_path / "store", IDENTITY, 3)
    assert not (tmp_path / "store").exists()


def test_a_new_store_replaces_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    state_store(folder, rows=5)
    (folder / "stray").write_text("")
    assert state_store(folder, rows=2).n_windows == 2
    own = {"head.000000.safetensors", window_file(0), window_file(1), MANIFEST}
    assert {file.name for file in folder.iterdir()} == {*own, "stray"}  # a user's file stays
    remove(folder)
    assert [file.name for file in folder.iterdir()] == ["stray"]
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


def test_verify_looks_at_every_file(tmp_path: Path) -> None:
    store = state_store(tmp_path / "store", rows=3)
    done: list[int] = []
    store.verify(lambda: done.append(1))
    assert len(done) == 4
    Reader(tmp_path / "store").verify()


@pytest.mark.parametrize("name", [window_file(0), window_file(2), "head.000000.safetensors"])
@pytest.mark.parametrize("position", [0, 40, -1])
def test_verify_finds_a_flipped_bit(tmp_path: Path, name: str, position: int) -> None:
    store = state_store(tmp_path / "store", rows=3)
    flip(store.path / name, position)
    text = refusal(store.verify)
    assert text.startswith(f"{store.path / name}: damaged: its checksum is not that of the store; delete {store.path}")


def test_verify_finds_a_missing_and_a_short_file(tmp_path: Path) -> None:
    store = state_store(tmp_path / "store", rows=3)
    file = store.path / window_file(1)
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file}: damaged" in refusal(store.verify)
    file.unlink()
    assert f"{file}: missing from the reference" in refusal(store.verify)
    file.mkdir()
    assert f"{file}: cannot be read: Is a directory" in refusal(store.verify)


def test_a_manifest_of_another_version(tmp_path: Path) -> None:
    folder = state_store(tmp_path / "store").path
    edit(folder, lambda manifest: manifest.update(version=VERSION + 1))
    text = refusal(Reader, folder)
    assert text.startswith(f"{folder / MANIFEST}: layout {VERSION + 1}, this compare_q reads {VERSION}; ")
    assert refusal(open_reference, folder) == text


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"version": 1}', "\xff\xfe"])
def test_a_manifest_that_is_none(tmp_path: Path, content: str) -> None:
    folder = state_store(tmp_path / "store").path
    (folder / MANIFEST).write_text(content, encoding="latin-1")
    assert refusal(Reader, folder).startswith(f"{folder / MANIFEST}: not a reference store: ")


@pytest.mark.parametrize("key", ["identity", "kind", "reason", "head", "rows", "files"])
def test_a_manifest_that_lacks_a_key(tmp_path: Path, key: str) -> None:
    folder = state_store(tmp_path / "store").path
    edit(folder, lambda manifest: manifest.pop(key))
    assert "not a reference store: " in refusal(Reader, folder)


def test_a_head_with_a_fact_of_a_later_version(tmp_path: Path) -> None:
    folder = state_store(tmp_path / "store").path
    edit(folder, lambda manifest: manifest["head"].update(temperature=2.0))
    assert "not a reference store: " in refusal(Reader, folder)


UPSTREAM = [numbers(1, 5, 8, seed=row) * 4 for row in range(3)]
"""Logits [1, L, V] of three windows."""
LAYOUTS = ["folder", "rows beside the name", "single with one tensor", "single with a tensor a row"]


def upstream_store(folder: Path, layout: str) -> Path:
    """The path that a user would give for a store of UPSTREAM."""
    path = folder / "logits.safetensors"
    if layout == "single with one tensor":
        save_file({"tensor": torch.cat(UPSTREAM)}, path)
    elif layout == "single with a tensor a row":
        save_file({f"tensor.{row}": tensor for row, tensor in enumerate(UPSTREAM)}, path)
    else:
        path = path if layout == "rows beside the name" else folder / "kept"
        rows = path.with_name(f"{path.name}.rows") if layout == "rows beside the name" else path
        rows.mkdir()
        for row, tensor in enumerate(UPSTREAM):
            save_file({"tensor": tensor}, rows / f"row_{row:06d}.safetensors")
        (rows / "row_000003.safetensors.tmp").write_bytes(b"half")  # as an interrupted run leaves it
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upstreams_logits(tmp_path: Path, layout: str) -> None:
    """The last position predicts a token beyond the window and is left out."""
    store = open_reference(upstream_store(tmp_path, layout))
    assert isinstance(store, UpstreamReader)
    assert (store.kind, store.n_windows, store.head, store.identity) == ("logits", 3, Head(8, "float32"), {})
    for row in (2, 0, 1):
        assert store.window(row).dtype == torch.float32
        assert torch.equal(store.window(row), UPSTREAM[row][0, :4])
    assert store.stored_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors") if file.is_file())
    done: list[int] = []
    store.verify(lambda: done.append(1))
    assert len(done) == 3
    with pytest.raises(TypeError, match="keeps logits, no head"):
        store.weight(0, 8, "cpu")


def test_upstreams_row_files_come_before_the_single_file(tmp_path: Path) -> None:
    path = upstream_store(tmp_path, "rows beside the name")
    save_file({"tensor": torch.zeros(9, 5, 8)}, path)
    store = open_reference(path)
    assert store.n_windows == 3
    assert torch.equal(store.window(1), UPSTREAM[1][0, :4])


def test_a_store_of_ours_is_known_by_its_manifest(tmp_path: Path) -> None:
    state_store(tmp_path / "store")
    save_file({"tensor": UPSTREAM[0]}, tmp_path / "store" / "row_000000.safetensors")
    assert isinstance(open_reference(tmp_path / "store"), Reader)


def test_no_store_at_all(tmp_path: Path) -> None:
    (tmp_path / "logits.safetensors.rows").mkdir()
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "logits.safetensors"):
        text = refusal(open_reference, path)
        assert text == f"{path}: holds no reference: neither reference.json nor windows of upstream's compare_q"


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_upstreams_missing_row(tmp_path: Path, layout: str) -> None:
    path = upstream_store(tmp_path, layout)
    (gone,) = tmp_path.rglob("row_000001.safetensors")
    gone.unlink()
    store = open_reference(path)
    assert store.n_windows == 2
    assert torch.equal(store.window(0), UPSTREAM[0][0, :4])
    assert refusal(store.window, 1).startswith(f"{gone}: window 1 of the reference cannot be read: ")
    assert refusal(store.verify).startswith(f"{gone}: window 1 ")


def test_upstreams_single_file_lacks_a_row(tmp_path: Path) -> None:
    path = tmp_path / "logits.safetensors"
    save_file({"tensor.0": UPSTREAM[0], "tensor.2": UPSTREAM[2]}, path)
    store = open_reference(path)
    assert refusal(store.window, 1).startswith(f"{path}: window 1 of the reference cannot be read: ")
    assert refusal(store.verify).startswith(f"{path}: window 1 ")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("content", [b"", b"no safetensors file at all", None])
def test_upstreams_damaged_file(tmp_path: Path, layout: str, content: bytes | None) -> None:
    """Empty, something else, or cut off before its end; the first file is read on opening, any on verifying."""
    path = upstream_store(tmp_path, layout)
    damaged = next(tmp_path.rglob("row_000000.safetensors"), path)
    damaged.write_bytes(damaged.read_bytes()[:-1] if content is None else content)
    assert str(damaged) in refusal(open_reference, path)
    if layout in LAYOUTS[:2]:
        damaged.rename(tmp_path / "away")
        save_file({"tensor": UPSTREAM[0]}, damaged)
        later = damaged.with_name("row_000002.safetensors")
        (tmp_path / "away").rename(later)
        assert str(later) in refusal(open_reference(path).verify)


def test_a_single_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": torch.zeros(2, 2)}, path)
    assert str(path) in refusal(open_reference, path)


class Counting(Reader):
    """A store that remembers which rows were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[int] = []

    def window(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return super().window(index)


def counting(folder: Path, rows: int) -> Counting:
    return Counting(state_store(folder, rows).path)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
@pytest.mark.parametrize("ahead_bytes", [0, 1 << 29])
def test_rows_come_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[int], ahead_bytes: int
) -> None:
    monkeypatch.setattr(reading, "AHEAD_BYTES", ahead_bytes)
    store = counting(tmp_path / "store", 6)
    rows = ReferenceWindows(store, pin=False)
    for row in order:
        assert torch.equal(rows.get(row), numbers(3, 4, seed=row))
    rows.close()
    assert sorted(store.read) == [0, 1, 2, 3, 4, 5]  # each once


def test_rows_are_read_ahead_within_the_memory_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the bytes of 6 rows: 3 rows ahead of the one in use."""
    store = counting(tmp_path / "store", 6)
    monkeypatch.setattr(reading, "AHEAD_BYTES", (store.stored_bytes + 1) // 2)
    rows = ReferenceWindows(store, pin=False)
    assert set(rows.futures) == {0, 1, 2, 3}  # without being asked
    rows.get(0)
    assert set(rows.futures) == {0, 1, 2, 3}
    rows.get(3)
    assert set(rows.futures) == {0, 1, 2, 3, 4, 5}
    rows.close()
    monkeypatch.setattr(reading, "AHEAD_BYTES", 0)  # never less than one
    rows = ReferenceWindows(store, pin=False)
    assert set(rows.futures) == {0, 1}
    rows.close()


def test_a_dropped_row_is_forgotten_and_can_be_read_again(tmp_path: Path) -> None:
    store = counting(tmp_path / "store", 2)
    rows = ReferenceWindows(store, pin=False)
    for row in (0, 1):
        rows.get(row)
        rows.drop(row)
    assert rows.futures == {}
    rows.drop(0)  # twice is nothing
    assert torch.equal(rows.get(0), numbers(3, 4, seed=0))
    rows.close()
    assert store.read.count(0) == 2


def test_closed_rows_stop_reading(tmp_path: Path) -> None:
    store = counting(tmp_path / "store", 60)
    rows = ReferenceWindows(store, pin=False)
    rows.get(0)
    rows.close()
    assert rows.futures == {}
    assert not any(thread.is_alive() for thread in rows.pool._threads)
    with pytest.raises(RuntimeError):
        rows.get(1)


def test_what_goes_wrong_ahead_is_raised_for_its_row(tmp_path: Path) -> None:
    path = upstream_store(tmp_path, "folder")
    store = open_reference(path)
    (path / "row_000001.safetensors").write_bytes(b"damaged")
    rows = ReferenceWindows(store, pin=False)
    assert torch.equal(rows.get(0), UPSTREAM[0][0, :4])
    with pytest.raises(InputError, match=r"row_000001\.safetensors: window 1 of the reference cannot be read"):
        rows.get(1)
    assert torch.equal(rows.get(2), UPSTREAM[2][0, :4])
    rows.close()
