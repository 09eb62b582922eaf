"""What a row says of scaled rotary positions: from configs of either generation, and from GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.checkpoint import gguf
from compare_q.backends.checkpoint.config import CheckpointConfig, rope
from tests.support.checkpoints import finish_gguf

QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
PHI = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "default": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}),
    "null": ({"rope_scaling": None}, {}),
    "yarn": (
        {"rope_scaling": QWEN, "max_position_embeddings": 131072},
        {"type": "yarn", "factor": 4.0, "original_context": 32768},
    ),
    "yarn, whose original is what the config states": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768},
        {"type": "yarn", "factor": 4.0, "original_context": 32768},
    ),
    "llama3 in the text model of a larger one": (
        {"text_config": {"rope_parameters": LLAMA, "max_position_embeddings": 131072}},
        {"type": "llama3", "factor": 8.0, "original_context": 8192},
    ),
    "longrope": (
        {"rope_scaling": PHI, "original_max_position_embeddings": 4096, "max_position_embeddings": 131072},
        {"type": "longrope", "original_context": 4096, "context": 9000},
    ),
    "a kind of layers": ({"rope_parameters": GEMMA}, {"type": "linear", "factor": 8.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_of_a_config(name: str) -> None:
    config, expected = CASES[name]
    assert rope(CheckpointConfig(config), 9000) == expected


@pytest.mark.parametrize(
    ("kind", "tensor", "expected"),
    [
        (None, None, {}),
        ("yarn", None, {"type": "yarn", "factor": 4.0, "original_context": 1024}),
        (None, "rope_freqs.weight", {"type": "rope_freqs", "original_context": 1024}),
        (None, "rope_factors_long.weight", {"type": "longrope", "original_context": 1024, "context": 9000}),
    ],
)
def test_of_a_gguf_file(tmp_path: Path, kind: str | None, tensor: str | None, expected: dict[str, Any]) -> None:
    import numpy as np
    from gguf import GGUFWriter, RopeScalingType

    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(4096)
    if expected:
        writer.add_rope_scaling_orig_ctx_len(1024)
    if kind is not None:
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
    writer.add_tensor(tensor or "token_embd.weight", np.zeros((2, 2), np.float32))
    finish_gguf(writer)
    assert gguf.read_model(tmp_path / "model.gguf").rope(9000) == expected
