"""The NVFP4 layers of a checkpoint, and whether vLLM can score them with the scales they have.  No engine, no torch.

vLLM fuses layers that share an input into one matrix with one global scale: it takes the largest scale of the layers
(for experts the scale of ``gate_proj``) and only warns.  A SmolLM2-135M with unequal scales had PPL 16,584 in place of
20.6.  Layers with unequal global scales of their activations are not refused: they have the same input, so that each of
the calibrated ranges is as good as the other, and vLLM's warning is in the results.

Only the headers and the global scales are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.checkpoint.files import Tensor, read_headers, weight_files
from compare_q.backends.checkpoint.formats import NUMBERS, values
from compare_q.backends.common.errors import InputError
from compare_q.backends.layers.names import fused_layers
from compare_q.backends.layers.schemes import objects_in

STORED = {"weight_global_scale": ("weight_packed", "input_global_scale"), "weight_scale_2": ("weight", "input_scale")}
"""Name of the weights' global scale -> names of the packed weights and of the activations' global scale.

The first entry is how compressed-tensors stores them, the second how ModelOpt does.
"""
TOLERANCE = 1e-5
"""Relative difference up to which scales are the same, as vLLM's own check of experts has it.

A shared scale is one number written several times, while unequal scales come from the largest weights of two matrices,
which in bf16 differ by 4e-3 at least.
"""


@dataclass(frozen=True)
class Nvfp4Layer:
    """One NVFP4 matrix of a checkpoint.

    ``weight_scale`` and ``input_scale`` are the global scales of its weights and activations, ``input_scale`` None if
    the checkpoint stores none; ``scale_name`` is the last part of the name of ``weight_scale``.
    """

    scale_name: str
    weight_scale: Tensor
    input_scale: Tensor | None


def nvfp4_layers(folder: Path) -> dict[str, Nvfp4Layer]:
    """Module path -> layer, of a checkpoint's NVFP4 layers; empty if it is not quantized, and then no header is read.

    InputError for a config or a header that cannot be read.
    """
    if not CheckpointConfig.read(folder).quantization:
        return {}
    tensors = read_headers(weight_files(folder))
    layers = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if part in STORED:
            weight, activations = STORED[part]
            packed = tensors.get(f"{path}.{weight}")
            if packed is not None and packed.dtype == "U8":
                layers[path] = Nvfp4Layer(part, tensor, tensors.get(f"{path}.{activations}"))
    return layers


def is_expert(path: str) -> bool:
    """Whether a layer is one of a mixture's experts, which have kernels of their own."""
    return "experts" in path.split(".")


def check_scales(folder: Path, layers: Mapping[str, Nvfp4Layer]) -> None:
    """InputError for the first layers whose scales vLLM would misread, with the number of the other such layers."""
    missing = [path for path, layer in layers.items() if layer.input_scale is None]
    if missing and asks_for_activations(CheckpointConfig.read(folder).quantization):
        raise InputError(
            f"model_dir: {missing[0]}: no input_global_scale for its NVFP4 activations{and_more(missing)}, and vLLM "
            "would take uninitialized memory for it; calibrate the checkpoint, or quantize it weight-only"
        )
    groups = unequal({path: layer.weight_scale for path, layer in layers.items()})
    for paths, scales in groups.items():
        *names, last = (path.rpartition(".")[2] for path in paths)
        raise InputError(
            f"model_dir: {paths[0].rpartition('.')[0]}: {', '.join(names)} and {last} have unequal "
            f"{layers[paths[0]].scale_name} ({numbers_text(scales)}){and_more([*groups])}, and vLLM fuses them into "
            "one matrix with one scale; quantize with a shared scale"
        )


def unequal(scales: Mapping[str, Tensor]) -> dict[tuple[str, ...], list[float]]:
    """Paths of layers that engines fuse into one matrix -> their global scales, where these differ.

    ``scales``: path of a layer -> its global scale; stacked experts, which have a scale each, are left out.
    """
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
