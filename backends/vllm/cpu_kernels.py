"""4-bit kernels that vLLM lacks on CPUs; imported only in its workers.

They dequantize the weights once while loading, and then multiply in the model's dtype: NVFP4, for which vLLM has only
Marlin, and int4, whose product vLLM's library for CPUs without AVX-512 lacks, and no library has in float32.  NVFP4
W4A4 layers run by vLLM's own emulation.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

GROUP_SIZE = 16
MARLIN = "MarlinNvFp4LinearKernel"
NAME_MARLIN = ("vllm.model_executor.kernels.linear", "vllm.model_executor.layers.quantization.modelopt")
"""Modules that use Marlin by its name for weight-only NVFP4 (the second one up to vLLM 0.26)."""


def add_kernels() -> None:
    """Add the 4-bit kernels that vLLM lacks on a CPU.

    NVFP4 W4A4 layers get vLLM's own emulation.  Weight-only layers get ours instead of Marlin, which vLLM uses by its
    name without looking at its list of kernels.  For int4 layers ours is first, and takes those whose product vLLM
    lacks, which vLLM would only notice in its first step.
    """
    # A process must request AMX's registers from Linux before it uses them.  vLLM's int4 kernels do not, and end by
    # SIGILL in a model so small that oneDNN, which does, has not computed a product before.
    torch.cpu._init_amx()
    listed = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    if CpuInt4W4A16LinearKernel not in listed:
        listed.insert(0, CpuInt4W4A16LinearKernel)
    linear._POSSIBLE_NVFP4_KERNELS.setdefault(PlatformEnum.CPU, [linear.EmulationNvFp4LinearKernel])
    if not getattr(linear, MARLIN).is_supported()[0]:
        for module in map(importlib.import_module, NAME_MARLIN):
            if hasattr(module, MARLIN):
                setattr(module, MARLIN, CpuNvFp4W4A16LinearKernel)


class CpuNvFp4W4A16LinearKernel(NvFp4LinearKernel):  # type: ignore[misc]
    """Weights dequantized once by vLLM's own function; then a product in the model's dtype."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed ``weight``, uint8 [out, in / 2], by its values [out, in] in the model's dtype."""
        dtype = torch.get_default_dtype()  # the model's, for as long as vLLM loads it
        packed, scale, global_scale = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale
        values = dequantize_to_dtype(packed, scale, global_scale, dtype, GROUP_SIZE, swizzle=False)
        replace_parameter(layer, "weight", values)
        replace_parameter(layer, "weight_scale", scale.new_empty(0))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class CpuInt4W4A16LinearKernel(linear.CPUWNA16LinearKernel):  # type: ignore[misc]
    """For CPUs and dtypes where vLLM's own kernel would fail in the first step: weights are dequantized at load."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if c.act_type != torch.float32 and hasattr(torch.ops._C, "cpu_gemm_wna16"):
            return False, "vLLM has a kernel of its own"
        implemented: tuple[bool, str | None] = super().can_implement(c)
        return implemented

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed weights by their values [out, in] in the dtype of the scales, which is the model's.

        As in vLLM's kernel a value is (number - zero point) x scale in float32, rounded once.  Along its inputs a
        matrix is packed and grouped; the zero points of a group are packed along the outputs.
        """
        packed, scales, zeros = self._get_weight_params(layer)
        numbers = unpack_quantized_values_into_int32(packed.data, self.config.weight_type, packed.packed_dim)
        numbers = numbers if packed.input_dim == 1 else numbers.t()
        by_group = scales.data if scales.output_dim == 0 else scales.data.t()
        if self.config.zero_points:
            zeros = zeros.data if zeros.output_dim == 1 else zeros.data.t()
            offsets = unpack_quantized_values_into_int32(zeros, self.config.weight_type, 1).t()
        else:
            offsets = torch.full_like(by_group, self.config.weight_type.bias, dtype=torch.int32)
        rows, groups = by_group.shape
        centered = numbers.reshape(rows, groups, -1) - offsets.unsqueeze(-1)
        values = (centered.float() * by_group.float().unsqueeze(-1)).to(by_group.dtype).view(rows, -1)
        replace_parameter(layer, self.w_q_name, values)
        replace_parameter(layer, self.w_s_name, scales.data.new_empty(0))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, getattr(layer, self.w_q_name), bias)
