"""The lines that compare two models; the numbers are computed in tests/eval/test_ranking.py."""

from __future__ import annotations

from compare_q.eval.results import ModelResult
from compare_q.eval.table import pairs
from tests.eval.test_ranking import SAME, WORSE
from tests.support.made import FAILED, QUANT, REF, replace, run_of, with_sums
from tests.support.toy import refusal

A = replace(QUANT, label="a")
B = with_sums(replace(QUANT, label="b"), nll=WORSE.nll, kld=(2.0, 2.0, 2.0, 3.0))
C = with_sums(replace(QUANT, label="c"), nll=SAME.nll)


def lines_of(first: ModelResult, second: ModelResult) -> list[str]:
    """Return the lines of one pair, without the heading and the line with their labels."""
    lines = pairs.pair_lines([(first, second)], run_of(first, second))
    n_heading = len(pairs.HEADING)
    assert lines[:n_heading] == [*pairs.HEADING]
    return lines[n_heading + 2 :]


def test_the_better_one_is_named() -> None:
    """PPL: exp(-0.5) = 0.60653, 39.347 +- 7.0046 % less.  KLD: (-1 - 1 - 1 - 2) / 40 = -0.125 +-
    0.02887.
    """
    # 95 % intervals are +- 3.182 errors, with three cosines.
    assert lines_of(A, B) == [
        "  PPL: a is better: 0.50 ± 0.12 nats",
        "       ln(PPL ratio) -0.50, 95 %: -0.87 to -0.13; PPL -39.3 ± 7.0 %",
        "  KLD: a is better: 0.125 ± 0.029 nats",
        "       difference -0.125, 95 %: -0.217 to -0.033",
    ]
    assert lines_of(B, A)[:2] == [
        "  PPL: a is better: 0.50 ± 0.12 nats",
        "       ln(PPL ratio) +0.50, 95 %: +0.13 to +0.87; PPL +65 ± 19 %",
    ]


def test_no_difference() -> None:
    """exp(-0.2) = 0.81873, and its error is 0.81873 * 0.32161 = 0.263."""
    assert lines_of(A, C) == [
        "  PPL: no difference to be seen: -0.20 ± 0.32 nats",
        "       ln(PPL ratio) -0.20, 95 %: -1.22 to +0.82; PPL -18 ± 26 %",
        "  KLD: no difference to be seen: 0.00000 ± 0 nats",
        "       difference +0.00000, 95 %: +0.00000 to +0.00000",
    ]


def test_no_error() -> None:
    """A difference of one block does not have an error."""
    one_block = {"tokens": (10,), "kld": None, "same_top": None, "whole": ("nll",)}
    first, *others = lines_of(
        with_sums(A, nll=(5.0,), **one_block), with_sums(B, nll=(9.0,), **one_block)
    )
    assert first.startswith("  PPL: the text is too short to tell")
    assert first.endswith(": -0.40000 ± n/a nats")
    assert others[0] == "       ln(PPL ratio) -0.40000; PPL -32.96800 ± n/a %"


def test_what_is_not_known_has_its_reason() -> None:
    assert "bf16 is the reference" in lines_of(REF, A)[-1]
    ppl, kld = lines_of(A, with_sums(B, whole=()))
    assert ppl.startswith("  PPL: n/a")
    assert kld.startswith("  KLD: n/a")


def test_which_pairs() -> None:
    """By default, neighbouring rows with scores are pairs; other pairs are chosen by labels, which
    must exist.
    """
    run = run_of(C, FAILED, A, B)
    neighbours = [(first.label, second.label) for first, second in pairs.neighbours(run)]
    assert neighbours == [("c", "a"), ("a", "b")]
    ((first, second),) = pairs.pairs_by_label(run, [["b", "c"]])
    assert (first.label, second.label) == ("b", "c")
    message = refusal(pairs.check_labels, [["a", "x"]], ["a", "b"])
    assert message == "--pair: no model is called 'x'; there are: a, b"


def test_a_short_text_has_a_caution() -> None:
    run = run_of(with_sums(A, length=5000), B, texts=[{"name": "text", "text_tokens": 5001}])
    caution = pairs.pair_lines(pairs.neighbours(run), run)[len(pairs.HEADING)]
    assert "5,000" in caution
    assert "5,001" in caution


def test_a_bound_differs_by_at_least_and_not_by_more() -> None:
    """KLD: 1/40 * (1 + 1 + 1 + 2) = 0.125 +- 0.02887, if both numbers were exact."""
    bound = replace(B, kld_kind="bound")
    assert lines_of(A, bound)[2:] == [
        "  KLD: a is better: at least 0.125 ± 0.029 nats",
        "       difference -0.125 or less, 95 %: -0.033 or less",
    ]
    assert lines_of(bound, A)[3] == "       difference +0.125 or more, 95 %: +0.033 or more"
    # The other way round nothing follows.
    (line,) = lines_of(replace(A, kld_kind="bound"), B)[2:]
    assert line.startswith("  KLD: n/a: ")
