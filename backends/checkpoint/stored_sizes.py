"""Compare the tensors of each quantized matrix with the sizes that the config states for it.

Some engines use the tensors' sizes, others the config's.  If half of the scales are lost,
Transformers takes the rest for the scales of larger groups, without a warning.  vLLM fails with an
error that does not name a tensor.  The check reads headers, and the first values of zero points
that the config rules out.

These differences are not contradictions, because engines read them correctly:

- A last group or block that is not full: 576 columns have 5 groups of 128.
- int4 in whole bytes (compressed-tensors' int-quantized).
- Zero points that are all zero, in a symmetric scheme.
- Stacked experts whose matrices are stored transposed.  Only the number of their scales is
  compared.

A method is not compared if its config does not state the size of a group (bitsandbytes, EXL3), or
if compare_q does not read the method.  The exceptions have fixed sizes: 16 weights per group of
NVFP4, and 32 per group of MXFP4 and MXFP8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layers.module_names import is_outside
from ..layers.schemes import Declared, Scheme, declared, ignored_names, is_ignored, number_format
from .checkpoint_config import CheckpointConfig
from .folder import Checkpoint
from .formats import (
    NUMBERS,
    POWERS,
    SMALL,
    Parts,
    layout_of,
    main_part,
    scale_grid,
    stored,
    tile,
)
from .safetensors_files import Tensor

SCALES = ("weight_scale", "weight_scale_inv", "scale")
"""Names of the scales next to ``weight`` and ``weight_packed``."""
GROUP = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
"""Number format -> the number of weights in each of its groups."""
NO_SIZES = ("bitsandbytes", "exl3")
"""Methods whose config does not state the size of a group."""
TENSOR_BY_DEFAULT = ("fp8", "deepseek_v4_fp8")
"""Methods that mean one scale for a matrix if they state no size of a block."""
NEUTRAL = {0, 0x77777777, 0x88888888, 0x7F7F7F7F, 0x80808080, 8, 128}
"""Zero points that mean "none": zeros, and the middle of 4 and 8 bits, packed in 32 bits or not."""
REQUANTIZE = "quantize the model again, or give it the config.json that belongs to these files"


class Fault(NamedTuple):
    """A tensor that cannot be right, what is wrong with it, and the kind of this fault."""

    tensor: str
    what: str
    kind: str


class Sizes(NamedTuple):
    """Sizes of a quantized matrix: ``rows`` are outputs, ``columns`` inputs; ``matrices``: how many
    are stacked.
    """

    rows: int
    columns: int
    matrices: int = 1


def contradictions(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Yield the first contradiction between config and tensors of each quantized matrix."""
    quantization = checkpoint.config.quantization
    stated, ignored = declared(quantization), ignored_names(quantization)
    for module, parts in checkpoint.quantized.items():
        if is_outside(module) or not checkpoint.role(module) or is_ignored(module, ignored):
            continue
        try:
            found = contradiction(parts, checkpoint.config, stated, module)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            continue  # its shapes fit no format; its size is then n/a
        if found is not None:
            part, what, kind = found
            yield Fault(f"{module}.{part}", what, kind)


def contradiction(
    parts: Parts, config: CheckpointConfig, stated: Declared, module: str
) -> Fault | None:
    """Return the contradiction between one module and its scheme; the fault names the tensor by its
    part.
    """
    scheme = stated.of(module)
    found = against(parts, config, scheme)
    if found is not None and scheme is not None and scheme == stated.default:
        # A checkpoint's names may differ from those that the config's patterns describe.
        others = [other for other in stated.schemes() if other != scheme]
        if any(against(parts, config, other) is None for other in others):
            return None
    return found


