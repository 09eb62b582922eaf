"""Formats of a weight matrix in safetensors: its bits, its number of weights, its name.

``FORMATS`` is the one table of layouts, for bits per weight and the doctor; docs/formats.md lists
them.  If a module has a tensor that is not in its format's list of bits and not in ``NOT_BITS``,
the matrix is unknown, so that no format is mistaken for a similar one.  Torch is imported only for
numbers of 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..common.errors import InputError
from ..common.json_files import parsed
from ..layers.schemes import sizes_text, with_group_size
from .checkpoint_config import CheckpointConfig, unpadded
from .safetensors_files import Tensor

Parts = dict[str, Tensor]
"""Part name ("weight", "scales", "weight.absmax", ...) -> tensor, of one module."""

UNSIZED_FORMAT = "stored in a format that compare_q cannot size"
DAMAGED = "other tensors of its module do not fit it"
PADDED = "padded, and config.json does not say from which size"
UNEXPLAINED = "has the vocabulary's size, but its name does not identify it as head or embedding"
LONGEST_LIST = 1024
"""Largest number of integers in one row that do not count as weights."""
SMALL_TENSOR_BYTES = 4096
"""Bytes of a tensor that is read at once."""
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""dtype in a header -> its name, for unquantized weights."""
EIGHT_BITS = {"I8": "int8", "F8_E4M3": "fp8", "F8_E5M2": "fp8 e5m2"}
GGML = "ggml "
"""Beginning of the dtype of a GGUF file's quantized tensors: "ggml q8_0"."""
POWERS = {"U8", "F8_E8M0"}
"""Dtypes of the scales of OCP's microscaling formats (powers of two)."""
NUMPY_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
    "U32": "<u4",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}
"""dtype in a header -> numpy's type of the same bytes."""
TORCH_NAMES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv", "scale")
"""Names of scales; codes are multiplied by them.

``weight_scale_inv``, DeepSeek's name, is not an inverse.
"""
INPUT_SCALES = {"input_scale", "input_global_scale", "activation_scale"}
KV_SCALES = {"k_scale", "v_scale", "output_scale"}
NOT_BITS = {
    *INPUT_SCALES,
    *KV_SCALES,
    "q_scale",
    "bias",
    "weight_shape",
    "weight_format",
    "input_scale_ub",
    "input_zero_point",
    "A_log",
    "inv_freq",
    "hc_attn_fn",
    "hc_ffn_fn",
    "hc_head_fn",
    "ape",
}
"""Parts of modules that are not stored weights.

The last four are DeepSeek-V4's mixing of residual streams.
"""
QUANT_STATE = "weight.quant_state."
"""Beginning of the name of a part with JSON, of bitsandbytes' 4-bit weights."""


class UnsizedError(Exception):
    """The stored size of a module is not known; the text names the tensor and the reason."""


class Layout(NamedTuple):
    """The format of one matrix, and its number of weights."""

    words: str  # "int4 g128"; "" if unknown
    weights: int | str  # or why the number is unknown


Reader = Callable[[Parts, CheckpointConfig, frozenset[int]], Layout]
"""Reads the layout of a module's parts; the third argument: sizes that it can have unpadded."""
NOT_KNOWN = Layout("", UNSIZED_FORMAT)


# Stored numbers, without torch where numpy knows them.


