"""The ``engine`` object of vllm_score: refused options, and the resulting arguments of vLLM."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.base import Decode, PlannedModel, ScoreRequest
from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError
from compare_q.backends.vllm import installed_vllm
from compare_q.backends.vllm.llm_arguments import check_checkpoint, engine_arguments
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.checkpoints import ENDS, write_checkpoint
from tests.support.toy import planned, refusal
from tests.support.vllm_engine import ARGUMENTS, request_for

pytestmark = pytest.mark.usefixtures("stand_in_vllm")


OURS = {
    # A window of 100 tokens, and the token that vLLM generates after it.
    "max_model_len": 101,
    "load_format": "safetensors",
    "trust_remote_code": False,
    "enforce_eager": True,
}


def arguments(folder: Path, *, cpu: bool = False, **options: Any) -> dict[str, Any]:
    request = planned("x", "vllm_score", str(folder), 100, options)
    return engine_arguments(request, CheckpointConfig.read(folder).raw, cpu=cpu)


def test_defaults_and_options(toy_model: Path) -> None:
    """The minimum of 256 MiB is enough for the toy's KV cache.

    A token takes 2 layers x 2 heads x 16 x 2 (k, v) x 2 bytes.
    """
    sized = {"kv_cache_memory_bytes": 256 << 20}
    assert arguments(toy_model, cpu=True) == OURS | sized
    # With the cache's size given, this share is only what must be free when vLLM starts.
    assert arguments(toy_model) == OURS | sized | {"gpu_memory_utilization": 0.01}
    options = {"kv_cache_dtype": "fp8", "load_format": "dummy", "enforce_eager": False}
    assert arguments(toy_model, cpu=True, **options) == OURS | options | sized
    assert arguments(toy_model, noise="bf16", noise_seed=1, cpu=True) == OURS | sized


def test_windows_that_are_not_split(toy_model: Path) -> None:
    """With TurboQuant, a step holds the longest window: a split one would lose earlier tokens."""
    sized = {"kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.01}
    options = {"kv_cache_dtype": "turboquant_k8v4"}
    # vLLM's own largest step on a GPU; a longer max_model_len extends it.
    unsplit = {"enable_chunked_prefill": False, "max_num_batched_tokens": 16_384}
    assert arguments(toy_model, **options) == OURS | sized | options | unsplit
    assert arguments(toy_model, **options, max_model_len=20_000)["max_num_batched_tokens"] == 20_000
    config = CheckpointConfig.read(toy_model).raw
    assert "enable_chunked_prefill" not in engine_arguments(
        decoding(toy_model, **options), config, cpu=False
    )


# In a spec, null is vLLM's default, which splits windows.
@pytest.mark.parametrize("chunked", [True, None])
@pytest.mark.parametrize("cache", ["turboquant_k8v4", "ultraquant_4bit"])
def test_windows_that_the_spec_has_split(
    toy_model: Path, cache: str, chunked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec that splits windows is refused only if vLLM would forget their first part."""
    monkeypatch.setattr(installed_vllm, "arguments", lambda: ARGUMENTS | {"enable_chunked_prefill"})
    monkeypatch.setattr(installed_vllm, "allowed_values", lambda _: None)
    options = {"kv_cache_dtype": cache, "enable_chunked_prefill": chunked}
    assert refusal(VllmEngine.check, request_for(toy_model, **options)) == (
        f"engine.enable_chunked_prefill: with a cache in {cache} vLLM forgets the first part of a "
        "window that it splits over two steps of prefill; compare_q sets it to false; leave it out"
    )
    for other in ({"kv_cache_dtype": "fp8"}, {"enable_chunked_prefill": False}):
        VllmEngine.check(request_for(toy_model, **options | other))


def decoding(
    folder: Path, step: int = 1, batch: int = 32, tokens: int = 100, **options: Any
) -> PlannedModel:
    return planned("x", "vllm_score", str(folder), tokens, options, decode=Decode(step, batch))


