"""McNemar's test by hand, Tango's statistic by brute force, and errors of the equivalence test."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from compare_q.eval.stats.flip_statistics import (
    accuracy,
    equivalence,
    flips,
    interval,
    mcnemar_p,
    p_below,
    score,
)

LOG_FACTORIAL = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, 20_001)))))


def answers(both: int, lost: int, gained: int, neither: int) -> tuple[list[bool], list[bool]]:
    """Return right and wrong answers of the reference and of a new model, with these counts."""
    reference = [True] * (both + lost) + [False] * (gained + neither)
    new = [True] * both + [False] * lost + [True] * gained + [False] * neither
    return reference, new


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [
        (0, 0, 1.0),
        # 2 * (1 + 4) / 16
        (3, 1, 0.625),
        (1, 3, 0.625),
        (10, 0, 2 / 2**10),
        (5, 5, 1.0),
        # 2 * (1 + 10 + 45) / 1024
        (8, 2, 0.109375),
    ],
)
def test_mcnemar(lost: int, gained: int, p: float) -> None:
    assert mcnemar_p(lost, gained) == p


def test_accuracy_and_counts_by_hand() -> None:
    """7 of 12 right: the error is sqrt(7/12 * 5/12 / 11), lm-eval's."""
    reference, new = answers(both=4, lost=3, gained=1, neither=4)
    assert accuracy(reference).value == 7 / 12
    assert accuracy(reference).stderr == pytest.approx(math.sqrt(35 / 144 / 11), rel=1e-14)
    assert accuracy([True]).stderr is None
    counts = flips(reference, new, 2)
    assert (counts.questions, counts.lost, counts.gained, counts.other_wrong) == (12, 3, 1, 2)
    assert (counts.difference, counts.mcnemar_p) == (-2 / 12, 0.625)


def test_no_flips_by_hand() -> None:
    """Without flips the statistic is (n m - 1/2) / sqrt(n m (1 - m)): 1.7678 for 200 questions,
    1.0714 for 100.
    """
    # The variance of the best fit is n m (1 - m): 200 * 0.02 * 0.98 = 3.92, and 1.96 for 100.
    assert score(0, 0, 200, 0.02) == pytest.approx(3.5 / math.sqrt(3.92))
    assert score(0, 0, 100, 0.02) == pytest.approx(1.5 / math.sqrt(1.96))
    # The one-sided 5 % quantile, 1.645, is between the two statistics.
    for count, outcome in ((200, "equivalent"), (100, "undecided")):
        assert equivalence(flips([True] * count, [True] * count), 0.02).outcome == outcome


@pytest.mark.parametrize(
    ("lost", "gained", "questions", "loss"), [(3, 1, 12, 0.2), (12, 5, 200, 0.03), (7, 9, 80, 0.1)]
)
def test_the_variance_is_that_of_the_best_fit_at_the_margin(
    lost: int, gained: int, questions: int, loss: float
) -> None:
    """The most probable share of gained answers, with a loss of exactly the margin, is searched
    among 200,000.
    """
    # Shares of 0, at either end, have no logarithm.
    share = np.linspace(1e-7, (1 - loss) / 2 - 1e-7, 200_001)
    unchanged = questions - lost - gained
    likelihood = lost * np.log(share + loss) + gained * np.log(share)
    likelihood += unchanged * np.log(1 - 2 * share - loss)
    best = float(share[likelihood.argmax()])
    variance = questions * (2 * best + loss - loss**2)
    gold = (questions * loss - (lost - gained) - 0.5) / math.sqrt(variance)
    # The searched shares are up to 2.5e-6 apart, which limits the precision of the gold value.
    assert score(lost, gained, questions, loss) == pytest.approx(gold, rel=1e-4)


def test_the_interval_is_what_the_tests_do_not_reject() -> None:
    """At its ends the one-sided p is 5 %; swapped models swap it; more questions narrow it."""
    low, high = interval(12, 5, 200)
    assert p_below(12, 5, 200, -low) == pytest.approx(0.05)
    assert p_below(5, 12, 200, high) == pytest.approx(0.05)
    assert interval(5, 12, 200) == pytest.approx((-high, -low))
    widths = []
    for times in (1, 2, 4, 8):
        begin, end = interval(6 * times, 3 * times, 100 * times)
        widths.append(end - begin)
    assert all(wide > narrow for wide, narrow in pairwise(widths))
    assert interval(0, 0, 1) == pytest.approx((-interval(0, 0, 1)[1], interval(0, 0, 1)[1]))


