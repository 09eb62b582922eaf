"""Weight matrices as numbers, a band at a time: what a module stores, in words, and its values in float32.

Known: floats; compressed-tensors (pack-quantized int2, 4 and 8 with zero points and activation order, int8 and fp8 by
tensor, channel, group and block, NVFP4, MXFP4, MXFP8); fp8 with weight_scale_inv; ModelOpt's FP8 and NVFP4; gpt-oss'
and DeepSeek-V4's MXFP4; GPTQ and AWQ of 2, 4 and 8 bits; bitsandbytes' int8.  Of any other format the reason is told
why it is not read.

compressed-tensors' own decompression is not used: it needs torch, which the driver does not import, takes a whole
matrix at once and gives bfloat16, whose rounding would count as an error of the quantization (0.0017 of a weight). The
tests compare with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backends.checkpoint.doctor.numbers import Floats, Scales, floats, nibbles, stored, unpacked, values
from backends.checkpoint.doctor.subject import FLOATS, Parts, main_of
from backends.checkpoint.files import Tensor
from backends.layers.schemes import objects_in, part, sizes_text

NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight values of an AWQ word each of its columns is (four bits)."""
GLOBAL = {"weight_global_scale": -1, "weight_scale_2": 1}
"""Name of NVFP4's global scale -> the power with which it counts: compressed-tensors divides by it."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [rows, columns], rows being outputs; stacked experts are rows below each other.

    ``stored``: in words, "int4 g128"; ``axis``: along which ``band(begin, end)`` cuts: 0 gives float32
    [end - begin, columns], 1 gives [rows, end - begin]; ``step``: a band begins at a multiple of it; ``other``: the
    same rows in another order, if the format leaves open which one it is; ``columns``: what ``band`` would be with the
    axis 1, if the rows can be cut without being read whole.
    """

    stored: str
    shape: tuple[int, int]
    band: Callable[[int, int], Floats]
    axis: int = 0
    step: int = 1
    other: Callable[[int, int], Floats] | None = None
    columns: Callable[[int, int], Floats] | None = None

    def cut(self, axis: int, begin: int, end: int) -> Floats:
        """A band along any axis; along one that is not the matrix's own all of it may be read."""
        if self.axis == axis:
            first = begin // self.step * self.step
            found = self.band(first, end)
            return found[begin - first :] if axis == 0 else found[:, begin - first :]
        if axis == 1 and self.columns is not None:
            return self.columns(begin, end)
        whole = self.band(0, self.shape[self.axis])
        return whole[begin:end] if axis == 0 else whole[:, begin:end]


def matrix_of(parts: Parts, quantization: Mapping[str, Any]) -> Matrix | str:
    """The matrix of one module, or what it is stored in that is not read here.

    ``quantization``: the checkpoint's config of it, for the sizes of blocks and the version of GPTQ's packing.
    """
    main = main_of(parts)
    if main is None or len(parts[main].shape) < 2:
        return "no matrix"
    try:
        found = READERS.get(main, _unknown)(parts, quantization)
        if isinstance(found, Matrix) and "pre_quant_scale" in parts:  # ModelOpt's AWQ: y = (x * scale) W_q^T
            return with_columns(found, values(parts["pre_quant_scale"]).reshape(found.shape[1]), found.stored)
        return found
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"{main} of dtype {parts[main].dtype}: {error}"


def with_columns(matrix: Matrix, factors: Floats, stored: str) -> Matrix:
    """A matrix whose columns are multiplied by factors."""

    def band(begin: int, end: int) -> Floats:
        return matrix.band(begin, end) * (factors if matrix.axis == 0 else factors[begin:end])

    return replace(matrix, band=band, stored=stored, other=None, columns=None)


def described(parts: Parts, quantization: Mapping[str, Any]) -> str:
    """What a module stores, in words: "int4 g128", "bfloat16"; "unknown (why)" for a format that is not read here."""
    found = matrix_of(parts, quantization)
    return f"unknown ({found})" if isinstance(found, str) else found.stored


def _unknown(parts: Parts, quantization: Mapping[str, Any]) -> Matrix | str:
    main = main_of(parts)
    assert main is not None
    return f"format {main} of dtype {parts[main].dtype}"


