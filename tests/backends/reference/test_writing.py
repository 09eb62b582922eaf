"""Files that are written in pieces are those that the library writes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from backends.reference import writing
from tests.support.stores import numbers

CASES = {
    "a window": {"states": numbers(5, 4, dtype=torch.bfloat16)},
    "a head with a bias": {"weight": numbers(50, 4, dtype=torch.float16), "bias": numbers(50, dtype=torch.float16)},
    "two dtypes": {"a": numbers(3, 5, dtype=torch.bfloat16), "b": numbers(2, dtype=torch.float32)},
    "no rows": {"states": torch.zeros(0, 4)},
    "rows that lie apart": {"logits": numbers(6, 8)[::2, 1:4]},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("piece", [1, 50, 1 << 24])
def test_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int) -> None:
    monkeypatch.setattr(writing, "PIECE_BYTES", piece)
    file, tensors = tmp_path / "x.safetensors", CASES[name]
    stored = writing.write(file, tensors)
    data = file.read_bytes()
    assert data == save({key: tensor.contiguous() for key, tensor in tensors.items()})
    assert (stored.bytes, stored.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    class Failing(torch.Tensor):
        def cpu(self, *_: object) -> torch.Tensor:
            raise OSError("no space is left")

    with pytest.raises(OSError, match="no space"):
        writing.write(tmp_path / "x.safetensors", {"states": numbers(3, 4).as_subclass(Failing)})
    assert list(tmp_path.iterdir()) == []
