"""Report how the linear layers of a model in Transformers ran.

Most quantized checkpoints are decompressed to the model's dtype and multiplied by torch: the
weights are those of the checkpoint, but the activations may differ from its scheme.
compressed-tensors rounds activations in the layer's forward.  To measure this, one vector is passed
to the layer and compared with the input of torch's product.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..base import Layer
from ..checkpoint.folder import Checkpoint
from ..common.message_text import dtype_name
from ..layers.groups import deviation
from ..layers.module_names import OTHER_TOWERS, outside_text_model
from ..layers.schemes import UNKNOWN, Declared, Scheme, args_text

DEQUANTIZED = "torch linear (dequantized)"
LINEAR = {"Linear", "Conv1D"}
QUANTIZED_ENDING = re.compile(r"(\.(weight_scale|scales|weight_packed)|_(scales?|blocks))(_\w+)?$")
"""Endings of the names of a quantized module's tensors.

gpt-oss has ``experts.gate_up_proj_scales``.
"""


def layers(model: Any, schemes: Declared, quantized: Collection[str]) -> Iterator[Layer]:
    """Yield every linear and expert layer of the text model, after a forward pass.

    ``schemes``: of the quantized modules.  ``quantized``: their names (``quantized_modules``).
    """
    dtype = dtype_name(model.dtype)
    head = model.get_output_embeddings()
    outside = outside_text_model(sizes_of(model), None)
    for name, module in model.named_modules():
        is_outside = name in outside or is_in_other_tower(name)
        if is_outside and module is not head:
            continue
        name_in_checkpoint = name_from_layers(name)
        kernel = type(module).__name__
        if hasattr(module, "in_features") or kernel in LINEAR:
            dequantized = name_in_checkpoint in quantized
            yield linear_layer(name, module, schemes.of(name), dtype, dequantized=dequantized)
        # All experts of a layer, with one or two weight tensors.
        elif kernel.endswith("Experts"):
            prefix = f"{name_in_checkpoint}."
            dequantized = any(stored.startswith(prefix) for stored in quantized)
            implementation = getattr(model.config, "_experts_implementation", None) or ""
            kernel = f"{kernel} {implementation}".strip()
            weight = next(module.parameters(), None)
            yield layer_of_product(name, weight, schemes.of(name), kernel, dequantized=dequantized)


def quantized_modules(checkpoint: Checkpoint) -> set[str]:
    """Return the quantized modules of a checkpoint, by their names from ``layers.`` on."""
    return {name_from_layers(module) for module in stored_quantized(checkpoint)}


def stored_quantized(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the quantized modules of a checkpoint."""
    modules = set(checkpoint.quantized)
    # A matrix of 16-bit floats with scales has rounded weights, too.
    for name in checkpoint.tensors:
        if QUANTIZED_ENDING.search(name):
            modules.add(QUANTIZED_ENDING.sub("", name))
    return modules


def sizes_of(model: Any) -> dict[str, int]:
    """Return the bytes of each module's tensors, without those of the modules in it."""
    sizes = {}
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        sizes[name] = sum(tensor.nbytes for tensor in tensors)
    return sizes


def is_in_other_tower(name: str) -> bool:
    """True if a module belongs to a part for images or sound."""
    return any(OTHER_TOWERS.fullmatch(step) for step in name.split("."))


def linear_layer(
    name: str, module: Any, scheme: Scheme | None, dtype: str, *, dequantized: bool
) -> Layer:
    """Return how a linear layer ran.

    compressed-tensors' modules state their own scheme.  A plain linear layer runs its weights as
    they are.  A class of a quantizer (bitsandbytes, gptqmodel, FP8) runs the scheme of the config,
    unless its weights are floats; without a scheme it is unknown.
    """
    kernel = type(module).__name__
    module_scheme = getattr(module, "quantization_scheme", None)
    if module_scheme is not None and kernel in LINEAR:
        return compressed_layer(name, module, module_scheme, dtype)
    weight: Any = getattr(module, "weight", None)
    is_parameter = type(weight) is torch.nn.Parameter
    if is_parameter and kernel in LINEAR:
        return layer_of_product(name, weight, scheme, "torch linear", dequantized=dequantized)
    if scheme is None:
        return Layer(name, UNKNOWN, UNKNOWN, kernel)
    if is_parameter and is_float(weight):
        return layer_of_product(name, weight, scheme, kernel, dequantized=dequantized)
    return Layer(name, scheme.weights, scheme.activations or dtype, kernel)


def compressed_layer(name: str, module: Any, scheme: Any, dtype: str) -> Layer:
    """Return how a layer of compressed-tensors ran, whose forward may round its activations.

    ``scheme``: the module's ``quantization_scheme``.
    """
    activations = args_text(scheme.input_activations)
    ran = measured_activations(module, activations, dtype)
    missed = deviation(activations or dtype, ran)
    return Layer(name, args_text(scheme.weights), ran, DEQUANTIZED, missed)


def is_float(weight: Any) -> bool:
    """True for a tensor of floats of 16 or more bits."""
    return bool(weight.dtype.is_floating_point) and weight.element_size() > 1


def layer_of_product(
    name: str, weight: Any, scheme: Scheme | None, kernel: str, *, dequantized: bool
) -> Layer:
    """Return how a layer ran whose ``weight`` torch multiplies.

    A weight of floats is multiplied in its dtype.  For another weight, or None (a module without
    parameters), the activations are unknown.  ``dequantized``: the checkpoint stores the weight
    quantized, by ``scheme``; otherwise the scheme of a weight of floats is ignored.
    """
    scheme = scheme or Scheme(UNKNOWN)
    if weight is None or not is_float(weight):
        missed = deviation(scheme.activations or UNKNOWN, UNKNOWN)
        return Layer(name, scheme.weights, UNKNOWN, kernel, missed)
    dtype = dtype_name(weight.dtype)
    if not dequantized:
        return Layer(name, dtype, dtype, kernel)
    missed = deviation(scheme.activations or dtype, dtype)
    return Layer(name, scheme.weights, dtype, f"{kernel} (dequantized)", missed)


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


def measured_activations(module: Any, activations: str, dtype: str) -> str:
    """Return the activations in the product of a compressed-tensors layer.

    These are the scheme's ``activations`` if product and layer have different inputs.  "unknown" if
    accelerate has moved the weights off the device.
    """
    if not activations:
        return dtype
    if any(parameter.is_meta for parameter in module.parameters()):
        return UNKNOWN
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, module.in_features, generator=generator)
    vector = vector.to(next(module.parameters()).device, getattr(torch, dtype))
    with torch.inference_mode(), ProductInputs() as inputs:
        module(vector)
    if all(torch.equal(tensor, vector) for tensor in inputs.tensors):
        return dtype
    return activations


def name_from_layers(name: str) -> str:
    """Return a module's name from ``layers.`` on; checkpoint and model may differ before that."""
    return name[max(name.find("layers."), 0) :]
