"""A checkpoint's config, in each of its forms: lengths, scaled rotary positions, quantization.

And global scales of NVFP4 checkpoints: which fused layers vLLM would score with a wrong scale.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.base import ServingFacts
from compare_q.backends.checkpoint import nvfp4_scales
from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig, rope
from tests.support.checkpoints import ENDS, Entries, write_checkpoint
from tests.support.toy import refusal

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "gold"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        (
            {"max_position_embeddings": 32768, "rope_parameters": {**YARN, "rope_theta": 1e6}},
            131072,
        ),
        # This length includes the factor.
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
            16384,
        ),  # Vicuna 16k
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),  # Gemma 3: includes the factor
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            8192,
        ),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {"full_attention": {"rope_type": "default"}},
            },
            8192,
        ),
        # The text model's own length counts.
        ({"max_position_embeddings": 10, "text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"vocab_size": 5}, None),
    ],
)
def test_context_length(config: dict[str, Any], gold: int | None) -> None:
    assert CheckpointConfig(config).context == gold


PHI = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
# Gemma 3 has positions of two kinds, of which one is scaled.
GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_type": "default"},
}
BY_FOUR = {"type": "yarn", "factor": 4.0, "original_context": 32768}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}),
        ({"rope_scaling": None}, {}),
        ({"rope_scaling": YARN, "max_position_embeddings": 131072}, BY_FOUR),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768},
            BY_FOUR,
        ),
        (
            {"text_config": {"rope_parameters": LLAMA3}},
            {"type": "llama3", "factor": 8.0, "original_context": 8192},
        ),
        (
            {
                "rope_scaling": PHI,
                "original_max_position_embeddings": 4096,
                "max_position_embeddings": 131072,
            },
            # longrope has other factors for longer contexts, so the run's context is stated too.
            {"type": "longrope", "original_context": 4096, "context": 9000},
        ),
        ({"rope_parameters": GEMMA}, {"type": "linear", "factor": 8.0}),
    ],
)
def test_scaled_positions(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert rope(CheckpointConfig(config), 9000) == expected


FP8 = {"quant_method": "fp8"}
GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("config", "gold"),
    [
        ({}, {}),
        ({"quantization_config": None, "text_config": {"quantization_config": []}}, {}),
        ({"quantization_config": FP8}, FP8),
        ({"text_config": {"quantization_config": FP8}}, FP8),
        ({"quantization_config": GPTQ, "text_config": {"quantization_config": FP8}}, FP8),
        ({"quantization_config": GPTQ, "text_config": {"quantization_config": None}}, GPTQ),
    ],
)
def test_quantization_wherever_it_is_nested(config: dict[str, Any], gold: dict[str, Any]) -> None:
    assert CheckpointConfig(config).quantization == gold


@pytest.mark.parametrize(
    "keys",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": -5},
        {"num_attention_heads": 0},
        {"hidden_size": 10**12},
        {"hidden_size": "256"},
        {"hidden_size": [256]},
        {"n_embd": float("nan")},
        # In Python, True is an int.
        {"num_attention_heads": True},
        {"head_dim": -1},
        {"intermediate_size": [1, "2"]},
        {"text_config": {"hidden_size": 0}},
        {"vision_config": {"num_hidden_layers": 10**9}},
    ],
)
def test_sizes_that_no_model_has_are_refused_by_name(tmp_path: Path, keys: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(keys))
    ((key, value),) = keys.items()
    name = key
    if key == "vision_config":
        name = f"{key}.{next(iter(value))}"
    # Its keys count as keys of the model.
    elif key == "text_config":
        name = next(iter(value))
    assert refusal(CheckpointConfig.read, tmp_path).startswith(
        f"{tmp_path / 'config.json'}: {name}: must be"
    )


def test_sizes_that_models_have_pass(tmp_path: Path) -> None:
    keys = {
        # As in Llama 3.1 405B.
        "num_hidden_layers": 126,
        "intermediate_size": [8192, 16384],
        "n_routed_experts": None,
        "n_inner": None,
        "num_key_value_heads": 0,
        "vision_config": {"num_attention_heads": 0, "hidden_size": "large"},
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert CheckpointConfig.read(tmp_path).hidden_layers == 126


def test_quantization_in_a_legacy_file(tmp_path: Path) -> None:
    """ModelOpt's file is read only if config.json does not state a quantization."""
    folder = write_checkpoint(tmp_path, ENDS)
    assert CheckpointConfig.read(folder).quantization == {}
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    algorithm = {"quantization": {"quant_algo": "NVFP4"}}
    assert CheckpointConfig.read(folder).quantization == {"quant_method": "modelopt", **algorithm}
    (folder / "hf_quant_config.json").write_text("[1]")
    assert "hf_quant_config.json: must hold a JSON object" in refusal(CheckpointConfig.read, folder)
    nested = {"text_config": {"quantization_config": FP8}}
    assert CheckpointConfig.read(write_checkpoint(folder, ENDS, nested)).quantization == FP8


@pytest.mark.parametrize(
    ("config", "gold"),
    [
        (
            {
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
            # Keys and values of 32 layers, each with 8 heads of 4,096 / 32 = 128 numbers.
            2 * 32 * 8 * 128,
        ),
        # 64 / 4 = 16 numbers; the default is one head of keys per head of queries.
        ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}, 2 * 2 * 4 * 16),
        (
            {
                "num_hidden_layers": 5,
                "text_config": {
                    "num_hidden_layers": 2,
                    "hidden_size": 64,
                    "num_attention_heads": 4,
                    "head_dim": 32,
                },
            },
            2 * 2 * 4 * 32,
        ),
        ({}, None),
    ],
)
def test_kv_numbers(config: dict[str, Any], gold: int | None) -> None:
    assert CheckpointConfig(config).kv_numbers == gold


