"""Scales that would make an engine compute something else: of fused layers, of activations, of the KV cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from backends.checkpoint import nvfp4_scales
from backends.checkpoint.doctor.finding import Finding, gathered
from backends.checkpoint.doctor.numbers import TYPES, Floats, values
from backends.checkpoint.doctor.subject import Checkpoint, Parts
from backends.layers.names import NUMBER, fused_layers
from backends.layers.schemes import declared, objects_in

INPUT_SCALES = frozenset({"input_scale", "input_global_scale", "activation_scale"})
KV_SCALES = ("k_scale", "v_scale", "output_scale")
GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")
LARGEST = 1 << 16
"""Elements of a tensor of scales that is read; there is one a layer, or one an expert."""
CALIBRATE = "calibrate with text that reaches it, or with every expert active, and quantize again"

NO_SCALES = "calibrate the KV cache, or serve with the KV cache in 16 bits"


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Every finding about scales."""
    yield from fused(checkpoint)
    yield from inputs(checkpoint)
    yield from kv_cache(checkpoint)


def fused(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Layers that engines fuse into one matrix with one global scale, and whose global scales differ."""
    layers = {
        module: parts[name]
        for module, parts in checkpoint.quantized.items()
        for name in GLOBAL_SCALES
        if name in parts and parts[name].numel == 1 and parts[name].dtype in TYPES
    }
    unequal, first = [], ""
    for paths in fused_layers(layers):
        scales = [float(values(layers[path]).reshape(-1)[0]) for path in paths]
        if not nvfp4_scales.within_tolerance(scales):
            names = ", ".join(path.rpartition(".")[2] for path in paths)
            unequal.append(f"{layers[paths[0]].file.name}: {paths[0].rpartition('.')[0]}: {names}")
            first = first or ", ".join(f"{scale:,.7g}" for scale in scales)
    yield from gathered(
        "wrong", unequal, f"unequal global scales ({first}) of layers that vLLM fuses into one matrix with one scale",
        "quantize with one scale for the layers that share an input",
    )  # fmt: skip


def inputs(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales of the activations that are missing, zero, or no numbers."""
    there = {module: scale_of(parts, INPUT_SCALES) for module, parts in checkpoint.quantized.items()}
    asked = asks_for_input_scales(checkpoint.quantization)
    # A mixture of schemes: layers of one kind of which only some have a scale were meant to have one, unless the config
    # says of each what it takes (ModelOpt's MIXED_PRECISION).
    weight_only = weight_only_layers(checkpoint)
    kinds = {kind(module, checkpoint.modules[module]) for module, name in there.items() if name}
    missing = [
        module
        for module, name in there.items()
        if not name and module not in weight_only and (asked or kind(module, checkpoint.modules[module]) in kinds)
    ]
    yield from gathered(
        "wrong", [checkpoint.where_module(module) for module in missing],
        "no scale of its activations (input_scale), for which engines take uninitialized memory or 1", CALIBRATE,
    )  # fmt: skip
    bad: dict[str, list[str]] = {}
    for module, name in there.items():
        if name and (wrong := wrong_number(checkpoint.modules[module][name])):
            bad.setdefault(wrong, []).append(checkpoint.where(f"{module}.{name}"))
    for wrong, where in bad.items():
        yield from gathered("wrong", where, f"the scale of its activations is {wrong}", CALIBRATE)


def weight_only_layers(checkpoint: Checkpoint) -> set[str]:
    """The quantized layers whose activations the config leaves in 16 bits."""
    found = declared(checkpoint.quantization)
    schemes = {module: found.of(module) for module in checkpoint.quantized}
    return {module for module, scheme in schemes.items() if scheme is not None and not scheme.activations}


def kv_cache(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales of an fp8 KV cache that are missing, 1 throughout, or no numbers."""
    found = {
        f"{module}.{part}": tensor
        for module, parts in checkpoint.modules.items()
        for part, tensor in parts.items()
        if part in KV_SCALES and tensor.numel <= LARGEST
    }
    bad: dict[str, list[str]] = {}
    for name, tensor in found.items():
        if wrong := wrong_number(tensor):
            bad.setdefault(wrong, []).append(checkpoint.where(name))
    for wrong, where in bad.items():
        yield from gathered("wrong", where, f"the scale of the KV cache is {wrong}", "calibrate the KV cache again")
    if found and not bad and all((values(tensor) == 1).all() for tensor in found.values()):
        clamped = str(checkpoint.quantization.get("quant_method")).lower().startswith("modelopt")
        why = "and ModelOpt writes no smaller one" if clamped else "which no calibration gives: keys beyond 448 are cut"
        yield Finding(
            "note" if clamped else "warning", checkpoint.where(next(iter(found))),
            f"every scale of the fp8 KV cache is 1.0, {why}",
            NO_SCALES, len(found) - 1,
        )  # fmt: skip
    if not found and asks_for_kv_scales(checkpoint.quantization):
        yield Finding(
            "warning", "config.json: quantization_config",
            "asks for a calibrated fp8 KV cache, but no k_scale and v_scale are stored, and engines take 1.0",
            NO_SCALES,
        )  # fmt: skip


def scale_of(parts: Parts, names: Collection[str]) -> str:
    """The name of a module's scale among ``names``; "" if it has none."""
    return next((name for name in names if name in parts and parts[name].numel <= LARGEST), "")


def kind(module: str, parts: Parts) -> tuple[str, ...]:
    """A module's path without its numbers, and what it stores beside scales of activations: one scheme has one kind."""
    return (NUMBER.sub("*", module), *sorted(f"{part} {parts[part].dtype}" for part in parts.keys() - INPUT_SCALES))


def wrong_number(tensor: Any) -> str:
    """What is wrong with a scale, in a word; empty if it is a positive number."""
    if tensor.dtype not in TYPES:
        return f"of a dtype that is not known ({tensor.dtype})"
    found: Floats = values(tensor)
    if np.isnan(found).any():
        return "NaN"
    if np.isinf(found).any():
        return "infinite"
    return "" if not found.size or found.min() > 0 else "zero" if found.min() == 0 else "negative"


def asks_for_input_scales(quantization: Mapping[str, Any]) -> bool:
    """Whether a config asks for a stored scale of the activations in every quantized layer."""
    if quantization.get("quant_method") == "fp8":
        return quantization.get("activation_scheme") == "static"
    nested = quantization.get("quantization")
    algorithm = (nested if isinstance(nested, Mapping) else quantization).get("quant_algo")
    if str(algorithm).upper() in ("NVFP4", "NVFP4_AWQ", "FP8"):
        return True
    groups = objects_in(quantization.get("config_groups"))
    return bool(groups) and all(is_static(group.get("input_activations")) for group in groups)


def asks_for_kv_scales(quantization: Mapping[str, Any]) -> bool:
    """Whether a config asks for stored scales of the KV cache."""
    nested = quantization.get("quantization")
    algorithm = (nested if isinstance(nested, Mapping) else quantization).get("kv_cache_quant_algo")
    return is_static(quantization.get("kv_cache_scheme")) or str(algorithm).upper() == "FP8"


def is_static(arguments: Any) -> bool:
    """Whether compressed-tensors' ``QuantizationArgs``, as JSON, describe a scale that is stored.

    ``"dynamic": "local"`` is NVFP4's: the scales of groups are computed, the global one is stored.
    """
    if not isinstance(arguments, Mapping):
        return False
    return arguments.get("dynamic") in (None, False) or (
        arguments.get("dynamic") == "local" and arguments.get("strategy") == "tensor_group"
    )
