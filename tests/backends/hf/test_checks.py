"""What is refused, and what is known, before Transformers loads anything."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.hf.engine import TransformersEngine
from compare_q.backends.hf.quantization import check_resident
from tests.support.planned import planned
from tests.support.toy import refusal
from tests.support.transformers_models import changed


@pytest.fixture(autouse=True)
def helpers_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate and greenlet can be found, so that the checks come to what they are about on any machine."""
    found = importlib.util.find_spec
    known = {name: ModuleSpec(name, None) for name in ("accelerate", "greenlet")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: known.get(name) or found(name))


def checked(folder: Path, **options: Any) -> None:
    TransformersEngine.check(planned("toy", "transformers", str(folder), 100, options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtpe": "auto"}, "did you mean 'dtype'"),
        ({"dtype": "int4"}, "engine.dtype: "),
        ({"noise_seed": 1}, "engine.noise_seed: needs"),
        ({"streaming": True, "device_map": "auto"}, "cannot go with device_map"),
        ({"streaming": True, "max_memory": {0: "1GiB"}}, "cannot go with max_memory"),
        ({"streaming_windows": 2}, 'needs "streaming": true'),
        ({"streaming": True, "streaming_windows": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_options(toy_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked(toy_model, **options)


def test_quantized_models_are_not_streamed(toy_model: Path, tmp_path: Path) -> None:
    quantized = changed(toy_model, tmp_path / "quantized", {"quant_method": "mxfp4"})
    assert "this one is quantized with mxfp4" in refusal(checked, quantized, streaming=True)
    legacy = changed(toy_model, tmp_path / "legacy", {})
    (legacy / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert "this one is quantized with modelopt" in refusal(checked, legacy, streaming=True)


def test_formats_that_only_run_in_bfloat16(toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "compare_q.backends.hf.quantization.installed_versions", lambda names: dict.fromkeys(names, "1")
    )
    nvfp4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    folder = changed(toy_model, tmp_path / "nvfp4", nvfp4)
    request = planned("toy", "transformers", str(folder), 10)
    assert "decompresses nvfp4 to bfloat16 and cannot run it in float16" in refusal(TransformersEngine.check, request)
    TransformersEngine.check(request.updated(options={"dtype": "bfloat16"}))
    TransformersEngine.check(request.updated(load_fn="transformers_auto_bf16"))


@pytest.mark.parametrize("stored", [{"quant_method": "compressed-tensors"}, {}])
def test_quantized_layers_on_disk_are_refused(tmp_path: Path, stored: dict[str, Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    if not stored:
        check_resident(tmp_path, model, stored)
        return
    with pytest.raises(ModelError, match=r"1\.weight was left on disk"):
        check_resident(tmp_path, model, stored)
