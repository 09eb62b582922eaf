"""The words of schemes, against texts written by hand; compressed-tensors by its own presets."""

from __future__ import annotations

from typing import Any

import pytest

from backends.layers import schemes
from backends.layers.methods import declared
from backends.layers.schemes import Scheme

PRESETS = {
    "W8A8": ("int8 channel", "int8 token"),
    "W4A16": ("int4 g128", ""),
    "W8A16": ("int8 g128", ""),
    "W4A16_ASYM": ("int4 g128", ""),
    "W4A8": ("int4 g128", "int8 token"),
    "W4AFP8": ("int4 g128", "fp8 token"),
    "FP8": ("fp8 tensor", "fp8 tensor"),
    "FP8_DYNAMIC": ("fp8 channel", "fp8 token"),
    "FP8_BLOCK": ("fp8 block 128x128", "fp8 g128"),
    "NVFP4": ("nvfp4 g16", "nvfp4 g16"),
    "NVFP4A16": ("nvfp4 g16", ""),
    "MXFP4": ("mxfp4 g32", "mxfp4 g32"),
    "MXFP4A16": ("mxfp4 g32", ""),
    "MXFP8": ("mxfp8 g32", "mxfp8 g32"),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_of_compressed_tensors(preset: str) -> None:
    """As objects, which vLLM holds, and as the JSON of a checkpoint."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    group = quantization.preset_name_to_scheme(preset, ["Linear"])
    gold = Scheme(*PRESETS[preset])
    assert schemes.compressed_tensors(group.weights, group.input_activations) == gold
    written = group.model_dump(mode="json")
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": written}}
    assert declared(config).of("model.layers.0.mlp.up_proj") == gold


@pytest.mark.parametrize(
    ("config", "kv"),
    [
        ({}, ""),
        ({"kv_cache_scheme": None, "quant_method": "compressed-tensors"}, ""),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8 tensor"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "quant_method": "modelopt"}, "fp8 tensor"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8 tensor"),
        ({"quantization": {"kv_cache_quant_algo": None}}, ""),
        ({"kv_cache_quant_algo": "nvfp4"}, "nvfp4 g16"),
        ({"kv_cache_quant_algo": "FP6"}, "unknown"),
        ({"kv_cache_scheme": "static", "quant_method": "fp8"}, "unknown"),  # AutoFP8's
        ({"export": {"kv_cache_group": []}}, ""),
        ({"export": {"kv_cache_group": ["*k_proj"]}, "layer_quant_config": {}}, "unknown"),
    ],
)
def test_kv_cache(config: dict[str, Any], kv: str) -> None:
    assert schemes.kv_cache(config) == kv


@pytest.mark.parametrize(
    ("spec", "line", "words"),
    [
        (None, "token", ""),
        ({"dtype": "fp8_e4m3", "qscheme": "per_channel"}, "channel", "fp8 channel"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_channel"}, "token", "fp8 token"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}, "token", "mxfp8 g32"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [32, 32], "scale_type": "float8_e8m0fnu"},
         "channel", "mxfp8 block 32x32"),
        ([{"dtype": "fp4", "qscheme": "per_group", "group_size": 16}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}],
         "channel", "nvfp4 g16"),
        ([{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int4", "qscheme": "per_channel"}], "channel",
         "unknown"),
        ({"dtype": "fp4", "qscheme": "per_group", "group_size": 32}, "channel", "unknown"),
        ("fp8", "token", "unknown"),
    ],
)  # fmt: skip
def test_quark(spec: Any, line: str, words: str) -> None:
    assert schemes.quark(spec, line) == words
