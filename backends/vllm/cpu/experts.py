"""NVFP4 experts for a vLLM without Triton or Marlin, which is one for CPUs; imported in vLLM's workers only.

vLLM's own emulation of NVFP4 experts is written in Triton.  These classes do the same with its torch functions: one
global scale of inputs for all experts, inputs of both products rounded, weights in the model's dtype.  The weights are
dequantized once, at load, so a mixture takes the memory of an unquantized one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    dequantize_to_dtype,
    ref_nvfp4_quant_dequant,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
from vllm.model_executor.utils import replace_parameter

GROUP_SIZE = 16


class CpuNvFp4W4A16Experts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Weight-only: inputs stay in the model's dtype, whatever scales of inputs the layer was given."""

    quant_dtype: str | None = None

    @staticmethod
    def is_supported_config(cls: Any, *described: Any) -> tuple[bool, str | None]:
        supported: tuple[bool, str | None] = super(CPUUnquantizedExperts, cls).is_supported_config(cls, *described)
        return supported

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kNvfp4Static, None)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_ep

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace packed weights, uint8 [experts, out, in / 2], by their values [experts, out, in], a matrix at a time.

        ``g1_alphas`` and ``g2_alphas`` are what one unit of the scales of an expert's groups is worth.
        """
        dtype = self.moe_config.in_dtype
        for name, worth in (("w13", self.quant_config.g1_alphas), ("w2", self.quant_config.g2_alphas)):
            packed, scale = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
            experts, rows, half = packed.shape
            values = torch.empty(experts, rows, 2 * half, dtype=dtype)
            for expert in range(experts):
                values[expert] = dequantize_to_dtype(
                    packed[expert], scale[expert], worth[expert], dtype, GROUP_SIZE, swizzle=False
                )
            replace_parameter(layer, f"{name}_weight", values)
            replace_parameter(layer, f"{name}_weight_scale", scale.new_empty(0))

    def rounded(self, given: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
        """Inputs of a product, [tokens, in], as the product takes them."""
        return given

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
        expert_map: torch.Tensor | None, a1q_scale: Any, a2_scale: Any, workspace13: Any, workspace2: Any,
        expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Add up in ``output`` what the chosen experts make of ``hidden_states``; both are [tokens, hidden]."""
        given = self.rounded(hidden_states, self.quant_config.a1_gscale)
        output.zero_()
        for expert in set(topk_ids.flatten().tolist()):
            token, slot = (topk_ids == expert).nonzero(as_tuple=True)
            wide = torch.nn.functional.linear(given[token], w1[expert])
            middle = wide.new_empty(len(token), w2.shape[-1])
            self.activation(activation, middle, wide)
            made = torch.nn.functional.linear(self.rounded(middle, self.quant_config.a2_gscale), w2[expert])
            if not apply_router_weight_on_input:
                made = made * topk_weights[token, slot, None].to(made.dtype)
            output.index_add_(0, token, made)


class CpuNvFp4EmulationExperts(CpuNvFp4W4A16Experts):
    """W4A4: inputs rounded to NVFP4 by vLLM's own function, under one global scale for all experts."""

    quant_dtype = "nvfp4"

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kNvfp4Static, kNvfp4Dynamic)

    def rounded(self, given: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
        values: torch.Tensor = ref_nvfp4_quant_dequant(given, global_scale, GROUP_SIZE)
        return values
