"""The ``engine`` object of vllm_score: what is refused, and what it becomes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from backends.base import LoadRequest
from backends.checkpoint.config import CheckpointConfig, KVShape
from backends.common.errors import InputError
from backends.vllm import install
from backends.vllm.backend import VllmFolder, VllmScoreBackend
from backends.vllm.options import (
    ONLINE,
    check_checkpoint,
    engine_arguments,
    kv_cache_bytes,
    quantized_on_load,
    stored_on_load,
    without_kernel,
)
from tests.support import ROOT
from tests.support.checkpoints import ENDS, write_checkpoint
from tests.support.toy import refusal
from tests.support.vllm_engine import ARGUMENTS, request_for

pytestmark = pytest.mark.usefixtures("stand_in_vllm")


OURS = {"max_model_len": 101, "load_format": "safetensors", "trust_remote_code": False, "enforce_eager": True}


def arguments(folder: Path, *, cpu: bool = False, **options: Any) -> dict[str, Any]:
    request = LoadRequest("x", "vllm_score", str(folder), 100, options)
    return engine_arguments(request, CheckpointConfig.read(folder).raw, cpu=cpu)


def test_defaults_and_options(toy_model: Path) -> None:
    """The toy's KV cache: 2 layers x 2 heads x 16 x 2 (k, v) x 2 bytes a token, so 256 MiB, the least, suffice."""
    sized = {"kv_cache_memory_bytes": 256 << 20}
    assert arguments(toy_model, cpu=True) == OURS | sized
    assert arguments(toy_model) == OURS | sized | {"gpu_memory_utilization": 0.01}
    given = {"kv_cache_dtype": "fp8", "load_format": "dummy", "enforce_eager": False}
    assert arguments(toy_model, cpu=True, **given) == OURS | given | sized
    assert arguments(toy_model, noise="bf16", noise_seed=1, cpu=True) == OURS | sized


@pytest.mark.parametrize(
    "given",
    [
        {"gpu_memory_utilization": 0.5},
        {"kv_cache_memory_bytes": 1 << 30},
        {"num_gpu_blocks_override": 100},
        {"long_prefill_token_threshold": 1},
    ],
)
def test_a_cache_that_the_spec_sizes(toy_model: Path, given: dict[str, Any]) -> None:
    """Or that has to hold more windows than two steps of prefill do: vLLM measures what is free."""
    assert arguments(toy_model, **given) == OURS | given


