"""A head or an embedding that is quantized, and layers that are although the config says that they are not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from backends.checkpoint.doctor.finding import Finding, gathered
from backends.checkpoint.doctor.matrices import described
from backends.checkpoint.doctor.subject import Checkpoint

IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
"""Where configs list the layers that are not quantized: compressed-tensors, fp8 and bitsandbytes, ModelOpt, ..."""


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Every finding about what is quantized unawares."""
    patterns = ignored_patterns(checkpoint.quantization)
    against = [module for module in checkpoint.quantized if is_ignored(module, patterns)]
    yield from gathered(
        "wrong", [checkpoint.where_module(module) for module in against],
        "stored quantized, and the config says that it is not: engines refuse, or read its bytes as other numbers",
        "take it out of the config's list of ignored layers, or store it unquantized",
    )  # fmt: skip
    for module, parts in checkpoint.quantized.items():
        if module in against:
            continue
        stored = described(parts, checkpoint.quantization)
        if checkpoint.role(module) == "head":
            what = f"the head is quantized ({stored}), which costs more than a layer: it makes every logit"
            yield Finding("warning", checkpoint.where_module(module), what, "mind it where models are compared")
        elif checkpoint.role(module) == "embedding":
            tied = " and the head, which is the same matrix" if is_tied(checkpoint) else ""
            what = f"the embedding{tied}: quantized ({stored}); many engines read embeddings in 16 bits only"
            yield Finding("warning", checkpoint.where_module(module), what, "mind it where models are compared")


def is_tied(checkpoint: Checkpoint) -> bool:
    """Whether the head is the embedding."""
    stated = checkpoint.config.text.get("tie_word_embeddings") is True
    return stated and not any(checkpoint.role(module) == "head" for module in checkpoint.modules)


def ignored_patterns(quantization: Mapping[str, Any]) -> list[str]:
    """The names and patterns of the layers that a config leaves unquantized."""
    nested = quantization.get("quantization")
    lists = [found.get(key) for found in (quantization, nested) if isinstance(found, Mapping) for key in IGNORED]
    return [each for found in lists if isinstance(found, list) for each in found if isinstance(each, str)]


def is_ignored(module: str, patterns: list[str]) -> bool:
    """Whether a pattern names a module: whole, as a regular expression after ``re:``, or with ``*``."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                if re.match(pattern[3:], module):
                    return True
            except re.error:
                continue
        elif module == pattern or ("*" in pattern and fnmatchcase(module, pattern)):
            return True
    return False
