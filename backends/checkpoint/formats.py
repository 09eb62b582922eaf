"""The formats of one weight matrix in safetensors: which tensors are its bits, and how many weights they encode.

Known are those of docs/formats.md.  Not known: HQQ and quanto (which Transformers does not save), AQLM and others.
A tensor beside the weight that is neither bits of its format nor in ``NOT_BITS``
makes the matrix unknown, so that no format is taken for another format that resembles it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from backends.checkpoint.files import Tensor
from backends.checkpoint.hints import ConfigHints, unpadded
from backends.common.errors import InputError
from backends.common.json_files import parsed

Parts = dict[str, Tensor]
"""Part name ("weight", "scales", "weight.absmax", ...) -> tensor, of one module."""

UNKNOWN = "stored in a format that compare_q cannot size"
DAMAGED = "what is stored beside it does not fit it"
LONGEST = 1 << 20
"""Bytes of a tensor that describes another; bitsandbytes' descriptions have some hundred."""
LONGEST_LIST = 1024
"""Integers in one row that may describe something else than weights."""
PADDED = "padded, and config.json does not say from which size"
FLOATS = {"F64", "F32", "F16", "BF16"}
POWERS = {"U8", "F8_E8M0"}
"""Dtypes of the scales of OCP's microscaling formats, which are powers of two."""
NOT_BITS = {
    "bias", "weight_shape", "weight_format", "input_scale", "input_scale_ub", "input_zero_point", "input_global_scale",
    "activation_scale", "output_scale", "k_scale", "v_scale", "q_scale", "A_log", "inv_freq",
    "act_global_scale", "backward_hadamard_matrix", "workspace", "shape",
    "hc_attn_fn", "hc_ffn_fn", "hc_head_fn", "ape",
}  # fmt: skip
"""Parts that lie beside a weight, or have two dimensions, and are no stored weights.

The last line is DeepSeek-V4's: what mixes its residual streams, and positions.
"""


@dataclass(frozen=True)
class StoredWeights:
    """Stored bits, and the number of weights that they encode."""

    bits: int
    weights: int


@dataclass(frozen=True)
class Format:
    """``bits``: names of the parts that are stored bits; ``weights`` returns how many weights the parts encode.

    Where the number is not known, ``weights`` returns the reason.  Its third argument is the set of sizes that the
    matrix can have had before it was padded.
    """

    bits: frozenset[str]
    weights: Callable[[Parts, ConfigHints, frozenset[int]], int | str]


def _product(shape: Tensor) -> int:
    """The product of the sizes that a tensor of integers holds."""
    code = "i" if shape.dtype == "I32" else "q"
    return math.prod(map(int, struct.unpack(f"<{shape.numel}{code}", _whole(shape))))


def _whole(tensor: Tensor) -> bytes:
    if tensor.nbytes > LONGEST:
        raise ValueError("too long for a description")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        return stream.read(tensor.nbytes)


