"""The ``engine`` object of vllm_score: what is refused, and what it becomes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.base import LoadRequest
from backends.checkpoint.config import CheckpointConfig
from backends.common.errors import InputError
from backends.vllm.backend import VllmScoreBackend
from backends.vllm.options import engine_arguments, kv_cache_bytes, quantized_on_load
from tests.support.toy import refusal
from tests.support.vllm_engine import request_for

pytestmark = pytest.mark.usefixtures("stand_in_vllm")


def test_defaults_and_options(toy_model: Path) -> None:
    config = CheckpointConfig.read(toy_model).raw
    request = LoadRequest("x", "vllm_score", str(toy_model), 100, {"kv_cache_dtype": "fp8", "load_format": "dummy"})
    gpu = engine_arguments(request, config, cpu=False)
    assert gpu == {
        "max_model_len": 101, "load_format": "dummy", "trust_remote_code": False,
        "kv_cache_dtype": "fp8",
    }  # fmt: skip
    assert engine_arguments(request, config, cpu=True)["kv_cache_memory_bytes"] == 256 << 20
    noisy = replace(request, options={**request.options, "noise": "bf16", "noise_seed": 1})
    assert engine_arguments(noisy, config, cpu=False) == {**gpu, "enforce_eager": True}


def test_kv_cache_bytes_by_hand() -> None:
    """Llama 3.1 8B: 32 layers x 8 heads x 128 x 2 (k, v) x 2 bytes = 131,072 bytes a token."""
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    assert kv_cache_bytes(config, 10_000) == 1_310_720_000
    assert kv_cache_bytes({}, 10_000) == 4 << 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enforce_eagre": True}, "engine.enforce_eagre: the installed vLLM has no such argument .*'enforce_eager'"),
        ({"model": "x"}, "engine.model: set by compare_q"),
        ({"max_model_len": 100}, "engine.max_model_len: 100 is too short for windows of 100 tokens"),
        ({"max_num_batched_tokens": None}, "engine.max_num_batched_tokens: must be a positive number"),
        ({"max_model_len": "8k"}, "engine.max_model_len: must be a positive number"),
        ({"noise": "bf17"}, "engine.noise: input should be 'bf16'"),
        ({"noise": "bf16", "enforce_eager": False}, "engine.enforce_eager: engine.noise needs it true"),
        ({"noise_sed": 1}, "engine.noise_sed: the installed vLLM has no such argument .*'noise_seed'"),
        ({"logprobs_mode": "raw_logits"}, "engine.logprobs_mode: 'raw_logits' would return logits"),
    ],
)
def test_bad_options(toy_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VllmScoreBackend.check(request_for(toy_model, **options))


def test_longrope_needs_to_know_how_it_is_served(toy_model: Path, tmp_path: Path) -> None:
    """vLLM picks the short or long factors by max_model_len, so following the windows would choose for the user."""
    long = tmp_path / "long"
    shutil.copytree(toy_model, long)
    config = json.loads((long / "config.json").read_text())
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": [1], "long_factor": [2]}
    (long / "config.json").write_text(json.dumps({**config, "rope_scaling": rope}))
    with pytest.raises(InputError, match=r"engine\.max_model_len: missing; this model's longrope"):
        VllmScoreBackend.check(request_for(long))
    VllmScoreBackend.check(request_for(long, max_model_len=128))


def test_quantized_while_loading_has_no_stored_size(toy_model: Path) -> None:
    storage = VllmScoreBackend(request_for(toy_model, quantization="fp8")).storage()
    assert (storage.bpw_layer, storage.vram_bits) == (None, None)
    assert "while loading" in storage.note
    assert VllmScoreBackend(request_for(toy_model)).storage().bpw_layer == 16.0


@pytest.mark.parametrize(
    ("options", "quantized", "how"),
    [
        ({}, False, ""),
        ({"quantization": "fp8"}, False, "quantization"),
        ({"quantization": "compressed-tensors"}, True, ""),
        ({"quantization": "x", "quantization_config": {"a": 1}}, True, "quantization_config"),
        ({"hf_overrides": {"quantization_config": {}}}, False, "quantization_config"),
        ({"hf_overrides": {"rope_theta": 1}}, False, ""),
        ({"load_format": "bitsandbytes"}, False, "load_format"),
    ],
)
def test_what_quantizes_while_loading(options: dict[str, Any], quantized: bool, how: str) -> None:
    """Then the checkpoint's headers do not say what is stored, and the size is n/a."""
    assert quantized_on_load(options, quantized=quantized) == how


def test_files_and_options_that_vllm_takes_otherwise(toy_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(toy_model, folder)
    said = refusal(VllmScoreBackend.check, request_for(folder, quantization_config={"linear": {"weight": "fp8"}}))
    assert said == "engine.quantization_config: vLLM ignores it without engine.quantization; give both"
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    assert "other.safetensors: vLLM would load it as well" in refusal(VllmScoreBackend.check, request_for(folder))
