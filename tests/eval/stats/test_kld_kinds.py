"""KLDs that are estimates or bounds: what holds for them, and the error of an estimate.

The error is compared with the spread of 200 draws, of which the true KLD is known exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import KldKind
from compare_q.backends.scoring.partial_kld import estimate_on_samples
from compare_q.eval.stats.kld_kinds import kind_of_mean, relations_that_follow
from compare_q.eval.stats.row_statistics import RowStatistics, statistics_of
from compare_q.eval.stats.spread_windows import sampling_errors
from compare_q.eval.stats.uncertainty import assign_blocks, interval

N = 4000
"""Tokens of the text of one draw."""
INDEX = np.arange(1, N + 1)
DRAWS = 200


@pytest.mark.parametrize(
    ("first", "second", "relations"),
    [
        ("exact", "exact", {"less", "more", "equal"}),
        ("estimate", "exact", {"less", "more", "equal"}),
        ("bound", "exact", {"more"}),
        ("bound", "estimate", {"more"}),
        ("exact", "bound", {"less"}),
        ("estimate", "bound", {"less"}),
        ("bound", "bound", set()),
    ],
)
def test_relations_that_follow_for_all_klds_that_the_numbers_allow(
    first: KldKind, second: KldKind, relations: set[str]
) -> None:
    """Against every pair of KLDs on a grid: a bound's KLD is at least its number."""
    found = relations_that_follow(first, second)
    assert found == relations
    grid = range(4)
    for a in grid:
        for b in grid:
            for kld_a in klds_of(first, a):
                for kld_b in klds_of(second, b):
                    if relation_of(a, b) in found:
                        assert relation_of(kld_a, kld_b) == relation_of(a, b)


def klds_of(kind: KldKind, number: int) -> list[int]:
    """Return the KLDs that a number of this kind allows, up to 9."""
    if kind == "bound":
        return list(range(number, 10))
    return [number]


def relation_of(first: int, second: int) -> str:
    if first == second:
        return "equal"
    if first < second:
        return "less"
    return "more"


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        ({"exact"}, "exact"),
        ({"bound"}, "bound"),
        ({"exact", "bound"}, "bound"),
        ({"exact", "estimate"}, "estimate"),
        ({"estimate", "bound"}, None),
    ],
)
def test_kind_of_a_mean(kinds: set[KldKind], kind: KldKind | None) -> None:
    assert kind_of_mean(kinds) == kind


def row_of(kld: np.ndarray, kind: KldKind, **columns: Any) -> RowStatistics:
    """Return the statistics of tokens with these KLDs and a probability of 1/2."""
    half = np.full(len(kld), np.log(0.5), np.float32)
    scores = {"logprob": half, "ref_logprob": half, "kld": kld.astype(np.float32), **columns}
    index = INDEX[: len(kld)]
    return statistics_of(scores, assign_blocks(index), index, kld_kind=kind)


def test_only_an_estimate_has_no_percentiles() -> None:
    kld = np.array([-0.5, 0.5, 0.5, 1.5])
    estimate = row_of(kld, "estimate")
    assert (estimate.kld, estimate.kld_kind) == (0.5, "estimate")
    assert (estimate.kld_median, estimate.kld_max, estimate.kld_percentiles) == (None, None, {})
    # The median of bounds is at most the median of the KLDs.
    bound = row_of(np.abs(kld), "bound")
    assert (bound.kld, bound.kld_kind, bound.kld_median) == (0.75, "bound", 0.5)
    assert bound.kld_max == 1.5


def test_kld_and_same_top_need_not_be_known_together() -> None:
    kld = np.array([0.25, 0.75])
    without_top = row_of(kld, "exact")
    assert (without_top.kld, without_top.same_top) == (0.5, None)
    half = np.full(2, np.log(0.5), np.float32)
    scores = {"logprob": half, "ref_logprob": half, "same_top": np.array([True, False])}
    without_kld = statistics_of(scores, assign_blocks(INDEX[:2]), INDEX[:2])
    assert (without_kld.kld, without_kld.same_top) == (None, 0.5)
    assert without_kld.ppl_ratio == 1


def test_the_error_of_an_estimate_contains_its_sampling_error() -> None:
    """Every token has the same two distributions, so that an exact KLD has the error 0.

    p is (.4, .3, .2, .1) and q (.5, .25, .05, .2); the 2 most probable tokens of q are known.
    """
    p = np.array([0.4, 0.3, 0.2, 0.1])
    q = np.array([0.5, 0.25, 0.05, 0.2])
    kld = float(np.sum(p * np.log(p / q)))
    rng = np.random.default_rng(7)
    estimates = []
    errors = []
    covered = 0
    for _ in range(DRAWS):
        row = row_of(estimated(p, q, rng), "estimate")
        assert row.kld is not None
        assert row.kld_stderr is not None
        assert row.blocks is not None
        estimates.append(row.kld)
        errors.append(row.kld_stderr)
        low, high = interval(row.kld, row.kld_stderr, row.blocks.waves)
        covered += low <= kld <= high
    assert row_of(np.full(N, kld), "exact").kld_stderr == pytest.approx(0, abs=1e-9)
    # The mean of 200 estimates is within 4 of its own standard errors.
    assert np.mean(estimates) == pytest.approx(kld, abs=4 * np.std(estimates) / np.sqrt(DRAWS))
    # The error counts a text of 4,000 tokens as one that remembers more (``uncertainty.py``).
    assert 1.0 <= np.mean(np.square(errors)) ** 0.5 / np.std(estimates) <= 3.0
    assert covered >= 0.95 * DRAWS - 6


def estimated(p: np.ndarray, q: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return values [N] of tokens drawn from p; q is known of two tokens and the target."""
    target = rng.choice(len(p), N, p=p)
    known = np.array([0, 1])
    log_p = np.broadcast_to(np.log(p[known]), (N, 2))
    log_q = np.broadcast_to(np.log(q[known]), (N, 2))
    is_known = np.isin(target, known)
    return estimate_on_samples(log_p, log_q, np.log(p[target]), np.log(q[target]), is_known)


def test_windows_of_an_estimate_are_draws_even_if_they_are_all_of_the_text() -> None:
    """3 of 3 windows with the sums 2, 6, 4 of 2 tokens each: neighbours differ by 4 and 2.

    Without the correction for a finite population the squared error is 3 * 10 / 2 / 6^2.
    """
    window = np.array([0, 0, 1, 1, 2, 2])
    kld = np.array([1.0, 1, 3, 3, 2, 2], np.float32)
    columns = {"logprob": -kld, "kld": kld}
    exact = sampling_errors(columns, window, (0, 10, 20), 3)
    assert (exact.nll, exact.kld) == (0, 0)
    errors = sampling_errors(columns, window, (0, 10, 20), 3, "estimate")
    expected = np.sqrt(3 * 10 / 2) / 6
    assert errors.nll == 0
    assert errors.kld == pytest.approx(expected)
