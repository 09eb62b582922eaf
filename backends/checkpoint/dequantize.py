"""Read rows of a quantized matrix as float32 numbers, from its files alone, without an engine.

``backends/hf/verify.py`` compares a loaded model with these numbers.  A format that this module
does not know raises ``UnreadError``: for example GPTQ, AWQ, EXL3, bitsandbytes, torchao and
ModelOpt's AWQ.  No engine of compare_q converts these formats to plain floats while it loads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint_config import CheckpointConfig
from .formats import (
    EIGHT_BITS,
    POWERS,
    WEIGHT_SCALES,
    Parts,
    as_float32,
    main_part,
    scale_grid,
    scale_of,
    stored,
    tile,
)
from .safetensors_files import Tensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The number that each code of four bits has in FP4."""
GLOBAL = "weight_global_scale"
"""compressed-tensors' scale of a whole NVFP4 matrix; the other scales are divided by it."""
GLOBAL_FACTOR = "weight_scale_2"
"""ModelOpt's scale of a whole NVFP4 matrix; the other scales are multiplied by it."""
SMALLEST_POWER = 127
"""A byte b is the power of two 2 ** (b - 127)."""

Floats = NDArray[np.float32]


class UnreadError(Exception):
    """The numbers of a matrix cannot be read; the message states the reason."""


def is_stack(parts: Parts) -> bool:
    """Return True if a module holds the matrices of several experts as one tensor."""
    main = main_part(parts)
    if main is None:
        return False
    n_dimensions = 4 if is_gpt_oss(parts) else 3
    return len(parts[main].shape) == n_dimensions


def is_gpt_oss(parts: Parts) -> bool:
    """Return True for gpt-oss' blocks [experts, out, in / 32, 16 bytes]."""
    packed = parts.get("weight_packed")
    return packed is not None and packed.dtype == "U8" and len(packed.shape) == 4


def row_count(parts: Parts) -> int:
    """Return the number of rows (outputs) of a matrix, or of one expert's matrix; UnreadError."""
    main = main_part(parts)
    if main not in ("weight", "weight_packed"):
        raise UnreadError(f"its format ({main}) is not read")
    shape = parts[main].shape
    if is_stack(parts):
        return shape[1]
    return shape[0]


def rows_of(
    parts: Parts,
    config: CheckpointConfig,
    bits: int | None,
    rows: NDArray[np.intp],
    expert: int | None = None,
) -> Floats:
    """Return rows of a module's matrix as float32 [rows, columns]; UnreadError.

    ``bits``: the bits of packed integers that the config declares; None if unknown.  ``expert``:
    the index of the expert if the module is a stack.
    """
    if "pre_quant_scale" in parts:
        raise UnreadError("its inputs are scaled")
    if expert is not None:
        parts = {name: of_expert(tensor, expert) for name, tensor in parts.items()}
    packed = parts.get("weight_packed")
    try:
        if packed is not None and packed.dtype == "I32":
            return packed_integers(parts, bits, rows)
        if is_fp4(parts):
            return fp4(parts, config, rows)
        return eight_bits(parts, config, rows)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UnreadError(f"its tensors do not fit each other: {error}") from None


def of_expert(tensor: Tensor, expert: int) -> Tensor:
    """Return one expert's part of a stacked tensor; all of a tensor that the experts share."""
    n_experts = tensor.shape[0] if tensor.shape else 1
    if len(tensor.shape) < 2 and n_experts <= 1:
        return tensor
    size = tensor.nbytes // n_experts
    return tensor._replace(shape=tensor.shape[1:], start=tensor.start + expert * size, nbytes=size)


def is_fp4(parts: Parts) -> bool:
    """Return True if each byte holds two numbers of FP4.

    Every 16 or 32 numbers have a scale of 8 bits then.
    """
    scale = scale_of(parts)
    if "weight_packed" in parts:
        return parts["weight_packed"].dtype == "U8" and scale is not None
    weight = parts.get("weight")
    if weight is None or scale is None or weight.dtype not in ("U8", "I8"):
        return False
    is_nvfp4 = weight.dtype == "U8" and scale.dtype == "F8_E4M3"
    # MXFP4: a scale for 32 numbers, which are 16 bytes.
    return is_nvfp4 or (scale.dtype in POWERS and weight.shape[-1] == 16 * scale.shape[-1])


