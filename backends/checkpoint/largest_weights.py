"""Find impossible scales: they allow weights far above the largest weight of any language model.

The usual cause is a scale that is stored as its reciprocal: compressed-tensors divides by
``weight_global_scale``, and ModelOpt multiplies by ``weight_scale_2``.  An engine then computes
with weights of a million.  Its row shows uniform predictions without a warning, or its states are
not finite.

A format's largest code times a scale is a bound, because quantizers choose the scale so that the
largest weight gets about the largest code.  Only scales are read.  For NVFP4, the global scales are
enough if they rule out large weights.  For very large models, a part of each tensor is read, at
least 4 KiB.  Embeddings are left out: some models multiply them by a number below 1 afterwards.

A scale of exactly 1 bounds nothing.  Quantizers give it to a matrix, block or expert whose weights
are all zero (compressed-tensors for NVFP4, Transformers for FP8), and to FP8 weights that were cast
without a scale.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layers.module_names import is_outside, kind_of
from ..layers.schemes import number_format
from .checkpoint_config import CheckpointConfig
from .folder import Checkpoint
from .formats import NUMPY_TYPES, POWERS, Parts, as_float32, layout_of
from .safetensors_files import Tensor
from .stored_sizes import Fault

LARGEST_WEIGHT = 1000.0
"""A layer's weights are below this number.

Weights of language models are below 1 to 20.  Norms that are folded into them, smoothing
(SmoothQuant, AWQ) or rotations that are not normalized raise that to some hundreds at most.  FP8
weights that were cast without a scale have a scale of 1, which allows 448.  Reciprocal scales of 8
bits, and of NVFP4, allow 10,000 to 10,000,000.
"""
UNUSUAL_WEIGHT = 100.0
UNUSUAL_RATIO = 100.0
"""A module's scales are wrong if they are large in two ways.

They allow a weight above ``UNUSUAL_WEIGHT``, and the module's median scale is more than
``UNUSUAL_RATIO`` times the median of the same layers.

Reciprocal scales of 4 bits may allow only hundreds (310 to 16,000 in SmolLM2-135M, whose true
bounds are 0.4 to 5).  The median scale must be large too (there, 420 times the median of the other
layers).  One large weight in a layer is possible, but it makes only the scale of one group or row
large.
"""
LARGEST_CODE = {
    "nvfp4": 6.0,
    "mxfp4": 6.0,
    "mxfp6": 28.0,
    "mxfp8": 448.0,
    "fp8": 448.0,
    "nf4": 1.0,
    "fp4": 1.0,
}
"""Number format -> its largest number.

A scale of 1 may also mean a cast to E5M2, whose largest number is 57,344.
"""
LARGEST_FP8 = 448.0
"""The largest possible scale of a group of NVFP4."""
BOUNDING_SCALES = (
    "weight_global_scale",
    "weight_scale_2",
    "SCB",
    "weight.absmax",
    "weight_scale",
    "weight_scale_inv",
    "scale",
    "scales",
    "_weight_scale",
)
"""Names of scales; the first one that a module has bounds its weights."""
READ = 128 << 20
"""Bytes of scales that are read in total; at least ``LEAST`` of each tensor."""
LEAST = 4096
PLACES = 4
"""Number of places in a large tensor that a sample is read from."""
CAUSE = (
    "the scale is probably stored as its reciprocal (1 / scale); "
    "convert or quantize the model again"
)
Read = Callable[[Tensor], NDArray[np.float32]]
"""Reads the absolute values of a scale, or a sample of them (``numbers_of``)."""


class Bound(NamedTuple):
    """The largest weight that a module's scales allow."""

    part: str  # the tensor with the scale that decides
    scale: float  # the scale that decides, as it is stored
    weight: float
    # the weight that the median of the scales allows, without those that are 1; None if all are 1
    median_weight: float | None = None