SMALL = {
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("more", "gold"),
    [
        # keys and values: two heads of two numbers in three layers; step: 4 x 4 numbers around the
        # MLP, 3 x 8 inside
        ({}, ServingFacts(10, ((24, None),), 3, step_numbers=40)),
        (
            {"sliding_window": 7},
            ServingFacts(10, ((24, None),), 3, kv_is_upper=True, step_numbers=40),
        ),
        (
            {"sliding_window": 7, "use_sliding_window": False},
            ServingFacts(10, ((24, None),), 3, step_numbers=40),
        ),
        (
            # Two layers keep 2 * 8 numbers per token of the last 7, and one keeps 8 of every token.
            {"sliding_window": 7, "layer_types": SLIDING},
            ServingFacts(10, ((16, 7), (8, None)), 3, step_numbers=40),
        ),
        (
            # Convolutions have no keys and values.
            {"layer_types": ["conv", "conv", "full_attention"]},
            ServingFacts(10, ((8, None),), 1, step_numbers=40),
        ),
        # five experts of six numbers, and a shared one of six
        (
            {"num_experts_per_tok": 5, "moe_intermediate_size": 6, "n_shared_experts": 1},
            ServingFacts(10, ((24, None),), 3, step_numbers=4 * 4 + 3 * 36),
        ),
        ({"kv_lora_rank": 4, "intermediate_size": None}, ServingFacts(10)),
        ({"global_head_dim": 4}, ServingFacts(10, step_numbers=40)),
    ],
)
def test_sizes_that_serving_needs(more: dict[str, Any], gold: ServingFacts) -> None:
    assert CheckpointConfig(SMALL | more).serving == gold


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
W4A16 = {"weights": NVFP4, "input_activations": None}
W4A4 = {"weights": NVFP4, "input_activations": NVFP4}
ATTENTION = "model.layers.0.self_attn"


def check(folder: Path, layers: dict[str, dict[str, float]], *groups: dict[str, Any]) -> None:
    """Check a checkpoint of one-byte weights with these scalars, by default weight-only."""
    entries: Entries = {}
    values = {}
    for path, scalars in layers.items():
        weight = "weight" if "weight_scale_2" in scalars else "weight_packed"
        entries[f"{path}.{weight}"] = ("U8", 1, 1)
        for name, value in scalars.items():
            entries[f"{path}.{name}"] = ("F32", 1)
            values[f"{path}.{name}"] = struct.pack("<f", value)
    config = {"config_groups": {f"group_{i}": group for i, group in enumerate(groups or (W4A16,))}}
    write_checkpoint(folder, entries, {"quantization_config": config}, values)
    nvfp4 = nvfp4_scales.nvfp4_layers(folder)
    assert nvfp4.keys() == layers.keys()
    nvfp4_scales.check_scales(folder, nvfp4)


def attention(
    q: float, k: float, v: float, name: str = "weight_global_scale"
) -> dict[str, dict[str, float]]:
    return {
        f"{ATTENTION}.{leaf}_proj": {name: scale}
        for leaf, scale in zip("qkv", (q, k, v), strict=True)
    }


def test_unequal_scales_are_refused_by_name(tmp_path: Path) -> None:
    """The projections of each expert are compared separately."""
    assert refusal(check, tmp_path / "x", attention(3584.0, 2912.0, 3100.5)) == (
        f"model_dir: {ATTENTION}: q_proj, k_proj and v_proj have unequal weight_global_scale "
        "(3,584, 2,912, 3,100.5), and vLLM fuses them into one matrix with one scale; "
        "quantize with a shared scale"
    )
    experts = {}
    for i in (3, 4):
        experts[f"mlp.experts.{i}.gate_proj"] = {"weight_scale_2": 5.0}
        experts[f"mlp.experts.{i}.up_proj"] = {"weight_scale_2": 5.0}
    experts["mlp.experts.4.up_proj"] = {"weight_scale_2": 6.0}
    assert "model_dir: mlp.experts.4: gate_proj and up_proj have unequal" in refusal(
        check, tmp_path / "y", experts
    )


def test_shared_scales_pass(tmp_path: Path) -> None:
    """Layers and experts may have different scales, and the scales of activations may differ."""
    layers = attention(100.0, 100.0, 100.0) | {f"{ATTENTION}.o_proj": {"weight_global_scale": 7.0}}
    for expert, scale in enumerate((5.0, 6.0)):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            layers[f"mlp.experts.{expert}.{leaf}"] = {"weight_global_scale": scale}
    for number, parts in enumerate(layers.values()):
        parts["input_global_scale"] = float(number)
    check(tmp_path / "x", layers, W4A4)


def test_activations_without_a_scale_are_refused(tmp_path: Path) -> None:
    """vLLM would quantize the activations with uninitialized memory as the scale."""
    layers = attention(1.0, 1.0, 1.0)
    layers[f"{ATTENTION}.q_proj"]["input_global_scale"] = 2.0
    # A weight-only group of another format, which cannot be the group of these layers.
    mxfp4 = {"weights": {**NVFP4, "strategy": "group", "group_size": 32}, "input_activations": None}
    for number, groups in enumerate([(W4A4,), (W4A4, mxfp4)]):
        message = refusal(check, tmp_path / str(number), layers, *groups)
        lacking = f"{ATTENTION}.k_proj: no input_global_scale for its NVFP4 activations"
        assert f"{lacking} (and 1 more like it)" in message
    check(tmp_path / "weight-only", layers, W4A16)
    # These layers may be of the weight-only group.
    check(tmp_path / "mixed", layers, W4A4, W4A16)
    check(
        tmp_path / "beside int8",
        layers,
        W4A16,
        {"weights": {"num_bits": 8}, "input_activations": NVFP4},
    )
