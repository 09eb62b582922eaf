"""Layouts of downloadable checkpoints, with sizes computed by hand.

They are from the sources of their writers and loaders.  ``docs/formats.md`` shows this table;
``python -m tests.support.format_table`` writes it there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from compare_q.backends.layers.schemes import Scheme
from tests.support.checkpoints import Entries
from tests.support.stored_formats import AWQ, gptq

VLLM = "vLLM 0.32"
FP8_SCHEME = Scheme("fp8 tensor", "fp8 tensor")
NVFP4_SCHEME = Scheme("nvfp4 g16", "nvfp4 g16")
MXFP8_SCHEME = Scheme("mxfp8 g32", "mxfp8 g32")


@dataclass(frozen=True)
class Download:
    """A model of one to three quantized layers.

    Attributes:
        source: where the layout is stated.
        layers: name -> its tensors.
        worked: calculation of bits per weight of each layer.
        bits: sum over the layers, as is ``weights``.
        schemes: one per layer.
        kv: format of cached keys and values.
        config: keys other than the quantization.
        place: file that contains the quantization.
        values: tensors that are not zeros.
    """

    source: str
    layers: dict[str, Entries]
    worked: str
    bits: int
    weights: int
    schemes: tuple[Scheme | None, ...]
    quantization: dict[str, Any]
    kv: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    place: str = "config.json"
    values: dict[str, bytes] = field(default_factory=dict)


LAYER = "model.layers.0"
LANGUAGE = "model.language_model.layers.0"
# The ``weight_shape`` of an 8 x 64 matrix in compressed-tensors.
PAIR = struct.pack("<2q", 8, 64)
# 16 x 32 weights, two in a byte, with one scale for every 16.
NVFP4_PARTS: Entries = {
    "weight": ("U8", 16, 16),
    "weight_scale": ("F8_E4M3", 16, 2),
    "weight_scale_2": ("F32",),
    # A scale of activations does not count: it is not a part of the weights.
    "input_scale": ("F32",),
}
FP8_PARTS: Entries = {
    "weight": ("F8_E4M3", 8, 32),
    "weight_scale": ("F32",),
    "input_scale": ("F32",),
}
# 8 x 64 weights, with one power of two in 8 bits for every 32.
MX_PARTS: Entries = {"weight": ("F8_E4M3", 8, 64), "weight_scale": ("U8", 8, 2)}
# The same matrix, with two weights in a byte.
MXFP4_PARTS: Entries = {"weight": ("U8", 8, 32), "weight_scale": ("U8", 8, 2)}
# 64 x 64 weights, eight in a word, in two groups of 32.
GPTQ = gptq(8, 64, (2, 8), 64)
KV8 = {"dynamic": False, "num_bits": 8, "type": "float"}
QUARK_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8_ARGS = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
TORCHAO = "torchao `flatten_tensor_state_dict`"

DOWNLOADS = {
    "ModelOpt MIXED_PRECISION (Qwen3.6)": Download(
        f"{VLLM} `ModelOptMixedPrecisionConfig`",
        {
            f"{LANGUAGE}.mlp.gate_proj": NVFP4_PARTS,
            f"{LANGUAGE}.self_attn.k_proj": {**FP8_PARTS, "k_scale": ("F32",)},
            f"{LANGUAGE}.mlp.experts.0.up_proj": NVFP4_PARTS,
        },
        "2 × (512 × 4 + 32 × 8 + 32) / 512, (256 × 8 + 32) / 256",
        2 * 2336 + 2080,
        2 * 512 + 256,
        (NVFP4_SCHEME, FP8_SCHEME, NVFP4_SCHEME),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_scheme": KV8,
            "quantized_layers": {
                f"{LANGUAGE}.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
                f"{LANGUAGE}.self_attn.k_proj": {"quant_algo": "FP8"},
                f"{LANGUAGE}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
        "fp8 tensor",
    ),
    "ModelOpt MIXED_PRECISION (Nemotron)": Download(
        f"{VLLM} `ModelOptMixedPrecisionConfig`, hf_quant_config.json",
        {
            "backbone.layers.1.mixer.experts.3.down_proj": {**NVFP4_PARTS},
            "backbone.layers.0.mixer.in_proj": FP8_PARTS,
        },
        "(512 × 4 + 32 × 8 + 32) / 512, (256 × 8 + 32) / 256",
        2336 + 2080,
        512 + 256,
        (Scheme("nvfp4 g16"), FP8_SCHEME),
        {
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": "FP8",
                "quantized_layers": {
                    "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
                    "backbone.layers.1.mixer.experts.3.down_proj": {
                        "quant_algo": "W4A16_NVFP4",
                        "group_size": 16,
                    },
                },
            }
        },
        "fp8 tensor",
        place="hf_quant_config.json",
    ),
    "ModelOpt MXFP8": Download(
        f"{VLLM} `KMxfp8Static`",
        {f"{LAYER}.mlp.up_proj": MX_PARTS},
        "(512 × 8 + 16 × 8) / 512",
        4224,
        512,
        (MXFP8_SCHEME,),
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    ),
    "`quant_method: mxfp8` (MiniMax)": Download(
        f"{VLLM} `ModelOptMxFp8Config`",
        {f"{LAYER}.mlp.up_proj": {"weight": ("F8_E4M3", 8, 64), "weight_scale_inv": ("U8", 8, 2)}},
        "(512 × 8 + 16 × 8) / 512",
        4224,
        512,
        (MXFP8_SCHEME,),
        {"quant_method": "mxfp8", "ignored_layers": ["lm_head"], "kv_cache_quant_algo": None},
    ),
    "ModelOpt FP8_PB_WO": Download(
        f"{VLLM} `KFp8Block128`; ModelOpt `FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG`",
        {
            f"{LAYER}.mlp.up_proj": {
                "weight": ("F8_E4M3", 256, 128),
                "weight_scale": ("F32", 2, 1, 1, 1),
            }
        },
        "(32,768 × 8 + 2 × 32) / 32,768",
        262208,
        32768,
        (Scheme("fp8 block 128x128"),),
        {
            "quant_method": "modelopt",
            "quantization": {"quant_algo": "fp8_pb_wo", "kv_cache_quant_algo": "NVFP4"},
        },
        "nvfp4 g16",
    ),
    "Quark MXFP4, FP8 by layer": Download(
        f"{VLLM} `QuarkConfig`, `QuarkOCP_MX`",
        {f"{LAYER}.mlp.experts.0.up_proj": MXFP4_PARTS, f"{LAYER}.self_attn.q_proj": FP8_PARTS},
        "(512 × 4 + 16 × 8) / 512, (256 × 8 + 32) / 256",
        2176 + 2080,
        512 + 256,
        (None, None),
        {
            "quant_method": "quark",
            "export": {"kv_cache_group": ["*k_proj"], "pack_method": "reorder"},
            "global_quant_config": {
                "weight": QUARK_FP4,
                "input_tensors": {**QUARK_FP4, "is_dynamic": True},
            },
            "layer_type_quant_config": {},
            "layer_quant_config": {
                "*k_proj": {"output_tensors": QUARK_FP8},
                "*self_attn*": {"weight": QUARK_FP8, "input_tensors": QUARK_FP8},
            },
        },
        "unknown",
    ),
    "Quark MXFP6": Download(
        f"{VLLM} `QuarkOCP_MX`",
        {f"{LAYER}.mlp.up_proj": {"weight": ("U8", 8, 48), "weight_scale": ("U8", 8, 2)}},
        "(512 × 6 + 16 × 8) / 512",
        3200,
        512,
        (None,),
        {
            "quant_method": "quark",
            "export": {"kv_cache_group": []},
            "layer_quant_config": {},
            "global_quant_config": {
                "weight": {**QUARK_FP4, "dtype": "fp6_e3m2"},
                "input_tensors": {**QUARK_FP4, "dtype": "fp6_e3m2", "is_dynamic": True},
            },
        },
    ),
    "Quark int4": Download(
        f"{VLLM} `QuarkW4A16Int4`",
        {f"{LAYER}.mlp.up_proj": {"weight": ("I32", 64, 8), "weight_scale": ("BF16", 2, 64)}},
        "(4,096 × 4 + 128 × 16) / 4,096",
        18432,
        4096,
        (None,),
        {
            "quant_method": "quark",
            "export": {"kv_cache_group": []},
            "layer_quant_config": {},
            "global_quant_config": {
                "weight": {
                    "dtype": "int4",
                    "qscheme": "per_group",
                    "group_size": 32,
                    "symmetric": True,
                },
                "input_tensors": None,
            },
        },
    ),
    "DeepSeek-V4": Download(
        f"{VLLM} `DeepseekV4FP8Config`",
        {
            "layers.0.ffn.experts.0.w1": {"weight": ("I8", 8, 32), "scale": ("F8_E8M0", 8, 2)},
            "layers.0.attn.wq_a": {"weight": ("F8_E4M3", 256, 128), "scale": ("F8_E8M0", 2, 1)},
        },
        "(512 × 4 + 16 × 8) / 512, (32,768 × 8 + 2 × 8) / 32,768",
        2176 + 262160,
        512 + 32768,
        (Scheme("mxfp4 g32", "fp8 g128 e8m0"), Scheme("fp8 block 128x128", "fp8 g128 e8m0")),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        config={"model_type": "deepseek_v4", "expert_dtype": "fp4", "num_hidden_layers": 1},
    ),
    "auto-round, GPTQ packing": Download(
        f"{VLLM} `INCConfigParser`",
        {
            f"{LAYER}.mlp.up_proj": GPTQ,
            f"{LAYER}.mlp.down_proj": {
                "qweight": ("I32", 16, 64),
                "qzeros": ("I32", 2, 16),
                "scales": ("F16", 2, 64),
            },
        },
        "(4,096 × 4 + 16 × 32 + 128 × 16 + 64 × 32) / 4,096, "
        "(4,096 × 8 + 32 × 32 + 128 × 16) / 4,096",
        20992 + 35840,
        2 * 4096,
        (Scheme("int4 g32"), Scheme("int8 g32")),
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {f"{LAYER}.mlp.down_proj": {"bits": 8}},
        },
    ),
    "inc, AWQ packing": Download(
        f"{VLLM} `INCConfigParser`",
        {f"{LAYER}.mlp.up_proj": AWQ},
        "(4,096 × 4 + 16 × 32 + 128 × 16) / 4,096",
        18944,
        4096,
        (Scheme("uint4 g32"),),
        {
            "quant_method": "inc",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "packing_format": "auto_round:auto_awq",
        },
    ),
    "GPTQ v2, 8 bits in some layers": Download(
        "GPTQModel's `checkpoint_format` and `dynamic`",
        {f"{LAYER}.mlp.up_proj": GPTQ, f"{LAYER}.self_attn.v_proj": gptq(16, 64, (2, 16), 64)},
        "(4,096 × 4 + 16 × 32 + 128 × 16 + 64 × 32) / 4,096, "
        "(4,096 × 8 + 32 × 32 + 128 × 16 + 64 × 32) / 4,096",
        20992 + 37888,
        2 * 4096,
        (Scheme("int4 g32"), Scheme("int8 g32")),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "checkpoint_format": "gptq_v2",
            "dynamic": {r"+:.*v_proj": {"bits": 8}},
        },
    ),
    "torchao int4": Download(
        f"{TORCHAO}, `Int4Tensor`",
        {
            f"{LAYER}.mlp.up_proj": {
                "_weight_qdata": ("I8", 8, 32),
                "_weight_scale": ("BF16", 2, 8),
                "_weight_zero_point": ("BF16", 2, 8),
            }
        },
        "(512 × 4 + 2 × 16 × 16) / 512",
        2560,
        512,
        (None,),
        {
            "quant_method": "torchao",
            "quant_type": {
                "default": {
                    "_type": "Int4WeightOnlyConfig",
                    "_version": 2,
                    "_data": {"group_size": 32},
                }
            },
        },
    ),
    "torchao float8": Download(
        f"{TORCHAO}, `Float8Tensor`",
        {
            f"{LAYER}.mlp.up_proj": {
                "_weight_qdata": ("F8_E4M3", 8, 32),
                "_weight_scale": ("F32", 8, 1),
            }
        },
        "(256 × 8 + 8 × 32) / 256",
        2304,
        256,
        (None,),
        {
            "quant_method": "torchao",
            "quant_type": {
                "default": {
                    "_type": "Float8DynamicActivationFloat8WeightConfig",
                    "_version": 2,
                    "_data": {
                        "granularity": [{"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}]
                        * 2
                    },
                }
            },
        },
    ),
    "compressed-tensors, mixed groups": Download(
        "compressed-tensors 0.17 `QuantizationConfig`",
        {
            f"{LAYER}.mlp.down_proj": {
                "weight_packed": ("I32", 8, 8),
                "weight_scale": ("BF16", 8, 2),
                "weight_shape": ("I64", 2),
            },
            f"{LAYER}.self_attn.q_proj": {
                "weight": ("F8_E4M3", 8, 32),
                "weight_scale": ("BF16", 8, 1),
            },
        },
        "(512 × 4 + 16 × 16) / 512, (256 × 8 + 8 × 16) / 256",
        2304 + 2176,
        512 + 256,
        (Scheme("int4 g32"), Scheme("fp8 channel", "fp8 token")),
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "kv_cache_scheme": {**KV8, "strategy": "attn_head"},
            "config_groups": {
                "group_0": {"targets": ["re:.*mlp.*"], "weights": INT4, "format": "pack-quantized"},
                "group_1": {
                    "targets": ["Linear"],
                    "weights": FP8_ARGS,
                    "input_activations": FP8_TOKEN,
                },
            },
        },
        "fp8 attn_head",
        values={f"{LAYER}.mlp.down_proj.weight_shape": PAIR},
    ),
    "GPTQ, nested in `text_config`": Download(
        "Transformers 5.19, whose multimodal configs hold one of the language model",
        {f"{LANGUAGE}.mlp.up_proj": GPTQ},
        "(4,096 × 4 + 16 × 32 + 128 × 16 + 64 × 32) / 4,096",
        20992,
        4096,
        (Scheme("int4 g32"),),
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        place="text_config",
    ),
}
