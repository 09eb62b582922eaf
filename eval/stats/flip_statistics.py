"""Statistics of two models' answers to the same questions.

They are flips, McNemar's test, and equivalence within a margin.

``lost`` of n questions are right only in the reference, and ``gained`` only in the new model.  All
others say nothing about which of the two is better.  The difference of the accuracies is (gained -
lost) / n.

**McNemar's exact test** (for language models: Kübler et al., arXiv 2602.10144) asks whether the two
differ at all.  If neither is better, each of the lost + gained answers goes either way like a coin
toss; p is the probability of counts at least as far apart, on both sides.  A large p does not show
that the two are equal: few answers give a large p, too.

**Equivalence** asks whether the accuracies differ by less than a margin m, with two one-sided tests
(Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987): one of the difference <=
-m, one of the difference >= m.  If both are rejected at 5 %, the two are equivalent; models that
differ by exactly m are called so in at most 5 % of cases.  Each test uses Tango's score statistic
for paired proportions (Statistics in Medicine 17, 1998), in which the variance is that of the best
fit with a difference of exactly m.  Other statistics take the variance from the answers; with few
flips it is far too small, and 0 without any.  A continuity correction of half an answer makes the
test conservative: enumerated exactly for 20 to 10,000 questions, margins of 0.2 to 10 %, 0 to 60 %
of flips and up to 1,500 lost answers, the error at the margin is at most 4.9 %; without the
correction it is up to 6.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LEVEL = 0.05
"""The level of each one-sided test of equivalence.  The interval of the difference has 1 - 2 *
LEVEL."""
Z = 1.6448536269514722
"""The standard normal distribution's quantile of 1 - LEVEL."""
CONTINUITY_CORRECTION = 0.5
"""Number of answers that moves the difference towards the tested margin."""
BISECTIONS = 60
"""Bisections of an end of the interval; the last ones are below a float's precision."""
Outcome = Literal["equivalent", "undecided", "different"]


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers, and its standard error over independent questions.

    The error of a single question is None.
    """

    value: float
    stderr: float | None


@dataclass(frozen=True)
class Flips:
    """Answers of a new model compared with the reference's.

    ``other_wrong``: questions that both have wrong, with different answers; None if the answers are
    not known.  ``interval``: of ``difference``, the new accuracy minus the reference's, with 90 %.
    """

    questions: int
    lost: int
    gained: int
    other_wrong: int | None
    difference: float
    interval: tuple[float, float]
    mcnemar_p: float


@dataclass(frozen=True)
class Equivalence:
    """The outcome of the test of whether two accuracies differ by less than ``margin``.

    ``p``: of the two one-sided tests together.  "different": they differ by more than the margin,
    at the same level; "undecided": neither is shown.
    """

    margin: float
    p: float
    outcome: Outcome


def accuracy(right: Sequence[bool]) -> Accuracy:
    """Return the share of right answers with its standard error.

    By lm-eval's formula and in lm-eval's order of the sums, for equal last digits.
    """
    count = len(right)
    share = sum(right) / count
    if count < 2:
        return Accuracy(share, None)
    deviation = math.sqrt(sum((is_right - share) ** 2 for is_right in right) / (count - 1))
    return Accuracy(share, deviation / math.sqrt(count))


def flips(reference: Sequence[bool], new: Sequence[bool], other_wrong: int | None = None) -> Flips:
    """Return the flips of two models' answers to the same questions, in the same order.

    True is a right answer.
    """
    pairs = list(zip(reference, new, strict=True))
    lost = pairs.count((True, False))
    gained = pairs.count((False, True))
    return Flips(
        questions=len(pairs),
        lost=lost,
        gained=gained,
        other_wrong=other_wrong,
        difference=(gained - lost) / len(pairs),
        interval=interval(lost, gained, len(pairs)),
        mcnemar_p=mcnemar_p(lost, gained),
    )


def mcnemar_p(lost: int, gained: int) -> float:
    """Return McNemar's exact two-sided p.

    It is 2 P(X <= the smaller count), X binomial with 1/2, and at most 1.
    """
    total = lost + gained
    coefficient = 1  # the binomial coefficient of total over k
    tail = 0
    # In integers, since floats overflow with 1,030 flips.
    for k in range(min(lost, gained) + 1):
        tail += coefficient
        coefficient = coefficient * (total - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << total))


def equivalence(counts: Flips, margin: float) -> Equivalence:
    """Return whether the accuracies differ by less than ``margin``, a share between 0 and 1."""
    worse = p_below(counts.lost, counts.gained, counts.questions, margin)
    better = p_below(counts.gained, counts.lost, counts.questions, margin)
    p = max(worse, better)
    low, high = counts.interval
    outcome: Outcome = "undecided"
    if p <= LEVEL:
        outcome = "equivalent"
    elif high < -margin or low > margin:
        outcome = "different"
    return Equivalence(margin, p, outcome)


def interval(lost: int, gained: int, questions: int) -> tuple[float, float]:
    """Return the 90 % interval of the difference.

    It holds the values that neither one-sided test rejects at 5 %.
    """
    worst = largest_loss(lost, gained, questions)
    best = largest_loss(gained, lost, questions)
    return -worst, best


def largest_loss(lost: int, gained: int, questions: int) -> float:
    """Return the largest loss that the one-sided test does not reject at 5 %."""
    low = (lost - gained) / questions
    high = 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if score(lost, gained, questions, middle) < Z:
            low = middle
        else:
            high = middle
    return high


def p_below(lost: int, gained: int, questions: int, loss: float) -> float:
    """Return the one-sided p of the hypothesis that the true loss is ``loss`` or more.

    It is small if the true loss is below.
    """
    return 0.5 * math.erfc(score(lost, gained, questions, loss) / math.sqrt(2))


def score(lost: int, gained: int, questions: int, loss: float) -> float:
    """Return Tango's score statistic with the continuity correction.

    It is large if the true loss is below ``loss``.  A loss is the share of lost answers minus that
    of gained ones.  If the true one is ``loss``, the statistic is standard normal.  ``share`` is
    then the most probable true share of gained answers: the larger root of Tango's quadratic
    equation, whose coefficients are ``a``, ``b`` and ``c``.
    """
    a = 2.0 * questions
    b = (2 * questions - lost + gained) * loss - lost - gained
    c = -gained * loss * (1 - loss)
    share = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = questions * (2 * share + loss * (1 - loss))
    excess = questions * loss - (lost - gained) - CONTINUITY_CORRECTION
    if variance <= 0:
        return math.copysign(math.inf, excess)
    return excess / math.sqrt(variance)
