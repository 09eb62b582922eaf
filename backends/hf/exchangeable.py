"""Which modules of a quantized model can be exchanged for its reference's, and whether honestly.

An exchange measures what quantization loses only if each exchanged part computes the same function
in both models, up to roundings.  Quantizers change more than that:

- AWQ and SmoothQuant move scales of channels from a matrix into the norm before it, or from one
  matrix into another one (from up to down, from v to o).  These changes cancel within a decoder
  layer.  Then only whole decoder layers can be exchanged.
- SpinQuant and QuaRot rotate the states between the layers, which changes embedding, head and last
  norm.  Then nothing can be exchanged.

Norms, biases and other tensors that are not quantized are compared number by number, quantized
modules by ``folded_scales.factor_up_to_rounding``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import UnsizedError, stored_weights
from ..common.errors import ModelError
from ..common.message_text import and_more
from ..layers.module_names import is_draft, is_outside, outside_text_model
from ..layers.schemes import Declared, declared
from ..restoring import QuantizedModule
from .folded_scales import factor_up_to_rounding, opposite, rounds_alike
from .model_pair import ModelPair
from .transformers_layers import is_in_other_tower, name_from_layers, sizes_of, stored_quantized
from .verify import loaded_names

ROUNDING = 0.02
"""Largest difference of two tensors that are not quantized which counts as rounding.

The norm of the difference, relative to the reference's norm.  Quantizers copy such tensors, or
round them to another float format, which changes them by less than 0.4 % (bfloat16).
"""
ELEMENTS = 1 << 24
"""Numbers of two tensors that are compared at a time."""


def exchangeable(
    pair: ModelPair, checkpoint: Checkpoint, reference: Checkpoint
) -> tuple[QuantizedModule, ...]:
    """Return the modules that can be exchanged (``Engine.exchangeable``)."""
    modules = quantized_modules(pair, checkpoint, reference)
    if not modules:
        raise ModelError(f"{pair.label}: none of its modules is quantized")
    if only_layers(pair, modules):
        return tuple(whole_layers(pair, modules))
    different = []
    for path, module in modules.items():
        if not is_identical(pair, path):
            different.append(module)
    return tuple(different)


def quantized_modules(
    pair: ModelPair, checkpoint: Checkpoint, reference: Checkpoint
) -> dict[str, QuantizedModule]:
    """Return path in the models -> quantized module, in the order of the model.

    Parts that do not run in the text model are left out.  ModelError if the place or the size of a
    module is not known.
    """
    model = pair.models["quantized"]
    stored = places_of(checkpoint, model, stored_quantized(checkpoint))
    stored_reference = places_of(reference, pair.models["reference"], reference.matrices.keys())
    schemes = declared(checkpoint.config.quantization)
    modules = {}
    for path, _ in model.named_modules():
        if path not in stored:
            continue
        parts = stored[path]
        reference_parts = stored_reference.get(path)
        if reference_parts is None and path == pair.head_path:
            # A tied head is not stored; it has the bits of the embedding.
            reference_parts = stored_reference.get(pair.embedding_path)
        if reference_parts is None:
            raise ModelError(f"{reference.folder}: stores no weights for {path}")
        bits, n_weights = stored_size(checkpoint, parts)
        reference_bits, n_reference_weights = stored_size(reference, reference_parts)
        if n_weights != n_reference_weights:
            raise ModelError(
                f"{path}: has {n_weights} weights in {checkpoint.folder}, and "
                f"{n_reference_weights} in {reference.folder}"
            )
        words = {format_of(checkpoint, schemes, part) for part in parts}
        modules[path] = QuantizedModule(
            name_from_layers(path),
            pair.layer_of(path),
            n_weights,
            only_word(words),
            float(bits),
            float(reference_bits),
        )
    return modules


def places_of(checkpoint: Checkpoint, model: Any, names: Collection[str]) -> dict[str, list[str]]:
    """Return path in the loaded model -> the stored modules that were loaded there.

    A module with all experts of a layer may have several stored ones.  ``names``: of stored
    modules; those that do not run in the text model are left out.  ModelError if the place of a
    quantized module is not known.
    """
    n_layers = checkpoint.config.hidden_layers
    path_of_name = {name_from_layers(path): path for path, _ in model.named_modules()}
    places: dict[str, list[str]] = {}
    renamed = []
    for name in sorted(checkpoint.matrices.keys() & names):
        if is_outside(name) or is_draft(name, n_layers):
            continue
        path = path_of_name.get(name_from_layers(name))
        if path is None:
            renamed.append(name)
        else:
            places.setdefault(path, []).append(name)
    if not renamed:
        return places
    tensors_of_module = loaded_names(checkpoint, model, renamed)
    paths = set(path_of_name.values())
    for name in renamed:
        owners = {tensor.rpartition(".")[0] for tensor in tensors_of_module.get(name, ())}
        if len(owners) == 1 and owners <= paths:
            places.setdefault(owners.pop(), []).append(name)
        elif name in checkpoint.quantized:
            raise ModelError(
                f"{checkpoint.where(name)}: its place in the loaded model is not known"
            )
    return places


def stored_size(checkpoint: Checkpoint, names: Collection[str]) -> tuple[int, int]:
    """Return (bits, weights) of stored modules; ModelError if they are not known."""
    total_bits = 0
    total_weights = 0
    for name in names:
        parts = checkpoint.modules[name]
        try:
            bits, weights = stored_weights(name, parts, checkpoint.role(name), checkpoint.config)
        except UnsizedError as error:
            raise ModelError(f"{checkpoint.folder}: {error}") from None
        total_bits += bits
        total_weights += weights
    return total_bits, total_weights


def format_of(checkpoint: Checkpoint, schemes: Declared, name: str) -> str:
    """Return the format of a stored module: "int4 g128"."""
    scheme = schemes.of(name)
    if scheme is None:
        return checkpoint.described(name)
    return scheme.weights


def only_word(words: Collection[str]) -> str:
    """Return the only element of a set of words; "" if there are several."""
    if len(words) > 1:
        return ""
    return next(iter(words))


def only_layers(pair: ModelPair, modules: Mapping[str, QuantizedModule]) -> bool:
    """Return True if only whole decoder layers compute the same function in both models.

    ModelError if not even those do.
    """
    names = [*other_tensors(pair, modules), *scaled_modules(pair, modules)]
    outside = [name for name in names if pair.layer_of(name) is None]
    if outside:
        raise ModelError(
            f"{outside[0]}: differs from the reference's by more than rounding"
            f"{and_more(outside)}; nothing can be exchanged, because the states between the "
            "decoder layers differ, as after a rotation (SpinQuant, QuaRot)"
        )
    return bool(names)


def other_tensors(pair: ModelPair, modules: Collection[str]) -> Iterator[str]:
    """Yield the names of tensors outside ``modules`` that differ by more than rounding.

    Tensors that only the quantized model has, in a decoder layer, are among them.  ModelError if
    the models have different tensors in another way.
    """
    tensors = tensors_of(pair.models["quantized"])
    reference = tensors_of(pair.models["reference"])
    for name, tensor in tensors.items():
        if is_in_one_of(name, modules):
            continue
        other = reference.get(name)
        if other is None:
            if pair.layer_of(name) is None:
                raise ModelError(f"{pair.label}: its {name} is not in the reference")
            yield name
        elif tensor.shape != other.shape:
            raise ModelError(
                f"{pair.label}: its {name} is {list(tensor.shape)}, and the reference's "
                f"{list(other.shape)}"
            )
        elif not relative_difference(tensor, other) <= ROUNDING:
            yield name
    for name in reference.keys() - tensors.keys():
        if not is_in_one_of(name, modules):
            raise ModelError(f"{pair.label}: has no {name}, which the reference has")


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return name -> parameter or buffer, for the text model and its head."""
    unused = outside_text_model(sizes_of(model), None)
    tensors = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        module = name.rpartition(".")[0]
        if module not in unused and not is_in_other_tower(module):
            tensors[name] = tensor.detach()
    return tensors


