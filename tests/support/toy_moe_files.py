"""Checkpoints of a toy mixture of experts: random weights of a small Qwen3-MoE in the published layouts.

compressed-tensors (NVFP4, MXFP4) by its own library; ModelOpt's NVFP4 has the same bytes under other names, its global
scales inverted, and FP8 scales of the KV cache; DeepSeek's FP8 has a float32 scale for 128 x 128 weights.  Attention
and experts are quantized, routers and head are not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import save_file

from benchmarks.shapes import LOGITS_STD, quantized, write_tokenizer

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_MAX, FP4_MAX = 448.0, 6.0
INPUT_PEAK = 16.0
"""Largest input that the global scales expect.  Inputs of attention and experts are normed, those of o_proj and
down_proj smaller; a scale of a group keeps its 3 bits down to 2^-6 of the largest."""
KV_PEAK = 32.0
"""Largest key or value that ModelOpt's scales of the KV cache expect."""
FORMATS = {
    "nvfp4": ("nvfp4-w4a16", "nvfp4-w4a4", "nvfp4-modelopt-kv8"),
    "mxfp4": ("mxfp4-w4a16", "mxfp4-w4a4"),
    "fp8-block": ("fp8-block",),
}
"""Weights -> checkpoints that have these very weights."""
ALL = tuple(name for names in FORMATS.values() for name in names)
PRESETS = {"nvfp4-w4a16": "NVFP4A16", "nvfp4-w4a4": "NVFP4", "mxfp4-w4a16": "MXFP4A16", "mxfp4-w4a4": "MXFP4"}
CT_FORMATS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}


@dataclass(frozen=True)
class MoeShape:
    """Sizes of the model; every one is a multiple of what the kernels of vLLM want."""

    hidden: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    chosen: int = 2
    intermediate: int = 256
    vocabulary: int = 512

    def config(self) -> dict[str, Any]:
        """Keys of config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "head_dim": self.head_dim,
            "num_key_value_heads": self.kv_heads, "num_experts": self.experts, "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.intermediate, "intermediate_size": self.intermediate, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "max_position_embeddings": 4096,
            "vocab_size": self.vocabulary, "tie_word_embeddings": False, "attention_bias": False,
            "bos_token_id": 256, "eos_token_id": 256, "dtype": "bfloat16",
        }  # fmt: skip

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Module path -> (rows, columns) of all matrices that are quantized."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, int]] = {}
        for number in range(self.layers):
            prefix = f"model.layers.{number}"
            rows = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
            found |= {f"{prefix}.self_attn.{name}": (count, self.hidden) for name, count in rows.items()}
            found[f"{prefix}.self_attn.o_proj"] = (self.hidden, wide)
            for expert in range(self.experts):
                path = f"{prefix}.mlp.experts.{expert}"
                found |= {f"{path}.{name}": (self.intermediate, self.hidden) for name in ("gate_proj", "up_proj")}
                found[f"{path}.down_proj"] = (self.hidden, self.intermediate)
        return found

    def routers(self) -> list[str]:
        """Module paths of the routers."""
        return [f"model.layers.{number}.mlp.gate" for number in range(self.layers)]


SHAPE = MoeShape()
Tensors = dict[str, torch.Tensor]


def plain_tensors(shape: MoeShape, generator: torch.Generator) -> Tensors:
    """Embedding, norms, routers and head, bf16."""

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).bfloat16()

    found = {
        "model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden, 1.0),
        "lm_head.weight": normal(shape.vocabulary, shape.hidden, LOGITS_STD / math.sqrt(shape.hidden)),
    }
    # Routers of a wide spread: two experts that are nearly equal would be chosen by the roundings.
    found |= {f"{name}.weight": normal(shape.experts, shape.hidden, 4 / math.sqrt(shape.hidden))
              for name in shape.routers()}  # fmt: skip
    norms = {"model.norm": shape.hidden}
    for number in range(shape.layers):
        prefix = f"model.layers.{number}"
        norms |= {f"{prefix}.{name}": shape.hidden for name in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{prefix}.self_attn.{name}": shape.head_dim for name in ("q_norm", "k_norm")}
    return found | {f"{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Packed FP4 [out, in / 2], uint8, the first of two values in the lower half -> values [out, in], float32."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return FP4[codes & 7] * (1 - 2 * (codes >> 3))


def nvfp4_values(tensors: Tensors, path: str) -> torch.Tensor:
    """Weights [out, in], float32, of an NVFP4 matrix of compressed-tensors."""
    scale = tensors[f"{path}.weight_scale"].float() / tensors[f"{path}.weight_global_scale"].float()
    return fp4_values(tensors[f"{path}.weight_packed"]) * scale.repeat_interleave(16, 1)


def mxfp4_values(tensors: Tensors, path: str) -> torch.Tensor:
    """Weights [out, in], float32, of an MXFP4 matrix, whose scales are powers of two with an offset of 127."""
    scale = torch.exp2(tensors[f"{path}.weight_scale"].float() - 127)
    return fp4_values(tensors[f"{path}.weight_packed"]) * scale.repeat_interleave(32, 1)


def fp8_values(tensors: Tensors, path: str) -> torch.Tensor:
    """Weights [out, in], float32, of an FP8 matrix with a scale a block."""
    scale = tensors[f"{path}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return tensors[f"{path}.weight"].float() * scale


VALUES: dict[str, Callable[[Tensors, str], torch.Tensor]] = {
    "nvfp4": nvfp4_values, "mxfp4": mxfp4_values, "fp8-block": fp8_values,
}  # fmt: skip


def fp8_blocks(weights: Tensors) -> Tensors:
    """DeepSeek's layout: weights in FP8, ``weight_scale_inv`` float32 [out / 128, in / 128]."""
    found: Tensors = {}
    for name, weight in weights.items():
        blocks = weight.float().reshape(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3)) / FP8_MAX
        stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        found |= {name: stored.flatten(0, 1).flatten(1), f"{name}_scale_inv": scale}
    return found


