"""The NVFP4 layers of a checkpoint, and whether vLLM can score them with the scales they have.  No engine, no torch.

vLLM fuses layers that share an input into one matrix with one global scale: it takes the largest scale of the layers
(for experts the scale of ``gate_proj``) and only warns.  A SmolLM2-135M with unequal scales had PPL 16,584 in place of
20.6.  Layers with unequal global scales of their activations are not refused: they have the same input, so that each of
the calibrated ranges is as good as the other, and vLLM's warning is in the results.

Only the headers and the global scales are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.checkpoint.contents import Checkpoint
from compare_q.backends.checkpoint.formats import NUMBERS, Parts, main_part, values
from compare_q.backends.common.errors import InputError
from compare_q.backends.layers.names import fused_layers
from compare_q.backends.layers.schemes import objects_in

STORED = {"weight_global_scale": "input_global_scale", "weight_scale_2": "input_scale"}
"""Name of the weights' global scale -> name of the activations': as compressed-tensors stores them, and ModelOpt."""
TOLERANCE = 1e-5
"""Relative difference up to which scales are the same, as vLLM's own check of experts has it.

A shared scale is one number written several times, while unequal scales come from the largest weights of two matrices,
which in bf16 differ by 4e-3 at least.
"""


def nvfp4_layers(folder: Path) -> dict[str, Parts]:
    """Module path -> parts, of a checkpoint's NVFP4 layers; empty if it is not quantized, and then no header is read.

    InputError for a config or a header that cannot be read.
    """
    checkpoint = Checkpoint(folder)
    if not checkpoint.config.quantization:
        return {}
    scaled = {path: parts for path, parts in checkpoint.modules.items() if not parts.keys().isdisjoint(STORED)}
    return {path: parts for path, parts in scaled.items() if (main := main_part(parts)) and parts[main].dtype == "U8"}


def has_input_scale(parts: Parts) -> bool:
    """Whether the activations of an NVFP4 layer have a global scale."""
    return not parts.keys().isdisjoint(STORED.values())


def is_expert(path: str) -> bool:
    """Whether a layer is one of a mixture's experts, which have kernels of their own."""
    return "experts" in path.split(".")


def check_scales(folder: Path, layers: Mapping[str, Parts]) -> None:
    """InputError for the first layers whose scales vLLM would misread, with the number of the other such layers."""
    missing = [path for path, parts in layers.items() if not has_input_scale(parts)]
    if missing and asks_for_activations(CheckpointConfig.read(folder).quantization):
        raise InputError(
            f"model_dir: {missing[0]}: no input_global_scale for its NVFP4 activations{and_more(missing)}, and vLLM "
            "would take uninitialized memory for it; calibrate the checkpoint, or quantize it weight-only"
        )
    groups = unequal(layers)
    for paths, scales in groups.items():
        *names, last = (path.rpartition(".")[2] for path in paths)
        scale = next(name for name in STORED if name in layers[paths[0]])
        raise InputError(
            f"model_dir: {paths[0].rpartition('.')[0]}: {', '.join(names)} and {last} have unequal {scale} "
            f"({numbers_text(scales)}){and_more([*groups])}, and vLLM fuses them into one matrix with one scale; "
            "quantize with a shared scale"
        )


def unequal(layers: Mapping[str, Parts]) -> dict[tuple[str, ...], list[float]]:
    """Paths of layers that engines fuse into one matrix -> their global scales, where these differ.

    Stacked experts, which have a scale each, are left out.
    """
    scales = {path: parts[name] for path, parts in layers.items() for name in STORED if name in parts}
    single = {path: scale for path, scale in scales.items() if scale.numel == 1 and scale.dtype in NUMBERS}
    numbers = {paths: [float(values(single[path]).reshape(-1)[0]) for path in paths] for paths in fused_layers(single)}
    return {paths: own for paths, own in numbers.items() if not max(own) - min(own) <= TOLERANCE * max(own)}


def numbers_text(numbers: Sequence[float]) -> str:
    """``3,584, 2,912``."""
    return ", ".join(f"{number:,.7g}" for number in numbers)


def and_more(things: Sequence[Any]) -> str:
    """`` (and 3 more like it)`` for four things of which a message names the first; "" for one thing."""
    return f" (and {len(things) - 1} more like it)" if len(things) > 1 else ""


def asks_for_activations(quantization: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors config asks for NVFP4 activations in every layer that has NVFP4 weights."""
    nvfp4 = [group for group in objects_in(quantization.get("config_groups")) if is_nvfp4(group.get("weights"))]
    return bool(nvfp4) and all(is_nvfp4(group.get("input_activations")) for group in nvfp4)


def is_nvfp4(arguments: Any) -> bool:
    """Whether compressed-tensors' ``QuantizationArgs``, as JSON, describe NVFP4."""
    wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
    return isinstance(arguments, dict) and all(arguments.get(key) == value for key, value in wanted.items())
