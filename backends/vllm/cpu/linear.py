"""A kernel for NVFP4 weights and unquantized activations, for a vLLM without Marlin; imported in vLLM's workers only.

W4A4 layers need no kernel of ours: vLLM's own emulation runs there.  The emulation dequantizes every weight in every
step, which is bearable: a window of 2,048 tokens of SmolLM2-135M took 12.9 s, and 10.9 s weight-only with the kernel of
this file, on two cores with other work.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.model_executor.utils import replace_parameter

GROUP_SIZE = 16


class CpuNvFp4W4A16LinearKernel(NvFp4LinearKernel):  # type: ignore[misc]
    """Weights dequantized once, at load, by vLLM's own function; then a product in the model's dtype."""

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
