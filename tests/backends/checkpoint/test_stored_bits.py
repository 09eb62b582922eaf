"""Stored bits worked out by hand for every format, against hand-made headers and files of real writers."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from backends.base import Storage
from backends.checkpoint import files, stored_bits
from tests.backends.checkpoint.test_files import ENDS, LAYER, Entries, Q, header, model
from tests.support import DATA

SIZES = {"hidden_size": 96, "num_attention_heads": 4, "head_dim": 50, "vocab_size": 250, "intermediate_size": 300}
"""EXL3 pads 96 to 128, 4 * 50 to 256 and 250 to 256; EXL2 pads 4 * 50 to 224."""
EXL3 = {"quant_method": "exl3", "bits": 4.0, "head_bits": 6}
NF4_STATE = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [30, 64]}'


@dataclass(frozen=True)
class Case:
    """One matrix: its tensors, those that count, their bits and weights by hand, and what the configs say."""

    parts: Entries
    counted: str
    bits: int
    weights: int
    quantization: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)


def packed(rows: int, columns: int) -> dict[str, bytes]:
    return {"weight_shape": struct.pack("<2q", rows, columns)}


W4 = {"weight_packed": ("I32", 64, 8), "weight_scale": ("BF16", 64, 2), "weight_shape": ("I64", 2)}
NVFP4 = {"weight_packed": ("U8", 16, 16), "weight_scale": ("F8_E4M3", 16, 2), "weight_global_scale": ("F32", 1)}
FP8 = {"weight": ("F8_E4M3", 8, 4), "weight_scale": ("F32",), "input_scale": ("F32",)}
INT8 = {"weight": ("I8", 8, 4), "weight_scale": ("BF16", 8, 1)}
GPTQ = {"qweight": ("I32", 8, 64), "qzeros": ("I32", 2, 8), "scales": ("F16", 2, 64), "g_idx": ("I32", 64)}
AWQ = {"qweight": ("I32", 64, 8), "qzeros": ("I32", 2, 8), "scales": ("F16", 2, 64)}
NF4 = {
    "weight": ("U8", 960, 1), "weight.absmax": ("F32", 30), "weight.quant_map": ("F32", 16),
    "weight.quant_state.bitsandbytes__nf4": ("U8", len(NF4_STATE)),
}  # fmt: skip
STATE = {"weight.quant_state.bitsandbytes__nf4": NF4_STATE}
TRELLIS = {"trellis": ("I16", 8, 16, 64), "suh": ("F16", 128), "svh": ("F16", 256), "bias": ("F16", 256)}
EXL2 = {
    "q_weight": ("I32", 7, 224), "q_scale": ("I32", 2, 28), "q_scale_max": ("F16", 2), "q_groups": ("I16", 4),
    "q_invperm": ("I32", 64), "bias": ("F16", 224),
}  # fmt: skip
CASES = {
    # compressed-tensors, 64 x 64 in groups of 32: 512 words = 16,384 bits, 128 scales = 2,048: 4.5
    "int4 g32": Case(W4, "weight_packed weight_scale", 18432, 4096, values=packed(64, 64)),
    # 8 x 256 in groups of 128: 8 * 32 words = 8,192, 16 scales = 256: 4.125
    "int4 g128": Case(
        {"weight_packed": ("I32", 8, 32), "weight_scale": ("BF16", 8, 2), "weight_shape": ("I64", 2)},
        "weight_packed weight_scale", 8448, 2048, values=packed(8, 256)),
    # 8 x 64 at 8 bits, a scale a row: 8 * 16 words = 4,096, 8 scales = 128: 8.25
    "int8 packed": Case(
        {"weight_packed": ("I32", 8, 16), "weight_scale": ("BF16", 8, 1), "weight_shape": ("I64", 2)},
        "weight_packed weight_scale", 4224, 512, values=packed(8, 64)),
    # zero points, eight a word along the outputs: 8 * 2 words = 512 on top of 18,432: 4.625
    "int4 asymmetric": Case(
        {**W4, "weight_zero_point": ("I32", 8, 2)}, "weight_packed weight_scale weight_zero_point", 18944, 4096,
        values=packed(64, 64)),
    # activation order: 64 indices of 32 bits = 2,048 on top of 18,432: 5.0
    "int4 act order": Case(
        {**W4, "weight_g_idx": ("I32", 64)}, "weight_packed weight_scale weight_g_idx", 20480, 4096,
        values=packed(64, 64)),
    # 4 x 12 fills a word and a half a row: 8 words = 256, 4 scales = 64, for 48 weights and not 64; shape in int32
    "int4 odd": Case(
        {"weight_packed": ("I32", 4, 2), "weight_scale": ("BF16", 4, 1), "weight_shape": ("I32", 2)},
        "weight_packed weight_scale", 320, 48, values={"weight_shape": struct.pack("<2i", 4, 12)}),
    # 16 x 32: 256 bytes = 2,048, 32 scales of 8 = 256, one of 32: 4.5625; the same with activations in NVFP4
    "nvfp4 a16": Case(NVFP4, "weight_packed weight_scale weight_global_scale", 2336, 512),
    "nvfp4 w4a4": Case(
        {**NVFP4, "input_global_scale": ("F32", 1)}, "weight_packed weight_scale weight_global_scale", 2336, 512),
    # 16 x 32: 2,048, and a power of two in 8 bits for every 32: 128: 4.25
    "mxfp4": Case(
        {"weight_packed": ("U8", 16, 16), "weight_scale": ("U8", 16, 1)}, "weight_packed weight_scale", 2176, 512),
    # 2 x 32 bytes = 512 and 2 powers of two = 16: 8.25, in either dtype
    "mxfp8": Case({"weight": ("F8_E4M3", 2, 32), "weight_scale": ("U8", 2, 1)}, "weight weight_scale", 528, 64),
    "mxfp8 e8m0": Case(
        {"weight": ("F8_E4M3", 2, 32), "weight_scale": ("F8_E8M0", 2, 1)}, "weight weight_scale", 528, 64),
    # 8 x 4 bytes = 256 and 8 scales of 16 = 128: 12.0
    "fp8 channel": Case(
        {"weight": ("F8_E4M3", 8, 4), "weight_scale": ("BF16", 8, 1)}, "weight weight_scale", 384, 32),
    # 256 x 128 in blocks of 128 x 128: 262,144 and 2 * 16
    "fp8 block": Case(
        {"weight": ("F8_E4M3", 256, 128), "weight_scale": ("BF16", 2, 1)}, "weight weight_scale", 262176, 32768),
    # DeepSeek's name for it: 256 and 2 * 32: 10.0
    "fp8 block inverse": Case(
        {"weight": ("F8_E4M3", 8, 4), "weight_scale_inv": ("F32", 2, 1)}, "weight weight_scale_inv", 320, 32),
    # W8A8, static activations: 256 and 8 scales of 16: 12.0; zero points of 8 bits: 448 / 32 = 14.0
    "int8 w8a8": Case(
        {**INT8, "input_scale": ("BF16", 1), "input_zero_point": ("I8", 1)}, "weight weight_scale", 384, 32),
    "int8 naive": Case(
        {**INT8, "weight_zero_point": ("I8", 8, 1)}, "weight weight_scale weight_zero_point", 448, 32),
    # modelopt: FP8 256 and one scale of 32: 9.0; NVFP4 as above
    "modelopt fp8": Case({**FP8, "k_scale": ("F32",), "v_scale": ("F32",)}, "weight weight_scale", 288, 32),
    "modelopt nvfp4": Case(
        {"weight": ("U8", 16, 16), "weight_scale": ("F8_E4M3", 16, 2), "weight_scale_2": ("F32",),
         "input_scale": ("F32",), "k_scale": ("F32",)}, "weight weight_scale weight_scale_2", 2336, 512),
    # its AWQ divides weights by a factor an input, in 32 * 16 = 512 bits
    "modelopt nvfp4 awq": Case(
        {"weight": ("U8", 16, 16), "weight_scale": ("F8_E4M3", 16, 2), "weight_scale_2": ("F32",),
         "pre_quant_scale": ("BF16", 32)}, "weight weight_scale weight_scale_2 pre_quant_scale", 2848, 512),
    # GPTQ, 64 x 64 in groups of 32: 16,384 + 16 * 32 + 128 * 16 + 64 * 32: 5.125
    "gptq 4": Case(GPTQ, "qweight qzeros scales g_idx", 20992, 4096, {"bits": 4}),
    # 64 x 16, 2 bits: 4 * 16 words = 2,048, 32, 16 * 16 = 256, 2,048: 4.28125; the config speaks of other layers
    "gptq 2": Case(
        {"qweight": ("I32", 4, 16), "qzeros": ("I32", 1, 1), "scales": ("F16", 1, 16), "g_idx": ("I32", 64)},
        "qweight qzeros scales g_idx", 4384, 1024, {"bits": 4, "dynamic": {"q_proj": {"bits": 2}}}),
    # 64 x 32, 3 bits: 32 weights in 3 words: 6 * 32 = 192 words = 6,144; 2 * 3 = 192, 64 * 16 = 1,024, 2,048: 4.59375
    "gptq 3": Case(
        {"qweight": ("I32", 6, 32), "qzeros": ("I32", 2, 3), "scales": ("F16", 2, 32), "g_idx": ("I32", 64)},
        "qweight qzeros scales g_idx", 9408, 2048, {"bits": 4}),
    # 32 x 16, 8 bits: 8 * 16 words = 4,096, 128, 256, and no indices: 8.75
    "gptq 8": Case(
        {"qweight": ("I32", 8, 16), "qzeros": ("I32", 1, 4), "scales": ("F16", 1, 16), "g_idx": ("I32", 0)},
        "qweight qzeros scales g_idx", 4480, 512, {"bits": 4}),
    # 3 * 8 words = 768 and 8 scales = 128 for 256 weights, as nothing but the config can tell: 3.5
    "gptq bare": Case({"qweight": ("I32", 3, 8), "scales": ("F16", 1, 8)}, "qweight scales", 896, 256, {"bits": 3}),
    # AWQ, 64 x 64 in groups of 32: 16,384 + 512 + 2,048: 4.625
    "awq": Case(AWQ, "qweight qzeros scales", 18944, 4096, {"quant_method": "awq", "w_bit": 4}),
    # bitsandbytes, 30 x 64: 960 bytes = 7,680, 30 scales of 64 weights = 960, 16 codes = 512: 4.7666
    "nf4": Case(NF4, "weight weight.absmax weight.quant_map", 9152, 1920, values=STATE),
    # scales in 8 bits = 240, with one scale of 32 for 256 of them and their 256 codes: 7,680 + 240 + 512 + 32 + 8,192
    "nf4 nested": Case(
        {**NF4, "weight.absmax": ("U8", 30), "weight.nested_absmax": ("F32", 1),
         "weight.nested_quant_map": ("F32", 256)},
        "weight weight.absmax weight.quant_map weight.nested_absmax weight.nested_quant_map",
        16656, 1920, values=STATE),
    # bytes in pairs that pass for bf16, for FSDP
    "nf4 as bf16": Case(
        {**NF4, "weight": ("BF16", 480, 1)}, "weight weight.absmax weight.quant_map", 9152, 1920, values=STATE),
    # 256 and 8 scales of 32: 16.0
    "bitsandbytes int8": Case(
        {"weight": ("I8", 8, 4), "SCB": ("F32", 8), "weight_format": ("U8",)}, "weight SCB", 512, 32),
    # torchao: 256 and 8 scales of 32: 16.0; zero points of 8 bits: 18.0
    "torchao fp8": Case(
        {"_weight_qdata": ("F8_E4M3", 8, 4), "_weight_scale": ("F32", 8, 1)}, "_weight_qdata _weight_scale", 512, 32),
    "torchao int8": Case(
        {"_weight_qdata": ("I8", 8, 4), "_weight_scale": ("F32", 8, 1), "_weight_zero_point": ("I8", 8, 1)},
        "_weight_qdata _weight_scale _weight_zero_point", 576, 32),
    # EXL3, 96 x 200 as 128 x 256: 8 * 16 tiles of 64 words of 16 bits = 131,072, signs (128 + 256) * 16 = 6,144
    "exl3": Case(TRELLIS, "trellis suh svh", 137216, 19200, EXL3, SIZES),
    # with a multiplier of 32 bits that names the codebook; 2.5 bits: 8 * 16 * 40 * 16 = 81,920
    "exl3 2.5 bits": Case(
        {**TRELLIS, "trellis": ("I16", 8, 16, 40), "mul1": ("I32",)}, "trellis suh svh mul1",
        88096, 19200, EXL3, SIZES),
    # older files: signs in single bits, 8 + 16 words of 16 = 384
    "exl3 signs": Case(
        {"trellis": ("I16", 8, 16, 64), "su": ("I16", 8), "sv": ("I16", 16), "mcg": ("I32",)}, "trellis su sv mcg",
        131488, 19200, EXL3, SIZES),
    # a layer it left at 16 bits is padded all the same: 256 * 128 * 16; one that is not padded: 3 * 128 * 16
    "exl3 unquantized": Case({"weight": ("F16", 256, 128)}, "weight", 524288, 19200, EXL3, SIZES),
    "exl3 unpadded": Case({"weight": ("F16", 3, 128)}, "weight", 6144, 384, EXL3, SIZES),
    # EXL2, 64 x 200 as 64 x 224: 32 rows of 4 bits and 32 of 3 in 7 rows of words = 50,176; 2 groups: scales of 4 bits
    # 2 * 28 * 32 = 1,792, their maxima 32, bits and first rows 64; permutation 64 * 32 = 2,048
    "exl2": Case(EXL2, "q_weight q_scale q_scale_max q_groups q_invperm", 54112, 12800, {}, SIZES),
}  # fmt: skip
HEADS = {
    # 96 x 250 as 128 x 256 at 6 bits: 8 * 16 * 96 * 16 = 196,608, signs 6,144
    "exl3": Case({**TRELLIS, "trellis": ("I16", 8, 16, 96)}, "trellis suh svh", 202752, 24000, EXL3, SIZES),
    "exl3 unquantized": Case({"weight": ("F16", 256, 128)}, "weight", 524288, 24000, EXL3, SIZES),
    # 64 x 250 as 64 x 256: 7 * 256 * 32 = 57,344; 2 * 32 * 32 = 2,048; 32; 64; 2,048
    "exl2": Case(
        {**EXL2, "q_weight": ("I32", 7, 256), "q_scale": ("I32", 2, 32)},
        "q_weight q_scale q_scale_max q_groups q_invperm", 61536, 16000, {}, SIZES),
}  # fmt: skip


def entries_of(case: Case, module: str) -> Entries:
    return {f"{module}.{part}": entry for part, entry in case.parts.items()}


def stored(folder: Path, case: Case, entries: Entries, module: str) -> Storage:
    """The storage of a model with these tensors; its counted tensors take as many bytes on disk as the case says."""
    values = {f"{module}.{part}": value for part, value in case.values.items()}
    config = {**case.config, **({"quantization_config": case.quantization} if case.quantization else {})}
    found = stored_bits.storage_of(model(folder, entries, config, values))
    raw = (folder / "model.safetensors").read_bytes()
    described = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    spans = [described[f"{module}.{part}"]["data_offsets"] for part in case.counted.split()]
    assert sum(end - begin for begin, end in spans) * 8 == case.bits
    return found


@pytest.mark.parametrize("name", CASES)
def test_layer(tmp_path: Path, name: str) -> None:
    """Alone, with a bf16 head (640 bits) or a float32 embedding as the head (1,280); beside a bf16 layer (512 / 32)."""
    case = CASES[name]
    layer, tied = entries_of(case, Q), {"model.embed_tokens.weight": ENDS["model.embed_tokens.weight"]}
    bpw = case.bits / case.weights
    assert stored(tmp_path, case, {**ENDS, **layer}, Q) == Storage(bpw, 16.0, case.bits + 640)
    assert stored(tmp_path, case, {**tied, **layer}, Q) == Storage(bpw, 32.0, case.bits + 1280)
    both = {**ENDS, **layer, f"{LAYER}.self_attn.o_proj.weight": ("BF16", 8, 4)}
    gold = Storage((case.bits + 512) / (case.weights + 32), 16.0, case.bits + 512 + 640)
    assert stored(tmp_path, case, both, Q) == gold


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("exl3 2.5 bits", "exl3 signs", "exl3 unpadded")]
)
def test_head(tmp_path: Path, name: str) -> None:
    """Quantized heads, and one tied to a quantized embedding; the layer is 512 bits for 32 weights."""
    case = HEADS.get(name, CASES[name])
    layer = {f"{Q}.weight": ("BF16", 8, 4), "model.embed_tokens.weight": ENDS["model.embed_tokens.weight"]}
    gold = Storage(16.0, case.bits / case.weights, case.bits + 512)
    assert stored(tmp_path, case, {**layer, **entries_of(case, "lm_head")}, "lm_head") == gold
    if not name.startswith("exl"):
        del layer["model.embed_tokens.weight"]
        module = "model.embed_tokens"
        assert stored(tmp_path, case, {**layer, **entries_of(case, module)}, module) == gold


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_that_nobody_knows(tmp_path: Path, name: str) -> None:
    """One more tensor of one dimension beside the weight: it may be bits of it, so the size is not known."""
    entries = {**ENDS, **entries_of(CASES[name], Q), f"{Q}.zeta": ("F16", 4)}
    found = stored(tmp_path, CASES[name], entries, Q)
    assert found == Storage(note=f"{Q}.zeta: stored in a format that compare_q cannot size")


def test_plain_layers_and_norms(tmp_path: Path) -> None:
    """Layers 8*4 + 4*8 = 64 weights of 16 bits, head 40 of 16: 1,024 + 640 = 1,664 bits."""
    tensors = {
        f"{Q}.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
        f"{LAYER}.mlp.gate_proj.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
        "model.norm.weight": torch.zeros(4),
        "model.embed_tokens.weight": torch.zeros(10, 4),
        "lm_head.weight": torch.zeros(10, 4, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert stored_bits.storage_of(tmp_path) == Storage(16.0, 16.0, 1664)
    assert Storage(vram_bits=2.0**36).vram_gib == 8.0  # 2^36 bits are 2^33 bytes


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.input_layernorm.weight 8",
        f"{Q}.bias 8",
        f"{Q}.input_scale 1",
        f"{Q}.input_global_scale 1",
        f"{LAYER}.self_attn.k_scale 1",
        f"{LAYER}.self_attn.v_scale 2 2",
        f"{Q}.k_scale 1",
        f"{LAYER}.mlp.experts.gate_up_proj_bias 2 2",
        f"{LAYER}.mixer.A_log 2 2",
        f"{LAYER}.mlp.gate.weight 4 8",
        f"{LAYER}.mlp.gate.e_score_correction_bias 4",
        f"{LAYER}.mlp.shared_expert_gate.weight 1 8",
        f"{LAYER}.block_sparse_moe.gate.weight 4 8",
        f"{LAYER}.mlp.router.weight 4 8",
        f"{LAYER}.block_sparse_moe.router.layer.weight 4 8",  # Granite
        "model.visual.blocks.0.attn.qkv.weight 8 8",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight 8 8",
        "vision_tower.blocks.0.patches 2 2",
        "model.multi_modal_projector.linear_1.weight 8 8",
        "model.audio_tower.layers.0.fc1.weight 8 8",
        "mlp1.1.weight 8 8",  # InternVL
        "vpm.encoder.layers.0.mlp.fc1.weight 8 8",  # MiniCPM
        "resampler.kv_proj.weight 8 8",
        "vision_language_adapter.w_in.weight 8 8",
        "patch_merger.merging_layer.weight 8 8",
        "model.connector.modality_projection.proj.weight 8 8",
        "score.weight 2 8",
        "model.mtp.layers.0.mlp.up_proj.weight 8 8",
        "mtp.fc.weight 8 8",
        "model.mtp_layers.0.eh_proj.weight 8 8",
        "mtp.lm_head.weight 8 8",
        "transformer.wpe.weight 16 4",
    ],
)
def test_left_out(tmp_path: Path, name: str) -> None:
    name, *shape = name.split()
    entries = {**ENDS, f"{Q}.weight": ("BF16", 8, 4), name: ("F32", *map(int, shape))}
    assert stored_bits.storage_of(model(tmp_path, entries)) == Storage(16.0, 16.0, 512 + 640)


@pytest.mark.parametrize("part", ["shared_head.head", "eh_proj", "mlp.up_proj", "lm_head"])
def test_layers_past_the_last_are_left_out(tmp_path: Path, part: str) -> None:
    """DeepSeek and GLM number their multi-token-prediction modules on; the config counts the model's own layers."""
    config = {"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 11}}
    layers = "model.language_model.layers"
    entries = {**ENDS, f"{Q}.weight": ("BF16", 8, 4), f"{layers}.10.mlp.up_proj.weight": ("F32", 8, 4)}
    gold = Storage((512 + 1024) / 64, 16.0, 512 + 1024 + 640)
    assert stored_bits.storage_of(model(tmp_path, entries, config)) == gold
    entries[f"{layers}.11.{part}.weight"] = ("F32", 8, 8)
    assert stored_bits.storage_of(model(tmp_path, entries, config)) == gold
    if part == "eh_proj":  # a config that does not count them leaves none out
        assert stored_bits.storage_of(model(tmp_path, entries)).vram_bits == 512 + 1024 + 640 + 2048


@pytest.mark.parametrize(
    ("tensors", "bits", "weights"),
    [
        # 64 weights of 32 bits
        ({"gate_up_proj": ("F32", 2, 8, 4)}, 2048, 64),
        # 64 of 8 bits and two scales of 32; the activations' are not counted
        ({"down_proj": ("F8_E4M3", 2, 8, 4), "down_proj_scale_inv": ("F32", 2, 1, 1)}, 576, 64),
        ({"down_proj": ("F8_E4M3", 2, 8, 4), "down_proj_weight_scale": ("F32", 2), "down_proj_input_scale": ("F32", 2)},
         576, 64),
        # gpt-oss: 2 experts of 4 x 64: 2 * 4 * 2 blocks of 16 bytes = 2,048, a byte each = 128: 4.25
        ({"gate_up_proj_blocks": ("U8", 2, 4, 2, 16), "gate_up_proj_scales": ("U8", 2, 4, 2),
          "gate_up_proj_bias": ("BF16", 2, 4)}, 2176, 512),
        # Llama 4 by modelopt: 2 experts of 4 x 32: 128 bytes = 1,024, 16 scales of 8 = 128, 2 of 32
        ({"down_proj": ("U8", 2, 4, 16), "down_proj_weight_scale": ("F8_E4M3", 2, 4, 2),
          "down_proj_weight_scale_2": ("F32", 2)}, 1216, 256),
        # one module an expert: 2 * 8 * 4 of 16 bits
        ({"0.w1.weight": ("BF16", 8, 4), "1.w1.weight": ("BF16", 8, 4)}, 1024, 64),
    ],
)  # fmt: skip
def test_experts(tmp_path: Path, tensors: Entries, bits: int, weights: int) -> None:
    """Beside a bf16 layer of 32 weights (512 bits) and the head (640)."""
    experts = {f"{LAYER}.mlp.experts.{name}": entry for name, entry in tensors.items()}
    router = {f"{LAYER}.mlp.router.weight": ("BF16", 2, 4)}
    found = stored_bits.storage_of(model(tmp_path, {**ENDS, **experts, **router, f"{Q}.weight": ("BF16", 8, 4)}))
    assert found == Storage((bits + 512) / (weights + 32), 16.0, bits + 512 + 640)


def test_exl3_experts(tmp_path: Path) -> None:
    """128 x 160 as 128 x 256 and back, 3 bits: 8 * 16 * 48 * 16 = 98,304 and 6,144, two experts, 96 * 160 weights."""
    up = {"trellis": ("I16", 8, 16, 48), "suh": ("F16", 128), "svh": ("F16", 256)}
    down = {"trellis": ("I16", 16, 8, 48), "suh": ("F16", 256), "svh": ("F16", 128)}
    experts = f"{LAYER}.mlp.experts"
    entries = {**ENDS, f"{LAYER}.mlp.gate.weight": ("F16", 2, 128)}
    for expert in range(2):
        entries |= {f"{experts}.{expert}.up_proj.{part}": entry for part, entry in up.items()}
        entries |= {f"{experts}.{expert}.down_proj.{part}": entry for part, entry in down.items()}
    sizes = {"hidden_size": 96, "moe_intermediate_size": 160, "vocab_size": 10}
    found = stored_bits.storage_of(model(tmp_path, entries, {**sizes, "quantization_config": EXL3}))
    assert found == Storage(4 * 104448 / (4 * 15360), 16.0, 4 * 104448 + 640)


@pytest.mark.parametrize(
    ("config", "rows", "columns", "weights"),
    [
        ({"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}, 640, 256, 576 * 192),  # SmolLM2
        ({"hidden_size": 2048, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
          "qk_nope_head_dim": 128, "v_head_dim": 128}, 2048, 640, 2048 * 576),  # DeepSeek's kv_a_proj_with_mqa
        ({"hidden_size": 2048, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
          "qk_nope_head_dim": 128, "v_head_dim": 100}, 1664, 2048, 1600 * 2048),  # its o_proj
        ({"hidden_size": 256, "num_attention_heads": 3, "head_dim": 90}, 256, 640, 256 * 540),  # queries with a gate
        ({"hidden_size": 256, "linear_num_key_heads": 2, "linear_key_head_dim": 50, "linear_num_value_heads": 2,
          "linear_value_head_dim": 60}, 256, 384, 256 * 320),  # in_proj_qkv: 100 + 100 + 120
        ({"hidden_size": 256, "linear_num_key_heads": 2, "linear_key_head_dim": 50, "linear_num_value_heads": 2,
          "linear_value_head_dim": 60}, 256, 512, 256 * 440),  # in_proj_qkvz: 120 more
        ({"hidden_size": 256, "n_shared_experts": 3, "moe_intermediate_size": 100}, 256, 384, 256 * 300),
        ({"text_config": {"hidden_size": 200}, "hidden_size": 256}, 256, 256, 200 * 200),
        ({"hidden_size": 256, "vocab_size": 300}, 256, 384, None),  # a layer has no vocabulary
        ({"hidden_size": 600, "intermediate_size": 620}, 640, 640, None),  # either
        ({"hidden_size": 600}, 640, 1024, None),
        ({}, 640, 640, None),
    ],
)  # fmt: skip
def test_exl3_sizes(tmp_path: Path, config: dict[str, Any], rows: int, columns: int, weights: int | None) -> None:
    """A trellis says the padded size only; the true one is that in the config which is padded to it, if one is."""
    layer = {"trellis": ("I16", rows // 16, columns // 16, 16), "suh": ("F16", rows), "svh": ("F16", columns)}
    entries = {**ENDS, **{f"{Q}.{part}": entry for part, entry in layer.items()}}
    found = stored_bits.storage_of(model(tmp_path, entries, {**config, "quantization_config": EXL3}))
    bits = rows * columns + 16 * (rows + columns)
    if weights is None:
        assert found == Storage(note=f"{Q}.trellis: padded, and config.json does not say from which size")
    else:
        assert found == Storage(bits / weights, 16.0, bits + 640)


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ({"hidden_size": 100}, 100 * 256),
        ({"intermediate_size": 999}, 128 * 256),
        ({"hidden_size": 100, "a_hidden_size": 110}, None),
    ],
)
def test_exl3_sizes_of_unquantized_layers(tmp_path: Path, sizes: dict[str, int], weights: int | None) -> None:
    """256 x 128 of 16 bits = 524,288: a size that the config does not name is taken as it is, one of two is not."""
    entries = {**ENDS, f"{Q}.weight": ("F16", 256, 128)}
    found = stored_bits.storage_of(model(tmp_path, entries, {**sizes, "quantization_config": EXL3}))
    if weights is None:
        assert found == Storage(note=f"{Q}.weight: padded, and config.json does not say from which size")
    else:
        assert found == Storage(524288 / weights, 16.0, 524288 + 640)


def test_a_quantized_embedding_matters_to_a_tied_head_only(tmp_path: Path) -> None:
    table = {"model.embed_tokens.trellis": ("I16", 10, 65), "model.embed_tokens.signs": ("F16", 1, 256)}
    layer = {f"{Q}.weight": ("BF16", 8, 4), "lm_head.weight": ("BF16", 10, 4)}
    assert stored_bits.storage_of(model(tmp_path, {**layer, **table})) == Storage(16.0, 16.0, 1152)
    del layer["lm_head.weight"]
    found = stored_bits.storage_of(model(tmp_path, {**layer, **table}))
    assert (found.bpw_layer, found.bpw_head, found.vram_bits) == (None, None, None)
    assert found.note.startswith("model.embed_tokens.signs: ")


def test_override_tensors(tmp_path: Path) -> None:
    """The trellis of 6 bits replaces that of 4: 8 * 16 * 96 * 16 + 6,144; a bf16 weight beside a trellis is no size."""
    case = CASES["exl3"]
    folder = model(tmp_path, {**ENDS, **entries_of(case, Q)}, {**SIZES, "quantization_config": EXL3})
    better, both = tmp_path / "better", tmp_path / "both"
    better.write_bytes(header({f"{Q}.trellis": ("I16", 8, 16, 96)}))
    both.write_bytes(header({f"{Q}.weight": ("BF16", 200, 96)}))
    assert stored_bits.storage_of(folder, [better]) == Storage(202752 / 19200, 16.0, 202752 + 640)
    assert stored_bits.storage_of(folder, [both]).note.startswith(f"{Q}.weight: ")


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"weight": ("U8", 16, 1), "weight.absmax": ("F32", 1), "weight.quant_map": ("F32", 16)}, "weight"),  # no shape
        ({"weight": ("U8", 16, 16), "weight_scale": ("F32", 16, 1)}, "weight"),  # one weight a byte, or two
        ({"weight": ("I8", 16, 16), "weight_scale": ("F8_E8M0", 16, 1)}, "weight"),  # MXFP4 in int8
        ({"weight": ("I8", 8, 4)}, "weight"),
        ({"weight": ("I32", 8, 4)}, "weight"),
        ({"weight": ("F4", 8, 4)}, "weight"),
        ({"weight_packed": ("I32", 64, 8), "weight_scale": ("BF16", 64, 2)}, "weight_packed"),
        ({"weight_packed": ("I32", 4, 8), "scale_packed": ("F16", 2, 4), "meta": ("I16", 4, 4)}, "meta"),  # Marlin 2:4
        ({"compressed": ("F16", 64), "bitmask": ("U8", 8, 2), "row_offsets": ("I64", 8, 1)}, "bitmask"),  # 2:4 sparse
        ({"qweight": ("I32", 8, 64), "scales": ("F16", 2, 64)}, "qweight"),  # bits nowhere
        ({"qweight": ("I32", 8, 64), "qzeros": ("I32", 2, 8), "g_idx": ("I32", 64)}, "qweight"),
        ({**GPTQ, "qweight": ("U8", 8, 64)}, "qweight"),  # FP-Quant's name for bytes
        ({**GPTQ, "g_idx": ("I32", 32)}, "qweight"),  # indices and zero points of different bits
        ({"q_weight": ("I32", 7, 224), "q_scale": ("I32", 2, 28)}, "q_weight"),
        ({"_weight_qdata": ("I8", 8, 4), "_weight_scale": ("BF16", 1, 8), "_weight_zero_point": ("BF16", 1, 8)},
         "_weight_qdata"),  # torchao's int4
        ({"codes": ("I16", 8, 4)}, "codes"),  # AQLM
        ({"trellis": ("I16", 8, 16)}, "trellis"),  # EXL3's table of embeddings
    ],
)  # fmt: skip
def test_unknown_formats_are_not_guessed(tmp_path: Path, parts: Entries, named: str) -> None:
    entries = {**ENDS, **{f"{Q}.{part}": entry for part, entry in parts.items()}}
    found = stored_bits.storage_of(model(tmp_path, entries, SIZES))
    assert found == Storage(note=f"{Q}.{named}: stored in a format that compare_q cannot size")


