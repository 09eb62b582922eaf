"""Fixtures of the tests of vLLM: two more models, their engines, and logits by Transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from compare_q.backends.base import Window
from compare_q.backends.vllm import installed_vllm
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.stores import recorded
from tests.support.vllm_engine import ARGUMENTS, WINDOWS, WORDS, engine


@pytest.fixture(scope="session")
def noisy_model(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with noise in every matrix, similar to a quantization."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("noisy") / "noisy"
    shutil.copytree(toy_model, folder)
    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.bfloat16)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                # A sixth of the weights' own spread, which is initializer_range = 0.3.
                weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def noisy_engine(noisy_model: Path, logs: Path) -> Iterator[VllmEngine]:
    with engine(noisy_model, logs / "noisy.log") as backend:
        yield backend


@pytest.fixture(scope="session")
def floor_engine(toy_model: Path, logs: Path) -> Iterator[VllmEngine]:
    """The toy in float32 with noise, which is far larger than the order of additions is."""
    with engine(toy_model, logs / "floor.log", noise="bf16", noise_seed=3) as backend:
        yield backend


@pytest.fixture(scope="session")
def toy_logits(toy_model: Path) -> Any:
    """Window -> the toy model's logits [L, V] in float32 by Transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)

    def logits(window: Window) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.from_numpy(window.token_ids).long()[None]).logits[0]

    return logits


@pytest.fixture(scope="session")
def toy_store(toy_engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy as the reference of WINDOWS, recorded by vLLM."""
    return recorded(toy_engine, WINDOWS, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def stand_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version and a few arguments of vLLM, for tests without an installed vLLM."""
    unchecked = replace(VllmEngine.capabilities, packages=())
    monkeypatch.setattr(VllmEngine, "capabilities", unchecked)
    monkeypatch.setattr(installed_vllm, "installed", lambda: ("vllm", Version("0.32.0")))
    monkeypatch.setattr(installed_vllm, "arguments", lambda: ARGUMENTS)
    monkeypatch.setattr(installed_vllm, "allowed_values", WORDS.get)