def _weight(parts: Parts, quantization: Mapping[str, Any]) -> Matrix | str:
    """``weight``: floats, FP8, int8, and bytes of two FP4 values."""
    weight = parts["weight"]
    scale = next((parts[name] for name in ("weight_scale", "weight_scale_inv", "scale") if name in parts), None)
    if weight.dtype in FLOATS:
        return _rows(NAMES[weight.dtype], weight)
    if any(name.startswith("weight.") for name in parts):
        return "format bitsandbytes of 4 bits"
    if weight.dtype == "I8" and "SCB" in parts:
        return _rows("int8 channel", weight, Scales.of(parts["SCB"], weight.shape[0], 1 / 127))
    if str(quantization.get("quant_method")).lower() == "w4afp8" and weight.dtype == "I8":
        return "format W4AFP8, two int4 in a byte"
    if scale is None:
        return f"weight of dtype {weight.dtype} without a scale"
    four_bits = weight.dtype == "U8" or (weight.dtype == "I8" and scale.dtype == "F8_E8M0")
    if four_bits:
        return _fp4(parts, weight, scale)
    columns = weight.shape[-1]
    steps = Scales.of(scale, weight.numel // columns)
    name = {"I8": "int8", "F8_E4M3": "fp8", "F8_E5M2": "fp8 e5m2"}[weight.dtype]
    if weight.dtype != "I8" and scale.dtype in ("U8", "F8_E8M0") and steps.shape[1] * 32 == columns:
        return _rows("mxfp8 g32", weight, steps)
    block = _block(quantization)
    words = _scaling_in_words(steps.shape, (weight.numel // columns, columns), block)
    zeros = parts.get("weight_zero_point")
    offset = None if zeros is None else Scales.of(zeros, weight.numel // columns)
    return _rows(f"{name} {words}", weight, steps, block, offset)


def _weight_packed(parts: Parts, quantization: Mapping[str, Any]) -> Matrix | str:
    """compressed-tensors: FP4, or integers in 32-bit words; gpt-oss' blocks."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype == "U8":
        return _fp4(parts, packed, scale)
    if packed.dtype != "I32" or "weight_shape" not in parts:
        return f"format weight_packed of dtype {packed.dtype}"
    *_, rows, columns = (int(size) for size in values(parts["weight_shape"]))
    bits = next((bits for bits in (4, 8, 2) if -(-columns // (32 // bits)) == packed.shape[-1]), 0)
    if not bits or len(packed.shape) > 2:
        return "format pack-quantized of other bits, or stacked"
    half, steps = 1 << (bits - 1), Scales.of(scale, rows)
    zeros = None
    if (offset := parts.get("weight_zero_point")) is not None:  # packed along the rows
        whole = unpacked(stored(offset), bits, 0)[:rows] - half if offset.dtype == "I32" else stored(offset)
        zeros = Scales(rows, whole, "I32")
    indices = stored(parts["weight_g_idx"]) if "weight_g_idx" in parts else None
    if indices is not None and (indices < 0).all():
        indices = None

    def band(begin: int, end: int) -> Floats:
        found = (unpacked(stored(packed)[begin:end], bits, 1)[:, :columns] - half).astype(np.float32)
        return _scaled(found, begin, end, steps, columns, None, zeros, indices)

    words = _scaling_in_words(steps.shape, (rows, columns), None)
    return Matrix(f"{'int' if zeros is None else 'uint'}{bits} {words}", (rows, columns), band)


def _fp4(parts: Parts, packed: Tensor, scale: Tensor) -> Matrix | str:
    """NVFP4 where the scales are FP8 numbers; MXFP4 where each 32 weights share a power of two in a byte."""
    raw = stored(packed)
    rows, columns = math.prod(raw.shape[:-1]), 2 * raw.shape[-1]
    whole = next(((parts[name], power) for name, power in GLOBAL.items() if name in parts), None)
    steps = Scales.of(scale, rows, whole=whole)
    powers = scale.dtype in ("U8", "F8_E8M0") and steps.raw.size * 32 == rows * columns
    if not powers and (scale.dtype != "F8_E4M3" or len(packed.shape) == 4):
        return f"format {main_of(parts)} of dtype {packed.dtype} with scales of {scale.dtype}"
    if len(packed.shape) == 4:
        return _gpt_oss(raw, stored(scale))
    raw = raw.reshape(rows, -1)

    def band(begin: int, end: int) -> Floats:
        return _scaled(nibbles(raw[begin:end]), begin, end, steps, columns)

    return Matrix(f"{'mxfp4' if powers else 'nvfp4'} g{columns // steps.shape[1]}", (rows, columns), band)


def _gpt_oss(raw: Any, scales: Any) -> Matrix:
    """Blocks [experts, out, in / 32, 16 bytes] as rows of [experts, in, out]: so Transformers stores their floats."""
    experts, outputs, groups, _ = raw.shape
    inputs = 32 * groups

    def expert(number: int, begin: int, end: int) -> Floats:
        """The inputs from ``begin`` to ``end`` of an expert, whole groups of which are read."""
        some = slice(begin // 32, -(-end // 32))
        found = nibbles(raw[number, :, some]) * floats(scales[number, :, some], "F8_E8M0")[..., None]
        return found.reshape(outputs, -1).T[begin % 32 :][: end - begin]

    def band(begin: int, end: int) -> Floats:
        first, last = begin // inputs, -(-end // inputs)
        sides = [(each, max(begin - each * inputs, 0), min(end - each * inputs, inputs)) for each in range(first, last)]
        return np.concatenate([expert(*side) for side in sides])

    return Matrix("mxfp4 g32", (experts * inputs, outputs), band)


def _qweight(parts: Parts, quantization: Mapping[str, Any]) -> Matrix | str:
    """GPTQ [in * bits / 32, out] and AWQ [in, out * bits / 32]; both are stored with the inputs as rows."""
    packed, scales, zeros = parts["qweight"], parts["scales"], parts.get("qzeros")
    inputs, outputs = packed.shape[0], scales.shape[-1]
    awq = packed.shape[1] != outputs
    indices = stored(parts["g_idx"]) if "g_idx" in parts and parts["g_idx"].numel else None
    if not awq:
        stated = quantization.get("bits")
        inputs = len(indices) if indices is not None else packed.shape[0] * 32 // int(stated or 4)
    bits = packed.shape[1] * 32 // outputs if awq else packed.shape[0] * 32 // inputs
    if packed.dtype != "I32" or bits not in (2, 4, 8) or (awq and bits != 4):
        return f"format qweight of dtype {packed.dtype} and {bits} bits"
    per_word, groups, steps = 32 // bits, scales.shape[0], Scales.of(scales, scales.shape[0])
    # The first version of GPTQ's packing stores one less.
    less = 0 if awq or quantization.get("checkpoint_format") == "gptq_v2" else 1
    offset = Scales(1, np.full((1, outputs), 1 << (bits - 1)), "I32")
    if zeros is not None and zeros.numel:
        whole = _ordered(unpacked(stored(zeros), bits, 1), awq=awq)[:, :outputs] + less
        offset = Scales(groups, whole, "I32")
    group_of = indices if indices is not None else np.arange(inputs) // -(-inputs // groups)

    def band(begin: int, end: int) -> Floats:
        raw = stored(packed)
        if awq:
            codes = _ordered(unpacked(raw[begin:end], bits, 1), awq=True)
        else:
            codes = unpacked(raw[begin // per_word : -(-end // per_word)], bits, 0)[: end - begin]
        group = group_of[begin:end]
        zero = offset.at(group if offset.shape[0] == groups else np.zeros(1, int))
        found: Floats = ((codes.astype(np.float32) - zero) * steps.at(group)).T
        return found

    scaling = "channel" if groups == 1 else f"g{-(-inputs // groups)}"
    name = f"{'uint' if awq else 'int'}{bits} {scaling}"
    return Matrix(name, (outputs, inputs), band, axis=1, step=1 if awq else per_word)


def _ordered(columns: Any, *, awq: bool) -> Any:
    """The columns in their order: AWQ interleaves the eight values of a word."""
    if not awq:
        return columns
    return columns.reshape(*columns.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(columns.shape)


def _rows(
    name: str, weight: Tensor, steps: Scales | None = None, block: tuple[int, int] | None = None,
    zeros: Scales | None = None,
) -> Matrix:  # fmt: skip
    """A matrix with one stored element a weight, of any dtype, and perhaps scales."""
    columns = weight.shape[-1]
    rows = weight.numel // columns
    raw = stored(weight).reshape(rows, columns)

    def band(begin: int, end: int) -> Floats:
        found = floats(raw[begin:end], weight.dtype)
        return found if steps is None else _scaled(found, begin, end, steps, columns, block, zeros)

    plain = None if steps is not None else lambda begin, end: floats(raw[:, begin:end], weight.dtype)
    return Matrix(name, (rows, columns), band, columns=plain)


def _scaled(
    found: Floats, begin: int, end: int, steps: Scales, columns: int, block: tuple[int, int] | None = None,
    zeros: Scales | None = None, indices: Any = None,
) -> Floats:  # fmt: skip
    """Codes of the rows ``begin`` to ``end`` times their scales; ``indices``: the group of each column."""
    sizes, given = (steps.rows, columns), block or (0, 0)
    high, wide = (_tile(*each) for each in zip(sizes, steps.shape, given, strict=True))
    row = np.arange(begin, end) // high

    def spread(each: Scales) -> Floats:
        chosen = each.at(row)
        return chosen[:, indices] if indices is not None else np.repeat(chosen, wide, axis=1)[:, :columns]

    return (found if zeros is None else found - spread(zeros)) * spread(steps)


def _tile(size: int, count: int, given: int) -> int:
    """How many rows or columns share a scale: the block's where the config says so, else as many as fit."""
    return given if given and -(-size // given) == count else -(-size // count)


def _block(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size of FP8 blocks that a config states; None if it states none, or several."""
    groups = [part(group, "weights") for group in objects_in(quantization.get("config_groups"))]
    stated = [quantization.get("weight_block_size"), *(weights.get("block_structure") for weights in groups)]
    pairs = [size for size in stated if isinstance(size, list | tuple) and len(size) == 2]
    sizes = {tuple(size) for size in pairs if all(type(each) is int and each > 0 for each in size)}
    return next(iter(sizes)) if len(sizes) == 1 else None


def _scaling_in_words(grid: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int] | None) -> str:
    """``tensor``, ``channel``, ``g128`` or ``block 128x128``."""
    if grid[0] == shape[0]:
        return "channel" if grid[1] == 1 else f"g{_tile(shape[1], grid[1], 0)}"
    if grid[1] == 1:
        return "tensor"
    sizes = [_tile(*each) for each in zip(shape, grid, block or (0, 0), strict=True)]
    return f"block {sizes_text(sizes)}"


READERS: dict[str, Callable[[Parts, Mapping[str, Any]], Matrix | str]] = {
    "weight": _weight, "weight_packed": _weight_packed, "qweight": _qweight,
}  # fmt: skip
"""The part that holds the weights -> what reads it."""
