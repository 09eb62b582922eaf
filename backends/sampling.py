"""Text that a model samples: tokens that an engine yields, their seeds, and what they must be."""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

from .common.errors import ModelError


class SampledToken(NamedTuple):
    """A token that a model has drawn after a prompt and its own tokens before this one.

    Attributes:
        prompt: index of the prompt.
        token_id: the token.
        logprob: its log-probability in the distribution that it was drawn from, in nats.
    """

    prompt: int
    token_id: int
    logprob: float


class Continuations:
    """The sampled tokens of all prompts, collected in the order in which each prompt's come."""

    def __init__(self, n_prompts: int, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.token_ids: list[list[int]] = [[] for _ in range(n_prompts)]
        self.logprobs: list[list[float]] = [[] for _ in range(n_prompts)]

    def add(self, token: SampledToken) -> None:
        """Add a token; ModelError if its log-probability is not that of a token."""
        prompt, token_id, logprob = token
        if not math.isfinite(logprob) or logprob > 0.0:
            position = len(self.token_ids[prompt])
            raise ModelError(
                f"prompt {prompt}: sampled token {position}, id {token_id}, has the "
                f"log-probability {logprob}"
            )
        self.token_ids[prompt].append(token_id)
        self.logprobs[prompt].append(logprob)

    def check(self) -> None:
        """ModelError unless every prompt has all its tokens."""
        for prompt, token_ids in enumerate(self.token_ids):
            if len(token_ids) != self.n_tokens:
                raise ModelError(
                    f"prompt {prompt}: {len(token_ids)} tokens were sampled, not {self.n_tokens}"
                )


def seed_of(seed: int, prompt: int) -> int:
    """Return the seed of the tokens after one prompt, at least 0 and below 2**63.

    It is a hash: with ``seed + prompt``, prompt 1 of seed 0 and prompt 0 of seed 1 would have the
    same random numbers.
    """
    digest = hashlib.sha256(f"{seed} {prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
