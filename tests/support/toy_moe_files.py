"""A toy mixture of experts (Qwen3-MoE) in FP8 blocks, as DeepSeek stores them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.shapes import write_tokenizer

Tensors = dict[str, torch.Tensor]


def toy_mixture(folder: Path, *, experts: int, chosen: int) -> tuple[Tensors, list[str]]:
    """Save a bf16 model; return its tensors and the names of the weights that formats quantize."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=128, intermediate_size=128,
        vocab_size=512, max_position_embeddings=4096, norm_topk_prob=True, bos_token_id=256, eos_token_id=256,
        initializer_range=1.28 / math.sqrt(128), dtype="bfloat16",
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    for layer in model.model.layers:  # experts that are nearly equal would be chosen by roundings
        layer.mlp.gate.weight.data.normal_(0, 4 / math.sqrt(128))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    return tensors, [name for name in tensors if "_proj." in name]


def write(folder: Path, tensors: Tensors, like: Path, **config: Any) -> Path:
    """A checkpoint with these tensors, and the config and tokenizer of another one."""
    folder.mkdir()
    write_tokenizer(folder)
    found = json.loads((like / "config.json").read_text(encoding="utf-8")) | config
    (folder / "config.json").write_text(json.dumps(found), encoding="utf-8")
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def fp8_blocks(out: Path) -> Path:
    """Weights in FP8, ``weight_scale_inv`` float32 [out / 128, in / 128]; two experts."""
    tensors, names = toy_mixture(out / "bf16", experts=2, chosen=1)
    for name in names:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().reshape(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).flatten(0, 1).flatten(1)
        tensors[f"{name}_scale_inv"] = scale
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    ignored = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    return write(
        out / "fp8-block", tensors, out / "bf16", quantization_config={**config, "modules_to_not_convert": ignored}
    )
