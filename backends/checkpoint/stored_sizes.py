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
    NUMPY_TYPES,
    POWERS,
    SMALL_TENSOR_BYTES,
    WEIGHT_SCALES,
    Parts,
    layout_of,
    main_part,
    scale_grid,
    stored,
    tile,
)
from .safetensors_files import Tensor

GROUP_SIZES = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
"""Number format -> the number of weights in each of its groups."""
NO_SIZES = ("bitsandbytes", "exl3")
"""Methods whose config does not state the size of a group."""
TENSOR_BY_DEFAULT = ("fp8", "deepseek_v4_fp8")
"""Methods that mean one scale for a matrix if they state no size of a block."""
NEUTRAL = {0, 0x77777777, 0x88888888, 0x7F7F7F7F, 0x80808080, 8, 128}
"""Zero points that mean "none": zeros, and the middle of 4 and 8 bits, packed in 32 bits or not."""
INTEGER_FORMAT = re.compile(r"u?int([2-8])")
"""Number formats of integers, with their bits."""
REQUANTIZE = "quantize the model again, or give it the config.json that belongs to these files"


class Fault(NamedTuple):
    """A tensor that cannot be right, what is wrong with it, and the kind of this fault."""

    tensor: str
    what: str
    kind: str


class Sizes(NamedTuple):
    """Sizes of a quantized matrix."""

    rows: int  # outputs
    columns: int  # inputs
    matrices: int = 1  # number of stacked matrices


