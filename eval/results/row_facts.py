"""The fields of a row that follow from its storage, its spec and its provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...backends.base import Storage
from ...backends.common import machine
from ...backends.layers import groups

BRIEF = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Number formats for a narrow column."""


def facts_of_storage(storage: Storage) -> dict[str, Any]:
    """Return the fields of a row about the size of its weights."""
    return {
        "bpw_layer": storage.bpw_layer,
        "bpw_head": storage.bpw_head,
        "vram_gib": storage.vram_gib,
        "vram_bits": storage.vram_bits,
        "file_bytes": storage.file_bytes,
        "storage_note": storage.note or None,
    }


def facts_of_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that its spec gives."""
    return {
        "options": ", ".join(option_texts(options_of(spec))) or None,
        "noise_floor": bool(spec.get("noise_floor")),
    }


def facts_of_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row about its machine, kernels, attention and KV cache."""
    layers = groups.groups_from_json(provenance.get("layers", ()))
    kv_caches = groups.kv_caches_from_json(provenance.get("kv_cache_layers"))
    token_bytes = groups.kv_token_bytes(kv_caches)
    kv_mb = None
    if token_bytes is not None:
        kv_mb = token_bytes / 1000
    kv_cache = str(provenance.get("kv_cache") or "")
    for name, brief in BRIEF.items():
        kv_cache = kv_cache.replace(name, brief)
    return {
        "where": machine.hardware_text(provenance) or None,
        "kernel": groups.kernel_of(layers) or None,
        "deviations": "; ".join(deviations_of(provenance)) or None,
        "attention": str(provenance.get("attention") or "") or None,
        "engine_version": str(provenance.get("engine_version") or "") or None,
        "phase": str(provenance.get("phase") or "prefill"),
        "kv_cache": kv_cache or None,
        "kv_mb": kv_mb,
    }


def options_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a model spec gives the engine.

    They are in ``engine`` or in ``"model_dir": [dir, options]``.
    """
    options: dict[str, Any] = {}
    engine = spec.get("engine")
    if isinstance(engine, dict):
        options |= engine
    folder = spec.get("model_dir")
    if isinstance(folder, list) and folder and isinstance(folder[-1], dict):
        options |= folder[-1]
    return options


def option_texts(options: Mapping[str, Any]) -> list[str]:
    """Return each option as ``name=value``; a value that is not a string is written as JSON."""
    texts = []
    for name, value in options.items():
        value_text = value
        if not isinstance(value, str):
            value_text = json.dumps(value)
        texts.append(f"{name}={value_text}")
    return texts


def deviations_of(provenance: Mapping[str, Any]) -> list[str]:
    """Return one clause per way in which a model ran differently from its checkpoint or spec."""
    layers = groups.groups_from_json(provenance.get("layers", ()))
    kv_caches = groups.kv_caches_from_json(provenance.get("kv_cache_layers"))
    clauses = groups.deviations(layers) + groups.kv_deviations(kv_caches)
    # Of a provenance, only the layers are checked when a row is made.
    of_engine = provenance.get("deviations")
    if isinstance(of_engine, list):
        clauses += [clause for clause in of_engine if isinstance(clause, str)]
    return clauses
