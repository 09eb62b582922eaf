"""NVFP4 for vLLM on CPUs, where it registers no kernel for it, and the scoring extension behind it.

vLLM's workers import this file before they build a model: as compare_q's ``worker_extension_cls``, for which a
repository on ``PYTHONPATH`` is enough and which ``VLLM_PLUGINS`` cannot leave out; and, where compare_q is installed,
as a ``vllm.general_plugins`` entry point, so that ``vllm serve`` on a CPU serves what ``vllm_score`` scores.
"""

from __future__ import annotations

import importlib

from backends.vllm.worker import ScoringExtension

__all__ = ["ScoringExtension", "register"]

MARLIN = "MarlinNvFp4LinearKernel"
WHERE = ("vllm.model_executor.kernels.linear", "vllm.model_executor.layers.quantization.modelopt")
"""Modules that name Marlin as the only kernel of weight-only NVFP4 (the second up to 0.26)."""


def register() -> None:
    """On the CPU platform, give vLLM the NVFP4 kernels that it lacks there; nothing anywhere else.

    W4A4 is vLLM's own emulation.  Weight-only is ours: vLLM forces Marlin, by its name, without looking at the list.
    """
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    linear = importlib.import_module(WHERE[0])
    linear._POSSIBLE_NVFP4_KERNELS.setdefault(PlatformEnum.CPU, [linear.EmulationNvFp4LinearKernel])
    if getattr(linear, MARLIN).is_supported()[0]:
        return
    from backends.vllm.nvfp4 import CpuNvFp4W4A16LinearKernel

    for name in WHERE:
        module = importlib.import_module(name)
        if hasattr(module, MARLIN):
            setattr(module, MARLIN, CpuNvFp4W4A16LinearKernel)


register()