def test_steps_of_decode(toy_model: Path) -> None:
    """On a GPU decode is compiled, as in serving, but noise needs hooks.

    The cache fits all windows.
    """
    config = CheckpointConfig.read(toy_model).raw
    expected = OURS | {
        "long_prefill_token_threshold": 4,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
    }
    for options, cpu, eager in (
        ({}, True, True),
        ({}, False, False),
        ({"noise": "bf16"}, False, True),
    ):
        decode_arguments = engine_arguments(decoding(toy_model, 4, 8, **options), config, cpu=cpu)
        sized: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20}
        if not cpu:
            sized["gpu_memory_utilization"] = 0.01
        assert decode_arguments == expected | sized | {"enforce_eager": eager}
    of_long_windows = engine_arguments(decoding(toy_model, 1, 32, 100_000), config, cpu=False)
    numbers_of_token = 2 * 2 * 2 * 32  # 2 layers, heads, k and v
    # The largest block of a cache has 256 tokens, and may extend beyond the window's end.
    gold = 32 * (100_000 + 1 + 256) * numbers_of_token * 2
    assert of_long_windows["kv_cache_memory_bytes"] == gold


LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
GEMMA_4 = LLAMA_8B | {"num_global_key_value_heads": 4, "global_head_dim": 512}
DEEPSEEK_V2 = LLAMA_8B | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
ROOM = 65_537 + 2 * 8192
"""Tokens of a window of 65,536, the token that vLLM generates, and two steps on a CPU."""


@pytest.mark.parametrize(
    ("config", "options", "gold"),
    [
        (LLAMA_8B, {}, ROOM * 32 * 2 * 8 * 128 * 2),
        (LLAMA_8B, {"dtype": "float32"}, ROOM * 32 * 2 * 8 * 128 * 4),
        (LLAMA_8B, {"dtype": "float", "kv_cache_dtype": "auto"}, ROOM * 32 * 2 * 8 * 128 * 4),
        (LLAMA_8B, {"dtype": "float32", "kv_cache_dtype": "bfloat16"}, ROOM * 32 * 2 * 8 * 128 * 2),
        (LLAMA_8B, {"dtype": "float32", "kv_cache_dtype": "fp8"}, ROOM * 32 * 2 * 8 * 128),
        (LLAMA_8B, {"kv_cache_dtype": "fp8_e5m2"}, ROOM * 32 * 2 * 8 * 128),
        (
            LLAMA_8B,
            {"kv_cache_dtype": "int8_per_token_head"},
            ROOM * 32 * 2 * 8 * 128 * 2,
        ),  # 8 bits and scales
        (
            LLAMA_8B,
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
            ROOM * 32 * 2 * 8 * 128 * 2,
        ),
        # 4 heads of 512 in full attention are more than 8 heads of 128 in the sliding windows.
        (GEMMA_4, {}, ROOM * 32 * 2 * 4 * 512 * 2),
        (DEEPSEEK_V2, {"dtype": "float32"}, ROOM * 32 * (512 + 64) * 4),
        # The latent vector is only a lower bound: 81,921 x 32 x 576 bytes are less than 4 GiB.
        (DEEPSEEK_V2, {"kv_cache_dtype": "fp8"}, 4 << 30),
        ({}, {"dtype": "float32"}, 4 << 30),
    ],
)
def test_bytes_of_long_windows(config: dict[str, Any], options: dict[str, Any], gold: int) -> None:
    """vLLM refuses to start if a window does not fit."""
    request = planned("x", "vllm_score", "x", 65_536, options)
    assert engine_arguments(request, config, cpu=True)["kv_cache_memory_bytes"] == gold