def modelopt(tensors: Tensors, shape: MoeShape) -> Tensors:
    """An NVFP4 checkpoint of compressed-tensors under ModelOpt's names, with scales of an FP8 KV cache."""
    found = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if part.endswith("global_scale"):
            part = {"weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}[part]
            found[f"{path}.{part}"] = (1 / tensor.float()).reshape(())
        else:
            found[f"{path}.{'weight' if part == 'weight_packed' else part}"] = tensor
    for number in range(shape.layers):
        for letter in "kv":
            name = f"model.layers.{number}.self_attn.{letter}_proj.{letter}_scale"
            found[name] = torch.tensor(KV_PEAK / FP8_MAX)
    return found


def quantization_config(name: str, shape: MoeShape) -> dict[str, Any]:
    """The ``quantization_config`` of a format, as its producer writes it."""
    unquantized = ["lm_head", *shape.routers()]
    if name == "fp8-block":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                "modules_to_not_convert": unquantized}  # fmt: skip
    if "modelopt" in name:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": unquantized,
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
                "producer": {"name": "modelopt", "version": "0.33.0"}}  # fmt: skip
    packed = CT_FORMATS[name.partition("-")[0]]
    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"]).model_dump(mode="json", exclude_none=True)
    return {"quant_method": "compressed-tensors", "format": packed, "quantization_status": "compressed",
            "config_groups": {"group_0": scheme | {"format": packed}}, "ignore": unquantized}  # fmt: skip


def stored(name: str, weights: Tensors, shape: MoeShape) -> Tensors:
    """The quantized tensors of a format."""
    if name == "fp8-block":
        return fp8_blocks(weights)
    if "modelopt" in name:
        return modelopt(stored("nvfp4-w4a4", weights, shape), shape)
    found = quantized(weights, preset_name_to_scheme(PRESETS[name], ["Linear"]))
    for path in [path for path in found if path.endswith("input_global_scale")]:
        found[path] = torch.full_like(found[path], FP8_MAX * FP4_MAX / INPUT_PEAK)
    return found


def write(folder: Path, tensors: Tensors, shape: MoeShape, quantization: dict[str, Any], dtype: str) -> None:
    """One checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    config = shape.config() | {"dtype": dtype} | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


def make(out: Path, shape: MoeShape = SHAPE, chosen: Sequence[str] = ALL, seed: int = 0) -> dict[str, Path]:
    """Write the chosen checkpoints, all of the same random weights, and for each kind of weights the dequantized one.

    Name -> folder.  The same seed writes the same bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = plain_tensors(shape, generator)
    weights = {}
    for path, (rows, columns) in shape.matrices().items():
        writes = path.endswith(("o_proj", "down_proj"))
        std = 1.28 / math.sqrt(columns) / (math.sqrt(2 * shape.layers) if writes else 1)
        weights[f"{path}.weight"] = (torch.randn(rows, columns, generator=generator) * std).bfloat16()
    folders = {}
    for kind, names in FORMATS.items():
        for name in [name for name in names if name in chosen]:
            tensors = stored(name, weights, shape)
            folders[name] = out / name
            write(folders[name], plain | tensors, shape, quantization_config(name, shape), "bfloat16")
            if f"{kind}-dequantized" not in folders:
                exact = {f"{path}.weight": VALUES[kind](tensors, path) for path in shape.matrices()}
                floats = {key: tensor.float() for key, tensor in plain.items()}
                folders[f"{kind}-dequantized"] = out / f"{kind}-dequantized"
                write(folders[f"{kind}-dequantized"], floats | exact, shape, {}, "float32")
    return folders
