"""Tensors against the config, where experts are stored one by one and loaded into one tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.toy_moe_files import MoeShape, make
from compare_q.backends.checkpoint.contents import Checkpoint
from compare_q.backends.checkpoint.doctor.examining import Patient, examine
from compare_q.backends.checkpoint.doctor.parameters import check, compared, new_names
from tests.support.transformers_models import changed

EXPERT = "model.layers.1.mlp.experts.0.down_proj"

NOTHING: dict[str, Any] = {"missing": [], "left_over": [], "biases": [], "shapes": []}


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """FP8 blocks."""
    return make(tmp_path, MoeShape(layers=2, experts=2, chosen=1), ("fp8-block",))["fp8-block"]


def test_whole_and_without_an_expert(mixture: Path) -> None:
    assert compared(str(mixture)) == NOTHING
    weights = load_file(mixture / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(EXPERT)}
    assert len(kept) == len(weights) - 2
    save_file(kept, mixture / "model.safetensors", {"format": "pt"})
    assert compared(str(mixture))["missing"] == ["model.layers.1.mlp.experts.down_proj"]


def test_a_config_of_another_size(mixture: Path) -> None:
    config = json.loads((mixture / "config.json").read_text())
    (mixture / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    compare = compared(str(mixture))
    assert sorted(name for name, *_ in compare["shapes"]) == ["lm_head", "model.embed_tokens"]
    (found,) = check(Checkpoint(mixture), compare)
    size, hidden = config["vocab_size"], config["hidden_size"]
    assert f"has the shape [{size}, {hidden}] (BF16), and the config asks for [{size + 1}, {hidden}] (and 1 " in str(
        found
    )


def test_an_architecture_that_transformers_does_not_know(mixture: Path) -> None:
    (mixture / "config.json").write_text(json.dumps({"model_type": "none-such", "architectures": ["NoneSuch"]}))
    assert "none-such" in compared(str(mixture))["unchecked"]


def sparse(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors' 2:4."""
    rows, columns = weight.shape
    mask = torch.full((rows, columns // 8), 0x55, dtype=torch.uint8)
    return {"compressed": weight[:, ::2].clone(), "bitmask": mask, "shape": torch.tensor([rows, columns])}


def marlin(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """AutoGPTQ's, 4 bits."""
    rows, columns = weight.shape
    return {"B": torch.zeros(columns // 16, rows * 2, dtype=torch.int32), "s": torch.ones(1, rows).half(),
            "workspace": torch.zeros(16, dtype=torch.int32)}  # fmt: skip


def quark(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """AMD Quark's int4."""
    rows, columns = weight.shape
    packed = torch.zeros(columns, rows // 8, dtype=torch.int32)
    return {"weight": packed, "weight_scale": torch.ones(columns // 32, rows)}


def stored_as(toy: Path, folder: Path, store: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> Path:
    """The toy model with every matrix of its layers in another format."""
    parts: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(toy / "model.safetensors").items():
        if name.endswith("proj.weight"):
            module = name.removesuffix(".weight")
            parts |= {name: None} | {f"{module}.{part}": tensor for part, tensor in store(weight).items()}
    return changed(toy, folder, {"quant_method": "none-such"}, **parts)


@pytest.mark.parametrize("store", [sparse, marlin, quark])
def test_packed_weights_are_there(
    store: Callable[[torch.Tensor], dict[str, torch.Tensor]], toy_model: Path, tmp_path: Path
) -> None:
    folder = stored_as(toy_model, tmp_path / "packed", store)
    assert compared(str(folder)) == NOTHING
    layers = [text for title, text in examine(Patient("", folder)).facts if title == "layers"]
    assert len(layers) == 1
    assert layers[0].startswith("14 x ")


def test_biases_that_the_config_does_not_have(toy_model: Path, tmp_path: Path) -> None:
    """AutoGPTQ stores a bias of zeros for every layer, which adds nothing; one of the two here is not zero."""
    q, k = (f"model.layers.1.self_attn.{name}_proj" for name in "qk")
    folder = changed(
        toy_model, tmp_path / "x", {}, **{f"{q}.bias": torch.zeros(64).half(), f"{k}.bias": torch.ones(64).half()}
    )
    found = compared(str(folder))
    assert found == NOTHING | {"biases": [k]}
    (finding,) = check(Checkpoint(folder), found)
    assert str(finding).startswith(f"warning: model.safetensors: {k}: its bias is left over")


def test_a_name_of_the_models_own_is_kept() -> None:
    """Transformers 5.19 saves DeepSeek-V4's last norm as model.norm, which its rules for older files would rename."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(DeepseekV4Config(num_hidden_layers=1, vocab_size=8))
    assert new_names(model, ["model.norm.weight"]) == {"model.norm.weight": "model.norm.weight"}
    assert new_names(model, ["head.weight"]) == {"head.weight": "lm_head.weight"}