def test_mixed_bits_without_a_witness_are_not_guessed(tmp_path: Path) -> None:
    bare = {f"{Q}.qweight": ("I32", 8, 64), f"{Q}.scales": ("F16", 2, 64)}
    config = {"quantization_config": {"bits": 4, "dynamic": {"k_proj": {"bits": 8}}}}
    assert stored_bits.storage_of(model(tmp_path, {**ENDS, **bare}, config)).bpw_layer is None


@pytest.mark.parametrize(
    "name",
    [
        "transformer.blocks.0.ffn.experts.mlp.w1",  # DBRX: experts without ".weight"
        "model.layers.0.mlp.experts.gate_up_proj_qzeros",
        "model.layers.0.mlp.experts.everything",
        "lm_head.codes",
    ],
)
def test_unknown_matrices(tmp_path: Path, name: str) -> None:
    found = stored_bits.storage_of(model(tmp_path, {**ENDS, f"{Q}.weight": ("BF16", 8, 4), name: ("F16", 2, 4, 4)}))
    assert (found.bpw_layer, found.bpw_head, found.vram_bits, found.vram_gib) == (None, None, None, None)
    assert found.note.endswith("stored in a format that compare_q cannot size")
    assert name.rpartition("_q")[0] in found.note


def test_odd_configs(tmp_path: Path) -> None:
    """A quantization_config that is no object says nothing; GPTQ's own headers do."""
    entries = {**ENDS, **entries_of(CASES["gptq 4"], Q)}
    found = stored_bits.storage_of(model(tmp_path, entries, {"quantization_config": "gptq", "hidden_size": None}))
    assert found == Storage(20992 / 4096, 16.0, 20992 + 640)


