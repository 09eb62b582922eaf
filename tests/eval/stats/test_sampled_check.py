"""The check of sampled tokens, on tokens that are drawn from distributions in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from compare_q.eval.stats.sampled_check import sampling_notes, standard_scores

N = 20_000
V = 30


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def drawn(
    model: np.ndarray, sampler: np.ndarray, seed: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Draw a token from each row of the sampler's log-probabilities [N, V].

    Returns (columns of scores by the model's log-probabilities [N, V], the sampler's of the drawn
    tokens).
    """
    uniforms = np.random.default_rng(seed).random((len(model), 1))
    tokens = (np.exp(sampler).cumsum(1) < uniforms).sum(1)
    rows = np.arange(len(model))
    columns = {
        "logprob": model[rows, tokens],
        "entropy": -(np.exp(model) * model).sum(1),
        "top1": tokens == model.argmax(1),
        "top1_logprob": model.max(1),
    }
    typed = {name: column.astype(np.float32) for name, column in columns.items()}
    return typed, sampler[rows, tokens].astype(np.float32)


LOGITS = np.random.default_rng(5).normal(0.0, 2.0, (N, V))
MODEL = logprobs_of(LOGITS)


def test_tokens_of_the_model_pass() -> None:
    scores = [standard_scores(*drawn(MODEL, MODEL, seed)) for seed in range(40)]
    values = np.array(scores)
    # 80 standard normal variables.
    assert np.abs(values).max() < 4
    assert 0.7 < values.std() < 1.3
    assert sampling_notes(*drawn(MODEL, MODEL)) == []


def test_weights_correct_a_sampler_that_differs() -> None:
    """With the weights p / s, tokens of another distribution pass; without them, they do not."""
    noise = np.random.default_rng(6).normal(0.0, 0.3, (N, V))
    columns, sampler_logprobs = drawn(MODEL, logprobs_of(LOGITS * 0.95 + noise))
    assert sampling_notes(columns, sampler_logprobs) == []
    assert len(sampling_notes(columns, columns["logprob"])) == 1


@pytest.mark.parametrize("temperature", [0.9, 1.1])
def test_another_temperature_is_noticed(temperature: float) -> None:
    """The recorded log-probabilities are those of the model, as servers return them."""
    columns, _ = drawn(MODEL, logprobs_of(LOGITS / temperature))
    assert len(sampling_notes(columns, columns["logprob"])) == 1


def test_rare_tokens_that_are_never_drawn_are_noticed() -> None:
    """Top-k, of which the sampler's log-probabilities say nothing."""
    eighth = np.sort(LOGITS, 1)[:, [-8]]
    cut = np.where(eighth <= LOGITS, LOGITS, -np.inf)
    with np.errstate(divide="ignore"):
        columns, _ = drawn(MODEL, logprobs_of(cut))
    assert len(sampling_notes(columns, columns["logprob"])) == 1


def test_the_share_of_the_top_token_is_checked_too() -> None:
    """Draws whose mean of ln p is right: only the share of the most probable token is wrong."""
    p = np.array([0.5, 0.3, 0.2])
    # The change has the sum 0, and the product 0 with ln p.
    second = np.log(p[0] / p[2]) / np.log(p[2] / p[1])
    change = np.array([1.0, second, -1.0 - second])
    assert change @ np.log(p) == pytest.approx(0)
    sampler = np.tile(np.log(p - 0.05 * change), (N, 1))
    columns, _ = drawn(np.tile(np.log(p), (N, 1)), sampler)
    scores = standard_scores(columns, columns["logprob"])
    assert scores is not None
    assert abs(scores.surprise) < 4
    assert scores.top < -10
    assert len(sampling_notes(columns, columns["logprob"])) == 1


def test_only_sampled_tokens_count() -> None:
    """Tokens of another text, with NaN, are left out; few tokens are not checked."""
    columns, sampler_logprobs = drawn(MODEL, MODEL)
    other, _ = drawn(MODEL, logprobs_of(LOGITS / 0.5))
    both = {name: np.concatenate((columns[name], other[name])) for name in columns}
    unknown = np.full(N, np.nan, np.float32)
    scores = standard_scores(both, np.concatenate((sampler_logprobs, unknown)))
    assert scores == standard_scores(columns, sampler_logprobs)
    assert standard_scores(both, np.full(2 * N, np.nan, np.float32)) is None


def test_without_entropy_nothing_is_said() -> None:
    columns, sampler_logprobs = drawn(MODEL, logprobs_of(LOGITS / 0.5))
    del columns["entropy"]
    assert sampling_notes(columns, sampler_logprobs) == []
    assert sampling_notes(columns, None) == []
