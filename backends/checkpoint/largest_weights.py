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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layers.module_names import NUMBER, is_outside
from ..layers.schemes import number_format
from .checkpoint_config import CheckpointConfig
from .folder import Checkpoint
from .formats import NUMBERS, POWERS, Parts, as_float32, layout_of
from .safetensors_files import Tensor
from .stored_sizes import Fault

LARGEST_WEIGHT = 1000.0
"""A layer's weights are below this number.

Weights of language models are below 1 to 20.  Norms that are folded into them, smoothing
(SmoothQuant, AWQ) or rotations that are not normalized raise that to some hundreds at most.  FP8
weights that were cast without a scale have a scale of 1, which allows 448.  Reciprocal scales of 8
bits, and of NVFP4, allow 10,000 to 10,000,000.
"""
UNUSUAL_WEIGHT, UNUSUAL_RATIO = 100.0, 100.0
"""A module's scales are wrong if they allow a weight above the first number, and if the module's
median scale is also more than the second number times the median of the same layers.

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
"""Number format -> its largest number.  A scale of 1 may also mean a cast to E5M2, whose largest
number is 57,344."""
LARGEST_FP8 = 448.0
"""The largest possible scale of a group of NVFP4."""
SCALES = (
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
LEAST, PLACES = 4096, 4
CAUSE = "the scale is probably stored as its reciprocal (1 / scale); convert or quantize the model again"


class Bound(NamedTuple):
    """The largest weight that a module's scales allow: ``scale`` is the scale that decides, in the
    tensor ``part``.

    ``usual``: the weight that the median of the scales allows, without those that are 1; None if
    all are 1.
    """

    part: str
    scale: float
    weight: float
    usual: float | None = None


def impossible(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Yield the scales of quantized matrices that allow impossible weights, and scales that are NaN
    or infinite.
    """
    quantized = {
        module: parts
        for module, parts in checkpoint.quantized.items()
        if checkpoint.role(module) in ("layer", "head") and not is_outside(module)
    }
    most = max(READ // max(len(quantized), 1), LEAST)
    bounds: dict[str, Bound] = {}
    kinds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        paths = {tensor.file for tensor in checkpoint.tensors.values()}
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in paths}
        for module, parts in quantized.items():
            try:
                found = bound_of(
                    parts,
                    checkpoint.config,
                    lambda scale: numbers_of(scale, files[scale.file], most),
                )
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                continue  # its parts fit no format; its size is then n/a
            if found is None:
                continue
            bounds[module] = found
            if found.usual is not None and math.isfinite(found.usual):
                kinds.setdefault(NUMBER.sub("*", module), []).append(found.usual)
    medians = {kind: statistics.median(weights) for kind, weights in kinds.items()}
    for module, found in bounds.items():
        name = f"{module}.{found.part}"
        if not math.isfinite(found.weight):
            yield Fault(
                name,
                f"a scale of {found.scale:g}, so that its weights are no numbers",
                "no numbers",
            )
        elif found.weight > LARGEST_WEIGHT or is_unusual(
            found, medians.get(NUMBER.sub("*", module))
        ):
            what = f"a scale of {found.scale:.4g} allows weights up to {found.weight:,.0f}, which no layer has"
            yield Fault(name, what, "scale")


def is_unusual(found: Bound, median: float | None) -> bool:
    """True if weights are large in the whole module; ``median``: of the ``usual`` weights of the
    same layers.
    """
    if median is None or found.usual is None:
        return False
    return found.weight > UNUSUAL_WEIGHT and found.usual > UNUSUAL_RATIO * median


def bound_of(
    parts: Parts, config: CheckpointConfig, read: Callable[[Tensor], NDArray[np.float32]]
) -> Bound | None:
    """Return the bound of one module, from its scales as ``read`` returns them; None if its format
    is unknown.
    """
    kind = number_format(layout_of(parts, config).words)
    part = next((name for name in SCALES if name in parts), "")
    code = code_of(kind, part)
    if not part or code is None or not parts[part].numel:
        return None
    if part == "weight.absmax" and parts[part].dtype == "U8":  # nested: indices into a table
        return None
    if kind == "nvfp4" and part not in ("weight_global_scale", "weight_scale_2"):
        return None
    scales = read(parts[part])
    with np.errstate(divide="ignore"):
        multipliers = 1 / scales if part == "weight_global_scale" else scales
    numbers = multipliers.reshape(-1)
    scaled = np.flatnonzero(numbers != 1)
    decisive = int(numbers.argmax())  # of a NaN, if there is one
    if kind == "nvfp4":
        if len(scaled):  # otherwise an expert whose weights are all zero would decide for a stack
            decisive = int(scaled[numbers[scaled].argmax()])
        code *= largest_group_scale(parts, code * float(numbers[decisive]), read)
    usual = None
    if len(scaled):
        middle = len(scaled) // 2
        usual = code * float(
            np.partition(numbers[scaled], middle)[middle]
        )  # np.median takes four times as long
    return Bound(part, float(scales.reshape(-1)[decisive]), code * float(numbers[decisive]), usual)


def largest_group_scale(
    parts: Parts, weight: float, read: Callable[[Tensor], NDArray[np.float32]]
) -> float:
    """The largest scale of a group of NVFP4; it is read only if the largest possible one would
    allow large weights.

    ``weight``: the largest weight in a group whose scale is 1.
    """
    groups = parts.get("weight_scale")
    if groups is None or not math.isfinite(weight) or weight * LARGEST_FP8 <= UNUSUAL_WEIGHT:
        return LARGEST_FP8
    return float(np.fmax.reduce(read(groups), axis=None, initial=0.0))  # without NaN


def code_of(kind: str, part: str) -> float | None:
    """The largest number of a format, before its scale; None if it is not known."""
    if part in ("SCB", "weight.absmax"):  # bitsandbytes stores the largest weight itself
        return 1.0
    if integers := re.fullmatch(r"(u?)int([2-8])", kind):
        # Without zero points, codes reach from -2^(bits - 1); with them, up to 2^bits from the zero
        # point.
        return 2.0 ** (int(integers[2]) - (0 if integers[1] else 1))
    return LARGEST_CODE.get(kind)


def numbers_of(scale: Tensor, file: RawIOBase, most: int) -> NDArray[np.float32]:
    """Return the absolute values of a scale; only a sample if the tensor has more than ``most``
    bytes.
    """
    size = scale.nbytes // scale.numel
    if scale.nbytes <= most:
        places, length = [scale.start], scale.nbytes
    else:
        length = max(most // PLACES // size, 1) * size
        last = scale.numel - length // size
        places = [scale.start + size * (last * place // (PLACES - 1)) for place in range(PLACES)]
    # A map of each tensor takes ten times as long for a model with many experts.
    read = b"".join(os.pread(file.fileno(), length, place) for place in places)
    found = np.frombuffer(read, NUMBERS[scale.dtype])
    if scale.dtype in POWERS:
        return np.exp2(found.view(np.uint8).astype(np.float32) - 127)
    return np.abs(as_float32(found, scale.dtype))
