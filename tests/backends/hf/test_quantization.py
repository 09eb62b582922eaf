"""Quantized checkpoints in Transformers: scores by their stored numbers, provenance, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compare_q.backends.base import Layer, ScoreRequest
from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf import transformers_layers
from compare_q.backends.hf.transformers_engine import TransformersEngine, check_resident
from tests.support.toy import (
    ATOL_LOGPROB,
    brute_force,
    needs_accelerate,
    planned,
    refusal,
    toy_windows,
)
from tests.support.transformers_models import changed, loaded

pytestmark = pytest.mark.engine


# The highest bit of a nibble is the sign, the other three choose one of eight sizes.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nibbles(packed: np.ndarray, count: int) -> np.ndarray:
    """[rows, n] words of ``count`` nibbles, the lowest first -> [rows, n * count]."""
    bits = (packed[:, :, None].astype(np.int64) >> (4 * np.arange(count))) & 15
    return bits.reshape(len(packed), -1)


def weight_by_hand(tensors: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """Return a module's weight [out, in] in float64, from the stored tensors."""
    parts = {}
    for tensor_name, tensor in tensors.items():
        if tensor_name.startswith(f"{name}."):
            parts[tensor_name.removeprefix(f"{name}.")] = tensor
    scale = parts["weight_scale"].double().numpy()
    if "weight_global_scale" in parts:
        values = E2M1[nibbles(parts["weight_packed"].numpy(), 2)]
        scale = scale / float(parts["weight_global_scale"])
    elif "weight_packed" in parts:
        # compressed-tensors adds 8 to int4, so that the nibbles are 0 to 15.
        values = nibbles(parts["weight_packed"].numpy(), 8) - 8.0
    else:
        values = parts["weight"].double().numpy()
    return values * np.repeat(scale, values.shape[1] // scale.shape[1], axis=1)


def rounded_by_token(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round to symmetric int8 with one scale per token.

    255 steps cover twice the largest absolute value.
    """
    states = inputs[0]
    scale = states.abs().amax(-1, keepdim=True) / 127.5
    return ((states / scale).round().clamp(-128, 127) * scale, *inputs[1:])


@pytest.mark.parametrize(
    ("preset", "dtype", "weights", "activations"),
    [
        ("W4A16", "float32", "int4 g32", "float32"),
        ("W8A8", "float32", "int8 channel", "int8 token"),
        ("NVFP4A16", "bfloat16", "nvfp4 g16", "bfloat16"),
    ],
)
def test_quantized_checkpoints_score_as_what_they_store(
    quantized: Callable[[str], Path],
    toy_model: Path,
    preset: str,
    dtype: str,
    weights: str,
    activations: str,
) -> None:
    """Compare with an unquantized model that has the dequantized weights.

    For W8A8 it rounds activations.  Both use one dtype, because one value that rounds differently
    changes every later token of the toy by 0.05.
    """
    from safetensors.torch import load_file

    tensors = load_file(quantized(preset) / "model.safetensors")
    gold = loaded(toy_model, dtype=dtype)
    plain = loaded(toy_model, dtype=dtype)
    for name, module in gold.model.named_modules():
        if f"{name}.weight_scale" in tensors:
            module.weight.data = torch.from_numpy(weight_by_hand(tensors, name)).to(module.weight)
            if preset == "W8A8":
                module.register_forward_pre_hook(rounded_by_token)
    (window,) = toy_windows(1, 100)
    engine = loaded(quantized(preset), dtype=dtype)
    (scores,) = engine.score([window], ScoreRequest())
    expected = brute_force(gold.logits(window), window)
    unquantized = brute_force(plain.logits(window), window)
    np.testing.assert_allclose(scores.logprob, expected, atol=ATOL_LOGPROB)
    # Equal scores would prove nothing if quantization did not change them.
    assert np.median(np.abs(np.subtract(unquantized, expected))) > 0.05
    groups = engine.layers()
    name = "model.layers.*.self_attn.q_proj"
    assert groups[0] == Layer(name, weights, activations, "torch linear (dequantized)", count=2)
    assert groups[-1] == Layer("lm_head", dtype, dtype, "torch linear")
    # Seven kinds of matrices (q, k, v, o, gate, up, down) and the head.
    assert len(groups) == 8


@needs_accelerate
def test_a_missing_package_is_named_with_its_command(toy_model: Path, tmp_path: Path) -> None:
    folder = changed(toy_model, tmp_path / "x", {"quant_method": "spqr"})
    model = planned("toy", "transformers", str(folder), 10)
    assert refusal(TransformersEngine.check, model).endswith("pip install spqr_quant")


@needs_accelerate
def test_formats_that_only_run_in_bfloat16(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "compare_q.backends.hf.transformers_engine.installed_versions",
        lambda names: dict.fromkeys(names, "1"),
    )
    nvfp4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    folder = changed(toy_model, tmp_path / "nvfp4", nvfp4)
    model = planned("toy", "transformers", str(folder), 10)
    reason = refusal(TransformersEngine.check, model)
    assert "decompresses nvfp4 to bfloat16 and cannot run it in float16" in reason
    TransformersEngine.check(model.updated(options={"dtype": "bfloat16"}))
    TransformersEngine.check(model.updated(load_fn="transformers_auto_bf16"))


@pytest.mark.parametrize(
    ("tensors", "quantized"),
    [
        ({"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}, True),
        # DeepSeek-V4's name of the scales.
        ({"weight": torch.float8_e4m3fn, "scale": torch.float32}, True),
        ({"weight": torch.int8, "steps": torch.float32}, True),
        # Weights that were rounded, and stored as 16-bit floats.
        ({"weight": torch.bfloat16, "weight_scale": torch.float32}, True),
        ({"weight": torch.bfloat16, "bias": torch.bfloat16}, False),
    ],
)
def test_a_module_is_quantized_by_what_is_stored(
    tmp_path: Path, tensors: dict[str, torch.dtype], quantized: bool
) -> None:
    """Otherwise its row would name the format of its floats."""
    module = "model.layers.0.mlp.up_proj"
    stored = {f"{module}.{name}": torch.zeros(4, 4, dtype=dtype) for name, dtype in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    names = {"layers.0.mlp.up_proj"} if quantized else set()
    assert transformers_layers.quantized_modules(Checkpoint(tmp_path)) == names


def test_quantized_layers_on_disk_are_refused(tmp_path: Path) -> None:
    # accelerate leaves a meta tensor in place of a weight on disk.
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    check_resident(tmp_path, model, {})
    with pytest.raises(ModelError, match=r"1\.weight was left on disk"):
        check_resident(tmp_path, model, {"quant_method": "compressed-tensors"})


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("quantization", "tensors", "message"),
    [
        ({"quant_method": "modelopt"}, {}, "does not run quant_method 'modelopt'"),
        ({}, {f"{UP}.weight": None}, f"found no {UP}.weight that fits"),
        ({}, {f"{UP}.weight_scale": torch.ones(1)}, f"left {UP}.weight_scale out"),
    ],
)
def test_models_that_would_score_as_another(
    toy_model: Path,
    tmp_path: Path,
    quantization: dict[str, Any],
    tensors: dict[str, Any],
    message: str,
) -> None:
    """Transformers would load all three models with only a warning."""
    with pytest.raises(ModelError, match=message):
        loaded(changed(toy_model, tmp_path / "model", quantization, **tensors))