@pytest.mark.parametrize("other", ["kv_lora_rank", "mamba_d_state", "state_size"])
def test_a_cache_of_another_kind_is_left_to_vllm(toy_model: Path, tmp_path: Path, other: str) -> None:
    config = json.loads((toy_model / "config.json").read_text()) | {other: 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert arguments(tmp_path) == OURS
    assert arguments(tmp_path, cpu=True)["kv_cache_memory_bytes"] == 4 << 30


def test_kv_cache_bytes_by_hand() -> None:
    """Llama 3.1 8B: 32 layers x 8 heads x 128 x 2 (k, v) x 2 bytes = 131,072 bytes a token."""
    assert kv_cache_bytes(KVShape(32, 8, 128), 10_000) == 1_310_720_000
    assert kv_cache_bytes(None, 10_000) == 4 << 30


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
        ({"hf_config_path": "x"}, "engine.hf_config_path: set by compare_q"),
        ({"load_format": "pt"}, "engine.load_format: pt loads pickled weights"),
        ({"logprobs_mode": "raw_logits"}, "engine.logprobs_mode: 'raw_logits' would return logits"),
        ({"kv_sharing_fast_prefill": True}, "engine.kv_sharing_fast_prefill: vLLM then computes no final states"),
        ({"speculative_config": {"method": "mtp"}}, "engine.speculative_config: drafted tokens share the states"),
        ({"spec_method": "ngram"}, "engine.spec_method: drafted tokens share the states"),
    ],
)
def test_bad_options(toy_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VllmScoreBackend.check(request_for(toy_model, **options))


def test_states_that_vllm_would_leave_out(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that only newer versions have is set to false where it is there; options that are off pass."""
    monkeypatch.setattr(install, "arguments", lambda: ARGUMENTS | {"swa_bounded_replay"})
    assert arguments(toy_model)["swa_bounded_replay"] is False
    said = refusal(VllmScoreBackend.check, request_for(toy_model, swa_bounded_replay=True))
    assert said == (
        "engine.swa_bounded_replay: vLLM then leaves out states of prompt tokens; compare_q sets it to false; leave it "
        "out"
    )
    off = {"swa_bounded_replay": False, "kv_sharing_fast_prefill": False, "speculative_config": None}
    VllmScoreBackend.check(request_for(toy_model, **off))


def test_longrope_needs_to_know_how_it_is_served(toy_model: Path, tmp_path: Path) -> None:
    """vLLM picks the short or long factors by max_model_len, so following the windows would choose for the user."""
    long = tmp_path / "long"
    shutil.copytree(toy_model, long)
    config = json.loads((long / "config.json").read_text())
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": [1], "long_factor": [2]}
    nested = ({"llm_config": {"rope_scaling": rope}}, {"thinker_config": {"text_config": {"rope_parameters": rope}}})
    for keys in ({"rope_scaling": rope}, {"rope_scaling": {**rope, "rope_type": "su"}}, *nested):
        (long / "config.json").write_text(json.dumps(config | keys))
        with pytest.raises(InputError, match=r"engine\.max_model_len: missing; this model's longrope"):
            VllmScoreBackend.check(request_for(long))
        VllmScoreBackend.check(request_for(long, max_model_len=128))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_overrides_that_bring_longrope_need_it_as_well(toy_model: Path, key: str) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": [1], "long_factor": [2]}
    for overrides in ({key: rope}, {"text_config": {key: rope}}, {key: {"full_attention": rope}}):
        request = request_for(toy_model, hf_overrides=overrides)
        assert "this model's longrope factors" in refusal(check_checkpoint, request, toy_model)
        check_checkpoint(request_for(toy_model, hf_overrides=overrides, max_model_len=128), toy_model)
    check_checkpoint(request_for(toy_model, hf_overrides={"rope_theta": 1e5}), toy_model)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"model_type": "llama4"}, {}, "engine.max_model_len: missing; this model's attention depends on it"),
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
    shutil.copy(folder / "model-1.safetensors", folder / "consolidated.safetensors")
    assert message in refusal(check_checkpoint, request_for(folder, **options), folder)


def test_quantized_while_loading_has_no_stored_size(toy_model: Path) -> None:
    storage = VllmFolder(request_for(toy_model, quantization="fp8")).storage()
    assert (storage.bpw_layer, storage.vram_bits) == (None, None)
    assert storage.note == (
        "quantized while loading to fp8 tensor (quantization); what that takes, the checkpoint does not say"
    )
    assert VllmFolder(request_for(toy_model)).storage().bpw_layer == 16.0


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "mxfp8"}, "mxfp8 g32"),
        ({"quantization": "fp8_per_block"}, "fp8 block 128x128"),
        ({"quantization": "nvfp4_per_token"}, "nvfp4 g16 in the experts"),
        ({"quantization": "online", "quantization_config": {"linear": "fp8_per_channel", "moe": {"weight": "mxfp4"}}},
         "fp8 channel and mxfp4 g32 in the experts"),
        ({"quantization": "fp8_per_tensor", "quantization_config": {"moe": "mxfp8"}},
         "fp8 tensor and mxfp8 g32 in the experts"),
        ({"quantization": "humming"}, ""),
        ({"load_format": "bitsandbytes"}, ""),
    ],
)  # fmt: skip
def test_what_vllm_stores_of_what_it_quantizes_while_loading(options: dict[str, Any], words: str) -> None:
    assert stored_on_load(options) == words


def test_page_of_the_formats_has_every_online_scheme() -> None:
    page = (ROOT / "docs" / "formats.md").read_text("utf-8")
    section = page[page.index("## Quantized while loading") :].split("\n\n")[1]
    assert set(re.findall(r"`(\w+)`", section)) == ONLINE.keys()


@pytest.mark.parametrize(
    ("where", "options"), [("quantization", {"quantization": "bitsandbytes"}), ("load_format", {"load_format": "gguf"})]
)
def test_missing_plugins_are_named(tmp_path: Path, toy_model: Path, where: str, options: dict[str, Any]) -> None:
    form = next(iter(options.values()))
    message = rf"engine\.{where}: vLLM reads {form} by a plugin since .*: pip install vllm-\w+-plugin"
    with pytest.raises(InputError, match=message):
        VllmScoreBackend.check(request_for(toy_model, **options))
    folder = write_checkpoint(tmp_path, ENDS, {"quantization_config": {"quant_method": form}})
    with pytest.raises(InputError, match=rf"model_dir: vLLM reads {form} by a plugin"):
        VllmScoreBackend.check(request_for(folder))


def test_files_and_options_that_vllm_takes_otherwise(toy_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(toy_model, folder)
    said = refusal(VllmScoreBackend.check, request_for(folder, quantization_config={"linear": {"weight": "fp8"}}))
    assert said == "engine.quantization_config: vLLM ignores it without engine.quantization; give both"
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    assert "other.safetensors: vLLM would load it as well" in refusal(VllmScoreBackend.check, request_for(folder))


def test_memory_of_a_loaded_model(toy_model: Path) -> None:
    """Its files, and for each rank 256 MiB of KV cache and 3 GiB; not known where it takes a share of the GPU."""
    size = sum(file.stat().st_size for file in toy_model.glob("*.safetensors"))
    assert VllmScoreBackend(request_for(toy_model)).device_bytes() == size + (256 << 20) + (3 << 30)
    two = VllmScoreBackend(request_for(toy_model, tensor_parallel_size=2))
    assert two.device_bytes() == size + 2 * ((256 << 20) + (3 << 30))
    assert VllmScoreBackend(request_for(toy_model, gpu_memory_utilization=0.5)).device_bytes() is None


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHT_ONLY = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128}


def grouped(weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """A quantization config of compressed-tensors with one group."""
    groups = {"g": {"weights": weights, "input_activations": activations, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("config", "tensor", "kinds", "reason"),
    [
        ({"quantization_config": BLOCKS}, "a.weight_scale_inv", ("AVX2", "AVX-512"), "FP8 blocks on a CPU without AMX"),
        ({"kv_lora_rank": 16}, "a.weight", ("AVX2",), "latent attention (MLA) for CPUs without AVX-512"),
        ({"quantization_config": grouped({**WEIGHT_ONLY, "num_bits": 4})}, "experts.0.up.weight_scale",
         ("AVX2", "AVX-512"), "INT4 experts on a CPU without AMX"),
        ({"quantization_config": grouped({**WEIGHT_ONLY, "num_bits": 4})}, "experts.0.up.weight", (), ""),
        ({"quantization_config": grouped(WEIGHT_ONLY)}, "a.weight_scale", ("AVX2", "AVX-512", "AMX"),
         "weight-only INT8 layers on a CPU"),
        ({"quantization_config": grouped(WEIGHT_ONLY, WEIGHT_ONLY)}, "a.weight_scale", (), ""),
    ],
)  # fmt: skip
def test_what_a_cpu_cannot_run_is_said_before_it_loads(
    config: dict[str, Any], tensor: str, kinds: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", {tensor: ("F32", 1, 1)}, config)
    found = {kind: without_kernel(folder, kind) for kind in ("AVX2", "AVX-512", "AMX", "")}
    everywhere = {""} if "AMX" in kinds else set()
    assert {kind for kind, words in found.items() if words} == set(kinds) | everywhere
    assert all(words.startswith("vLLM has no ") and reason in words for words in found.values() if words)
    assert "CPUs without AVX2" in without_kernel(folder, "SSE")
