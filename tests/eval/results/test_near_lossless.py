"""Rows that KLD cannot rank, by hand: four blocks of ten tokens, and a noise floor of 0.02 nats."""

from __future__ import annotations

from typing import Any

import pytest

from compare_q.eval.ranking import best_labels, kld_limit, near_lossless
from compare_q.eval.results import ModelResult
from compare_q.eval.stats.uncertainty import Mean
from compare_q.eval.table.pairs import UNRANKED, pair_lines
from tests.support.made import FAILED, QUANT, REF, replace, run_of, with_against, with_sums


def row(label: str, kld: float, stderr: float | None = 0.001, **keys: Any) -> ModelResult:
    """A row of one KLD in every block: two of them differ without any error."""
    made = with_sums(replace(QUANT, label=label, **keys), kld=tuple(10 * kld for _ in range(4)))
    return with_against(made, kld=Mean(kld, 40 * kld, 40, 0, stderr))


NOISE = row("noise", 0.02, spec={"noise_floor": True})
NEAR, ALSO, FAR = row("near", 0.01), row("also", 0.04), row("far", 0.0401)


def test_twice_the_floor_is_the_limit_and_belongs_to_it() -> None:
    models = [REF, NOISE, row("smaller noise", 0.015, spec={"noise_floor": True}), NEAR, ALSO, FAR, FAILED]
    assert kld_limit(models) == pytest.approx(0.04)
    assert near_lossless(models) == {"near", "also"}


def test_an_uncertain_floor_reaches_to_the_end_of_its_interval() -> None:
    """0.02 and 3.182 standard errors of 0.01 (three waves)."""
    models = [REF, row("noise", 0.02, 0.01, spec={"noise_floor": True}), NEAR, row("at 0.051", 0.051)]
    assert kld_limit(models) == pytest.approx(0.02 + 3.182 * 0.01, abs=1e-5)
    assert near_lossless(models) == {"near", "at 0.051"}
    assert kld_limit([replace(models[1], estimates=None), NEAR]) is None
    assert kld_limit([row("noise", 0.02, None, spec={"noise_floor": True}), NEAR]) == pytest.approx(0.04)


def test_nothing_is_said_without_a_floor() -> None:
    assert near_lossless([REF, NEAR, ALSO, FAR]) == frozenset()


def test_stars_and_verdicts_do_not_rank_them() -> None:
    """Their differences have no error at all, so that the interval alone would tell each from each."""
    ranked, unranked = [REF, NEAR, ALSO, FAR], [REF, NOISE, NEAR, ALSO, FAR]
    assert best_labels(ranked, "kld") == {"near"}
    assert best_labels(unranked, "kld") == {"near", "also"}
    assert best_labels([REF, NOISE, FAR, row("farther", 0.05)], "kld") == {"far"}
    (kld,) = [line for line in pair_lines([(NEAR, ALSO)], run_of(*unranked)) if line.startswith("  KLD")]
    assert kld == f"  KLD: {UNRANKED}"
    (kld,) = [line for line in pair_lines([(ALSO, FAR)], run_of(*unranked)) if line.startswith("  KLD")]
    assert kld.startswith("  KLD: also is better: 0.0001")