def impossible(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Yield the scales of quantized matrices that allow impossible weights.

    Scales that are NaN or infinite are yielded too.
    """
    bounds = bounds_of(checkpoint)
    weights_of_kind: dict[str, list[float]] = {}
    for module, bound in bounds.items():
        if bound.median_weight is not None and math.isfinite(bound.median_weight):
            kind = kind_of(module)
            weights_of_kind.setdefault(kind, []).append(bound.median_weight)
    medians = {kind: statistics.median(weights) for kind, weights in weights_of_kind.items()}
    for module, bound in bounds.items():
        name = f"{module}.{bound.part}"
        median = medians.get(kind_of(module))
        if not math.isfinite(bound.weight):
            what = f"a scale of {bound.scale:g}, so that its weights are no numbers"
            yield Fault(name, what, "no numbers")
        elif bound.weight > LARGEST_WEIGHT or is_unusual(bound, median):
            what = (
                f"a scale of {bound.scale:.4g} allows weights up to {bound.weight:,.0f}, "
                "which no layer has"
            )
            yield Fault(name, what, "scale")


def bounds_of(checkpoint: Checkpoint) -> dict[str, Bound]:
    """Return module -> bound of the quantized layers and heads whose formats are known."""
    quantized = {}
    for module, parts in checkpoint.quantized.items():
        if checkpoint.role(module) in ("layer", "head") and not is_outside(module):
            quantized[module] = parts
    most = max(READ // max(len(quantized), 1), LEAST)
    bounds: dict[str, Bound] = {}
    with ExitStack() as stack:
        files: dict[Path, RawIOBase] = {}
        for path in {tensor.file for tensor in checkpoint.tensors.values()}:
            files[path] = stack.enter_context(path.open("rb", buffering=0))

        def read(scale: Tensor) -> NDArray[np.float32]:
            return numbers_of(scale, files[scale.file], most)

        for module, parts in quantized.items():
            try:
                bound = bound_of(parts, checkpoint.config, read)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                # Its parts fit no format; its size is then n/a.
                continue
            if bound is not None:
                bounds[module] = bound
    return bounds


def is_unusual(bound: Bound, median: float | None) -> bool:
    """Return True if the largest and the median weight of a module are unusual.

    ``median``: the median of such median weights, over the same module in all layers.
    """
    if median is None or bound.median_weight is None:
        return False
    return bound.weight > UNUSUAL_WEIGHT and bound.median_weight > UNUSUAL_RATIO * median


def bound_of(parts: Parts, config: CheckpointConfig, read: Read) -> Bound | None:
    """Return the bound of one module from its scales; None if its format is unknown."""
    kind = number_format(layout_of(parts, config).words)
    part = next((name for name in BOUNDING_SCALES if name in parts), "")
    largest_code = code_of(kind, part)
    if not part or largest_code is None or not parts[part].numel:
        return None
    # bitsandbytes' nested scales are indices into a table.
    if part == "weight.absmax" and parts[part].dtype == "U8":
        return None
    if kind == "nvfp4" and part not in ("weight_global_scale", "weight_scale_2"):
        return None
    scales = read(parts[part])
    multipliers: NDArray[Any] = scales
    if part == "weight_global_scale":
        with np.errstate(divide="ignore"):
            multipliers = 1 / scales
    numbers = multipliers.reshape(-1)
    scaled = np.flatnonzero(numbers != 1)
    # The place of a NaN, if there is one.
    decisive = int(numbers.argmax())
    if kind == "nvfp4":
        # In a stack, an expert whose weights are all zero has a scale of 1, which must not decide.
        if len(scaled):
            decisive = int(scaled[numbers[scaled].argmax()])
        largest_code *= largest_group_scale(parts, largest_code * float(numbers[decisive]), read)
    median_weight = None
    if len(scaled):
        # np.median takes four times as long.
        middle = len(scaled) // 2
        median_weight = largest_code * float(np.partition(numbers[scaled], middle)[middle])
    stored_scale = float(scales.reshape(-1)[decisive])
    return Bound(part, stored_scale, largest_code * float(numbers[decisive]), median_weight)


def largest_group_scale(parts: Parts, weight: float, read: Read) -> float:
    """Return the largest scale of a group of NVFP4, or the largest possible one.

    ``weight``: the largest weight in a group whose scale is 1.  The scales are read only if the
    largest possible one would allow large weights.
    """
    groups = parts.get("weight_scale")
    if groups is None or not math.isfinite(weight) or weight * LARGEST_FP8 <= UNUSUAL_WEIGHT:
        return LARGEST_FP8
    # Unlike max, fmax ignores NaN.
    return float(np.fmax.reduce(read(groups), axis=None, initial=0.0))


def code_of(kind: str, part: str) -> float | None:
    """Return the largest number of a format, before its scale; None if it is not known."""
    # bitsandbytes stores the largest weight itself.
    if part in ("SCB", "weight.absmax"):
        return 1.0
    integers = re.fullmatch(r"(u?)int([2-8])", kind)
    if integers is None:
        return LARGEST_CODE.get(kind)
    bits = int(integers[2])
    # With zero points, codes reach up to 2^bits from the zero point; without, from -2^(bits - 1).
    if integers[1]:
        return 2.0**bits
    return 2.0 ** (bits - 1)


def numbers_of(scale: Tensor, file: RawIOBase, most: int) -> NDArray[np.float32]:
    """Return the absolute values of a scale; a sample if it has more than ``most`` bytes."""
    size = scale.nbytes // scale.numel
    starts = [scale.start]
    length = scale.nbytes
    if scale.nbytes > most:
        length = max(most // PLACES // size, 1) * size
        last = scale.numel - length // size
        starts = []
        for place in range(PLACES):
            starts.append(scale.start + size * (last * place // (PLACES - 1)))
    # A map of each tensor takes ten times as long for a model with many experts.
    data = b"".join(os.pread(file.fileno(), length, start) for start in starts)
    numbers = np.frombuffer(data, NUMPY_TYPES[scale.dtype])
    if scale.dtype in POWERS:
        return np.exp2(numbers.view(np.uint8).astype(np.float32) - 127)
    return np.abs(as_float32(numbers, scale.dtype))
