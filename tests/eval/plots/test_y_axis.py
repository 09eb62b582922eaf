"""The scale of values around a reference: gold values by hand, and what its ticks say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compare_q.eval.plots import scatter
from compare_q.eval.plots.measures import PPL
from compare_q.eval.plots.points import Point
from compare_q.eval.plots.scatter import MOST_TICKS, Excess, excess_over
from compare_q.eval.plots.style import is_wide
from compare_q.eval.results.run_result import TextResult
from tests.support import real_table


def test_heights_by_hand() -> None:
    """asinh(x) = ln(x + sqrt(x^2 + 1)): twice ``near`` is ln(2 + sqrt(5)); far away a factor of ten is ln(10)."""
    scale = Excess(20.0, 0.01)
    assert scale.height([20.0, 20.4, 19.6]).tolist() == pytest.approx([0, math.log(2 + 5**0.5), -math.log(2 + 5**0.5)])
    tenfold = scale.height(20 + 200.0) - scale.height(20 + 20.0)
    assert tenfold == pytest.approx(math.log(10), rel=1e-4)
    values = np.array([1.0, 19.99, 20.0, 20.01, 25.0, 1e7])
    assert scale.value(scale.height(values)) == pytest.approx(values)


@pytest.mark.parametrize(
    ("rows", "near"),
    [
        ([("a", 20.2, None, False), ("b", 30.0, None, False), ("bf16", 20.001, None, True)], 0.01),
        ([("a", 20.01, 0.1, False), ("b", 30.0, 1.0, False)], 0.005),  # no nearer than its error says
        ([("a", 20.0001, None, False), ("b", 30.0, None, False)], 1e-5),
        ([("a", 20.0, None, False), ("b", 30.0, None, False)], math.inf),
        ([("a", 60.0, None, False)], math.inf),
        ([("bf16", 20.5, None, True)], math.inf),
    ],
)
def test_the_scale_resolves_what_the_errors_of_quantized_rows_allow(rows: list, near: float) -> None:
    points = [Point(label, 4.0, y, "", error, "", unquantized) for label, y, error, unquantized in rows]
    assert excess_over(20.0, points) == Excess(20.0, pytest.approx(near))


def test_a_scale_without_near_is_linear() -> None:
    scale = Excess(20.0, math.inf)
    assert scale.height([20.0, 21.0, 30.0]).tolist() == pytest.approx([0, 0.05, 0.5])
    assert scale.value([0, 0.05, 0.5]).tolist() == pytest.approx([20.0, 21.0, 30.0])
    assert scale.ticks(19.5, 30.0, sparse=True)[1] == ["0 %", "+20 %", "+40 %"]


@pytest.mark.parametrize(
    ("values", "wide"),
    [([0.33, 1.0], False), ([0.0, 0.1, 3.16], False), ([0.0, 0.1, 3.17], True), ([-1.0, 0.0], False), ([], False)],
)
def test_a_decade_and_a_half_by_hand(values: list[float], wide: bool) -> None:
    """10^1.5 is 31.62."""
    assert is_wide(values) == wide


def test_ticks_are_percents_at_their_values() -> None:
    values, texts = Excess(20.0, 0.01).ticks(19.7, 520.0, sparse=False)
    assert texts == ["-1 %", "0 %", "+1 %", "+2 %", "+5 %", "+10 %", "+20 %", "+50 %", "+100 %", "+200 %", "+500 %",
                     "+1,000 %", "+2,000 %"]  # fmt: skip
    assert values == pytest.approx(
        [20 * (1 + e / 100) for e in (-1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)]
    )
    assert Excess(20.0, 0.01).ticks(19.7, 520.0, sparse=True)[1] == [
        "-1 %",
        "0 %",
        "+1 %",
        "+10 %",
        "+100 %",
        "+1,000 %",
    ]
    many = Excess(20.0, 1e-5).ticks(19.7, 520.0, sparse=False)[1]
    assert "+0.001 %" in many
    assert "+2 %" not in many
    assert len(many) <= MOST_TICKS


@pytest.mark.parametrize("reference", [math.inf, math.nan, None])
def test_a_reference_of_no_finite_perplexity_has_no_excess(
    reference: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axis is perplexity itself then, and no line is drawn."""
    monkeypatch.setattr(TextResult, "reference_ppl", property(lambda run: reference))
    axes = scatter.scatter_figure(real_table.real_text(), measure=PPL).axes[0]
    assert axes.get_yscale() == "linear"
    assert axes.get_ylabel() == "Perplexity"
    assert not [line for line in axes.lines if (line.get_gid() or "").startswith("level")]
