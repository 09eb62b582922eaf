"""Report how the linear layers of a model in Transformers ran.

Most quantized checkpoints are decompressed to the model's dtype and multiplied by torch: the
weights are those of the checkpoint, but the activations may differ from its scheme.
compressed-tensors rounds activations in the layer's forward.  To measure this, one vector is passed
to the layer and compared with the input of torch's product.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..base import Layer
from ..checkpoint.safetensors_files import read_headers, weight_files
from ..common.message_text import dtype_name
from ..layers.groups import deviation
from ..layers.module_names import OTHER_TOWERS, outside_text_model
from ..layers.schemes import UNKNOWN, Scheme, args_text, declared

DEQUANTIZED = "torch linear (dequantized)"
LINEAR = {"Linear", "Conv1D"}
SCALES = re.compile(r"(\.(weight_scale|scales|weight_packed)|_(scales?|blocks))(_\w+)?$")
"""Endings of the names of a quantized module's tensors; gpt-oss has
``experts.gate_up_proj_scales``."""


def layers(model: Any, quantization: dict[str, Any], folder: Path) -> Iterator[Layer]:
    """Yield every linear and expert layer of the text model, after a forward pass.

    ``quantization``: the ``quantization_config`` of the loaded model; ``folder``: its checkpoint.
    """
    names = read_headers(weight_files(folder)) if quantization else ()
    stored = {name_from_layers(SCALES.sub("", name)) for name in names if SCALES.search(name)}
    stated, head, sizes = declared(quantization), model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        sizes[name] = sum(
            each.nbytes
            for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        )
    outside = outside_text_model(sizes, None)
    for name, module in model.named_modules():
        if module is not head and (
            name in outside or any(map(OTHER_TOWERS.fullmatch, name.split(".")))
        ):
            continue
        if hasattr(module, "in_features") or type(module).__name__ in LINEAR:
            dequantized = name_from_layers(name) in stored
            yield linear_layer(
                name, module, stated.of(name), dtype_name(model.dtype), dequantized=dequantized
            )
        elif type(module).__name__.endswith(
            "Experts"
        ):  # all experts of a layer, with one or two weight tensors
            dequantized = any(each.startswith(f"{name_from_layers(name)}.") for each in stored)
            kernel = f"{type(module).__name__} {getattr(model.config, '_experts_implementation', None) or ''}".strip()
            yield product(
                name,
                next(module.parameters(), None),
                stated.of(name),
                kernel,
                dequantized=dequantized,
            )


def linear_layer(
    name: str, module: Any, scheme: Scheme | None, dtype: str, *, dequantized: bool
) -> Layer:
    """Return how a linear layer ran.

    A class of a quantizer (bitsandbytes, gptqmodel, FP8) runs the scheme of the config, unless its
    weights are floats.
    """
    kernel = type(module).__name__
    own = getattr(module, "quantization_scheme", None)
    if own is not None and kernel in LINEAR:  # compressed-tensors
        asked = args_text(own.input_activations)
        ran = measured_activations(module, asked, dtype)
        return Layer(name, args_text(own.weights), ran, DEQUANTIZED, deviation(asked or dtype, ran))
    weight: Any = getattr(module, "weight", None)
    if kernel in LINEAR and type(weight) is torch.nn.Parameter:
        return product(name, weight, scheme, "torch linear", dequantized=dequantized)
    if scheme is None:
        return Layer(name, UNKNOWN, UNKNOWN, kernel)
    if (
        type(weight) is torch.nn.Parameter
        and weight.dtype.is_floating_point
        and weight.element_size() > 1
    ):
        return product(name, weight, scheme, kernel, dequantized=dequantized)
    return Layer(name, scheme.weights, scheme.activations or dtype, kernel)


def product(
    name: str, weight: Any, scheme: Scheme | None, kernel: str, *, dequantized: bool
) -> Layer:
    """Return a layer that multiplies a float ``weight`` in its dtype; for other weights,
    activations are unknown.
    """
    scheme = scheme or Scheme(UNKNOWN)
    if weight is None or not weight.dtype.is_floating_point or weight.element_size() == 1:
        return Layer(
            name, scheme.weights, UNKNOWN, kernel, deviation(scheme.activations or UNKNOWN, UNKNOWN)
        )
    dtype = dtype_name(weight.dtype)
    if not dequantized:
        return Layer(name, dtype, dtype, kernel)
    asked = deviation(scheme.activations or dtype, dtype)
    return Layer(name, scheme.weights, dtype, f"{kernel} (dequantized)", asked)


class ProductInputs(TorchFunctionMode):
    """Collects the activations of every product that ``torch.nn.functional.linear`` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.nn.functional.linear:
            self.tensors.append(args[0])
        return function(*args, **(kwargs or {}))


def measured_activations(module: Any, asked: str, dtype: str) -> str:
    """Return the activations of a compressed-tensors layer: ``asked`` if product and layer have
    different inputs.

    "unknown" if accelerate has moved the weights off the device.
    """
    if not asked:
        return dtype
    if any(parameter.is_meta for parameter in module.parameters()):
        return UNKNOWN
    given = torch.randn(1, module.in_features, generator=torch.Generator().manual_seed(0))
    given = given.to(next(module.parameters()).device, getattr(torch, dtype))
    with torch.inference_mode(), ProductInputs() as inputs:
        module(given)
    return dtype if all(torch.equal(tensor, given) for tensor in inputs.tensors) else asked


def name_from_layers(name: str) -> str:
    """Return a module's name from ``layers.`` on; checkpoint and model may differ before that."""
    return name[max(name.find("layers."), 0) :]
