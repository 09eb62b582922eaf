"""Transformers and vLLM sample from the whole distribution, whatever a model's defaults are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import Engine
from compare_q.backends.sampling import Continuations
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.sampled import (
    CELLS,
    chi_square_limit,
    chi_square_of_ranks,
    collected,
    exact_logprobs,
    with_generation_defaults,
)
from tests.support.toy import TOY_VOCAB
from tests.support.transformers_models import loaded
from tests.support.vllm_engine import engine

pytestmark = pytest.mark.engine

N_PROMPTS = 160
N_TOKENS = 24
PROMPTS = np.random.default_rng(3).integers(0, 256, (N_PROMPTS, 8)).tolist()
Sampler = Callable[[], Engine]


@pytest.fixture(scope="module")
def model(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy, whose generation_config.json would change every sample."""
    return with_generation_defaults(toy_model, tmp_path_factory.mktemp("sampled") / "toy")


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def sampler(request: pytest.FixtureRequest, model: Path, logs: Path) -> Iterator[Engine]:
    if request.param == "transformers":
        backend: Engine = loaded(model, dtype="float32")
        yield backend
        backend.close()
    else:
        pytest.importorskip("vllm")
        with engine(model, logs / "sampler.log") as backend:
            yield backend


@pytest.fixture(scope="module")
def sampled(sampler: Engine) -> Continuations:
    return collected(sampler.sample(PROMPTS, N_TOKENS, 1), N_PROMPTS, N_TOKENS)


@pytest.fixture(scope="module")
def exact(model: Path, sampled: Continuations) -> Any:
    """Log-probabilities [N, V] in which each token was drawn."""
    from transformers import AutoModelForCausalLM

    exact_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return exact_logprobs(exact_model, PROMPTS, sampled)


def test_frequencies_are_the_model_s(sampled: Continuations, exact: Any) -> None:
    """Chi-square over places in the cumulative distribution, and over token ids."""
    token_ids = np.concatenate(sampled.token_ids)
    assert chi_square_of_ranks(exact, token_ids) < chi_square_limit(CELLS - 1)
    observed = np.bincount(token_ids, minlength=TOY_VOCAB)
    # Counts are sums of independent draws from different distributions: their variance is less
    # than that of draws from one.
    expected = np.exp(exact).sum(0)
    assert expected.min() > 2
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < chi_square_limit(TOY_VOCAB - 1)


def test_the_recorded_log_probabilities_are_those_of_the_draws(
    sampled: Continuations, exact: Any
) -> None:
    token_ids = np.concatenate(sampled.token_ids)
    drawn = exact[np.arange(len(token_ids)), token_ids]
    np.testing.assert_allclose(np.concatenate(sampled.logprobs), drawn, atol=2e-4)


def test_perplexity_of_own_samples_is_that_of_the_entropy(
    sampled: Continuations, exact: Any
) -> None:
    """ln p(x) + H(p) has the expectation 0 at every token."""
    entropy = -(np.exp(exact) * exact).sum(1)
    values = np.concatenate(sampled.logprobs) + entropy
    assert abs(values.mean()) < 4 * values.std() / np.sqrt(len(values))


def test_the_same_seed_gives_the_same_tokens(sampler: Engine, sampled: Continuations) -> None:
    again = collected(sampler.sample(PROMPTS, N_TOKENS, 1), N_PROMPTS, N_TOKENS)
    assert again.token_ids == sampled.token_ids
    assert again.logprobs == sampled.logprobs
    other = collected(sampler.sample(PROMPTS, N_TOKENS, 2), N_PROMPTS, N_TOKENS)
    n_equal = np.sum(np.equal(other.token_ids, sampled.token_ids))
    # Two draws from one distribution are seldom equal, two from different ones even less often.
    assert n_equal < N_PROMPTS * N_TOKENS / 10


def test_equal_prompts_have_independent_samples(sampler: Engine) -> None:
    """One prompt many times: the first token's frequencies, and no two equal continuations."""
    prompts = [PROMPTS[0]] * N_PROMPTS
    continuations = collected(sampler.sample(prompts, 12, 3), N_PROMPTS, 12)
    assert len({tuple(token_ids) for token_ids in continuations.token_ids}) == N_PROMPTS


def test_prompts_are_never_split(toy_engine: VllmEngine) -> None:
    """A step of this engine has 64 tokens, and so two of these prompts."""
    prompts = np.random.default_rng(4).integers(0, 256, (5, 30)).tolist()
    continuations = collected(toy_engine.sample(prompts, 7, 1), 5, 7)
    assert {len(token_ids) for token_ids in continuations.token_ids} == {7}
