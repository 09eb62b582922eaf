"""Bounds and estimates from a few log-probabilities, against the KLD of the whole vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compare_q.backends.scoring import partial_kld

GENERATOR = np.random.default_rng(61)
ENTRIES = 12


def distributions(n: int, spread: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Return ln p and ln q [n, ENTRIES] of random distributions that resemble each other."""
    z = GENERATOR.normal(0, spread, (n, ENTRIES))
    noise = GENERATOR.normal(0, 0.7, (n, ENTRIES))
    return normalized(z), normalized(z + noise)


def normalized(z: np.ndarray) -> np.ndarray:
    return np.asarray(z - np.log(np.exp(z).sum(axis=1, keepdims=True)))


def exact(ref: np.ndarray, tested: np.ndarray) -> np.ndarray:
    return np.asarray((np.exp(ref) * (ref - tested)).sum(axis=1))


def largest(logprobs: np.ndarray, k: int) -> np.ndarray:
    """Return the ids [n, k] of the k most probable entries."""
    return np.argsort(-logprobs, axis=1)[:, :k]


@pytest.mark.parametrize("k", [0, 1, 3, ENTRIES - 1, ENTRIES])
def test_a_bound_is_at_most_the_divergence(k: int) -> None:
    ref, tested = distributions(500)
    ids = largest(tested, k)
    taken = (np.take_along_axis(ref, ids, 1), np.take_along_axis(tested, ids, 1))
    bounds = partial_kld.bound(*taken, rounding=0.0)
    gold = exact(ref, tested)
    assert (bounds <= gold + 1e-12).all()
    assert (bounds >= 0).all()
    if k >= ENTRIES - 1:
        np.testing.assert_allclose(bounds, gold, atol=1e-9)
    if k == 0:
        assert not bounds.any()


def test_more_entries_give_a_larger_bound() -> None:
    ref, tested = distributions(500)
    before = np.zeros(500)
    for k in range(1, ENTRIES):
        ids = largest(tested, k)
        taken = (np.take_along_axis(ref, ids, 1), np.take_along_axis(tested, ids, 1))
        bounds = partial_kld.bound(*taken, rounding=0.0)
        assert (bounds >= before - 1e-12).all()
        before = bounds


def test_bound_by_hand() -> None:
    """p = 1/2, 1/4, 1/4; q = 1/4, 1/4, 1/2; known: the first token."""
    ref, tested = np.log([[0.5]]), np.log([[0.25]])
    gold = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert partial_kld.bound(ref, tested, rounding=0.0)[0] == pytest.approx(gold)


@pytest.mark.parametrize("digits", [2, 4])
def test_rounded_numbers_give_no_bound_above_the_divergence(digits: int) -> None:
    """Also of peaked distributions, whose rounded probabilities sum to more than 1."""
    ref, tested = distributions(2000, spread=12.0)
    rounded = np.round(tested, digits)
    assert (np.exp(rounded[:, :]).sum(axis=1) > 1).any()
    for k in (1, 5, ENTRIES):
        ids = largest(tested, k)
        taken = (np.take_along_axis(ref, ids, 1), np.take_along_axis(rounded, ids, 1))
        bounds = partial_kld.bound(*taken, rounding=0.5 * 10.0**-digits)
        assert np.isfinite(bounds).all()
        assert (bounds <= exact(ref, tested) + 1e-12).all()


def test_errors_that_the_rounding_does_not_explain_make_no_bound_too_large() -> None:
    """Each probability is 0.05 % too large, so that those of peaked positions sum to above 1."""
    ref, tested = distributions(2000, spread=12.0)
    ids = largest(tested, 3)
    for q in (ref, tested):
        too_large = np.take_along_axis(q, ids, 1) + 5e-4
        assert (np.exp(too_large).sum(axis=1) > 1.0004).any()
        bounds = partial_kld.bound(np.take_along_axis(ref, ids, 1), too_large, rounding=1e-6)
        assert (bounds <= exact(ref, q) + 1e-5).all()


def test_a_model_against_itself_has_the_bound_0() -> None:
    ref, _ = distributions(100)
    ids = largest(ref, 5)
    taken = np.take_along_axis(ref, ids, 1)
    np.testing.assert_allclose(partial_kld.bound(taken, taken, rounding=1e-6), 0, atol=1e-9)


@pytest.mark.parametrize("k", [0, 1, 4, ENTRIES])
def test_the_expectation_on_samples_is_the_divergence(k: int) -> None:
    """The expectation is the sum over all targets, each with its probability."""
    ref, tested = distributions(200)
    ids = largest(tested, k)
    taken = (np.take_along_axis(ref, ids, 1), np.take_along_axis(tested, ids, 1))
    expectation = np.zeros(len(ref))
    for token in range(ENTRIES):
        values = partial_kld.estimate_on_samples(
            *taken, ref[:, token], tested[:, token], (ids == token).any(axis=1)
        )
        expectation += np.exp(ref[:, token]) * values
    np.testing.assert_allclose(expectation, exact(ref, tested), rtol=1e-10)


