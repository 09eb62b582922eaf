"""Draws from logits against closed forms, seeds, and what sampled tokens must be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from compare_q.backends.base import SampledToken
from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf.sampling import drawn
from compare_q.backends.sampling import Continuations, seed_of
from tests.support.sampled import chi_square_limit

P = torch.tensor([0.0, 0.5, 0.0, 0.125, 0.25, 0.125, 0.0])
LAST_BELOW_1 = 1.0 - 2**-53


@pytest.mark.parametrize(
    ("uniform", "token"),
    [
        (0.0, 1),  # never a token whose probability is 0
        (0.4999999, 1),
        (0.5000001, 3),
        (0.6249999, 3),
        (0.6250001, 4),
        (0.8749999, 4),
        (0.8750001, 5),
        (LAST_BELOW_1, 5),
    ],
)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(uniform: float, token: int) -> None:
    # Logits may have any constant added.
    token_ids, logprobs = drawn(P.log()[None] + 3.0, torch.tensor([uniform], dtype=torch.float64))
    assert token_ids.tolist() == [token]
    assert logprobs[0] == pytest.approx(math.log(P[token]), abs=1e-6)


def test_rare_tokens_have_their_frequencies() -> None:
    """Ten tokens of 1e-3 each, in a vocabulary of 2,000 that are never drawn."""
    p = torch.zeros(2000)
    p[::200] = 1e-3
    p[7] = 0.99
    uniforms = torch.from_numpy(np.random.default_rng(0).random(40_000))
    counts = np.zeros(2000)
    for part in uniforms.split(500):
        token_ids, _ = drawn(p.log().expand(len(part), -1), part)
        np.add.at(counts, token_ids.numpy(), 1)
    assert counts[p.numpy() == 0].sum() == 0
    expected = np.full(10, 40.0)
    chi_square = ((counts[::200] - expected) ** 2 / expected).sum()
    assert chi_square < chi_square_limit(10)


def test_logits_that_are_not_finite_are_an_error() -> None:
    logits = torch.tensor([[0.0, float("nan")]])
    with pytest.raises(ModelError):
        drawn(logits, torch.tensor([0.5], dtype=torch.float64))


def test_no_two_windows_share_random_numbers() -> None:
    """Not even a window of one seed and another window of the next."""
    seeds = [seed_of(seed, prompt) for seed in range(50) for prompt in range(50)]
    assert len(set(seeds)) == 2500
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


@pytest.mark.parametrize("logprob", [0.1, float("nan"), float("-inf"), float("inf")])
def test_a_sampled_token_has_a_log_probability(logprob: float) -> None:
    continuations = Continuations(2, 1)
    with pytest.raises(ModelError, match="prompt 1"):
        continuations.add(SampledToken(1, 5, logprob))


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_every_prompt_has_all_its_tokens(n_tokens: int) -> None:
    """Neither fewer tokens nor more than were requested."""
    continuations = Continuations(1, n_tokens)
    continuations.add(SampledToken(0, 5, -1.0))
    continuations.add(SampledToken(0, 6, -1.0))
    with pytest.raises(ModelError, match=f"2 tokens were sampled, not {n_tokens}"):
        continuations.check()
