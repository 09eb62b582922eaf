"""A toy mixture of experts (Qwen3-MoE) in NVFP4, and the same weights in float32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.shapes import quantized, write_tokenizer

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, torch.Tensor]


def toy_mixture(folder: Path) -> tuple[Tensors, list[str]]:
    """Save a bf16 model; return its tensors and the names of the weights that formats quantize."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, intermediate_size=128,
        vocab_size=512, max_position_embeddings=4096, norm_topk_prob=True, bos_token_id=256, eos_token_id=256,
        initializer_range=1.28 / math.sqrt(128), dtype="bfloat16",
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    for layer in model.model.layers:  # roundings would decide between nearly equal experts
        layer.mlp.gate.weight.data.normal_(0, 4 / math.sqrt(128))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    return tensors, [name for name in tensors if "_proj." in name]


def write(folder: Path, tensors: Tensors, like: Path, **config: Any) -> Path:
    """Write a checkpoint with these tensors, and the config and tokenizer of another one."""
    folder.mkdir()
    write_tokenizer(folder)
    found = json.loads((like / "config.json").read_text(encoding="utf-8")) | config
    (folder / "config.json").write_text(json.dumps(found), encoding="utf-8")
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def nvfp4_weight_only(out: Path) -> tuple[Path, Path]:
    """Write two checkpoints: NVFP4 of compressed-tensors with unquantized activations, the same weights in float32."""
    tensors, names = toy_mixture(out / "bf16")
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    packed = quantized({name: tensors.pop(name) for name in names}, scheme)
    exact = {}
    for name in names:
        codes = torch.stack((packed[f"{name}_packed"] & 15, packed[f"{name}_packed"] >> 4), -1).flatten(-2).long()
        scale = packed[f"{name}_scale"].float() / packed[f"{name}_global_scale"].float()
        exact[name] = FP4[codes & 7] * (1 - 2 * (codes >> 3)) * scale.repeat_interleave(16, 1)
    kind = "nvfp4-pack-quantized"
    group = scheme.model_dump(mode="json", exclude_none=True) | {"format": kind}
    config = {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }  # fmt: skip
    floats = {name: each.float() for name, each in tensors.items()}
    return (
        write(out / "nvfp4", tensors | packed, out / "bf16", quantization_config=config),
        write(out / "dequantized", floats | exact, out / "bf16", dtype="float32"),
    )
