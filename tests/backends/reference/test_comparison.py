"""The reference's logits beside a model's: shards, whose memory the head is in, and stores of other windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compare_q.backends.common.errors import ModelError
from compare_q.backends.common.head import Head, head_logits
from compare_q.backends.reference import comparison
from compare_q.backends.reference.comparison import Comparison, head_key, is_same_weight, load_head
from compare_q.backends.reference.reading import StoredRows, open_reference
from tests.support.stores import UPSTREAM, numbers, store_of, upstream_store

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_shard_is_its_part_of_the_whole_vocabulary(tmp_path: Path, has_bias: bool) -> None:
    weight, bias = numbers(50, 4), numbers(50, seed=1) if has_bias else None
    head = Head(50, "float32", 30.0, 0.5)
    store = store_of(tmp_path / "store", weight, bias, head=head)
    exact = head_logits(head, store.window(1), weight, bias)
    whole = Comparison(store, (0, 50), CPU)
    torch.testing.assert_close(whole.logits([StoredRows(1, 3, 0, 3)]), exact)
    for first, last in ((0, 20), (20, 50), (50, 50)):
        part = Comparison(store, (first, last), CPU)
        torch.testing.assert_close(part.logits([StoredRows(1, 3, 1, 3)]), exact[1:, first:last])
        part.close()
    whole.close()


def test_a_shard_of_stored_logits(tmp_path: Path) -> None:
    """It is cut out of what is stored; there is no head to load."""
    compared = Comparison(open_reference(upstream_store(tmp_path, "folder")), (2, 5), CPU)
    assert compared.head is None
    assert torch.equal(compared.logits([StoredRows(1, 4, 1, 3)]), UPSTREAM[1][0, 1:3, 2:5])
    compared.close()


def test_a_reference_of_other_windows_is_refused(tmp_path: Path) -> None:
    """Upstream's stores say nothing of their windows: a warm-up would shift every position."""
    compared = Comparison(store_of(tmp_path / "store", numbers(50, 4)), (0, 50), CPU)
    assert compared.logits([StoredRows(0, 3, 0, 1)]).shape == (1, 50)
    with pytest.raises(ModelError, match="window 0: the reference has 3 positions, the window 5"):
        compared.logits([StoredRows(0, 5, 0, 1)])
    compared.close()


def test_a_head_is_shared_only_if_it_is_the_same_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "COMPARED_ENTRIES", 7)  # pieces that do not divide the range
    weight = numbers(50, 4).bfloat16()
    store = store_of(tmp_path / "store", weight)
    assert is_same_weight(store, weight, 0, 50)
    assert is_same_weight(store, weight[20:], 20, 50)  # a rank's share
    assert not is_same_weight(store, weight, 20, 50)
    assert not is_same_weight(store, weight.float(), 0, 50)
    for changed in (0, 6, 7, 49):
        other = weight.clone()
        other[changed, 3] += 1
        assert not is_same_weight(store, other, 0, 50)
    assert not is_same_weight(store_of(tmp_path / "bias", weight, torch.zeros(50)), weight, 0, 50)


def test_a_shared_head_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    weight = numbers(50, 4)
    store = store_of(tmp_path / "store", weight)
    shared, copied = load_head(store, (20, 50), CPU, weight[20:]), load_head(store, (20, 50), CPU, weight[:30])
    assert shared.weight.data_ptr() == weight[20:].data_ptr()
    assert (shared.origin, copied.origin) == ("the model's own, bit for bit", "a copy, 0 MiB")
    assert torch.equal(copied.weight, weight[20:])
    assert shared.key == copied.key == head_key(store, (20, 50))
    assert head_key(store, (20, 50)) != head_key(store, (0, 50))


def test_rows_of_several_windows_lie_one_after_the_other(tmp_path: Path) -> None:
    """Also in a buffer that is longer than they are."""
    weight = numbers(50, 4)
    compared = Comparison(store_of(tmp_path / "store", weight, windows=3), (0, 50), CPU)
    parts = [StoredRows(2, 3, 1, 3), StoredRows(0, 3, 2, 3), StoredRows(1, 3, 0, 2)]
    states = torch.cat([compared.windows.get(part.window)[part.begin : part.end] for part in parts])
    assert torch.equal(compared.on_device(parts), states)
    buffer = torch.zeros(7, 4)
    found = compared.on_device(parts, buffer)
    assert torch.equal(found, states)
    assert found.data_ptr() == buffer.data_ptr()
    torch.testing.assert_close(compared.logits(parts), states @ weight.T)
    torch.testing.assert_close(compared.logits(parts, states), states @ weight.T)
    compared.close()
