"""Dequantized weights in Transformers, compared with the checkpoint's files: others are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import ScoreRequest
from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf.verify import check_weights
from tests.support.toy import brute_force, save_llama, toy_windows
from tests.support.toy_mixtures import (
    Quantizer,
    compressed,
    fp8_blocks,
    group,
    integers,
    nvfp4,
    save_mixture,
    save_quantized,
)
from tests.support.transformers_models import loaded

pytestmark = pytest.mark.engine

FAMILIES = ("Qwen3Moe", "Mixtral")
# Mixtral's name of the matrix is w2.
DOWN = r"(down_proj|w2)$"
INT4 = partial(integers, bits=4)
INT8 = partial(integers, bits=8)
WORDS = "pack-quantized"
SYMMETRIC = compressed(WORDS, group(["Linear"], 4))
ASYMMETRIC = compressed(WORDS, group(["Linear"], 4, symmetric=False))
EIGHT_BIT_DOWN = compressed(WORDS, group(["Linear"], 4), group([f"re:.*{DOWN}"], 8))
EIGHT_BIT_LAYER = compressed(
    WORDS, group(["Linear"], 4), group([r"re:.*layers\.0\..*(proj|w\d)$"], 8)
)
NVFP4 = compressed("nvfp4-pack-quantized", group(["Linear"], 4, "float", strategy="tensor_group"))
DEEPSEEK = {
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head", "self_attn", "gate"],
}


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One toy mixture of each family, in bf16."""
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: save_mixture(folder / family, family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("quantizer", "config"), [(INT4, SYMMETRIC), (fp8_blocks, DEEPSEEK)], ids=["int4", "fp8"]
)
def test_experts_that_are_dequantized_right_score_as_what_they_store(
    mixtures: dict[str, Path],
    tmp_path: Path,
    family: str,
    quantizer: Quantizer,
    config: dict[str, Any],
) -> None:
    """Compare with the mixture that has the dequantized weights, also in bfloat16."""
    folder, exact = save_quantized(
        mixtures[family], tmp_path / "quantized", lambda _: quantizer, config
    )
    (window,) = toy_windows(1, 100)
    (scores,) = loaded(folder, dtype="bfloat16").score([window], ScoreRequest())
    expected = brute_force(loaded(exact, dtype="bfloat16").logits(window), window)
    unquantized = brute_force(loaded(mixtures[family], dtype="bfloat16").logits(window), window)
    np.testing.assert_allclose(scores.logprob, expected, atol=1e-3)
    # Equal scores would prove nothing if quantization did not change them.
    assert np.median(np.abs(np.subtract(unquantized, expected))) > 0.01


def eight_bits_for_down(name: str) -> Quantizer:
    if "down_proj" in name or "w2" in name:
        return INT8
    return INT4


def eight_bits_for_layer_0(name: str) -> Quantizer:
    if "layers.0." in name:
        return INT8
    return INT4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("quantizer_of", "config", "cause"),
    [
        (lambda _: nvfp4, NVFP4, "weight_global_scale was probably left out"),
        (eight_bits_for_down, EIGHT_BIT_DOWN, "another group"),
        (eight_bits_for_layer_0, EIGHT_BIT_LAYER, "another group"),
        (
            lambda _: partial(INT4, symmetric=False),
            ASYMMETRIC,
            "Asymmetric quant requires zero-point values",
        ),
    ],
    ids=["NVFP4", "int8 down", "int8 layer", "asymmetric"],
)
def test_experts_that_are_dequantized_wrong_are_refused(
    mixtures: dict[str, Path],
    tmp_path: Path,
    family: str,
    quantizer_of: Callable[[str], Quantizer],
    config: dict[str, Any],
    cause: str,
) -> None:
    """Transformers 5.19 ignores the global scale, and has one scheme for all experts.

    With zero points it fails.  A later version may do it right; then the experts are those of the
    files.
    """
    folder, _ = save_quantized(mixtures[family], tmp_path / "quantized", quantizer_of, config)
    with pytest.raises(ModelError, match=cause):
        loaded(folder, dtype="bfloat16")


def double(weight: torch.Tensor) -> None:
    weight.mul_(2)


def erase(weight: torch.Tensor) -> None:
    weight.zero_()


def halve_one_scale(weight: torch.Tensor) -> None:
    # The weights that share the last scale: W4A16 has groups of 32.
    weight[-1, -32:] *= 0.5


def lose_a_number(weight: torch.Tensor) -> None:
    weight[0, 0] = torch.nan


@pytest.mark.parametrize("damage", [double, erase, halve_one_scale, lose_a_number])
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.o_proj", "model.layers.0.mlp.down_proj"]
)
def test_a_layer_with_other_weights_is_named(
    quantized: Callable[[str], Path], name: str, damage: Callable[[torch.Tensor], Any]
) -> None:
    engine = loaded(quantized("W4A16"), dtype="float32")
    checkpoint = Checkpoint(quantized("W4A16"))
    check_weights(checkpoint, engine.model)
    with torch.inference_mode():
        damage(engine.model.get_submodule(name).weight)
    with pytest.raises(ModelError, match=name):
        check_weights(checkpoint, engine.model)


def transposed_pairs(weight: torch.Tensor) -> torch.Tensor:
    """[experts, 2 * out, in] -> [experts, in, 2 * out], as gpt-oss has them.

    The rows of gate and up are in turn.
    """
    gate, up = weight.chunk(2, dim=1)
    return torch.stack((gate, up), 2).flatten(1, 2).transpose(1, 2)


def test_the_order_of_rows_in_a_stack_is_free(mixtures: dict[str, Path], tmp_path: Path) -> None:
    folder, _ = save_quantized(
        mixtures["Qwen3Moe"], tmp_path / "quantized", lambda _: INT4, SYMMETRIC
    )
    engine = loaded(folder, dtype="bfloat16")
    checkpoint = Checkpoint(folder)
    for layer in engine.model.model.layers:
        experts = layer.mlp.experts
        experts.gate_up_proj = torch.nn.Parameter(transposed_pairs(experts.gate_up_proj.data))
    check_weights(checkpoint, engine.model)
    with torch.inference_mode():
        engine.model.model.layers[1].mlp.experts.gate_up_proj.mul_(2)
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.experts\.0\.(gate|up)_proj.*about 2 times as large"
    ):
        check_weights(checkpoint, engine.model)


def test_a_stored_matrix_that_is_cut_into_several(tmp_path: Path) -> None:
    """HRM stores gate, query, key and value as one matrix, and loads four."""
    from demo.quantize import quantize

    folder = tmp_path / "quantized"
    quantize(save_llama(tmp_path / "toy", "HrmText"), "W4A16", folder, group_size=32)
    engine = loaded(folder, dtype="bfloat16")
    checkpoint = Checkpoint(folder)
    with torch.inference_mode():
        engine.model.model.H_module.layers[1].self_attn.v_proj.weight.mul_(2)
    with pytest.raises(ModelError, match=r"layers\.1\.attn\.gqkv_proj"):
        check_weights(checkpoint, engine.model)
