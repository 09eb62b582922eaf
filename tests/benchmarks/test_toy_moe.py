"""The toy mixture's files: sizes and schemes as in published layouts, values as compressed_tensors reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

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
