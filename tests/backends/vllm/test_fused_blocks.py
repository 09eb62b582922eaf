"""FP8 blocks that end inside a matrix that vLLM fuses: named before loading; headers are made by
hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compare_q import backends
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.checkpoints import ENDS, LAYER, Entries, write_checkpoint
from tests.support.toy import planned

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
ARGS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"targets": ["Linear"], "weights": ARGS}},
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def blocked(rows: dict[str, int]) -> Entries:
    """Return FP8 matrices of 128 columns with one scale per 128 rows."""
    entries: Entries = {}
    for name, size in rows.items():
        entries |= {f"{LAYER}.{name}.weight": ("F8_E4M3", size, 128)}
        entries |= {f"{LAYER}.{name}.weight_scale_inv": ("F32", -(-size // 128), 1)}
    return entries


def attention(q: int, k: int, v: int) -> dict[str, int]:
    return {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}


# 576 and 192 rows, as SmolLM2-135M has them in q and k, are 4.5 and 1.5 blocks.
@pytest.mark.parametrize(
    ("rows", "quantization", "options", "named"),
    [
        (
            attention(576, 192, 192),
            BLOCKS,
            {},
            "self_attn.q_proj has 576 rows, no multiple of the 128",
        ),
        (
            attention(512, 192, 192),
            BLOCKS,
            {},
            "self_attn.k_proj has 192 rows, no multiple of the 128",
        ),
        # Nothing follows v.
        (attention(512, 128, 192), BLOCKS, {}, ""),
        (attention(576, 192, 192), COMPRESSED, {}, "self_attn.q_proj has 576 rows"),
        (
            attention(576, 192, 192),
            {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
            {},
            "self_attn.q_proj",
        ),
        # No blocks.
        (attention(576, 192, 192), {"quant_method": "fp8"}, {}, ""),
        # Since 0.25 vLLM also fuses the layers of Transformers' own code.
        (
            attention(576, 192, 192),
            BLOCKS,
            {"model_impl": "transformers"},
            "self_attn.q_proj has 576 rows",
        ),
        (
            attention(576, 192, 192),
            BLOCKS,
            {"hf_overrides": {}},
            "",
        ),  # not the config of the folder
        # 512 / 4 and 256 / 2 rows; 2 heads of 64 rows; 1,024 / 16 rows
        (attention(512, 256, 256), BLOCKS, {"tensor_parallel_size": 4}, ""),
        (
            attention(512, 128, 128),
            BLOCKS,
            {"tensor_parallel_size": 4},
            "k_proj has 128 rows (64 on each of 4 GPUs)",
        ),
        (
            attention(1024, 256, 256),
            BLOCKS,
            {"tensor_parallel_size": 16},
            "q_proj has 1,024 rows (64 on each of 16 GP",
        ),
        ({"mlp.gate_proj": 384, "mlp.up_proj": 384}, BLOCKS, {}, ""),
        (
            {"mlp.gate_proj": 384, "mlp.up_proj": 384},
            BLOCKS,
            {"tensor_parallel_size": 2},
            "mlp.gate_proj has 384 rows",
        ),
        ({"mlp.up_proj": 320, "mlp.gate_proj": 320}, BLOCKS, {}, "mlp.gate_proj has 320 rows"),
        (
            {"feed_forward.w1": 320, "feed_forward.w3": 320},
            BLOCKS,
            {},
            "feed_forward.w1 has 320 rows",
        ),
        ({"mlp.up_proj": 320}, BLOCKS, {}, ""),  # not fused
        # DeepSeek-V3's latent attention is whole on each rank, and its last part has 4.5 blocks
        (
            {"self_attn.q_a_proj": 1536, "self_attn.kv_a_proj_with_mqa": 576},
            BLOCKS,
            {"tensor_parallel_size": 8},
            "",
        ),
        (
            {"self_attn.q_a_proj": 1600, "self_attn.kv_a_proj_with_mqa": 576},
            BLOCKS,
            {},
            "self_attn.q_a_proj has 1,600",
        ),
        ({"attn.wq_a": 192, "attn.wkv": 512}, BLOCKS, {}, "attn.wq_a has 192 rows"),
        # a delta net's queries and keys have 2 x 96 rows
        (
            {"linear_attn.in_proj_qkv": 640, "linear_attn.in_proj_z": 256},
            BLOCKS,
            {},
            "a part of model.layers.0.linear_attn.in_proj_qkv has 192 rows",
        ),
        # of another modality
        ({"vision_tower.q_proj": 576, "vision_tower.k_proj": 192}, BLOCKS, {}, ""),
        # vLLM itself checks experts
        ({"mlp.experts.0.gate_proj": 320, "mlp.experts.0.up_proj": 320}, BLOCKS, {}, ""),
    ],
)
def test_blocks_that_end_inside_a_fused_matrix(
    tmp_path: Path,
    rows: dict[str, int],
    quantization: dict[str, Any],
    options: dict[str, Any],
    named: str,
) -> None:
    config = {
        **HEADS,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 96,
        "quantization_config": quantization,
    }
    write_checkpoint(tmp_path, {**ENDS, **blocked(rows)}, config)
    clauses = VllmEngine.misreads(planned("m", "vllm_score", str(tmp_path), 100, options))
    assert (clauses == "") == (named == "")
    assert named in clauses


def test_other_engines_read_the_blocks(tmp_path: Path) -> None:
    config = {**HEADS, "quantization_config": BLOCKS}
    folder = write_checkpoint(tmp_path, {**ENDS, **blocked(attention(576, 192, 192))}, config)
    refusing = set()
    for name, engine in backends.engines():
        if engine.misreads(planned("m", name, str(folder), 100)):
            refusing.add(name)
    assert refusing == {"vllm_score"}
