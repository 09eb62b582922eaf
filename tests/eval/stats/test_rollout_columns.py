"""Differences from recorded log-probabilities: values by hand, and over a whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from compare_q.eval.stats.rollout_columns import (
    Sampled,
    k3_of,
    rollout_notes,
    rollout_statistics,
)
from compare_q.eval.stats.uncertainty import assign_blocks
from tests.support.scores_files import random_logprobs

NAN = float("nan")


def sampled_of(*sequences: list[tuple[float, float]]) -> Sampled:
    """Return sequences of pairs (ln p of the model, the recorded one)."""
    window = np.repeat(np.arange(len(sequences)), [len(sequence) for sequence in sequences])
    pairs = np.array([pair for sequence in sequences for pair in sequence], np.float32)
    position = np.concatenate([np.arange(len(sequence)) + 3 for sequence in sequences])
    return Sampled(pairs[:, 0], pairs[:, 1], window, position)


def statistics(sampled: Sampled) -> dict[str, Any]:
    assignment = assign_blocks(np.arange(len(sampled.logprob)))
    return rollout_statistics(sampled, assignment)


def test_values_by_hand() -> None:
    """Two sequences with d = 0.5, -1.5 and 2, and a token that was not sampled."""
    sampled = sampled_of([(-1.0, -1.5), (-3.0, NAN), (-2.0, -0.5)], [(-0.5, -2.5)])
    fields = statistics(sampled)
    terms = [math.exp(d) - d - 1 for d in (0.5, -1.5, 2.0)]
    assert fields["k3"] == pytest.approx(sum(terms) / 3)
    assert fields["d_mean"] == pytest.approx(4 / 3)
    assert fields["d_max"] == 2.0
    assert fields["d_large"] == 2
    # The ratios' logarithms are -1 and 2.
    assert fields["seq_ratio_median"] == pytest.approx(math.exp(0.5))
    assert fields["seq_ratio_p5"] == pytest.approx(math.exp(-0.85))
    assert fields["seq_ratio_p95"] == pytest.approx(math.exp(1.85))
    assert fields["ln_seq_ratio_percentiles"]["min"] == -1.0
    first, second = fields["worst_sequences"]
    assert (first.window, first.tokens, first.position) == (1, 1, 3)
    assert (second.window, second.tokens, second.position) == (0, 2, 5)
    assert (second.logprob, second.rollout_logprob) == (-2.0, -0.5)
    assert second.d_mean == 1.0
    assert second.ln_ratio == -1.0
    assert second.k3 == pytest.approx((terms[0] + terms[1]) / 2)


def test_the_expectation_of_k3_is_the_divergence() -> None:
    """Over all tokens of the vocabulary, with their probabilities in the rollout."""
    rollout = random_logprobs(20, 60, seed=1)
    model = random_logprobs(20, 60, seed=2, spread=0.7, like=rollout)
    expectation = (np.exp(rollout) * k3_of(model - rollout)).sum(axis=1)
    divergence = (np.exp(rollout) * (rollout - model)).sum(axis=1)
    np.testing.assert_allclose(expectation, divergence, rtol=1e-9)


def test_small_differences_are_not_lost_in_rounding() -> None:
    assert k3_of(np.array([1e-7]))[0] == pytest.approx(0.5e-14, rel=1e-3, abs=0)


def test_tokens_that_are_not_finite_are_left_out_with_their_sequences() -> None:
    sampled = sampled_of([(-math.inf, -1.0), (-2.0, -1.0)], [(-1.0, -1.25), (-1.0, -1.0)])
    fields = statistics(sampled)
    assert fields["d_mean"] == pytest.approx((1 + 0.25) / 3)
    assert fields["k3"] == pytest.approx((math.exp(-1) + math.exp(0.25) - 1.25) / 3)
    assert fields["ln_seq_ratio_percentiles"]["min"] == 0.25
    assert statistics(sampled_of([(-math.inf, -1.0)])) == {}


def test_a_k3_beyond_all_numbers_is_unknown() -> None:
    """It is not the mean of the other tokens."""
    sampled = sampled_of([(-1.0, -9999.0), (-1.0, -1.5)])
    fields = statistics(sampled)
    assert "k3" not in fields
    assert fields["d_max"] == 9998.0
    assert fields.get("seq_ratio_median") is None
    assert fields["ln_seq_ratio_percentiles"]["50"] == pytest.approx(9998.5)
    assert fields["worst_sequences"][0].k3 is None
    (note,) = rollout_notes(sampled)
    assert "9,998" in note


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_sequence_is_found(shift: int) -> None:
    generator = np.random.default_rng(0)
    sequences = []
    for number in range(4):
        logprob = -generator.exponential(2.0, 30)
        recorded = logprob + generator.normal(0, 0.02, 30)
        if number == 2:
            recorded = np.roll(recorded, shift)
        sequences.append(list(zip(logprob.tolist(), recorded.tolist(), strict=True)))
    sampled = sampled_of(*sequences)
    assert statistics(sampled)["worst_sequences"][0].window == 2
    (note,) = rollout_notes(sampled)
    assert "1 of 4 sequences" in note
    assert "window 2" in note
    assert list(rollout_notes(sampled_of(*sequences[:2]))) == []
