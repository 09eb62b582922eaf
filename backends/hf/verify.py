"""Compare the weights that Transformers has dequantized with the numbers in the checkpoint's files.

Transformers decompresses most quantized checkpoints while it loads them.  Transformers 5.19 makes
mistakes without a warning: it ignores the global scale of NVFP4 experts, and reads all experts by
the scheme of one group of the config.

From every kind of quantized module (one name without its numbers, one stored format, one declared
scheme) up to ``PER_KIND`` modules are compared, and from each module some rows.
``backends/checkpoint/dequantize.py`` reads these rows from the files.

Transformers places a stored matrix differently in each model family.  Some families have one tensor
for the gate and up projections of all experts, one below the other or in alternating rows.  Some
exchange inputs and outputs.  Therefore a row counts as right if it is anywhere in the loaded
matrix, as a row or as a column.  Two rows of a model are never so alike by chance.

A module is left out if it is not a plain matrix of floats in the loaded model.  The module's own
class then computes with the stored numbers (bitsandbytes, gptqmodel, FP8 kernels).  These classes
do not run on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..checkpoint import dequantize
from ..checkpoint.built_model import new_names, split_targets
from ..checkpoint.dequantize import UnreadError
from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import Parts, layout_of
from ..checkpoint.stored_tensors import stored_tensors
from ..common.errors import ModelError
from ..layers.module_names import IN_LAYER, NUMBER
from ..layers.schemes import ROUTED, declared, number_format

if TYPE_CHECKING:
    import torch

PER_KIND = 16
"""Largest number of modules of one kind that are compared."""
ROWS = 8
"""Number of rows of a module that are compared, spread over all of them."""
TOLERANCE = 2.0**-7
"""Largest length of the difference of two rows that counts as rounding, relative to the stored
row's length.

