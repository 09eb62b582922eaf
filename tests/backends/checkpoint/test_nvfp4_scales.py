"""Global scales of NVFP4 checkpoints: which fused layers vLLM would score with a wrong scale."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compare_q.backends.checkpoint import nvfp4_scales
from tests.support.checkpoints import Entries, write_checkpoint
from tests.support.toy import refusal

NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
W4A16 = {"weights": NVFP4, "input_activations": None}
W4A4 = {"weights": NVFP4, "input_activations": NVFP4}
ATTENTION = "model.layers.0.self_attn"


def write(folder: Path, layers: dict[str, dict[str, float]], *groups: dict[str, Any]) -> Path:
    """A checkpoint of one-byte weights with these scalars beside them, by default weight-only."""
    entries: Entries = {}
    for path, scalars in layers.items():
        entries[f"{path}.{'weight' if 'weight_scale_2' in scalars else 'weight_packed'}"] = ("U8", 1, 1)
        entries |= {f"{path}.{name}": ("F32", 1) for name in scalars}
    values = {f"{path}.{name}": struct.pack("<f", value) for path, own in layers.items() for name, value in own.items()}
    config = {"config_groups": {f"group_{i}": group for i, group in enumerate(groups or (W4A16,))}}
    return write_checkpoint(folder, entries, {"quantization_config": config}, values)


def attention(q: float, k: float, v: float, name: str = "weight_global_scale") -> dict[str, dict[str, float]]:
    return {f"{ATTENTION}.{leaf}_proj": {name: scale} for leaf, scale in zip("qkv", (q, k, v), strict=True)}


def check(folder: Path) -> None:
    nvfp4_scales.check_scales(folder, nvfp4_scales.nvfp4_layers(folder))


def test_unequal_scales_are_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", attention(3584.0, 2912.0, 3100.5))
    assert refusal(check, folder) == (
        f"model_dir: {ATTENTION}: q_proj, k_proj and v_proj have unequal weight_global_scale (3,584, 2,912, 3,100.5), "
        "and vLLM fuses them into one matrix with one scale; quantize with a shared scale"
    )


def test_modelopts_scale_and_the_number_of_others(tmp_path: Path) -> None:
    up = {f"model.layers.{i}.mlp.{leaf}": {"weight_scale_2": 1.5e-4} for i in range(3) for leaf in ("w1", "w3")}
    up["model.layers.1.mlp.w3"] = up["model.layers.2.mlp.w1"] = {"weight_scale_2": 2e-4}
    said = refusal(check, write(tmp_path / "x", up))
    assert "model.layers.1.mlp: w1 and w3 have unequal weight_scale_2 (0.00015, 0.0002) (and 1 more like it), " in said


def test_shared_scales_pass(tmp_path: Path) -> None:
    """Other layers, and other experts, have scales of their own; a scale of activations may differ."""
    layers = attention(100.0, 100.0, 100.0) | {f"{ATTENTION}.o_proj": {"weight_global_scale": 7.0}}
    for expert, scale in enumerate((5.0, 6.0)):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            layers[f"mlp.experts.{expert}.{leaf}"] = {"weight_global_scale": scale}
    for number, parts in enumerate(layers.values()):
        parts["input_global_scale"] = float(number)
    folder = write(tmp_path / "x", layers, W4A4)
    assert nvfp4_scales.nvfp4_layers(folder).keys() == layers.keys()
    check(folder)


def test_experts_are_compared_one_by_one(tmp_path: Path) -> None:
    experts = {f"mlp.experts.{i}.{leaf}_proj": {"weight_global_scale": 5.0} for i in (3, 4) for leaf in ("gate", "up")}
    experts["mlp.experts.4.up_proj"] = {"weight_global_scale": 6.0}
    assert "model_dir: mlp.experts.4: gate_proj and up_proj have unequal" in refusal(
        check, write(tmp_path / "x", experts)
    )


def test_stacked_experts_have_a_scale_each(tmp_path: Path) -> None:
    experts = {}
    for leaf, scales in (("gate_proj", (1.0, 2.0)), ("up_proj", (3.0, 4.0))):
        experts[f"mlp.experts.{leaf}.weight_packed"] = torch.zeros(1, 1, dtype=torch.uint8)
        experts[f"mlp.experts.{leaf}.weight_global_scale"] = torch.tensor(scales)
    folder = write(tmp_path / "x", {})
    save_file(experts, folder / "model.safetensors")
    check(folder)


def test_rounding_is_no_difference(tmp_path: Path) -> None:
    check(write(tmp_path / "x", attention(3584.0, 3584.0, 3584.01)))
    assert refusal(check, write(tmp_path / "y", attention(3584.0, 3584.0, 3584.1)))


def test_activations_without_a_scale_are_refused(tmp_path: Path) -> None:
    """vLLM would quantize them by whatever lies in the memory."""
    layers = attention(1.0, 1.0, 1.0)
    layers[f"{ATTENTION}.q_proj"]["input_global_scale"] = 2.0
    said = refusal(check, write(tmp_path / "x", layers, W4A4))
    assert (
        f"model_dir: {ATTENTION}.k_proj: no input_global_scale for its NVFP4 activations (and 1 more like it)" in said
    )
    mxfp4 = {"weights": {**NVFP4, "strategy": "group", "group_size": 32}, "input_activations": None}
    assert refusal(check, write(tmp_path / "beside mxfp4", layers, W4A4, mxfp4)) == said
    check(write(tmp_path / "weight-only", layers, W4A16))
    check(write(tmp_path / "mixed", layers, W4A4, W4A16))
    check(write(tmp_path / "beside int8", layers, W4A16, {"weights": {"num_bits": 8}, "input_activations": NVFP4}))


def test_other_checkpoints_are_not_read(toy_model: Path, tmp_path: Path) -> None:
    assert nvfp4_scales.nvfp4_layers(toy_model) == {}
    folder = write(tmp_path / "x", {})
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"no header")
    assert nvfp4_scales.nvfp4_layers(folder) == {}
    (folder / "hf_quant_config.json").write_text("{}")
    assert "not a readable safetensors file" in refusal(nvfp4_scales.nvfp4_layers, folder)