def test_no_weights(tmp_path: Path) -> None:
    found = stored_bits.storage_of(model(tmp_path, {"model.norm.weight": ("F32", 4)}))
    assert (found.bpw_layer, found.vram_bits) == (None, None)
    assert "no weight matrices" in found.note


def test_real_bitsandbytes_header(tmp_path: Path) -> None:
    """Two matrices of a model that bitsandbytes 0.50.2 quantized (nf4, nested scales), as its file describes them.

    64 x 64: 16,384 bits, 64 scales of 8, codes 16 * 32 and 256 * 32, one scale of 32: 25,632.  64 x 128: 32,768 + 128
    * 8 + 8,736 = 42,528.  Head 320 x 64 of 16 bits.
    """
    listed = json.loads((DATA / "bitsandbytes_nf4.json").read_text())
    entries = {name: entry[:2] if ".quant_state." in name else entry for name, entry in listed.items()}
    values = {name: entry[2].encode() for name, entry in listed.items() if ".quant_state." in name}
    found = stored_bits.storage_of(model(tmp_path, entries, {}, values))
    assert found == Storage((25632 + 42528) / (4096 + 8192), 16.0, 25632 + 42528 + 327680)


def test_a_real_exl3_header(tmp_path: Path) -> None:
    """Layer 0 and head of SmolLM2-135M padded to 768, by exllamav3 1.6.5's converter at 3.5 and 6 bits.

    Weights: q, o 768 x 768, k, v 768 x 256, gate, up, down 768 x 1536: 5,111,808; 3.5 bits each: 17,891,328.  Of 16
    bits each, their inputs and outputs: 2 * 1,536 + 2 * 1,024 + 3 * 2,304 = 12,032.  Seven marks of 32 bits.  Head: 768
    x 49,152 weights of 6 bits, 768 + 49,152 numbers of 16, one mark.
    """
    listed = json.loads((DATA / "exl3_3.5bpw.json").read_text())
    folder = model(tmp_path, listed["tensors"], listed["config"])
    layer, head = 17_891_328 + 12_032 * 16 + 7 * 32, 768 * 49_152 * 6 + 49_920 * 16 + 32
    assert stored_bits.storage_of(folder) == Storage(layer / 5_111_808, head / (768 * 49_152), layer + head)
    norms = 3 * 768 * 16
    on_disk = sum(tensor.nbytes for tensor in files.read_headers([folder / "model.safetensors"]).values())
    assert on_disk * 8 == layer + head + norms


