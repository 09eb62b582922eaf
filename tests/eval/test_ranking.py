"""Differences, stars and nearly lossless rows, by hand: four blocks of ten tokens of a text of
100,000 tokens.

There are three cosines: t(0.975, 3) = 3.18245.  For sums that deviate by u, the squares are 2 (sum
of u cos(pi j (g + 1/2) / 4))^2, with the weights 1 + 0.12 j^2: 1.12, 1.48, 2.08.
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
B, C = (
    with_sums(replace(A, label="b"), nll=WORSE.nll),
    with_sums(replace(A, label="c"), nll=SAME.nll),
)
GOOD = with_sums(replace(A, label="good"), nll=(1.0, 1.0, 1.0, 1.0))
HOLES = with_sums(
    with_ppl(replace(GOOD, label="holes"), replace(PPL, value=2.0)), whole=("kld", "same_top")
)
ONE_BLOCK = [
    with_sums(
        replace(A, label=label), tokens=(10,), nll=(loss,), kld=None, same_top=None, whole=("nll",)
    )
    for label, loss in (("x", 5), ("y", 9))
]


def test_a_difference_by_hand() -> None:
    found = compare(A, B, "nll")
    assert (found.value, found.stderr) == (pytest.approx(-0.5), pytest.approx(0.115487, abs=1e-6))
    assert found.limits == (pytest.approx(-0.86753, abs=1e-5), pytest.approx(-0.13247, abs=1e-5))
    assert (found.outcome, compare(B, A, "nll").outcome) == ("less", "more")
    found = compare(A, C, "nll")
    assert (found.value, found.stderr) == (pytest.approx(-0.2), pytest.approx(0.32161, abs=1e-5))
    assert found.outcome == "equal"


def test_the_interval_decides_and_not_two_standard_errors() -> None:
    """-0.3 +- 0.115 is 2.6 standard errors from 0, but with three cosines the 95 % interval still
    contains 0.
    """
    found = compare(A, with_sums(B, nll=(12.0, 22.0, 32.0, 46.0)), "nll")
    assert (found.value, found.stderr) == (pytest.approx(-0.3), pytest.approx(0.115487, abs=1e-6))
    assert found.outcome == "equal"


def test_several_comparisons_share_the_level() -> None:
    """-0.5 is 4.33 errors of 0.115487: more than t(0.975, 3) = 3.18, less than t(0.9942, 3) = 5.6
    for ten rows.
    """
    assert [compare(A, B, "nll", comparisons=count).outcome for count in (1, 2, 10)] == [
        "less",
        "less",
        "equal",
    ]


def test_empty_blocks_do_not_count_and_one_block_has_no_error() -> None:
    assert BlockSums((10, 0, 5), (1.0, 0.0, 1.0)).held == 2
    found = compare(*ONE_BLOCK, "nll")
    assert (found.value, found.stderr, found.limits, found.outcome) == (
        pytest.approx(-0.4),
        None,
        None,
        "unknown",
    )


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
    found = compare(a, b, score)
    assert (found.reason, found.outcome == "unknown") == (reason, bool(reason))


@pytest.mark.parametrize(
    ("models", "best"),
    [
        ([A, B], {"a"}),
        ([B, C, A], {"a", "c"}),  # a and c do not differ significantly
        ([A], set()),
        ([GOOD, A, B], {"good"}),
        ([replace(GOOD, reference=True), A, B], {"a"}),
        ([replace(GOOD, spec={"noise_floor": True}), A, B], {"a"}),
        ([A, B, FAILED], {"a"}),
        ([HOLES, A, B], set()),  # a star would claim that no row is better
        ([A, with_sums(with_ppl(B, replace(PPL, value=20.0)), whole=("kld",))], {"a"}),
        (
            [replace(GOOD, storage=Storage(16.0)), A, B],
            {"a"},
        ),  # 16 bits per weight are not quantized
        ([replace(GOOD, storage=Storage(15.9)), A, B], {"good"}),
        ([replace(GOOD, storage=Storage(16.0)), A], set()),
        ([replace(GOOD, storage=Storage(), provenance={}), A, B], {"good"}),
        (ONE_BLOCK, set()),  # 0.4 nats may be chance
    ],
)
def test_the_best(models: list[ModelResult], best: set[str]) -> None:
    assert best_labels(models, "nll") == best


@pytest.mark.parametrize(("length", "found"), [(1999, frozenset()), (2000, {"good"})])
def test_no_model_is_the_best_of_a_short_text(length: int, found: frozenset[str]) -> None:
    models = [with_sums(GOOD, length=length), with_sums(B, nll=(5.0, 5.0, 5.0, 5.0), length=length)]
    assert best_labels(models, "nll") == found
    assert bool(ranking(models, "nll").reason) == (not found)


def test_two_windows_rank_nothing() -> None:
    """With two blocks, even an 82 times larger loss is within the interval: no row is the best, or
    equal to another.
    """
    one, other = (
        with_sums(
            replace(A, label=x), tokens=(10, 10), nll=nll, kld=None, same_top=None, whole=("nll",)
        )
        for x, nll in (("a", (0.01, 0.02)), ("b", (0.9, 1.6)))
    )
    assert best_labels([one, other], "nll") == frozenset()
    assert compare(one, other, "nll").outcome == "unknown"


@pytest.mark.parametrize("quiet", [1.0, 0.1])
@pytest.mark.parametrize("models", [2, 5, 12, 40])
def test_the_best_in_truth_is_among_the_starred_in_95_percent(models: int, quiet: float) -> None:
    """All models have the same mean, so that model 0 counts as the best; it may vary less than the
    others.

    600 texts of 700,000 tokens determine a share of 95 % to 0.9 %.  With two models, stars and
    pairs agree.
    """
    rng = np.random.default_rng([models, int(10 * quiet)])
    noise = rng.standard_normal((600, models, 30)) * np.r_[quiet, np.ones(models - 1)][:, None]
    texts = [
        [told_apart.row_of(str(i), (400,) * 30, kld, 700_000) for i, kld in enumerate(each)]
        for each in 100 + 10 * rng.standard_normal((600, 1, 30)) + noise
    ]
    kept = [best_labels(rows, "kld") for rows in texts]
    assert np.mean(["0" in labels for labels in kept]) > 0.95 - 3 * 0.009
    if models == 2:
        assert [labels == {"0", "1"} for labels in kept] == [
            compare(*rows, "kld").outcome == "equal" for rows in texts
        ]


def test_more_is_better_of_the_same_top_token() -> None:
    more = with_sums(replace(QUANT, label="more"), same_top=(10.0, 10.0, 10.0, 10.0))
    assert best_labels([QUANT, more], "same_top") == {"more"}
    assert best_labels([QUANT, with_sums(more, kld=(0.5, 0.5, 0.5, 0.5))], "kld") == {"more"}


def row(label: str, kld: float, stderr: float | None = 0.001, **keys: Any) -> ModelResult:
    """Return a row with the same KLD in every block, so that differences of two rows have no error."""
    made = with_sums(replace(QUANT, label=label, **keys), kld=tuple(10 * kld for _ in range(4)))
    return with_against(made, kld=Mean(kld, 40 * kld, 40, 0, stderr))


NOISE = row("noise", 0.02, spec={"noise_floor": True})
NEAR, ALSO, FAR = row("near", 0.01), row("also", 0.04), row("far", 0.0401)


def test_twice_the_floor_is_the_limit_and_belongs_to_it() -> None:
    models = [
        REF,
        NOISE,
        row("smaller noise", 0.015, spec={"noise_floor": True}),
        NEAR,
        ALSO,
        FAR,
        FAILED,
    ]
    assert kld_limit(models) == pytest.approx(0.04)
    assert near_lossless(models) == {"near", "also"}
    assert near_lossless([REF, NEAR, ALSO, FAR]) == frozenset()  # unknown without a floor


def test_without_a_floor_what_roundings_alone_can_cost_is_not_ranked() -> None:
    """The same weights have a KLD of 0.00033 with another attention backend, and of 0.00038
    compiled.
    """
    models = [REF, row("attention", 0.00033), row("compiled", 0.00038), row("worse", 0.0011)]
    assert near_lossless(models) == {"attention", "compiled"}
    assert best_labels(models, "kld") == {"attention", "compiled"}
    (kld,) = [
        line
        for line in pair_lines([(models[1], models[2])], run_of(*models))
        if line.startswith("  KLD")
    ]
    assert "not ranked" in kld
    assert "no noise floor" in kld
    assert (
        compare(models[1], models[3], "kld", lossless_labels=near_lossless(models)).outcome
        == "less"
    )


def test_an_uncertain_floor_reaches_to_the_end_of_its_interval() -> None:
    """The limit is 0.02 plus 3.182 standard errors of 0.01 (three cosines)."""
    models = [
        REF,
        row("noise", 0.02, 0.01, spec={"noise_floor": True}),
        NEAR,
        row("at 0.051", 0.051),
    ]
    assert kld_limit(models) == pytest.approx(0.02 + 3.182 * 0.01, abs=1e-5)
    assert near_lossless(models) == {"near", "at 0.051"}
    assert kld_limit([replace(models[1], blocks=None), NEAR]) is None
    assert kld_limit([row("noise", 0.02, None, spec={"noise_floor": True}), NEAR]) == pytest.approx(
        0.04
    )


def test_stars_and_verdicts_do_not_rank_them() -> None:
    """The differences of these rows have no error, so that the interval alone would rank all of
    them.
    """
    ranked, unranked = [REF, NEAR, ALSO, FAR], [REF, NOISE, NEAR, ALSO, FAR]
    assert best_labels(ranked, "kld") == {"near"}
    assert best_labels(unranked, "kld") == {"near", "also"}
    assert best_labels([REF, NOISE, FAR, row("farther", 0.05)], "kld") == {"far"}
    for pair, said in (
        ((NEAR, ALSO), "not ranked: both are at most twice the noise floor's"),
        ((ALSO, FAR), "also is better: 0.0001"),
    ):
        (kld,) = [
            line for line in pair_lines([pair], run_of(*unranked)) if line.startswith("  KLD")
        ]
        assert kld.startswith(f"  KLD: {said}")