def against(parts: Parts, config: CheckpointConfig, scheme: Scheme | None) -> Fault | None:
    """Return the contradiction between one module and this scheme; ``scheme``: None if the config's
    is not known.
    """
    main = main_part(parts)
    if config.quant_method in NO_SIZES:
        return None
    if main == "qweight":
        return None if scheme is None else packed_integers(parts, config.quantization, scheme)
    if main not in ("weight", "weight_packed"):
        return None
    name = next((name for name in SCALES if name in parts), None)
    if name is None:
        return None
    kept = number_format(layout_of(parts, config).words)
    if scheme is not None and scheme.weights:
        words = scheme.weights
    else:
        words = f"{kept} g{GROUP[kept]}" if kept in GROUP else ""
    if not words:
        return None
    kind = number_format(words)
    if config.quant_method == "compressed-tensors":
        if kept and class_of(kept) != class_of(kind):
            return Fault(main, f"stored in {kept}, and the config says {kind}", "number format")
        if fault := zero_point_fault(parts, scheme) or bits_fault(parts, kind):
            return fault
    elif kept and class_of(kept) != class_of(kind):
        return None  # a mixture that the config does not describe
    sizes = sizes_of(parts, kind)
    if sizes is None:
        return None
    is_stated = config.quant_method not in TENSOR_BY_DEFAULT
    what = scales_fault(parts[name], sizes, words.partition(" ")[2], is_stated=is_stated)
    if not what and kind in GROUP and words != f"{kind} g{GROUP[kind]}":
        what = f"the config says {in_words(words.partition(' ')[2])}, and {kind} always has groups of {GROUP[kind]}"
    return Fault(name, what, "scales") if what else None


def class_of(kind: str) -> str:
    """Return the kind of numbers, without bits if the stored bits may differ: "int", "fp8",
    "nvfp4", "mxfp4".
    """
    return "fp8" if kind == "mxfp8" else re.sub(r"^u?int\d*$", "int", kind)


def sizes_of(parts: Parts, kind: str) -> Sizes | None:
    """The sizes of a matrix in ``weight`` or ``weight_packed`` of this number format; None if they
    are not known.
    """
    if (shape := parts.get("weight_shape")) is not None and "weight_packed" in parts:
        lengths = [int(size) for size in stored(shape).reshape(-1)]
        return (
            Sizes(*lengths)
            if len(lengths) == 2 and len(parts["weight_packed"].shape) == 2
            else None
        )
    weight = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    scale = next(parts[name] for name in SCALES if name in parts)
    *stack, rows, columns = weight.shape
    if kind in ("nvfp4", "mxfp4"):
        if len(weight.shape) == 4:  # gpt-oss: [experts, out, in / 32, 16]
            stack, rows, columns = (
                [weight.shape[0]],
                weight.shape[1],
                weight.shape[2] * weight.shape[3],
            )
        is_packed = weight.dtype == "U8" or (weight.dtype == "I8" and scale.dtype in POWERS)
        return Sizes(rows, columns * 2, math.prod(stack)) if is_packed else None
    if weight.dtype == "I8" or weight.dtype.startswith("F8_E"):
        return Sizes(rows, columns, math.prod(stack))
    return None


def scales_fault(scale: Tensor, sizes: Sizes, granularity: str, *, is_stated: bool = True) -> str:
    """How the scales differ from a granularity ("g32", "channel", ...); "" if they do not, or if it
    is not known.

    ``is_stated``: the config states the granularity; otherwise "tensor" only means that it states
    no blocks, and a scale for each row is accepted.
    """
    rows, columns, matrices = sizes
    wanted = grid_of(granularity, rows, columns)
    if wanted is None or min(rows, columns) < 1:
        return ""
    if matrices > 1 or len(scale.shape) == 3:
        known = stacked_counts(granularity, sizes)
        if not is_stated and granularity == "tensor":
            known |= stacked_counts("channel", sizes)
        what = f"{scale.numel:,} scales for {matrices:,} matrices of {rows:,} x {columns:,}"
        return (
            "" if scale.numel in known else f"{what}, and the config says {in_words(granularity)}"
        )
    grid = scale_grid(scale, rows)
    if math.prod(wanted) == scale.numel and (1 in wanted or grid == wanted):
        return ""
    if not is_stated and granularity == "tensor" and grid == (rows, 1):
        return ""
    return f"{grid_in_words(grid, rows, columns)}, and the config says {in_words(granularity)}"


