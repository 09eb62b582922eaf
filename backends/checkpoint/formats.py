"""The formats of one weight matrix in safetensors: which tensors are its bits, and how many weights they encode.

Known: floats, FP8 and int8 with their scales; compressed-tensors (pack-, int-, float- and naive-quantized, NVFP4,
MXFP4, MXFP8, and mixtures); modelopt's FP8 and NVFP4; gpt-oss's MXFP4; GPTQ and AWQ; bitsandbytes; torchao's 8 bits;
EXL2 and EXL3.  Not known: 2:4-sparse and Marlin-packed layers, torchao below 8 bits, HQQ and quanto (which Transformers
does not save), AQLM and others.  A tensor beside the weight that is neither bits of its format nor in ``NOT_BITS``
makes the matrix unknown, so that no format is taken for another format that resembles it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from backends.checkpoint.config import CheckpointConfig
from backends.checkpoint.files import Tensor
from backends.common.errors import InputError
from backends.common.json_files import parsed

Parts = dict[str, Tensor]
"""Part name ("weight", "scales", "weight.absmax", ...) -> tensor, of one module."""

UNKNOWN = "stored in a format that compare_q cannot size"
DAMAGED = "what is stored beside it does not fit it"
LONGEST = 1 << 20
"""Bytes of a tensor that describes another; bitsandbytes' descriptions have some hundred."""
PADDED = "padded, and config.json does not say from which size"
FLOATS = {"F64", "F32", "F16", "BF16"}
NOT_BITS = {
    "bias", "weight_shape", "weight_format", "input_scale", "input_scale_ub", "input_zero_point", "input_global_scale",
    "activation_scale", "output_scale", "k_scale", "v_scale", "q_scale", "A_log", "inv_freq",
}  # fmt: skip
"""Parts that lie beside a weight, or have two dimensions, and are no stored weights."""
PAIRS = (
    ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim"), ("num_attention_heads", "v_head_dim"),
    ("num_attention_heads", "global_head_dim"), ("num_key_value_heads", "global_head_dim"),
    ("num_global_key_value_heads", "global_head_dim"), ("n_shared_experts", "moe_intermediate_size"),
)  # fmt: skip
"""Pairs of config keys whose product is a number of features."""


@dataclass(frozen=True)
class StoredWeights:
    """Stored bits, and the number of weights that they encode."""

    bits: int
    weights: int


@dataclass(frozen=True)
class ConfigHints:
    """What a config says of stored weights that headers do not.

    ``bits`` of a GPTQ or AWQ weight, None if layers may differ in them; ``layer_sizes`` and ``head_sizes``: the numbers
    of features that linear layers and the head can have, for formats that pad them; ``exl3``: whether exllamav3 wrote
    the files.
    """

    bits: int | None
    layer_sizes: frozenset[int]
    head_sizes: frozenset[int]
    exl3: bool


@dataclass(frozen=True)
class Format:
    """``bits``: names of the parts that are stored bits; ``weights`` returns how many weights the parts encode.

    Where the number is not known, ``weights`` returns the reason.  Its third argument is the set of sizes that the
    matrix can have had before it was padded.
    """

    bits: frozenset[str]
    weights: Callable[[Parts, ConfigHints, frozenset[int]], int | str]


def config_hints(config: CheckpointConfig) -> ConfigHints:
    """The hints in a checkpoint's config."""
    quantization = config.quantization
    bits = quantization.get("bits", quantization.get("w_bit"))
    uniform = isinstance(bits, int) and not quantization.get("dynamic")  # GPTQModel: other bits in some layers
    known = {key: value for key, value in config.text.items() if isinstance(value, int)}
    ends = frozenset({known.get("hidden_size", 0), known.get("vocab_size", 0)} - {0})
    exl3 = quantization.get("quant_method") == "exl3"
    return ConfigHints(bits if uniform else None, frozenset(_layer_sizes(known)), ends, exl3)


