"""Weight matrices as numbers, one at a time: compressed-tensors, gguf and Transformers dequantize them.

compressed-tensors' ``dequantize`` takes the codes of every format that has one scale for a part of a row or for a block
(its own formats, FP8, ModelOpt's, GPTQ's, AWQ's); this file only says where codes, scales and zero points lie.  It is
given float32 scales: with the checkpoint's own, its results are bfloat16, whose rounding (0.0017 of a weight) would
count as an error of the quantization.  gpt-oss' blocks are Transformers', GGUF's the ``gguf`` package's.  Of any other
format the reason is told why it is not compared.  The packages are imported when a matrix needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.checkpoint.files import Tensor
from compare_q.backends.checkpoint.formats import (
    FLOATS,
    Floats,
    Parts,
    described_shape,
    floats,
    layout_of,
    main_part,
    scale_grid,
    stored,
    tile,
    values,
)
from compare_q.backends.checkpoint.gguf import GgufModel
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import one_line
from compare_q.backends.common.packages import check_installed

NO_LIBRARY = "neither compressed-tensors nor Transformers dequantizes it"
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight values of an AWQ word each of its columns is (four bits)."""
REORDERED = {"qwen3next", "qwen35", "qwen35moe"}
"""Architectures whose heads of linear attention llama.cpp's converter puts in another order."""
ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [rows, columns], rows being outputs; stacked experts are rows below each other.

    ``stored``: in words, "int4 g128"; ``order``: another order of its rows, if the format leaves open which one it is.
    """

    stored: str
    numbers: Floats
    order: NDArray[Any] | None = None


def matrix_of(parts: Parts, config: CheckpointConfig) -> Matrix | str:
    """The matrix of one module, or why it is not read; InputError if a package that reads it is missing."""
    main = main_part(parts)
    if main is None or len(parts[main].shape) < 2:
        return "no matrix"
    words = layout_of(parts, config).words
    readers = {"weight": _weight, "weight_packed": _weight_packed, "qweight": _qweight}
    try:
        numbers = readers[main](parts, config, words) if main in readers and words else None
        if numbers is not None and "pre_quant_scale" in parts:  # ModelOpt's AWQ: y = (x * scale) W_q^T
            numbers = numbers * values(parts["pre_quant_scale"]).reshape(numbers.shape[1])
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"{main} of dtype {parts[main].dtype}: {one_line(error, 80)}"
    if numbers is None:
        return f"{words or f'format {main} of dtype {parts[main].dtype}'}: {NO_LIBRARY}"
    return Matrix(words, numbers)


# The readers of main parts: float32 [rows, columns], or None where no library dequantizes what is stored.


def _weight(parts: Parts, config: CheckpointConfig, words: str) -> Floats | None:
    """``weight``: floats, FP8, int8, and bytes of two FP4 values."""
    weight = parts["weight"]
    scale = next((parts[name] for name in ("weight_scale", "weight_scale_inv", "scale") if name in parts), None)
    if scale is not None and words.startswith(("nvfp4", "mxfp4")):
        return _fp4(parts, weight, scale)
    if words not in FLOATS.values() and not words.startswith(("fp8", "int8", "mxfp8")):
        return None
    codes = values(weight).reshape(-1, weight.shape[-1])
    if words in FLOATS.values():
        return codes
    if "SCB" in parts:  # bitsandbytes: the largest of each row, which 127 stands for
        return scaled(codes, values(parts["SCB"]).reshape(-1, 1) / 127)
    if scale is None:
        return None
    zeros = parts.get("weight_zero_point")
    offsets = None if zeros is None else _scales(zeros, len(codes))
    return scaled(codes, _scales(scale, len(codes)), zeros=offsets, block=config.block)


def _weight_packed(parts: Parts, config: CheckpointConfig, words: str) -> Floats | None:
    """compressed-tensors: FP4, or integers in 32-bit words; gpt-oss' blocks."""
    packed, scale = parts["weight_packed"], parts.get("weight_scale")
    if scale is None or "meta" in parts or (packed.dtype != "U8" and len(packed.shape) != 2):
        return None
    if packed.dtype == "U8":
        return _gpt_oss(packed, scale) if len(packed.shape) == 4 else _fp4(parts, packed, scale)
    bits, (rows, columns) = bits_in(words), described_shape(parts["weight_shape"])
    scales, zeros = _scales(scale, rows), None
    if (offset := parts.get("weight_zero_point")) is not None:  # packed along the rows
        packed_zeros = offset.dtype == "I32"
        zeros = unpacked(offset, bits, (rows, scales.shape[1]), 0) if packed_zeros else values(offset)
    indices = stored(parts["weight_g_idx"]) if "weight_g_idx" in parts else None
    return scaled(unpacked(packed, bits, (rows, columns), 1), scales, zeros=zeros, indices=indices)


