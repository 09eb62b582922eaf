"""A checkpoint's config: its language model's part, vocabulary, context and quantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backends.common.errors import InputError


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's config.json; InputError if it is missing or no JSON object."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: missing; model_dir must be a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: must hold a JSON object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config (multimodal configs nest it)."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def vocab_size(config: dict[str, Any]) -> int | None:
    """Rows of the head, as the config states them."""
    size = text_config(config).get("vocab_size")
    return size if isinstance(size, int) else None


def stated_context(config: dict[str, Any]) -> int | None:
    """The config's own maximum of positions, rope scaling left aside; None if it does not say."""
    text = text_config(config)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    length = next((text[name] for name in names if text.get(name)), None)
    return length if isinstance(length, int) else None


def context_length(config: dict[str, Any]) -> int | None:
    """Longest sequence the config allows, rope scaling included; None if it does not say.

    llama3 and longrope state the scaled length, and so does Gemma 3; yarn may state either.
    """
    length, rope = stated_context(config), rope_scaling(config)
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if length is None or not factor:
        return length
    if rope_type(config) == "yarn" and original:
        return max(length, int(original * factor))
    stated_scaled = str(text_config(config).get("model_type")).startswith("gemma3")
    if rope_type(config) in ("linear", "dynamic") and not stated_scaled:
        return int(length * factor)
    return length


def rope_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """The config's rope scaling under either of its names; empty if there is none."""
    text = text_config(config)
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    return rope if isinstance(rope, dict) else {}


def rope_type(config: dict[str, Any]) -> str | None:
    """The kind of rope scaling: "yarn", "llama3", "longrope", ...; None if there is none."""
    rope = rope_scaling(config)
    kind = rope.get("rope_type", rope.get("type"))
    return kind if isinstance(kind, str) else None


def quantization(folder: Path) -> dict[str, Any]:
    """The checkpoint's quantization config, wherever it is kept; empty if it is not quantized."""
    config = text_config(config_of(folder)).get("quantization_config")
    if isinstance(config, dict) and config:
        return config
    legacy = folder / "hf_quant_config.json"  # ModelOpt's, up to 0.29
    if not legacy.is_file():
        return {}
    try:
        return {"quant_method": "modelopt", **json.loads(legacy.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{legacy}: cannot be read: {error}") from None
