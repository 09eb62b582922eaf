"""The memory that serving a model takes: its parts, and the source of each part.

The parts are the fields of ``eval.results.Memory``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...backends.base import ServingFacts, Storage
from ...backends.layers import groups
from ...backends.layers.groups import KVCache
from ..results import CachePart, Memory
from .run_model import RunModel

UNQUANTIZED_BITS = dict.fromkeys(groups.UNQUANTIZED_FORMATS, 16.0) | {"float32": 32.0, "f32": 32.0}
"""Number formats of unquantized weights -> bits."""


def memory_of(model: RunModel, storage: Storage, provenance: Mapping[str, Any]) -> Memory:
    """Return the memory that serving a scored model takes; ``provenance`` describes its run.

    The engine reports the size of its KV cache.  If it scored without a cache, or does not report
    the size of an unquantized cache, the size is computed from the config and the dtype of the run.
    """
    facts = model.files.serving()
    run_dtype = str(provenance.get("dtype"))
    caches = groups.kv_caches_from_json(provenance.get("kv_cache_layers"))
    if caches:
        kv_source = "engine"
        parts = reported_parts(caches, facts)
    else:
        kv_source = "config"
        parts = computed_parts(facts, str(provenance.get("kv_cache") or run_dtype))
    if not parts:
        kv_source = ""
    has_sliding_window = any(part.window for part in parts)
    bytes_of_activation = facts.float_bytes or UNQUANTIZED_BITS.get(run_dtype, 16.0) / 8
    logits = None
    if facts.vocab_size is not None:
        # In float32.
        logits = 4 * facts.vocab_size
    # ``step_numbers``: how many activations of a token a decoder layer holds at once.
    activation_bytes_of_token = None
    if facts.step_numbers is not None:
        activation_bytes_of_token = int(bytes_of_activation * facts.step_numbers)
    missing = missing_part(model, storage, provenance, parts, facts)
    return Memory(
        weights=storage.file_bytes,
        kv=tuple(parts),
        kv_source=kv_source,
        # If the engine reported the windows of its layers, no layer counts in full.
        kv_is_upper=facts.kv_is_upper and not has_sliding_window,
        logits=logits,
        step_token=activation_bytes_of_token,
        context=model.facts.context,
        missing=missing or None,
    )


def reported_parts(caches: Sequence[KVCache], facts: ServingFacts) -> list[CachePart]:
    """Return the parts of the KV cache as the engine reports them; empty if it omits a size."""
    # An engine may not report all layers.
    if sum(cache.count for cache in caches) < facts.kv_layers:
        return []
    parts = []
    for cache in caches:
        if cache.token_bytes is None:
            return []
        parts.append(CachePart(token_bytes=cache.token_bytes * cache.count, window=cache.window))
    return parts


def computed_parts(facts: ServingFacts, cache_dtype: str) -> list[CachePart]:
    """Return the parts of an unquantized KV cache by the config; empty for other number formats."""
    if cache_dtype not in UNQUANTIZED_BITS:
        return []
    parts = []
    for numbers, window in facts.kv:
        parts.append(
            CachePart(token_bytes=numbers * UNQUANTIZED_BITS[cache_dtype] / 8, window=window)
        )
    return parts


def missing_part(
    model: RunModel,
    storage: Storage,
    provenance: Mapping[str, Any],
    parts: Sequence[CachePart],
    facts: ServingFacts,
) -> str:
    """Return the first part of the memory that is not known, and why; empty if all are known."""
    reason = weights_missing(model, storage, provenance)
    if reason:
        return f"weights: {reason}"
    if not parts:
        return "KV cache: engine and config do not state the size for all layers"
    if None in (facts.vocab_size, facts.step_numbers):
        return "activations: the config does not state the sizes of layers"
    return ""


def weights_missing(model: RunModel, storage: Storage, provenance: Mapping[str, Any]) -> str:
    """Return why the size of the weight files is not the size of the loaded weights.

    Empty if it is.
    """
    layers = groups.groups_from_json(provenance.get("layers", ()))
    if storage.file_bytes is None:
        return "no weight files on this machine"
    if storage.note:
        return storage.note
    if model.planned.override_tensors:
        return "override tensors replace a part of the weight files"
    if any("dequantized" in layer.kernel for layer in layers):
        return "the engine decompresses them while loading"
    stored_bits = storage.bpw_layer
    if not layers or not stored_bits:
        return ""
    loaded_bits = []
    for layer in layers:
        # Quantized weights are loaded as they are stored.
        if layer.weights not in UNQUANTIZED_BITS:
            return ""
        loaded_bits.append(UNQUANTIZED_BITS[layer.weights])
    # A difference of one percent does not count.
    if 0.99 * min(loaded_bits) <= stored_bits <= 1.01 * max(loaded_bits):
        return ""
    most_bits = max(loaded_bits)
    return f"stored with {stored_bits:.3g} bits per weight, and loaded with {most_bits:.3g}"
