"""The engine ExLlamaV2 on a stand-in of its API."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from compare_q.backends.base import Decode, PlannedModel
from compare_q.backends.common.errors import ModelError
from compare_q.backends.exllama.v2 import ExLlamaV2Engine
from tests.support.exllamav2_stub import Attention, ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Config
from tests.support.planned import planned
from tests.support.toy import toy_windows


@pytest.fixture
def attn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The stand-in in place of exllamav2, and a GPU for it; its module ``attn``, without flash-attn."""
    module, attn = types.ModuleType("exllamav2"), types.ModuleType("exllamav2.attn")
    for each in (ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Config):
        setattr(module, each.__name__, each)
    module.attn = attn
    attn.has_flash_attn, attn.has_xformers = False, True
    monkeypatch.setitem(sys.modules, "exllamav2", module)
    monkeypatch.setitem(sys.modules, "exllamav2.attn", attn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return attn


def request(folder: Path, tokens: int = 100, **options: Any) -> PlannedModel:
    return planned("toy", "exllamav2", str(folder), tokens, options)


def loaded(folder: Path, tokens: int = 100, **options: Any) -> ExLlamaV2Engine:
    engine = ExLlamaV2Engine(request(folder, tokens, **options))
    engine.load()
    return engine


def test_sliding_window_without_flash_attention(
    attn: types.ModuleType, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "sliding_window", 100)
    loaded(toy_model, 99)
    with pytest.raises(
        ModelError, match="windows of 100 tokens reach its sliding window of 100; that needs flash-attn"
    ):
        loaded(toy_model, 100)
    attn.has_flash_attn = True
    assert loaded(toy_model, 100).provenance()["attention"] == "flash-attn"


@pytest.mark.parametrize("options", [{}, {"gpu_split": [10, 20]}])
def test_decode_feeds_the_cache_in_steps(attn: types.ModuleType, toy_model: Path, options: dict[str, Any]) -> None:
    """Windows of ten tokens in steps of four; the cache that was split by is the one that is used."""
    engine = ExLlamaV2Engine(request(toy_model, **options).updated(decode=Decode(4)))
    engine.load()
    for window in toy_windows(2, 10):
        torch.testing.assert_close(engine.logits(window), loaded(toy_model).logits(window))
    assert ExLlamaV2.last.steps == []
    assert engine.model.steps == 2 * [(4, 0), (4, 4), (2, 8)]
    assert engine.cache.told == (1, 100, not options)
    assert engine.provenance()["kv_cache"] == "float16"
    engine.close()
    assert engine.cache is None
