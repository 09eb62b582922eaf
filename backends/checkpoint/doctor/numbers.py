"""Stored numbers as numpy arrays, without torch: any dtype of safetensors, and integers packed in 32-bit words.

Tensors are mapped into memory, so that only what is looked at is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.checkpoint.files import Tensor

Floats = NDArray[np.float32]
TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "u1", "U32": "<u4", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # fmt: skip
"""dtype of a header -> numpy's type of the same bytes."""
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of E2M1, by their four bits."""


def stored(tensor: Tensor) -> NDArray[Any]:
    """The tensor as it is stored, in its shape, mapped into memory; ValueError for a dtype that is not known here."""
    if tensor.dtype not in TYPES:
        raise ValueError(f"its dtype {tensor.dtype} is not known")
    if not tensor.numel:
        return np.empty(tensor.shape, TYPES[tensor.dtype])
    return np.memmap(tensor.file, TYPES[tensor.dtype], "r", tensor.start, tensor.shape)


def floats(raw: NDArray[Any], dtype: str) -> Floats:
    """Stored numbers of one dtype of headers as float32."""
    found: Floats
    if dtype == "BF16":
        found = np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
    elif dtype.startswith("F8_"):
        found = eight_bits(dtype)[raw]
    else:
        found = np.asarray(raw, np.float32)
    return found


def values(tensor: Tensor) -> Floats:
    """A whole tensor as float32; ValueError for a dtype that is not known here."""
    return floats(stored(tensor), tensor.dtype)


@cache
def eight_bits(dtype: str) -> Floats:
    """The 256 values of a float of 8 bits; ValueError for an unknown one.

    E4M3 has no infinity and one NaN of each sign; E5M2 is float16 cut in half; E8M0 holds powers of two.
    """
    codes = np.arange(256)
    if dtype == "F8_E5M2":
        return np.asarray((codes.astype(np.uint16) << 8).view(np.float16), np.float32)
    if dtype == "F8_E8M0":
        return np.append(np.ldexp(np.float64(1), codes[:255] - 127), np.nan).astype(np.float32)
    if dtype != "F8_E4M3":
        raise ValueError(f"its dtype {dtype} is not known")
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    sizes = np.where(exponent == 0, np.ldexp(mantissa, -6), np.ldexp(1 + mantissa, exponent - 7))
    found = np.where(codes & 128, -sizes, sizes).astype(np.float32)
    found[[0x7F, 0xFF]] = np.nan
    return found


def nibbles(raw: NDArray[Any]) -> Floats:
    """E2M1 values [..., 2 n] from bytes [..., n], the low four bits first."""
    raw = raw.view(np.uint8)
    found = np.empty((*raw.shape[:-1], 2 * raw.shape[-1]), np.float32)
    found[..., 0::2] = FP4[raw & 15]
    found[..., 1::2] = FP4[raw >> 4]
    return found


def unpacked(words: NDArray[Any], bits: int, axis: int) -> NDArray[np.int32]:
    """Unsigned integers of ``bits`` from 32-bit words, the lowest bits first; the axis grows 32 // bits times."""
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    found = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return np.moveaxis(found.astype(np.int32).reshape(*words.shape[:-1], -1), -1, axis)


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix with ``rows`` rows as stored numbers ``raw`` [r, c], which are read by rows.

    ``dtype``: that of a header; ``times``: a factor of all; ``whole``: a global scale (of the matrix, or of each of the
    stacked experts) and the power with which it counts.
    """

    rows: int
    raw: NDArray[Any]
    dtype: str
    times: float = 1.0
    whole: tuple[Tensor, int] | None = None

    @classmethod
    def of(cls, tensor: Tensor, rows: int, times: float = 1.0, whole: tuple[Tensor, int] | None = None) -> Scales:
        """The scales in a tensor; bytes are powers of two, and a vector has one for each row, or for part of them."""
        raw = stored(tensor)
        by_row = rows % max(raw.size, 1) == 0
        raw = raw.reshape(-1, raw.shape[-1]) if raw.ndim > 1 else raw.reshape((-1, 1) if by_row else (1, -1))
        return cls(rows, raw, "F8_E8M0" if tensor.dtype == "U8" else tensor.dtype, times, whole)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of scales."""
        return self.raw.shape[0], self.raw.shape[1]

    def at(self, wanted: NDArray[Any]) -> Floats:
        """Some rows of the scales, float32 [len(wanted), c]."""
        found = floats(self.raw[wanted], self.dtype)
        if self.whole is not None:
            tensor, power = self.whole
            factors = values(tensor).reshape(-1) ** power
            found = found * factors[wanted // (self.shape[0] // len(factors))][:, None]
        return found if self.times == 1 else found * np.float32(self.times)
