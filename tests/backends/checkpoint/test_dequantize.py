"""Rows of quantized matrices read from files, compared with the numbers that were stored."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig
from compare_q.backends.checkpoint.dequantize import UnreadError, row_count, rows_of
from compare_q.backends.checkpoint.formats import Parts
from compare_q.backends.checkpoint.safetensors_files import read_header
from tests.support.toy_mixtures import (
    Quantizer,
    Tensors,
    fp8_blocks,
    fp8_rows,
    integers,
    nvfp4,
    packed,
)

CONFIG = CheckpointConfig({})
# A reader must skip the rows between these.
EVERY_OTHER = np.arange(0, 64, 2)


def saved(folder: Path, tensors: Tensors) -> Parts:
    """Write tensors to a file, and return their entries in its header."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return read_header(file)


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def int8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale and one zero point of int8 for each row."""
    low = weight.amin(1, keepdim=True)
    high = weight.amax(1, keepdim=True)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().clamp(-128, 127)
    codes = (weight / scale + zero).round().clamp(-128, 127)
    parts = {
        "weight": codes.to(torch.int8),
        "weight_scale": scale,
        "weight_zero_point": zero.to(torch.int8),
    }
    return parts, (codes - zero) * scale


def ordered(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """int4 in groups of 32 inputs that are not next to each other: input c is in group c % 3."""
    group = torch.arange(weight.shape[1]) % 3
    # 15 steps cover twice the largest absolute value, as in compressed-tensors.
    scale = torch.stack([weight[:, group == number].abs().amax(1) / 7.5 for number in range(3)], 1)
    codes = (weight / scale[:, group]).round().clamp(-8, 7)
    parts = {
        "weight_packed": packed(codes, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": group.int(),
    }
    return parts, codes * scale[:, group]


def modelopt(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """NVFP4 in ModelOpt's names: its global scale is a factor."""
    parts, exact = nvfp4(weight)
    named = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}
    return {**named, "weight_scale_2": 1 / parts["weight_global_scale"]}, exact


@pytest.mark.parametrize(
    ("quantizer", "bits"),
    [
        (partial(integers, bits=4), 4),
        (partial(integers, bits=8), 8),
        # Ten numbers per word, and two bits that are not used.
        (partial(integers, bits=3), 3),
        (partial(integers, bits=4, symmetric=False), 4),
        (partial(integers, bits=8, symmetric=False), 8),
        (ordered, 4),
        (nvfp4, None),
        (modelopt, None),
        (fp8_rows, None),
        (fp8_blocks, None),
        (int8_rows, None),
    ],
)
def test_rows_are_the_stored_numbers(
    tmp_path: Path, quantizer: Quantizer, bits: int | None
) -> None:
    # Not square, so that exchanged rows and columns would be noticed.
    tensors, exact = quantizer(matrix(64, 96))
    parts = saved(tmp_path, tensors)
    assert row_count(parts) == 64
    rows = rows_of(parts, CONFIG, bits, EVERY_OTHER)
    np.testing.assert_allclose(rows, exact[::2].numpy(), rtol=1e-6, atol=1e-7)


def test_powers_of_two_by_hand(tmp_path: Path) -> None:
    """MXFP4: nibbles 1 to 7 are 0.5, 1, 1.5, 2, 3, 4, 6, and 8 more is negative.

    A scale of 128 is a factor of 2.
    """
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(2)
    tensors = {
        "weight_packed": (nibbles[::2] | nibbles[1::2] << 4).reshape(1, 16),
        "weight_scale": torch.tensor([[128]], dtype=torch.uint8),
    }
    sizes = [0, 1, 2, 3, 4, 6, 8, 12]
    signed = sizes + [-size for size in sizes]
    assert rows_of(saved(tmp_path, tensors), CONFIG, None, np.array([0])).tolist() == [signed * 2]


def test_blocks_that_do_not_divide_a_matrix(tmp_path: Path) -> None:
    """Five rows and seven columns in blocks of 4 x 4 by the config: the last blocks are smaller."""
    tensors = {
        "weight": torch.ones(5, 7, dtype=torch.int8),
        "weight_scale": torch.tensor([[1.0, 2], [3, 4]]),
    }
    config = CheckpointConfig({"quantization_config": {"weight_block_size": [4, 4]}})
    rows = rows_of(saved(tmp_path, tensors), config, None, np.array([0, 4]))
    assert rows.tolist() == [[1, 1, 1, 1, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4]]


def test_one_expert_of_a_stack(tmp_path: Path) -> None:
    parts = saved(
        tmp_path,
        {
            "weight": torch.ones(2, 3, 2, dtype=torch.int8),
            "weight_scale": torch.tensor([[2.0], [5.0]]),
        },
    )
    assert row_count(parts) == 3
    assert rows_of(parts, CONFIG, None, np.array([2]), expert=1).tolist() == [[5, 5]]


@pytest.mark.parametrize(
    "tensors",
    [
        {"qweight": torch.zeros(4, 4, dtype=torch.int32), "scales": torch.ones(1, 4)},
        {"weight": torch.zeros(4, 4, dtype=torch.uint8), "SCB": torch.ones(4)},
        {
            "weight_packed": torch.zeros(4, 8, dtype=torch.uint8),
            "weight_scale": torch.ones(4, 1).to(torch.float8_e4m3fn),
        },
    ],
    ids=["GPTQ", "bitsandbytes", "NVFP4 without its global scale"],
)
def test_formats_that_are_not_read(tmp_path: Path, tensors: Tensors) -> None:
    parts = saved(tmp_path, tensors)
    with pytest.raises(UnreadError):
        rows_of(parts, CONFIG, 4, np.arange(row_count(parts)))