def _fp4(parts: Parts, packed: Tensor, scale: Tensor) -> Floats:
    """NVFP4, with a global scale by which compressed-tensors divides and ModelOpt multiplies; MXFP4."""
    check_installed("compressed_tensors", "pip install compressed-tensors")
    from compressed_tensors.compressors import unpack_fp4_from_uint8
    from torch import float32

    raw = stored(packed).view(np.uint8).reshape(-1, packed.shape[-1])
    whole: Any = None
    if "weight_global_scale" in parts:
        whole = values(parts["weight_global_scale"]).reshape(-1)
    elif "weight_scale_2" in parts:
        whole = 1 / values(parts["weight_scale_2"]).reshape(-1)
    codes = unpack_fp4_from_uint8(_torch(raw), len(raw), 2 * raw.shape[1], dtype=float32)
    return scaled(codes, _scales(scale, len(raw)), whole=whole)


def _gpt_oss(packed: Tensor, scale: Tensor) -> Floats:
    """Blocks [experts, out, in / 32, 16 bytes] as rows of [experts, in, out]: so Transformers stores their floats."""
    check_installed("transformers", "pip install transformers")
    from torch import float32
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    converted = convert_moe_packed_tensors(_torch(stored(packed)), _torch(stored(scale)), dtype=float32)
    numbers: Floats = converted.reshape(-1, packed.shape[1]).numpy()
    return numbers


def _qweight(parts: Parts, config: CheckpointConfig, words: str) -> Floats | None:
    """GPTQ [in * bits / 32, out] and AWQ [in, out * bits / 32]; both are stored with the inputs as rows."""
    packed, zeros = parts["qweight"], parts.get("qzeros")
    bits, awq = bits_in(words), words.startswith("uint")
    if packed.dtype != "I32" or bits not in ((4,) if awq else (2, 4, 8)):
        return None
    scales = values(parts["scales"])
    groups, outputs = scales.shape
    inputs = packed.numel * 32 // bits // outputs
    codes = unpacked(packed, bits, (inputs, outputs), 1 if awq else 0)
    offsets = np.zeros_like(scales)  # codes are unpacked less half of their range
    if zeros is not None and zeros.numel:
        points = unpacked(zeros, bits, (groups, outputs), 1)
        # The first version of GPTQ's packing stores one less.
        less = 0 if config.quantization.get("checkpoint_format") == "gptq_v2" else 1
        offsets = awq_order(points) if awq else points.float().numpy() + less
    indices = stored(parts["g_idx"]) if "g_idx" in parts and parts["g_idx"].numel else None
    return scaled((awq_order(codes) if awq else codes).T, scales.T, zeros=offsets.T, indices=indices)


def awq_order(columns: Any) -> Any:
    """The columns in their order: AWQ interleaves the eight values of a word."""
    return columns.reshape(len(columns), -1, 8)[..., AWQ_ORDER].reshape(columns.shape)


def unpacked(words: Any, bits: int, shape: tuple[int, int], axis: int) -> Any:
    """Signed integers of 32-bit words, by compressed-tensors; ``axis``: the dimension along which they are packed."""
    check_installed("compressed_tensors", "pip install compressed-tensors")
    from compressed_tensors.compressors import unpack_from_int32

    return unpack_from_int32(_torch(stored(words)), bits, shape, axis)


