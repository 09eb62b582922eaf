"""Checkpoints of a shape: their stored tensors, which equal those of quantizing the whole bf16 model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compare_q.backends.checkpoint.folder import storage_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The toy shape in three formats, in shards of at most 700 kB."""
    pytest.importorskip("compressed_tensors", reason="compressed_tensors is not installed")
    from benchmarks import shapes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "SHARD_BYTES", 700_000)
        return shapes.make(tmp_path_factory.mktemp("shapes"), shapes.SHAPES["toy"], ["bf16", "fp8", "w4a16"])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_stored_bits(folders: dict[str, Path]) -> None:
    """FP8 has one bf16 scale per row: per 256 weights of q, k, v, o, gate and up, and per 512 of down."""
    rows, weights = 256 + 128 + 128 + 256 + 512 + 512 + 256, 2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512
    expected = {"bf16": 16.0, "w4a16": 4 + 16 / 128, "fp8": 8 + 16 * rows / weights}
    found = {name: storage_of(folder).bpw_layer for name, folder in folders.items()}
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "preset"), [("fp8", "FP8_DYNAMIC"), ("w4a16", "W4A16")])
def test_the_same_tensors_as_of_the_whole_model(
    folders: dict[str, Path], tmp_path: Path, name: str, preset: str
) -> None:
    from demo.quantize import quantize

    quantize(folders["bf16"], preset, tmp_path / "whole")
    whole, ours = tensors(tmp_path / "whole"), tensors(folders[name])
    assert set(ours) == set(whole)
    for key, tensor in ours.items():
        assert tensor.dtype == whole[key].dtype
        assert torch.equal(tensor.float(), whole[key].float()), key
