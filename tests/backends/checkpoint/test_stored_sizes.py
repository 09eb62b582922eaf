"""Shapes that contradict the config are found by the tensor's name.

Every way to store what the config says is accepted.  All headers are made by hand.  The numbers of
groups, words and blocks are the quotients in the comments.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.checkpoint import checkpoint_doctor
from compare_q.backends.checkpoint.folder import Checkpoint, storage_of
from compare_q.backends.checkpoint.stored_sizes import contradictions
from compare_q.backends.common.errors import ModelError
from tests.backends.checkpoint.test_weights import notes_of
from tests.support.checkpoints import ENDS, LAYER, Entries, Q, write_checkpoint
from tests.support.downloads import DOWNLOADS
from tests.support.format_table import folder_of
from tests.support.stored_formats import gptq

UP = f"{LAYER}.mlp.up_proj"
EXPERTS = f"{LAYER}.mlp.experts"


def weights(**changes: Any) -> dict[str, Any]:
    """Return int4 in groups of 32, symmetric, with changes."""
    return {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
    } | changes


def groups(*pairs: tuple[str, dict[str, Any]], **config: Any) -> dict[str, Any]:
    """Return compressed-tensors' config with a group for each (target, weights)."""
    config_groups = {}
    for number, (target, arguments) in enumerate(pairs):
        config_groups[f"group_{number}"] = {"targets": [target], "weights": arguments}
    return {"quant_method": "compressed-tensors", "config_groups": config_groups, **config}


def linear(**changes: Any) -> dict[str, Any]:
    """Return compressed-tensors' config of int4 in groups of 32, with changes."""
    return groups(("Linear", weights(**changes)))


def words(rows: int, columns: int, per_row: int, n_groups: int) -> Entries:
    """Return packed integers of a matrix [rows, columns], with ``n_groups`` scales per row."""
    scale = ("BF16", rows, n_groups)
    return {
        "weight_packed": ("I32", rows, per_row),
        "weight_scale": scale,
        "weight_shape": ("I64", 2),
    }


def faults_in(
    folder: Path,
    modules: dict[str, Entries],
    quantization: dict[str, Any],
    values: dict[str, bytes],
) -> list[str]:
    """Write a checkpoint, and return its contradictions; ``values``: bytes of tensors by name."""
    entries = {}
    for module, parts in modules.items():
        for part, entry in parts.items():
            entries[f"{module}.{part}"] = entry
    write_checkpoint(folder, {**ENDS, **entries}, {"quantization_config": quantization}, values)
    return [f"{fault.tensor}: {fault.what}" for fault in contradictions(Checkpoint(folder))]


def shape(rows: int, columns: int) -> dict[str, bytes]:
    return {"weight_shape": struct.pack("<2q", rows, columns)}


