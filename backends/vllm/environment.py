"""vLLM's environment variables: those that can change a score, and what vLLM takes from nowhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backends.base import LoadRequest
from backends.common import machine
from backends.common.lifeline import in_worker
from backends.vllm import install, plugin

HARMLESS = re.compile(
    "VLLM_(LOGGING|CONFIGURE_LOGGING|LOG_|NO_USAGE|DO_NOT_TRACK|USAGE|CACHE_ROOT|CONFIG_ROOT|WORKER_MULTIPROC_METHOD|"
    "ALLOW_LONG_MAX_MODEL_LEN|ENABLE_V1_MULTIPROCESSING|HOST_IP|PORT|API_KEY)"
)
"""What the names of variables begin with that change no score."""
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
LONGER_THAN_CONTEXT = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def kernel_environment() -> dict[str, str]:
    """The VLLM_* variables that are set and may choose kernels or precision (VLLM_CPU_INT4_W4A8, ...)."""
    threads = {RESERVED: "0"} if install.is_cpu_build() else {}
    return threads | machine.variables(("VLLM_",), HARMLESS)


def set_environment(*, verbose: bool) -> None:
    """Set what vLLM only takes from the environment, before it is imported; a variable that the user has set stays.

    Processes that vLLM starts inherit the variable that wakes our plugin.
    """
    os.environ[plugin.KERNELS] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # A fork of this process fails with "CUDA error: initialization error" if anything here has touched CUDA, and vLLM
    # notices only what went through torch.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if install.is_cpu_build():
        # vLLM keeps one core back for its front end, which idles here: two windows of 2048 took 20 s on 1 of 2 cores,
        # 6.5 s on both.
        os.environ.setdefault(RESERVED, "0")
        # What vLLM keeps of compiled models is not told apart by instruction sets either (``machine``).
        kept = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(kept) / "vllm" / machine.instruction_sets()))


def set_ranks(count: int) -> None:
    """The same for a model of so many ranks, which vLLM asks for while it loads."""
    if in_worker() and count == 1:
        # The engine core in this process: a table of two small models took 24 s on two cores, 63 s with a process more.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if install.is_cpu_build() and count > 1:  # by itself vLLM wants a NUMA node a rank
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", shared_cores(count))


def shared_cores(parts: int) -> str:
    """This process's cores in equal parts, in vLLM's notation: ``0,1|2,3`` for two parts."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // parts, 1)
    return "|".join(",".join(map(str, cores[part * each : (part + 1) * each] or cores[-1:])) for part in range(parts))


@contextmanager
def one_more_than(context: int | None, request: LoadRequest) -> Iterator[None]:
    """Let vLLM accept ``max_model_len`` = context + 1, where the windows are exactly as long as the context.

    The one token that vLLM must generate is sampled from the window's last position and never fed back, so no position
    beyond the context is computed.
    """
    if request.max_tokens != context or LONGER_THAN_CONTEXT in os.environ:
        yield
        return
    os.environ[LONGER_THAN_CONTEXT] = "1"
    try:
        yield
    finally:
        del os.environ[LONGER_THAN_CONTEXT]
