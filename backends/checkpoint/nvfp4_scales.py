"""Find global scales of NVFP4 layers that vLLM would misread.

vLLM fuses layers that share an input into one matrix with one global scale: it takes the largest of
their scales (for experts the scale of ``gate_proj``) and only logs a warning.  A checkpoint with
unequal global scales is refused.  Unequal scales of the activations are accepted: fused layers have
the same input, so all of these ranges are equally good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.errors import InputError
from ..common.message_text import and_more
from ..layers.module_names import fused_layers
from ..layers.schemes import args_text, objects_in, part
from .checkpoint_config import CheckpointConfig
from .folder import Checkpoint
from .formats import NUMPY_TYPES, Parts, main_part, values

GLOBAL_SCALES = {"weight_global_scale": "input_global_scale", "weight_scale_2": "input_scale"}
"""Global scale of weights -> of activations: their names in compressed-tensors and in ModelOpt."""
FUSED_WITH_ONE_SCALE = "vLLM fuses them into one matrix with one scale"
SHARED_SCALE_ADVICE = "quantize with a shared scale"
EQUAL_SCALES = 1e-5
"""Largest relative difference between scales that count as equal, as in vLLM's check of experts.

A shared scale is stored several times as the same number.  Unequal scales come from the largest
weights of two matrices, which differ by at least 4e-3 in bf16.
"""


def nvfp4_layers(folder: Path) -> dict[str, Parts]:
    """Return module path -> parts of a checkpoint's NVFP4 layers; InputError.

    No header is read if the checkpoint is not quantized.
    """
    checkpoint = Checkpoint(folder)
    if not checkpoint.config.quantization:
        return {}
    layers = {}
    for path, parts in checkpoint.modules.items():
        if parts.keys().isdisjoint(GLOBAL_SCALES):
            continue
        main = main_part(parts)
        if main is not None and parts[main].dtype == "U8":
            layers[path] = parts
    return layers


def check_scales(folder: Path, layers: Mapping[str, Parts]) -> None:
    """InputError for the first of these NVFP4 layers whose scales vLLM would misread."""
    without_scale = []
    for path, parts in layers.items():
        if parts.keys().isdisjoint(GLOBAL_SCALES.values()):
            without_scale.append(path)
    if without_scale and quantizes_activations(CheckpointConfig.read(folder).quantization):
        raise InputError(
            f"model_dir: {without_scale[0]}: no input_global_scale for its NVFP4 activations"
            f"{and_more(without_scale)}, and vLLM would take uninitialized memory for it; "
            "calibrate the checkpoint, or quantize it weight-only"
        )
    faults = list(unequal(layers).values())
    if faults:
        raise InputError(
            f"model_dir: {faults[0]}{and_more(faults)}, and {FUSED_WITH_ONE_SCALE}; "
            f"{SHARED_SCALE_ADVICE}"
        )


def quantizes_activations(quantization: Mapping[str, Any]) -> bool:
    """Return True if all groups of NVFP4 weights in a config also have NVFP4 activations.

    Otherwise, a layer without a scale of its activations may be one of a weight-only group.
    """
    has_nvfp4 = False
    for group in objects_in(quantization.get("config_groups")):
        if not args_text(part(group, "weights")).startswith("nvfp4"):
            continue
        has_nvfp4 = True
        if not args_text(part(group, "input_activations")).startswith("nvfp4"):
            return False
    return has_nvfp4


def unequal(layers: Mapping[str, Parts]) -> dict[str, str]:
    """Return the first layer of each fused group with unequal scales -> text with all scales.

    Stacked experts are left out: each has its own scale.
    """
    scales: dict[str, float] = {}
    scale_names: dict[str, str] = {}
    for path, parts in layers.items():
        for name in GLOBAL_SCALES:
            if name not in parts:
                continue
            if parts[name].numel == 1 and parts[name].dtype in NUMPY_TYPES:
                scales[path] = float(values(parts[name]).reshape(-1)[0])
                scale_names[path] = name
    faults: dict[str, str] = {}
    for paths in fused_layers(scales):
        of_group = [scales[path] for path in paths]
        # Negated, so that NaN is unequal.
        if not max(of_group) - min(of_group) <= EQUAL_SCALES * max(of_group):
            faults[paths[0]] = unequal_text(paths, scale_names[paths[0]], of_group)
    return faults


def unequal_text(paths: Sequence[str], scale_name: str, scales: Sequence[float]) -> str:
    """Return ``model.layers.0.mlp: gate_proj and up_proj have unequal weight_scale_2 (5, 6)``."""
    *names, last = (path.rpartition(".")[2] for path in paths)
    owner = paths[0].rpartition(".")[0]
    numbers = ", ".join(f"{scale:,.7g}" for scale in scales)
    return f"{owner}: {', '.join(names)} and {last} have unequal {scale_name} ({numbers})"