def scaled(
    codes: Any, scales: Any, *, zeros: Any = None, whole: Any = None, indices: Any = None,
    block: tuple[int, int] | None = None,
) -> Floats:  # fmt: skip
    """Codes [rows, columns] and a grid of scales, dequantized by compressed-tensors.

    ``zeros``: zero points, as many as scales; ``whole``: global scales, by which the others are divided; ``indices``:
    the group of each column; ``block``: rows and columns that share a scale, where the grid leaves it open.
    """
    check_installed("compressed_tensors", "pip install compressed-tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle import dequantize
    from torch import float32

    high, wide = (tile(*sizes) for sizes in zip(codes.shape, scales.shape, block or (0, 0), strict=True))
    args: dict[str, Any] = {"strategy": "block", "block_structure": [high, wide]}
    if indices is not None and (indices >= 0).any() and (indices != np.arange(len(indices)) // wide).any():
        args = {"strategy": "group", "group_size": wide}
    if whole is not None:  # of the matrix, or of each of the stacked experts
        whole = np.repeat(whole, len(scales) // len(whole)).reshape(-1, 1, 1, 1)
    dequantized = dequantize(
        _torch(codes), _torch(scales), args=QuantizationArgs(**args), dtype=float32,
        zero_point=None if zeros is None else _torch(zeros),
        g_idx=_torch(indices).long() if args["strategy"] == "group" else None,
        global_scale=None if whole is None else _torch(whole),
    )  # fmt: skip
    numbers: Floats = dequantized.numpy()
    return numbers


def bits_in(words: str) -> int:
    """4 of "uint4 g32"; 0 where the words name no integers."""
    number = words.partition(" ")[0].removeprefix("u").removeprefix("int")
    return int(number) if number.isdecimal() else 0


def _scales(scale: Tensor, rows: int) -> Floats:
    """The grid of scales (or zero points) of a matrix; bytes without a sign are powers of two."""
    raw = stored(scale).reshape(scale_grid(scale, rows))
    return floats(raw, "F8_E8M0" if scale.dtype == "U8" else scale.dtype)


def _torch(numbers: Any) -> Any:
    """A torch tensor of an array, copied since those on disk cannot be written, or of a tensor."""
    import torch

    return torch.from_numpy(np.array(numbers)) if isinstance(numbers, np.ndarray) else numbers


def gguf_matrices(model: GgufModel, names: Sequence[str]) -> Mapping[str, Callable[[], Matrix | str]]:
    """Those of the ``names`` of Hugging Face's modules that a model has -> what reads the matrix.

    llama.cpp's converters reorder the rows of the query and key projections of Llama and its relatives for another form
    of rotary embedding.  Which architectures do is not written in the file, so both orders are compared and the nearer
    one counts: the wrong one has a relative error of about 1.4, as unrelated matrices have.
    """
    check_installed("gguf", "pip install gguf")
    from gguf import GGUFReader

    own = names_in_gguf(model, names)
    readers = [GGUFReader(file) for file in model.files]  # maps the file, and reads its header in some seconds
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    stored_as = {name: f"{own.get(name, name)}.weight" for name in names}
    return {name: partial(gguf_matrix, model, name, tensors[as_]) for name, as_ in stored_as.items() if as_ in tensors}


def names_in_gguf(model: GgufModel, names: Sequence[str]) -> dict[str, str]:
    """Hugging Face's name of a module -> llama.cpp's; a name that llama.cpp does not map is left out.

    llama.cpp knows the names of a language model alone, the hub has some as part of a model with a vision tower.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next((number for number, name in MODEL_ARCH_NAMES.items() if name == model.architecture), None)
    if arch is None:
        raise InputError(f"{model.files[0]}: the architecture {model.architecture!r} is not known to gguf")
    mapped = get_tensor_name_map(arch, model.field("block_count") or 0)
    own = {}
    for name in names:
        rest = name.rpartition("language_model.")[2].removeprefix("model.")
        alone = (f"model.{rest}", rest) if "language_model." in name else ()
        spelled = (mapped.get_name(spelling) for spelling in (name, *alone))
        if theirs := next((known for known in spelled if known is not None), None):
            own[name] = theirs
    return own


def gguf_matrix(model: GgufModel, name: str, tensor: Any) -> Matrix | str:
    """The matrix of one tensor of ``GGUFReader`` under Hugging Face's name."""
    from gguf.quants import dequantize

    if ".linear_attn." in name and model.architecture in REORDERED:
        return "llama.cpp reorders the heads of its linear attention"
    kind, rows, heads = tensor.tensor_type, int(np.prod(tensor.shape[1:])), model.field("attention.head_count")
    if name.endswith(ROTATED[1]):
        heads = model.field("attention.head_count_kv") or heads
    try:
        numbers = np.asarray(dequantize(tensor.data.reshape(rows, -1), kind), np.float32)
    except NotImplementedError:
        return f"{kind.name}, which gguf cannot dequantize"
    matrix = Matrix(kind.name.lower().replace("_k", "_K"), numbers)
    if not name.endswith(ROTATED) or not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        return matrix
    # Hugging Face's order: first the halves of each head, in which llama.cpp alternates.
    return replace(matrix, order=np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))
