"""A stand-in of exllamav2's API: the classes and methods that our engine uses, with random float16 logits."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tests.support.toy import TOY_VOCAB

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
