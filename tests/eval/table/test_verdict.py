"""The sentence that ends a run, to the letter: each case by hand, of four blocks of ten tokens.

KLDs are alike in every block, so that differences have no error, unless a test says otherwise; the reference's losses
are 10, 20, 30 and 40.  Intervals reach 3.182 errors far.
"""

from __future__ import annotations

from typing import Any

from compare_q.eval.results import ModelResult, RunResult
from compare_q.eval.stats.uncertainty import Mean
from compare_q.eval.table.verdict import verdict
from tests.support import made
from tests.support.made import REF, replace, results_of, run_of, run_result, with_against, with_sums

HIGHER = (14.0, 24.0, 34.0, 44.0)
"""0.1 nats a token above the reference's in every block: a difference without an error."""
SWAYING = (16.0, 18.0, 36.0, 38.0)
"""Off by 6, -2, 6 and -2: 0.2 nats, with an error of 0.32 (tests/eval/results/test_differences.py)."""


def row(label: str, kld: float, top: float = 0.9, *, nll: tuple[float, ...] = HIGHER, **keys: Any) -> ModelResult:
    """A quantized row with this KLD in every block."""
    blocks = {"nll": nll, "kld": (10 * kld,) * 4, **keys.pop("blocks", {})}
    model = with_sums(replace(made.QUANT, label=label, **keys), **blocks)
    return with_against(model, kld=Mean(kld, 40 * kld, 40, 0, 0.001), same_top=Mean(top, 40 * top, 40, 0, 0.01))


FP8, Q4 = row("FP8", 0.008, 0.989, nll=SWAYING), row("Q4_K_M", 0.0328)
NOISE = row("noise", 0.005, spec={"noise_floor": True})
SWAYED = (0.6, -0.2, 0.6, -0.2)
"""Added to a KLD's block sums: 0.02 nats, with an error of 0.032."""


def said(*models: ModelResult, **keys: Any) -> str:
    return verdict(results_of(run_of(*models, **keys)))


def short(length: int, *models: ModelResult) -> list[ModelResult]:
    return [with_sums(model, length=length) for model in models]


KEPT = "FP8 keeps 98.9 % of the most probable tokens of bf16 (KLD 0.0080 ± 0.0010)"


def test_two_rows_and_a_reference() -> None:
    assert said(REF, FP8, Q4) == (
        f"{KEPT}; Q4_K_M loses more for certain: 4.1 times the KLD. "
        "PPL cannot be told apart from bf16's: FP8. PPL is higher than bf16's for certain: Q4_K_M."
    )


def test_one_row_and_a_reference() -> None:
    assert said(REF, Q4) == (
        "Q4_K_M keeps 90.0 % of the most probable tokens of bf16 (KLD 0.0328 ± 0.0010). "
        "PPL is higher than bf16's for certain: Q4_K_M."
    )
    lower = row("odd", 0.0328, nll=(9.0, 19.0, 29.0, 39.0))
    assert said(REF, lower).endswith("PPL is lower than bf16's for certain: odd.")


def test_rows_that_are_not_told_apart() -> None:
    """0.02 nats more, with an error of 0.032: the best measured one is not called better."""
    swaying = row("Q5", 0.028, blocks={"kld": tuple(0.08 + each for each in SWAYED)})
    assert said(REF, FP8, swaying) == (
        f"{KEPT}; it cannot be told apart from Q5. "
        "PPL cannot be told apart from bf16's: FP8. PPL is higher than bf16's for certain: Q5."
    )


def test_rows_within_the_noise_floor_are_not_ranked() -> None:
    """Twice the floor's 0.005 is the limit: 0.008 and 0.01 are below it, and differ without any error."""
    near = row("Q8_0", 0.01)
    assert said(REF, NOISE, FP8, near, row("Q4_K_M", 0.08)) == (
        f"{KEPT}, near what other roundings of the same weights lose; KLD cannot rank it beside Q8_0; "
        "Q4_K_M loses more for certain: 10 times the KLD. "
        "PPL cannot be told apart from bf16's: FP8. PPL is higher than bf16's for certain: Q8_0 and Q4_K_M."
    )
    assert said(REF, NOISE, row("Q4_K_M", 0.08)).startswith(
        "Q4_K_M keeps 90.0 % of the most probable tokens of bf16 (KLD"
    )
    assert said(REF, NOISE) == "bf16 has a PPL of 7.50 ± 0.85 on this text; there is no other to compare it with."


def test_nothing_is_certain_on_a_short_text() -> None:
    assert said(*short(8191, REF, FP8, Q4)) == (
        f"{KEPT}; Q4_K_M loses more: 4.1 times the KLD. PPL cannot be told apart from bf16's: FP8. "
        "PPL is higher than bf16's: Q4_K_M. On a text of 8,191 tokens nothing of this is certain."
    )
    assert said(*short(1999, REF, FP8, Q4)) == (
        f"{KEPT}; Q4_K_M loses more: 4.1 times the KLD. "
        "Whether Q4_K_M really loses more is not known: the text is too short. "
        "PPL cannot be told apart from bf16's: FP8. PPL is higher than bf16's: Q4_K_M. "
        "On a text of 1,999 tokens nothing of this is certain."
    )


def test_nothing_is_certain_without_errors() -> None:
    one = {"tokens": (10,), "nll": (5.0,), "kld": (0.08,), "same_top": (9.0,)}
    assert said(*(with_sums(model, **one) for model in (REF, FP8, Q4))) == (
        f"{KEPT}; Q4_K_M loses more: 4.1 times the KLD. "
        "Whether Q4_K_M really loses more is not known: the text is too short. "
        "Nothing of this is certain: no errors are known."
    )


def test_scores_that_are_missing_are_no_verdict() -> None:
    """Of the best row none is ranked, of another row only this one is not."""
    holes = {"blocks": {"whole": ("nll", "same_top")}}
    best, other = row("FP8", 0.008, 0.989, nll=SWAYING, **holes), row("Q3", 0.08, **holes)
    assert said(REF, best, Q4).startswith(
        f"{KEPT}; Q4_K_M loses more: 4.1 times the KLD. "
        "Whether Q4_K_M really loses more is not known: FP8 has no KL divergence at some tokens. PPL"
    )
    assert said(REF, FP8, Q4, other).startswith(
        f"{KEPT}; Q4_K_M loses more for certain: 4.1 times the KLD; Q3 loses more: 10 times the KLD. "
        "Whether Q3 really loses more is not known: they cannot be compared token by token. PPL"
    )
    silent = replace(made.BASE, label="server")
    assert said(REF, Q4, silent).endswith("PPL is higher than bf16's for certain: Q4_K_M. No KLD: server.")


def texts_of(*klds: dict[str, float]) -> RunResult:
    rows = [[row(label, kld) for label, kld in own.items()] for own in klds]
    return run_result(tuple(replace(run_of(REF, *own), name=f"text {i}") for i, own in enumerate(rows)))


def test_several_texts() -> None:
    """Means of 0.02 and 0.04; certain is what holds on each text."""
    assert verdict(texts_of({"A": 0.01, "B": 0.03}, {"A": 0.03, "B": 0.05})) == (
        "Over 2 texts A has the lowest mean KLD, 0.02000 ± 0.00071; higher on each text for certain: B."
    )
    assert verdict(texts_of({"A": 0.01, "B": 0.05}, {"A": 0.03, "B": 0.02})) == (
        "Over 2 texts A has the lowest mean KLD, 0.02000 ± 0.00071; not higher for certain on each text: B."
    )
