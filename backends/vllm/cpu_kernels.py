"""4-bit kernels that vLLM lacks on CPUs; imported only in its workers.

They dequantize the weights once while loading, and then multiply in the model's dtype.  For NVFP4, vLLM has only
Marlin.  For int4, vLLM's library for CPUs without AVX-512 lacks the product, and no library has it in float32.
Dequantized experts take as much memory as unquantized experts.

NVFP4 W4A4 layers run in vLLM's own emulation.  vLLM's emulation of NVFP4 *experts* is written in Triton; these classes
do the same with vLLM's torch functions: one global scale of inputs for all experts, inputs of both products
rounded, weights in the model's dtype.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    dequantize_to_dtype,
    ref_nvfp4_quant_dequant,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kNvfp4Dynamic,
    kNvfp4Static,
    unpack_quantized_values_into_int32,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

try:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
except ImportError:  # 0.26, whose experts cannot be replaced
    CPUUnquantizedExperts = object

GROUP_SIZE = 16
MARLIN = "MarlinNvFp4LinearKernel"
NAME_MARLIN = ("vllm.model_executor.kernels.linear", "vllm.model_executor.layers.quantization.modelopt")
"""Modules that use Marlin by its name for weight-only NVFP4 (the second one up to vLLM 0.26)."""
CHOOSES_EXPERTS = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"


def add_kernels() -> None:
    """Add the 4-bit kernels that vLLM lacks on a CPU.

    NVFP4 W4A4 layers get vLLM's own emulation.  Weight-only layers get our kernel instead of Marlin, which vLLM uses by
    name without searching its list of kernels.  Experts get our classes.  For int4 layers, our kernel is first in the
    list; it takes layers whose product vLLM lacks, because vLLM itself would fail only in its first step.
    """
    # A process must request AMX's registers from Linux before it uses them.  vLLM's int4 kernels do not: in a
    # small model they end by SIGILL if oneDNN, which requests the registers, has not computed a product before.
    torch.cpu._init_amx()
    listed = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    if CompareQInt4W4A16LinearKernel not in listed:
        listed.insert(0, CompareQInt4W4A16LinearKernel)
    linear._POSSIBLE_NVFP4_KERNELS.setdefault(PlatformEnum.CPU, [linear.EmulationNvFp4LinearKernel])
    if getattr(linear, MARLIN).is_supported()[0]:
        return
    for name in NAME_MARLIN:
        module = importlib.import_module(name)
        if hasattr(module, MARLIN):
            setattr(module, MARLIN, CompareQNvFp4W4A16LinearKernel)
    if CPUUnquantizedExperts is not object:
        setattr(importlib.import_module(CHOOSES_EXPERTS), "backend_to_kernel_cls", nvfp4_experts)  # noqa: B010 - mypy


def nvfp4_experts(engine: Any) -> list[Any]:
    """Return our NVFP4 experts instead of vLLM's emulation in Triton."""
    return [CompareQNvFp4EmulationExperts, CompareQNvFp4W4A16Experts] if engine.name == "EMULATION" else []


class CompareQNvFp4W4A16LinearKernel(NvFp4LinearKernel):  # type: ignore[misc]
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


class CompareQInt4W4A16LinearKernel(linear.CPUWNA16LinearKernel):  # type: ignore[misc]
    """For CPUs and dtypes where vLLM's own kernel would fail in the first step: weights are dequantized at load."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        if c.act_type != torch.float32 and hasattr(torch.ops._C, "cpu_gemm_wna16"):
            return False, "vLLM has its own kernel"
        implemented: tuple[bool, str | None] = super().can_implement(c)
        return implemented

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed weights by their values [out, in] in the dtype of the scales, which is the model's.

        As in vLLM's kernel, a value is (number - zero point) x scale in float32, rounded once.  A matrix is packed and
        grouped along its inputs; the zero points of a group are packed along the outputs.
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


class CompareQNvFp4W4A16Experts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Weight-only: inputs stay in the model's dtype, even if the layer has scales of inputs."""

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
        """Replace packed weights, uint8 [experts, out, in / 2], by values [experts, out, in], one matrix at a time.

        ``g1_alphas`` and ``g2_alphas`` are the units of the scales of an expert's groups.
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
        """Return a product's inputs [tokens, in] in the precision of the layer."""
        return given

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
        expert_map: torch.Tensor | None, a1q_scale: Any, a2_scale: Any, workspace13: Any, workspace2: Any,
        expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Sum the results of the chosen experts for ``hidden_states`` in ``output``; both are [tokens, hidden]."""
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


class CompareQNvFp4EmulationExperts(CompareQNvFp4W4A16Experts):
    """W4A4: inputs rounded to NVFP4 by vLLM's own function, under one global scale for all experts."""

    quant_dtype = "nvfp4"

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kNvfp4Static, kNvfp4Dynamic)

    def rounded(self, given: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
        values: torch.Tensor = ref_nvfp4_quant_dequant(given, global_scale, GROUP_SIZE)
        return values
