"""ExLlamaV2 (0.3): EXL2, 4-bit GPTQ and unquantized models on NVIDIA GPUs, one window at a time.

Written from the source of 0.3.2; it has not been run here.  A window goes through ``ExLlamaV2.forward`` whole and
without a KV cache, so that nothing splits it; exllamav2's default of 2,048 tokens a forward pass follows the windows.
In decode it goes through in steps, with a cache in float16 or in 8, 6 or 4 bits (never run).

compare_q sets ``no_sdpa``.  Without flash-attn and xformers, 0.3.2 would run torch's SDPA without a mask
(``_attn_torch`` gets None as the mask of a vision tower): every token would see later ones.  The other path is causal,
but wrong beyond a sliding window; longer windows need flash-attn.

Products of more than 32 rows dequantize the weights to float16; they are added up in float16 (``cublasHgemm``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from compare_q.backends.base import Capabilities, Layer, PlannedModel
from compare_q.backends.checkpoint.config import CheckpointConfig, scaling_type
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import dtype_name
from compare_q.backends.exllama.family import OUTPUT_FACTOR, ExLlamaEngine, ExLlamaOptions
from compare_q.backends.layers.groups import DYNAMIC, KVCache, group_layers

if TYPE_CHECKING:
    import torch

FP16 = "FP16"
GPTQ_BITS = 4
RESERVE = 1 << 30
"""Minimum bytes that the split leaves free on each GPU, as in ExLlamaV3's compare_q."""


class ExLlamaV2Options(ExLlamaOptions):
    """The ``engine`` object: ``gpu_split`` is GiB of weights on each GPU; without it one is filled after the other."""

    cache_mode: Literal["FP16", "Q8", "Q6", "Q4"] | None = None
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
        summary="EXL2, 4-bit GPTQ and unquantized models, logits on NVIDIA GPUs",
        decodes=1,
    )
    options_type = ExLlamaV2Options
    methods = ("exl2", "gptq")
    settings = "EXLLAMA_"
    attention = ""

    @classmethod
    def check_folder(cls, folder: Path, config: CheckpointConfig, model: PlannedModel) -> None:
        super().check_folder(folder, config, model)
        bits = config.quantization.get("bits", GPTQ_BITS)
        if config.quantization.get("quant_method") == "gptq" and bits != GPTQ_BITS:
            raise InputError(f"model_dir: exllamav2 reads GPTQ models of {GPTQ_BITS} bits; this one has {bits}")
        scaled = scaling_type(config.rope_scaling) and not config.text.get("rope_scaling")
        if config.text.get("rope_parameters") and ("rope_theta" not in config.text or scaled):
            raise InputError(
                f"model_dir: {folder / 'config.json'}: exllamav2 does not read its rope_parameters, which "
                "Transformers 5 writes; write them as rope_theta and rope_scaling"
            )

    def load_folder(self, folder: Path) -> None:
        import exllamav2
        from exllamav2 import ExLlamaV2, ExLlamaV2Config

        tokens = self.planned.max_tokens
        config = ExLlamaV2Config(str(folder))
        config.max_seq_len = self.options.max_seq_len or max(config.max_seq_len, tokens)
        config.max_input_len = tokens
        config.max_attention_size = tokens**2
        config.no_sdpa = True
        config.arch_compat_overrides(quiet=True)
        self.model = model = ExLlamaV2(config)
        self.attention = attention_of(config)
        layers = [getattr(each, "attn", each) for each in model.modules]  # in Cohere's layers
        sliding = min((size for layer in layers if (size := getattr(layer, "sliding_window", 0))), default=tokens + 1)
        if self.attention != "flash-attn" and sliding <= tokens:
            raise ValueError(f"windows of {tokens} tokens reach its sliding window of {sliding}; that needs flash-attn")
        mode = self.options.cache_mode or FP16
        new_cache = getattr(exllamav2, "ExLlamaV2Cache" if mode == FP16 else f"ExLlamaV2Cache_{mode}")
        cache = None
        if self.options.gpu_split is not None:
            model.load(self.options.gpu_split)
        else:
            cache = new_cache(model, max_seq_len=tokens, lazy=True)  # prefill uses it to measure what fits
            model.load_autosplit(cache, max(RESERVE, OUTPUT_FACTOR * 2 * tokens * config.vocab_size))
        if self.planned.decode is not None:
            self.cache = cache or new_cache(model, max_seq_len=tokens)

    def decode_windows(self, token_ids: torch.Tensor, step: int) -> torch.Tensor:
        self.cache.current_seq_len = 0
        length = token_ids.shape[1]
        return next(self.in_steps(0, length, step, lambda begin, end: self.forward(token_ids[:, begin:end]), length))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return logits of tokens; in decode they follow the tokens in the cache, and are added to it."""
        logits: torch.Tensor = self.model.forward(token_ids, self.cache)
        self.dtype = dtype_name(logits.dtype)
        return logits[..., : self.model.config.vocab_size]

    def kv_caches(self) -> Iterator[KVCache]:
        mode = self.options.cache_mode or FP16
        stored, scales = ("float16", "") if mode == FP16 else (mode.lower(), DYNAMIC)
        held = [] if self.cache is None else [self.cache.key_states, self.cache.value_states]
        held += [self.cache.key_scales, self.cache.value_scales] if scales else []
        for layer, tensors in enumerate(zip(*held, strict=True)):
            size = sum(tensor.nbytes for tensor in tensors) / tensors[0].shape[1]
            yield KVCache(f"layers.{layer}", 1, stored, scales, attention=self.attention, prefill="", token_bytes=size)

    def layers(self) -> tuple[Layer, ...]:
        modules = self.model.modules_dict.values()
        return group_layers(layer_of(module) for module in modules if type(module).__name__ == "ExLlamaV2Linear")

    def provenance(self) -> dict[str, Any]:
        return super().provenance() | {
            "architecture": self.model.config.architecture,
            "devices": sorted({module.device() for module in self.model.modules[1:]}),
            "attention": self.attention,
        }


def attention_of(config: Any) -> str:
    """Return what exllamav2 computes causal attention with, if SDPA is off."""
    from exllamav2 import attn

    if attn.has_flash_attn and not config.no_flash_attn:
        return "flash-attn"
    return "xformers" if attn.has_xformers and not config.no_xformers else "matmul"


def layer_of(module: Any) -> Layer:
    """Return how a linear layer of exllamav2 ran."""
    tensors = module.q_tensors or {}
    if "q_weight" in tensors:
        bits = tensors["q_weight"].nbytes * 8 / module.numel()
        return Layer(module.key, f"exl2 {bits:.1f} bpw", "float16", "gemm_half_q_half")
    if "qweight" in tensors:
        return Layer(module.key, f"gptq {GPTQ_BITS}-bit", "float16", "gemm_half_q_half")
    dtype = dtype_name(module.linear.weight.dtype)
    return Layer(module.key, dtype, "float16", "torch.matmul")