# The toy model has 2 layers: 64 x 64 four times, 128 x 64 twice, 64 x 128: 81,920 weights, 1,152 rows, 14 matrices.
WRITERS = {
    "W4A16": (81_920 * 4 + 2_560 * 16, "weight_packed weight_scale"),
    "W4A16_ASYM": (81_920 * 4 + 2_560 * 16 + 2_560 * 4, "weight_packed weight_scale weight_zero_point"),
    "W8A8": (81_920 * 8 + 1_152 * 16, "weight weight_scale"),
    "FP8_DYNAMIC": (81_920 * 8 + 1_152 * 16, "weight weight_scale"),
    "NVFP4A16": (81_920 * 4 + 5_120 * 8 + 14 * 32, "weight_packed weight_scale weight_global_scale"),
    "NVFP4": (81_920 * 4 + 5_120 * 8 + 14 * 32, "weight_packed weight_scale weight_global_scale"),
    "MXFP4A16": (81_920 * 4 + 2_560 * 8, "weight_packed weight_scale"),
    "MXFP8A16": (81_920 * 8 + 2_560 * 8, "weight weight_scale"),
}


def bytes_in(folder: Path, parts: str) -> int:
    """Bytes of the layers' tensors of these names, as safetensors itself reads them."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = [name for name in file.keys() if "_proj." in name and name.rpartition(".")[2] in parts.split()]  # noqa: SIM118
        return sum(file.get_tensor(name).nbytes for name in found)


@pytest.mark.engine
@pytest.mark.parametrize("preset", WRITERS)
def test_real_compressed_tensors(tmp_path: Path, toy_model: Path, preset: str) -> None:
    """Files that compressed-tensors wrote; groups of 32 (of 16 in NVFP4), 1 global scale a matrix, head 16 bits."""
    from demo.quantize import quantize

    bits, parts = WRITERS[preset]
    quantize(toy_model, preset, tmp_path / "q", group_size=32 if preset.startswith("W4") else None)
    assert stored_bits.storage_of(tmp_path / "q") == Storage(bits / 81_920, 16.0, bits + 20_480 * 16)
    assert bytes_in(tmp_path / "q", parts) * 8 == bits


@pytest.mark.engine
def test_real_mixed_precision(tmp_path: Path, toy_model: Path) -> None:
    """int4 g32 down_proj, packed int8 q_proj with a scale a row, the rest bf16.

    down_proj 2 * 8,192 * 4 + 512 * 16 = 73,728; q_proj 2 * 4,096 * 8 + 128 * 16 = 67,584; the other 57,344 * 16.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from transformers import AutoModelForCausalLM

    from demo.quantize import round_to_nearest

    network = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.bfloat16)
    four = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    eight = QuantizationArgs(num_bits=8, strategy="channel")
    groups = {
        "four": QuantizationScheme(targets=["re:.*down_proj"], weights=four, format="pack-quantized"),
        "eight": QuantizationScheme(targets=["re:.*q_proj"], weights=eight, format="pack-quantized"),
    }
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="calibration")
    apply_quantization_config(network, config)
    for layer in network.modules():
        if hasattr(layer, "quantization_scheme"):
            round_to_nearest(layer, layer.quantization_scheme.weights, None)
    compressor = ModelCompressor.from_pretrained_model(network)
    compressor.compress_model(network)
    network.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    bits = 73_728 + 67_584 + 57_344 * 16
    assert stored_bits.storage_of(tmp_path) == Storage(bits / 81_920, 16.0, bits + 20_480 * 16)
    assert bytes_in(tmp_path, "weight weight_packed weight_scale") * 8 == bits


@pytest.mark.engine
def test_real_gpt_oss(tmp_path: Path) -> None:
    """Attention 64 x 64 twice and 32 x 64 twice, 2 experts of 64 x 96 and 48 x 64, tied: router and biases left out.

    2 * 4,096 + 2 * 2,048 + 2 * (6,144 + 3,072) = 30,720 weights of 16 bits; the embedding 40 x 64.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=40, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, tie_word_embeddings=True,
        layer_types=["full_attention"],
    )  # fmt: skip
    GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    assert stored_bits.storage_of(tmp_path) == Storage(16.0, 16.0, (30_720 + 2_560) * 16)