def stored(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as stored, in its shape; ValueError for an unknown dtype.

    A tensor that is not small is mapped into memory.
    """
    if tensor.dtype not in NUMPY_TYPES:
        raise ValueError(f"its dtype {tensor.dtype} is not known")
    # A map takes three times as long, and models of many experts have 100,000 small tensors.
    if tensor.nbytes <= SMALL_TENSOR_BYTES:
        numbers = np.fromfile(
            tensor.file, NUMPY_TYPES[tensor.dtype], tensor.numel, offset=tensor.start
        )
        return numbers.reshape(tensor.shape)
    return np.memmap(tensor.file, NUMPY_TYPES[tensor.dtype], "r", tensor.start, tensor.shape)


def values(tensor: Tensor) -> NDArray[np.float32]:
    """Return a whole tensor as float32; ValueError for an unknown dtype."""
    return as_float32(stored(tensor), tensor.dtype)


def as_float32(numbers: Any, dtype: str) -> NDArray[np.float32]:
    """Return numbers that ``stored`` returned for this dtype, or some of them, as float32."""
    if dtype == "BF16":
        numbers = np.left_shift(numbers, 16, dtype=np.uint32).view(np.float32)
    elif dtype in TORCH_NAMES:
        import torch  # numpy has no floats of 8 bits

        codes = torch.from_numpy(np.array(numbers))
        numbers = codes.view(getattr(torch, TORCH_NAMES[dtype])).float().numpy()
    return np.asarray(numbers, np.float32)


# Granularity of scales, by their shapes.


def scale_of(parts: Parts) -> Tensor | None:
    """Return the scales of a module's codes; None if the module has no scales."""
    for name in WEIGHT_SCALES:
        if name in parts:
            return parts[name]
    return None


def scale_grid(scale: Tensor, rows: int) -> tuple[int, int]:
    """Return (rows, columns) of the scales of a matrix with ``rows`` rows.

    A vector has one scale per row or part of a row.
    """
    if len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1:  # ModelOpt's FP8 in blocks
        return scale.shape[0], scale.shape[2]
    if len(scale.shape) > 1:
        return math.prod(scale.shape[:-1]), scale.shape[-1]
    if rows % max(scale.numel, 1) == 0:
        return scale.numel, 1
    return 1, scale.numel


def tile(size: int, count: int, stated_size: int = 0) -> int:
    """Return the number of rows or columns that share a scale; ``count``: number of scales.

    ``stated_size`` if it fits, else the smallest that fits.
    """
    if stated_size and -(-size // stated_size) == count:
        return stated_size
    return -(-size // count)


def scaling(
    grid: tuple[int, int], shape: tuple[int, int], block: tuple[int, int] | None = None
) -> str:
    """Return ``tensor``, ``channel``, ``g128`` or ``block 128x128``.

    ``grid``: (rows, columns) of the scales; ``shape``: of the matrix; ``block``: the config's.
    """
    if grid[0] == shape[0]:
        if grid[1] == 1:
            return "channel"
        return f"g{tile(shape[1], grid[1])}"
    if grid[1] == 1:
        return "tensor"
    if block is None:
        block = (0, 0)
    rows = tile(shape[0], grid[0], block[0])
    columns = tile(shape[1], grid[1], block[1])
    return f"block {sizes_text([rows, columns])}"


def grouped(name: str, inputs: int, groups: int) -> str:
    """Return ``int4 g128``; ``int4 channel`` if all inputs are one group."""
    group_size = None
    if groups > 1:
        group_size = tile(inputs, groups)
    return with_group_size(name, group_size)


# One reader for each entry of FORMATS.


def _weight(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """Return how a module with a tensor ``weight`` stores its weights.

    An element of the tensor is one weight; in some formats it holds several of 4 or 6 bits, which
    the other parts show.  ``sizes``: all sizes that config.json states for the model.
    """
    weight = parts["weight"]
    for name in parts:
        if name.startswith(QUANT_STATE):
            return _bitsandbytes_4_bits(parts, parts[name])
    # Scales are in the blocks of the tensor.
    if weight.dtype.startswith(GGML):
        return Layout(weight.dtype.removeprefix(GGML), weight.numel)
    scale = scale_of(parts)
    if weight.dtype in ("U8", "I8", "I32"):
        return _integers(parts, config, scale)
    is_float = weight.dtype in FLOAT_DTYPES
    # Floats need no scale, so that this is an unknown format.
    if is_float and "scale" in parts:
        return NOT_KNOWN
    if not is_float and not weight.dtype.startswith("F8_E"):
        return NOT_KNOWN
    words = ""
    if is_float:
        words = FLOAT_DTYPES[weight.dtype]
    elif scale is not None:
        words = _eight_bits(weight, scale, config)
    has_padded_shape = len(weight.shape) == 2 and not any(size % 128 for size in weight.shape)
    if config.quant_method == "exl3" and has_padded_shape:
        # exllamav3 also pads 16-bit layers, if their size is in the config.
        rows, columns = (unpadded(size, 128, sizes, otherwise=size) for size in weight.shape)
        # 0: several sizes of the config pad to this one.
        if rows == 0 or columns == 0:
            return Layout(words, PADDED)
        return Layout(words, rows * columns)
    return Layout(words, weight.numel)


def _bitsandbytes_4_bits(parts: Parts, state: Tensor) -> Layout:
    """``state`` has a JSON object with the shape and the format."""
    described = parsed(stored(state).tobytes(), "quant_state")
    words = ""
    if {"weight.absmax", "weight.quant_map"} <= parts.keys():
        kind = "nf4" if described.get("quant_type") == "nf4" else "fp4"
        words = f"{kind} g{int(described.get('blocksize', 64))}"
    return Layout(words, math.prod(map(int, described["shape"])))


def _eight_bits(weight: Tensor, scale: Tensor, config: CheckpointConfig) -> str:
    """The name of FP8 or int8 with its scales; FP8 with a power of two per 32 weights is MXFP8."""
    shape = (weight.numel // weight.shape[-1], weight.shape[-1])
    grid = scale_grid(scale, shape[0])
    if weight.dtype != "I8" and scale.dtype in POWERS and grid[1] * 32 == shape[1]:
        return "mxfp8 g32"
    if weight.dtype not in EIGHT_BITS:
        return ""
    return f"{EIGHT_BITS[weight.dtype]} {scaling(grid, shape, config.block)}"


def _integers(parts: Parts, config: CheckpointConfig, scale: Tensor | None) -> Layout:
    """``weight`` of integers, whose format follows from dtype and number of its scales.

    ModelOpt's NVFP4 has FP8 scales.  MXFP4 of Quark (U8) and of DeepSeek-V4 (I8) has a power of two
    per 16 bytes, MXFP6 per 24.
    """
    weight = parts["weight"]
    if "SCB" in parts:  # bitsandbytes, 8 bits
        if weight.dtype != "I8":
            return NOT_KNOWN
        return Layout("int8 channel", weight.numel)
    if scale is None:
        return NOT_KNOWN
    # Quark's int4, [in, out / 8]
    if weight.dtype == "I32" and scale.shape[-1] == weight.shape[-1] * 8:
        return Layout(grouped("int4", weight.shape[0], scale.shape[0]), weight.numel * 8)
    if weight.dtype == "U8" and scale.dtype == "F8_E4M3":
        words = ""
        if "weight_scale_2" in parts:
            words = f"nvfp4 g{2 * weight.shape[-1] // scale.shape[-1]}"
        return Layout(words, weight.numel * 2)
    if weight.dtype != "I32" and scale.dtype in POWERS and scale.shape[:-1] == weight.shape[:-1]:
        group_bytes, remainder = divmod(weight.shape[-1], scale.shape[-1])
        words = {16: "mxfp4 g32", 24: "mxfp6 g32"}.get(group_bytes, "")
        if remainder or not words:
            return NOT_KNOWN
        return Layout(words, weight.numel * 32 // group_bytes)
    if weight.dtype == "I8" and "weight_scale" in parts and scale.dtype in FLOAT_DTYPES:
        return Layout(_eight_bits(weight, scale, config), weight.numel)
    return NOT_KNOWN


def _weight_packed(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """compressed-tensors and gpt-oss: words of integers, or bytes of two 4-bit weights."""
    packed = parts["weight_packed"]
    scale = parts.get("weight_scale")
    if "weight_shape" in parts:
        return _packed_integers(parts)
    if packed.dtype != "U8":
        return NOT_KNOWN
    weights = packed.numel * 2
    if scale is None:
        return Layout("", weights)
    if len(packed.shape) == 4:  # gpt-oss: [experts, out, in / 32, 16]
        words = ""
        if scale.shape == packed.shape[:-1]:
            words = "mxfp4 g32"
        return Layout(words, weights)
    if scale.dtype in POWERS:
        kind = "mxfp4"
    elif scale.dtype == "F8_E4M3" and "weight_global_scale" in parts:
        kind = "nvfp4"
    else:
        return Layout("", weights)
    return Layout(f"{kind} g{2 * packed.shape[-1] // scale.shape[-1]}", weights)


def _packed_integers(parts: Parts) -> Layout:
    """compressed-tensors: int32 words, and the matrix's shape in ``weight_shape``."""
    packed = parts["weight_packed"]
    shape = parts["weight_shape"]
    scale = parts.get("weight_scale")
    if shape.dtype not in ("I32", "I64") or is_long_list(shape):
        return Layout("", DAMAGED)
    lengths = [int(size) for size in stored(shape).reshape(-1)]
    *_, rows, columns = lengths
    weights = math.prod(lengths)
    if scale is None or packed.dtype != "I32":
        return Layout("", weights)
    # Words per row do not distinguish 7 bits from 8, for example.
    for bits in (4, 8, 2, 3, 5, 6):
        if -(-columns // (32 // bits)) == packed.shape[-1]:
            kind = "uint" if "weight_zero_point" in parts else "int"
            scales = scaling(scale_grid(scale, rows), (rows, columns))
            return Layout(f"{kind}{bits} {scales}", weights)
    return Layout("", weights)


def _qweight(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """GPTQ [in * bits / 32, out] and AWQ [in, out * bits / 32].

    The bits follow from the shapes of other parts: ``scales`` is [groups, out], ``qzeros`` [groups,
    out * bits / 32], ``g_idx`` [in].
    """
    packed = parts["qweight"]
    scales = parts.get("scales")
    zeros = parts.get("qzeros")
    indices = parts.get("g_idx")
    if packed.dtype != "I32" or scales is None:
        return NOT_KNOWN
    possible_bits = set()
    if zeros is not None:
        possible_bits.add(zeros.shape[-1] * 32 / scales.shape[-1])
    if indices is not None and indices.numel:
        possible_bits.add(packed.shape[0] * 32 / indices.numel)
    if len(possible_bits) > 1:
        return NOT_KNOWN
    # The shapes decide: a config may have other bits for some layers.
    bits: float | None = config.bits
    if possible_bits:
        bits = possible_bits.pop()
    if bits not in (2, 3, 4, 8):
        return NOT_KNOWN
    weights = packed.numel * 32 // int(bits)
    outputs = scales.shape[-1]
    kind = "int" if packed.shape[1] == outputs else "uint"
    words = grouped(f"{kind}{int(bits)}", weights // outputs, scales.shape[0])
    return Layout(words, weights)


def _torchao(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """FP8; int8; or int4, two per byte with scales and float zero points [in / group, out]."""
    codes = parts["_weight_qdata"]
    zeros = parts.get("_weight_zero_point")
    scale = parts.get("_weight_scale")
    if scale is None:
        return NOT_KNOWN
    if zeros is not None and zeros.dtype in FLOAT_DTYPES:
        if scale.shape != zeros.shape or scale.shape[-1] != codes.shape[-2]:
            return NOT_KNOWN
        if codes.dtype not in ("I8", "U8"):
            return NOT_KNOWN
        columns = codes.shape[-1] * 2
        if columns % scale.shape[-2]:
            return NOT_KNOWN
        return Layout(f"int4 g{columns // scale.shape[-2]}", codes.numel * 2)
    is_fp8 = codes.dtype == "F8_E4M3"
    is_int8 = codes.dtype == "I8" and zeros is not None and zeros.dtype == "I8"
    if not is_fp8 and not is_int8:
        return NOT_KNOWN
    return Layout(_eight_bits(codes, scale, config), codes.numel)


def _exl3(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """EXL3: ``trellis`` [in / 16, out / 16, 16 * bits], in and out padded to multiples of 128."""
    shape = parts["trellis"].shape
    if len(shape) != 3:  # a quantized embedding has two dimensions
        return NOT_KNOWN
    weights = math.prod(unpadded(size * 16, 128, sizes) for size in shape[:2])
    has_signs = parts.keys() & {"suh", "su"} and parts.keys() & {"svh", "sv"}
    words = ""
    if has_signs:
        words = f"exl3 {shape[2] / 16:g} bits"
    return Layout(words, weights or PADDED)


FORMATS: dict[str, tuple[Reader, str]] = {
    "trellis": (_exl3, "trellis suh svh su sv mcg mul1"),
    "qweight": (_qweight, "qweight qzeros scales g_idx"),
    "weight_packed": (
        _weight_packed,
        "weight_packed weight_scale weight_zero_point weight_global_scale weight_g_idx",
    ),
    "_weight_qdata": (
        _torchao,
        "_weight_qdata _weight_scale _weight_zero_point _weight_act_pre_scale",
    ),
    "weight": (
        _weight,
        "weight weight_scale weight_scale_2 weight_scale_inv weight_zero_point weight_g_idx "
        "pre_quant_scale SCB scale "
        "weight.absmax weight.quant_map weight.nested_absmax weight.nested_quant_map",
    ),
}
"""Name of the part with the weights -> (its reader, names of the parts that are stored bits).

A module has the format of the first name among its parts that is a matrix."""


def main_part(parts: Parts) -> str | None:
    """Return the part of a module that has its weights; None if it has no matrix of a format."""
    for name in FORMATS:
        if name in parts and len(parts[name].shape) > 1:
            return name
    return None


def main_tensor(parts: Parts) -> Tensor:
    """Return the tensor that has a module's weights; the module must have a matrix."""
    main = main_part(parts)
    assert main is not None, "the module has no matrix"
    return parts[main]


def is_quantized(parts: Parts) -> bool:
    """Return True if a module's weights are stored in less than 16 bits."""
    main = main_part(parts)
    return main is not None and (main != "weight" or parts[main].dtype not in FLOAT_DTYPES)


def layout_of(parts: Parts, config: CheckpointConfig, role: str = "") -> Layout:
    """Return the layout of a module with a main part; its unpadded sizes depend on ``role``."""
    main = main_part(parts)
    assert main is not None
    reader, _ = FORMATS[main]
    try:
        return reader(parts, config, config.sizes.get(role, frozenset()))
    except (ArithmeticError, AttributeError, InputError, LookupError, TypeError, ValueError):
        return Layout("", DAMAGED)


def stored_weights(name: str, parts: Parts, role: str, config: CheckpointConfig) -> tuple[int, int]:
    """Return (bits, weights) of the module ``name``, both 0 if it has no matrix.

    UnsizedError if they are unknown.  They are also unknown if the module has another tensor that
    may hold weights.  ``role``: "layer", "head" or "embedding".
    """
    main = main_part(parts)
    of_format = set()
    if main is not None:
        of_format = set(FORMATS[main][1].split())
    unexplained = []
    for part, tensor in parts.items():
        if part in of_format or part in NOT_BITS:
            continue
        # gpt-oss's experts have ``gate_up_proj_bias``.
        if part.endswith("_bias") or part.startswith(QUANT_STATE):
            continue
        if main is not None:
            may_be_weights = tensor.numel > 0
        else:
            may_be_weights = len(tensor.shape) > 1 or is_long_list(tensor)
        if may_be_weights:
            unexplained.append(part)
    if unexplained:
        raise UnsizedError(f"{name}.{min(unexplained)}: {UNSIZED_FORMAT}")
    if main is None:
        return 0, 0
    weights = layout_of(parts, config, role).weights
    if isinstance(weights, str):  # why the number is unknown
        raise UnsizedError(f"{name}.{main}: {weights}")
    # Some formats store the matrix's shape, which may be damaged.
    if weights < 0:
        raise UnsizedError(f"{name}.{main}: {DAMAGED}")
    bits = sum(parts[part].nbytes * 8 for part in of_format & parts.keys())
    return bits, weights


def is_long_list(tensor: Tensor) -> bool:
    """Return True for a row of integers that can be the weights of a matrix, as in SpQR."""
    return tensor.dtype[0] in "IU" and tensor.numel > LONGEST_LIST
