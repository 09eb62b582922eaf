"""Which linear layers of one parent share their input, so that engines fuse their weights into one matrix."""

from __future__ import annotations

from collections.abc import Collection, Iterator

FUSED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), ("wq", "wk", "wv"), ("query", "key", "value"),
    ("c_fc_0", "c_fc_1"),
)  # fmt: skip
"""Names of layers that are fused: the packed_modules_mapping of vLLM's language models, 0.26 to 0.33."""

FUSED_AS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"), "fused_wqa_wkv": ("wq_a", "wkv"),
}  # fmt: skip
"""Names that engines give to fused layers -> the names that checkpoints have for their parts."""


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
