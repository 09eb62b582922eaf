"""GGUF headers, compared with sizes computed by hand and with the ``gguf`` package's tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from compare_q.backends.base import ServingFacts
from compare_q.backends.checkpoint.checkpoint_doctor import gguf_facts
from compare_q.backends.checkpoint.gguf import TYPES, read_model
from tests.support.checkpoints import finish_gguf

BLOCKS = {
    Type.F32: (1, 4),
    Type.F16: (1, 2),
    Type.Q8_0: (32, 34),
    Type.Q4_1: (32, 20),
    Type.Q4_K: (256, 144),
    Type.Q6_K: (256, 210),
    Type.NVFP4: (64, 36),
}
"""Type -> (weights, bytes) of a block, from ggml-common.h.

Q8_0 is 32 x 8 bits and an fp16 scale, NVFP4 is 64 x 4 bits and four 8-bit scales.
"""
MATRICES = {
    "token_embd.weight": (Type.F16, (8, 256)),
    "output.weight": (Type.Q8_0, (8, 256)),
    "blk.0.attn_q.weight": (Type.Q4_K, (256, 256)),
    "blk.0.attn_v.weight": (Type.Q6_K, (256, 256)),
    "blk.1.ffn_down_exps.weight": (Type.Q4_1, (4, 64, 256)),
}
"""Name -> (type, shape with the inputs last, as in numpy).

