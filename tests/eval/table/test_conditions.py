"""Conditions of ``--fail-if`` on KLDs that are bounds or estimates."""

from __future__ import annotations

import operator

import pytest

from compare_q.backends.base import KldKind
from compare_q.eval.stats.slices import Slice
from compare_q.eval.table import conditions
from tests.support.made import QUANT, replace

SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
SLICES = {"few": Slice(7, 20.0, None, 0.5, 0.01)}


def faults_of(condition: str, kind: KldKind) -> list[str]:
    """Return the faults of a row with the KLD 0.01234567, its median 0.5, and 0.5 in a slice."""
    row = replace(QUANT, kld_kind=kind, slices=SLICES)
    return list(conditions.faults_of([row], [conditions.parse(condition)]))


@pytest.mark.parametrize(
    ("condition", "fault"),
    [
        ("kld > 0.01", ">=0.01234"),
        ("kld > 0.05", "undecided"),
        ("kld < 0.01", ""),
        ("kld < 0.05", "undecided"),
        ("kld >= 0.05", "undecided"),
        ("kld_median > 0.4", ">=0.50000"),
        ("kld_max > 3", "undecided"),
        ("kld:few > 0.4", ">=0.50000"),
        ("kld:few > 0.6", "undecided"),
        ("same_top < 90", ""),
        ("ppl > 8", ""),
        ("ppl > 7", "7.5000"),
    ],
)
def test_a_bound_above_the_limit_decides_and_one_below_does_not(condition: str, fault: str) -> None:
    lines = faults_of(condition, "bound")
    if not fault:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"W4A16: {condition} ({fault}")


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("limit", [0.01, 0.01234567, 0.02])
def test_no_bound_passes_a_condition_that_a_larger_kld_would_meet(sign: str, limit: float) -> None:
    """Against every larger KLD on a grid."""
    passes = not faults_of(f"kld {sign} {limit}", "bound")
    for kld in (0.01234567, 0.015, 0.02, 0.05, 10.0):
        if passes:
            assert not SIGNS[sign](kld, limit)


def test_an_estimate_is_compared_as_an_exact_kld() -> None:
    for condition in ("kld > 0.01", "kld > 0.05", "kld < 0.05"):
        assert faults_of(condition, "estimate") == faults_of(condition, "exact")
    assert faults_of("kld > 0.01", "exact") == ["W4A16: kld > 0.01 (0.01235)"]