OUTSIDE = 3


def with_outside_tokens(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ln p and ln q [n, ENTRIES]; the last ``OUTSIDE`` tokens are not the reference's."""
    ref, tested = distributions(n)
    of_reference = normalized(ref[:, :-OUTSIDE])
    without = np.full((n, OUTSIDE), -np.inf)
    return np.concatenate([of_reference, without], axis=1), tested


@pytest.mark.parametrize("k", [0, 1, 4, ENTRIES])
def test_tokens_that_the_reference_lacks_are_in_the_expectation_if_they_are_known(k: int) -> None:
    """The KLD is over the reference's tokens, where q sums to less than 1.

    The expectation is smaller by the probability of the other tokens that are not known.
    """
    ref, tested = with_outside_tokens(200)
    shared = slice(None, -OUTSIDE)
    gold = exact(ref[:, shared], tested[:, shared])
    ids = largest(tested, k)
    taken = (np.take_along_axis(ref, ids, 1), np.take_along_axis(tested, ids, 1))
    expectation = np.zeros(len(ref))
    for token in range(ENTRIES - OUTSIDE):
        values = partial_kld.estimate_on_samples(
            *taken, ref[:, token], tested[:, token], (ids == token).any(axis=1)
        )
        expectation += np.exp(ref[:, token]) * values
    unknown = np.zeros(len(ref))
    for token in range(ENTRIES - OUTSIDE, ENTRIES):
        is_unknown = ~(ids == token).any(axis=1)
        unknown += np.where(is_unknown, np.exp(tested[:, token]), 0.0)
    np.testing.assert_allclose(expectation, gold - unknown, rtol=1e-9, atol=1e-12)
    assert (unknown > 0.01).any() == (k < ENTRIES)


@pytest.mark.parametrize("k", [1, 4, ENTRIES - 1, ENTRIES])
def test_tokens_that_the_reference_lacks_make_no_bound_too_large(k: int) -> None:
    """They make it larger than without them, and it is the KLD once all tokens are known."""
    ref, tested = with_outside_tokens(500)
    shared = slice(None, -OUTSIDE)
    gold = exact(ref[:, shared], tested[:, shared])
    ids = largest(tested, k)
    taken = (np.take_along_axis(ref, ids, 1), np.take_along_axis(tested, ids, 1))
    bounds = partial_kld.bound(*taken, rounding=0.0)
    assert (bounds <= gold + 1e-9).all()
    left_out = np.where(np.isfinite(taken[0]), taken[1], -np.inf)
    without = partial_kld.bound(taken[0], left_out, rounding=0.0)
    assert (without <= bounds + 1e-9).all()
    assert (without < bounds - 0.01).any() == (k < ENTRIES)
    if k == ENTRIES:
        np.testing.assert_allclose(bounds, gold, atol=1e-9)


def test_weights_correct_for_another_sampler() -> None:
    ref, tested = distributions(200)
    sampler = normalized(ref + GENERATOR.normal(0, 0.3, ref.shape))
    ids = largest(tested, 4)
    taken = (np.take_along_axis(ref, ids, 1), np.take_along_axis(tested, ids, 1))
    expectation = np.zeros(len(ref))
    for token in range(ENTRIES):
        values = partial_kld.estimate_on_samples(
            *taken,
            ref[:, token],
            tested[:, token],
            (ids == token).any(axis=1),
            np.exp(ref[:, token] - sampler[:, token]),
        )
        expectation += np.exp(sampler[:, token]) * values
    np.testing.assert_allclose(expectation, exact(ref, tested), rtol=1e-10)


def test_the_expectation_by_draws_is_the_divergence() -> None:
    """Each token outside of the known ones, with its probability among those."""
    ref, tested = distributions(200)
    ids = largest(ref, 4)
    taken = (np.take_along_axis(ref, ids, 1), np.take_along_axis(tested, ids, 1))
    p_rest = 1 - np.exp(taken[0]).sum(axis=1)
    expectation = np.zeros(len(ref))
    for token in range(ENTRIES):
        is_rest = ~(ids == token).any(axis=1)
        values = partial_kld.estimate_by_draws(
            *taken, ref[:, token : token + 1], tested[:, token : token + 1]
        )
        expectation += np.where(is_rest, np.exp(ref[:, token]) / p_rest * values, 0.0)
    np.testing.assert_allclose(expectation, exact(ref, tested), rtol=1e-9)


def test_values_that_are_not_finite() -> None:
    """q = 0 where p > 0 is infinite; p = 0 counts nothing."""
    half = math.log(0.5)
    ref = np.array([[half, half], [0.0, -np.inf]])
    tested = np.array([[0.0, -np.inf], [0.0, -np.inf]])
    bounds = partial_kld.bound(ref, tested, rounding=0.0)
    assert bounds.tolist() == [math.inf, 0.0]
