"""vLLM alone, with nothing of compare_q: how long it takes over the same windows.

The seconds go from the first request queued to the last finished, after a pass over a few windows that warms up; the
engine core is in this process, as it is in compare_q's workers.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

from benchmarks.table.jobs import Job, windows_of

WARM_UP_TOKENS = 32_768
"""Tokens that are run before the clock starts: two full steps of 16,384."""


def run(engine: Any, windows: Any, asked: dict[str, Any]) -> float:
    """Seconds for all windows, int32 [N, L], each generating the one token that vLLM insists on."""
    from vllm import SamplingParams

    began = time.perf_counter()
    for number, window in enumerate(windows):
        params = SamplingParams(max_tokens=1, detokenize=False, skip_reading_prefix_cache=True, **asked)
        engine.add_request(str(number), {"prompt_token_ids": window.tolist()}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - began


def measure(job: Job) -> dict[str, Any]:
    """One job, in a vLLM of its own, which is closed again.

    ``arguments``: of ``LLM(...)``; ``asked``: sampling parameters of every request, none for prefill alone.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    from vllm import LLM

    windows = windows_of(job)
    began = time.perf_counter()
    llm = LLM(job["model"], skip_tokenizer_init=True, load_format="safetensors", **job["arguments"])
    loaded = time.perf_counter() - began
    engine = llm.llm_engine
    first = run(engine, windows[: max(1, WARM_UP_TOKENS // windows.shape[1])], job["asked"])
    seconds = run(engine, windows, job["asked"])
    engine.engine_core.shutdown()
    del llm, engine
    gc.collect()
    torch.cuda.empty_cache()
    return {"load_seconds": loaded, "warm_up_seconds": first, "seconds": seconds}
