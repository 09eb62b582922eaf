"""NVFP4 W4A4 on a CPU, in vLLM's own emulation, compared with the format's definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.support.toy import ATOL_LOGPROB, GPU, brute_force, toy_windows
from tests.support.vllm_engine import engine, scores_of

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EVEN_FIRST = np.array([*E2M1[::2], *E2M1[1::2]])
"""E2M1 values; those that win ties, whose last bit is 0, come first."""


def unpacked(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Unpack weights uint8 [out, in / 2], low four bits (sign, E2M1) first: float64 [out, in]."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    values = torch.tensor(E2M1, dtype=torch.float64)[codes & 7] * (1 - 2 * (codes >> 3))
    groups = values.unflatten(1, (-1, 16)) * scale.double()[:, :, None] / global_scale.double()
    return groups.flatten(1)


def rounded(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Return activations [n, in], rounded to NVFP4.

    Groups of 16 have FP8 scales under the global one; then the nearest E2M1 is taken.
    """
    groups = x.double().unflatten(-1, (-1, 16))
    # 6 is the largest E2M1 value, 448 the largest FP8 (E4M3) value.
    scale = groups.abs().amax(-1, keepdim=True) / 6 * global_scale
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn).double() / global_scale
    ratios = torch.where(scale > 0, groups / scale, 0).numpy()
    nearest = EVEN_FIRST[np.abs(np.abs(ratios)[..., None] - EVEN_FIRST).argmin(-1)]
    return (torch.from_numpy(nearest * np.sign(ratios)) * scale).flatten(-2).to(x.dtype)


pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(GPU, reason="on a GPU vLLM chooses another kernel"),
]
WINDOWS = toy_windows(3, 100)


def reference(toy_model: Path, quantized: Path) -> list[list[float]]:
    """Log-probabilities of WINDOWS by the toy model in float32.

    It has the checkpoint's dequantized weights, and rounds activations if the checkpoint has scales
    for them.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
    with safe_open(quantized / "model.safetensors", "pt") as file:
        for name, layer in model.named_modules():
            if f"{name}.weight_packed" not in file.keys():  # noqa: SIM118
                continue
            parts = (
                file.get_tensor(f"{name}.{part}")
                for part in ("weight_packed", "weight_scale", "weight_global_scale")
            )
            layer.weight.data = unpacked(*parts).float()
            if f"{name}.input_global_scale" in file.keys():  # noqa: SIM118
                scale = float(file.get_tensor(f"{name}.input_global_scale"))
                layer.register_forward_pre_hook(
                    lambda _, given, scale=scale: (rounded(given[0], scale),)
                )
    with torch.inference_mode():
        logits = [
            model(torch.from_numpy(window.token_ids).long()[None]).logits[0] for window in WINDOWS
        ]
    logprobs = []
    for window, logits_of_window in zip(WINDOWS, logits, strict=True):
        logprobs.append(brute_force(logits_of_window, window))
    return logprobs


def test_w4a4_against_the_definition(toy_model: Path, quantized: Any, tmp_path: Path) -> None:
    gold = np.array(reference(toy_model, quantized("NVFP4")))
    without = np.array(reference(toy_model, quantized("NVFP4A16")))
    with engine(quantized("NVFP4"), tmp_path / "log") as backend:
        scores = scores_of(backend, WINDOWS)
        kernels = {group.kernel for group in backend.layers()}
    logprobs = np.array([scores[window.index].logprob for window in WINDOWS])
    np.testing.assert_allclose(logprobs, gold, atol=ATOL_LOGPROB)
    assert np.abs(logprobs - without).mean() > 0.1
    assert kernels == {"EmulationNvFp4LinearKernel", "UnquantizedEmbeddingMethod"}
