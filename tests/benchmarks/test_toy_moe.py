"""The toy mixture's files: sizes and schemes as in published layouts, values as compressed_tensors reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compare_q.backends.checkpoint import stored_bits
from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.layers.schemes import Scheme, declared

pytestmark = pytest.mark.engine
NVFP4, MXFP4 = "nvfp4 g16", "mxfp4 g32"
SCALE = 32 / 128**2
"""Bits a weight of the one scale that a matrix of 128 x 128 has."""
FORMATS = {
    "nvfp4-w4a16": (4.5 + SCALE, Scheme(NVFP4), ""),
    "nvfp4-w4a4": (4.5 + SCALE, Scheme(NVFP4, NVFP4), ""),
    "nvfp4-modelopt-kv8": (4.5 + SCALE, Scheme(NVFP4, NVFP4), "fp8 tensor"),
    "mxfp4-w4a16": (4.25, Scheme(MXFP4), ""),
    "mxfp4-w4a4": (4.25, Scheme(MXFP4, MXFP4), ""),
    "fp8-block": (8 + SCALE, Scheme("fp8 block 128x128", "fp8 g128"), ""),
}
"""Bits of a quantized weight, scheme, KV cache."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("compressed_tensors", reason="compressed_tensors is not installed")
    from benchmarks.toy_moe_files import MoeShape, make

    return make(tmp_path_factory.mktemp("moe"), MoeShape(hidden=128, layers=1, heads=2, experts=2, intermediate=128))


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_files_say(folders: dict[str, Path], name: str) -> None:
    bits, scheme, cache = FORMATS[name]
    config = CheckpointConfig.read(folders[name])
    assert declared(config.quantization).of("model.layers.0.mlp.experts.1.up_proj") == scheme
    assert config.kv_cache == cache
    assert stored_bits.storage_of(folders[name]).bpw_layer == bits


@pytest.mark.parametrize("name", ["nvfp4-w4a16", "mxfp4-w4a16"])
def test_values_are_those_of_compressed_tensors(folders: dict[str, Path], name: str) -> None:
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

    from benchmarks.toy_moe_files import PRESETS

    path = "model.layers.0.mlp.experts.1.down_proj"
    tensors = load_file(folders[name] / "model.safetensors")
    exact = load_file(folders[f"{name.partition('-')[0]}-dequantized"] / "model.safetensors")[f"{path}.weight"]
    layer = torch.nn.Linear(128, 128, bias=False, dtype=torch.float32)
    initialize_module_for_quantization(layer, preset_name_to_scheme(PRESETS[name], ["Linear"]))
    del layer.weight
    for key, tensor in tensors.items():
        if key.startswith(f"{path}."):
            setattr(layer, key.rpartition(".")[2], torch.nn.Parameter(tensor, requires_grad=False))
    decompress_module(layer)
    torch.testing.assert_close(layer.weight.data.float(), exact, rtol=2**-8, atol=0)  # the library's values are bf16


def test_fp8_blocks_lose_what_three_bits_lose(folders: dict[str, Path]) -> None:
    """Half a unit of the last of 3 bits, or for small weights of the smallest step, 2^-9 of a scale."""
    path = "model.layers.0.mlp.experts.1.down_proj.weight"
    exact = load_file(folders["fp8-block-dequantized"] / "model.safetensors")[path]
    other = load_file(folders["mxfp4-dequantized"] / "model.safetensors")[path]
    scale = load_file(folders["fp8-block"] / "model.safetensors")[f"{path}_scale_inv"]
    assert scale.shape == (1, 1)
    assert float(exact.abs().max() / scale) == 448
    assert 0.05 < float((other - exact).norm() / exact.norm()) < 0.2
