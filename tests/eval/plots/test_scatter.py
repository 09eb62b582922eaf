"""Scatter plots: points, bars and lines agree with the results; axes cover what matters."""

from __future__ import annotations

import math

import pytest

from compare_q.eval.plots import scatter
from compare_q.eval.plots.measures import BPW, KLD, PPL, VRAM, Measure, Size
from compare_q.eval.plots.points import Point, points_of
from compare_q.eval.results import RunResult
from tests.support.figures import artists_of_kind, draw, real_run
from tests.support.made import replace
from tests.support.several_texts import three

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unplaced")]


@pytest.mark.parametrize(("measure", "size"), [(PPL, BPW), (KLD, VRAM)])
def test_every_row_of_the_real_table_is_where_it_belongs(measure: Measure, size: Size) -> None:
    """x is the size, or the edge if unquantized.

    For PPL, y is the excess over the reference's 21.98 in percent.
    """
    run = real_run()
    figure = scatter.scatter_figure(run, measure=measure, size=size)
    points, left_out = points_of(run, size, measure)
    sizes = [point.x for point in points if not point.unquantized]
    edge = max(sizes) + 0.1 * max(max(sizes) - min(sizes), max(sizes) / 2)
    gold = []
    for point in points:
        x = point.x
        y = point.y
        if point.unquantized:
            x = edge
        if not measure.kld:
            y = 100 * (y / run.reference_ppl - 1)
        gold.append((x, y))
    marks = artists_of_kind(figure, "point")
    drawn = sorted((mark.get_xdata()[0], mark.get_ydata()[0]) for mark in marks)
    assert (len(drawn), left_out) == (41, [])
    for (x, y), (gold_x, gold_y) in zip(drawn, sorted(gold), strict=True):
        assert x == pytest.approx(gold_x)
        assert y == pytest.approx(gold_y) or gold_y == 0


def of_rows(*labels: str) -> RunResult:
    """Return the real table with only these rows."""
    run = real_run()
    return replace(run, models=tuple(model for model in run.models if model.label in labels))


TWO = "bf16 vLLM", "W4A16 g128", "EXL3 2.5 bpw"


@pytest.mark.parametrize("kind", [KLD, PPL])
def test_an_axis_begins_at_zero_where_all_is_within_a_decade_and_a_half(kind: Measure) -> None:
    figure = scatter.scatter_figure(of_rows(*TWO), measure=kind)
    assert figure.axes[0].get_yscale() == "linear"
    assert figure.axes[0].get_ylim()[0] <= 0
    # This row loses so little that the values span more than a decade and a half.
    more = scatter.scatter_figure(of_rows(*TWO, "W8A16 g128"), measure=kind)
    assert more.axes[0].get_yscale() == "symlog"


def test_several_texts_are_one_plot_of_all_tokens() -> None:
    """KLDs over all tokens are 0.05 and 0.03; PPL is 20 * (1 + KLD), and the reference's is 20."""
    figure = scatter.scatter_figure(three(), measure=KLD)
    klds = [mark.get_ydata()[0] for mark in artists_of_kind(figure, "point")]
    assert klds[:2] == pytest.approx([0.05, 0.03])
    # The noise floor is the mean of 0.001, 0.002 and 0.003.
    assert artists_of_kind(figure, "level")[0].get_ydata()[0] == pytest.approx(0.002)
    figure = scatter.scatter_figure(three(), measure=PPL)
    assert figure.axes[0].get_ylabel().startswith(scatter.EXCESS_AXIS)
    # 20 * (1 + 0.05) is 5 % above the reference's 20.
    assert artists_of_kind(figure, "point")[0].get_ydata()[0] == pytest.approx(5)


