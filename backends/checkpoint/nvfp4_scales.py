"""The NVFP4 layers of a checkpoint, and whether vLLM can score them with the scales they have.  No engine, no torch.

vLLM fuses layers that share an input into one matrix with one global scale: it takes one of theirs (the largest, of an
expert's the gate's) and only warns.  A SmolLM2-135M with unequal ones scored PPL 16,584 in place of 20.6.  Unequal
global scales of their activations are not refused: the input is the same, so that one of the calibrated ranges is as
good as another, and vLLM's warning is in the results.

Read from the headers, and from the global scales alone.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from backends.checkpoint.config import config_of, quantization, text_config
from backends.checkpoint.files import Tensor, read_headers, weight_files
from backends.common.errors import InputError

FUSED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), ("wq", "wk", "wv"), ("query", "key", "value"),
    ("c_fc_0", "c_fc_1"),
)  # fmt: skip
"""Layers of one parent that vLLM fuses: the packed_modules_mapping of its language models, 0.26 to 0.33."""
STORED = {"weight_global_scale": ("weight_packed", "input_global_scale"), "weight_scale_2": ("weight", "input_scale")}
"""Global scale of the weights -> packed weights, global scale of activations: compressed-tensors, modelopt."""
TOLERANCE = 1e-5
"""Relative; vLLM's own for experts.  A shared scale is the same number, and bf16 weights are spaced by 4e-3."""


@dataclass(frozen=True)
class Layer:
    """One NVFP4 matrix of a checkpoint: its ``weight_scale`` and ``input_scale`` are the global ones.

    ``input_scale`` is None if none is stored; ``kind`` is the tensor name of ``weight_scale``.
    """

    kind: str
    weight_scale: Tensor
    input_scale: Tensor | None


def layers_of(folder: Path) -> dict[str, Layer]:
    """Module path -> layer, of a checkpoint's NVFP4 layers; empty, and no header read, if it is not quantized."""
    if not quantization(folder):
        return {}
    tensors = read_headers(weight_files(folder))
    found = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if part in STORED:
            weight, activations = STORED[part]
            packed = tensors.get(f"{path}.{weight}")
            if packed is not None and packed.dtype == "U8":
                found[path] = Layer(part, tensor, tensors.get(f"{path}.{activations}"))
    return found


def is_expert(path: str) -> bool:
    """Whether a layer is one of a mixture's experts, which have kernels of their own."""
    return "experts" in path.split(".")


def check_scales(folder: Path, layers: Mapping[str, Layer]) -> None:
    """InputError for the first layers whose scales vLLM would misread, with the number of others like them."""
    missing = [path for path, layer in layers.items() if layer.input_scale is None]
    if missing and asks_for_activations(text_config(config_of(folder))):
        raise InputError(
            f"model_dir: {missing[0]}: no input_global_scale for its NVFP4 activations{others(missing)}, and vLLM "
            "would take uninitialized memory for it; calibrate the checkpoint, or quantize it weight-only"
        )
    scales = global_scales(layers, fused := fused_layers(layers))
    unequal = [paths for paths in fused if not equal([scales[path] for path in paths])]
    if unequal:
        parent = unequal[0][0].rpartition(".")[0]
        *names, last = (path.rpartition(".")[2] for path in unequal[0])
        found = ", ".join(f"{scales[path]:,.7g}" for path in unequal[0])
        raise InputError(
            f"model_dir: {parent}: {', '.join(names)} and {last} have unequal {layers[unequal[0][0]].kind} ({found})"
            f"{others(unequal)}, and vLLM fuses them into one matrix with one scale; quantize with a shared scale"
        )


def others(found: Sequence[Any]) -> str:
    """`` (and 3 more like it)`` for the second to last of what was found."""
    return f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""


def asks_for_activations(config: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors config wants NVFP4 activations in every layer that has NVFP4 weights."""
    groups = (config.get("quantization_config") or {}).get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    nvfp4 = [group for group in groups if is_nvfp4(group.get("weights"))]
    return bool(nvfp4) and all(is_nvfp4(group.get("input_activations")) for group in nvfp4)


def is_nvfp4(arguments: Mapping[str, Any] | None) -> bool:
    """Whether the arguments of a quantization are those of NVFP4."""
    wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
    return arguments is not None and wanted.items() <= arguments.items()


def fused_layers(layers: Mapping[str, Layer]) -> list[tuple[str, ...]]:
    """Paths of the layers that vLLM fuses, together."""
    found = []
    for path in layers:
        parent = path.rpartition(".")[0]
        for group in FUSED:
            members = tuple(other for name in group if (other := f"{parent}.{name}") in layers)
            if (
                len(members) > 1
                and path == members[0]
                and all(layers[member].weight_scale.numel == 1 for member in members)
            ):
                found.append(members)
    return found


def global_scales(layers: Mapping[str, Layer], fused: Sequence[tuple[str, ...]]) -> dict[str, float]:
    """The scales of the fused layers by path, read in the order in which they lie on disk."""
    wanted = sorted(
        (layers[path].weight_scale.file, layers[path].weight_scale.start, path) for group in fused for path in group
    )
    found = {}
    for file, entries in groupby(wanted, key=lambda entry: entry[0]):
        with file.open("rb", buffering=0) as stream:
            for _, start, path in entries:
                stream.seek(start)
                found[path] = number(layers[path].weight_scale, stream.read(layers[path].weight_scale.nbytes))
    return found


def number(tensor: Tensor, raw: bytes) -> float:
    """A stored scalar."""
    if tensor.dtype == "BF16":
        raw = bytes(2) + raw
    (value,) = struct.unpack({"F16": "<e", "F64": "<d"}.get(tensor.dtype, "<f"), raw)
    return float(value)


def equal(scales: Sequence[float]) -> bool:
    """Whether all are the same number, within the tolerance."""
    return max(scales) - min(scales) <= TOLERANCE * max(scales)
