"""Which modules can be exchanged: their sizes, and what a quantizer must not have changed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compare_q.backends.base import QuantizedModule, Trial
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.hf import folded_scales
from tests.support import toy_mixtures
from tests.support.toy import save_llama, toy_windows
from tests.support.transformers_models import changed, loaded

pytestmark = pytest.mark.engine

Tensors = dict[str, torch.Tensor]
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEAD = "lm_head"


def tensors_of(folder: Path) -> Tensors:
    """Return the tensors of a toy in float32."""
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.float() for name, tensor in tensors.items()}


def requantized(source: Path, folder: Path, tensors: Tensors) -> Path:
    """Quantize a copy of a model with these weights to W4A16, in groups of 32."""
    from demo.quantize import quantize

    in_bf16 = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    copy = changed(source, folder / "copy", {}, **in_bf16)
    quantize(copy, "W4A16", folder / "quantized", group_size=32)
    return folder / "quantized"


def factors(count: int) -> torch.Tensor:
    """Return factors from 0.5 to 2, uniform in their logarithm."""
    generator = torch.Generator().manual_seed(0)
    return torch.exp((2 * torch.rand(count, generator=generator) - 1) * math.log(2))


def test_modules_have_their_stored_sizes(quantized: Callable[[str], Path], toy_model: Path) -> None:
    modules = loaded(quantized("W4A16")).exchangeable(loaded(toy_model))
    names = [module.name for module in modules]
    expected = []
    for layer in range(2):
        expected += [f"layers.{layer}.self_attn.{kind}" for kind in KINDS[:4]]
        expected += [f"layers.{layer}.mlp.{kind}" for kind in KINDS[4:]]
    assert names == expected
    # [128, 64] weights of 4 bits, one bf16 scale per 32 of them; 16 bits in the reference.
    up = QuantizedModule(
        "layers.1.mlp.up_proj", 1, 8192, "int4 g32", 8192 * 4 + 8192 / 32 * 16, 8192 * 16.0
    )
    assert modules[names.index(up.name)] == up


def with_quantized_head(source: Path, folder: Path) -> Path:
    """Write a copy of the W4A16 toy whose head is quantized too."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    parts, _ = toy_mixtures.integers(tensors.pop("lm_head.weight"), 4)
    for part, tensor in parts.items():
        tensors[f"lm_head.{part}"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_head_is_exchanged_alone(
    quantized: Callable[[str], Path], toy_model: Path, tmp_path: Path
) -> None:
    reference = loaded(toy_model)
    without = loaded(quantized("W4A16"))
    engine = loaded(with_quantized_head(quantized("W4A16"), tmp_path / "head"))
    module = engine.exchangeable(reference)[-1]
    assert (module.name, module.layer, module.n_weights) == (HEAD, None, 320 * 64)
    windows = toy_windows(1, 40)
    scores = list(engine.trials(reference, windows, [Trial(()), Trial((HEAD,))]))
    (expected,) = without.trials(reference, windows, [Trial(())])
    assert scores[1].kld == pytest.approx(expected.kld, rel=1e-6)
    assert scores[0].kld > 1.01 * expected.kld


def test_the_experts_of_a_layer_are_one_module(tmp_path: Path) -> None:
    source = toy_mixtures.save_mixture(tmp_path / "mixture")
    kind = "pack-quantized"
    quantization = toy_mixtures.compressed(kind, toy_mixtures.group(["Linear"], 4))
    folder, _ = toy_mixtures.save_quantized(
        source,
        tmp_path / kind,
        lambda _: lambda weight: toy_mixtures.integers(weight, 4),
        quantization,
    )
    engine = loaded(folder)
    reference = loaded(source)
    modules = engine.exchangeable(reference)
    assert [module.name for module in modules] == ["layers.0.mlp.experts", "layers.1.mlp.experts"]
    # Four experts with three matrices of 64 x 64.
    n_weights = 4 * 3 * 64 * 64
    assert modules[0].n_weights == n_weights
    # 4 bits, and 16 for each group of 32.
    assert modules[0].bits == n_weights * 4.5
    assert modules[0].reference_bits == n_weights * 16
    names = tuple(module.name for module in modules)
    windows = toy_windows(1, 40)
    whole, restored = engine.trials(reference, windows, [Trial(()), Trial(names)])
    assert whole.kld > 0.1
    assert restored.kld == 0.0


def test_the_same_weights_are_left_out(quantized: Callable[[str], Path]) -> None:
    engine = loaded(quantized("W4A16"))
    assert engine.exchangeable(loaded(quantized("W4A16"))) == ()


def test_the_same_weights_with_other_activations_are_exchanged(
    quantized: Callable[[str], Path], toy_model: Path, tmp_path: Path
) -> None:
    """The reference has the weights of the W8A8 checkpoint, and does not round activations."""
    engine = loaded(quantized("W8A8"), dtype="bfloat16")
    weights = {}
    for name, parameter in engine.model.named_parameters():
        if name.endswith("proj.weight"):
            weights[name] = parameter.detach()
    reference = loaded(changed(toy_model, tmp_path / "same", {}, **weights), dtype="bfloat16")
    modules = engine.exchangeable(reference)
    assert len(modules) == len(weights) == 14
    up = engine.model.model.layers[0].mlp.up_proj
    assert torch.equal(up.weight, reference.model.model.layers[0].mlp.up_proj.weight)


def with_folded_norms(tensors: Tensors) -> None:
    """Move scales of channels into a norm, as AWQ does, in one layer."""
    scales = factors(64)
    tensors["model.layers.1.input_layernorm.weight"] *= scales
    for kind in KINDS[:3]:
        tensors[f"model.layers.1.self_attn.{kind}.weight"] /= scales


def with_folded_up(tensors: Tensors) -> None:
    """Move scales of channels from up into down, in one layer."""
    scales = factors(128)
    tensors["model.layers.0.mlp.up_proj.weight"] *= scales[:, None]
    tensors["model.layers.0.mlp.down_proj.weight"] /= scales


def with_folded_values(tensors: Tensors) -> None:
    """Multiply all values by 3, and divide what reads them, in one layer."""
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 3
    tensors["model.layers.0.self_attn.o_proj.weight"] /= 3


def with_rotated_values(tensors: Tensors) -> None:
    """Rotate the values of each head of 32 channels, and what reads them, in one layer."""
    generator = torch.Generator().manual_seed(0)
    rotation, _ = torch.linalg.qr(torch.randn(32, 32, generator=generator))
    of_both_heads = torch.block_diag(rotation, rotation)
    values = "model.layers.0.self_attn.v_proj.weight"
    output = "model.layers.0.self_attn.o_proj.weight"
    tensors[values] = of_both_heads @ tensors[values]
    tensors[output] = tensors[output] @ of_both_heads.T


@pytest.mark.parametrize(
    "fold", [with_folded_norms, with_folded_up, with_folded_values, with_rotated_values]
)
def test_folded_scales_leave_only_whole_layers(
    toy_model: Path, tmp_path: Path, fold: Callable[[Tensors], None]
) -> None:
    tensors = tensors_of(toy_model)
    fold(tensors)
    engine = loaded(requantized(toy_model, tmp_path, tensors), dtype="float32")
    reference = loaded(toy_model, dtype="float32")
    # Four matrices of 64 x 64 and three of 64 x 128.
    n_weights = 4 * 4096 + 3 * 8192
    expected = []
    for layer in range(2):
        size = (n_weights, "int4 g32", n_weights * 4.5, n_weights * 16.0)
        expected.append(QuantizedModule(f"layers.{layer}", layer, *size))
    assert engine.exchangeable(reference) == tuple(expected)
    windows = toy_windows(1, 40)
    trials = [Trial(()), Trial(("layers.0", "layers.1"))]
    whole, restored = engine.trials(reference, windows, trials)
    assert whole.kld > 1.0
    assert restored.kld == 0.0


def test_a_rotated_model_cannot_be_exchanged(toy_model: Path, tmp_path: Path) -> None:
    """The norms of the toy are 1, so that a rotation changes nothing in exact arithmetic."""
    generator = torch.Generator().manual_seed(0)
    rotation, _ = torch.linalg.qr(torch.randn(64, 64, generator=generator))
    tensors = tensors_of(toy_model)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = rotation.T @ tensor
        elif tensor.ndim == 2:
            tensors[name] = tensor @ rotation
    engine = loaded(requantized(toy_model, tmp_path, tensors))
    with pytest.raises(ModelError, match="embed_tokens"):
        engine.exchangeable(loaded(toy_model))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"dtype": "float32"}, "engine.dtype"),
        ({"noise": "bf16"}, "engine.noise"),
        ({"streaming": True}, "engine.streaming"),
        ({"attn_implementation": "eager"}, "engine.attn_implementation"),
    ],
)
def test_options_that_do_not_fit(
    quantized: Callable[[str], Path], toy_model: Path, options: dict[str, Any], part: str
) -> None:
    engine = loaded(quantized("W4A16"))
    reference = loaded(toy_model, **options)
    with pytest.raises(InputError, match=part) as caught:
        engine.exchangeable(reference)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=part):
        next(engine.trials(reference, toy_windows(1, 20), [Trial(())]))
    reference.close()


