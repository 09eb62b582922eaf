"""How many windows an answer takes, worked out by hand."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import pytest

from compare_q.eval.cli import until
from compare_q.eval.cli.until import Target, needed
from compare_q.eval.stats.uncertainty import Mean
from tests.support.made import QUANT, REF, run_of, with_against, with_sums


def test_what_is_known_of_klds() -> None:
    """0.000452 / 0.01234567 is 3.661 %: to 2 % it takes 3.351 times 16 windows of an endless text, 53.62 / (1 + 53.62 /
    100) = 34.9 of one of 100."""
    text = run_of(REF, QUANT)
    assert needed(Target("kld", 0.02), text, 16, 10**9) == pytest.approx(53.62, abs=0.01)
    assert needed(Target("kld", 0.02), text, 16, 100) == pytest.approx(34.9, abs=0.01)
    assert needed(Target("kld", 0.04), text, 16, 100) < 16
    assert needed(Target("kld", 0.02), run_of(REF), 16, 100) == 0
    worse = with_against(replace(QUANT, label="worse"), kld=Mean(0.1, 4.0, 40, 0, 0.0366, 0.0))  # ten times the error
    assert needed(Target("kld", 0.02), run_of(REF, QUANT, worse), 16, 10**9) == pytest.approx(16 * 18.3**2, rel=0.001)


def test_what_is_known_of_the_order() -> None:
    """The blocks' differences 0.1, 0.1, 0.1, 0.3 of 10 tokens each have a mean of 0.015; equal rows have no order."""
    other = with_sums(replace(QUANT, label="other"), kld=(1.1, 1.1, 1.1, 1.3))
    other = with_against(other, kld=Mean(0.02, 0.8, 40, 0, 0.001, 0.001))
    takes = needed(Target("ranked"), run_of(REF, QUANT, other), 16, 100)
    assert 0 < takes < math.inf
    same = with_against(replace(QUANT, label="same"), kld=Mean(0.012, 0.5, 40, 0, 0.001, 0.001))
    assert needed(Target("ranked"), run_of(REF, QUANT, same), 16, 100) == math.inf


@pytest.mark.parametrize("given", ["kld", "kld:2", "kld:0%", "kld:100%", "kld:nan%", "ppl:2%", "rank", ""])
def test_answers_that_nobody_knows(given: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither kld:PERCENT%"):
        until.target(given)
    assert until.target("kld:0.5%") == Target("kld", 0.005)