def test_a_decode_batch_in_float32() -> None:
    request = planned("x", "vllm_score", "x", 4096, {"dtype": "float32"}, decode=Decode(1, 32))
    gold = 32 * (4096 + 1 + 256) * (32 * 2 * 8 * 128) * 4
    assert engine_arguments(request, LLAMA_8B, cpu=False)["kv_cache_memory_bytes"] == gold


SET = 'set by compare_q with "phase": "decode";'


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("long_prefill_token_threshold", 1, f'{SET} give "step" beside "phase" in its place'),
        ("max_num_seqs", 8, f'{SET} give "batch" beside "phase" in its place'),
        ("enable_prefix_caching", True, f"{SET} leave it out"),
        # One token fewer than 2 tokens of each of 32 windows.
        ("max_num_batched_tokens", 63, "63 holds no step of 64 tokens (step x batch)"),
    ],
)
def test_options_with_which_steps_would_be_others(
    toy_model: Path, name: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_vllm, "arguments", lambda: ARGUMENTS | {name})
    message = refusal(VllmEngine.check, decoding(toy_model, 2, 32, **{name: value}))
    assert message == f"engine.{name}: {reason}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"enforce_eagre": True},
            "engine.enforce_eagre: the installed vLLM has no such argument .*'enforce_eager'",
        ),
        ({"model": "x"}, "engine.model: set by compare_q"),
        (
            {"max_model_len": 100},
            "engine.max_model_len: 100 is too short for windows of 100 tokens",
        ),
        (
            {"max_num_batched_tokens": None},
            "engine.max_num_batched_tokens: input should be a valid integer",
        ),
        ({"max_model_len": 0}, "engine.max_model_len: input should be greater than 0"),
        ({"noise": "bf17"}, "engine.noise: input should be 'bf16'"),
        (
            {"noise": "bf16", "enforce_eager": False},
            "engine.enforce_eager: engine.noise needs it true",
        ),
        (
            {"noise_sed": 1},
            "engine.noise_sed: the installed vLLM has no such argument .*'noise_seed'",
        ),
        ({"hf_config_path": "x"}, "engine.hf_config_path: set by compare_q"),
        (
            {"kv_cache_dtype": "fp8_e4m4"},
            "engine.kv_cache_dtype: the installed vLLM has no 'fp8_e4m4' .*'fp8_e4m3'",
        ),
        (
            {"kv_cache_dtype": "8"},
            "engine.kv_cache_dtype: the installed vLLM has no '8'; it has auto, bfloat16, fp8, ",
        ),
        (
            {"attention_backend": "flash"},
            "engine.attention_backend: the installed vLLM has no 'flash' .*'FLASH_ATTN'",
        ),
        ({"load_format": "pt"}, "engine.load_format: pt loads pickled weights"),
        (
            {"logprobs_mode": "raw_logits"},
            "engine.logprobs_mode: input should be 'raw_logprobs' or 'pro",
        ),
        (
            {"kv_sharing_fast_prefill": True},
            "engine.kv_sharing_fast_prefill: vLLM then computes no final states",
        ),
        (
            {"speculative_config": {"method": "mtp"}},
            "engine.speculative_config: drafted tokens share the states",
        ),
        ({"spec_method": "ngram"}, "engine.spec_method: drafted tokens share the states"),
    ],
)
def test_bad_options(toy_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VllmEngine.check(request_for(toy_model, **options))


def test_states_that_vllm_would_leave_out(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option of newer versions is set to false; options that are off are accepted."""
    monkeypatch.setattr(installed_vllm, "arguments", lambda: ARGUMENTS | {"swa_bounded_replay"})
    assert arguments(toy_model)["swa_bounded_replay"] is False
    message = refusal(VllmEngine.check, request_for(toy_model, swa_bounded_replay=True))
    assert message.startswith(
        "engine.swa_bounded_replay: vLLM then leaves out states of prompt tokens; compare_q sets it"
    )
    off = {
        "swa_bounded_replay": False,
        "kv_sharing_fast_prefill": False,
        "speculative_config": None,
    }
    VllmEngine.check(request_for(toy_model, **off))


ROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 128,
    "short_factor": [1],
    "long_factor": [2],
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": ROPE},
        {"rope_scaling": {**ROPE, "rope_type": "su"}},
        {"text_config": {"rope_parameters": ROPE}},
        {"rope_parameters": {"full_attention": ROPE}},
    ],
)
def test_longrope_needs_to_know_how_it_is_served(
    toy_model: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """vLLM chooses the short or long factors by max_model_len.

    compare_q must not set it by the windows.
    """
    long = tmp_path / "long"
    shutil.copytree(toy_model, long)
    (long / "config.json").write_text(
        json.dumps(json.loads((long / "config.json").read_text()) | keys)
    )
    for folder, options in ((long, {}), (toy_model, {"hf_overrides": keys})):
        message = refusal(check_checkpoint, request_for(folder, **options), folder)
        assert message.startswith(
            "engine.max_model_len: missing; this model's longrope factors depend on it"
        )
        check_checkpoint(request_for(folder, **options, max_model_len=128), folder)
    check_checkpoint(request_for(toy_model, hf_overrides={"rope_theta": 1e5}), toy_model)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            {"model_type": "llama4"},
            {},
            "engine.max_model_len: missing; this model's attention depends on it",
        ),
        ({"speculators_config": {}}, {}, "drafts tokens for another model"),
        ({}, {"load_format": "mistral"}, "engine.load_format: may load "),
    ],
)
def test_folders_of_which_vllm_makes_something_else(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    folder = write_checkpoint(tmp_path, ENDS, config)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(ENDS, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    # With load_format "mistral", vLLM may load this file instead of those of the index.
    shutil.copy(folder / "model-1.safetensors", folder / "consolidated.safetensors")
    assert message in refusal(check_checkpoint, request_for(folder, **options), folder)


def test_unequal_scales_end_the_run_before_it_starts(tmp_path: Path) -> None:
    names = ("mlp.gate_proj", "mlp.up_proj")
    entries = {f"{name}.weight_packed": ("U8", 1, 1) for name in names}
    entries |= {f"{name}.weight_global_scale": ("F32", 1) for name in names}
    values = {
        "mlp.gate_proj.weight_global_scale": struct.pack("<f", 1),
        # vLLM would take the larger of the two for both, and only warn.
        "mlp.up_proj.weight_global_scale": struct.pack("<f", 2),
    }
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    folder = write_checkpoint(tmp_path / "x", entries, config, values)
    message = refusal(VllmEngine.check, request_for(folder))
    assert (
        "model_dir: mlp: gate_proj and up_proj have unequal weight_global_scale (1, 2)" in message
    )


def config_of(weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """A quantization config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT32 = {"dtype": "float32"}


@pytest.mark.parametrize(
    ("quantization", "options", "avx512", "kernel"),
    [
        ({}, {}, False, ""),
        (config_of(NVFP4, None), {}, True, "NVFP4 W4A16 on CPUs"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
            {},
            True,
            "NVFP4 W4A16 on CPUs",
        ),
        (config_of(NVFP4, NVFP4), FLOAT32, False, ""),
        (config_of(INT8, INT8), FLOAT32, False, ""),
        (config_of(INT4, INT8), FLOAT32, False, ""),
        (config_of(INT4, None), {}, True, ""),
        (config_of(INT4, None), {}, False, "W4A16 on CPUs without AVX-512"),
        (config_of(INT4, None), FLOAT32, True, "W4A16 in float32 on CPUs"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            FLOAT32,
            True,
            "W4A16 in float32 on CPUs",
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, FLOAT32, True, ""),
    ],
)
def test_formats_without_a_kernel_on_a_cpu(
    quantization: dict[str, Any],
    options: dict[str, Any],
    avx512: bool,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(machine, "has_avx512", lambda: avx512)
    monkeypatch.setattr(installed_vllm, "computes_on_cpu", lambda: True)
    assert VllmEngine.missing_kernel(quantization, options) == kernel
    folder = write_checkpoint(
        tmp_path, {"a.weight": ("BF16", 1)}, {"quantization_config": quantization}
    )
    request = request_for(folder).updated(options=options)
    if kernel:
        message = (
            f"model_dir: {folder}: vLLM has no kernel for {kernel}; use "
            '"load_fn": "transformers_auto_bf16"'
        )
        assert refusal(check_checkpoint, request, folder) == message
    else:
        check_checkpoint(request, folder)
    monkeypatch.setattr(installed_vllm, "computes_on_cpu", lambda: False)
    assert VllmEngine.missing_kernel(quantization, options) == ""
    check_checkpoint(request, folder)


def test_nvfp4_experts_need_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.3.down_proj"
    parts = {
        "weight_packed": ("U8", 1, 1),
        "weight_global_scale": ("F32", 1),
        "input_global_scale": ("F32", 1),
    }
    entries = {f"{name}.{part}": entry for part, entry in parts.items()}
    folder = write_checkpoint(tmp_path, entries, {"quantization_config": config_of(NVFP4, NVFP4)})
    monkeypatch.setattr(installed_vllm, "computes_on_cpu", lambda: True)
    message = refusal(check_checkpoint, request_for(folder), folder)
    assert (
        message
        == f"model_dir: {name}: vLLM has no kernel for NVFP4 experts on CPUs; score it on a GPU"
    )
    monkeypatch.setattr(installed_vllm, "computes_on_cpu", lambda: False)
    check_checkpoint(request_for(folder), folder)


# vLLM raises this in the driver, and logs the reason in the engine's process.
DEAD = RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")


@pytest.mark.parametrize(
    ("error", "gold"),
    [
        (RuntimeError("shape [3] is invalid"), "shape [3] is invalid"),
        (KeyError("norm.weight"), "KeyError: 'norm.weight'"),
        (DEAD, "torch.OutOfMemoryError: full (log: {log})"),
        (AssertionError(), "torch.OutOfMemoryError: full (log: {log})"),
    ],
)
def test_an_error_while_scoring_is_not_one_that_loading_caught(
    toy_model: Path, tmp_path: Path, error: Exception, gold: str
) -> None:
    """The exception explains itself, unless it refers to another process.

    That process has logged its error since.
    """
    log = tmp_path / "log"
    log.write_text("ERROR ImportError: an optional kernel, an hour ago\n")
    backend = VllmEngine(request_for(toy_model).updated(log_file=log))
    with pytest.raises(AttributeError):
        backend.score([], ScoreRequest())  # nothing is loaded
    with log.open("a") as stream:
        stream.write("ERROR torch.OutOfMemoryError: full\n")
    assert backend.reason_of(error) == gold.format(log=log)


def test_text_is_sampled_by_exact_noise(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where this vLLM has the option, and not for scoring."""
    config = CheckpointConfig.read(toy_model).raw
    scorer = request_for(toy_model)
    sampler = scorer.updated(samples=True)
    assert "use_fp64_gumbel" not in engine_arguments(sampler, config, cpu=True)
    monkeypatch.setattr(installed_vllm, "arguments", lambda: ARGUMENTS | {"use_fp64_gumbel"})
    assert "use_fp64_gumbel" not in engine_arguments(scorer, config, cpu=True)
    assert engine_arguments(sampler, config, cpu=True)["use_fp64_gumbel"] is True


def test_what_changes_the_distribution_cannot_sample(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_vllm, "arguments", lambda: ARGUMENTS | {"logits_processors"})
    scorer = request_for(toy_model, logits_processors=["a.b:C"])
    VllmEngine.check(scorer)
    message = refusal(VllmEngine.check, scorer.updated(samples=True))
    assert message.startswith("engine.logits_processors: ")
