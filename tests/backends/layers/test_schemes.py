"""The schemes that configs request for each layer, compared with schemes written by hand.

tests/support/downloads.py has configs of real checkpoints.
"""

from __future__ import annotations

from typing import Any

import pytest

from compare_q.backends.layers import schemes
from compare_q.backends.layers.schemes import Scheme, declared


@pytest.mark.parametrize(
    ("config", "kv"),
    [
        ({}, ""),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "quant_method": "modelopt"},
            "fp8 tensor",
        ),
        ({"kv_cache_quant_algo": "nvfp4"}, "nvfp4 g16"),
        # AutoFP8 writes this.
        ({"kv_cache_scheme": "static", "quant_method": "fp8"}, "unknown"),
        ({"export": {"kv_cache_group": []}}, ""),
        ({"export": {"kv_cache_group": ["*k_proj"]}, "layer_quant_config": {}}, "unknown"),
    ],
)
def test_kv_cache(config: dict[str, Any], kv: str) -> None:
    assert schemes.kv_cache(config) == kv


INT8 = Scheme("int8 channel", "int8 channel")
INT4 = Scheme("int4 g128")
FP8 = Scheme("fp8 tensor", "fp8 tensor")
NVFP4 = Scheme("nvfp4 g16", "nvfp4 g16")
LAYER = "model.layers.0"
GROUPS = {
    "W8A8": {
        "targets": ["re:model.layers.*self_attn.*", "lm_head"],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "channel"},
    },
    "W4A16": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 128},
    },
}
MIXED = {
    f"{LAYER}.self_attn.q_proj": {"quant_algo": "FP8"},
    f"{LAYER}.self_attn.k_proj": {"quant_algo": "FP8"},
    f"{LAYER}.self_attn.v_proj": {"quant_algo": "fp8"},
    f"{LAYER}.mlp.gate_proj": {"quant_algo": "NVFP4"},
    f"{LAYER}.mlp.up_proj": {"quant_algo": "FP8"},
    "model.layers.1.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"},
    "model.layers.1.mlp.experts.1.up_proj": {"quant_algo": "NVFP4"},
    "model.layers.2.mlp": {"quant_algo": "NVFP4"},
    "mtp.layers.0.self_attn.q_proj": {"quant_algo": "NVFP4"},
    "lm_head": {"quant_algo": "INT9"},
}


@pytest.mark.parametrize(
    ("layer", "scheme"),
    [
        (f"{LAYER}.self_attn.q_proj", FP8),
        # vLLM has the parts of the name in this order.
        ("language_model.model.layers.0.self_attn.q_proj", FP8),
        # vLLM fuses q, k and v, which have one scheme.
        ("model.language_model.layers.0.self_attn.qkv_proj", FP8),
        # gate is in NVFP4, and up in FP8.
        (f"{LAYER}.mlp.gate_up_proj", None),
        ("model.layers.1.mlp.experts.routed_experts", NVFP4),
        ("model.layers.2.mlp.experts.7.down_proj", NVFP4),
        ("lm_head", None),
    ],
)
def test_layers_of_modelopt(layer: str, scheme: Scheme | None) -> None:
    config = {
        "quant_method": "modelopt_mixed",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": MIXED,
    }
    assert declared(config).of(layer) == scheme


@pytest.mark.parametrize(
    ("layer", "scheme"),
    [
        (f"{LAYER}.mlp.up_proj", INT4),
        (f"{LAYER}.self_attn.qkv_proj", INT8),
        ("language_model.model.layers.0.self_attn.o_proj", INT8),
        ("lm_head", INT8),
    ],
)
def test_layers_of_compressed_tensors(layer: str, scheme: Scheme) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": GROUPS}
    assert declared(config).of(layer) == scheme


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Scheme("int8 channel")),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Scheme("uint4 g64")),
        ({"quant_method": "gptq_marlin", "bits": 4, "group_size": 128}, Scheme("int4 g128")),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Scheme("fp8 tensor", "fp8")),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            Scheme("fp8 tensor", "fp8 tensor"),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 64]},
            Scheme("fp8 block 128x64", "fp8 g64"),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            # The config does not state bitsandbytes' block size, which is 64.
            Scheme("nf4 g64"),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            Scheme("int8 channel", "int8 token"),
        ),
        ({"quant_method": "mxfp4"}, Scheme("mxfp4 g32")),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
            Scheme("fp8 tensor", "fp8 tensor"),
        ),
        ({"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "nvfp4"}}, NVFP4),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
        (
            {
                "quant_method": "intel/auto-round",
                "bits": 4,
                "group_size": 32,
                "data_type": "mx_fp",
                "act_bits": 4,
            },
            None,
        ),
        ({"quant_method": "auto-round", "bits": 16}, None),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 32, "act_bits": None},
            Scheme("int4 g32"),
        ),
        (
            {"quant_method": "inc", "bits": 4, "extra_config": {".*up_proj": {"act_bits": [1]}}},
            None,
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
            Scheme("fp8 block 128x128", "fp8 g128"),
        ),
        ({"quant_method": "fbgemm_fp8"}, Scheme("fp8 channel", "fp8 token")),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp5"}}}, None),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, None),
        ({}, None),
    ],
)
def test_other_methods(config: dict[str, Any], scheme: Scheme | None) -> None:
    assert declared(config).of("model.layers.0.mlp.up_proj") == scheme