def contradictions(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Yield the first contradiction between config and tensors of each quantized matrix."""
    quantization = checkpoint.config.quantization
    declared_schemes = declared(quantization)
    ignored = ignored_names(quantization)
    for module, parts in checkpoint.quantized.items():
        if is_outside(module) or not checkpoint.role(module) or is_ignored(module, ignored):
            continue
        try:
            fault = contradiction(parts, checkpoint.config, declared_schemes, module)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            # Its shapes fit no format; its size is then n/a.
            continue
        if fault is not None:
            yield fault._replace(tensor=f"{module}.{fault.tensor}")


def contradiction(
    parts: Parts, config: CheckpointConfig, declared_schemes: Declared, module: str
) -> Fault | None:
    """Return the contradiction between one module and its scheme.

    The fault names the tensor by its part.
    """
    scheme = declared_schemes.of(module)
    fault = scheme_fault(parts, config, scheme)
    if fault is not None and scheme is not None and scheme == declared_schemes.default:
        # A checkpoint's names may differ from those that the config's patterns describe.
        for other in declared_schemes.schemes():
            if other != scheme and scheme_fault(parts, config, other) is None:
                return None
    return fault


def scheme_fault(parts: Parts, config: CheckpointConfig, scheme: Scheme | None) -> Fault | None:
    """Return the contradiction between one module and this scheme; None if they fit.

    ``scheme``: None if the config's is not known.
    """
    main = main_part(parts)
    if config.quant_method in NO_SIZES:
        return None
    if main == "qweight":
        if scheme is None:
            return None
        return packed_integers(parts, config.quantization, scheme)
    if main not in ("weight", "weight_packed") or not scale_name(parts):
        return None
    stored_format = number_format(layout_of(parts, config).words)
    stated_words = words_of_scheme(scheme, stored_format)
    if not stated_words:
        return None
    stated_format = number_format(stated_words)
    is_same_class = format_class(stored_format) == format_class(stated_format)
    is_other_format = stored_format != "" and not is_same_class
    if config.quant_method != "compressed-tensors":
        if is_other_format:
            # A mixture that the config does not describe.
            return None
        return granularity_fault(parts, config, stated_words)
    if is_other_format:
        what = f"stored in {stored_format}, and the config says {stated_format}"
        return Fault(main, what, "number format")
    fault = zero_point_fault(parts, scheme)
    if fault is None:
        fault = bits_fault(parts, stated_format)
    if fault is None:
        fault = granularity_fault(parts, config, stated_words)
    return fault


def words_of_scheme(scheme: Scheme | None, stored_format: str) -> str:
    """Return the words for weights in a scheme, or those of a format with groups of one size.

    They are "" if neither is known.
    """
    if scheme is not None and scheme.weights:
        return scheme.weights
    if stored_format in GROUP_SIZES:
        return f"{stored_format} g{GROUP_SIZES[stored_format]}"
    return ""


def granularity_fault(parts: Parts, config: CheckpointConfig, words: str) -> Fault | None:
    """Return a fault if the scales do not have the granularity in ``words`` ("int4 g32")."""
    kind = number_format(words)
    granularity = words.partition(" ")[2]
    sizes = sizes_of(parts, kind)
    if sizes is None:
        return None
    name = scale_name(parts)
    is_stated = config.quant_method not in TENSOR_BY_DEFAULT
    what = scales_fault(parts[name], sizes, granularity, is_stated=is_stated)
    if not what and kind in GROUP_SIZES and words != f"{kind} g{GROUP_SIZES[kind]}":
        what = (
            f"the config says {in_words(granularity)}, "
            f"and {kind} always has groups of {GROUP_SIZES[kind]}"
        )
    if not what:
        return None
    return Fault(name, what, "scales")


def scale_name(parts: Parts) -> str:
    """Return the name of a matrix's scales; "" if it has none."""
    return next((name for name in WEIGHT_SCALES if name in parts), "")


def format_class(name: str) -> str:
    """Return the class of a number format: "int", "fp8", "nvfp4", "mxfp4", ...

    Two formats of one class do not contradict each other by themselves.  All integers are "int":
    ``bits_fault`` compares their bits.  mxfp8 is FP8 in groups of 32, and therefore "fp8":
    ``granularity_fault`` compares the groups.
    """
    if name == "mxfp8":
        return "fp8"
    return re.sub(r"^u?int\d*$", "int", name)


def sizes_of(parts: Parts, kind: str) -> Sizes | None:
    """Return the sizes of a matrix of this number format; None if they are not known."""
    weight = parts.get("weight_packed")
    shape = parts.get("weight_shape")
    if weight is not None and shape is not None:
        lengths = [int(size) for size in stored(shape).reshape(-1)]
        if len(lengths) != 2 or len(weight.shape) != 2:
            return None
        return Sizes(lengths[0], lengths[1])
    if weight is None:
        weight = parts["weight"]
    *stack, rows, columns = weight.shape
    if kind in ("nvfp4", "mxfp4"):
        scale = parts[scale_name(parts)]
        if weight.dtype != "U8" and not (weight.dtype == "I8" and scale.dtype in POWERS):
            return None
        if len(weight.shape) == 4:
            # gpt-oss: [experts, out, in / 32, 16]
            n_experts, rows, n_blocks, block_bytes = weight.shape
            return Sizes(rows, n_blocks * block_bytes * 2, n_experts)
        # A byte holds two weights.
        return Sizes(rows, columns * 2, math.prod(stack))
    if weight.dtype == "I8" or weight.dtype.startswith("F8_E"):
        return Sizes(rows, columns, math.prod(stack))
    return None


def scales_fault(scale: Tensor, sizes: Sizes, granularity: str, *, is_stated: bool = True) -> str:
    """Return how the scales differ from a granularity ("g32", "channel", ...).

    "" if they do not differ, or if the granularity is not known.  ``is_stated``: the config itself
    states the granularity.  If it does not, "tensor" is only assumed because the config has no
    block size.  Then a matrix [512, 256] may have one scale, or 512 scales, one for each row.
    """
    rows, columns, matrices = sizes
    stated_grid = grid_of(granularity, rows, columns)
    if stated_grid is None or min(rows, columns) < 1:
        return ""
    accepts_rows = not is_stated and granularity == "tensor"
    if matrices > 1 or len(scale.shape) == 3:
        counts = stacked_counts(granularity, sizes)
        if accepts_rows:
            counts |= stacked_counts("channel", sizes)
        if scale.numel in counts:
            return ""
        what = f"{scale.numel:,} scales for {matrices:,} matrices of {rows:,} x {columns:,}"
        return f"{what}, and the config says {in_words(granularity)}"
    grid = scale_grid(scale, rows)
    # A single row or column of scales may be stored in several shapes: [8], [8, 1], [1, 8].
    if math.prod(stated_grid) == scale.numel and (1 in stated_grid or grid == stated_grid):
        return ""
    if accepts_rows and grid == (rows, 1):
        return ""
    return f"{grid_in_words(grid, rows, columns)}, and the config says {in_words(granularity)}"


def grid_of(granularity: str, rows: int, columns: int) -> tuple[int, int] | None:
    """Return (rows, columns) of the scales of a matrix; None if the granularity is not known."""
    if granularity == "tensor":
        return 1, 1
    if granularity == "channel":
        return rows, 1
    group = re.fullmatch(r"g(\d{1,9})", granularity)
    if group is not None:
        return rows, ceil_div(columns, int(group[1]))
    block = re.fullmatch(r"block (\d{1,9})x(\d{1,9})", granularity)
    if block is not None:
        return ceil_div(rows, int(block[1])), ceil_div(columns, int(block[2]))
    return None


def ceil_div(dividend: int, divisor: int) -> int:
    """Return a quotient, rounded up: a last group or block may not be full."""
    return -(-dividend // divisor)


def stacked_counts(granularity: str, sizes: Sizes) -> set[int]:
    """Return numbers of scales that stacked matrices may have, as they are or transposed.

    Each matrix may consist of two, gate and up, and each of the two may have its own scale or
    blocks.  ``granularity``: one that ``grid_of`` knows.
    """
    matrices = sizes.matrices
    if granularity == "tensor":
        return {1, matrices, 2 * matrices}
    shapes = []
    for rows, columns in ((sizes.rows, sizes.columns), (sizes.columns, sizes.rows)):
        shapes += [(rows, columns, 1), (rows // 2, columns, 2), (rows, columns // 2, 2)]
    counts = set()
    for rows, columns, number in shapes:
        grid = grid_of(granularity, rows, columns)
        if grid is not None:
            counts.add(matrices * number * math.prod(grid))
    if granularity.startswith("g"):
        # Transposed bytes of two weights.
        counts.add(matrices * sizes.rows * sizes.columns // int(granularity[1:]))
    return counts


def grid_in_words(grid: tuple[int, int], rows: int, columns: int) -> str:
    """Return ``9 groups of 64``, or ``4 x 5 scales for 576 x 576 weights``.

    Or ``one scale per row``, or ``one scale for the whole matrix``.
    """
    if grid == (1, 1):
        return "one scale for the whole matrix"
    if grid[0] != rows:
        return f"{grid[0]:,} x {grid[1]:,} scales for {rows:,} x {columns:,} weights"
    if grid[1] == 1:
        return "one scale per row"
    return f"{grid[1]:,} groups of {tile(columns, grid[1]):,}"


def in_words(granularity: str) -> str:
    """Return a granularity as words that end a message: ``groups of 32``, ``one scale per row``."""
    if granularity.startswith("g"):
        return f"groups of {granularity[1:]}"
    if granularity.startswith("block "):
        return f"blocks of {granularity.removeprefix('block ').replace('x', ' x ')}"
    return {"channel": "one scale per row", "tensor": "one scale for the whole matrix"}[granularity]


def bits_fault(parts: Parts, kind: str) -> Fault | None:
    """Return a fault if the number of 32-bit words does not follow from the stated bits.

    The words are compressed-tensors' ``weight_packed``.
    """
    packed = parts.get("weight_packed")
    bits = INTEGER_FORMAT.fullmatch(kind)
    if packed is None or packed.dtype != "I32" or bits is None or len(packed.shape) != 2:
        return None
    sizes = sizes_of(parts, kind)
    if sizes is None:
        return None
    per_word = 32 // int(bits[1])
    if packed.shape == (sizes.rows, ceil_div(sizes.columns, per_word)):
        return None
    words = f"{packed.shape[0]:,} x {packed.shape[1]:,} words"
    weights = f"{sizes.rows:,} x {sizes.columns:,} weights"
    what = f"{words} for {weights}, and the config says {bits[1]} bits"
    return Fault("weight_packed", what, "bits")


def zero_point_fault(parts: Parts, scheme: Scheme | None) -> Fault | None:
    """Return a fault for zero points in a symmetric scheme, or for other groups than the scales'.

    Only compressed-tensors stores tensors of these names.  If a scheme that is not symmetric has no
    zero points at all, they are missing tensors (``lacking_parts``).
    """
    points = parts.get("weight_zero_point")
    scale = parts.get("weight_scale")
    if points is None or scale is None or len(points.shape) != 2 or len(scale.shape) != 2:
        return None
    n_groups = points.shape[1]
    if n_groups != scale.shape[1]:
        what = f"zero points for {n_groups:,} groups, and its scales are for {scale.shape[1]:,}"
        return Fault("weight_zero_point", what, "zero points")
    if scheme is not None and scheme.zero_points is False and not is_neutral(points):
        what = "zero points, and the config says symmetric"
        return Fault("weight_zero_point", what, "zero points")
    return None


def is_neutral(points: Tensor) -> bool:
    """True if the first zero points all equal one value that means "no zero point".

    Several zero points may be packed in a word; then the words are compared.
    """
    numbers = first_numbers(points)
    if not len(numbers):
        return True
    is_constant = bool((numbers == numbers[0]).all())
    return is_constant and int(numbers[0]) & 0xFFFFFFFF in NEUTRAL


def packed_integers(parts: Parts, quantization: Mapping[str, Any], scheme: Scheme) -> Fault | None:
    """Return the contradiction between a GPTQ or AWQ module and its scheme.

    GPTQ: qweight [in * bits / 32, out]; AWQ: [in, out * bits / 32]; both: scales [groups, out].
    AWQ's other layouts, "gemv" and "gemv_fast", are not compared.
    """
    packed = parts.get("qweight")
    scales = parts.get("scales")
    integers = INTEGER_FORMAT.fullmatch(number_format(scheme.weights))
    if packed is None or scales is None or integers is None or is_gemv(quantization):
        return None
    if packed.dtype != "I32" or len(packed.shape) != 2 or len(scales.shape) != 2:
        return None
    bits = int(integers[1])
    outputs = scales.shape[1]
    is_gptq = packed.shape[1] == outputs
    if is_gptq:
        inputs = packed.shape[0] * 32 // bits
        indices = parts.get("g_idx")
        if indices is not None and indices.numel:
            inputs = indices.numel
        fits = packed.shape[0] in words_of(inputs, bits)
    else:
        inputs = packed.shape[0]
        fits = packed.shape[1] in words_of(outputs, bits)
    if not fits:
        words = f"{packed.shape[0]:,} x {packed.shape[1]:,} words"
        what = f"{words} for {outputs:,} x {inputs:,} weights, and the config says {bits} bits"
        return Fault("qweight", what, "bits")
    zeros = parts.get("qzeros")
    if zeros is not None and zeros.shape[-1] not in words_of(outputs, bits):
        what = f"{zeros.shape[-1]:,} words for {outputs:,} outputs, and the config says {bits} bits"
        return Fault("qzeros", what, "bits")
    fault = packed_groups_fault(scales, inputs, scheme)
    if fault is None and zeros is not None:
        is_constant = is_gptq and scheme.zero_points is False
        fault = packed_zeros_fault(zeros, scales, bits, is_constant=is_constant)
    return fault


def is_gemv(quantization: Mapping[str, Any]) -> bool:
    """True for AWQ's layouts "gemv" and "gemv_fast"."""
    keys = ("version", "checkpoint_format", "packing_format")
    return any("gemv" in str(quantization.get(key)).lower() for key in keys)


def packed_groups_fault(scales: Tensor, inputs: int, scheme: Scheme) -> Fault | None:
    """Return a fault if GPTQ's or AWQ's ``scales`` [groups, out] are not those of the scheme."""
    groups, outputs = scales.shape
    granularity = scheme.weights.partition(" ")[2]
    stated_grid = grid_of(granularity, outputs, inputs)
    if stated_grid is None or stated_grid[1] == groups:
        return None
    stored_groups = "one scale per output"
    if groups != 1:
        stored_groups = f"{groups:,} groups of {tile(inputs, groups):,}"
    what = f"{stored_groups}, and the config says {in_words(granularity)}"
    return Fault("scales", what, "scales")


def packed_zeros_fault(
    zeros: Tensor, scales: Tensor, bits: int, *, is_constant: bool
) -> Fault | None:
    """Return a fault if there are zero points for other groups, or if constant ones differ.

    ``is_constant``: the scheme is symmetric, so that all zero points are equal.
    """
    groups, outputs = scales.shape
    if zeros.shape[0] != groups:
        what = f"zero points for {zeros.shape[0]:,} groups, and scales for {groups:,}"
        return Fault("qzeros", what, "zero points")
    # Zero points of 3 bits cross the borders of words: the words differ although the zero points
    # are equal.
    fills_words = bits in (2, 4, 8)
    if is_constant and fills_words and has_unequal_words(zeros, outputs * bits):
        what = "zero points that differ, and the config says sym: true"
        return Fault("qzeros", what, "zero points")
    return None


def words_of(numbers: int, bits: int) -> set[int]:
    """Return how many 32-bit words can hold this many numbers; writers round either way."""
    per_word = 32 // bits
    return {numbers * bits // 32, ceil_div(numbers * bits, 32), ceil_div(numbers, per_word)}


def has_unequal_words(zeros: Tensor, row_bits: int) -> bool:
    """True if the first words of packed zero points differ."""
    # The last word of a row that is not full may differ.
    if row_bits % 32 or not zeros.numel:
        return False
    words = first_numbers(zeros)
    return bool(np.any(words != words[0]))


def first_numbers(tensor: Tensor) -> NDArray[Any]:
    """Return the first numbers of a tensor, at most 4 KiB.

    Real zero points differ within the first row.
    """
    # A model may have 100,000 of these tensors on a network disk.
    size = np.dtype(NUMPY_TYPES[tensor.dtype]).itemsize
    count = min(tensor.numel, SMALL_TENSOR_BYTES // size)
    return stored(tensor._replace(shape=(count,), nbytes=count * size))
