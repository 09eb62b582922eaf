"""The engine ExLlamaV2 on a stand-in of its API."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from compare_q.backends.base import Layer
from compare_q.backends.common.errors import ModelError
from compare_q.backends.exllama.v2 import ExLlamaV2Engine
from tests.support.toy import TOY_VOCAB, planned, toy_windows

PADDED = 352


class ExLlamaV2Config:
    def __init__(self, model_dir: str | None = None) -> None:
        self.model_dir, self.architecture, self.vocab_size = model_dir, "LlamaForCausalLM", TOY_VOCAB
        self.max_seq_len, self.max_input_len, self.max_attention_size = 256, 2048, 2048**2
        self.no_sdpa = self.no_flash_attn = self.no_xformers = False

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        assert quiet
        self.no_xformers = True


class ExLlamaV2Linear:
    def __init__(self, key: str, q_tensors: dict[str, torch.Tensor] | None) -> None:
        self.key, self.q_tensors = key, q_tensors
        self.linear = None if q_tensors else torch.nn.Linear(64, 32, dtype=torch.float16)

    def numel(self) -> int:
        return 64 * 32

    def device(self) -> str:
        return "cuda:0"


class Attention:
    sliding_window = 0

    def device(self) -> str:
        return "cuda:1"


class ExLlamaV2Cache:
    def __init__(self, model: ExLlamaV2, batch_size: int = 1, max_seq_len: int = -1, lazy: bool = False) -> None:
        self.told = (batch_size, max_seq_len, lazy)


class ExLlamaV2:
    last: ClassVar[Any] = None

    def __init__(self, config: ExLlamaV2Config, lazy_load: bool = False) -> None:
        ExLlamaV2.last = self
        self.config, self.how, self.unloaded = config, (), False
        words = {"q_weight": torch.zeros(8, 32, dtype=torch.int32)}
        linears = [ExLlamaV2Linear(f"model.layers.{layer}.mlp.up_proj", words) for layer in range(2)]
        self.modules = [Attention(), Attention(), ExLlamaV2Linear("lm_head", None)]
        self.modules_dict = {module.key: module for module in [*linears, self.modules[-1]]}
        self.table = torch.randn(TOY_VOCAB, PADDED, generator=torch.Generator().manual_seed(0)).half()
        self.table[:, TOY_VOCAB:] = -65504.0

    def load(self, gpu_split: list[float] | None = None, lazy: bool = False) -> None:
        self.how = ("load", gpu_split)

    def load_autosplit(self, cache: ExLlamaV2Cache, reserve_vram: int | list[int] | None = None) -> None:
        torch.set_num_threads(1)  # the import of the real one does
        self.how = ("autosplit", cache.told, reserve_vram)

    def forward(self, input_ids: torch.Tensor, cache: ExLlamaV2Cache | None = None) -> torch.Tensor:
        assert (input_ids.dtype, cache) == (torch.int64, None)
        return self.table[input_ids]

    def unload(self) -> None:
        self.unloaded = True


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
