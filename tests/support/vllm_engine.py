"""A real vLLM in float32 for tests: its start, its windows, and the correct scores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import Decode, PlannedModel, ScoreRequest, TokenScores, Window
from compare_q.backends.common.process import captured
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.toy import (
    GPU,
    TOY_CONTEXT,
    TOY_VOCAB,
    brute_force,
    planned,
    toy_windows,
    with_gaps,
)

EAGER: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}
EXACT_TOLERANCE = 1e-5
if GPU:
    EAGER["gpu_memory_utilization"] = 0.05
    # Products of other shapes differ by up to 3e-4 in TF32.
    EXACT_TOLERANCE = 1e-3
FIELDS = ("logprob", "entropy", "top1_logprob", "ref_logprob", "ref_top1_logprob", "kld")
WINDOWS = [
    *toy_windows(4, 100),
    replace(with_gaps(toy_windows(1)[0]), index=4),
    replace(toy_windows(1, 150, 20)[0], index=5),
]

ARGUMENTS = frozenset(
    {
        "attention_backend",
        "dtype",
        "enforce_eager",
        "gpu_memory_utilization",
        "hf_overrides",
        "kv_cache_dtype",
        "kv_sharing_fast_prefill",
        "linear_backend",
        "load_format",
        "logprobs_mode",
        "max_model_len",
        "max_num_batched_tokens",
        "model",
        "moe_backend",
        "quantization",
        "quantization_config",
        "revision",
        "spec_method",
        "speculative_config",
        "tensor_parallel_size",
        "trust_remote_code",
    }
)
"""Some of the arguments of ``vllm.LLM(...)``, for tests that do not need an installed vLLM."""
WORDS = {
    "kv_cache_dtype": frozenset(
        {"auto", "bfloat16", "fp8", "fp8_e4m3", "int4_per_token_head", "turboquant_k8v4"}
    ),
    "attention_backend": frozenset({"FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"}),
}
"""Some of the values that two of these arguments accept."""


def request_for(folder: Path, tokens: int = 100, **options: Any) -> PlannedModel:
    return planned("toy", "vllm_score", str(folder), tokens, {**EAGER, **options})


@contextmanager
def engine(
    folder: Path,
    log: Path,
    tokens: int = TOY_CONTEXT,
    *,
    decode: Decode | None = None,
    alone: bool = False,
    **options: Any,
) -> Iterator[VllmEngine]:
    """Yield a vLLM; its variables are in this process's environment only while it starts.

    On a CPU it runs in this process, as in a compare_q worker: two processes that import vLLM take
    35 s, this takes 1.  ``alone``: run it in a separate process, as a mixture needs, because
    experts have their own process group.
    """
    engine = VllmEngine(request_for(folder, tokens, **options).updated(log_file=log, decode=decode))
    sharing: Any = in_one_process
    if alone or options.get("tensor_parallel_size", 1) > 1:
        sharing = nullcontext
    # The engine may outlive the test.
    try:
        with as_before(), sharing(), captured(log):
            engine.load()
        yield engine
    finally:
        with as_before(), sharing():
            engine.close()


@contextmanager
def in_one_process() -> Iterator[None]:
    """Let engines share this process on a CPU; on a GPU each has its own.

    Each reads the environment again, and the process group is kept for all.
    """
    if GPU:
        yield
        return
    from vllm import envs
    from vllm.v1.engine import core

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr(core, "cleanup_dist_env_and_memory", lambda: None)
        # vLLM replaces this function; the patch restores it.
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        envs.disable_envs_cache()
        yield
        envs.disable_envs_cache()


@contextmanager
def as_before() -> Iterator[None]:
    """Restore the environment of this process afterwards."""
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)


def scores_of(
    engine: VllmEngine, windows: list[Window], task: ScoreRequest | None = None
) -> dict[int, TokenScores]:
    return {scores.window: scores for scores in engine.score(windows, task or ScoreRequest())}


def against(store: Path, vocab_size: int = TOY_VOCAB) -> ScoreRequest:
    return ScoreRequest(reference=store, vocab_size=vocab_size)


def assert_exact(
    scores: TokenScores, logits: torch.Tensor, window: Window, atol: float, ref: Any = None
) -> None:
    """Compare every score with float64 results from whole logits [L, V]."""
    scored = torch.from_numpy(window.positions - 1).long()
    targets = torch.from_numpy(window.targets).long()
    q = logits[scored].double().log_softmax(-1)
    gold = {
        "logprob": np.array(brute_force(logits, window)),
        "entropy": -(q.exp() * q).sum(-1).numpy(),
        "top1_logprob": q.max(-1).values.numpy(),
    }
    if ref is not None:
        p = ref[scored].double().log_softmax(-1)
        gold |= {
            "kld": (p.exp() * (p - q)).sum(-1).numpy(),
            "ref_logprob": np.array(brute_force(ref, window)),
            "ref_top1_logprob": p.max(-1).values.numpy(),
        }
        np.testing.assert_array_equal(scores.same_top, (p.argmax(-1) == q.argmax(-1)).numpy())
    np.testing.assert_array_equal(scores.top1, (q.argmax(-1) == targets).numpy())
    for field, value in gold.items():
        np.testing.assert_allclose(getattr(scores, field), value, atol=atol, rtol=0)
