"""Stores that exllamav3's compare_q left behind, in each of its layouts, and what is wrong with damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compare_q.backends.common.head import Head
from compare_q.backends.reference.reading import open_reference
from compare_q.backends.reference.store import Reader
from compare_q.backends.reference.upstream import UpstreamReader
from tests.support.stores import LAYOUTS, UPSTREAM, state_store, upstream_store
from tests.support.toy import refusal


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upstreams_logits(tmp_path: Path, layout: str) -> None:
    """The last position predicts a token beyond the window and is left out."""
    store = open_reference(upstream_store(tmp_path, layout))
    assert isinstance(store, UpstreamReader)
    assert (store.contents, store.n_windows, store.head, store.identity) == ("logits", 3, Head(8, "float32"), {})
    for window in (2, 0, 1):
        assert store.window(window).dtype == torch.float32
        assert torch.equal(store.window(window), UPSTREAM[window][0, :4])
    assert store.stored_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors") if file.is_file())
    done: list[int] = []
    store.verify(lambda: done.append(1))
    assert len(done) == 3
    with pytest.raises(TypeError, match="keeps logits, no head"):
        store.weight(0, 8, "cpu")


def test_upstreams_window_files_come_before_the_single_file(tmp_path: Path) -> None:
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
def test_upstreams_missing_window(tmp_path: Path, layout: str) -> None:
    path = upstream_store(tmp_path, layout)
    (gone,) = tmp_path.rglob("row_000001.safetensors")
    gone.unlink()
    store = open_reference(path)
    assert store.n_windows == 2
    assert torch.equal(store.window(0), UPSTREAM[0][0, :4])
    assert refusal(store.window, 1).startswith(f"{gone}: window 1 of the reference cannot be read: ")
    assert refusal(store.verify).startswith(f"{gone}: window 1 ")


@pytest.mark.parametrize("name", ["tensor.2", "lm_head.weight"])
def test_a_single_file_without_a_window_or_with_something_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / "logits.safetensors"
    save_file({name: UPSTREAM[2]}, path)
    assert refusal(open_reference, path).startswith(f"{path}: window 0 of the reference cannot be read: ")


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
