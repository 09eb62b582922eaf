"""What a checkpoint's config says, wherever it says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.checkpoint.config import CheckpointConfig
from tests.support.checkpoints import ENDS, write_checkpoint
from tests.support.toy import refusal

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "gold"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": {**YARN, "rope_theta": 1e6}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),  # the factor is in it already
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),  # Vicuna 16k
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),  # Gemma 3: the factor is in it already
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 8192),
        ({"max_position_embeddings": 8192, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, 8192),
        ({"max_position_embeddings": 10, "text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"vocab_size": 5}, None),
    ],
)  # fmt: skip
def test_context_length(config: dict[str, Any], gold: int | None) -> None:
    assert CheckpointConfig(config).context == gold


@pytest.mark.parametrize(
    ("config", "gold"),
    [
        ({"vocab_size": 32000}, 32000),
        ({"vocab_size": 5, "text_config": {"vocab_size": 256000}}, 256000),
        ({"vocab_size": 5, "llm_config": {"vocab_size": 256000}}, 256000),
        ({"language_config": {"vocab_size": 256000}, "llm_config": None}, 256000),
        ({"thinker_config": {"text_config": {"vocab_size": 256000}}}, 256000),
        ({"vocab_size": 5, "thinker_config": [], "llm_config": "x"}, 5),
        ({}, None),
    ],
)
def test_vocabulary(config: dict[str, Any], gold: int | None) -> None:
    assert CheckpointConfig(config).vocab_size == gold


@pytest.mark.parametrize("content", [None, b"{", b"[1]", b"\xff\xfe"])
def test_bad_config(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert refusal(CheckpointConfig.read, tmp_path).startswith(f"{tmp_path / 'config.json'}: ")


FP8, GPTQ = {"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}


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


def test_quantization_in_a_legacy_file(tmp_path: Path) -> None:
    """ModelOpt's file is read where config.json states no quantization, and only there."""
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
        ({"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
         2 * 32 * 8 * 128),
        ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}, 2 * 2 * 4 * 16),
        ({"num_hidden_layers": 5, "text_config": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
                                                  "head_dim": 32}}, 2 * 2 * 4 * 32),
        ({}, None),
    ],
)  # fmt: skip
def test_kv_numbers(config: dict[str, Any], gold: int | None) -> None:
    assert CheckpointConfig(config).kv_numbers == gold


def test_weights_that_the_config_names_are_refused(tmp_path: Path) -> None:
    """Transformers would load them, and other engines the files of the usual names."""
    folder = write_checkpoint(tmp_path, ENDS, {"transformers_weights": "other.safetensors"})
    assert "transformers_weights: other.safetensors: not every engine" in refusal(CheckpointConfig.read, folder)
    usual = {"transformers_weights": "model.safetensors", "text_model_id": None}
    write_checkpoint(tmp_path, ENDS, usual)
    assert CheckpointConfig.read(folder).vocab_size is None
    for key in ("text_model_id", "audio_model_id"):
        write_checkpoint(tmp_path, ENDS, usual | {key: "owner/other"})
        assert f"{key}: owner/other: not every engine" in refusal(CheckpointConfig.read, folder)


@pytest.mark.parametrize(
    ("auto_map", "gold"),
    [
        (None, None),
        ({"AutoModelForCausalLM": "modeling_toy.Toy"}, None),
        ({"AutoConfig": "toy.Config", "AutoModelForCausalLM": "some/other--toy.Toy"}, "some/other--toy.Toy"),
        ({"AutoTokenizer": ["some/other--toy.Slow", None]}, "some/other--toy.Slow"),
    ],
)
def test_code_of_another_repository(auto_map: Any, gold: str | None) -> None:
    assert CheckpointConfig({"auto_map": auto_map}).foreign_code == gold
