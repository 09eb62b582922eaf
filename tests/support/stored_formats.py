"""One matrix in every known format, with its stored bits and weights computed by hand."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from tests.support.checkpoints import Entries

SIZES = {
    "hidden_size": 96,
    "num_attention_heads": 4,
    "head_dim": 50,
    "vocab_size": 250,
    "intermediate_size": 300,
}
"""EXL3 pads 96 to 128, 4 * 50 to 256 and 250 to 256."""
EXL3 = {"quant_method": "exl3", "bits": 4.0, "head_bits": 6}
NF4_STATE = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [30, 64]}'


@dataclass(frozen=True)
class Case:
    """One matrix: its tensors by part, and the bits and weights that count.

    ``quantization``, ``config``: entries of the configs.  ``values``: the bytes of tensors that are
    not zeros.
    """

    parts: Entries
    bits: int
    weights: int
    quantization: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)


def packed(rows: int, columns: int) -> dict[str, bytes]:
    return {"weight_shape": struct.pack("<2q", rows, columns)}


def words(rows: int, columns: int, groups: int) -> Entries:
    """compressed-tensors' packed weights."""
    scale = ("BF16", rows, groups)
    return {
        "weight_packed": ("I32", rows, columns),
        "weight_scale": scale,
        "weight_shape": ("I64", 2),
    }


def gptq(rows: int, columns: int, zeros: tuple[int, int], indices: int) -> Entries:
    scales = ("F16", zeros[0], columns)
    return {
        "qweight": ("I32", rows, columns),
        "qzeros": ("I32", *zeros),
        "scales": scales,
        "g_idx": ("I32", indices),
    }


