"""Stored bits worked out by hand, against headers of every format; stamps; what the config says."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backends import checkpoint, storage
from backends.base import Storage
from tests.conftest import refusal

BITS = {"F32": 32, "BF16": 16, "F16": 16, "I64": 64, "I32": 32, "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4}
LAYER = "model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"
Entry = tuple[Any, ...]  # dtype, then the shape
Entries = dict[str, Entry]
# The embedding has 40 weights of 32 bits and the head 40 of 16, so that neither can pass for the other.
ENDS: Entries = {"model.embed_tokens.weight": ("F32", 10, 4), "lm_head.weight": ("BF16", 10, 4)}


def header(entries: Entries, values: dict[str, bytes] | None = None) -> bytes:
    """A safetensors file by hand: any dtype the format knows, zeros unless ``values`` says otherwise."""
    described, body = {}, b""
    for name, (dtype, *shape) in entries.items():
        data = (values or {}).get(name, bytes(math.prod(shape) * BITS[dtype] // 8))
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    raw = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
    return struct.pack("<Q", len(raw)) + raw + body


def model(
    folder: Path, entries: Entries, config: dict[str, Any] | None = None, values: dict[str, bytes] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    (folder / "model.safetensors").write_bytes(header(entries, values))
    return folder


def test_bf16_with_a_head_of_its_own(tmp_path: Path) -> None:
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
    assert storage.storage_of(tmp_path) == Storage(16.0, 16.0, 1664)
    assert Storage(vram_bits=2.0**36).vram_gib == 8.0  # 2^36 bits are 2^33 bytes


def test_tied_head_has_the_bits_of_the_embedding(tmp_path: Path) -> None:
    """Layer 32 * 16 = 512 bits; head 40 * 32 = 1,280 bits."""
    folder = model(tmp_path, {f"{Q}.weight": ("BF16", 8, 4), "model.embed_tokens.weight": ("F32", 10, 4)})
    assert storage.storage_of(folder) == Storage(16.0, 32.0, 1792)


SHAPE_64, SHAPE_ODD = struct.pack("<2q", 64, 64), struct.pack("<2q", 4, 12)
W4A16 = {"weight_packed": ("I32", 64, 8), "weight_scale": ("BF16", 64, 2), "weight_shape": ("I64", 2)}
AWQ = {"qweight": ("I32", 64, 8), "qzeros": ("I32", 2, 8), "scales": ("F16", 2, 64)}
GPTQ = {"qweight": ("I32", 8, 64), "qzeros": ("I32", 2, 8), "scales": ("F16", 2, 64), "g_idx": ("I32", 64)}
NVFP4 = {"weight_packed": ("U8", 16, 16), "weight_scale": ("F8_E4M3", 16, 2), "weight_global_scale": ("F32", 1)}
MODELOPT = {"weight": ("U8", 16, 16), "weight_scale": ("F8_E4M3", 16, 2), "weight_scale_2": ("F32",)}


@pytest.mark.parametrize(
    ("parts", "shape", "quantization", "bits", "numel"),
    [
        # 64 x 64 in groups of 32: 512 words = 16,384 bits, 128 scales = 2,048 bits: 4.5; weight_shape is not counted
        (W4A16, SHAPE_64, {}, 18432, 4096),
        # and zero points, eight a word along the outputs: 8 x 2 words = 512 bits: 4.625
        ({**W4A16, "weight_zero_point": ("I32", 8, 2)}, SHAPE_64, {}, 18944, 4096),
        # activation order: 64 group indices of 32 bits: 5.0
        ({**W4A16, "weight_g_idx": ("I32", 64)}, SHAPE_64, {}, 20480, 4096),
        # 4 x 12 is padded to two words a row: 256 + 64 bits for 48 weights, not for 64
        ({"weight_packed": ("I32", 4, 2), "weight_scale": ("BF16", 4, 1), "weight_shape": ("I64", 2)},
         SHAPE_ODD, {}, 320, 48),
        # W8A8: 32 bytes and 8 scales: 256 + 128 bits: 12.0
        ({"weight": ("I8", 8, 4), "weight_scale": ("BF16", 8, 1)}, b"", {}, 384, 32),
        # FP8, one scale; the activations' is not counted: 256 + 32 bits: 9.0
        ({"weight": ("F8_E4M3", 8, 4), "weight_scale": ("F32", 1), "input_scale": ("F32", 1)}, b"", {}, 288, 32),
        # FP8 in blocks, as DeepSeek stores it: 256 + 2 * 32 bits: 10.0
        ({"weight": ("F8_E4M3", 8, 4), "weight_scale_inv": ("F32", 2, 1)}, b"", {}, 320, 32),
        # MXFP8: a power of two for every 32 weights: 512 + 16 bits: 8.25
        ({"weight": ("F8_E4M3", 2, 32), "weight_scale": ("F8_E8M0", 2, 1)}, b"", {}, 528, 64),
        # NVFP4, 16 x 32: 256 bytes, 32 fp8 scales, one fp32: 2,048 + 256 + 32 bits: 4.5625
        ({**NVFP4, "input_global_scale": ("F32", 1)}, b"", {}, 2336, 512),
        ({**MODELOPT, "input_scale": ("F32",)}, b"", {}, 2336, 512),
        # GPTQ, 64 x 64 in groups of 32: 16,384 + 16 * 32 + 128 * 16 + 64 * 32 bits: 5.125
        (GPTQ, b"", {"quant_method": "gptq", "bits": 4}, 20992, 4096),
        # 3 bits: 3 x 8 words = 768 bits are 256 weights, 8 scales 128 bits: 3.5
        ({"qweight": ("I32", 3, 8), "scales": ("F16", 1, 8)}, b"", {"bits": 3}, 896, 256),
        # AWQ: as GPTQ without indices: 4.625
        (AWQ, b"", {"quant_method": "awq", "bits": 4}, 18944, 4096),
        (AWQ, b"", {"quant_method": "awq", "w_bit": 4}, 18944, 4096),
    ],
)  # fmt: skip
def test_quantized_layers(
    tmp_path: Path, parts: Entries, shape: bytes, quantization: dict[str, Any], bits: int, numel: int
) -> None:
    """One quantized layer, alone and beside a bf16 one of 32 weights (512 bits); the head is 640 bits."""
    entries = {**ENDS, **{f"{Q}.{part}": entry for part, entry in parts.items()}}
    config, values = {"quantization_config": quantization}, {f"{Q}.weight_shape": shape} if shape else None
    assert storage.storage_of(model(tmp_path, entries, config, values)) == Storage(bits / numel, 16.0, bits + 640)
    entries[f"{LAYER}.self_attn.o_proj.weight"] = ("BF16", 8, 4)
    gold = Storage((bits + 512) / (numel + 32), 16.0, bits + 512 + 640)
    assert storage.storage_of(model(tmp_path, entries, config, values)) == gold


def test_quantized_head(tmp_path: Path) -> None:
    """Head 10 x 4 of one byte and a scale of 16 bits a row: (320 + 160) / 40 = 12.0 bits; the layer is 512 bits."""
    head = {"lm_head.weight": ("I8", 10, 4), "lm_head.weight_scale": ("BF16", 10, 1)}
    entries = {**head, f"{Q}.weight": ("BF16", 8, 4), "model.embed_tokens.weight": ("F32", 10, 4)}
    assert storage.storage_of(model(tmp_path, entries)) == Storage(16.0, 12.0, 992)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.input_layernorm.weight 8",
        f"{Q}.bias 8",
        f"{Q}.input_scale 1",
        f"{Q}.input_global_scale 1",
        f"{LAYER}.self_attn.k_scale 1",
        f"{LAYER}.self_attn.v_scale 1",
        f"{LAYER}.mlp.gate.weight 4 8",
        f"{LAYER}.mlp.gate.e_score_correction_bias 4",
        f"{LAYER}.mlp.shared_expert_gate.weight 1 8",
        f"{LAYER}.block_sparse_moe.gate.weight 4 8",
        f"{LAYER}.mlp.router.weight 4 8",
        f"{LAYER}.block_sparse_moe.router.layer.weight 4 8",  # Granite
        "model.visual.blocks.0.attn.qkv.weight 8 8",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight 8 8",
        "model.multi_modal_projector.linear_1.weight 8 8",
        "model.audio_tower.layers.0.fc1.weight 8 8",
        "transformer.wpe.weight 16 4",
    ],
)
def test_left_out(tmp_path: Path, name: str) -> None:
    name, *shape = name.split()
    entries = {**ENDS, f"{Q}.weight": ("BF16", 8, 4), name: ("F32", *map(int, shape))}
    assert storage.storage_of(model(tmp_path, entries)) == Storage(16.0, 16.0, 512 + 640)


def test_fused_experts_are_layers(tmp_path: Path) -> None:
    """32 weights of 16 bits and 2 * 8 * 4 of 32: (512 + 2,048) / 96 bits a weight."""
    entries = {**ENDS, f"{Q}.weight": ("BF16", 8, 4), f"{LAYER}.mlp.experts.gate_up_proj": ("F32", 2, 8, 4)}
    assert storage.storage_of(model(tmp_path, entries)) == Storage(2560 / 96, 16.0, 3200)


def test_scales_of_fused_experts_are_bits_but_not_weights(tmp_path: Path) -> None:
    """64 weights of 8 bits and 2 scales of 32: (512 + 64) / 64 = 9.0."""
    experts = f"{LAYER}.mlp.experts.gate_up_proj"
    entries = {**ENDS, experts: ("F8_E4M3", 2, 8, 4), f"{experts}_scale_inv": ("F32", 2, 1, 1)}
    assert storage.storage_of(model(tmp_path, entries)) == Storage(9.0, 16.0, 576 + 640)


@pytest.mark.parametrize(
    "parts",
    [
        {"weight": ("U8", 16, 1), "weight.absmax": ("F32", 1), "weight.quant_map": ("F32", 16)},  # bitsandbytes, 4 bit
        {"weight": ("U8", 16, 16), "weight_scale": ("F32", 16, 1)},  # bytes that may hold one weight or two
        {"weight_packed": ("I32", 64, 8), "weight_scale": ("BF16", 64, 2)},  # how many weights nobody says
        {"qweight": ("I32", 8, 64), "scales": ("F16", 2, 64)},  # no bits in the config
        {"weight": ("F4", 8, 4)},
    ],
)
def test_unknown_formats_are_not_guessed(tmp_path: Path, parts: Entries) -> None:
    found = storage.storage_of(model(tmp_path, {**ENDS, **{f"{Q}.{part}": parts[part] for part in parts}}))
    assert (found.bpw_layer, found.bpw_head, found.vram_bits, found.vram_gib) == (None, None, None, None)
    assert Q in found.note


def test_no_weights(tmp_path: Path) -> None:
    found = storage.storage_of(model(tmp_path, {"model.norm.weight": ("F32", 4)}))
    assert (found.bpw_layer, found.vram_bits) == (None, None)
    assert "no weight matrices" in found.note


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    """512 bits in the one shard, 640 of the head in the other; the third file belongs to nothing."""
    folder = model(tmp_path, {f"{LAYER}.mlp.up_proj.weight": ("F32", 8, 4)})
    (folder / "model-1.safetensors").write_bytes(header({f"{Q}.weight": ("BF16", 8, 4)}))
    (folder / "model-2.safetensors").write_bytes(header(ENDS))
    index = folder / "model.safetensors.index.json"
    names = {f"{Q}.weight": "model-1.safetensors", **dict.fromkeys(ENDS, "model-2.safetensors")}
    index.write_text(json.dumps({"metadata": {"total_size": 304}, "weight_map": names}))
    assert storage.storage_of(folder) == Storage(16.0, 16.0, 1152)
    (folder / "model-2.safetensors").unlink()
    for function in (checkpoint.weight_files, storage.storage_of, checkpoint.stamp):
        assert str(folder / "model-2.safetensors") in refusal(function, folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'])
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    text = refusal(checkpoint.weight_files, tmp_path)
    assert text.startswith(f"{tmp_path / 'model.safetensors.index.json'}: not a safetensors index")


def test_weights_stored_twice_are_counted_once(tmp_path: Path) -> None:
    folder = model(tmp_path, {**ENDS, f"{Q}.weight": ("BF16", 8, 4)})
    (folder / "consolidated.safetensors").write_bytes(header({"layers.0.attention.wq.weight": ("F32", 8, 4)}))
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    assert storage.storage_of(folder) == Storage(16.0, 16.0, 1152)
    (folder / "model.safetensors").unlink()
    assert checkpoint.weight_files(folder) == [folder / "consolidated.safetensors"]


def test_override_tensors_replace(tmp_path: Path) -> None:
    """q_proj 32 * 16 = 512 bits stays, o_proj 32 * 16 becomes 32 * 8: (512 + 256) / 64 = 12.0."""
    o = f"{LAYER}.self_attn.o_proj.weight"
    folder = model(tmp_path / "m", {**ENDS, f"{Q}.weight": ("BF16", 8, 4), o: ("BF16", 8, 4)})
    override, second = tmp_path / "override.safetensors", tmp_path / "second.safetensors"
    override.write_bytes(header({o: ("F8_E4M3", 8, 4)}))
    second.write_bytes(header({o: ("F32", 8, 4)}))
    assert storage.storage_of(folder, [override]) == Storage(12.0, 16.0, 768 + 640)
    assert storage.storage_of(folder, [override, second]) == Storage(24.0, 16.0, 1536 + 640)  # 512 + 1,024
    assert len({checkpoint.stamp(folder, files) for files in ([], [override], [second], [override, second])}) == 4


@pytest.mark.parametrize("function", [storage.storage_of, checkpoint.stamp])
def test_missing_override_tensors_are_named(tmp_path: Path, function: Callable[..., object]) -> None:
    folder = model(tmp_path, {**ENDS, f"{Q}.weight": ("BF16", 8, 4)})
    assert refusal(function, folder, [tmp_path / "none.safetensors"]).startswith(f"{tmp_path / 'none.safetensors'}: ")


def test_stamp_follows_configs_and_weights_and_nothing_else(tmp_path: Path) -> None:
    folder, entries = tmp_path / "a", {**ENDS, f"{Q}.weight": ("BF16", 8, 4)}
    weights = model(folder, entries) / "model.safetensors"
    os.utime(weights, ns=(10**18, 10**18 + 1))
    first = checkpoint.stamp(folder)
    for name in ("README.md", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    os.utime(folder / "config.json", (1, 1))
    assert checkpoint.stamp(folder) == first
    shutil.copytree(folder, tmp_path / "b")  # keeps the times of the files
    assert checkpoint.stamp(tmp_path / "b") == first

    seen = {first}
    for name in (
        "config.json",
        "generation_config.json",
        "quantize_config.json",
        "hf_quant_config.json",
        "params.json",
    ):
        (folder / name).write_text('{"bits": 4}')
        seen.add(checkpoint.stamp(folder))
    os.utime(weights, ns=(10**18, 10**18 + 2))
    seen.add(checkpoint.stamp(folder))
    weights.write_bytes(header({**entries, f"{Q}.weight": ("BF16", 4, 8)}))  # as large, and as old
    os.utime(weights, ns=(10**18, 10**18 + 2))
    seen.add(checkpoint.stamp(folder))
    assert len(seen) == 8


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "gold"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": {**YARN, "rope_theta": 1e6}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),  # the factor is in it already
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {**LLAMA3, "factor": 32.0}}, 131072),  # Llama 3.2
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),  # Vicuna 16k
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),  # Gemma 3: the factor is in it already
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 8192),
        ({"max_position_embeddings": 8192, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, 8192),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"max_position_embeddings": 10, "text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"vocab_size": 5}, None),
    ],
)  # fmt: skip
def test_context_length(config: dict[str, Any], gold: int | None) -> None:
    assert checkpoint.context_length(config) == gold


@pytest.mark.parametrize(
    ("config", "gold"),
    [
        ({"vocab_size": 32000}, 32000),
        ({"text_config": {"vocab_size": 256000}}, 256000),
        ({"vocab_size": 5, "text_config": {"vocab_size": 256000}}, 256000),
        ({"vocab_size": 5, "text_config": {"hidden_size": 8}}, 5),
        ({"vocab_size": None}, None),
        ({}, None),
    ],
)
def test_vocabulary(config: dict[str, Any], gold: int | None) -> None:
    assert checkpoint.vocab_size(config) == gold


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'"text"', b"\xff\xfe"])
def test_bad_config(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert refusal(checkpoint.config_of, tmp_path).startswith(f"{tmp_path / 'config.json'}: ")


WHOLE = header({f"{Q}.weight": ("F32", 8, 4)})  # the last 128 bytes are the weights


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


BAD_FILES = {
    "empty": b"",
    "no whole length": WHOLE[:7],
    "length alone": WHOLE[:8],
    "cut in the header": WHOLE[:60],
    "no weights": WHOLE[:-128],
    "last byte missing": WHOLE[:-1],
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1",
    "no JSON": framed(b"not JSON"),
    "no text": framed(b"\xff\xff"),
    "list": framed(b"[1]"),
    "number": framed(b'{"a.weight": 5}'),
    "no dtype": framed(b'{"a.weight": {}}'),
    "no offsets": framed(b'{"a.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": null}}'),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_safetensors_are_named(tmp_path: Path, kind: str) -> None:
    folder = model(tmp_path, {})
    (folder / "model.safetensors").write_bytes(BAD_FILES[kind])
    assert refusal(storage.storage_of, folder).startswith(f"{folder / 'model.safetensors'}: ")
