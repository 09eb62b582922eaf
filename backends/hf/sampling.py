"""Sample text in Transformers, from the model's whole distribution at temperature 1.

Not by ``generate()``, whose defaults come from the model (temperature, top-k, penalties, suppressed
tokens, end tokens).  A token is the inverse of the cumulative distribution, in float64, at a
uniform random number: in float32, rare tokens would have other frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.errors import ModelError
from ..sampling import SampledToken, seed_of

if TYPE_CHECKING:
    import torch

BATCH = 8
"""Number of prompts that are continued together, each with its KV cache."""


def sampled_tokens(
    model: Any, prompts: Sequence[Sequence[int]], n_tokens: int, seed: int
) -> Iterator[SampledToken]:
    """Yield ``n_tokens`` sampled tokens of each prompt; all prompts have the same length.

    ModelError if the model does not return a KV cache, or if its logits are not finite.
    """
    for begin in range(0, len(prompts), BATCH):
        numbers = range(begin, min(begin + BATCH, len(prompts)))
        yield from tokens_of_batch(model, prompts, numbers, n_tokens, seed)


def tokens_of_batch(
    model: Any, prompts: Sequence[Sequence[int]], numbers: range, n_tokens: int, seed: int
) -> Iterator[SampledToken]:
    """Yield the sampled tokens of the prompts with these ``numbers``, step by step."""
    import torch

    # [B, n]: a prompt has the same random numbers in every batch.
    uniforms = torch.from_numpy(
        np.stack(
            [np.random.default_rng(seed_of(seed, number)).random(n_tokens) for number in numbers]
        )
    )
    next_ids = torch.tensor([list(prompts[number]) for number in numbers], device=model.device)
    cache = None
    for step in range(n_tokens):
        output = model(next_ids, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise ModelError(
                f"{type(model).__name__} returns no past_key_values, without which it cannot "
                "sample text here; sample it in another engine"
            )
        token_ids, logprobs = drawn(output.logits[:, -1], uniforms[:, step])
        for number, token_id, logprob in zip(
            numbers, token_ids.tolist(), logprobs.tolist(), strict=True
        ):
            yield SampledToken(number, token_id, logprob)
        next_ids = token_ids[:, None].to(model.device)


def drawn(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token int64 [B] for each row of logits [B, V], and its log-probability [B].

    ``uniforms`` float64 [B], at least 0 and below 1: the token is the first one up to which the
    probabilities add up to more than this.
    """
    import torch

    logprobs = logits.float().log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1]
    if not bool(torch.isfinite(total).all()):
        raise ModelError("the logits after a sampled token are not finite")
    # The total is 1 up to rounding; a number below 1 is at most 1 - 2**-53, so that no product
    # reaches it.
    points = uniforms.to(total.device) * total
    token_ids = torch.searchsorted(cumulative, points[:, None], right=True)
    return token_ids[:, 0], logprobs.gather(1, token_ids)[:, 0]
