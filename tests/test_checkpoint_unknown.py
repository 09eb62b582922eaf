"""What a checkpoint stores in a way that is not known makes its size n/a, with the tensor's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backends import storage
from backends.base import Storage

BASE = {
    "model.embed_tokens.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
    "model.layers.0.mlp.up_proj.weight": torch.zeros(4, 4, dtype=torch.bfloat16),
    "model.norm.weight": torch.zeros(4, dtype=torch.bfloat16),
}


def stored(folder: Path, extra: dict[str, torch.Tensor], **config: object) -> Storage:
    save_file({**BASE, **extra}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return storage.storage_of(folder)


@pytest.mark.parametrize(
    "name",
    [
        "transformer.blocks.0.ffn.experts.mlp.w1",  # DBRX: experts without ".weight"
        "model.layers.0.self_attn.q_proj.trellis",  # EXL3
        "model.layers.0.self_attn.q_proj.bitmask",  # sparse compressed-tensors
        "lm_head.codes",
    ],
)
def test_unknown_matrices(tmp_path: Path, name: str) -> None:
    found = stored(tmp_path, {name: torch.zeros(4, 4, dtype=torch.int16)})
    assert (found.bpw_layer, found.vram_bits) == (None, None)
    assert found.note == f"{name}: stored in a format that compare_q cannot size"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.mlp.experts.gate_up_proj_bias",
        "model.layers.0.mlp.gate.weight",
        "vision_tower.blocks.0.patches",
        "model.layers.0.mixer.A_log",
    ],
)
def test_known_others(tmp_path: Path, name: str) -> None:
    assert stored(tmp_path, {name: torch.zeros(2, 2, dtype=torch.bfloat16)}).bpw_layer == 16.0


def test_odd_configs(tmp_path: Path) -> None:
    """A quantization_config that is no object; a packed shape in int32: 4 x 16 weights of 4 bits, 4 bf16 scales."""
    extra = {
        "model.layers.0.mlp.down_proj.weight_packed": torch.zeros(4, 2, dtype=torch.int32),
        "model.layers.0.mlp.down_proj.weight_scale": torch.zeros(4, 1, dtype=torch.bfloat16),
        "model.layers.0.mlp.down_proj.weight_shape": torch.tensor([4, 16], dtype=torch.int32),
    }
    found = stored(tmp_path, extra, quantization_config="gptq")
    assert found.bpw_layer == (16 * 16 + 64 * 4 + 4 * 16) / (16 + 64)