def test_outcomes() -> None:
    """Lost and gained answers of 1,000; a margin of 1 or 3 points."""
    for lost, gained, margin, outcome in (
        (5, 5, 0.01, "equivalent"),
        (5, 5, 0.005, "undecided"),
        (20, 0, 0.01, "different"),
        (0, 20, 0.01, "different"),
        (10, 0, 0.01, "undecided"),
        (20, 0, 0.03, "equivalent"),
    ):
        reference, new = answers(500, lost, gained, 500 - lost - gained)
        assert equivalence(flips(reference, new), margin).outcome == outcome, (lost, gained, margin)


def error_at_margin(questions: int, margin: float, gained: float) -> float:
    """Return the exact probability of "not worse" if the model is worse by exactly the margin.

    ``gained``: the true share of gained answers; that of lost ones is larger by the margin.
    """

    def counts(share: float) -> np.ndarray:
        mean = questions * share
        deviation = math.sqrt(questions * share * (1 - share))
        # Eight deviations lose no probability that matters. Small shares have a longer tail than
        # that: 5 or 20 counts more.
        lowest = max(0, int(mean - 8 * deviation - 5))
        highest = min(questions, int(mean + 8 * deviation + 20))
        return np.arange(lowest, highest + 1)

    lost_share = gained + margin
    gained_counts = [0]
    if gained:
        gained_counts = counts(gained).tolist()
    total = 0.0
    for lost in counts(lost_share).tolist():
        for won in gained_counts:
            unchanged = questions - lost - won
            if unchanged < 0 or p_below(lost, won, questions, margin) > 0.05:
                continue
            ways = LOG_FACTORIAL[[questions, lost, won, unchanged]]
            log_p = ways[0] - ways[1:].sum() + lost * math.log(lost_share)
            log_p += unchanged * math.log(1 - lost_share - gained)
            if won:
                log_p += won * math.log(gained)
            total += math.exp(log_p)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("questions", [20, 100, 400, 1000])
@pytest.mark.parametrize("margin", [0.005, 0.01, 0.05])
def test_exact_error_at_the_margin(questions: int, margin: float) -> None:
    """Summed over all counts, not simulated; up to 30 flips per 100 questions."""
    for gained in (0.0, 0.0005, 0.005, 0.02, 0.15):
        assert error_at_margin(questions, margin, gained) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("questions", "lost", "gained"),
    [
        (500, 0.01, 0.0),  # 5 questions change
        (500, 0.0075, 0.0025),  # the same, worse by half a point
        (1000, 0.03, 0.02),  # 50 questions change
    ],
)
@pytest.mark.parametrize("is_better", [False, True])
def test_simulated_error_at_the_margin(
    questions: int, lost: float, gained: float, is_better: bool
) -> None:
    """2,000 simulations of two models that differ by exactly the margin: at most 5 % are called
    equivalent.

    Two standard errors of the simulated rate are allowed.
    """
    margin = lost - gained
    simulations = 2000
    generator = np.random.default_rng(7)
    drawn = generator.multinomial(questions, [lost, gained, 1 - lost - gained], simulations)
    equal = 0
    for one, other, _ in drawn.tolist():
        reference, new = answers(questions - one - other, one, other, 0)
        if is_better:
            reference, new = answers(questions - one - other, other, one, 0)
        equal += equivalence(flips(reference, new), margin).outcome == "equivalent"
    assert equal / simulations <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / simulations)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("questions", "share", "margin"), [(2000, 0.00125, 0.01), (5000, 0.005, 0.01)]
)
def test_equal_models_are_found(questions: int, share: float, margin: float) -> None:
    """Of models without a true difference, of which 5 or 50 questions change, at least 90 % are
    called equivalent.
    """
    drawn = np.random.default_rng(8).multinomial(questions, [share, share, 1 - 2 * share], 500)
    outcomes = []
    for lost, gained, unchanged in drawn.tolist():
        # Questions that do not change say nothing about the difference: here both have them right.
        reference, new = answers(unchanged, lost, gained, 0)
        outcomes.append(equivalence(flips(reference, new), margin).outcome)
    assert outcomes.count("equivalent") >= 450