def test_models_that_do_not_fit(
    quantized: Callable[[str], Path], toy_model: Path, tmp_path: Path
) -> None:
    engine = loaded(quantized("W4A16"))
    wider = loaded(save_llama(tmp_path / "wider", intermediate_size=192))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.gate_proj"):
        engine.exchangeable(wider)
    deeper = loaded(save_llama(tmp_path / "deeper", num_hidden_layers=3))
    with pytest.raises(ModelError, match=r"layers\.2\."):
        engine.exchangeable(deeper)
    with pytest.raises(ModelError, match="Qwen3"):
        engine.exchangeable(loaded(save_llama(tmp_path / "qwen", "Qwen3", head_dim=32)))
    with pytest.raises(ModelError, match="quantized"):
        loaded(toy_model).exchangeable(loaded(toy_model))
    with pytest.raises(InputError, match=r"layers\.7"):
        next(engine.trials(loaded(toy_model), toy_windows(1, 20), [Trial(("layers.7",))]))


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    """Return a linear layer with this weight."""
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data = weight
    return module


def test_factors_of_short_channels_are_uncertain() -> None:
    """The factor of a row of 16 independent errors, 0.7 of its size, often is above 1.15."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 16, generator=generator)
    rounded = weight + 0.7 * torch.randn(512, 16, generator=generator)
    factors_of_rows = (rounded * weight).sum(1) / weight.square().sum(1)
    assert (factors_of_rows > 1.15).float().mean() > 0.15
    assert folded_scales.factor_up_to_rounding(linear(rounded), linear(weight)) is not None


def test_two_bits_are_not_taken_for_folded_scales() -> None:
    """Some channels are all zeros in 2 bits, and some keep only their largest weights."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    # Channels of different sizes.
    weight *= factors(128) ** 3
    _, rounded = toy_mixtures.integers(weight, 2)
    assert (rounded == 0).all(0).any()
    assert folded_scales.factor_up_to_rounding(linear(rounded), linear(weight)) is not None
    scaled = rounded * factors(64)[:, None]
    assert folded_scales.factor_up_to_rounding(linear(scaled), linear(weight)) is None
    scaled = rounded * factors(128)
    assert folded_scales.factor_up_to_rounding(linear(scaled), linear(weight)) is None


def test_levels_without_zero_are_not_taken_for_folded_scales() -> None:
    """Channels of small weights get up to twice their size, but lose their direction."""
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    weight *= factors(128) ** 2
    step = weight.abs().amax(1, keepdim=True) / 1.5
    rounded = ((weight / step - 0.5).round().clamp(-2, 1) + 0.5) * step
    factors_of_columns = (rounded * weight).sum(0) / weight.square().sum(0)
    assert (factors_of_columns > 1.3).float().mean() > 0.15
    assert folded_scales.factor_up_to_rounding(linear(rounded), linear(weight)) is not None


def test_a_layer_whose_scales_are_wrong_has_modules_to_exchange(
    toy_model: Path, tmp_path: Path
) -> None:
    tensors = tensors_of(toy_model)
    for name, tensor in tensors.items():
        if name.startswith("model.layers.1.") and name.endswith("proj.weight"):
            tensors[name] = 2 * tensor
    engine = loaded(requantized(toy_model, tmp_path, tensors), dtype="float32")
    modules = engine.exchangeable(loaded(toy_model, dtype="float32"))
    assert len(modules) == 14
