"""What both ExLlama engines refuse before anything loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.base import Engine
from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.exllama.v2 import ExLlamaV2Engine
from compare_q.backends.exllama.v3 import ExLlamaV3Engine
from tests.support.planned import planned
from tests.support.toy import refusal

ENGINE_CLASSES: dict[str, type[Engine]] = {"exllamav2": ExLlamaV2Engine, "exllamav3": ExLlamaV3Engine}


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
