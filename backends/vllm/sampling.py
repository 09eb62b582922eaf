"""Sample text in vLLM, from the model's whole distribution at temperature 1.

Every parameter that could change the distribution is written out, so that no default of the model's
``generation_config.json`` or of vLLM applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..common.errors import ModelError
from ..sampling import SampledToken, seed_of
from .decode import LARGEST_KV_BLOCK
from .driver import VllmDriver, paused

EXACT_NOISE = "use_fp64_gumbel"
"""vLLM's option, where it exists, that draws tokens by noise in float64.

In float32, tokens with probabilities below 1e-7 have other frequencies, because the noise has too
few digits there.
"""
NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": True,
    "stop": None,
    "stop_token_ids": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
}
"""Sampling parameters that leave the distribution as it is, and end at no token."""
NEUTRAL_IF_KNOWN: Mapping[str, Any] = {"watermarking": False}
"""Parameters of later versions of vLLM."""


def sampled_tokens(
    driver: VllmDriver, prompts: Sequence[Sequence[int]], n_tokens: int, seed: int
) -> Iterator[SampledToken]:
    """Yield ``n_tokens`` sampled tokens of each prompt, as vLLM returns them.

    All prompts have the same length.
    """
    batch = batch_size(driver, len(prompts[0]), n_tokens)
    for begin in range(0, len(prompts), batch):
        numbers = range(begin, min(begin + batch, len(prompts)))
        yield from tokens_of_batch(driver, prompts, numbers, n_tokens, seed)


def batch_size(driver: VllmDriver, prompt_length: int, n_tokens: int) -> int:
    """Return how many prompts are continued together, at least 1.

    Their windows fit the KV cache: otherwise vLLM would drop the cache of some, and compute it
    again.  All prompts fit the first step: vLLM cannot split a prompt of a request with a seed on a
    CPU (its random numbers cannot be set back).
    """
    config = driver.llm.llm_engine.vllm_config
    n_blocks: int = config.cache_config.num_gpu_blocks or 0
    cached_tokens: int = n_blocks * config.cache_config.block_size
    scheduler = config.scheduler_config
    in_cache = cached_tokens // (prompt_length + n_tokens + LARGEST_KV_BLOCK)
    in_step: int = scheduler.max_num_batched_tokens // prompt_length
    most_requests: int = scheduler.max_num_seqs
    return max(min(in_cache, in_step, most_requests), 1)


def tokens_of_batch(
    driver: VllmDriver,
    prompts: Sequence[Sequence[int]],
    numbers: range,
    n_tokens: int,
    seed: int,
) -> Iterator[SampledToken]:
    """Yield the sampled tokens of the prompts with these ``numbers``.

    ModelError if vLLM ends before all requests have ended.
    """
    engine = driver.llm.llm_engine
    unfinished = {f"sampled {number}": number for number in numbers}
    try:
        # All are queued before the first step, so that the batches are the same every time.
        with paused(engine):
            for name, number in unfinished.items():
                params = sampling_params(n_tokens, seed_of(seed, number))
                engine.add_request(name, {"prompt_token_ids": list(prompts[number])}, params)
        while unfinished and engine.has_unfinished_requests():
            for output in engine.step():
                # Another request may have been queued before, and aborted.
                if output.request_id not in unfinished:
                    continue
                yield from new_tokens(unfinished[output.request_id], output)
                if output.finished:
                    del unfinished[output.request_id]
    except BaseException:  # also if the caller stops iterating
        driver.interrupt(list(unfinished), scored=False)
        raise
    if unfinished:
        raise ModelError(f"vLLM returned no end of {len(unfinished)} sampled windows")


def sampling_params(n_tokens: int, seed: int) -> Any:
    """Return vLLM's ``SamplingParams`` of one request, which returns only new tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    later = {}
    for name, value in NEUTRAL_IF_KNOWN.items():
        if hasattr(SamplingParams, name):
            later[name] = value
    return SamplingParams(
        **NEUTRAL,
        **later,
        seed=seed,
        max_tokens=n_tokens,
        logprobs=0,
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.DELTA,
    )


def new_tokens(number: int, output: Any) -> Iterator[SampledToken]:
    """Yield the tokens in a ``RequestOutput`` of the prompt with this number."""
    (completion,) = output.outputs
    token_ids = completion.token_ids
    entries = completion.logprobs
    if len(entries or ()) != len(token_ids):
        raise ModelError(f"prompt {number}: vLLM returned no log-probability of a sampled token")
    for token_id, entry in zip(token_ids, entries, strict=True):
        yield SampledToken(number, token_id, entry[token_id].logprob)