def _weight(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """``weight`` holds one weight an element, or two 4-bit ones a byte where other parts say so."""
    weight = parts["weight"]
    if state := next((part for part in parts if part.startswith("weight.quant_state.")), None):
        return math.prod(map(int, parsed(_whole(parts[state]), state)["shape"]))  # bitsandbytes, 4 bit
    if weight.dtype in ("U8", "I8", "I32"):
        return _packed_weight(parts, hints)
    if "scale" in parts and weight.dtype in FLOATS:
        return UNKNOWN
    if weight.dtype not in FLOATS and not weight.dtype.startswith("F8_E"):
        return UNKNOWN
    if hints.exl3 and len(weight.shape) == 2 and not any(size % 128 for size in weight.shape):
        # exllamav3 pads the layers that it leaves at 16 bits as well, but none whose size is in no config.
        return math.prod(unpadded(size, 128, sizes, size) for size in weight.shape) or PADDED
    return weight.numel


def _packed_weight(parts: Parts, hints: ConfigHints) -> int | str:
    """``weight`` of integers: what they are, its scales tell, and how many of its bytes each of them has.

    ModelOpt's NVFP4 has FP8 scales.  MXFP4 of Quark (U8) and of DeepSeek-V4 (I8) has a power of two for 16
    bytes, MXFP6 for 24.  W4AFP8 has float scales for parts of a row, as int8 with smaller groups would.
    """
    weight, inverse = parts["weight"], parts.get("weight_scale_inv")
    scale = parts.get("weight_scale") or parts.get("scale") or inverse
    if "SCB" in parts:
        return weight.numel if weight.dtype == "I8" else UNKNOWN
    if inverse is not None and inverse.dtype in FLOATS:
        rows = inverse.shape[:-1] == weight.shape[:-1]
        return weight.numel * 2 if weight.dtype == "I8" and hints.int4_bytes and rows else UNKNOWN
    if scale is None:
        return UNKNOWN
    if weight.dtype == "I32":  # Quark's int4, [in, out / 8]
        return weight.numel * 8 if scale.shape[-1] == weight.shape[-1] * 8 else UNKNOWN
    if weight.dtype == "U8" and scale.dtype == "F8_E4M3":
        return weight.numel * 2
    if scale.dtype in POWERS and scale.shape[:-1] == weight.shape[:-1]:
        group, rest = divmod(weight.shape[-1], scale.shape[-1])
        return UNKNOWN if rest or group not in (16, 24) else weight.numel * 32 // group
    return weight.numel if weight.dtype == "I8" and "weight_scale" in parts and scale.dtype in FLOATS else UNKNOWN


def _weight_packed(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """compressed-tensors and gpt-oss: int32 words with the shape beside them, or bytes of two 4-bit weights.

    Marlin's 2:4 has ``meta``, 2 bits for each weight that is stored, which is every second one.
    """
    packed, shape, meta = parts["weight_packed"], parts.get("weight_shape"), parts.get("meta")
    if meta is not None:
        kept = meta.nbytes * 8 // 2
        return 2 * kept if packed.dtype == "I32" and packed.nbytes * 8 in (4 * kept, 8 * kept) else UNKNOWN
    if shape is not None:
        return _product(shape)
    return packed.numel * 2 if packed.dtype == "U8" else UNKNOWN


def _qweight(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """GPTQ [in * bits / 32, out] and AWQ [in, out * bits / 32]: the bits are in the shapes of the parts beside them.

    ``scales`` is [groups, out], ``qzeros`` [groups, out * bits / 32], ``g_idx`` [in].  FP-Quant has bytes of two
    weights, and ``scales`` [out, in / 16 or in / 32] of a byte each.
    """
    packed, scales = parts["qweight"], parts.get("scales")
    if packed.dtype == "U8" and scales is not None and scales.dtype == "U8" and "weight_global_scale" in parts:
        return packed.numel * 2 if packed.numel in (8 * scales.numel, 16 * scales.numel) else UNKNOWN
    if packed.dtype != "I32" or scales is None:
        return UNKNOWN
    zeros, indices = parts.get("qzeros"), parts.get("g_idx")
    found = {zeros.shape[-1] * 32 / scales.shape[-1]} if zeros is not None else set()
    if indices is not None and indices.numel:
        found.add(packed.shape[0] * 32 / indices.numel)
    bits = found.pop() if found else hints.bits
    return packed.numel * 32 // int(bits) if not found and bits in (2, 3, 4, 8) else UNKNOWN


def _torchao(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """FP8; int8; or int4, two a byte with zero points of floats, or in tiles, padded to multiples of 8 and 1,024.

    Zero points of int4 are [in / group, out], in the dtype of the model; those of int8 are int8.  Tiles are [out / 8,
    in / 128, 32, 4] words, with scales and zero points in one tensor.
    """
    data, zeros, scale = parts["_weight_qdata"], parts.get("_weight_zero_point"), parts.get("_weight_scale")
    if "_weight_scale_and_zero" in parts:
        if data.dtype != "I32" or len(data.shape) != 4 or data.shape[2:] != (32, 4):
            return UNKNOWN
        rows, columns = data.shape[0] * 8, data.shape[1] * 128
        return unpadded(rows, 8, sizes, rows) * unpadded(columns, 1024, sizes) or PADDED
    if zeros is not None and zeros.dtype in FLOATS and scale is not None:
        fits = scale.shape == zeros.shape and scale.shape[-1] == data.shape[-2] and data.dtype in ("I8", "U8")
        return data.numel * 2 if fits and not data.shape[-1] * 2 % scale.shape[-2] else UNKNOWN
    whole = data.dtype == "F8_E4M3" or (data.dtype == "I8" and zeros is not None and zeros.dtype == "I8")
    return data.numel if whole else UNKNOWN


def _bitmask(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """compressed-tensors' sparse weights: those that are not zero, a bit for each weight, and the shape."""
    kept, mask, shape = parts.get("compressed"), parts["bitmask"], parts.get("shape")
    known = kept is not None and (kept.dtype in FLOATS or kept.dtype.startswith("F8_E") or kept.dtype == "I8")
    if shape is None or not known:
        return UNKNOWN
    weights = _product(shape)
    return weights if 0 <= weights <= mask.nbytes * 8 else DAMAGED


def _marlin(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """AutoGPTQ's Marlin files: ``B`` [in / 16, 2 * out] words of eight 4-bit weights, ``s`` [groups, out]."""
    packed, scales = parts["B"], parts.get("s")
    fits = packed.dtype == "I32" and scales is not None and scales.shape[-1] * 2 == packed.shape[-1]
    return packed.numel * 8 if fits else UNKNOWN


def _exl2(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """EXL2: rows as ``q_invperm`` [in], columns of ``q_weight`` [words, out], out padded to a multiple of 32."""
    if "q_invperm" not in parts:
        return UNKNOWN
    return parts["q_invperm"].numel * unpadded(parts["q_weight"].shape[-1], 32, sizes) or PADDED


def _exl3(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """EXL3: ``trellis`` [in / 16, out / 16, 16 * bits], in and out padded to multiples of 128."""
    shape = parts["trellis"].shape
    if len(shape) != 3:  # a quantized embedding has two dimensions
        return UNKNOWN
    return math.prod(unpadded(size * 16, 128, sizes) for size in shape[:2]) or PADDED


FORMATS = {
    "trellis": Format(frozenset({"trellis", "suh", "svh", "su", "sv", "mcg", "mul1"}), _exl3),
    "q_weight": Format(
        frozenset({"q_weight", "q_scale", "q_scale_max", "q_groups", "q_group_map", "q_invperm", "q_perm"}), _exl2
    ),
    "qweight": Format(
        frozenset({"qweight", "qzeros", "scales", "g_idx", "weight_global_scale", "forward_hadamard_matrix"}), _qweight
    ),
    "B": Format(frozenset({"B", "s"}), _marlin),
    "bitmask": Format(
        frozenset({"compressed", "bitmask", "row_offsets", "weight_scale", "weight_zero_point"}), _bitmask
    ),
    "weight_packed": Format(
        frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale",
                   "weight_g_idx", "meta", "scale_packed"}), _weight_packed
    ),
    "_weight_qdata": Format(
        frozenset({"_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_scale_and_zero",
                   "_weight_act_pre_scale"}), _torchao
    ),
    "weight": Format(
        frozenset({"weight", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_zero_point", "weight_g_idx",
                   "pre_quant_scale", "SCB", "scale", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
                   "weight.nested_quant_map"}), _weight
    ),
}  # fmt: skip
"""Name of the part that holds the weights -> format; a module has the format of the first name among its parts."""


def stored_weights(parts: Parts, role: str, hints: ConfigHints) -> StoredWeights | str:
    """Bits and weights of one module, both 0 if it has no matrix; or ``.part: why`` they are not known.

    ``role``: "layer", "head" or "embedding".
    """
    main = next((part for part in FORMATS if part in parts and len(parts[part].shape) > 1), None)
    if main is None:
        strange = sorted(part for part, tensor in parts.items() if _matrix(tensor) and not _beside(part))
        return f".{strange[0]}: {UNKNOWN}" if strange else StoredWeights(0, 0)
    form = FORMATS[main]
    strange = sorted(part for part in parts if part not in form.bits and not _beside(part) and parts[part].numel)
    if strange:
        return f".{strange[0]}: {UNKNOWN}"
    sizes = {"layer": hints.layer_sizes, "head": hints.head_sizes}.get(role, frozenset())
    try:
        weights = form.weights(parts, hints, sizes)
    except (ArithmeticError, InputError, LookupError, TypeError, ValueError, struct.error):
        weights = DAMAGED
    if isinstance(weights, str):
        return f".{main}: {weights}"
    if weights < 0:
        return f".{main}: {DAMAGED}"
    return StoredWeights(sum(parts[part].nbytes * 8 for part in form.bits & parts.keys()), weights)


def _matrix(tensor: Tensor) -> bool:
    """Whether a tensor can be the weights of a matrix: by its dimensions, or, as SpQR has them, a long row of words."""
    return len(tensor.shape) > 1 or (tensor.dtype[0] in "IU" and tensor.numel > LONGEST_LIST)


def _beside(part: str) -> bool:
    return part in NOT_BITS or part.endswith("_bias") or part.startswith("weight.quant_state.")
