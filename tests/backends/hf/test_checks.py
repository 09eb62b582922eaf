"""What is refused, and what is known, before Transformers loads anything."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf.engine import TransformersEngine, check_resident
from tests.support.planned import planned
from tests.support.toy import refusal
from tests.support.transformers_models import changed


@pytest.fixture(autouse=True)
def helpers_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate and greenlet can be found, so that the checks come to what they are about on any machine."""
    found = importlib.util.find_spec
    known = {name: ModuleSpec(name, None) for name in ("accelerate", "greenlet")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: known.get(name) or found(name))


def test_formats_that_only_run_in_bfloat16(toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compare_q.backends.hf.engine.installed_versions", lambda names: dict.fromkeys(names, "1"))
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
