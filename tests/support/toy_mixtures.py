"""Toy mixtures of experts in bfloat16, and in the formats of compressed-tensors and DeepSeek."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.toy import save_llama

Tensors = dict[str, torch.Tensor]
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 32


def save_mixture(folder: Path, family: str = "Qwen3Moe") -> Path:
    """Save a bf16 mixture with two layers of four experts, two of which see a token."""
    if family == "Mixtral":
        sizes = {"num_local_experts": 4}
    else:
        sizes = {"num_experts": 4, "moe_intermediate_size": 64}
    return save_llama(folder, family, head_dim=32, num_experts_per_tok=2, **sizes)


def is_expert(name: str) -> bool:
    """True for the weight matrix of an expert."""
    return ".experts." in name and name.endswith(".weight")


def integers(
    weight: torch.Tensor, bits: int, *, symmetric: bool = True
) -> tuple[Tensors, torch.Tensor]:
    """Quantize a matrix in groups of 32.

    Return its parts in compressed-tensors' format, and its values in float32.
    """
    blocks = weight.float().unflatten(1, (-1, GROUP))
    half = 2 ** (bits - 1)
    if symmetric:
        zero = torch.zeros(blocks.shape[:2])
        # As in compressed-tensors, 2 * half - 1 steps cover twice the largest absolute value.
        scale = (blocks.abs().amax(-1) / (half - 0.5)).bfloat16()
    else:
        # Zero must be representable.
        low = blocks.amin(-1).clamp(max=0)
        high = blocks.amax(-1).clamp(min=0)
        scale = ((high - low) / (2 * half - 1)).bfloat16()
        zero = (-half - low / scale.float()).round().clamp(-half, half - 1)
    grid = scale.float()[..., None]
    codes = (blocks / grid + zero[..., None]).round().clamp(-half, half - 1)
    exact = ((codes - zero[..., None]) * grid).flatten(1)
    parts = {
        "weight_packed": packed(codes.flatten(1), bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        # Zero points are packed along the outputs.
        parts["weight_zero_point"] = packed(zero.T, bits).T.contiguous()
    return parts, exact


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack signed integers [rows, columns] into 32-bit words, the first one in the lowest bits."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    unsigned = (codes.long() + 2 ** (bits - 1)).unflatten(1, (-1, per_word))
    words = (unsigned << (torch.arange(per_word) * bits)).sum(-1)
    # Words from 2^31 on are negative numbers of int32.
    return torch.where(words >= 2**31, words - 2**32, words).int()


def nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantize a matrix to NVFP4.

    Return its parts in compressed-tensors' format, and its values in float32.
    """
    blocks = weight.float().unflatten(1, (-1, 16))
    # The largest group gets the largest scale in E4M3, 448; the largest E2M1 value is 6.
    global_scale = 448 * 6 / weight.float().abs().max()
    scale = (blocks.abs().amax(-1) / 6 * global_scale).to(torch.float8_e4m3fn)
    grid = (scale.float() / global_scale)[..., None]
    # 0 / 0 in a group of zeros.
    scaled = (blocks / grid).nan_to_num(0.0)
    codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    exact = (FP4[codes] * scaled.sign() * grid).flatten(1)
    # Four bits are a sign and a code; the first of two weights is in the low bits of a byte.
    nibbles = (codes + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    bytes_of_two = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
    parts = {
        "weight_packed": bytes_of_two,
        "weight_scale": scale,
        "weight_global_scale": global_scale.reshape(1),
    }
    return parts, exact


def fp8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantize a matrix to FP8 with a scale for each row."""
    # The largest float8_e4m3fn is 448.
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantize a matrix to FP8 in blocks of 32 x 32, with DeepSeek's name of the scales."""
    # DeepSeek's blocks are 128 x 128, but the toy's experts are only 64 wide.
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    exact = codes.float() * scale[:, None, :, None]
    parts = {"weight": codes.reshape(rows, columns), "weight_scale_inv": scale}
    return parts, exact.reshape(rows, columns)


Quantizer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def group(targets: list[str], bits: int, kind: str = "int", **keys: Any) -> dict[str, Any]:
    """One of compressed-tensors' config groups."""
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "group",
        "group_size": {"int": GROUP, "float": 16}[kind],
    }
    return {"targets": targets, "weights": weights | keys}


def compressed(kind: str, *groups: dict[str, Any]) -> dict[str, Any]:
    """Return compressed-tensors' ``quantization_config`` for the experts alone."""
    config_groups = {}
    for number, config_group in enumerate(groups):
        config_groups[f"group_{number}"] = {**config_group, "format": kind}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        # ``gate`` is the router; the pattern does not match an expert's ``gate_proj``.
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*gate$"],
        "config_groups": config_groups,
    }


def save_quantized(
    source: Path,
    folder: Path,
    quantizer_of: Callable[[str], Quantizer],
    quantization: dict[str, Any],
) -> tuple[Path, Path]:
    """Write a mixture twice: with quantized experts, and with the same experts in float32.

    ``quantizer_of``: tensor's name -> the function that quantizes it.
    """
    from safetensors.torch import load_file

    stored = Tensors()
    exact = Tensors()
    for name, tensor in load_file(source / "model.safetensors").items():
        if not is_expert(name):
            stored[name] = tensor
            exact[name] = tensor.float()
            continue
        parts, exact[name] = quantizer_of(name)(tensor)
        for part, value in parts.items():
            stored[f"{name.removesuffix('weight')}{part}"] = value
    save_copy(source, folder, stored, {"quantization_config": quantization})
    exact_folder = folder.with_name(f"{folder.name}-exact")
    save_copy(source, exact_folder, exact, {"dtype": "float32"})
    return folder, exact_folder


def save_copy(source: Path, folder: Path, tensors: Tensors, changes: dict[str, Any]) -> None:
    """Copy a model, with other ``tensors`` and with ``changes`` of its config."""
    from safetensors.torch import save_file

    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
