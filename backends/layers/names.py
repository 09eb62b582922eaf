"""Names of linear layers: which of one parent are fused into one matrix, and what stands before a model's layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

FUSED_AS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"), "fused_wqa_wkv": ("wq_a", "wkv"),
}  # fmt: skip
"""Names that engines give to fused layers -> the names that checkpoints have for their parts."""
FUSED = (
    *(parts for name, parts in FUSED_AS.items() if name != "fused_wqa_wkv"),
    ("w1", "w3"), ("wq", "wk", "wv"), ("query", "key", "value"), ("c_fc_0", "c_fc_1"),
)  # fmt: skip
"""Layers that share their input and are fused: the packed_modules_mapping of vLLM's language models, 0.26 to 0.33."""
OWNERS = re.compile(r"^(?:(?:model|language_model|backbone)\.)+")
"""What engines and checkpoints put before a language model's layers, each in its own order."""
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+$")
"""The numbers in a layer's name."""


def bare(layer: str) -> str:
    """A layer's name without what engines and checkpoints put before it, and without vLLM's inner module of experts."""
    return OWNERS.sub("", layer).removesuffix(".routed_experts")


def spellings(layer: str) -> list[str]:
    """A bare name as configs may spell it; for experts that an engine has as one layer, the names of the first one."""
    inside = [f"{layer}.0.{part}" for part in EXPERT_LAYERS] if layer.endswith("experts") else []
    return [prefix + name for name in (layer, *inside) for prefix in PREFIXES]


def upwards(name: str) -> Iterator[str]:
    """A layer's name, and those of the modules that hold it, which a config may name in its place."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def parts_of(path: str) -> list[str]:
    """The paths that a checkpoint has for an engine's layer: its parts' if it is fused, else its own."""
    parent, _, name = path.rpartition(".")
    return [f"{parent}.{part}" for part in FUSED_AS.get(name, (name,))] if parent else [path]


def fused_layers(paths: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Groups of ``paths`` (``model.layers.0.mlp.up_proj``) that are fused into one matrix, in the order of FUSED."""
    for path in paths:
        parent = path.rpartition(".")[0]
        for names in FUSED:
            members = tuple(member for name in names if (member := f"{parent}.{name}") in paths)
            if len(members) > 1 and path == members[0]:
                yield members
