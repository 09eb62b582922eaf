"""What is said of two models, to the letter; the numbers are those of tests/eval/results/test_differences.py."""

from __future__ import annotations

import pytest

from compare_q.eval.table import pairs
from tests.eval.results.test_differences import SAME, WORSE
from tests.support.made import FAILED, QUANT, REF, replace, run_of, with_sums
from tests.support.toy import refusal

A = replace(QUANT, label="a")
B = with_sums(replace(QUANT, label="b"), nll=WORSE.nll, kld=(2.0, 2.0, 2.0, 3.0))
C = with_sums(replace(QUANT, label="c"), nll=SAME.nll)


def test_the_better_one_is_named() -> None:
    """exp(-0.5) = 0.60653: 39.347 % less, +- 7.0046 %.  KLD: -1, -1, -1, -2 over 40: -0.125 +- 0.02887."""
    assert pairs.pair_lines([(A, B)]) == [
        *pairs.HEADING,
        "",
        "a against b",
        "  PPL: a is better: 0.50 ± 0.12 nats",
        "       ln(PPL ratio) -0.50, 95 %: -0.87 to -0.13; PPL -39.3 ± 7.0 %",
        "  KLD: a is better: 0.125 ± 0.029 nats",
        "       difference -0.125, 95 %: -0.217 to -0.033",
    ]
    assert pairs.pair_lines([(B, A)])[4:6] == [
        "  PPL: a is better: 0.50 ± 0.12 nats",
        "       ln(PPL ratio) +0.50, 95 %: +0.13 to +0.87; PPL +65 ± 19 %",
    ]


def test_no_difference_and_no_error() -> None:
    """exp(-0.2) = 0.81873, times 0.32161 = 0.263; and a model against itself."""
    assert pairs.pair_lines([(A, C)])[4:] == [
        "  PPL: no difference to be seen: -0.20 ± 0.32 nats",
        "       ln(PPL ratio) -0.20, 95 %: -1.22 to +0.82; PPL -18 ± 26 %",
        "  KLD: no difference to be seen: 0.00000 ± 0 nats",
        "       difference +0.00000, 95 %: +0.00000 to +0.00000",
    ]
    short = [
        with_sums(replace(QUANT, label=x), tokens=(10,), nll=(y,), whole=("nll",)) for x, y in (("a", 5.0), ("b", 9.0))
    ]
    assert pairs.pair_lines([(short[0], short[1])])[4:6] == [
        "  PPL: the text is too short to tell: -0.40000 ± n/a nats",
        "       ln(PPL ratio) -0.40000; PPL -32.96800 ± n/a %",
    ]


def test_what_is_not_known_has_its_reason() -> None:
    assert pairs.pair_lines([(REF, A)])[4:][-1] == "  KLD: n/a: bf16 is the reference, from which KLD is measured"
    holes = with_sums(B, whole=())
    assert pairs.pair_lines([(A, holes)])[4:] == [
        "  PPL: n/a: b has positions without a finite log-probability",
        "  KLD: n/a: b has positions without a finite KL divergence",
    ]


def test_neighbours_are_the_measured_rows_in_order() -> None:
    assert [(a.label, b.label) for a, b in pairs.neighbours(run_of(C, FAILED, A, B))] == [("c", "a"), ("a", "b")]
    assert pairs.neighbours(run_of(A, FAILED)) == []


def test_pairs_by_label() -> None:
    assert [(a.label, b.label) for a, b in pairs.pairs_by_label(run_of(A, B, C), [["c", "a"]])] == [("c", "a")]
    assert refusal(pairs.check_labels, [["a", "x"]], ["a", "b"]) == "--pair: no model is called 'x'; there are: a, b"
    pairs.check_labels([["a", "b"]], ["a", "b"])


@pytest.mark.parametrize("line", pairs.pair_lines([(A, B), (B, C)]))
def test_eighty_columns_hold_every_line(line: str) -> None:
    assert len(line) <= 80


def test_a_short_text_is_said_with_the_pairs() -> None:
    short = replace(A, estimates=replace(A.estimates, blocks=replace(A.estimates.blocks, length=5000)))
    found = pairs.pair_lines([(short, B)], 5001)[2]
    assert found.startswith("Caution: the scored part spans 5,000 tokens of a text of 5,001: with less than 20,000")