# 64 / 8 words and 64 / 32 groups per row.
INT4 = words(8, 64, 8, 2)
SIZE = shape(8, 64)
POINTS = {"weight_zero_point": ("I32", 1, 2)}
NVFP4: dict[str, Any] = {"type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4_PARTS = {
    "weight_packed": ("U8", 16, 16),
    "weight_scale": ("F8_E4M3", 16, 2),
    "weight_global_scale": ("F32", 1),
}
FP8 = {"num_bits": 8, "type": "float", "group_size": None}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# 64 x 64 weights in 4 bits: 64 * 4 / 32 rows of words, 64 / 32 groups.
GPTQ = gptq(8, 64, (2, 8), 64)
AWQ = {"qweight": ("I32", 64, 8), "qzeros": ("I32", 2, 8), "scales": ("F16", 2, 64)}
STATED = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("parts", "quantization", "values"),
    [
        (INT4, linear(), SIZE),
        # 576 / 128 = 4.5 groups; the last one is not full.
        (words(8, 576, 72, 5), linear(group_size=128), shape(8, 576)),
        # 12 weights fill 1.5 words, and less than a group.
        (words(8, 12, 2, 1), linear(), shape(8, 12)),
        ({**INT4, "weight_g_idx": ("I32", 64)}, linear(actorder="group"), SIZE),
        (INT4, linear(actorder="static"), SIZE),
        (words(8, 64, 8, 1), linear(group_size=-1), SIZE),
        (words(8, 64, 8, 1), linear(group_size=None, strategy="channel"), SIZE),
        (words(8, 64, 16, 2), linear(num_bits=8), SIZE),  # 4 per word
        (words(8, 64, 7, 2), linear(num_bits=3), SIZE),  # 10 per word
        ({**INT4, **POINTS}, linear(symmetric=False), SIZE),
        # Zero points that are all zero contradict no symmetric config.
        ({**INT4, **POINTS}, linear(), SIZE),
        # 8 is zero in 4 bits
        (
            {**INT4, **POINTS},
            linear(),
            {**SIZE, "weight_zero_point": b"\x88" * 8},
        ),
        # int4 in whole bytes
        (
            {"weight": ("I8", 8, 64), "weight_scale": ("BF16", 8, 2)},
            linear(),
            {},
        ),
        (
            {"weight": ("I8", 8, 64), "weight_scale": ("BF16", 8)},
            linear(num_bits=8, strategy="channel"),
            {},
        ),
        (NVFP4_PARTS, linear(**NVFP4), {}),
        # MXFP4
        (
            {"weight_packed": ("U8", 16, 16), "weight_scale": ("U8", 16, 1)},
            linear(type="float"),
            {},
        ),
        # MXFP8
        (
            {"weight": ("F8_E4M3", 8, 64), "weight_scale": ("U8", 8, 2)},
            linear(num_bits=8, type="float"),
            {},
        ),
        (
            {"weight": ("F8_E4M3", 8, 64), "weight_scale": ("BF16", 8, 1)},
            linear(**FP8, strategy="channel"),
            {},
        ),
        (
            {"weight": ("F8_E4M3", 8, 64), "weight_scale": ("F32",)},
            linear(**FP8, strategy="tensor"),
            {},
        ),
        (
            {"weight": ("F8_E4M3", 576, 320), "weight_scale": ("BF16", 5, 3)},  # 4.5 x 2.5 blocks
            linear(**FP8, strategy="block", block_structure=[128, 128]),
            {},
        ),
        ({"weight": ("F8_E4M3", 576, 320), "weight_scale_inv": ("F32", 5, 3)}, BLOCKS, {}),
        (
            {"weight": ("F8_E4M3", 8, 64), "weight_scale_inv": ("F32", 8, 1)},
            {"quant_method": "fp8"},
            {},
        ),
        (
            {"weight": ("F8_E4M3", 8, 64), "weight_scale": ("F32", 8)},
            {"quant_method": "fbgemm_fp8"},
            {},
        ),
        (
            {"weight": ("F8_E4M3", 256, 256), "weight_scale": ("F32", 2, 1, 2, 1)},
            {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
            {},
        ),
        (
            {
                "weight": ("U8", 16, 16),
                "weight_scale": ("F8_E4M3", 16, 2),
                "weight_scale_2": ("F32",),
            },
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
            {},
        ),
        # a mixture that the config does not describe
        (
            {"weight": ("F8_E4M3", 8, 32), "weight_scale": ("F32",)},
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            {},
        ),
        (GPTQ, STATED | {"desc_act": True}, {}),
        (gptq(8, 64, (1, 8), 64), STATED | {"group_size": -1}, {}),
        # 72 / 32 = 2.25 groups, stored as 3.
        (gptq(9, 64, (3, 8), 72), STATED, {}),
        (gptq(6, 32, (2, 3), 64), STATED | {"bits": 3}, {}),
        (gptq(16, 64, (2, 16), 64), STATED | {"dynamic": {r"+:.*q_proj": {"bits": 8}}}, {}),
        # GPTQ stores the zero point, 8, as 8 - 1 = 7.
        (GPTQ, STATED | {"sym": True}, {"qzeros": b"\x77" * 64}),
        (GPTQ, STATED | {"sym": False}, {"qzeros": bytes(range(64))}),
        ({"qweight": GPTQ["qweight"], "scales": GPTQ["scales"]}, STATED, {}),
        (AWQ, STATED | {"quant_method": "awq", "version": "gemm"}, {}),
        (
            {"qweight": ("I32", 64, 8), "qzeros": ("I32", 64, 1), "scales": ("F16", 64, 8)},
            STATED | {"quant_method": "awq", "version": "gemv"},
            {},
        ),
        (
            {"weight": ("U8", 16, 4), "weight.absmax": ("F32", 1), "weight.quant_map": ("F32", 16)},
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            {},
        ),
        (INT4, {}, SIZE),
        (INT4, {"quant_method": "none-such", "group_size": 128}, SIZE),
        (INT4, groups(("Linear", weights(group_size=128)), ignore=["re:.*q_proj"]), SIZE),
    ],
)
def test_what_fits(
    tmp_path: Path, parts: Entries, quantization: dict[str, Any], values: dict[str, bytes]
) -> None:
    stored = {f"{Q}.{part}": value for part, value in values.items()}
    assert faults_in(tmp_path, {Q: parts}, quantization, stored) == []