def packed_integers(parts: Parts, bits: int | None, rows: NDArray[np.intp]) -> Floats:
    """Return rows of compressed-tensors' integers.

    Each word of 32 bits holds 32 // bits of them, stored plus half their range.
    """
    packed = parts["weight_packed"]
    scale = parts["weight_scale"]
    *_, n_rows, n_columns = (int(size) for size in stored(parts["weight_shape"]).reshape(-1))
    if bits is None or not 0 < bits <= 8 or -(-n_columns // (32 // bits)) != packed.shape[-1]:
        raise UnreadError(f"its words do not hold the {bits} bits that config.json declares")
    codes = unpacked(stored(packed)[rows], bits)[:, :n_columns].astype(np.float32)
    groups = columns_of_scales(scale, (n_rows, n_columns))  # of each column
    if "weight_g_idx" in parts:
        stored_groups = stored(parts["weight_g_idx"])
        # A tensor of -1 means that the groups are in the order of the columns.
        if stored_groups.max() >= 0:
            groups = np.asarray(stored_groups, np.intp)
    grid = scale_grid(scale, n_rows)
    if "weight_zero_point" in parts:
        offsets = zero_points(parts["weight_zero_point"], bits, n_rows, grid)
        codes = codes - offsets[rows][:, groups]
    scales = numbers(scale).reshape(grid)
    grid_rows = rows
    if grid[0] != n_rows:
        grid_rows = rows // tile(n_rows, grid[0])
    return codes * scales[grid_rows][:, groups]


def zero_points(zeros: Tensor, bits: int, n_rows: int, grid: tuple[int, int]) -> Floats:
    """Return the zero points [rows, groups] of packed integers.

    ``grid``: (rows, columns) of the scales.
    """
    if zeros.dtype != "I32":
        return np.broadcast_to(numbers(zeros).reshape(grid), (n_rows, grid[1]))
    # Words hold the zero points of following rows.
    return unpacked(stored(zeros).T, bits)[:, :n_rows].T.astype(np.float32)


def unpacked(words: NDArray[Any], bits: int) -> NDArray[Any]:
    """Return the integers in 32-bit words [n, W] as [n, W * (32 // bits)].

    The first integer of a word is in its lowest bits.  Each is stored plus half its range, which is
    subtracted here.
    """
    shifts = bits * np.arange(32 // bits)
    mask = (1 << bits) - 1
    codes = (np.asarray(words, np.int64)[:, :, None] >> shifts) & mask
    half_range = 1 << (bits - 1)
    return codes.reshape(len(words), -1) - half_range


def fp4(parts: Parts, config: CheckpointConfig, rows: NDArray[np.intp]) -> Floats:
    """Return rows of NVFP4 and MXFP4: two numbers per byte, the lower four bits first."""
    packed = parts.get("weight_packed", parts.get("weight"))
    scale = scale_of(parts)
    assert packed is not None
    assert scale is not None
    raw = stored(packed).view(np.uint8)
    raw = raw.reshape(len(raw), -1)[rows]
    codes = E2M1[np.stack((raw & 15, raw >> 4), -1).reshape(len(rows), -1)]
    shape = (packed.shape[0], codes.shape[1])
    weights = codes * scales_of_rows(scale, shape, rows, config)
    if GLOBAL in parts:
        weights = weights / numbers(parts[GLOBAL]).reshape(-1)[0]
    elif GLOBAL_FACTOR in parts:
        weights = weights * numbers(parts[GLOBAL_FACTOR]).reshape(-1)[0]
    elif scale.dtype not in POWERS:
        raise UnreadError("it has no global scale")
    return np.asarray(weights, np.float32)


def eight_bits(parts: Parts, config: CheckpointConfig, rows: NDArray[np.intp]) -> Floats:
    """Return rows of FP8 or int8 with scales for a matrix, its rows, groups of a row, or blocks."""
    weight = parts.get("weight")
    scale = scale_of(parts)
    if weight is None or weight.dtype not in EIGHT_BITS or scale is None or len(weight.shape) != 2:
        raise UnreadError("its format is not read")
    codes = as_float32(stored(weight)[rows], weight.dtype)
    shape = (weight.shape[0], weight.shape[1])
    if "weight_zero_point" in parts:
        codes = codes - scales_of_rows(parts["weight_zero_point"], shape, rows, config)
    return np.asarray(codes * scales_of_rows(scale, shape, rows, config), np.float32)


def scales_of_rows(
    scale: Tensor, shape: tuple[int, int], rows: NDArray[np.intp], config: CheckpointConfig
) -> Floats:
    """Return the scales (or zero points) [rows, columns] of some rows of a matrix of this shape."""
    grid_shape = scale_grid(scale, shape[0])
    block = config.block or (0, 0)
    grid_rows = rows // tile(shape[0], grid_shape[0], block[0])
    return numbers(scale).reshape(grid_shape)[grid_rows][
        :, columns_of_scales(scale, shape, block[1])
    ]


def columns_of_scales(scale: Tensor, shape: tuple[int, int], width: int = 0) -> NDArray[np.intp]:
    """Return for each column of a matrix the column of its scale.

    ``width``: the number of columns that share a scale, by the config; 0 if not stated.
    """
    _, n_scales = scale_grid(scale, shape[0])
    return np.arange(shape[1]) // tile(shape[1], n_scales, width)


def numbers(tensor: Tensor) -> Floats:
    """Return a whole tensor as float32; unsigned bytes are powers of two."""
    raw = stored(tensor)
    if tensor.dtype == "U8":
        return np.ldexp(np.float32(1), raw.astype(np.int32) - SMALLEST_POWER).astype(np.float32)
    return as_float32(raw, tensor.dtype)


def scalars(parts: Parts) -> Mapping[str, float]:
    """Return the scales of a module that are one number, by their names."""
    single = {}
    for name in (*WEIGHT_SCALES, GLOBAL, GLOBAL_FACTOR):
        if name in parts and math.prod(parts[name].shape) == 1:
            single[name] = float(numbers(parts[name]).reshape(-1)[0])
    return single
