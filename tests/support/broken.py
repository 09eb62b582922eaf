"""Changes that break the toy's NVFP4 checkpoint: one for each fault that the doctor looks for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.transformers_models import changed

LAYER = "model.layers.1"
Q = f"{LAYER}.self_attn.q_proj"
UP = f"{LAYER}.mlp.up_proj"


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change one JSON file of a checkpoint."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return folder


def tensor_of(source: Path, name: str) -> torch.Tensor:
    """Return a tensor of the intact checkpoint."""
    return load_file(source / "model.safetensors")[name]


def unequal_global_scales(source: Path, folder: Path) -> Path:
    # vLLM fuses q, k and v into one matrix, which has one global scale.
    name = f"{Q}.weight_global_scale"
    return changed(source, folder, {}, **{name: 3 * tensor_of(source, name)})


def missing_input_scale(source: Path, folder: Path) -> Path:
    return changed(source, folder, {}, **{f"{UP}.input_global_scale": None})


def half_of_the_scales(source: Path, folder: Path) -> Path:
    name = f"{UP}.weight_scale"
    half = tensor_of(source, name)[:, ::2].contiguous()
    return changed(source, folder, {}, **{name: half})


def reciprocal_scale(source: Path, folder: Path) -> Path:
    # ModelOpt stores the reciprocal of compressed-tensors' global scale.
    name = f"{LAYER}.mlp.down_proj.weight_global_scale"
    return changed(source, folder, {}, **{name: 1 / tensor_of(source, name)})


def kv_scales_of_one(source: Path, folder: Path) -> Path:
    scales = {}
    for number in (0, 1):
        scales[f"model.layers.{number}.self_attn.k_scale"] = torch.ones(1)
        scales[f"model.layers.{number}.self_attn.v_scale"] = torch.ones(1)
    changed(source, folder, {}, **scales)
    scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }

    def quantize_cache(config: dict[str, Any]) -> None:
        config["quantization_config"]["kv_cache_scheme"] = scheme

    return edited(folder, "config.json", quantize_cache)


def another_tokenizer(source: Path, folder: Path) -> Path:
    """Exchange the ids of two tokens, and set another template and end."""
    changed(source, folder, {})

    def exchange_tokens(content: dict[str, Any]) -> None:
        ids = content["model"]["vocab"]
        ids.update(a=ids["b"], b=ids["a"])

    edited(folder, "tokenizer.json", exchange_tokens)
    other = {"chat_template": "{{ messages }}", "eos_token": "a"}
    return edited(folder, "tokenizer_config.json", lambda config: config.update(other))


def missing_tensor(source: Path, folder: Path) -> Path:
    """Remove the norm of one layer, and add the norm of a layer that the config does not have."""
    norm = "input_layernorm.weight"
    tensors = {
        f"{LAYER}.{norm}": None,
        f"model.layers.2.{norm}": torch.ones(64, dtype=torch.bfloat16),
    }
    return changed(source, folder, {}, **tensors)


def quantized_head(source: Path, folder: Path) -> Path:
    weight = tensor_of(source, "lm_head.weight").float()
    # The largest float8_e4m3fn is 448.
    scale = weight.abs().amax(1, keepdim=True) / 448
    tensors = {
        "lm_head.weight": (weight / scale).to(torch.float8_e4m3fn),
        "lm_head.weight_scale": scale,
    }
    changed(source, folder, {}, **tensors)
    group = {
        "targets": ["lm_head"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }

    def described(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"] = []
        config["quantization_config"]["config_groups"]["group_1"] = group

    return edited(folder, "config.json", described)


def stray_file(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    name = f"{Q}.weight_packed"
    # Repositories of Mistral have the weights in a file of this name too.
    save_file({name: tensor_of(source, name)}, folder / "consolidated.safetensors")
    return folder


def other_dtype(source: Path, folder: Path) -> Path:
    weight = tensor_of(source, "lm_head.weight").float()
    return changed(source, folder, {}, **{"lm_head.weight": weight})


FAULTS = {
    unequal_global_scales: ("wrong", f"{LAYER}.self_attn: q_proj, k_proj and v_proj have unequal "),
    missing_input_scale: ("wrong", f"{UP}: no scale of its activations"),
    half_of_the_scales: (
        "wrong",
        f"{UP}.weight_scale: 2 groups of 32, and the config says groups of 16",
    ),
    reciprocal_scale: ("wrong", f"{LAYER}.mlp.down_proj.weight_global_scale: a scale of "),
    kv_scales_of_one: (
        "warning",
        "model.layers.0.self_attn.k_scale: every scale of the fp8 KV cache is 1.0",
    ),
    another_tokenizer: ("wrong", "tokenizer.json: token "),
    missing_tensor: ("wrong", f"{LAYER}.input_layernorm.weight: missing"),
    quantized_head: ("warning", "lm_head: the head is quantized (fp8 channel)"),
    stray_file: (
        "warning",
        "consolidated.safetensors: holds 1 tensors, 1 of them also in the model's files: an",
    ),
    other_dtype: ("warning", "lm_head: stored in float32, and the config says bfloat16"),
}
"""Change of a checkpoint -> (severity, start of the message) that the doctor must report."""