def grid_of(granularity: str, rows: int, columns: int) -> tuple[int, int] | None:
    """(rows, columns) of the scales of a matrix; None if the granularity is not known."""
    if granularity == "tensor":
        return 1, 1
    if granularity == "channel":
        return rows, 1
    if group := re.fullmatch(r"g(\d{1,9})", granularity):
        return rows, -(-columns // int(group[1]))
    if block := re.fullmatch(r"block (\d{1,9})x(\d{1,9})", granularity):
        return -(-rows // int(block[1])), -(-columns // int(block[2]))
    return None


def stacked_counts(granularity: str, sizes: Sizes) -> set[int]:
    """Numbers of scales that stacked matrices may have, stored as they are or transposed.

    Each matrix may consist of two, gate and up, and each of the two may have its own scale or
    blocks.
    """
    found = {1, 2 * sizes.matrices} if granularity == "tensor" else set[int]()
    for rows, columns in ((sizes.rows, sizes.columns), (sizes.columns, sizes.rows)):
        for height, width, number in (
            (rows, columns, 1),
            (rows // 2, columns, 2),
            (rows, columns // 2, 2),
        ):
            grid = grid_of(granularity, height, width)
            found |= (
                {sizes.matrices * number * math.prod(grid)}
                if grid and granularity != "tensor"
                else {sizes.matrices}
            )
    if granularity.startswith("g"):  # transposed bytes of two weights
        found.add(sizes.matrices * sizes.rows * sizes.columns // int(granularity[1:]))
    return found


def grid_in_words(grid: tuple[int, int], rows: int, columns: int) -> str:
    """``9 groups of 64``, ``one scale per row``, ``one scale``, or ``4 x 5 scales for 576 x 576
    weights``.
    """
    if grid == (1, 1):
        return "one scale for the whole matrix"
    if grid[0] != rows:
        return f"{grid[0]:,} x {grid[1]:,} scales for {rows:,} x {columns:,} weights"
    return (
        "one scale per row" if grid[1] == 1 else f"{grid[1]:,} groups of {tile(columns, grid[1]):,}"
    )


def in_words(granularity: str) -> str:
    """Return a granularity as words that end a message: ``groups of 32``, ``one scale per row``,
    ...
    """
    if granularity.startswith("g"):
        return f"groups of {granularity[1:]}"
    if granularity.startswith("block "):
        return f"blocks of {granularity.removeprefix('block ').replace('x', ' x ')}"
    return {"channel": "one scale per row", "tensor": "one scale for the whole matrix"}[granularity]


def bits_fault(parts: Parts, kind: str) -> Fault | None:
    """Words of 32 bits whose number does not follow from the stated bits (compressed-tensors'
    ``weight_packed``).
    """
    packed, bits = parts.get("weight_packed"), re.fullmatch(r"u?int([2-8])", kind)
    if packed is None or packed.dtype != "I32" or bits is None or len(packed.shape) != 2:
        return None
    sizes = sizes_of(parts, kind)
    if sizes is None:
        return None
    wanted = sizes.rows, -(-sizes.columns // (32 // int(bits[1])))
    if packed.shape == wanted:
        return None
    what = f"{packed.shape[0]:,} x {packed.shape[1]:,} words for {sizes.rows:,} x {sizes.columns:,} weights, and the "
    return Fault("weight_packed", f"{what}config says {bits[1]} bits", "bits")


def zero_point_fault(parts: Parts, scheme: Scheme | None) -> Fault | None:
    """Zero points in a symmetric scheme, or zero points for other groups than the scales'
    (compressed-tensors).

    If a scheme that is not symmetric has no zero points at all, they are missing tensors
    (``contents.lacking_parts``).
    """
    points, scale = parts.get("weight_zero_point"), parts.get("weight_scale")
    if points is None or scale is None or len(points.shape) != 2 or len(scale.shape) != 2:
        return None
    if points.shape[1] != scale.shape[1]:
        what = (
            f"zero points for {points.shape[1]:,} groups, and its scales are for {scale.shape[1]:,}"
        )
        return Fault("weight_zero_point", what, "zero points")
    if scheme is not None and scheme.zero_points is False and not is_neutral(points):
        return Fault(
            "weight_zero_point", "zero points, and the config says symmetric", "zero points"
        )
    return None


def is_neutral(points: Tensor) -> bool:
    """True if the first zero points (or words of several) all equal one value that means "no zero
    point".
    """
    found = first_numbers(points)
    return not len(found) or (
        bool((found == found[0]).all()) and int(found[0]) & 0xFFFFFFFF in NEUTRAL
    )


def packed_integers(parts: Parts, quantization: Mapping[str, Any], scheme: Scheme) -> Fault | None:
    """Return the contradiction between a GPTQ or AWQ module and its scheme.

    GPTQ: qweight [in * bits / 32, out]; AWQ: [in, out * bits / 32]; both: scales [groups, out].
    AWQ's other layouts, "gemv" and "gemv_fast", are not compared.
    """
    packed, scales, zeros, indices = (
        parts.get(name) for name in ("qweight", "scales", "qzeros", "g_idx")
    )
    stated = re.fullmatch(r"u?int([2-8])", number_format(scheme.weights))
    layouts = [
        str(quantization.get(key)).lower()
        for key in ("version", "checkpoint_format", "packing_format")
    ]
    if (
        packed is None
        or scales is None
        or stated is None
        or any("gemv" in layout for layout in layouts)
    ):
        return None
    if packed.dtype != "I32" or len(packed.shape) != 2 or len(scales.shape) != 2:
        return None
    bits, (groups, outputs) = int(stated[1]), scales.shape
    is_gptq = packed.shape[1] == outputs
    if is_gptq:
        n_indices = indices.numel if indices is not None else 0
        inputs = n_indices or packed.shape[0] * 32 // bits
        fits = packed.shape[0] in words_of(inputs, bits)
    else:
        inputs = packed.shape[0]
        fits = packed.shape[1] in words_of(outputs, bits)
    if not fits:
        what = f"{packed.shape[0]:,} x {packed.shape[1]:,} words for {outputs:,} x {inputs:,} weights, and the config "
        return Fault("qweight", f"{what}says {bits} bits", "bits")
    if zeros is not None and zeros.shape[-1] not in words_of(outputs, bits):
        what = f"{zeros.shape[-1]:,} words for {outputs:,} outputs, and the config says {bits} bits"
        return Fault("qzeros", what, "bits")
    granularity = scheme.weights.partition(" ")[2]
    wanted = grid_of(granularity, outputs, inputs)
    if wanted is not None and wanted[1] != groups:
        stored_words = (
            "one scale per output"
            if groups == 1
            else f"{groups:,} groups of {tile(inputs, groups):,}"
        )
        return Fault(
            "scales", f"{stored_words}, and the config says {in_words(granularity)}", "scales"
        )
    if zeros is not None and zeros.shape[0] != groups:
        return Fault(
            "qzeros",
            f"zero points for {zeros.shape[0]:,} groups, and scales for {groups:,}",
            "zero points",
        )
    is_constant = is_gptq and scheme.zero_points is False and bits in (2, 4, 8)
    if is_constant and zeros is not None and varies(zeros, outputs * bits):
        return Fault(
            "qzeros", "zero points that differ, and the config says sym: true", "zero points"
        )
    return None


def words_of(numbers: int, bits: int) -> set[int]:
    """Numbers of 32-bit words that can hold this many numbers; writers round either way."""
    return {numbers * bits // 32, -(-numbers * bits // 32), -(-numbers // (32 // bits))}


def varies(zeros: Tensor, row_bits: int) -> bool:
    """True if the first packed zero points differ; False if the last word of a row is not full, and
    may then differ.
    """
    if row_bits % 32 or not zeros.numel:
        return False
    found = first_numbers(zeros)
    return bool(np.any(found != found[0]))


def first_numbers(tensor: Tensor) -> NDArray[Any]:
    """The first numbers of a tensor, at most 4 KiB: a model may have 100,000 of these tensors on a
    network disk.

    Real zero points differ within the first row.
    """
    size = np.dtype(NUMBERS[tensor.dtype]).itemsize
    count = min(tensor.numel, SMALL // size)
    return stored(tensor._replace(shape=(count,), nbytes=count * size))
