"""Damaged checkpoints give a size or one line, in little memory.

The damage is in headers of safetensors and GGUF, in configs and in indices.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given

from compare_q.backends.checkpoint import (
    largest_weights,
    nvfp4_scales,
    safetensors_files,
    stored_sizes,
)
from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig
from compare_q.backends.checkpoint.folder import Checkpoint, storage_of
from compare_q.backends.checkpoint.gguf import read_model
from compare_q.backends.layers.schemes import declared, kv_cache
from tests.support.checkpoints import ENDS, LAYER, Q, finish_gguf, safetensors_bytes
from tests.support.hostile import bounded_answer_of, damaged, damaged_bytes, fuzzed, randoms

ENTRIES = {
    **ENDS,
    f"{Q}.weight_packed": ("I32", 8, 1),
    f"{Q}.weight_scale": ("BF16", 8, 1),
    f"{Q}.weight_shape": ("I64", 2),
    f"{LAYER}.mlp.up_proj.weight": ("U8", 8, 8),
    f"{LAYER}.mlp.up_proj.weight_scale": ("F8_E4M3", 8, 1),
    f"{LAYER}.mlp.up_proj.weight_scale_2": ("F32",),
    f"{LAYER}.mlp.gate_proj.weight": ("U8", 8, 8),
    f"{LAYER}.mlp.gate_proj.weight_scale_2": ("F32",),
    f"{LAYER}.mlp.gate_proj.weight_scale": ("F8_E4M3", 8, 1),
    f"{LAYER}.self_attn.k_proj.qweight": ("I32", 2, 8),
    f"{LAYER}.self_attn.k_proj.scales": ("F16", 1, 8),
    f"{LAYER}.self_attn.k_proj.qzeros": ("I32", 1, 1),
    f"{LAYER}.self_attn.v_proj.trellis": ("I16", 8, 8, 64),
    f"{LAYER}.self_attn.o_proj.weight": ("U8", 16, 1),
    f"{LAYER}.self_attn.o_proj.weight.quant_state.nf4": ("U8", 17),
}
WHOLE = safetensors_bytes(
    ENTRIES, {f"{LAYER}.self_attn.o_proj.weight.quant_state.nf4": b'{"shape": [8, 4]}'}
)
HEADER_LENGTH = struct.unpack("<Q", WHOLE[:8])[0]
HEADER = json.loads(WHOLE[8 : 8 + HEADER_LENGTH])
BODY = WHOLE[8 + HEADER_LENGTH :]
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CONFIG = {
    "vocab_size": 10,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 8,
    "text_config": {"qk_nope_head_dim": 2},
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "bits": 4,
        "group_size": 16,
        "config_groups": {"group_0": {"weights": FP4, "input_activations": FP4}},
    },
}
LEGACY = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
INDEX = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(ENTRIES, "model.safetensors")}


def framed(header: bytes, random: Random) -> bytes:
    """Return a file with this header; the stated length is sometimes wrong."""
    length = random.choice([len(header)] * 9 + [2**64 - 1])
    return struct.pack("<Q", length) + header + BODY


def look(folder: Path) -> None:
    """Read everything that a run needs from a checkpoint's files."""
    config = CheckpointConfig.read(folder)
    assert [
        config.vocab_size,
        config.context,
        config.kv_numbers,
        config.rope_scaling,
        config.quantization,
    ]
    assert config.serving
    assert (
        declared(config.quantization).of("model.layers.0.mlp.up_proj") is None
        or config.quantization
    )
    assert isinstance(kv_cache(config.quantization), str)
    storage_of(folder)
    nvfp4_scales.check_scales(folder, nvfp4_scales.nvfp4_layers(folder))
    checkpoint = Checkpoint(folder)
    faults = [*stored_sizes.contradictions(checkpoint), *largest_weights.impossible(checkpoint)]
    assert all(fault.what for fault in faults)
    safetensors_files.stamp(folder)


@fuzzed
@given(random=randoms)
def test_folders(tmp_path_factory: pytest.TempPathFactory, random: Random) -> None:
    folder = tmp_path_factory.getbasetemp() / "checkpoint"
    folder.mkdir(exist_ok=True)
    contents = {
        "config.json": json.dumps(CONFIG).encode(),
        "hf_quant_config.json": json.dumps(LEGACY).encode(),
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        "model.safetensors": WHOLE,
    }
    kind = random.randint(0, 4)
    if kind == 0:
        contents["config.json"] = damaged(CONFIG, random)
    elif kind == 1:
        # hf_quant_config.json is read only if config.json has no quantization.
        contents["config.json"] = b"{}"
        contents["hf_quant_config.json"] = damaged(LEGACY, random)
    elif kind == 2:
        contents["model.safetensors.index.json"] = damaged(INDEX, random)
    else:
        contents["model.safetensors"] = framed(damaged(HEADER, random), random)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    bounded_answer_of(lambda: look(folder), sum(map(len, contents.values())))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_token_types([3, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_context_length(4096)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(1024)
    writer.add_tensor("token_embd.weight", np.zeros((3, 32), np.float32))
    writer.add_tensor(
        "blk.0.attn_q.weight", np.zeros((4, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    finish_gguf(writer)
    return file


def with_other_numbers(content: bytes, random: Random) -> bytes:
    """Return a GGUF file with one to three changed numbers: counts, lengths, types, sizes, ..."""
    data = bytearray(content)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(4, len(content) - 8)
        size = random.choice([1, 4, 8])
        value = random.choice(
            [0, 1, 4, 5, 8, 9, 10, 12, 13, 33, 255, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
        )
        data[at : at + size] = (value % 256**size).to_bytes(size, "little")
    return bytes(data)


def measured(file: Path) -> Any:
    """Read everything that a run needs from a GGUF file."""
    model = read_model(file)
    return model.facts, model.storage(), model.stamp()


@fuzzed
@given(random=randoms)
def test_gguf_files(gguf_file: Path, random: Random) -> None:
    damage = random.choice([damaged_bytes, with_other_numbers, with_other_numbers])
    content = damage(gguf_file.read_bytes(), random)
    name = random.choice(
        ["d.gguf"] * 9 + ["d-00001-of-00001.gguf", "d-00001-of-00002.gguf", "d-00000-of-00000.gguf"]
    )
    file = gguf_file.with_name(name)
    file.write_bytes(content)
    bounded_answer_of(lambda: measured(file), len(content))
