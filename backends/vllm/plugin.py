"""What vLLM imports of compare_q: 4-bit kernels on CPUs, where vLLM has none, and the scoring extension.

vLLM's workers import this file before they build a model, in two ways.  ``vllm_score`` names ``ScoringExtension`` of
this file as its ``worker_extension_cls``: a checkout on ``PYTHONPATH`` is enough for that, and ``VLLM_PLUGINS`` cannot
leave it out.  Where compare_q is installed, ``register`` is also a ``vllm.general_plugins`` entry point, so that ``vllm
serve`` on a CPU serves what ``vllm_score`` scores.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from backends.vllm.install import has_cpu_router
from backends.vllm.worker import ScoringExtension

__all__ = ["ScoringExtension", "register"]

MARLIN = "MarlinNvFp4LinearKernel"
WHERE = ("vllm.model_executor.kernels.linear", "vllm.model_executor.layers.quantization.modelopt")
"""Modules that name Marlin as the only kernel of weight-only NVFP4 (the second one up to vLLM 0.26)."""

EXPERTS = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"


def register() -> None:
    """On the CPU platform, give vLLM the 4-bit kernels that it lacks there; on any other, do nothing.

    For NVFP4 W4A4 layers the kernel is vLLM's own emulation.  For weight-only layers it is ours, put in Marlin's place:
    vLLM takes Marlin by its name there, without looking at its list of kernels.  For experts the classes are ours.  For
    int4 layers ours comes first, and takes those whose product vLLM lacks, as it would only notice in its first step.
    """
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    # A process must ask Linux for AMX's registers before it uses them.  vLLM's kernels for int4 weights do not ask, and
    # end by SIGILL in a model so small that no product of oneDNN, which asks, came before (a toy's W4A16).
    torch.cpu._init_amx()
    linear = importlib.import_module(WHERE[0])
    own = importlib.import_module("backends.vllm.cpu.linear")
    listed = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    if own.CpuInt4W4A16LinearKernel not in listed:
        listed.insert(0, own.CpuInt4W4A16LinearKernel)
    linear._POSSIBLE_NVFP4_KERNELS.setdefault(PlatformEnum.CPU, [linear.EmulationNvFp4LinearKernel])
    if getattr(linear, MARLIN).is_supported()[0]:
        return
    for name in WHERE:
        module = importlib.import_module(name)
        if hasattr(module, MARLIN):
            setattr(module, MARLIN, own.CpuNvFp4W4A16LinearKernel)
    register_experts()


def register_experts() -> None:
    """Give vLLM our NVFP4 experts in place of its emulation in Triton, and nothing else to choose from."""
    if not has_cpu_router():
        return

    def ours(backend: Any) -> list[Any]:
        from backends.vllm.cpu.experts import CpuNvFp4EmulationExperts, CpuNvFp4W4A16Experts

        return [CpuNvFp4EmulationExperts, CpuNvFp4W4A16Experts] if backend.name == "EMULATION" else []

    setattr(importlib.import_module(EXPERTS), "backend_to_kernel_cls", ours)  # noqa: B010 - mypy knows no such name


register()
