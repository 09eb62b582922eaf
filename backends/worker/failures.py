"""What an engine's failures mean: what to lower where memory did not suffice, and the death of an engine's process."""

from __future__ import annotations

import multiprocessing
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from compare_q import backends
from compare_q.backends.common.messages import bytes_in_words, one_line

if TYPE_CHECKING:
    from compare_q.backends.worker.messages import DescribeJob, LoadJob

OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|cannot allocate memory|failed to allocate|No available memory for the cache blocks|"
    r"less than desired GPU memory utilization|DefaultCPUAllocator: can't allocate|unable to allocate",
    re.IGNORECASE,
)
"""What torch, CUDA, vLLM, llama.cpp and Python say."""
POLL_S = 0.5
Told = Callable[[str], None]


def memory_advice(job: LoadJob | DescribeJob, error: BaseException) -> str:
    """One line on an error that came of too little memory: what is free, what the model takes; empty for others."""
    if not (isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error))):
        return ""
    weights = None
    with suppress(Exception):  # an error in finding numbers must not hide the one that they are for
        weights = backends.engine_class(job.engine).files(job.request).storage().vram_bits
    numbers = [f"its weights take {bytes_in_words(weights / 8)}"] if weights else []
    numbers += device_memory()
    found = f" ({', '.join(numbers)})" if numbers else ""
    cure = "close what else uses it, give the model more GPUs, or shorten eval_len"
    return f"out of memory{found}: {cure}; the engine says: {one_line(error)}"


def device_memory() -> list[str]:
    """What is free on the GPU that the engine uses, if it has touched one."""
    torch = sys.modules.get("torch")
    with suppress(Exception):
        if torch is not None and torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info()
            return [f"{bytes_in_words(free)} of the GPU's {bytes_in_words(total)} are free"]
    return []


@contextmanager
def watched(tell: Told) -> Iterator[None]:
    """In the block, ``tell`` is called once, from another thread, when a process dies that the engine had before.

    Only a death by a signal counts, or an exit status other than 0: an engine may end its helpers.
    """
    children = multiprocessing.active_children()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            for child in children:
                if child.exitcode:
                    tell(f"{child.name}, a process of its engine, {ending(child.exitcode)}")
                    return

    if children:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def ending(status: int) -> str:
    """How a process ended, by Python's exit code: negative for a signal."""
    with suppress(ValueError):
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