Each matrix of the three layers has 65,536 weights.
"""
NOT_COUNTED = {
    "blk.1.ffn_gate_inp.weight": (Type.F32, (4, 256)),
    "blk.0.attn_norm.weight": (Type.F32, (256,)),
    "blk.0.attn_q_norm.weight": (Type.F32, (4, 64)),
    "blk.0.attn_q.bias": (Type.F32, (256,)),
    "rope_freqs.weight": (Type.F32, (32,)),
    "v.blk.0.attn_q.weight": (Type.F16, (64, 64)),
    "per_layer_token_embd.weight": (Type.F16, (8, 64)),
    "blk.0.ssm_a": (Type.F32, (4, 16)),
}
FLOATS = {Type.F32: np.float32, Type.F16: np.float16}
BPW_LAYER = (144 / 256 * 8 + 210 / 256 * 8 + 20 / 32 * 8) / 3
ORIGINAL = {"rope__scaling__original_context_length": 1024}
TOKENS = ["<s>", "<0x0A>", "Ġthe", "ü", "<tool>", "[PAD5]"]


def write(
    file: Path, tensors: dict[str, tuple[Type, tuple[int, ...]]], *, shard: int = 0, **fields: Any
) -> Path:
    """Write a GGUF of zeros with ``shard`` tensors per file.

    ``fields`` replace keys of the architecture.
    """
    writer = gguf.GGUFWriter(file, "llama", split_max_tensors=shard)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    # Control, byte, normal, normal, user-defined, unused.
    writer.add_token_types([3, 6, 1, 1, 4, 5])
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_context_length(4096)
    for name, value in fields.items():
        key = f"llama.{name.replace('__', '.')}"
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, (kind, shape) in tensors.items():
        elements, size = BLOCKS[kind]
        stored = np.zeros((*shape[:-1], shape[-1] // elements * size), np.uint8)
        # The writer takes the type of floats from the array's.
        if kind in FLOATS:
            stored = stored.view(FLOATS[kind])
        writer.add_tensor(name, stored, raw_dtype=kind)
    finish_gguf(writer)
    return file


def test_types_are_those_of_the_gguf_package() -> None:
    for kind in Type:
        name, *block = TYPES[kind]
        assert name.upper() == kind.name
        assert block == list(gguf.GGML_QUANT_SIZES[kind])
    assert len(TYPES) == len(Type)


def test_bits_by_hand(tmp_path: Path) -> None:
    storage = read_model(write(tmp_path / "m.gguf", MATRICES | NOT_COUNTED)).storage()
    # Q8_0 has 34 bytes for 32 weights: 8.5 bits.
    assert (storage.bpw_layer, storage.bpw_head) == (pytest.approx(BPW_LAYER), 8.5)
    assert storage.vram_bits == 8 * (
        65_536 // 256 * (144 + 210) + 65_536 // 32 * 20 + 8 * 256 // 32 * 34
    )


def test_tied_head_has_the_embeddings_bits(tmp_path: Path) -> None:
    tied = dict(MATRICES)
    del tied["output.weight"]
    assert read_model(write(tmp_path / "m.gguf", tied)).storage().bpw_head == 16.0


def test_blocks_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    """The block counts of GLM and DeepSeek include their multi-token-prediction modules."""
    tensors = {
        **MATRICES,
        "blk.2.ffn_down.weight": (Type.F32, (64, 256)),
        "blk.2.nextn.eh_proj.weight": (Type.F32, (64, 256)),
    }
    file = write(tmp_path / "m.gguf", tensors, block_count=3, nextn_predict_layers=1)
    model = read_model(file)
    assert model.storage().bpw_layer == pytest.approx(BPW_LAYER)
    for _, text in gguf_facts(model):
        assert "blk.*.ffn_down:" not in text
        assert "F32" not in text
    model = read_model(write(tmp_path / "m.gguf", tensors, block_count=3))
    # If no block drafts, blk.2 is a layer: two matrices of 64 x 256 in float32.
    bits = 3 * 65_536 * BPW_LAYER + 32_768 * 32
    assert model.storage().bpw_layer == pytest.approx(bits / (3 * 65_536 + 32_768))


def test_global_scales_of_nvfp4_count_and_input_scales_do_not(tmp_path: Path) -> None:
    nvfp4 = {
        **MATRICES,
        "blk.0.attn_q.weight": (Type.NVFP4, (256, 256)),
        "blk.0.attn_q.scale": (Type.F32, (1,)),
        "blk.0.attn_q.input_scale": (Type.F32, (1,)),
    }
    storage = read_model(write(tmp_path / "m.gguf", nvfp4)).storage()
    # NVFP4 has 36 bytes for 64 weights: 4.5 bits; its global scale has 32 bits.
    bpw = (4.5 + 210 / 256 * 8 + 5.0) / 3 + 32 / 3 / 65_536
    assert storage.bpw_layer == pytest.approx(bpw, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "tensor", "expected"),
    [
        ({}, "token_embd.weight", {}),
        (
            {**ORIGINAL, "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            "token_embd.weight",
            {"type": "yarn", "factor": 4.0, "original_context": 1024},
        ),
        (ORIGINAL, "rope_freqs.weight", {"type": "rope_freqs", "original_context": 1024}),
        (
            ORIGINAL,
            "rope_factors_long.weight",
            {"type": "longrope", "original_context": 1024, "context": 9000},
        ),
    ],
)
def test_scaled_positions(
    tmp_path: Path, fields: dict[str, Any], tensor: str, expected: dict[str, Any]
) -> None:
    file = write(tmp_path / "m.gguf", {tensor: (Type.F32, (2, 2))}, **fields)
    assert read_model(file).rope(9000) == expected


def test_any_shard_or_the_folder_names_the_model(tmp_path: Path) -> None:
    # 5 + 8 = 13 tensors make two files.
    write(tmp_path / "m.gguf", MATRICES | NOT_COUNTED, shard=7)
    first, second = sorted(tmp_path.iterdir())
    assert first.name == "m-00001-of-00002.gguf"
    model = read_model(first)
    assert model.files == (first, second)
    assert model == read_model(second) == read_model(tmp_path)
    assert model.storage().bpw_layer == pytest.approx(BPW_LAYER)
    assert model.facts.vocab_size == len(TOKENS)
    # A projector is not a model.
    (tmp_path / "mmproj-m.gguf").touch()
    assert read_model(tmp_path).files == (first, second)


def test_stamp_follows_every_shard_and_its_weights(tmp_path: Path) -> None:
    """Even with equal size and time: in reproducible builds, all files have the same time."""
    write(tmp_path / "m.gguf", MATRICES, shard=3)
    first, second = sorted(tmp_path.iterdir())
    os.utime(second, (0, 0))
    stamps = [read_model(first).stamp()]
    assert read_model(second).stamp() == stamps[0]
    content = bytearray(second.read_bytes())
    content[-20_000:-10_000] = bytes([1]) * 10_000
    second.write_bytes(content)
    os.utime(second, (0, 0))
    stamps.append(read_model(first).stamp())
    second.touch()
    stamps.append(read_model(first).stamp())
    assert len(set(stamps)) == 3


EXPERTS = {
    "expert_used_count": 2,
    "expert_feed_forward_length": 300,
    "attention__sliding_window": 7,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ServingFacts(6, step_numbers=4 * 256 + 3 * 512, float_bytes=4)),
        # Two experts of 300 are wider than an MLP of 512.
        (EXPERTS, ServingFacts(6, kv_is_upper=True, step_numbers=4 * 256 + 3 * 600, float_bytes=4)),
        (
            {"feed_forward_length": [64, 128]},
            ServingFacts(6, step_numbers=4 * 256 + 3 * 128, float_bytes=4),
        ),
        ({"embedding_length": 0}, ServingFacts(6, float_bytes=4)),
    ],
)
def test_sizes_that_serving_needs(
    tmp_path: Path, changes: dict[str, Any], expected: ServingFacts
) -> None:
    """The same sizes as from a config; ggml computes in float32."""
    sizes = {"embedding_length": 256, "feed_forward_length": 512}
    model = read_model(write(tmp_path / "m.gguf", MATRICES, **(sizes | changes)))
    assert model.serving() == expected