@pytest.mark.parametrize(
    ("rows", "linear_below"),
    [
        # 50 is 1.7 decades above 1.0; the row that is not quantized does not count.
        ([("a", 1.0, None, False), ("b", 50.0, None, False), ("bf16", 0.005, None, True)], 1.0),
        # Not below its error.
        ([("a", 0.05, 0.5, False), ("b", 50.0, 5.0, False)], 0.5),
        ([("a", 0.0005, None, False), ("b", 50.0, None, False)], 1e-3),
        ([("a", 0.0, None, False), ("b", 50.0, None, False)], None),
        ([("a", 200.0, None, False)], None),
        ([("bf16", 2.5, None, True)], None),
    ],
)
def test_the_scale_of_excesses_resolves_what_the_errors_of_quantized_rows_allow(
    rows: list, linear_below: float | None
) -> None:
    """The scale is linear (None) if values span at most a decade and a half."""
    points = []
    for label, y, error, unquantized in rows:
        points.append(Point(label, 4.0, y, error=error, unquantized=unquantized))
    axes = draw(points, scale="percent").axes[0]
    if linear_below is None:
        assert axes.get_yscale() == "linear"
    else:
        assert axes.get_yscale() == "symlog"
        assert axes.yaxis.get_transform().linthresh == pytest.approx(linear_below)


@pytest.mark.parametrize("reference", [math.inf, None])
def test_a_reference_of_no_finite_perplexity_has_no_excess(
    reference: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the axis shows perplexity itself, without a line."""
    monkeypatch.setattr(RunResult, "reference_ppl", property(lambda run: reference))
    figure = scatter.scatter_figure(of_rows(*TWO), measure=PPL)
    assert (figure.axes[0].get_yscale(), figure.axes[0].get_ylabel()) == ("linear", "Perplexity")
    assert not artists_of_kind(figure, "level")


def test_a_logarithmic_axis_shows_all_values_and_zero() -> None:
    values = (0.0, 0.0004, 0.02, 0.3, 9.0, -1e-6)
    points = [Point(f"EXL3 {i}", 2.0 + i, y) for i, y in enumerate(values)]
    figure = draw(points, scale="log")
    drawn = [mark.get_ydata()[0] for mark in artists_of_kind(figure, "point")]
    assert sorted(drawn) == sorted(values)
    ticks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert ticks[:3] == ["0", "0.0005", "0.001"]


BARS = [
    Point("EXL3 2.0", 2, 30.0, error=5.0),
    Point("EXL3 4.0", 4, 22.0, error=2.0),
    Point("GGUF Q8_0", 8, 21.0),
    Point("W8A8", 9, 21.0, error=1e-3),
]


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_error_bars_are_one_error_long(scale: str) -> None:
    """A point without an error has no bar."""
    figure = draw(BARS, scale=scale)
    bars = {}
    for bar in artists_of_kind(figure, "bar"):
        bars[float(bar.get_xdata()[0])] = tuple(bar.get_ydata())
    assert bars == {2.0: (25.0, 35.0), 4.0: (20.0, 24.0), 9.0: (20.999, 21.001)}
    low, high = figure.axes[0].get_ylim()
    assert low < 20
    assert 35 < high < 60


@pytest.mark.parametrize("card", [False, True])
def test_a_bound_has_an_arrow_and_no_bar_above_it(card: bool) -> None:
    run = of_rows("bf16 vLLM", "W8A8 int8", "EXL3 2.5 bpw")
    models = []
    for model in run.models:
        if model.label == "W8A8 int8":
            model = replace(model, kld_kind="bound")
        models.append(model)
    bounded = run.updated(models=tuple(models))
    figure = scatter.scatter_figure(bounded, measure=KLD, card=card)
    number = bounded.labels.index("W8A8 int8")
    (arrow,) = artists_of_kind(figure, "bound")
    assert arrow.get_gid() == f"bound-{number}"
    for bar in artists_of_kind(figure, "bar"):
        top = max(bar.get_ydata())
        model = bounded.models[int(bar.get_gid().partition("-")[2])]
        assert (top == pytest.approx(model.kld)) == (model.kld_kind == "bound")
    # No arrow in another plot, or without a bound.
    for other in (
        scatter.scatter_figure(bounded, measure=PPL, card=card),
        scatter.scatter_figure(run, measure=KLD, card=card),
    ):
        assert not artists_of_kind(other, "bound")