W4 = words(64, 8, 2)
NVFP4 = {
    "weight_packed": ("U8", 16, 16),
    "weight_scale": ("F8_E4M3", 16, 2),
    "weight_global_scale": ("F32", 1),
}
FP8 = {"weight": ("F8_E4M3", 8, 4), "weight_scale": ("F32",), "input_scale": ("F32",)}
INT8 = {"weight": ("I8", 8, 4), "weight_scale": ("BF16", 8, 1)}
MODELOPT = {
    "weight": ("U8", 16, 16),
    "weight_scale": ("F8_E4M3", 16, 2),
    "weight_scale_2": ("F32",),
}
AWQ = {"qweight": ("I32", 64, 8), "qzeros": ("I32", 2, 8), "scales": ("F16", 2, 64)}
NF4 = {
    "weight": ("U8", 960, 1),
    "weight.absmax": ("F32", 30),
    "weight.quant_map": ("F32", 16),
    "weight.quant_state.bitsandbytes__nf4": ("U8", len(NF4_STATE)),
}
STATE = {"weight.quant_state.bitsandbytes__nf4": NF4_STATE}
TRELLIS = {
    "trellis": ("I16", 8, 16, 64),
    "suh": ("F16", 128),
    "svh": ("F16", 256),
    "bias": ("F16", 256),
}
CASES = {
    # compressed-tensors, 64 x 64 in groups of 32: 512 words = 16,384 bits, 128 scales = 2,048: 4.5
    "int4 g32": Case(W4, 18432, 4096, values=packed(64, 64)),
    # 8 x 256 in groups of 128: 8 * 32 words = 8,192, 16 scales = 256: 4.125
    "int4 g128": Case(words(8, 32, 2), 8448, 2048, values=packed(8, 256)),
    # 8 x 64 at 8 bits, one scale per row: 8 * 16 words = 4,096, 8 scales = 128: 8.25
    "int8 packed": Case(words(8, 16, 1), 4224, 512, values=packed(8, 64)),
    # zero points, eight per word along the outputs: 8 * 2 words = 512 on top of 18,432: 4.625
    "int4 asymmetric": Case(
        {**W4, "weight_zero_point": ("I32", 8, 2)}, 18944, 4096, values=packed(64, 64)
    ),
    # activation order: 64 indices of 32 bits = 2,048 on top of 18,432: 5.0
    "int4 act order": Case({**W4, "weight_g_idx": ("I32", 64)}, 20480, 4096, values=packed(64, 64)),
    # 4 x 12 fills 1.5 words per row, stored as 2: 8 words = 256, 4 scales = 64, for 48 weights, not
    # 64; shape in int32
    "int4 odd": Case(
        {**words(4, 2, 1), "weight_shape": ("I32", 2)},
        320,
        48,
        values={"weight_shape": struct.pack("<2i", 4, 12)},
    ),
    # 16 x 32: 256 bytes = 2,048, 32 scales of 8 = 256, one of 32: 4.5625; the same with activations
    # in NVFP4
    "nvfp4 a16": Case(NVFP4, 2336, 512),
    "nvfp4 w4a4": Case({**NVFP4, "input_global_scale": ("F32", 1)}, 2336, 512),
    # 16 x 32: 2,048, and a power of two in 8 bits for every 32: 128: 4.25
    "mxfp4": Case({"weight_packed": ("U8", 16, 16), "weight_scale": ("U8", 16, 1)}, 2176, 512),
    # 2 x 32 bytes = 512 and 2 powers of two = 16: 8.25, in either dtype
    "mxfp8": Case({"weight": ("F8_E4M3", 2, 32), "weight_scale": ("U8", 2, 1)}, 528, 64),
    "mxfp8 e8m0": Case({"weight": ("F8_E4M3", 2, 32), "weight_scale": ("F8_E8M0", 2, 1)}, 528, 64),
    # 8 x 4 bytes = 256 and 8 scales of 16 = 128: 12.0
    "fp8 channel": Case({"weight": ("F8_E4M3", 8, 4), "weight_scale": ("BF16", 8, 1)}, 384, 32),
    # 256 x 128 in blocks of 128 x 128: 262,144 and 2 * 16
    "fp8 block": Case(
        {"weight": ("F8_E4M3", 256, 128), "weight_scale": ("BF16", 2, 1)}, 262176, 32768
    ),
    # DeepSeek's name for it: 256 and 2 * 32: 10.0
    "fp8 block inverse": Case(
        {"weight": ("F8_E4M3", 8, 4), "weight_scale_inv": ("F32", 2, 1)}, 320, 32
    ),
    # W8A8, static activations: 256 and 8 scales of 16: 12.0; zero points of 8 bits: 448 / 32 = 14.0
    "int8 w8a8": Case({**INT8, "input_scale": ("BF16", 1), "input_zero_point": ("I8", 1)}, 384, 32),
    "int8 naive": Case({**INT8, "weight_zero_point": ("I8", 8, 1)}, 448, 32),
    # modelopt: FP8 256 and one scale of 32: 9.0; NVFP4 as above
    "modelopt fp8": Case({**FP8, "k_scale": ("F32",), "v_scale": ("F32",)}, 288, 32),
    "modelopt nvfp4": Case({**MODELOPT, "input_scale": ("F32",), "k_scale": ("F32",)}, 2336, 512),
    # its AWQ divides weights by one factor per input, in 32 * 16 = 512 bits
    "modelopt nvfp4 awq": Case({**MODELOPT, "pre_quant_scale": ("BF16", 32)}, 2848, 512),
    # GPTQ, 64 x 64 in groups of 32: 16,384 + 16 * 32 + 128 * 16 + 64 * 32: 5.125
    "gptq 4": Case(gptq(8, 64, (2, 8), 64), 20992, 4096, {"bits": 4}),
    # 64 x 16, 2 bits: 4 * 16 words = 2,048, 32, 16 * 16 = 256, 2,048: 4.28125; the config names
    # other layers
    "gptq 2": Case(
        gptq(4, 16, (1, 1), 64), 4384, 1024, {"bits": 4, "dynamic": {"q_proj": {"bits": 2}}}
    ),
    # 64 x 32, 3 bits: 32 weights in 3 words: 6 * 32 = 192 words = 6,144; 2 * 3 = 192, 64 * 16 =
    # 1,024, 2,048: 4.59375
    "gptq 3": Case(gptq(6, 32, (2, 3), 64), 9408, 2048, {"bits": 4}),
    # 32 x 16, 8 bits: 8 * 16 words = 4,096, 128, 256, and no indices: 8.75
    "gptq 8": Case(gptq(8, 16, (1, 4), 0), 4480, 512, {"bits": 4}),
    # 3 * 8 words = 768 and 8 scales = 128 for 256 weights, which only the config states: 3.5
    "gptq bare": Case({"qweight": ("I32", 3, 8), "scales": ("F16", 1, 8)}, 896, 256, {"bits": 3}),
    # AWQ, 64 x 64 in groups of 32: 16,384 + 512 + 2,048: 4.625
    "awq": Case(AWQ, 18944, 4096, {"quant_method": "awq", "w_bit": 4}),
    # bitsandbytes, 30 x 64: 960 bytes = 7,680, 30 scales of 64 weights = 960, 16 codes = 512:
    # 4.7666
    "nf4": Case(NF4, 9152, 1920, values=STATE),
    # scales in 8 bits = 240, with one scale of 32 for 256 of them and their 256 codes: 7,680 + 240
    # + 512 + 32 + 8,192
    "nf4 nested": Case(
        {
            **NF4,
            "weight.absmax": ("U8", 30),
            "weight.nested_absmax": ("F32", 1),
            "weight.nested_quant_map": ("F32", 256),
        },
        16656,
        1920,
        values=STATE,
    ),
    # pairs of bytes stored as bf16, for FSDP
    "nf4 as bf16": Case({**NF4, "weight": ("BF16", 480, 1)}, 9152, 1920, values=STATE),
    # 256 and 8 scales of 32: 16.0
    "bitsandbytes int8": Case(
        {"weight": ("I8", 8, 4), "SCB": ("F32", 8), "weight_format": ("U8",)}, 512, 32
    ),
    # torchao: 256 and 8 scales of 32: 16.0; zero points of 8 bits: 18.0
    "torchao fp8": Case(
        {"_weight_qdata": ("F8_E4M3", 8, 4), "_weight_scale": ("F32", 8, 1)}, 512, 32
    ),
    "torchao int8": Case(
        {
            "_weight_qdata": ("I8", 8, 4),
            "_weight_scale": ("F32", 8, 1),
            "_weight_zero_point": ("I8", 8, 1),
        },
        576,
        32,
    ),
    # EXL3, 96 x 200 as 128 x 256: 8 * 16 tiles of 64 words of 16 bits = 131,072, signs (128 + 256)
    # * 16 = 6,144
    "exl3": Case(TRELLIS, 137216, 19200, EXL3, SIZES),
    # with a multiplier of 32 bits that names the codebook; 2.5 bits: 8 * 16 * 40 * 16 = 81,920
    "exl3 2.5 bits": Case(
        {**TRELLIS, "trellis": ("I16", 8, 16, 40), "mul1": ("I32",)}, 88096, 19200, EXL3, SIZES
    ),
    # older files: signs in single bits, 8 + 16 words of 16 = 384
    "exl3 signs": Case(
        {"trellis": ("I16", 8, 16, 64), "su": ("I16", 8), "sv": ("I16", 16), "mcg": ("I32",)},
        131488,
        19200,
        EXL3,
        SIZES,
    ),
    # a layer left at 16 bits is padded too: 256 * 128 * 16; a layer that is not padded: 3 * 128 *
    # 16
    "exl3 unquantized": Case({"weight": ("F16", 256, 128)}, 524288, 19200, EXL3, SIZES),
    "exl3 unpadded": Case({"weight": ("F16", 3, 128)}, 6144, 384, EXL3, SIZES),
}
HEADS = {
    # 96 x 250 as 128 x 256 at 6 bits: 8 * 16 * 96 * 16 = 196,608, signs 6,144
    "exl3": Case({**TRELLIS, "trellis": ("I16", 8, 16, 96)}, 202752, 24000, EXL3, SIZES),
    "exl3 unquantized": Case({"weight": ("F16", 256, 128)}, 524288, 24000, EXL3, SIZES),
}


def entries_of(case: Case, module: str) -> Entries:
    """Return the tensors of a case, as the tensors of ``module``."""
    return {f"{module}.{part}": entry for part, entry in case.parts.items()}
