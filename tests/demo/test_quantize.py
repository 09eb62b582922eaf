"""The demo's checkpoints, made from the toy model: sizes, scales, rounding, and their logits in
Transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def quantize() -> Any:
    """``demo.quantize``, which imports compressed_tensors."""
    return pytest.importorskip(
        "demo.quantize", reason="compressed_tensors is not installed", exc_type=ImportError
    )


def global_scales(folder: Path) -> dict[str, float]:
    """Return tensor name -> global scale in a checkpoint."""
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        names = [name for name in tensors.keys() if "global_scale" in name]  # noqa: SIM118
        return {name: tensors.get_tensor(name).item() for name in names}


def test_fused_layers_share_their_global_scales(quantized: Callable[..., Path]) -> None:
    scales = global_scales(quantized("NVFP4"))
    assert len(scales) == 28
    for layer, side in itertools.product((0, 1), ("weight", "input")):
        prefix, name = f"model.layers.{layer}", f"_proj.{side}_global_scale"
        assert len({scales[f"{prefix}.self_attn.{x}{name}"] for x in "qkv"}) == 1
        assert len({scales[f"{prefix}.mlp.{x}{name}"] for x in ("gate", "up")}) == 1


def test_an_unquantized_layer_leaves_the_others_as_they_were(
    quantize: Any, quantized: Callable[..., Path], toy_model: Path, tmp_path: Path
) -> None:
    """v is fused with q and k, and its weights may be the largest."""
    ignored = "model.layers.0.self_attn.v_proj"
    quantize.quantize(toy_model, "NVFP4", tmp_path / "mixed", ignore=[ignored])
    expected = global_scales(quantized("NVFP4"))
    del expected[f"{ignored}.weight_global_scale"], expected[f"{ignored}.input_global_scale"]
    assert global_scales(tmp_path / "mixed") == expected


def test_input_scales_are_those_of_the_largest_activations(
    quantize: Any, quantized: Callable[..., Path], toy_model: Path
) -> None:
    """Compare with the inputs of every layer, recorded in one batch over the end of the text."""
    from transformers import AutoModelForCausalLM

    dtype = quantize.calibration_dtype()
    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=dtype)
    seen: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        layer.register_forward_hook(
            lambda _, given, out, name=name: seen.__setitem__(name, given[0] if given else None)
        )
    windows, length = quantize.CALIBRATION[0], 256  # the toy's context; one byte is one token
    text = quantize.TEXT.read_bytes()[-windows * length :].decode("ascii")
    tokens = AutoTokenizer.from_pretrained(toy_model)(text)["input_ids"]
    with torch.inference_mode():
        model(torch.tensor(tokens).reshape(windows, length))
    scales = {
        name: value for name, value in global_scales(quantized("NVFP4")).items() if "input" in name
    }
    assert len(scales) == 14
    for name, value in scales.items():
        peak = seen[name.removesuffix(".input_global_scale")].abs().max().item()
        # Another batch shape changes bf16 roundings.
        assert value == pytest.approx(448 * 6 / peak, rel=2**-7)


@pytest.mark.parametrize(
    ("preset", "group_size", "error"),
    [
        ("W4A16", 32, 0.75),
        ("W8A16", 32, 0.1),
        ("W8A8", None, 0.15),
        ("FP8_DYNAMIC", None, 0.4),
        ("NVFP4A16", None, 0.75),
        ("NVFP4", None, 0.9),
    ],
)
def test_checkpoints_load_and_resemble_the_original(
    quantized: Callable[..., Path],
    toy_model: Path,
    preset: str,
    group_size: int | None,
    error: float,
) -> None:
    """Relative errors of the logits; the toy's random weights amplify errors (seen: 0.60 0.06 0.08
    0.26 0.58 0.74).

    Unrelated logits would have a relative error of sqrt(2).
    """
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(100).reshape(1, 100)
    with torch.inference_mode():
        original, rounded = (
            AutoModelForCausalLM.from_pretrained(folder)(tokens).logits.float()
            for folder in (toy_model, quantized(preset, group_size))
        )
    assert 0.01 < (rounded - original).norm() / original.norm() < error
