"""Round-to-nearest checkpoints in compressed-tensors format, written with the ``compressed_tensors`` library.

No calibration, no error compensation: the plainest quantization there is, so that the demo's numbers are easy to
reproduce and plausibly worse than bf16.  Real quantizers (llm-compressor, AutoRound, ...) do better.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM

FP8_MAX, FP4_MAX = 448.0, 6.0
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that serving engines fuse into one matrix, so that a format's *global* scale must be shared by them."""


def fused_with(name: str) -> list[str]:
    """Names of the layers that are fused with layer ``name``, itself included."""
    parent, _, leaf = name.rpartition(".")
    for group in FUSED:
        if leaf in group:
            return [f"{parent}.{member}" for member in group]
    return [name]


def share_global_scale(layers: dict[str, Any], name: str) -> torch.Tensor:
    """Set the layer's ``weight_global_scale`` to the one that all layers fused with it can use, and return it.

    Engines keep one global scale for a fused matrix: vLLM takes the largest and warns, and a checkpoint with unequal
    ones scored PPL 16,584 in place of 20.6.
    """
    peak = max(layers[member].weight.abs().max().float() for member in fused_with(name))
    scale: torch.Tensor = layers[name].weight_global_scale.data
    return scale.fill_(FP8_MAX * FP4_MAX / peak).float()


def round_to_nearest(layer: Any, args: QuantizationArgs, global_scale: torch.Tensor | None) -> None:
    """Set ``weight_scale`` and ``weight_zero_point`` of one layer from the extremes of its weights.

    ``layer.weight`` is [out, in]; scales are [out, in / group_size], or [out, 1] per channel.
    """
    weight = layer.weight.data.float()
    if args.group_size:
        if weight.shape[1] % args.group_size:
            raise ValueError(f"{weight.shape[1]} input features do not divide into groups of {args.group_size}")
        groups = weight.reshape(weight.shape[0], -1, args.group_size)
        low, high = groups.amin(-1), groups.amax(-1)
    else:
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale, zero_point = calculate_qparams(low, high, args, global_scale=global_scale)
    layer.weight_scale.data = scale.to(layer.weight_scale.dtype)
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data = zero_point.to(layer.weight_zero_point.dtype)


def quantize(source: Path, preset: str, out: Path, *, group_size: int | None = None) -> None:
    """Quantize every linear layer of ``source`` but the head, and write the checkpoint to ``out``.

    ``preset`` is a scheme name of compressed-tensors that needs no calibration (``W4A16``, ``W8A8``, ``NVFP4A16``,
    ...); ``group_size`` replaces the preset's where it has one.
    """
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group_size and scheme.weights.group_size:
        scheme.weights.group_size = group_size
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.CALIBRATION,
    )
    apply_quantization_config(model, config)
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "quantization_scheme")}
    for name, layer in layers.items():
        global_scale = share_global_scale(layers, name) if hasattr(layer, "weight_global_scale") else None
        round_to_nearest(layer, layer.quantization_scheme.weights, global_scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    for file in source.glob("*token*"):
        shutil.copy(file, out)
