"""Hides instructions of the CPU from torch, vLLM and compare_q.

It is imported if PYTHONPATH begins with this folder.

``make test CPU=avx2``, ``CPU=avx512core`` (no bf16 arithmetic) and ``CPU=avx512`` (no AMX) run the
tests as on a CPU with only these instructions, on any x86-64 machine that has them.  torch, whose
result vLLM uses, reads the CPU's instructions from the CPU, compare_q from Linux; no environment
variable changes these results.  For oneDNN, ATen, MKL and glibc (which chooses ggml's library), the
Makefile sets variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HIDDEN = {
    "avx2": ("avx512", "avx10", "amx"),
    "avx512core": ("avx512_bf16", "avx512_fp16", "avx10", "amx"),
    "avx512": ("avx10", "amx"),
}[os.environ["MASKED_CPU"]]


def mask_torch(module: Any) -> None:
    """Hide instructions in ``torch.cpu``."""
    get_capabilities = module.get_capabilities

    def masked() -> dict[str, object]:
        capabilities: dict[str, object] = dict(get_capabilities())
        for name in capabilities:
            if name.startswith(HIDDEN):
                capabilities[name] = False
        return capabilities

    module.get_capabilities = masked


def mask_machine(module: Any) -> None:
    """Hide instructions in ``machine.cpuinfo``."""
    cpuinfo = module.cpuinfo

    def masked() -> dict[str, str]:
        report: dict[str, str] = cpuinfo()
        flags = [flag for flag in report.get("flags", "").split() if not flag.startswith(HIDDEN)]
        return {**report, "flags": " ".join(flags)}

    module.cpuinfo = masked


MASKS: dict[str, Callable[[Any], None]] = {
    "torch.cpu": mask_torch,
    "compare_q.backends.common.machine": mask_machine,
}
"""The modules that report the CPU's instructions."""


class MaskedCpu:
    """Finds modules as Python does, and changes the results of their functions after the import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader masks the module after its import.

        None for every other module.
        """
        mask = MASKS.get(name)
        if mask is None:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_mask(module: ModuleType) -> None:
            execute(module)
            mask(module)

        spec.loader.exec_module = execute_and_mask  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, MaskedCpu())
