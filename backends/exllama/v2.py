"""ExLlamaV2 (0.3): EXL2 and unquantized models on NVIDIA GPUs, one window at a time, in prefill.

A window goes through ``ExLlamaV2.forward`` whole and without a KV cache, so that nothing splits it; exllamav2's default
of 2,048 tokens a forward pass follows the windows.

compare_q sets ``no_sdpa``.  Without flash-attn and xformers, 0.3.2 would run torch's SDPA without a mask
(``_attn_torch`` gets None as the mask of a vision tower): every token would see later ones.  The other path is causal,
but wrong beyond a sliding window; longer windows need flash-attn.

Products of more than 32 rows dequantize the weights to float16; they are added up in float16 (``cublasHgemm``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from compare_q.backends.base import Capabilities, Layer, PlannedModel
from compare_q.backends.checkpoint.config import CheckpointConfig, scaling_type
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import dtype_name
from compare_q.backends.exllama.family import OUTPUT_FACTOR, ExLlamaEngine, ExLlamaOptions
from compare_q.backends.layers.groups import group_layers

if TYPE_CHECKING:
    import torch

RESERVE = 1 << 30
"""Minimum bytes that the split leaves free on each GPU, as in ExLlamaV3's compare_q."""


class ExLlamaV2Options(ExLlamaOptions):
    """The ``engine`` object: ``gpu_split`` is GiB of weights on each GPU; without it one is filled after the other."""

    gpu_split: list[float] | None = Field(None, min_length=1)


class ExLlamaV2Engine(ExLlamaEngine):
    """See the module's docstring."""

    capabilities = Capabilities(
        load_fns=("exllamav2",),
        fwd_fn="exllamav2",
        quant_method="exl2",
        own_part="q_invperm",
        packages=("exllamav2",),
        install=(
            "pip install 'exllamav2>=0.3.2,<0.4' (compiles at its first import, with nvcc; compiled wheels: "
            "https://github.com/turboderp-org/exllamav2/releases)"
        ),
        summary="EXL2 and unquantized models, logits on NVIDIA GPUs",
    )
    options_type = ExLlamaV2Options
    methods = ("exl2",)
    settings = "EXLLAMA_"
    attention = ""

    @classmethod
    def check_folder(cls, folder: Path, config: CheckpointConfig, model: PlannedModel) -> None:
        super().check_folder(folder, config, model)
        scaled = scaling_type(config.rope_scaling) and not config.text.get("rope_scaling")
        if config.text.get("rope_parameters") and ("rope_theta" not in config.text or scaled):
            raise InputError(
                f"model_dir: {folder / 'config.json'}: exllamav2 does not read its rope_parameters, which "
                "Transformers 5 writes; write them as rope_theta and rope_scaling"
            )

    def load_folder(self, folder: Path) -> None:
        from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, attn

        tokens = self.planned.max_tokens
        config = ExLlamaV2Config(str(folder))
        config.max_seq_len = self.options.max_seq_len or max(config.max_seq_len, tokens)
        config.max_input_len = tokens
        config.max_attention_size = tokens**2
        config.no_sdpa = True
        config.arch_compat_overrides(quiet=True)
        self.model = model = ExLlamaV2(config)
        self.attention = "xformers" if attn.has_xformers and not config.no_xformers else "matmul"
        if attn.has_flash_attn and not config.no_flash_attn:
            self.attention = "flash-attn"
        layers = [getattr(each, "attn", each) for each in model.modules]  # in Cohere's layers
        sliding = min((size for layer in layers if (size := getattr(layer, "sliding_window", 0))), default=tokens + 1)
        if self.attention != "flash-attn" and sliding <= tokens:
            raise ValueError(f"windows of {tokens} tokens reach its sliding window of {sliding}; that needs flash-attn")
        if self.options.gpu_split is not None:
            model.load(self.options.gpu_split)
        else:  # a cache that measures what fits
            cache = ExLlamaV2Cache(model, max_seq_len=tokens, lazy=True)
            model.load_autosplit(cache, max(RESERVE, OUTPUT_FACTOR * 2 * tokens * config.vocab_size))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(token_ids)
        return logits

    def layers(self) -> tuple[Layer, ...]:
        modules = self.model.modules_dict.values()
        return group_layers(layer_of(module) for module in modules if type(module).__name__ == "ExLlamaV2Linear")

    def provenance(self) -> dict[str, Any]:
        return super().provenance() | {
            "architecture": self.model.config.architecture,
            "devices": sorted({module.device() for module in self.model.modules[1:]}),
            "attention": self.attention,
        }


def layer_of(module: Any) -> Layer:
    """Return how a linear layer of exllamav2 ran."""
    if module.q_tensors:
        bits = module.q_tensors["q_weight"].nbytes * 8 / module.numel()
        return Layer(module.key, f"exl2 {bits:.1f} bpw", "float16", "gemm_half_q_half")
    return Layer(module.key, dtype_name(module.linear.weight.dtype), "float16", "torch.matmul")
