"""The largest weight that scales allow, by hand, in every format.

Scales that no weight has are found by name.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.checkpoint.largest_weights import Bound, bound_of, impossible, numbers_of
from compare_q.backends.common.errors import ModelError
from tests.backends.checkpoint.test_weights import notes_of
from tests.support.checkpoints import ENDS, Entries, Q, write_checkpoint
from tests.support.stored_formats import CASES


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def bf16(*numbers: float) -> bytes:
    return b"".join(struct.pack("<f", number)[2:] for number in numbers)


def written(
    folder: Path, entries: Entries, values: dict[str, bytes], config: dict[str, Any]
) -> Checkpoint:
    return Checkpoint(write_checkpoint(folder, {**ENDS, **entries}, config, values))


def bound(checkpoint: Checkpoint, most: int) -> Bound | None:
    """Return the bound of the module ``Q``, from up to ``most`` bytes of its scales."""
    with checkpoint.files[0].open("rb", buffering=0) as file:
        return bound_of(
            checkpoint.modules[Q], checkpoint.config, lambda scale: numbers_of(scale, file, most)
        )


@pytest.mark.parametrize(
    ("case", "part", "numbers", "weight"),
    [
        # 448 * 6 / 2688 = 1: the largest FP8 scale times the largest FP4 value.
        ("nvfp4 a16", "weight_global_scale", floats(2688), 1.0),
        # The reciprocal, as ModelOpt stores it, read as compressed-tensors' scale.
        ("nvfp4 a16", "weight_global_scale", floats(1 / 2688), 2688.0**2),
        ("modelopt nvfp4", "weight_scale_2", floats(1 / 2688), 1.0),
        ("mxfp4", "weight_scale", bytes([126, 120] * 8), 3.0),  # 6 * 2^(126 - 127)
        ("mxfp8", "weight_scale", bytes([119, 120]), 3.5),  # 448 * 2^(120 - 127)
        ("fp8 channel", "weight_scale", bf16(*[0.0078125] * 7, 0.015625), 7.0),  # 448 / 64
        ("fp8 block inverse", "weight_scale_inv", floats(0.0078125, 0.5), 224.0),
        ("modelopt fp8", "weight_scale", floats(1), 448.0),
        ("int8 w8a8", "weight_scale", bf16(*[0.0078125] * 8), 1.0),  # 128 / 128
        ("int8 packed", "weight_scale", bf16(*[-0.0078125] * 8), 1.0),
        ("int4 g32", "weight_scale", bf16(*[0.125] * 127, 0.25), 2.0),  # 8 / 4
        ("int4 asymmetric", "weight_scale", bf16(*[0.125] * 128), 2.0),  # 16 / 8
        # 8 / 4; with AWQ's zero points 16 / 4.
        ("gptq 4", "scales", struct.pack("<e", 0.25) * 128, 2.0),
        ("awq", "scales", struct.pack("<e", 0.25) * 128, 4.0),
        # NF4's largest value is 1, so that a scale is the largest weight of its block.
        ("nf4", "weight.absmax", floats(*[0.5] * 29, 2.5), 2.5),
        ("bitsandbytes int8", "SCB", floats(*[0.5] * 7, 2.5), 2.5),
        ("torchao fp8", "_weight_scale", floats(*[0.0078125] * 8), 3.5),
        # Nested scales are indices into a table.
        ("nf4 nested", "weight.absmax", b"\xff" * 30, None),
        ("exl3", "suh", b"", None),
    ],
)
def test_bounds(tmp_path: Path, case: str, part: str, numbers: bytes, weight: float | None) -> None:
    values = dict(CASES[case].values)
    if numbers:
        values[part] = numbers
    if case == "nvfp4 a16":
        # 448, the largest number of FP8.
        values["weight_scale"] = bytes([0x7E] * 32)
    entries = {f"{Q}.{name}": entry for name, entry in CASES[case].parts.items()}
    stored = {f"{Q}.{name}": value for name, value in values.items()}
    config = {**CASES[case].config, "quantization_config": CASES[case].quantization}
    largest = bound(written(tmp_path, entries, stored, config), 1 << 20)
    if weight is None:
        assert largest is None
    else:
        assert largest is not None
        assert largest.part == part
        assert largest.weight == pytest.approx(weight)


@pytest.mark.parametrize(
    ("scales", "wrong"),
    [
        # FP8 weights that were cast without a scale have a scale of 1, which allows 448.
        ([0.01, 0.02, 0.001, 1.0], {}),
        (
            [0.01, 0.02, 100.0, 0.01],
            {2: "a scale of 100 allows weights up to 44,800, which no layer has"},
        ),
        ([100.0, 200.0, 300.0, 400.0], {0: "44,800", 1: "89,600", 2: "134,400", 3: "179,200"}),
        # 313.6 is 35 times 8.96, and 1,400 times 0.224, the others' median
        ([0.02, 0.02, 0.7, 0.02], {}),
        ([5e-4, 5e-4, 0.7, 5e-4], {2: "a scale of 0.7 allows weights up to 314"}),
        ([0.01, float("nan"), 0.01, float("inf")], {1: "a scale of nan", 3: "a scale of inf"}),
    ],
)
def test_scales_that_no_weight_has(
    tmp_path: Path, scales: list[float], wrong: dict[int, str]
) -> None:
    """A fault in one layer is found, and the run refuses the model by the name of the tensor."""
    entries: Entries = {}
    values = {}
    for number, scale in enumerate(scales):
        module = f"model.layers.{number}.mlp.up_proj"
        entries |= {f"{module}.weight": ("F8_E4M3", 8, 4), f"{module}.weight_scale": ("F32", 1)}
        values |= {f"{module}.weight_scale": floats(scale), f"{module}.weight": bytes(range(32))}
    faults = list(impossible(written(tmp_path, entries, values, {})))
    assert len(faults) == len(wrong)
    for fault, (number, text) in zip(faults, wrong.items(), strict=True):
        assert fault.tensor == f"model.layers.{number}.mlp.up_proj.weight_scale"
        assert text in fault.what
    if wrong:
        first = rf"layers\.{min(wrong)}\.mlp\.up_proj\.weight_scale: a scale of"
        with pytest.raises(ModelError, match=first):
            notes_of(tmp_path)


ZERO = bytes([0])
"""0.0 in FP8."""
HALF = bytes([0x30])
"""0.5 in FP8."""


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("kind", ["block of zeros", "matrix of zeros", "one large weight"])
def test_scales_of_honest_fp8(tmp_path: Path, kind: str, *, is_wrong: bool) -> None:
    """Transformers gives blocks of zeros a scale of 1, which allows 448.

    One block may have a weight of 150.  Usual blocks have 448 / 1024.  In the wrong layer all
    scales are reciprocals, 1,024 of 448 each.
    """
    usual = 1 / 1024
    unusual_layer = {
        "block of zeros": [1.0, usual, usual, usual],
        "matrix of zeros": [1.0] * 4,
        "one large weight": [150 / 448, usual, usual, usual],
    }[kind]
    layers = [[usual] * 4, unusual_layer, [usual] * 4]
    wrong = []
    if is_wrong:
        layers.append([0.5] * 4)
        wrong.append("model.layers.3.mlp.up_proj.weight_scale_inv")
    entries: Entries = {}
    values = {}
    for number, scales in enumerate(layers):
        module = f"model.layers.{number}.mlp.up_proj"
        entries |= {
            f"{module}.weight": ("F8_E4M3", 256, 256),
            f"{module}.weight_scale_inv": ("F32", 2, 2),
        }
        values[f"{module}.weight_scale_inv"] = floats(*scales)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    faults = impossible(written(tmp_path, entries, values, config))
    assert [fault.tensor for fault in faults] == wrong


@pytest.mark.parametrize(
    ("scale", "group", "wrong"),
    [
        # compressed-tensors gives this global scale to a matrix of zeros.
        (1.0, ZERO, []),
        # A global scale of 1 is none: weights are up to 0.5 * 6 = 3.
        (1.0, HALF, []),
        # Four times as large: up to 12.
        (1 / 4, HALF, []),
        # the reciprocal of 2688
        (1 / 2688, bytes([0x7E]), ["model.layers.1.mlp.up_proj.weight_global_scale"]),
    ],
)
def test_global_scales_of_nvfp4(
    tmp_path: Path, scale: float, group: bytes, wrong: list[str]
) -> None:
    """A global scale alone does not condemn a matrix: its groups may have small scales."""
    layers = [(2688.0, bytes([0x7E])), (scale, group), (2688.0, bytes([0x7E]))]
    entries: Entries = {}
    values = {}
    for number, (global_scale, group_scale) in enumerate(layers):
        module = f"model.layers.{number}.mlp.up_proj"
        entries |= {f"{module}.{name}": entry for name, entry in CASES["nvfp4 a16"].parts.items()}
        values |= {
            f"{module}.weight_global_scale": floats(global_scale),
            f"{module}.weight_scale": group_scale * 32,
        }
    faults = impossible(written(tmp_path, entries, values, {}))
    assert [fault.tensor for fault in faults] == wrong


def test_parts_of_large_scales_are_read(tmp_path: Path) -> None:
    """16 of 4 x 4,096 scales are read, and the last one is the largest.

    An embedding's scales do not count.
    """
    entries: Entries = {f"{Q}.weight": ("I8", 16384, 4), f"{Q}.weight_scale": ("F32", 16384, 1)}
    embedding = "model.embed_tokens"
    entries |= {f"{embedding}.weight": ("I8", 8, 4), f"{embedding}.weight_scale": ("F32", 8, 1)}
    values = {
        f"{Q}.weight_scale": floats(*[0.5] * 16383, 1.0),
        f"{embedding}.weight_scale": floats(*[1000.0] * 8),
    }
    checkpoint = written(tmp_path, entries, values, {})
    largest = bound(checkpoint, 64)
    assert largest is not None
    # The largest code of int8, times the last scale.
    assert largest.weight == 128.0
    assert list(impossible(checkpoint)) == []
