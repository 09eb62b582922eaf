"""Grouping of layers, the kernel of a row, and deviations, against lists made by hand."""

from __future__ import annotations

import pytest

from backends.base import LayerGroup
from backends.layers import groups as layers
from backends.layers.groups import Layer


def test_layers_that_differ_in_their_numbers_only_are_one_group() -> None:
    found = layers.group(
        [
            Layer("model.layers.0.mlp.up", "int4 g128", "bfloat16", "A"),
            Layer("lm_head", "bfloat16", "bfloat16", "B"),
            Layer("model.layers.11.mlp.up", "int4 g128", "bfloat16", "A"),
            Layer("model.layers.2.mlp.experts.7.up2", "int4 g128", "bfloat16", "A"),
            Layer("model.layers.3.mlp.up", "int8 g128", "bfloat16", "A"),
        ]
    )
    assert found == (
        LayerGroup("model.layers.*.mlp.up", 2, "int4 g128", "bfloat16", "A"),
        LayerGroup("lm_head", 1, "bfloat16", "bfloat16", "B"),
        LayerGroup("model.layers.*.mlp.experts.*.up2", 1, "int4 g128", "bfloat16", "A"),
        LayerGroup("model.layers.*.mlp.up", 1, "int8 g128", "bfloat16", "A"),
    )


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("MarlinNvFp4LinearKernel", "MarlinNvFp4"),
        ("CutlassFP8ScaledMMLinearKernel", "CutlassFP8"),
        ("UnquantizedLinearMethod", "Unquantized"),
        ("UnquantizedEmbeddingMethod", "Unquantized"),
        ("CutlassFp8BlockScaledMMKernel", "CutlassFp8Block"),
        ("LinearEXL3", "LinearEXL3"),
        ("Kernel", "Kernel"),
    ],
)
def test_short_names(kernel: str, short: str) -> None:
    assert layers.short(kernel) == short


def quantized(count: int, kernel: str, asked: str = "", activations: str = "bfloat16") -> LayerGroup:
    return LayerGroup("x", count, "int4 g128", activations, kernel, asked)


PLAIN = LayerGroup("h", 99, "bfloat16", "bfloat16", "UnquantizedLinearMethod")


@pytest.mark.parametrize(
    ("groups", "kernel"),
    [
        ([], ""),
        ([PLAIN], "Unquantized"),
        ([PLAIN, quantized(1, "MarlinLinearKernel")], "Marlin"),
        ([quantized(1, "EmulationNvFp4LinearKernel", activations="int4 g128"), PLAIN], "EmulationNvFp4"),
        ([quantized(3, "A"), quantized(2, "B"), quantized(2, "B"), PLAIN], "B +1"),
    ],
)
def test_a_row_names_the_kernel_of_most_quantized_layers(groups: list[LayerGroup], kernel: str) -> None:
    assert layers.kernel_of(groups) == kernel


@pytest.mark.parametrize(
    ("asked", "ran", "deviation"),
    [
        ("nvfp4 g16", "nvfp4", ""),
        ("fp8", "fp8 token", ""),
        ("nvfp4 g16", "bfloat16", "nvfp4 g16"),
        ("bfloat16", "int8 token", "bfloat16"),
        ("fp8 tensor", "unknown", "fp8 tensor"),
    ],
)
def test_deviation(asked: str, ran: str, deviation: str) -> None:
    assert layers.deviation(asked, ran) == deviation


def test_deviations_are_one_clause_for_each_way() -> None:
    groups = [
        PLAIN,
        quantized(2, "MarlinNvFp4LinearKernel", "nvfp4 g16"),
        quantized(3, "MarlinNvFp4LinearKernel", "nvfp4 g16"),
        quantized(1, "CPUWNA16LinearKernel", "bfloat16", "int8 token"),
        quantized(4, "Strange", "fp8 token", "unknown"),
    ]
    assert layers.deviations(groups) == [
        "the checkpoint asks for nvfp4 activations, but MarlinNvFp4 left them unquantized (bfloat16, 5 layers)",
        "the checkpoint asks for bfloat16 activations, but CPUWNA16 took int8 token (1 layers)",
        "the checkpoint asks for fp8 activations; what Strange took (4 layers) is not known",
    ]