@pytest.mark.parametrize(
    ("parts", "quantization", "values", "fault"),
    [
        (
            words(8, 64, 8, 1),
            linear(),
            SIZE,
            "weight_scale: one scale per row, and the config says groups of 32",
        ),
        (
            words(8, 576, 72, 9),
            linear(),
            shape(8, 576),
            "weight_scale: 9 groups of 64, and the config says groups of 32",
        ),
        (
            INT4,
            linear(strategy="channel", group_size=None),
            SIZE,
            "weight_scale: 2 groups of 32, and the config says one scale per row",
        ),
        (
            INT4,
            linear(num_bits=8),
            SIZE,
            "weight_packed: 8 x 8 words for 8 x 64 weights, and the config says 8 bits",
        ),
        (
            words(8, 64, 16, 2),
            linear(),
            SIZE,
            "weight_packed: 8 x 16 words for 8 x 64 weights, and the config says 4 bits",
        ),
        (INT4, linear(**NVFP4), SIZE, "weight_packed: stored in int4, and the config says nvfp4"),
        (
            {"weight": ("F8_E4M3", 8, 64), "weight_scale": ("BF16", 8, 1)},
            linear(num_bits=8, strategy="channel"),
            {},
            "weight: stored in fp8, and the config says int8",
        ),
        (
            {**INT4, **POINTS},
            linear(),
            {**SIZE, "weight_zero_point": bytes(range(8))},
            "weight_zero_point: zero points, and the config says symmetric",
        ),
        (
            {**INT4, "weight_zero_point": ("I32", 1, 1)},
            linear(symmetric=False),
            SIZE,
            "weight_zero_point: zero points for 1 groups, and its scales are for 2",
        ),
        (
            {**NVFP4_PARTS, "weight_scale": ("F8_E4M3", 16, 1)},
            linear(**NVFP4),
            {},
            "weight_scale: one scale per row, and the config says groups of 16",
        ),
        (
            NVFP4_PARTS,
            linear(**NVFP4 | {"group_size": 32}),
            {},
            "weight_scale: 2 groups of 16, and the config says groups of 32",
        ),
        (
            {**NVFP4_PARTS, "weight_packed": ("U8", 16, 32)},
            linear(**NVFP4 | {"group_size": 32}),
            {},
            "weight_scale: the config says groups of 32, and nvfp4 always has groups of 16",
        ),
        (
            {**NVFP4_PARTS, "weight_packed": ("U8", 16, 32)},
            {},
            {},
            "weight_scale: 2 groups of 32, and the config says groups of 16",
        ),
        (
            {"weight": ("F8_E4M3", 8, 128), "weight_scale": ("U8", 8, 2)},
            linear(num_bits=8, type="float"),
            {},
            "weight_scale: 2 groups of 64, and the config says groups of 32",
        ),
        (
            {"weight": ("F8_E4M3", 8, 64), "weight_scale": ("BF16", 8, 1)},
            linear(**FP8, strategy="tensor"),
            {},
            "weight_scale: one scale per row, and the config says one scale for the whole matrix",
        ),
        (
            {"weight": ("F8_E4M3", 256, 256), "weight_scale_inv": ("F32", 4, 4)},
            BLOCKS,
            {},
            "weight_scale_inv: 4 x 4 scales for 256 x 256 weights, "
            "and the config says blocks of 128 x 128",
        ),
        (
            {"weight": ("F8_E4M3", 256, 256), "weight_scale_inv": ("F32", 2, 2)},
            {"quant_method": "fp8"},
            {},
            "weight_scale_inv: 2 x 2 scales for 256 x 256 weights, "
            "and the config says one scale for the whole matrix",
        ),
        (
            {"weight": ("F8_E4M3", 256, 128), "weight_scale": ("BF16", 4, 1)},
            linear(**FP8, strategy="block", block_structure=[128, 128]),
            {},
            "weight_scale: 4 x 1 scales for 256 x 128 weights, "
            "and the config says blocks of 128 x 128",
        ),
        (
            GPTQ,
            STATED | {"group_size": 128},
            {},
            "scales: 2 groups of 32, and the config says groups of 128",
        ),
        (
            gptq(8, 64, (1, 8), 64),
            STATED,
            {},
            "scales: one scale per output, and the config says groups of 32",
        ),
        (
            GPTQ,
            STATED | {"bits": 8},
            {},
            "qweight: 8 x 64 words for 64 x 64 weights, and the config says 8 bits",
        ),
        (
            gptq(8, 64, (2, 16), 64),
            STATED,
            {},
            "qzeros: 16 words for 64 outputs, and the config says 4 bits",
        ),
        (
            {**GPTQ, "qzeros": ("I32", 1, 8)},
            STATED,
            {},
            "qzeros: zero points for 1 groups, and scales for 2",
        ),
        (
            GPTQ,
            STATED | {"sym": True},
            {"qzeros": bytes(range(64))},
            "qzeros: zero points that differ, and the config says sym: true",
        ),
        (
            AWQ,
            STATED | {"quant_method": "awq", "group_size": 64},
            {},
            "scales: 2 groups of 32, and the config says groups of 64",
        ),
        (
            AWQ,
            STATED | {"quant_method": "awq", "bits": 8},
            {},
            "qweight: 64 x 8 words for 64 x 64 weights, and the config says 8 bits",
        ),
    ],
)
def test_what_contradicts(
    tmp_path: Path,
    parts: Entries,
    quantization: dict[str, Any],
    values: dict[str, bytes],
    fault: str,
) -> None:
    """A run refuses the file as well, in one line that names the tensor."""
    stored = {f"{Q}.{part}": value for part, value in values.items()}
    assert faults_in(tmp_path, {Q: parts}, quantization, stored) == [f"{Q}.{fault}"]
    with pytest.raises(ModelError) as refused:
        notes_of(tmp_path)
    assert f"{Q}.{fault}" in str(refused.value)