Libraries dequantize in bfloat16, in runs of every dtype: two roundings of a product change a row by
0.002 of its length.  If an int8 zero point is wrong by one step, the row changes by about 0.02.
Every other fault changes the row by more.
"""
PARALLEL = 0.999
"""Smallest cosine of two rows that differ only by a factor."""
SAME_FACTOR = 0.02
"""Largest relative difference between a factor and the scale that explains it."""
EXPERT = re.compile(r"experts\.(\d+)\.")
SCALE_OR_BIAS = re.compile("scale|bias")


class Sample(NamedTuple):
    """A quantized module.

    ``expert``: index of its matrix in a tensor of several, stored or loaded; None without one.
    """

    module: str
    parts: Parts
    expert: int | None


class Difference(NamedTuple):
    """How the loaded rows of a module differ from the stored ones."""

    largest: float  # difference of two numbers
    stored: float  # largest stored number
    cause: str  # the probable one; "" if unknown


def check_weights(checkpoint: Checkpoint, model: Any) -> None:
    """ModelError if loaded weights differ from the files, or if routed experts cannot be read.

    ``model``: an object of Transformers with all its weights in memory.
    """
    samples = list(sampled(checkpoint))
    names = loaded_names(checkpoint, model, {sample.module for sample in samples})
    tensors = model.state_dict()
    for sample in samples:
        weight = loaded_weight(tensors, names.get(sample.module, set()))
        if weight is not None and not is_plain(weight):
            continue
        try:
            if weight is None:
                raise UnreadError("its place in the loaded model is not known")
            difference = compared(checkpoint, sample, weight)
        except UnreadError as error:
            # Only experts are refused unread: Transformers 5.19 makes its known mistakes in them.
            if not is_routed(checkpoint, sample.module):
                continue
            if not has_plain_experts(tensors, sample.module):
                continue
            raise ModelError(
                f"{checkpoint.folder}: {sample.module}: quantized experts, which Transformers "
                "dequantizes; their weights could not be compared with the files: "
                f'{error}; use "load_fn": "vllm_score"'
            ) from None
        if difference is not None:
            raise ModelError(
                f"{checkpoint.folder}: {sample.module}: Transformers loaded other weights than the "
                f"files hold: they differ by up to {difference.largest:.3g}, and the stored ones "
                f'reach {difference.stored:.3g}{difference.cause}; use "load_fn": "vllm_score"'
            )


def sampled(checkpoint: Checkpoint) -> Iterator[Sample]:
    """Yield some modules of every kind, including the first and last one.

    For stacked experts, the first and last expert.
    """
    for modules in modules_by_kind(checkpoint).values():
        ordered = sorted(modules, key=numbers_in)
        n_samples = min(len(ordered), PER_KIND)
        for index in np.linspace(0, len(ordered) - 1, n_samples).round().astype(int):
            module = ordered[index]
            parts = checkpoint.quantized[module]
            if dequantize.is_stack(parts):
                count = next(iter(parts.values())).shape[0]
                yield Sample(module, parts, 0)
                yield Sample(module, parts, count - 1)
                continue
            expert = None
            match = EXPERT.search(f"{module}.")
            if match:
                expert = int(match[1])
            yield Sample(module, parts, expert)


def modules_by_kind(checkpoint: Checkpoint) -> dict[Any, list[str]]:
    """Return the quantized modules of each kind: one name, one scheme and one stored format."""
    schemes = declared(checkpoint.config.quantization)
    kinds: dict[Any, list[str]] = {}
    for module, parts in checkpoint.quantized.items():
        tensors = frozenset((name, tensor.dtype, tensor.shape) for name, tensor in parts.items())
        kind = (NUMBER.sub("*", module), schemes.of(module), tensors)
        kinds.setdefault(kind, []).append(module)
    return kinds


def numbers_in(name: str) -> list[int]:
    """Return the numbers in a name, so that layer 10 comes after layer 9."""
    return [int(number) for number in NUMBER.findall(name)]


def loaded_names(
    checkpoint: Checkpoint, model: Any, modules: Collection[str]
) -> Mapping[str, set[str]]:
    """Return stored module -> the names of its weights in the loaded model.

    Modules that Transformers cannot map are left out.  Transformers cuts some stored matrices into
    several, as HRM's gate, query, key and value.
    """
    stored = stored_tensors(checkpoint, modules)
    weights = [name for name in stored if not name.endswith("bias")]
    names: dict[str, set[str]] = {}
    try:
        for name, target in new_names(model, weights).items():
            names[stored[name].module] = {target, *split_targets(model, {name: target})}
    # Transformers' rules raise anything; all modules then count as not mapped.
    except Exception:
        return {}
    return names


def loaded_weight(
    tensors: Mapping[str, torch.Tensor], names: Collection[str]
) -> torch.Tensor | None:
    """Return the tensor of these names; None if there is none.

    Several matrices come one below the other, in any order.
    """
    import torch

    weights = [tensors[name] for name in names if name in tensors]
    if not weights:
        return None
    columns = {weight.shape[-1] for weight in weights}
    if len(weights) == 1 or len(columns) > 1:
        return weights[0]
    return torch.cat(weights)


def is_plain(weight: Any) -> bool:
    """True for a tensor of floats of 16 or more bits, unless it is of a quantizer's class."""
    import torch

    is_own_class = type(weight) not in (torch.Tensor, torch.nn.Parameter)
    return not is_own_class and weight.dtype.is_floating_point and weight.element_size() > 1


def is_routed(checkpoint: Checkpoint, module: str) -> bool:
    """True for experts that a router chooses, in a layer that runs."""
    return bool(ROUTED.match(module)) and checkpoint.role(module) == "layer"


def has_plain_experts(tensors: Mapping[str, Any], module: str) -> bool:
    """True if experts in the layer of a module are plain floats in the loaded model."""
    layer = ""
    match = IN_LAYER.search(f"{module}.")
    if match:
        layer = match[0]
    for name, tensor in tensors.items():
        is_weight = "experts" in name and not SCALE_OR_BIAS.search(name)
        if is_weight and layer in name and tensor.ndim > 1 and is_plain(tensor):
            return True
    return False


def compared(checkpoint: Checkpoint, sample: Sample, weight: torch.Tensor) -> Difference | None:
    """Return the difference between stored and loaded rows of a module; None if it is rounding."""
    import torch

    module, parts, expert = sample
    count = dequantize.row_count(parts)
    rows = np.unique(np.linspace(0, count - 1, ROWS).round().astype(np.intp))
    in_stack = None
    if dequantize.is_stack(parts):
        in_stack = expert
    bits = bits_of(checkpoint, module)
    stored_rows = dequantize.rows_of(parts, checkpoint.config, bits, rows, in_stack)
    stored = torch.from_numpy(stored_rows).to(weight.device)
    matrix = loaded_matrix(weight, expert)
    columns = stored.shape[1]
    # Usually the rows are in their place: no others need to be searched.
    if tuple(matrix.shape) == (count, columns):
        at = torch.from_numpy(rows).to(weight.device)
        if not are_wrong(stored, matrix[at].float(), weight.dtype).any():
            return None
    arrangements = []
    for arranged in (matrix, matrix.T):
        if arranged.shape[1] == columns:
            arrangements.append(arranged)
    if not arrangements:
        raise UnreadError(
            f"their shape in the loaded model, {list(weight.shape)}, fits no stored row of "
            f"{columns}"
        )
    for arranged in arrangements:
        nearest = nearest_rows(stored, arranged.float())
        if not are_wrong(stored, nearest, weight.dtype).any():
            return None
    return described(checkpoint, sample, stored, most_alike(stored, arrangements[0].float()))


