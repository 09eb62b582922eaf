"""The size of vLLM's KV cache: enough for the windows of two steps, or for a decode batch.

By default, vLLM would claim 90 % of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base import PlannedModel
from ..checkpoint.checkpoint_config import CheckpointConfig
from . import decode

BATCHED_TOKENS_CPU = 8192
BATCHED_TOKENS_GPU = 16384
"""Upper bounds of vLLM's own max_num_batched_tokens."""
CHOOSES_CACHE = (
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "long_prefill_token_threshold",
)
"""Options that set the size of the KV cache, or let a step hold all windows.

Without them, the windows set the size.
"""
LEAST_FREE = 0.01
ONE_BYTE = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
"""Values of ``kv_cache_dtype`` that store each element in 8 bits, and nothing else."""
LEAST_BYTES = 256 << 20
UNKNOWN_BYTES = 4 << 30
"""Smallest KV cache on a CPU if the bytes of a token are not known, or only a lower bound."""


def cache_arguments(model: PlannedModel, config: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of ``LLM(...)`` for the windows of two steps, or of a decode batch.

    They are empty if the spec decides the size and, on a GPU, if the bytes of a token are unknown.
    """
    checkpoint_config = CheckpointConfig(config)
    elements = elements_per_token(checkpoint_config)
    if cpu:
        return {"kv_cache_memory_bytes": cpu_bytes(model, checkpoint_config, elements)}
    if elements is None or any(name in model.options for name in CHOOSES_CACHE):
        return {}
    size = cache_bytes(model, elements, BATCHED_TOKENS_GPU)
    # With a size, the utilization is only the memory that must be free when vLLM starts.
    return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": LEAST_FREE}


def cpu_bytes(model: PlannedModel, config: CheckpointConfig, elements: int | None) -> int:
    """Return the size of the KV cache on a CPU; ``elements`` per token, None if unknown."""
    if elements is not None:
        return cache_bytes(model, elements, BATCHED_TOKENS_CPU)
    latent = latent_elements_per_token(config)
    return max(cache_bytes(model, latent, BATCHED_TOKENS_CPU), UNKNOWN_BYTES)


def cache_bytes(model: PlannedModel, elements: int, most_batched: int) -> int:
    """Return the bytes of a KV cache with ``elements`` per token.

    A step has at most ``most_batched`` tokens.
    """
    longest = model.max_tokens + 1
    batched: int = model.options.get("max_num_batched_tokens", most_batched)
    # A window that is longer than a step takes several steps, and only the next window may begin in
    # the last step.  Therefore one window and two steps are enough.
    tokens = max(2 * batched, min(4 * longest, longest + 2 * batched))
    if model.decode is not None:
        tokens = max(tokens, decode.cached_tokens(model.decode, longest))
    return max(element_bytes(model.options) * elements * tokens, LEAST_BYTES)


def element_bytes(options: Mapping[str, Any]) -> int:
    """Return the bytes of one element in the KV cache.

    For formats with scales or fewer than 8 bits, return an upper bound.  Without
    ``kv_cache_dtype``, the cache has the model's dtype, or fewer bits if the checkpoint requires
    fewer.
    """
    cache_dtype = options.get("kv_cache_dtype") or "auto"
    # The skipped layers have the model's dtype.
    skips_layers = bool(options.get("kv_cache_dtype_skip_layers"))
    if cache_dtype == "auto" or skips_layers:
        # vLLM runs a model in float32 only if the spec requests float32.
        if options.get("dtype") in ("float", "float32"):
            return 4
        return 2
    if cache_dtype in ONE_BYTE:
        return 1
    return 2


def elements_per_token(config: CheckpointConfig) -> int | None:
    """Return an upper bound of the number of elements per token in the KV cache of all layers.

    None if unknown.
    """
    elements = config.kv_numbers
    if elements is None:
        return None
    # In Gemma 4, the caches of full attention and of sliding windows differ in size.  All layers
    # count as the larger.  Full attention has its own size of a head, and may have its own number
    # of KV heads; without any number of KV heads, there are as many as heads.
    heads = 0
    for key in ("num_global_key_value_heads", "num_key_value_heads", "num_attention_heads"):
        heads = size_of(config, key)
        if heads > 0:
            break
    n_layers = size_of(config, "num_hidden_layers")
    # 0 for other models, which do not have this key.
    head_size = size_of(config, "global_head_dim")
    return max(elements, 2 * n_layers * heads * head_size)


def latent_elements_per_token(config: CheckpointConfig) -> int:
    """Return the size of latent attention's vector and its rotary part, for all layers.

    0 without these.  This is not an upper bound.  Some models cache more (DeepSeek-V3.2's indexer).
    For others, vLLM caches keys and values instead of the vector (MiniCPM3).
    """
    rank = size_of(config, "kv_lora_rank")
    rotary = 0
    if rank > 0:
        rotary = size_of(config, "qk_rope_head_dim")
    return size_of(config, "num_hidden_layers") * (rank + rotary)


def size_of(config: CheckpointConfig, key: str) -> int:
    """Return a size that the language model's config states; 0 if it states none."""
    value = config.text.get(key)
    if type(value) is int and value > 0:
        return value
    return 0
