"""How a model's rotary positions are scaled, and from which context on: what a row says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.layers.schemes import objects_in

ROPE = "rope"
"""Where a row's provenance has it."""
BY_CONTEXT = ("longrope", "su")
"""Scalings that have other factors for contexts above the original one."""


def rope(config: CheckpointConfig, context: int) -> dict[str, Any]:
    """The rope scaling of a config, in JSON types; empty without one.

    ``context``: the tokens that the engine chooses rotary factors by, where it has a choice.
    """
    stated = [part for part in (config.rope_scaling, *objects_in(config.rope_scaling)) if part_type(part)]
    if not stated:  # configs have one for all layers, or one for each kind of layers
        return {}
    part, text = stated[0], config.text
    original = part.get("original_max_position_embeddings", text.get("original_max_position_embeddings"))
    if original is None and part_type(part) in ("yarn", "dynamic"):
        original = config.stated_context
    return described(part_type(part), part.get("factor"), original, context)


def part_type(part: Mapping[str, Any]) -> str:
    """What a rope scaling is called; empty if it scales nothing."""
    name = str(part.get("rope_type", part.get("type", "")))
    return "" if name in ("default", "none", "") else name


def described(name: str, factor: Any, original: Any, context: int) -> dict[str, Any]:
    """``type``, ``factor``, ``original_context`` and, where factors follow it, ``context``; without what is unknown."""
    found = {
        "type": name,
        "factor": factor if isinstance(factor, int | float) else None,
        "original_context": original if isinstance(original, int) else None,
        "context": context if name in BY_CONTEXT else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def beyond(scaling: dict[str, Any], tokens: int) -> str:
    """What a reader must know of a scaling in windows of so many tokens; empty if nothing."""
    original, context = scaling.get("original_context"), scaling.get("context", 0)
    if original is None or max(tokens, context) <= original:
        return ""
    factor = f", factor {scaling['factor']:g}" if "factor" in scaling else ""
    name = f"{scaling['type']}{factor}"
    if context and tokens <= original:
        return f"positions by {name} as in a context of {context:,} tokens; the original context is {original:,}"
    return f"windows of {tokens:,} tokens reach beyond the original context of {original:,} (positions by {name})"