@pytest.mark.parametrize(
    ("parts", "quantization", "fits"),
    [
        # 2 experts of 384 x 128: 3 x 1 blocks; transposed; two matrices of 192 rows: 2 * 2 x 1
        # blocks per expert
        (
            {"gate_up_proj": ("F8_E4M3", 2, 384, 128), "gate_up_proj_scale_inv": ("F32", 2, 3, 1)},
            BLOCKS,
            True,
        ),
        (
            {"gate_up_proj": ("F8_E4M3", 2, 128, 384), "gate_up_proj_scale_inv": ("F32", 2, 1, 3)},
            BLOCKS,
            True,
        ),
        (
            {"gate_up_proj": ("F8_E4M3", 2, 384, 128), "gate_up_proj_scale_inv": ("F32", 2, 4, 1)},
            BLOCKS,
            True,
        ),
        (
            {"gate_up_proj": ("F8_E4M3", 2, 384, 128), "gate_up_proj_scale_inv": ("F32", 2, 2, 1)},
            BLOCKS,
            False,
        ),
        # one scale per expert, per expert's gate and up, per output of a transposed matrix
        (
            {"down_proj": ("F8_E4M3", 4, 8, 6), "down_proj_weight_scale": ("F32", 4)},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            True,
        ),
        (
            {"gate_up_proj": ("F8_E4M3", 4, 8, 6), "gate_up_proj_weight_scale": ("F32", 4, 2)},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            True,
        ),
        (
            {"gate_up_proj": ("F8_E4M3", 4, 8, 6), "gate_up_proj_scale": ("F32", 4, 1, 6)},
            {"quant_method": "fbgemm_fp8"},
            True,
        ),
        (
            {"gate_up_proj": ("F8_E4M3", 4, 8, 6), "gate_up_proj_scale": ("F32", 4, 1, 3)},
            {"quant_method": "fbgemm_fp8"},
            False,
        ),
        # gpt-oss: 2 experts of 4 x 64
        (
            {"down_proj_blocks": ("U8", 2, 4, 2, 16), "down_proj_scales": ("U8", 2, 4, 2)},
            {"quant_method": "mxfp4"},
            True,
        ),
        (
            {"down_proj_blocks": ("U8", 2, 4, 2, 16), "down_proj_scales": ("U8", 2, 4, 1)},
            {"quant_method": "mxfp4"},
            False,
        ),
        # NVFP4 of ModelOpt, 2 experts of 4 x 32, and transposed
        (
            {
                "down_proj": ("U8", 2, 4, 16),
                "down_proj_weight_scale": ("F8_E4M3", 2, 4, 2),
                "down_proj_weight_scale_2": ("F32", 2),
            },
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            True,
        ),
        (
            {
                "down_proj": ("U8", 2, 16, 4),
                "down_proj_weight_scale": ("F8_E4M3", 2, 2, 4),
                "down_proj_weight_scale_2": ("F32", 2),
            },
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            True,
        ),
        (
            {
                "down_proj": ("U8", 2, 4, 16),
                "down_proj_weight_scale": ("F8_E4M3", 2, 4, 1),
                "down_proj_weight_scale_2": ("F32", 2),
            },
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            False,
        ),
    ],
)
def test_stacked_experts(
    tmp_path: Path, parts: Entries, quantization: dict[str, Any], fits: bool
) -> None:
    assert (not faults_in(tmp_path, {EXPERTS: parts}, quantization, {})) == fits


