"""int4 weights on a CPU: our kernel against the format's definition, and against vLLM's own where it has one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.toy import GPU

pytestmark = [pytest.mark.engine, pytest.mark.skipif(GPU, reason="on a GPU vLLM has kernels of its own")]
OUT, IN = 64, 96


def nibbles(numbers: np.ndarray[Any, Any], axis: int) -> torch.Tensor:
    """int4 numbers, eight of them along ``axis`` in one int32, the first one in its lowest bits."""
    moved = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    words = moved.reshape(*moved.shape[:-1], -1, 8)
    packed = np.bitwise_or.reduce(words << (4 * np.arange(8, dtype=np.uint32)), axis=-1)
    return torch.from_numpy(np.moveaxis(packed, -1, axis).copy().view(np.int32))


def parameter(values: torch.Tensor, **dims: int) -> torch.nn.Parameter:
    """A parameter that says, as vLLM's do, which dimension is which."""
    found = torch.nn.Parameter(values, requires_grad=False)
    vars(found).update(dims)
    return found


def made(kernel: Any, dtype: torch.dtype, *, group: int, zero_points: bool, outputs_first: bool) -> tuple[Any, ...]:
    """(kernel with its weights processed, its layer, the weights [OUT, IN] by the definition in float64).

    ``outputs_first``: in the layout of compressed-tensors, else in the layout of GPTQ.
    """
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    random = np.random.default_rng(0)
    numbers, groups = random.integers(0, 16, (OUT, IN)), IN // group
    scales = torch.from_numpy(random.uniform(0.01, 0.1, (OUT, groups))).to(dtype)
    zeros = random.integers(0, 16, (OUT, groups)) if zero_points else np.full((OUT, groups), 8)
    centered = numbers.reshape(OUT, groups, group) - zeros[..., None]
    gold = (centered * scales.double().numpy()[..., None]).reshape(OUT, IN)
    output_dim, input_dim = (0, 1) if outputs_first else (1, 0)

    def laid(values: Any) -> Any:
        return values if outputs_first else values.T

    layer = torch.nn.Module()
    where = {"output_dim": output_dim, "input_dim": input_dim}
    layer.q = parameter(nibbles(laid(numbers), input_dim), **where, packed_dim=input_dim)
    layer.s = parameter(laid(scales).contiguous(), **where)
    layer.z = parameter(nibbles(laid(zeros), output_dim), **where, packed_dim=output_dim) if zero_points else None
    layer.bias = None
    kind = scalar_types.uint4 if zero_points else scalar_types.uint4b8
    built = kernel(MPLinearLayerConfig((IN, OUT), (IN, OUT), kind, dtype, group, zero_points), "q", "s", "z")
    built.process_weights_after_loading(layer)
    return built, layer, gold


@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize("zero_points", [True, False])
@pytest.mark.parametrize("group", [32, IN])
def test_against_the_definition(group: int, zero_points: bool, outputs_first: bool) -> None:
    from backends.vllm.cpu_kernels import CpuInt4W4A16LinearKernel

    kernel, layer, gold = made(
        CpuInt4W4A16LinearKernel, torch.float32, group=group, zero_points=zero_points, outputs_first=outputs_first
    )
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(0))
    bias = torch.arange(OUT, dtype=torch.float32)
    expected = x.double().numpy() @ gold.T + np.arange(OUT)
    np.testing.assert_allclose(kernel.apply_weights(layer, x, bias), expected, atol=1e-4)


@pytest.mark.parametrize("zero_points", [True, False])
def test_against_the_product_of_vllm(zero_points: bool) -> None:
    """In bf16, with weights that both round once: they differ by the order of additions, and by roundings.

    By one at the output, or by two where a CPU emulates bf16.
    """
    from vllm.model_executor.kernels.linear import CPUWNA16LinearKernel

    from backends.vllm.cpu_kernels import CpuInt4W4A16LinearKernel

    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM's library for CPUs without AVX-512 has no product for int4 weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_INT4_W4A8", "0")
        x = torch.randn(5, IN, generator=torch.Generator().manual_seed(0)).bfloat16()
        layout = {"group": 32, "zero_points": zero_points, "outputs_first": True}
        own, layer, _ = made(CpuInt4W4A16LinearKernel, torch.bfloat16, **layout)
        theirs, other, _ = made(CPUWNA16LinearKernel, torch.bfloat16, **layout)
        found, expected = own.apply_weights(layer, x).float(), theirs.apply_weights(other, x).float()
    np.testing.assert_allclose(found, expected, atol=2**-7 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("dtype", "has_product", "chosen"),
    [
        (torch.bfloat16, True, "CPUWNA16LinearKernel"),
        (torch.float32, True, "CpuInt4W4A16LinearKernel"),
        (torch.bfloat16, False, "CpuInt4W4A16LinearKernel"),
    ],
)
def test_ours_is_taken_where_vllm_would_fail(
    dtype: torch.dtype, has_product: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
    from vllm.scalar_type import scalar_types

    from backends.vllm import cpu_kernels

    cpu_kernels.add_kernels()
    ops = SimpleNamespace(_C=SimpleNamespace(**({"cpu_gemm_wna16": None} if has_product else {})))
    monkeypatch.setattr(cpu_kernels, "torch", SimpleNamespace(ops=ops, float32=torch.float32))
    config = MPLinearLayerConfig((IN, OUT), (IN, OUT), scalar_types.uint4b8, dtype, 32, False)
    assert choose_mp_linear_kernel(config).__name__ == chosen
