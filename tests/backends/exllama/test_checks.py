"""What both ExLlama engines refuse before anything loads, and their logits where they are installed on a GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compare_q.backends.base import Decode
from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.common.packages import installed_versions
from compare_q.backends.exllama.family import ExLlamaEngine
from compare_q.backends.exllama.v2 import ExLlamaV2Engine
from compare_q.backends.exllama.v3 import ExLlamaV3Engine
from compare_q.backends.hf.engine import TransformersEngine
from tests.support.toy import TOY_VOCAB, planned, refusal, save_llama, toy_windows

ENGINE_CLASSES: dict[str, type[ExLlamaEngine]] = {"exllamav2": ExLlamaV2Engine, "exllamav3": ExLlamaV3Engine}


def check(engine: str, folder: Path) -> None:
    ENGINE_CLASSES[engine].check(planned("toy", engine, str(folder), 100))


def with_config(folder: Path, toy_model: Path, **changes: Any) -> Path:
    """A folder with the toy model's config, changed; ``...`` leaves a key out."""
    config = {**CheckpointConfig.read(toy_model).raw, "rope_theta": 10_000.0, **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


@pytest.mark.parametrize(
    ("engine", "read", "not_read"),
    [
        ("exllamav2", "exl2", ["awq", "gptq", "fp8", "exl3"]),
        ("exllamav3", "exl3", ["modelopt", "awq", "compressed-tensors", "exl2", "fp8"]),
    ],
)
def test_formats_that_the_engine_gets_wrong(
    engine: str, read: str, not_read: list[str], toy_model: Path, tmp_path: Path
) -> None:
    for method in not_read:
        folder = with_config(tmp_path, toy_model, rope_parameters=..., quantization_config={"quant_method": method})
        assert f"{engine} does not read {method} models" in refusal(check, engine, folder)
    check(engine, with_config(tmp_path, toy_model, rope_parameters=..., quantization_config={"quant_method": read}))
    folder = with_config(tmp_path, toy_model, rope_parameters=...)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert "does not read modelopt models" in refusal(check, engine, folder)


def test_rope_as_transformers_5_writes_it(toy_model: Path, tmp_path: Path) -> None:
    """exllamav2 would take its defaults: a theta of 10,000 for a model of 500,000, and no scaling."""
    llama3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0}
    for changes in (
        {"rope_theta": ..., "rope_parameters": llama3},
        {"rope_theta": 500_000.0, "rope_parameters": llama3},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    ):
        folder = with_config(tmp_path, toy_model, **changes)
        assert "exllamav2 does not read its rope_parameters" in refusal(check, "exllamav2", folder)
    for changes in (
        {"rope_parameters": ..., "rope_scaling": llama3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        {"rope_parameters": llama3, "rope_scaling": llama3},
    ):
        check("exllamav2", with_config(tmp_path, toy_model, **changes))


@pytest.mark.parametrize("engine", ENGINE_CLASSES)
def test_files_that_the_engine_would_load_as_well(engine: str, toy_model: Path, tmp_path: Path) -> None:
    """It takes every safetensors file of the folder: neither the size nor the key of scores would know of this one."""
    folder = tmp_path / "toy"
    shutil.copytree(toy_model, folder)
    with_config(folder, toy_model, rope_parameters=...)
    other = folder / "down_proj-4.0bpw.safetensors"
    shutil.copy(folder / "model.safetensors", other)
    assert f"{other}: {engine} would load it as well" in refusal(check, engine, folder)
    other.rename(folder / "consolidated.safetensors")
    check(engine, folder)


def on_a_gpu(engine: str) -> pytest.MarkDecorator:
    """Skips where there is no GPU or the engine is not installed."""
    runs = torch.cuda.is_available() and installed_versions((engine,))
    return pytest.mark.skipif(not runs, reason=f"no CUDA GPU or {engine} not installed")


@pytest.fixture(scope="module")
def fitting_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose projections are multiples of 128, as exllamav3 wants them; its head of 320 is padded to 384."""
    keys = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "max_position_embeddings": 512}
    return save_llama(tmp_path_factory.mktemp("toy") / "llama-256", **keys, initializer_range=0.1)


ATOL_LOGIT = 0.1
"""Against Transformers in float32, with logits up to 7.6: its own float16 is off by up to 0.025, on a CPU."""


@pytest.mark.engine
@pytest.mark.parametrize("engine", [pytest.param(name, marks=on_a_gpu(name)) for name in ("exllamav2", "exllamav3")])
def test_logits_of_the_real_engine(engine: str, fitting_toy: Path) -> None:
    peer = TransformersEngine(planned("toy", "transformers", str(fitting_toy), 300, {"dtype": "float32"}))
    backend = ENGINE_CLASSES[engine](planned("toy", engine, str(fitting_toy), 300))
    peer.load()
    backend.load()
    for length in (20, 300):  # fewer rows than 32 take other kernels
        (window,) = toy_windows(1, length)
        logits, expected = backend.logits(window), peer.logits(window)
        assert tuple(logits.shape) == (length, TOY_VOCAB)
        torch.testing.assert_close(logits.float(), expected.to(logits.device), atol=ATOL_LOGIT, rtol=0.0)
    assert sum(each.count for each in backend.layers()) == 2 * 7 + 1
    assert backend.provenance()["attention"]
    peer.close()
    backend.close()


@pytest.mark.engine
@on_a_gpu("exllamav3")
def test_decode_gives_the_logits_of_prefill(fitting_toy: Path) -> None:
    """To the rounding of float16; the third window begins with a cache that the first ones left behind."""
    prefill = planned("toy", "exllamav3", str(fitting_toy), 200)
    whole = ExLlamaV3Engine(prefill)
    whole.load()
    for decode in (Decode(), Decode(4), Decode(1, 2)):
        backend = ExLlamaV3Engine(prefill.updated(decode=decode))
        backend.load()
        windows = toy_windows(3, 61)
        backend.prepare(windows)
        for window in windows:
            logits, expected = backend.logits(window), whole.logits(window)
            torch.testing.assert_close(logits.float(), expected.float(), atol=ATOL_LOGIT, rtol=0.0)
        backend.close()
    whole.close()