def is_in_one_of(name: str, modules: Collection[str]) -> bool:
    """Return True if a tensor belongs to one of the modules, or to a module in one of them."""
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            return True
    return False


def relative_difference(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference relative to the reference's norm; NaN if one has NaN."""
    if tensor.dtype == reference.dtype and torch.equal(tensor, reference):
        return 0.0
    numbers = tensor.reshape(-1)
    reference_numbers = reference.reshape(-1)
    difference = 0.0
    size = 0.0
    for begin in range(0, len(numbers), ELEMENTS):
        expected = reference_numbers[begin : begin + ELEMENTS].float()
        change = numbers[begin : begin + ELEMENTS].float() - expected
        difference += float(change.square().sum(dtype=torch.float64))
        size += float(expected.square().sum(dtype=torch.float64))
    if size == 0.0:
        return math.inf
    return math.sqrt(difference / size)


def scaled_modules(pair: ModelPair, modules: Collection[str]) -> Iterator[str]:
    """Yield the paths of quantized modules that differ from the reference's by folded scales."""
    factors_of_layer: dict[int, dict[str, float]] = {}
    for path in modules:
        factor = factor_up_to_rounding(*pair.both(path))
        layer = pair.layer_of(path)
        if factor is None:
            yield path
        elif layer is not None:
            factors_of_layer.setdefault(layer, {})[path] = factor
    for factors in factors_of_layer.values():
        yield from opposite(factors)


def whole_layers(
    pair: ModelPair, modules: Mapping[str, QuantizedModule]
) -> Iterator[QuantizedModule]:
    """Yield the decoder layers with quantized modules, and the quantized modules outside of them.

    The size of a layer is that of its quantized modules.
    """
    layers: dict[int, list[QuantizedModule]] = {}
    for path, module in modules.items():
        if module.layer is not None:
            layers.setdefault(module.layer, []).append(module)
        elif not is_identical(pair, path):
            yield module
    for path, number in pair.layer_paths.items():
        if number not in layers:
            continue
        members = layers.pop(number)
        yield QuantizedModule(
            name_from_layers(path),
            number,
            sum(module.n_weights for module in members),
            only_word({module.weights for module in members}),
            sum(module.bits for module in members),
            sum(module.reference_bits for module in members),
        )


def is_identical(pair: ModelPair, path: str) -> bool:
    """Return True if a module computes the same in both models, bit for bit."""
    module, other = pair.both(path)
    weights = dict(module.named_parameters())
    # A quantized module may have parameters more, such as scales.
    for name, weight in other.named_parameters():
        own = weights.get(name)
        if own is None or own.dtype != weight.dtype or not torch.equal(own, weight):
            return False
    return rounds_alike(module, other)