def _layer_sizes(known: dict[str, int]) -> set[int]:
    """Features that linear layers can have, from the usual keys of attention, MLA, delta nets and (shared) experts."""

    def times(count: str, each: str) -> int:
        return known.get(count, 0) * known.get(each, 0)

    heads = known.get("num_attention_heads", 0)
    known = {"num_key_value_heads": heads, "head_dim": known.get("hidden_size", 0) // max(heads, 1), **known}
    sizes = {value for key, value in known.items() if key.endswith(("hidden_size", "intermediate_size", "lora_rank"))}
    sizes |= {times(*pair) for pair in PAIRS} | {2 * times("num_attention_heads", "head_dim")}  # queries with a gate
    keys = times("linear_num_key_heads", "linear_key_head_dim")
    values = times("linear_num_value_heads", "linear_value_head_dim")
    sizes |= {values, 2 * keys + values, 2 * (keys + values)}  # out_proj, in_proj_qkv, in_proj_qkvz
    if nope := known.get("qk_nope_head_dim", 0):
        rope, value = known.get("qk_rope_head_dim", 0), known.get("v_head_dim", 0)
        sizes |= {known.get("kv_lora_rank", 0) + rope, heads * (nope + rope), heads * (nope + value)}
    return sizes - {0}


def _unpadded(size: int, multiple: int, sizes: frozenset[int], otherwise: int = 0) -> int:
    """The only one of ``sizes`` that pads to ``size``; 0 if several sizes do, ``otherwise`` if no size does."""
    found = [known for known in sizes if -(-known // multiple) * multiple == size]
    return found[0] if len(found) == 1 else 0 if found else otherwise


def _whole(tensor: Tensor) -> bytes:
    if tensor.nbytes > LONGEST:
        raise ValueError("too long for a description")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        return stream.read(tensor.nbytes)


def _weight(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """``weight`` holds one weight an element, or two 4-bit ones a byte where other parts say so."""
    weight, scale = parts["weight"], parts.get("weight_scale")
    if state := next((part for part in parts if part.startswith("weight.quant_state.")), None):
        return math.prod(map(int, parsed(_whole(parts[state]), state)["shape"]))  # bitsandbytes, 4 bit
    if weight.dtype == "U8":  # modelopt's NVFP4 has fp8 scales; scales of another dtype leave 8 bits possible
        return weight.numel * 2 if scale is not None and scale.dtype == "F8_E4M3" else UNKNOWN
    if weight.dtype == "I8":  # MXFP4 as DeepSeek V4 stores it is I8 too, with powers of two for scales
        known = "SCB" in parts or (scale is not None and scale.dtype in FLOATS)
        return weight.numel if known else UNKNOWN
    if weight.dtype not in FLOATS and not weight.dtype.startswith("F8_E"):
        return UNKNOWN
    if hints.exl3 and len(weight.shape) == 2 and not any(size % 128 for size in weight.shape):
        # exllamav3 pads the layers that it leaves at 16 bits as well, but none whose size is in no config.
        return math.prod(_unpadded(size, 128, sizes, size) for size in weight.shape) or PADDED
    return weight.numel


def _weight_packed(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """compressed-tensors and gpt-oss: int32 words with the shape beside them, or bytes of two 4-bit weights."""
    packed, shape = parts["weight_packed"], parts.get("weight_shape")
    if shape is not None:
        code = "i" if shape.dtype == "I32" else "q"
        return math.prod(map(int, struct.unpack(f"<{shape.numel}{code}", _whole(shape))))
    return packed.numel * 2 if packed.dtype == "U8" else UNKNOWN


def _qweight(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """GPTQ [in * bits / 32, out] and AWQ [in, out * bits / 32]: the bits are in the shapes of the parts beside them.

    ``scales`` is [groups, out], ``qzeros`` [groups, out * bits / 32], ``g_idx`` [in].
    """
    packed, scales = parts["qweight"], parts.get("scales")
    if packed.dtype != "I32" or scales is None:
        return UNKNOWN
    zeros, indices = parts.get("qzeros"), parts.get("g_idx")
    found = {zeros.shape[-1] * 32 / scales.shape[-1]} if zeros is not None else set()
    if indices is not None and indices.numel:
        found.add(packed.shape[0] * 32 / indices.numel)
    bits = found.pop() if found else hints.bits
    return packed.numel * 32 // int(bits) if not found and bits in (2, 3, 4, 8) else UNKNOWN


def _torchao(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """FP8, or int8 that int8 zero points tell from two int4 a byte (whose zero points are floats)."""
    data, zeros = parts["_weight_qdata"], parts.get("_weight_zero_point")
    whole = data.dtype == "F8_E4M3" or (data.dtype == "I8" and zeros is not None and zeros.dtype == "I8")
    return data.numel if whole else UNKNOWN


def _exl2(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """EXL2: rows as ``q_invperm`` [in], columns of ``q_weight`` [words, out], out padded to a multiple of 32."""
    if "q_invperm" not in parts:
        return UNKNOWN
    return parts["q_invperm"].numel * _unpadded(parts["q_weight"].shape[-1], 32, sizes) or PADDED


def _exl3(parts: Parts, hints: ConfigHints, sizes: frozenset[int]) -> int | str:
    """EXL3: ``trellis`` [in / 16, out / 16, 16 * bits], in and out padded to multiples of 128."""
    shape = parts["trellis"].shape
    if len(shape) != 3:  # a quantized embedding has two dimensions
        return UNKNOWN
    return math.prod(_unpadded(size * 16, 128, sizes) for size in shape[:2]) or PADDED


FORMATS = {
    "trellis": Format(frozenset({"trellis", "suh", "svh", "su", "sv", "mcg", "mul1"}), _exl3),
    "q_weight": Format(
        frozenset({"q_weight", "q_scale", "q_scale_max", "q_groups", "q_group_map", "q_invperm", "q_perm"}), _exl2
    ),
    "qweight": Format(frozenset({"qweight", "qzeros", "scales", "g_idx"}), _qweight),
    "weight_packed": Format(
        frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale",
                   "weight_g_idx"}), _weight_packed
    ),
    "_weight_qdata": Format(frozenset({"_weight_qdata", "_weight_scale", "_weight_zero_point"}), _torchao),
    "weight": Format(
        frozenset({"weight", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_zero_point", "weight_g_idx",
                   "pre_quant_scale", "SCB", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
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
        strange = sorted(part for part, tensor in parts.items() if len(tensor.shape) > 1 and not _beside(part))
        return f".{strange[0]}: {UNKNOWN}" if strange else StoredWeights(0, 0)
    form = FORMATS[main]
    strange = sorted(part for part in parts if part not in form.bits and not _beside(part))
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


def _beside(part: str) -> bool:
    return part in NOT_BITS or part.endswith("_bias") or part.startswith("weight.quant_state.")