def test_several_groups(tmp_path: Path) -> None:
    """Names, patterns and classes have groups; only the layer of another size is named."""
    down = f"{LAYER}.mlp.down_proj"
    config = groups(
        ("Linear", weights()),
        ("re:.*mlp.*", weights(group_size=64)),
        (down, weights(num_bits=8, group_size=16)),
    )
    modules = {Q: words(8, 64, 8, 2), UP: words(8, 64, 8, 1), down: words(8, 64, 16, 4)}
    values = {f"{module}.weight_shape": SIZE["weight_shape"] for module in modules}
    assert faults_in(tmp_path, modules, config, values) == []
    modules |= {UP: words(8, 64, 8, 2), down: words(8, 64, 16, 2)}
    assert faults_in(tmp_path, modules, config, values) == [
        f"{UP}.weight_scale: 2 groups of 32, and the config says groups of 64",
        f"{down}.weight_scale: 2 groups of 32, and the config says groups of 16",
    ]
    # A layer that the class describes may have the sizes of a pattern that knows it by another
    # name.
    modules |= {Q: words(8, 64, 8, 1), UP: words(8, 64, 8, 1), down: words(8, 64, 16, 4)}
    assert faults_in(tmp_path, modules, config, values) == []
    assert len(faults_in(tmp_path, {Q: words(8, 64, 8, 3)}, config, values)) == 1


@pytest.mark.parametrize("name", DOWNLOADS)
def test_downloads_have_no_contradiction(name: str, tmp_path: Path) -> None:
    assert list(contradictions(Checkpoint(folder_of(DOWNLOADS[name], tmp_path)))) == []


def test_what_a_quantizer_left(tmp_path: Path) -> None:
    """Left-over numbers of ModelOpt's quantizer do not hide a size."""
    parts: Entries = {**INT4, "weight_quantizer._scale": ("F32", 8, 2)}
    values = {f"{Q}.weight_shape": SIZE["weight_shape"]}
    assert faults_in(tmp_path, {Q: parts}, linear(), values) == []
    # 8 x 64 weights have 64 words and 16 scales.
    assert storage_of(tmp_path).bpw_layer == (64 * 32 + 16 * 16) / 512
    (finding,) = checkpoint_doctor.left_by_quantizers(Checkpoint(tmp_path))
    assert finding.severity == "warning"
    assert finding.where == f"model.safetensors: {Q}.weight_quantizer._scale"
    del parts["weight_scale"]
    faults_in(tmp_path, {Q: parts}, linear(), values)
    assert f"{Q}.weight_quantizer._scale" in storage_of(tmp_path).note
