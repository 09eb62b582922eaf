"""The temperature of one model's scores as another's: closed forms, a wide vocabulary, and noise of
quantization.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compare_q.eval.stats.temperature import fit, scale_note

TOKENS = 1000
VOCABULARY = 500
Logits = NDArray[np.float64]


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(1, keepdims=True)
    log_probabilities: Logits = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return log_probabilities


def of_targets(logits: Logits, targets: NDArray[Any]) -> Logits:
    logprobs: Logits = log_softmax(logits)[np.arange(len(targets)), targets]
    return logprobs


def scores_of(logits: Logits, targets: NDArray[Any]) -> dict[str, Logits]:
    every = log_softmax(logits)
    entropy = -(np.exp(every) * every).sum(1)
    return {
        "logprob": of_targets(logits, targets),
        "entropy": entropy,
        "top1_logprob": every.max(1),
    }


@pytest.fixture(scope="module")
def model() -> tuple[Logits, NDArray[Any]]:
    """Logits of positions between certain and unsure, and a target drawn from each."""
    random = np.random.default_rng(0)
    logits = random.normal(0, 1, (TOKENS, VOCABULARY)) * random.uniform(1, 4, (TOKENS, 1))
    logits[:, 0] += random.uniform(0, 12, TOKENS)
    # The argmax of log-probabilities plus Gumbel noise is a draw from the distribution.
    targets = (log_softmax(logits) + random.gumbel(size=logits.shape)).argmax(1)
    return logits, targets


@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 1.5])
def test_one_probable_token_among_equal_ones(temperature: float) -> None:
    """The estimate of the normalizer is exact for such a distribution."""
    logits = np.zeros((TOKENS, 50))
    logits[:, 0] = np.linspace(0.5, 8, TOKENS)
    targets = np.arange(TOKENS) % 50
    best_fit = fit(scores_of(logits, targets), of_targets(logits / temperature, targets))
    assert best_fit is not None
    # The tried temperatures are 1.2 % apart, so that the nearest one is within 0.6 %.
    assert best_fit.temperature == pytest.approx(temperature, rel=0.01)
    assert best_fit.explained > 0.99


@pytest.mark.parametrize("temperature", [0.5, 0.7, 0.9, 1.1, 1.5])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_same_model_at_another_temperature(
    model: tuple[Logits, NDArray[Any]], temperature: float, noise: float
) -> None:
    logits, targets = model
    other = (logits + np.random.default_rng(1).normal(0, noise, logits.shape)) / temperature
    best_fit = fit(scores_of(logits, targets), of_targets(other, targets))
    assert best_fit is not None
    # Here the normalizer is an estimate, as if all tokens but the first were equally probable: the
    # tolerance is wider than the grid's.
    assert best_fit.temperature == pytest.approx(temperature, rel=0.05)
    assert best_fit.explained > 0.9
    assert scale_note(scores_of(logits, targets), of_targets(other, targets))


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3, 1.0, 3.0])
def test_noise_is_no_temperature(model: tuple[Logits, NDArray[Any]], noise: float) -> None:
    """Noise of 0.05 is rounding, of 0.3 eight bits, of 1 a KLD of 0.5, of 3 a model that has lost
    nearly everything.
    """
    logits, targets = model
    other = logits + np.random.default_rng(1).normal(0, noise, logits.shape)
    assert scale_note(scores_of(logits, targets), of_targets(other, targets)) == ""


def test_what_cannot_be_fitted(model: tuple[Logits, NDArray[Any]]) -> None:
    logits, targets = model
    reference = scores_of(logits, targets)
    assert fit({"logprob": reference["logprob"]}, reference["logprob"]) is None
    assert fit(reference, np.full(TOKENS, -np.inf)) is None
    assert fit(reference, reference["logprob"][:-1]) is None
    # A fit needs 200 tokens.
    few = {name: column[:20] for name, column in reference.items()}
    assert fit(few, few["logprob"]) is None
