"""Decode in vLLM: options, arguments, memory, and the check that decode scores what prefill does.

Each step has the next ``step`` tokens of each of ``batch`` windows.  ``decode_steps.py`` counts
them in the ranks.

The check scores short windows in both ways, once per model.  The mean difference of their
log-probabilities, in nats, is compared with the largest difference that rounding explains.  Correct
models differ by 0.0001 in float32 on a CPU, 0.05 to 0.07 in bfloat16 (SmolLM2-135M).  If
activations or cached keys are rounded to few bits, a different rounding anywhere moves them by a
whole step; the difference is then 0.44 with W8A8 and 1.33 with NVFP4 and 4-bit activations.  This
check does not find a smaller fault, or a fault that begins later; such a fault appears in the row's
KLD.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Decode, Window
from ..common.errors import InputError, ModelError
from ..layers import noise
from .driver import Floats, VllmDriver
from .scoring_plan import ScoringPlan
from .vllm_scores import token_scores

LARGEST_KV_BLOCK = 256
"""Tokens of a KV cache's largest block, which may extend beyond the end of a window."""
SET_IN_DECODE = {
    "long_prefill_token_threshold": "step",
    "max_num_seqs": "batch",
    "enable_prefix_caching": "",
    "long_prefill_token_threshold_adaptive": "",
    "enable_chunked_prefill": "",
    "max_num_partial_prefills": "",
    "max_long_partial_prefills": "",
}
"""Options that compare_q sets in decode because they decide a step's tokens.

Each has the key of the spec to give instead; "" if no key replaces the option.
"""
# Limits in nats of the mean difference from prefill.
ROUNDED = 2.0  # rounded activations
SIXTEEN_BITS = 0.25
TENSOR_FLOAT = 0.05  # float32 on a GPU, whose products may have 10 bits
FLOAT32 = 0.001  # float32 on a CPU


def check_options(decode: Decode, options: Mapping[str, Any]) -> None:
    """Raise InputError if an option conflicts with decode.

    Options of ``SET_IN_DECODE`` must not be given.  ``max_num_batched_tokens`` must hold a step:
    ``step`` tokens of each of ``batch`` windows.
    """
    for name, replacement in SET_IN_DECODE.items():
        if options.get(name) is None:
            continue
        instead = "leave it out"
        if replacement:
            instead = f'give "{replacement}" beside "phase" in its place'
        raise InputError(f'engine.{name}: set by compare_q with "phase": "decode"; {instead}')
    tokens = decode.step * decode.batch
    batched = options.get("max_num_batched_tokens")
    if batched is not None and batched < tokens:
        raise InputError(
            f"engine.max_num_batched_tokens: {batched} holds no step of {tokens} tokens "
            "(step x batch)"
        )


def llm_arguments(decode: Decode, options: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of ``LLM(...)`` that decide a step's tokens."""
    # A GPU's compiled graphs stay on, as in serving; noise needs hooks, which graphs do not run.
    is_eager = cpu or noise.seed_of(options) is not None
    return {
        "long_prefill_token_threshold": decode.step,
        "max_num_seqs": decode.batch,
        "enable_prefix_caching": False,
        "enforce_eager": is_eager,
    }


def cached_tokens(decode: Decode, longest: int) -> int:
    """Return the tokens in the KV cache of a batch of windows of ``longest`` tokens."""
    return decode.batch * (longest + LARGEST_KV_BLOCK)


class PrefillCheck:
    """Compares decode with prefill.

    ``mean_difference``: of log-probabilities, in nats; None if they were not compared.
    """

    def __init__(self, step: int, *, on_cpu: bool) -> None:
        self.step = step
        self.on_cpu = on_cpu
        self.mean_difference: float | None = None

    def check(
        self,
        driver: VllmDriver,
        windows: Sequence[Window],
        decoded: Mapping[int, Floats],
        *,
        gathered: bool,
    ) -> None:
        """Raise ModelError unless decode scores windows as prefill does.

        ``decoded``: window -> log-probabilities in decode.
        """
        prefill_logprobs = self.prefill_logprobs(driver, windows, gathered=gathered)
        # With the scheduler in another process, vLLM prefills a window that is alone in the queue
        # from 0.32 on; earlier versions decode it, which takes more steps.
        is_prefill = driver.n_steps < len(windows[-1].token_ids) // self.step
        layers, caches = driver.what_ran()
        formats = [layer.activations for layer in layers]
        formats += [cache.stored for cache in caches]
        most = limit(formats, on_gpu=not self.on_cpu)
        decoded_logprobs = np.concatenate([decoded[window.index] for window in windows])
        mean_difference = difference(decoded_logprobs, np.concatenate(prefill_logprobs))
        if is_prefill:
            self.mean_difference = mean_difference
        else:
            self.mean_difference = None
        message = fault(mean_difference, most)
        if message:
            raise ModelError(message)

    def prefill_logprobs(
        self, driver: VllmDriver, windows: Sequence[Window], *, gathered: bool
    ) -> list[Floats]:
        """Return the log-probabilities of each window, scored alone in prefill."""
        plan = ScoringPlan(gathered=gathered)
        # The threshold cuts a prompt into decode steps; with 0 it is scored at once.  The scheduler
        # reads it in each step if it is in this process.
        scheduler = driver.llm.llm_engine.vllm_config.scheduler_config
        threshold = scheduler.long_prefill_token_threshold
        step = driver.step
        driver.step = None
        scheduler.long_prefill_token_threshold = 0
        logprobs = []
        try:
            for window in windows:
                for scores in token_scores(driver, [window], plan):
                    logprobs.append(scores.logprob)
        finally:
            driver.step = step
            scheduler.long_prefill_token_threshold = threshold
        return logprobs


def limit(formats: Iterable[str], *, on_gpu: bool) -> float:
    """Return the largest mean difference that rounding explains, in nats.

    ``formats``: number formats of the layers' activations and of cached keys, as in ``Layer`` and
    ``KVCache``.
    """
    kinds = set(formats)
    if any(not kind.startswith(("bfloat", "float")) for kind in kinds):
        return ROUNDED
    if kinds != {"float32"}:
        return SIXTEEN_BITS
    if on_gpu:
        return TENSOR_FLOAT
    return FLOAT32


def difference(decoded: NDArray[np.floating], prefill: NDArray[np.floating]) -> float:
    """Return the mean |decoded - prefill| of log-probabilities [T], nats.

    Tokens that prefill excludes do not count.
    """
    is_finite = np.isfinite(prefill)
    if not is_finite.any():
        return 0.0
    differences = np.asarray(decoded - prefill, np.float64)[is_finite]
    return float(np.abs(differences).mean())


def fault(mean_difference: float, most: float) -> str:
    """Return how decode differs from prefill; empty if ``most``, the ``limit``, explains it."""
    if mean_difference <= most:
        return ""
    return (
        f"phase: the log-probabilities of a short text differ by {mean_difference:.3g} nats on "
        f"average between decode and prefill, and roundings explain {most:g}: this engine does not "
        "decode this model right"
    )
