"""Formats of a weight matrix in safetensors: which tensors are its bits, how many weights they
encode, its name.

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

UNKNOWN = "stored in a format that compare_q cannot size"
DAMAGED = "other tensors of its module do not fit it"
PADDED = "padded, and config.json does not say from which size"
UNEXPLAINED = "has the vocabulary's size, but its name does not identify it as head or embedding"
LONGEST_LIST = 1024
"""Largest number of integers in one row that do not count as weights."""
SMALL = 4096
"""Bytes of a tensor that is read at once."""
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""dtype in a header -> its name, for unquantized weights."""
EIGHT_BITS = {"I8": "int8", "F8_E4M3": "fp8", "F8_E5M2": "fp8 e5m2"}
POWERS = {"U8", "F8_E8M0"}
"""Dtypes of the scales of OCP's microscaling formats (powers of two)."""
NUMBERS = {
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
"""Parts of modules that are not stored weights.  The last four are DeepSeek-V4's mixing of residual
streams."""


class UnsizedError(Exception):
    """The stored size of a module is not known; the text names the tensor and the reason."""


class Layout(NamedTuple):
    """The format of one matrix ("int4 g128", "" if unknown), and its number of weights, or why that
    is unknown.
    """

    words: str
    weights: int | str


Reader = Callable[[Parts, CheckpointConfig, frozenset[int]], Layout]
"""Reads the layout of a module's parts; the third argument has the sizes that the matrix can have
before padding."""
NOT_KNOWN = Layout("", UNKNOWN)


# Stored numbers, without torch where numpy knows them.


def stored(tensor: Tensor) -> NDArray[Any]:
    """A tensor as stored, in its shape, mapped into memory if it is not small; ValueError for an
    unknown dtype.
    """
    if tensor.dtype not in NUMBERS:
        raise ValueError(f"its dtype {tensor.dtype} is not known")
    if (
        tensor.nbytes <= SMALL
    ):  # a map takes three times as long, and models of many experts have 100,000 of them
        found = np.fromfile(tensor.file, NUMBERS[tensor.dtype], tensor.numel, offset=tensor.start)
        return found.reshape(tensor.shape)
    return np.memmap(tensor.file, NUMBERS[tensor.dtype], "r", tensor.start, tensor.shape)


def values(tensor: Tensor) -> NDArray[np.float32]:
    """A whole tensor as float32; ValueError for an unknown dtype."""
    return as_float32(stored(tensor), tensor.dtype)


def as_float32(found: Any, dtype: str) -> NDArray[np.float32]:
    """Numbers that ``stored`` returned for this dtype, or some of them, as float32."""
    if dtype == "BF16":
        found = np.left_shift(found, 16, dtype=np.uint32).view(np.float32)
    elif dtype in TORCH_NAMES:
        import torch  # numpy has no floats of 8 bits

        found = (
            torch.from_numpy(np.array(found))
            .view(getattr(torch, TORCH_NAMES[dtype]))
            .float()
            .numpy()
        )
    return np.asarray(found, np.float32)


# Granularity of scales, by their shapes.


def scale_grid(scale: Tensor, rows: int) -> tuple[int, int]:
    """(rows, columns) of the scales of a matrix with ``rows`` rows; a vector has one scale per row
    or part of a row.
    """
    if len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1:  # ModelOpt's FP8 in blocks
        return scale.shape[0], scale.shape[2]
    if len(scale.shape) > 1:
        return math.prod(scale.shape[:-1]), scale.shape[-1]
    return (scale.numel, 1) if rows % max(scale.numel, 1) == 0 else (1, scale.numel)


def tile(size: int, count: int, given: int = 0) -> int:
    """Number of rows or columns that share a scale: ``given`` if it fits, else the smallest that
    fits.
    """
    return given if given and -(-size // given) == count else -(-size // count)


def scaling(
    grid: tuple[int, int], shape: tuple[int, int], block: tuple[int, int] | None = None
) -> str:
    """``tensor``, ``channel``, ``g128`` or ``block 128x128``, for a matrix with a grid of scales."""
    if grid[0] == shape[0]:
        return "channel" if grid[1] == 1 else f"g{tile(shape[1], grid[1])}"
    if grid[1] == 1:
        return "tensor"
    return f"block {sizes_text([tile(*sizes) for sizes in zip(shape, grid, block or (0, 0), strict=True)])}"


def grouped(name: str, inputs: int, groups: int) -> str:
    """``int4 g128``; ``int4 channel`` if all inputs are one group."""
    return with_group_size(name, tile(inputs, groups) if groups > 1 else None)


# One reader for each entry of FORMATS.


def _weight(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """``weight`` has one weight per element, or several of 4 or 6 bits, depending on the module's
    other parts.
    """
    weight = parts["weight"]
    scale = next(
        (parts[name] for name in ("weight_scale", "weight_scale_inv", "scale") if name in parts),
        None,
    )
    if state := next(
        (part for part in parts if part.startswith("weight.quant_state.")), None
    ):  # bitsandbytes, 4 bits
        described = parsed(stored(parts[state]).tobytes(), "quant_state")
        kind = "nf4" if described.get("quant_type") == "nf4" else "fp4"
        is_whole = {"weight.absmax", "weight.quant_map"} <= parts.keys()
        words = f"{kind} g{int(described.get('blocksize', 64))}" if is_whole else ""
        return Layout(words, math.prod(map(int, described["shape"])))
    if weight.dtype in ("U8", "I8", "I32"):
        return _integers(parts, config, scale)
    is_float = weight.dtype in FLOATS
    if (is_float and "scale" in parts) or not (is_float or weight.dtype.startswith("F8_E")):
        return NOT_KNOWN
    words = FLOATS.get(weight.dtype) or (
        "" if scale is None else _eight_bits(weight, scale, config)
    )
    if (
        config.quant_method == "exl3"
        and len(weight.shape) == 2
        and not any(size % 128 for size in weight.shape)
    ):
        # exllamav3 also pads 16-bit layers, if their size is in the config.
        return Layout(
            words, math.prod(unpadded(size, 128, sizes, size) for size in weight.shape) or PADDED
        )
    return Layout(words, weight.numel)


def _eight_bits(weight: Tensor, scale: Tensor, config: CheckpointConfig) -> str:
    """The name of FP8 or int8 with its scales; FP8 with a power of two per 32 weights is MXFP8."""
    shape = weight.numel // weight.shape[-1], weight.shape[-1]
    grid = scale_grid(scale, shape[0])
    if weight.dtype != "I8" and scale.dtype in POWERS and grid[1] * 32 == shape[1]:
        return "mxfp8 g32"
    return (
        f"{EIGHT_BITS[weight.dtype]} {scaling(grid, shape, config.block)}"
        if weight.dtype in EIGHT_BITS
        else ""
    )


def _integers(parts: Parts, config: CheckpointConfig, scale: Tensor | None) -> Layout:
    """``weight`` of integers, whose format follows from dtype and number of its scales.

    ModelOpt's NVFP4 has FP8 scales.  MXFP4 of Quark (U8) and of DeepSeek-V4 (I8) has a power of two
    per 16 bytes, MXFP6 per 24.
    """
    weight = parts["weight"]
    if "SCB" in parts:  # bitsandbytes, 8 bits
        return Layout("int8 channel", weight.numel) if weight.dtype == "I8" else NOT_KNOWN
    if scale is None:
        return NOT_KNOWN
    if (
        weight.dtype == "I32" and scale.shape[-1] == weight.shape[-1] * 8
    ):  # Quark's int4, [in, out / 8]
        return Layout(grouped("int4", weight.shape[0], scale.shape[0]), weight.numel * 8)
    if weight.dtype == "U8" and scale.dtype == "F8_E4M3":
        words = (
            f"nvfp4 g{2 * weight.shape[-1] // scale.shape[-1]}" if "weight_scale_2" in parts else ""
        )
        return Layout(words, weight.numel * 2)
    if weight.dtype != "I32" and scale.dtype in POWERS and scale.shape[:-1] == weight.shape[:-1]:
        group, rest = divmod(weight.shape[-1], scale.shape[-1])
        words = {16: "mxfp4 g32", 24: "mxfp6 g32"}.get(group, "")
        return NOT_KNOWN if rest or not words else Layout(words, weight.numel * 32 // group)
    if weight.dtype == "I8" and "weight_scale" in parts and scale.dtype in FLOATS:
        return Layout(_eight_bits(weight, scale, config), weight.numel)
    return NOT_KNOWN


def _weight_packed(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """compressed-tensors and gpt-oss: int32 words and ``weight_shape``, or bytes of two 4-bit
    weights.
    """
    packed, shape, scale = (
        parts["weight_packed"],
        parts.get("weight_shape"),
        parts.get("weight_scale"),
    )
    if shape is not None:
        if shape.dtype not in ("I32", "I64") or is_long_list(shape):
            return Layout("", DAMAGED)
        lengths = [int(size) for size in stored(shape).reshape(-1)]
        *_, rows, columns = lengths
        # Words per row do not distinguish 7 bits from 8, for example.
        bits = next(
            (
                bits
                for bits in (4, 8, 2, 3, 5, 6)
                if -(-columns // (32 // bits)) == packed.shape[-1]
            ),
            0,
        )
        if not bits or scale is None or packed.dtype != "I32":
            return Layout("", math.prod(lengths))
        name = f"{'uint' if 'weight_zero_point' in parts else 'int'}{bits}"
        return Layout(
            f"{name} {scaling(scale_grid(scale, rows), (rows, columns))}", math.prod(lengths)
        )
    if packed.dtype != "U8":
        return NOT_KNOWN
    if scale is None:
        return Layout("", packed.numel * 2)
    if len(packed.shape) == 4:  # gpt-oss: [experts, out, in / 32, 16]
        return Layout("mxfp4 g32" if scale.shape == packed.shape[:-1] else "", packed.numel * 2)
    is_nvfp4 = scale.dtype == "F8_E4M3" and "weight_global_scale" in parts
    name = "mxfp4" if scale.dtype in POWERS else "nvfp4" if is_nvfp4 else ""
    return Layout(name and f"{name} g{2 * packed.shape[-1] // scale.shape[-1]}", packed.numel * 2)


def _qweight(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """GPTQ [in * bits / 32, out] and AWQ [in, out * bits / 32]; the bits follow from the shapes of
    other parts.

    ``scales`` is [groups, out], ``qzeros`` [groups, out * bits / 32], ``g_idx`` [in].
    """
    packed, scales, zeros, indices = (
        parts.get(name) for name in ("qweight", "scales", "qzeros", "g_idx")
    )
    if packed is None or packed.dtype != "I32" or scales is None:
        return NOT_KNOWN
    told = {zeros.shape[-1] * 32 / scales.shape[-1]} if zeros is not None else set()
    if indices is not None and indices.numel:
        told.add(packed.shape[0] * 32 / indices.numel)
    bits = told.pop() if told else config.bits
    if told or bits not in (2, 3, 4, 8):
        return NOT_KNOWN
    weights, outputs = packed.numel * 32 // int(bits), scales.shape[-1]
    name = f"{'int' if packed.shape[1] == outputs else 'uint'}{int(bits)}"
    return Layout(grouped(name, weights // outputs, scales.shape[0]), weights)


def _torchao(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """FP8; int8; or int4, two per byte with scales and float zero points [in / group, out]."""
    data, zeros, scale = (
        parts["_weight_qdata"],
        parts.get("_weight_zero_point"),
        parts.get("_weight_scale"),
    )
    if scale is None:
        return NOT_KNOWN
    if zeros is not None and zeros.dtype in FLOATS:
        fits = (
            scale.shape == zeros.shape
            and scale.shape[-1] == data.shape[-2]
            and data.dtype in ("I8", "U8")
        )
        columns = data.shape[-1] * 2
        known = fits and not columns % scale.shape[-2]
        return Layout(f"int4 g{columns // scale.shape[-2]}", data.numel * 2) if known else NOT_KNOWN
    whole = data.dtype == "F8_E4M3" or (
        data.dtype == "I8" and zeros is not None and zeros.dtype == "I8"
    )
    return Layout(_eight_bits(data, scale, config), data.numel) if whole else NOT_KNOWN


def _exl3(parts: Parts, config: CheckpointConfig, sizes: frozenset[int]) -> Layout:
    """EXL3: ``trellis`` [in / 16, out / 16, 16 * bits], in and out padded to multiples of 128."""
    shape = parts["trellis"].shape
    if len(shape) != 3:  # a quantized embedding has two dimensions
        return NOT_KNOWN
    weights = math.prod(unpadded(size * 16, 128, sizes) for size in shape[:2])
    signs = parts.keys() & {"suh", "su"} and parts.keys() & {"svh", "sv"}
    return Layout(f"exl3 {shape[2] / 16:g} bits" if signs else "", weights or PADDED)


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
        "weight weight_scale weight_scale_2 weight_scale_inv weight_zero_point weight_g_idx pre_quant_scale SCB scale "
        "weight.absmax weight.quant_map weight.nested_absmax weight.nested_quant_map",
    ),
}
"""Name of the part with the weights -> (its reader, names of the parts that are stored bits).

A module has the format of the first name among its parts that is a matrix."""


def main_part(parts: Parts) -> str | None:
    """The part of a module that has its weights; None if it has no matrix in a known format."""
    return next((part for part in FORMATS if part in parts and len(parts[part].shape) > 1), None)


def is_quantized(parts: Parts) -> bool:
    """True if a module's weights are stored in less than 16 bits."""
    main = main_part(parts)
    return main is not None and (main != "weight" or parts[main].dtype not in FLOATS)


def layout_of(parts: Parts, config: CheckpointConfig, role: str = "") -> Layout:
    """The layout of a module with a main part; its sizes before padding depend on ``role``."""
    main = main_part(parts)
    assert main is not None
    try:
        return FORMATS[main][0](parts, config, config.sizes.get(role, frozenset()))
    except (ArithmeticError, AttributeError, InputError, LookupError, TypeError, ValueError):
        return Layout("", DAMAGED)


def stored_weights(name: str, parts: Parts, role: str, config: CheckpointConfig) -> tuple[int, int]:
    """(bits, weights) of the module ``name``, both 0 if it has no matrix; UnsizedError if they are
    unknown.

    ``role``: "layer", "head" or "embedding".
    """
    main = main_part(parts)
    bits = set(FORMATS[main][1].split()) if main else set()
    strange = sorted(
        part
        for part, tensor in parts.items()
        if part not in bits | NOT_BITS
        and not part.endswith("_bias")
        and not part.startswith("weight.quant_state.")
        and (tensor.numel if main else len(tensor.shape) > 1 or is_long_list(tensor))
    )
    if strange:
        raise UnsizedError(f"{name}.{strange[0]}: {UNKNOWN}")
    if main is None:
        return 0, 0
    weights = layout_of(parts, config, role).weights
    if isinstance(weights, str) or weights < 0:
        raise UnsizedError(f"{name}.{main}: {weights if isinstance(weights, str) else DAMAGED}")
    return sum(parts[part].nbytes * 8 for part in bits & parts.keys()), weights


def is_long_list(tensor: Tensor) -> bool:
    """True for a row of integers that can be the weights of a matrix, as in SpQR."""
    return tensor.dtype[0] in "IU" and tensor.numel > LONGEST_LIST
