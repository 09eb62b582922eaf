"""What quantization configs ask for, against texts written by hand; compressed-tensors by its own presets."""

from __future__ import annotations

from typing import Any

import pytest

from backends.layers import schemes
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
    assert (
        schemes.declared_scheme({"quant_method": "compressed-tensors", "config_groups": {"group_0": written}}) == gold
    )


def test_several_config_groups_are_no_one_scheme() -> None:
    int8, int4 = {"num_bits": 8, "strategy": "channel"}, {"num_bits": 4, "strategy": "group", "group_size": 128}
    groups = {"W8A8": {"weights": int8, "input_activations": int8}, "W4A16": {"weights": int4}}
    assert schemes.declared_scheme({"quant_method": "compressed-tensors", "config_groups": groups}) is None


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Scheme("int4 g128")),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Scheme("int8 channel")),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Scheme("uint4 g64")),
        ({"quant_method": "gptq_marlin", "bits": 4, "group_size": 128}, Scheme("int4 g128")),
        ({"quant_method": "awq_marlin", "bits": 4, "group_size": 128}, Scheme("uint4 g128")),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Scheme("fp8 tensor", "fp8")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Scheme("fp8 tensor", "fp8 tensor")),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 64]},
            Scheme("fp8 block 128x64", "fp8 g64"),
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, Scheme("nf4 g64")),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Scheme("int8 channel", "int8 token")),
        ({"quant_method": "mxfp4"}, Scheme("mxfp4 g32")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, Scheme("nvfp4 g16", "nvfp4 g16")),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, Scheme("fp8 tensor", "fp8 tensor")),
        ({"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "nvfp4"}}, Scheme("nvfp4 g16", "nvfp4 g16")),
        ({"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4"}, Scheme("nvfp4 g16")),
        ({"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"}, None),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, None),
        ({"quant_method": "quip"}, None),
        ({"quant_method": "gptq"}, None),
        ({}, None),
    ],
)
def test_other_methods(config: dict[str, Any], scheme: Scheme | None) -> None:
    assert schemes.declared_scheme(config) == scheme
