"""Which linear layers of one parent share their input, so that engines fuse their weights into one matrix."""

from __future__ import annotations

from collections.abc import Collection, Iterator

FUSED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), ("wq", "wk", "wv"), ("query", "key", "value"),
    ("c_fc_0", "c_fc_1"),
)  # fmt: skip
"""Names of layers that are fused: the packed_modules_mapping of vLLM's language models, 0.26 to 0.33."""


def fused_layers(paths: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Groups of ``paths`` (``model.layers.0.mlp.up_proj``) that are fused into one matrix, in the order of FUSED."""
    for path in paths:
        parent = path.rpartition(".")[0]
        for names in FUSED:
            members = tuple(member for name in names if (member := f"{parent}.{name}") in paths)
            if len(members) > 1 and path == members[0]:
                yield members