def loaded_matrix(weight: torch.Tensor, expert: int | None) -> torch.Tensor:
    """Return the matrix of one expert from a tensor of all, or a tensor that is one matrix."""
    if weight.ndim == 3 and expert is not None and expert < len(weight):
        return weight[expert]
    if weight.ndim != 2:
        raise UnreadError(f"their shape in the loaded model is {list(weight.shape)}")
    return weight


def bits_of(checkpoint: Checkpoint, module: str) -> int | None:
    """Return the bits of a module's integers, as the config declares or the shapes imply."""
    scheme = declared(checkpoint.config.quantization).of(module)
    if scheme:
        words = scheme.weights
    else:
        words = layout_of(checkpoint.quantized[module], checkpoint.config).words
    match = re.fullmatch(r"u?int(\d)", number_format(words))
    if match is None:
        return None
    return int(match[1])


def are_wrong(stored: torch.Tensor, loaded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return for each row True if it differs by more than rounding.

    ``dtype``: of the loaded weights.
    """
    import torch

    info = torch.finfo(dtype)
    # Of the smallest numbers, which have fewer digits.
    spacing = info.smallest_normal * info.eps
    allowed = TOLERANCE * stored.norm(dim=1) + spacing * stored.shape[1] ** 0.5
    within: torch.Tensor = (stored - loaded).norm(dim=1) <= allowed  # False for NaN
    return ~within


def nearest_rows(stored: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return for each stored row the nearest row of a matrix."""
    import torch

    distances = torch.cdist(stored, matrix, compute_mode="donot_use_mm_for_euclid_dist")
    return matrix[distances.nan_to_num(torch.inf).argmin(1)]


def most_alike(stored: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return for each stored row the matrix row of the most similar direction.

    Directions are compared instead of distances because an engine that leaves out a scale changes a
    row's length, but not its direction.
    """
    from torch.nn.functional import normalize

    cosines = normalize(stored, dim=1) @ normalize(matrix, dim=1).T
    return matrix[cosines.nan_to_num(-1.0).argmax(1)]


def described(
    checkpoint: Checkpoint, sample: Sample, stored: torch.Tensor, loaded: torch.Tensor
) -> Difference:
    """Return how the loaded rows differ from the stored ones, and why."""
    largest = float((stored - loaded).abs().max())
    return Difference(largest, float(stored.abs().max()), cause(checkpoint, sample, stored, loaded))


def cause(
    checkpoint: Checkpoint, sample: Sample, stored: torch.Tensor, loaded: torch.Tensor
) -> str:
    """Return the probable reason for a difference, for a message; "" if it is unknown."""
    import torch

    cosines = torch.nn.functional.cosine_similarity(stored, loaded, dim=1)
    factors = (stored * loaded).sum(1) / stored.square().sum(1)
    if (cosines > PARALLEL).all():
        factor = float(factors.median())
        for name, scale in dequantize.scalars(sample.parts).items():
            # The scale may have been left out where it multiplies or where it divides.
            if is_same_factor(factor, scale) or is_same_factor(factor, 1 / scale):
                return f" (all {factor:.4g} times as large: {name} was probably left out)"
        return f" (about {factor:.4g} times as large: a scale was probably left out)"
    if "weight_zero_point" in sample.parts:
        return " (weight_zero_point was probably left out)"
    if len(set(declared(checkpoint.config.quantization).schemes())) > 1:
        return " (the scheme of another group in config.json was probably used)"
    return ""


def is_same_factor(factor: float, scale: float) -> bool:
    """True if a scale explains a factor up to rounding."""
    return abs(factor / scale - 1) < SAME_FACTOR
