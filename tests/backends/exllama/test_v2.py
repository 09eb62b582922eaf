"""The engine ExLlamaV2 on a stand-in of its API."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from compare_q.backends.base import Layer
from compare_q.backends.common.errors import ModelError
from compare_q.backends.exllama.v2 import ExLlamaV2Engine
from tests.support.exllamav2_stub import Attention, ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config
from tests.support.toy import TOY_VOCAB, planned, toy_windows


@pytest.fixture
def attn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The stand-in in place of exllamav2, and a GPU for it; its module ``attn``, without flash-attn."""
    module, attn = types.ModuleType("exllamav2"), types.ModuleType("exllamav2.attn")
    for each in (ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config):
        setattr(module, each.__name__, each)
    module.attn = attn
    attn.has_flash_attn, attn.has_xformers = False, True
    monkeypatch.setitem(sys.modules, "exllamav2", module)
    monkeypatch.setitem(sys.modules, "exllamav2.attn", attn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return attn


def loaded(folder: Path, tokens: int = 100, **options: Any) -> ExLlamaV2Engine:
    engine = ExLlamaV2Engine(planned("toy", "exllamav2", str(folder), tokens, options))
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


@pytest.mark.parametrize(
    ("options", "how"),
    [({}, ("autosplit", (1, 100, True), 1 << 30)), ({"gpu_split": [10, 20]}, ("load", [10, 20]))],
)
def test_windows_go_through_whole(
    attn: types.ModuleType, toy_model: Path, options: dict[str, Any], how: tuple[Any, ...]
) -> None:
    """Without a cache, without SDPA, and without the padding of the head."""
    engine = loaded(toy_model, **options)
    (window,) = toy_windows(1, 10)
    assert torch.equal(engine.logits(window), engine.model.table[window.token_ids.tolist()][:, :TOY_VOCAB])
    assert (engine.model.how, engine.model.config.no_sdpa, engine.dtype) == (how, True, "float16")
    words = 8 * 32 * 32 / (64 * 32)
    assert engine.layers() == (
        Layer("model.layers.*.mlp.up_proj", f"exl2 {words:.1f} bpw", "float16", "gemm_half_q_half", count=2),
        Layer("lm_head", "float16", "float16", "torch.matmul"),
    )
    engine.close()
    assert ExLlamaV2.last.unloaded
