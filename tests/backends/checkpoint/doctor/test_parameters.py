"""Tensors against the config, where experts are stored one by one and loaded into one tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from backends.checkpoint.doctor.parameters import compared
from benchmarks.toy_moe_files import MoeShape, make

EXPERT = "model.layers.1.mlp.experts.0.down_proj"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """FP8 blocks."""
    return make(tmp_path, MoeShape(layers=2, experts=2, chosen=1), ("fp8-block",))["fp8-block"]


def test_whole_and_without_an_expert(mixture: Path) -> None:
    assert compared(str(mixture)) == {"missing": [], "left_over": [], "shapes": []}
    weights = load_file(mixture / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(EXPERT)}
    assert len(kept) == len(weights) - 2
    save_file(kept, mixture / "model.safetensors", {"format": "pt"})
    assert compared(str(mixture))["missing"] == ["model.layers.1.mlp.experts.down_proj"]


def test_a_config_of_another_size(mixture: Path) -> None:
    config = json.loads((mixture / "config.json").read_text())
    (mixture / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    found = compared(str(mixture))["shapes"]
    assert sorted(name for name, _, _ in found) == ["lm_head", "model.embed_tokens"]


def test_an_architecture_that_transformers_does_not_know(mixture: Path) -> None:
    (mixture / "config.json").write_text(json.dumps({"model_type": "none-such", "architectures": ["NoneSuch"]}))
    assert "none-such" in compared(str(mixture))["unchecked"]
