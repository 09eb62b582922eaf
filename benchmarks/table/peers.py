"""Alternatives to compare_q, run on the same machine and windows; each is one kind of job."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

Job = dict[str, Any]
WARM_UP_TOKENS = 32_768
"""Tokens that are run before the clock starts: two full steps of 16,384."""


def windows_of(job: Job) -> Any:
    """Return the windows of a job, int32 [N, L]."""
    return np.load(job["windows"])[: job.get("count")]


def prefill_seconds(engine: Any, windows: Any, sampling: dict[str, Any]) -> float:
    """Return the seconds for all windows, int32 [N, L].

    Each window generates the one token that vLLM requires.
    """
    from vllm import SamplingParams

    began = time.perf_counter()
    for number, window in enumerate(windows):
        params = SamplingParams(
            max_tokens=1,
            detokenize=False,
            # The windows of the warm-up run again: from the prefix cache, they would cost nothing.
            skip_reading_prefix_cache=True,
            **sampling,
        )
        engine.add_request(str(number), {"prompt_token_ids": window.tolist()}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - began


def vllm_alone(job: Job) -> dict[str, Any]:
    """Run vLLM without compare_q and close it again: prefill, after a few windows to warm up.

    The engine core is in this process, as it is in compare_q's workers.  ``arguments``: of
    ``LLM(...)``; ``asked``: sampling parameters of every request, none for prefill alone.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    from vllm import LLM

    windows = windows_of(job)
    began = time.perf_counter()
    llm = LLM(job["model"], skip_tokenizer_init=True, load_format="safetensors", **job["arguments"])
    load_seconds = time.perf_counter() - began
    engine = llm.llm_engine
    n_warm_up = max(1, WARM_UP_TOKENS // windows.shape[1])
    warm_up_seconds = prefill_seconds(engine, windows[:n_warm_up], job["asked"])
    seconds = prefill_seconds(engine, windows, job["asked"])
    engine.engine_core.shutdown()
    # The next job of this process needs the GPU's memory.
    del llm, engine
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "load_seconds": load_seconds,
        "warm_up_seconds": warm_up_seconds,
        "seconds": seconds,
    }


def transformers_loop(job: Job) -> dict[str, Any]:
    """Run one window at a time through Transformers in bf16, and log_softmax in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16).to(device)

    def score(windows: Any) -> float:
        began = time.perf_counter()
        total = 0.0
        for window in windows:
            ids = torch.from_numpy(window).long().to(device)[None]
            logits = model(ids, use_cache=False).logits[0, :-1].float()
            # item() waits for the GPU, as a loop that uses the number does.
            total += logits.log_softmax(-1).gather(1, ids[0, 1:, None]).sum().item()
        return time.perf_counter() - began

    with torch.inference_mode():
        score(windows_of(job)[:1])
        return {"seconds": score(windows_of(job))}


def lm_eval_vllm(job: Job) -> dict[str, Any]:
    """Run lm-eval's vLLM model on token ids, as its rolling log-likelihood passes them.

    It computes perplexity only.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from lm_eval.models.vllm_causallms import VLLM

    model = VLLM(pretrained=job["model"], batch_size="auto", **job["arguments"])

    def score(windows: Any) -> float:
        requests = [(("", ""), window[:1].tolist(), window[1:].tolist()) for window in windows]
        began = time.perf_counter()
        model._loglikelihood_tokens(requests, disable_tqdm=True)
        return time.perf_counter() - began

    score(windows_of(job)[:1])
    return {"seconds": score(windows_of(job))}


KINDS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "vllm": vllm_alone,
    "transformers": transformers_loop,
    "lm_eval": lm_eval_vllm,
}


def jobs_of(prefill_job: Job, count: int) -> Iterator[tuple[str, Job | str]]:
    """Yield each peer's name and its job, or why it cannot run.

    ``prefill_job``: a job of prefill alone.
    """
    vllm = {**prefill_job, "count": count}
    arguments = {name: value for name, value in vllm["arguments"].items() if name != "load_format"}
    peers: dict[str, Job] = {
        "vLLM, prefill alone": vllm,
        "vLLM, prompt_logprobs=20": {**vllm, "asked": {"prompt_logprobs": 20}},
        "lm-eval, vLLM": {**vllm, "kind": "lm_eval", "arguments": arguments},
        "Transformers, batch 1": {**vllm, "kind": "transformers"},
    }
    for name, job in peers.items():
        # A kind has the name of the module that it needs.
        if find_spec(job["kind"]):
            yield name, job
        else:
            yield name, f"n/a: {job['kind']} is not installed"
