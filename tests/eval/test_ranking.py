"""Differences, stars and nearly lossless rows, by hand.

The rows have four blocks of ten tokens of a text of 100,000 tokens.  There are three cosines:
t(0.975, 3) = 3.18245.  For sums that deviate by u, the squares are 2 (sum of u cos(pi j (g + 1/2) /
4))^2, with the weights 1 + 0.12 j^2: 1.12, 1.48, 2.08.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import told_apart
from compare_q.backends.base import Storage
from compare_q.eval.ranking import best_labels, compare, kld_limit, near_lossless, ranking
from compare_q.eval.results import ModelResult
from compare_q.eval.stats.block_sums import BlockSums
from compare_q.eval.stats.uncertainty import Mean
from compare_q.eval.table.pairs import pair_lines
from tests.support.made import (
    BLOCKS,
    FAILED,
    PPL,
    QUANT,
    REF,
    replace,
    run_of,
    with_against,
    with_ppl,
    with_sums,
)

WORSE = replace(BLOCKS, nll=(14.0, 24.0, 34.0, 48.0))
"""a - b = -4, -4, -4, -8: the mean is -20 / 40, the deviations are 1, 1, 1, -3.  The squares of the
cosines are 27.3137, 16, 4.6863, with the weighted mean 21.3397: sqrt(21.3397) / 40 = 0.11549."""
SAME = replace(BLOCKS, nll=(16.0, 18.0, 36.0, 38.0))
"""a - b = -6, 2, -6, 2: the mean is -0.2, the deviations are -4, 4, -4, 4.  The squares of the
cosines are 37.4903, 0, 218.5097: sqrt(165.4964) / 40 = 0.32161."""


A = replace(QUANT, label="a")
B = with_sums(replace(A, label="b"), nll=WORSE.nll)
C = with_sums(replace(A, label="c"), nll=SAME.nll)
GOOD = with_sums(replace(A, label="good"), nll=(1.0, 1.0, 1.0, 1.0))
HOLES = with_sums(
    with_ppl(replace(GOOD, label="holes"), replace(PPL, value=2.0)), whole=("kld", "same_top")
)
LOSSES = {"kld": None, "same_top": None, "whole": ("nll",)}
"""Sums of a model without a reference."""
ONE_BLOCK = [
    with_sums(replace(A, label="x"), tokens=(10,), nll=(5,), **LOSSES),
    with_sums(replace(A, label="y"), tokens=(10,), nll=(9,), **LOSSES),
]


def test_a_difference_by_hand() -> None:
    difference = compare(A, B, "nll")
    assert difference.value == pytest.approx(-0.5)
    assert difference.stderr == pytest.approx(0.115487, abs=1e-6)
    assert difference.limits == pytest.approx((-0.86753, -0.13247), abs=1e-5)
    assert (difference.outcome, compare(B, A, "nll").outcome) == ("less", "more")
    difference = compare(A, C, "nll")
    assert difference.value == pytest.approx(-0.2)
    assert difference.stderr == pytest.approx(0.32161, abs=1e-5)
    assert difference.outcome == "equal"


def test_the_interval_decides_and_not_two_standard_errors() -> None:
    """-0.3 ± 0.115 is 2.6 standard errors from 0.

    With three cosines the 95 % interval still contains 0.
    """
    # a - b = -2, -2, -2, -6 deviates as for B by 1, 1, 1, -3, with the same error.
    difference = compare(A, with_sums(B, nll=(12.0, 22.0, 32.0, 46.0)), "nll")
    assert difference.value == pytest.approx(-0.3)
    assert difference.stderr == pytest.approx(0.115487, abs=1e-6)
    assert difference.outcome == "equal"


def test_several_comparisons_share_the_level() -> None:
    """-0.5 is 4.33 errors of 0.115487.

    That is more than t(0.975, 3) = 3.18, and less than t(0.9942, 3) = 5.6 for ten rows.
    """
    outcomes = [compare(A, B, "nll", comparisons=count).outcome for count in (1, 2, 10)]
    assert outcomes == ["less", "less", "equal"]


def test_empty_blocks_do_not_count_and_one_block_has_no_error() -> None:
    assert BlockSums((10, 0, 5), (1.0, 0.0, 1.0)).held == 2
    difference = compare(*ONE_BLOCK, "nll")
    assert difference.value == pytest.approx(-0.4)
    assert (difference.stderr, difference.limits) == (None, None)
    assert difference.outcome == "unknown"


@pytest.mark.parametrize(
    ("a", "b", "score", "reason"),
    [
        (A, FAILED, "nll", "broken failed"),
        (REF, A, "kld", "bf16 is the reference, from which KLD is measured"),
        (A, replace(REF, label="alone", reference=False), "kld", "alone has no KL divergence"),
        (A, HOLES, "nll", "holes has positions without a finite log-probability"),
        (A, with_sums(A, tokens=(10, 10, 10, 11)), "nll", "they were scored on different windows"),
        (REF, A, "nll", ""),
    ],
)
def test_what_cannot_be_compared_says_why(
    a: ModelResult, b: ModelResult, score: str, reason: str
) -> None:
    difference = compare(a, b, score)
    assert difference.reason == reason
    assert (difference.outcome == "unknown") == bool(reason)


@pytest.mark.parametrize(
    ("models", "best"),
    [
        ([A, B], {"a"}),
        # a and c do not differ significantly.
        ([B, C, A], {"a", "c"}),
        ([A], set()),
        ([GOOD, A, B], {"good"}),
        ([replace(GOOD, reference=True), A, B], {"a"}),
        ([replace(GOOD, spec={"noise_floor": True}), A, B], {"a"}),
        ([A, B, FAILED], {"a"}),
        # A star would claim that no row is better.
        ([HOLES, A, B], set()),
        ([A, with_sums(with_ppl(B, replace(PPL, value=20.0)), whole=("kld",))], {"a"}),
        # 16 bits per weight are not quantized.
        ([replace(GOOD, storage=Storage(16.0)), A, B], {"a"}),
        ([replace(GOOD, storage=Storage(15.9)), A, B], {"good"}),
        ([replace(GOOD, storage=Storage(16.0)), A], set()),
        ([replace(GOOD, storage=Storage(), provenance={}), A, B], {"good"}),
        # 0.4 nats may be chance.
        (ONE_BLOCK, set()),
    ],
)
def test_the_best(models: list[ModelResult], best: set[str]) -> None:
    assert best_labels(models, "nll") == best


def test_rollouts_are_never_the_best() -> None:
    """Their size is not known, like that of the best row of files with an unknown size."""
    unknown = replace(GOOD, storage=Storage(), provenance={})
    assert best_labels([unknown, A, B], "nll") == {"good"}
    assert best_labels([unknown.updated(is_rollouts=True), A, B], "nll") == {"a"}


@pytest.mark.parametrize(("length", "best"), [(1999, frozenset()), (2000, {"good"})])
def test_no_model_is_the_best_of_a_short_text(length: int, best: frozenset[str]) -> None:
    models = [with_sums(GOOD, length=length), with_sums(B, nll=(5.0, 5.0, 5.0, 5.0), length=length)]
    assert best_labels(models, "nll") == best
    assert bool(ranking(models, "nll").reason) == (not best)


def test_two_windows_rank_nothing() -> None:
    """With two blocks, even an 82 times larger loss is within the interval.

    So no row is the best, or equal to another.
    """
    one = with_sums(replace(A, label="a"), tokens=(10, 10), nll=(0.01, 0.02), **LOSSES)
    other = with_sums(replace(A, label="b"), tokens=(10, 10), nll=(0.9, 1.6), **LOSSES)
    assert best_labels([one, other], "nll") == frozenset()
    assert compare(one, other, "nll").outcome == "unknown"


@pytest.mark.parametrize("quiet", [1.0, 0.1])
@pytest.mark.parametrize("models", [2, 5, 12, 40])
def test_the_best_in_truth_is_among_the_starred_in_95_percent(models: int, quiet: float) -> None:
    """All models have the same mean, so that model 0 counts as the best; it may vary less.

    600 texts of 700,000 tokens determine a share of 95 % to 0.9 %.  With two models, stars and
    pairs agree.
    """
    rng = np.random.default_rng([models, int(10 * quiet)])
    noise = rng.standard_normal((600, models, 30)) * np.r_[quiet, np.ones(models - 1)][:, None]
    # The changes that all models share are ten times their own, and cancel in differences.
    shared = 100 + 10 * rng.standard_normal((600, 1, 30))
    n_starred = 0
    for klds in shared + noise:
        rows = []
        for number, kld in enumerate(klds):
            rows.append(told_apart.row_of(str(number), (400,) * 30, kld, 700_000))
        labels = best_labels(rows, "kld")
        n_starred += "0" in labels
        if models == 2:
            assert (labels == {"0", "1"}) == (compare(*rows, "kld").outcome == "equal")
    # Three standard errors of the share.
    assert n_starred / 600 > 0.95 - 3 * 0.009


def test_more_is_better_of_the_same_top_token() -> None:
    more = with_sums(replace(QUANT, label="more"), same_top=(10.0, 10.0, 10.0, 10.0))
    assert best_labels([QUANT, more], "same_top") == {"more"}
    assert best_labels([QUANT, with_sums(more, kld=(0.5, 0.5, 0.5, 0.5))], "kld") == {"more"}


def row(label: str, kld: float, stderr: float | None = 0.001, **keys: Any) -> ModelResult:
    """Return a row with the same KLD in every block.

    So differences of two rows have no error.
    """
    model = with_sums(replace(QUANT, label=label, **keys), kld=(10 * kld,) * 4)
    return with_against(model, kld=Mean(kld, 40 * kld, 40, 0, stderr))


NOISE = row("noise", 0.02, spec={"noise_floor": True})
NEAR = row("near", 0.01)
ALSO = row("also", 0.04)
FAR = row("far", 0.0401)


def test_twice_the_floor_is_the_limit_and_belongs_to_it() -> None:
    smaller = row("smaller noise", 0.015, spec={"noise_floor": True})
    models = [REF, NOISE, smaller, NEAR, ALSO, FAR, FAILED]
    # Of two noise floors, the one with the larger KLD counts.
    assert kld_limit(models) == pytest.approx(0.04)
    assert near_lossless(models) == {"near", "also"}
    # Without a floor the limit is 0.001, which roundings alone can cost.
    assert near_lossless([REF, NEAR, ALSO, FAR]) == frozenset()


def test_without_a_floor_what_roundings_alone_can_cost_is_not_ranked() -> None:
    """The same weights have a KLD of 0.00033 with another attention backend, and of 0.00038
    compiled.
    """
    models = [REF, row("attention", 0.00033), row("compiled", 0.00038), row("worse", 0.0011)]
    assert near_lossless(models) == {"attention", "compiled"}
    assert best_labels(models, "kld") == {"attention", "compiled"}
    line = kld_line(models[1], models[2], models)
    assert "not ranked" in line
    assert "no noise floor" in line
    labels = near_lossless(models)
    assert compare(models[1], models[3], "kld", lossless_labels=labels).outcome == "less"


def kld_line(one: ModelResult, other: ModelResult, models: list[ModelResult]) -> str:
    """Return the line of ``--pairs`` about the KLD of two rows."""
    lines = pair_lines([(one, other)], run_of(*models))
    (line,) = [line for line in lines if line.startswith("  KLD")]
    return line


def test_an_uncertain_floor_reaches_to_the_end_of_its_interval() -> None:
    """The limit is 0.02 plus 3.182 standard errors of 0.01 (three cosines)."""
    noise = row("noise", 0.02, 0.01, spec={"noise_floor": True})
    models = [REF, noise, NEAR, row("at 0.051", 0.051)]
    assert kld_limit(models) == pytest.approx(0.02 + 3.182 * 0.01, abs=1e-5)
    assert near_lossless(models) == {"near", "at 0.051"}
    assert kld_limit([replace(noise, blocks=None), NEAR]) is None
    without_error = row("noise", 0.02, None, spec={"noise_floor": True})
    assert kld_limit([without_error, NEAR]) == pytest.approx(0.04)


def test_stars_and_verdicts_do_not_rank_them() -> None:
    """The differences of these rows have no error: the interval alone would rank all of them."""
    ranked = [REF, NEAR, ALSO, FAR]
    unranked = [REF, NOISE, NEAR, ALSO, FAR]
    assert best_labels(ranked, "kld") == {"near"}
    assert best_labels(unranked, "kld") == {"near", "also"}
    assert best_labels([REF, NOISE, FAR, row("farther", 0.05)], "kld") == {"far"}
    line = kld_line(NEAR, ALSO, unranked)
    assert line.startswith("  KLD: not ranked: both are at most twice the noise floor's")
    assert kld_line(ALSO, FAR, unranked).startswith("  KLD: also is better: 0.0001")


def bound(label: str, kld: float, **keys: Any) -> ModelResult:
    """Return a row of which only this bound of the KLD is known."""
    return row(label, kld, kld_kind="bound", **keys)


CLEAR = row("exact", 0.03)


@pytest.mark.parametrize(
    ("first", "second", "outcome", "value", "limits"),
    [
        (bound("bound", 0.05), CLEAR, "more", 0.02, (0.02, np.inf)),
        (CLEAR, bound("bound", 0.05), "less", -0.02, (-np.inf, -0.02)),
        (bound("bound", 0.05), row("e", 0.03, kld_kind="estimate"), "more", 0.02, (0.02, np.inf)),
        (bound("bound", 0.02), CLEAR, "unknown", None, None),
        (CLEAR, bound("bound", 0.02), "unknown", None, None),
        (CLEAR, bound("bound", 0.03), "unknown", None, None),
        (bound("bound", 0.05), bound("other", 0.02), "unknown", None, None),
        (row("e", 0.05, kld_kind="estimate"), CLEAR, "more", 0.02, (0.02, 0.02)),
    ],
)
def test_a_bound_loses_at_least_and_never_less(
    first: ModelResult, second: ModelResult, outcome: str, value: float, limits: Any
) -> None:
    """KLDs are equal in every block: a difference has no error, and its limits are its value."""
    difference = compare(first, second, "kld")
    assert difference.outcome == outcome
    if value is None:
        assert (difference.value, difference.stderr, difference.limits) == (None, None, None)
        assert "bound" in difference.reason
    else:
        assert difference.value == pytest.approx(value)
        assert difference.limits == pytest.approx(limits)
        assert difference.is_bound == ("bound" in (first.kld_kind, second.kld_kind))
    # The most probable tokens are known, whatever the KLD is.
    assert compare(first, second, "same_top").outcome == "equal"


def test_the_same_scores_are_the_same_without_a_difference_of_their_klds() -> None:
    same = [replace(CLEAR, scores_digest="1"), bound("bound", 0.02, scores_digest="1")]
    difference = compare(*same, "kld")
    assert (difference.outcome, difference.value) == ("same", None)


def test_bounds_have_no_star_and_cost_the_others_theirs_if_they_may_be_better() -> None:
    """The better one of the exact rows has the star only if all bounds are above it."""
    exact = [CLEAR, row("worse", 0.06)]
    assert best_labels(exact, "kld") == {"exact"}
    assert best_labels([*exact, bound("bound", 0.05)], "kld") == {"exact"}
    assert best_labels([*exact, bound("bound", 0.02)], "kld") == set()
    assert best_labels([bound("bound", 0.05), bound("other", 0.02)], "kld") == set()
    # With the same scores as the best one it is as good, but has no star.
    copies = [replace(CLEAR, scores_digest="1"), bound("copy", 0.02, scores_digest="1")]
    assert best_labels([*copies, row("worse", 0.06)], "kld") == {"exact"}
    assert best_labels([*exact, bound("bound", 0.02)], "same_top") == {"exact", "worse", "bound"}


def test_a_ranking_puts_bounds_where_their_klds_must_be() -> None:
    ranked = ranking([bound("low", 0.02), bound("high", 0.05), CLEAR, row("worse", 0.06)], "kld")
    assert ranked.best.label == "exact"
    assert [model.label for model in ranked.worse] == ["high", "worse"]
    assert [model.label for model in ranked.undecided] == ["low"]
    only = ranking([bound("low", 0.02), bound("high", 0.05)], "kld")
    assert (only.best.label, [model.label for model in only.undecided]) == ("low", ["high"])
    # On a short text nothing is worse for certain.
    short = [with_sums(model, length=1999) for model in (CLEAR, bound("high", 0.05))]
    assert [model.label for model in ranking(short, "kld").undecided] == ["high"]


def test_an_estimate_is_nearly_lossless_only_with_its_interval() -> None:
    """The limit is 0.001, and the interval of three cosines reaches 3.182 standard errors."""
    estimates = [
        row("precise", 1e-4, 1e-4, kld_kind="estimate"),
        row("below 0", -0.01, 0.01, kld_kind="estimate"),
        row("without error", 1e-4, None, kld_kind="estimate"),
    ]
    assert near_lossless(estimates) == {"precise"}
    exact = [replace(model, kld_kind="exact") for model in estimates]
    assert len(near_lossless(exact)) == 3


def test_a_bound_is_neither_nearly_lossless_nor_a_noise_floor() -> None:
    small = [row("exact", 1e-4), bound("b", 1e-4)]
    assert near_lossless(small) == {"exact"}
    floor = {"spec": {"noise_floor": True}}
    floors = [bound("high", 0.05, **floor), row("low", 0.02, **floor)]
    assert kld_limit(floors[:1]) is None
    assert kld_limit(floors) == kld_limit(floors[1:])
