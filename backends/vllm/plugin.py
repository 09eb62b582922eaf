"""Entry point ``vllm.general_plugins``: 4-bit kernels on CPUs, only in processes that compare_q started.

vLLM runs it in each process of the environment.  It acts only if ``COMPARE_Q_KERNELS`` is 1, which the processes that
vLLM starts for compare_q inherit, so that ``vllm serve`` stays unchanged.
"""

from __future__ import annotations

import os

KERNELS = "COMPARE_Q_KERNELS"
"""Variable that compare_q sets to 1 before it imports vLLM."""


def register() -> None:
    """On the CPU platform, add the kernels that vLLM lacks there, if ``KERNELS`` is set."""
    if os.environ.get(KERNELS) != "1":
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from compare_q.backends.vllm.cpu_kernels import add_kernels

        add_kernels()
