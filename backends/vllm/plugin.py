"""What vLLM loads of compare_q where it is installed: 4-bit kernels on CPUs, for compare_q's own processes alone.

Installed, ``register`` is an entry point of the group ``vllm.general_plugins``, which every vLLM of the environment
runs in each of its processes.  It acts only where the environment says that compare_q asked for it, so that ``vllm
serve`` is vLLM; the processes that vLLM starts for compare_q inherit the variable.
"""

from __future__ import annotations

import os

KERNELS = "COMPARE_Q_KERNELS"
"""The variable that compare_q sets to 1 before it imports vLLM."""


def register() -> None:
    """On the CPU platform, give vLLM the kernels that it lacks there, if ``KERNELS`` asks for them; else nothing."""
    if os.environ.get(KERNELS) != "1":
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from compare_q.backends.vllm.cpu_kernels import add_kernels

        add_kernels()
