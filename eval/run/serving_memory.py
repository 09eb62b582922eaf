"""The memory that serving a model takes: its parts, and the source of each part
(``eval.results.Memory``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...backends.base import Storage
from ...backends.layers import groups
from ..results import CachePart, Memory
from .run_model import RunModel

BITS = dict.fromkeys(groups.PLAIN, 16.0) | {"float32": 32.0, "f32": 32.0}
"""Number formats of unquantized weights -> bits."""


def memory_of(model: RunModel, storage: Storage, provenance: Mapping[str, Any]) -> Memory:
    """Return the memory that serving a scored model takes; ``provenance`` describes its run.

    The engine reports the size of its KV cache.  If it scored without a cache, or does not report
    the size of an unquantized cache, the size is computed from the config and the dtype of the run.
    """
    facts, ran = model.files.serving(), str(provenance.get("dtype"))
    caches = groups.kv_caches_from_json(provenance.get("kv_cache_layers"))
    kept = str(provenance.get("kv_cache") or ran)
    parts = [(numbers * BITS[kept] / 8, window) for numbers, window in facts.kv if kept in BITS]
    if caches:
        is_known = None not in {each.token_bytes for each in caches}
        is_known &= (
            sum(each.count for each in caches) >= facts.kv_layers
        )  # an engine may not report all layers
        parts = [((each.token_bytes or 0) * each.count, each.window) for each in caches if is_known]
    number_bytes = facts.float_bytes or BITS.get(ran, 16.0) / 8
    missing = weights_missing(model, storage, provenance)
    if not missing and not parts:
        missing = "KV cache: engine and config do not state the size for all layers"
    if not missing and None in (facts.vocab_size, facts.step_numbers):
        missing = "activations: the config does not state the sizes of layers"
    return Memory(
        weights=storage.file_bytes,
        kv=tuple(CachePart(token_bytes=size, window=window) for size, window in parts),
        kv_source="" if not parts else "engine" if caches else "config",
        kv_is_upper=facts.kv_is_upper and not any(window for _, window in parts),
        logits=None if facts.vocab_size is None else 4 * facts.vocab_size,
        step_token=None if facts.step_numbers is None else int(number_bytes * facts.step_numbers),
        context=model.facts.context,
        missing=missing or None,
    )


def weights_missing(model: RunModel, storage: Storage, provenance: Mapping[str, Any]) -> str:
    """Return why the size of the weight files is not the size of the loaded weights; empty if it
    is.
    """
    layers = groups.groups_from_json(provenance.get("layers", ()))
    bits, stored = [BITS.get(layer.weights) for layer in layers], storage.bpw_layer
    plain = [each for each in bits if each is not None]
    if storage.file_bytes is None:
        return "weights: no weight files on this machine"
    if storage.note:
        return f"weights: {storage.note}"
    if model.planned.override_tensors:
        return "weights: override tensors replace a part of the weight files"
    if any("dequantized" in layer.kernel for layer in layers):
        return "weights: the engine decompresses them while loading"
    if (
        stored
        and plain
        and len(plain) == len(bits)
        and not 0.99 * min(plain) <= stored <= 1.01 * max(plain)
    ):
        return (
            f"weights: stored with {stored:.3g} bits per weight, and loaded with {max(plain):.3g}"
        )
    return ""
