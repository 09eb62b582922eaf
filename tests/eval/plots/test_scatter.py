"""Scatter plots: points, bars, lines and legend are the results', and the axes show what matters."""

from __future__ import annotations

import functools
import math

import pytest
from matplotlib.figure import Figure

from compare_q.eval.plots import measures, scatter, style
from compare_q.eval.plots.measures import BPW, KLD, PPL, VRAM, Measure, Size
from compare_q.eval.plots.points import Level, Point
from compare_q.eval.results import TextResult
from tests.support import real_table
from tests.support.drawn import artists_of_kind, extents
from tests.support.made import replace
from tests.support.scatter_cases import KLDS, draw, draw_kld
from tests.support.several_texts import three

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unplaced")]


@functools.cache
def real(measure: Measure, size: Size) -> Figure:
    """The plot of the real table, drawn once."""
    return scatter.scatter_figure(real_table.real_text(), measure=measure, size=size)


@pytest.mark.parametrize(("measure", "size"), [(PPL, BPW), (KLD, VRAM)])
def test_every_row_of_the_real_table_is_where_it_belongs(measure: Measure, size: Size) -> None:
    figure = real(measure, size)
    rows, kld, vram = {}, measure.kld, size == VRAM
    sizes = [row[2] / 8 / 2**30 if vram else row[1] for row in real_table.ROWS if row[1] < 16]
    edge = max(sizes) + 0.1 * max(max(sizes) - min(sizes), max(sizes) / 2)
    for label, bpw, bits, ppl, value, ppl_error, kld_error in real_table.ROWS:
        y, error = (value, kld_error) if kld else (ppl, ppl_error)
        decimals = max(-math.floor(math.log10(error)), 0) if error else 3  # down to the error's first digit
        shown = "reference: 0" if kld and not value else f"{y:.{decimals}f}"
        mark = " †" if label == real_table.MARKED else ""
        x = edge if bpw == 16 else bits / 8 / 2**30 if vram else bpw
        if not kld:
            y, error = 100 * (y / 21.991 - 1), 100 * (error or 0) / 21.991
        name = label.split(" ", 1)[1] if label.startswith(("EXL3 ", "GGUF Q")) else label  # a size is enough
        rows[f"{name}{mark}\n{shown}"] = (x, y, error or 0)
    found = zip(artists_of_kind(figure, "label"), artists_of_kind(figure, "point"), strict=True)
    for text, mark in found:
        x, y, _ = rows[text.get_text()]
        assert mark.get_xdata()[0] == pytest.approx(x)
        if y:
            assert mark.get_ydata()[0] == pytest.approx(y)
    bars = {(round(float(bar.get_xdata()[0]), 6), *bar.get_ydata()) for bar in artists_of_kind(figure, "bar")}
    expected = {(round(x, 6), y - error, y + error) for x, y, error in rows.values()}
    assert all(any(bar == pytest.approx(other, rel=1e-9) for other in expected) for bar in bars)
    assert len(bars) == (0 if kld else 18)  # KLD's errors are smaller than any marker


def of_rows(*labels: str) -> TextResult:
    """The real table with these rows alone."""
    run = real_table.real_text()
    return replace(run, models=tuple(model for model in run.models if model.label in labels))


TWO = "bf16 vLLM", "W4A16 g128", "EXL3 2.5 bpw"


@pytest.mark.parametrize("kind", [KLD, PPL])
def test_an_axis_begins_at_zero_where_all_is_within_a_decade_and_a_half(kind: Measure) -> None:
    """KLD 0.354 is two thirds of 0.537, and PPL 31.3 is 75 % of the way from the reference's to 34.4: so they stand."""
    figure = scatter.scatter_figure(of_rows(*TWO), measure=kind)
    values = [float(mark.get_ydata()[0]) for mark in artists_of_kind(figure, "point")]
    heights = [(box.y0 + box.y1) / 2 for box in extents(artists_of_kind(figure, "point"))]
    (small, large, none), (a, b, zero) = values, heights
    assert (a - zero) / (b - zero) == pytest.approx((small - none) / (large - none), abs=0.005)
    assert (a - zero) / (b - zero) == pytest.approx(0.659 if kind is KLD else 0.749, abs=0.005)
    ticks = {text.get_text() for text in figure.axes[0].get_yticklabels()}
    assert ticks >= ({"0.0", "0.2", "0.4"} if kind is KLD else {"0 %", "+20 %", "+40 %"})
    assert figure.axes[0].get_ylabel() == (measures.kld_axis(of_rows(*TWO)) if kind is KLD else scatter.EXCESS_AXIS)
    more = scatter.scatter_figure(of_rows(*TWO, "W8A16 g128"), measure=kind)
    assert more.axes[0].get_yscale() == ("log" if kind is KLD else "asinh")
    assert "(logarithmic" in more.axes[0].get_ylabel() or kind is KLD


def test_several_texts_are_one_plot_of_their_means() -> None:
    figure = scatter.scatter_figure(*three().texts, measure=KLD)
    assert [mark.get_ydata()[0] for mark in artists_of_kind(figure, "point")][:2] == pytest.approx([0.05, 0.03])
    assert artists_of_kind(figure, "level")[0].get_ydata()[0] == pytest.approx(0.002)
    figure = scatter.scatter_figure(*three().texts, measure=PPL)
    assert figure.axes[0].get_ylabel().startswith(scatter.EXCESS_AXIS)
    best = artists_of_kind(figure, "point")[0].get_ydata()[0]
    assert best == pytest.approx(100 * (math.prod((1.05, 1.02, 1.08)) ** (1 / 3) - 1))


@pytest.mark.parametrize(
    ("rows", "near"),
    [
        ([("a", 20.2, None, False), ("b", 30.0, None, False), ("bf16", 20.001, None, True)], 1.0),
        ([("a", 20.01, 0.1, False), ("b", 30.0, 1.0, False)], 0.5),  # no nearer than its error says
        ([("a", 20.0001, None, False), ("b", 30.0, None, False)], 1e-3),
        ([("a", 20.0, None, False), ("b", 30.0, None, False)], math.inf),
        ([("a", 60.0, None, False)], math.inf),
        ([("bf16", 20.5, None, True)], math.inf),
    ],
)
def test_the_scale_of_excesses_resolves_what_the_errors_of_quantized_rows_allow(rows: list, near: float) -> None:
    points = [Point(label, 4.0, y, "", error, "", unquantized) for label, y, error, unquantized in rows]
    percents, levels, found = scatter.excesses(20.0, points, [Level(20.0, "reference")])
    assert found == pytest.approx(near)
    assert [p.y for p in percents] == pytest.approx([5 * y - 100 for _, y, _, _ in rows])
    assert [p.error for p in percents] == [None if e is None else pytest.approx(5 * e) for _, _, e, _ in rows]
    assert levels[0].y == 0


@pytest.mark.parametrize("reference", [math.inf, None])
def test_a_reference_of_no_finite_perplexity_has_no_excess(
    reference: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axis is perplexity itself then, and no line is drawn."""
    monkeypatch.setattr(TextResult, "reference_ppl", property(lambda run: reference))
    figure = scatter.scatter_figure(real_table.real_text(), measure=PPL)
    assert (figure.axes[0].get_yscale(), figure.axes[0].get_ylabel()) == ("linear", "Perplexity")
    assert not artists_of_kind(figure, "level")


def test_a_logarithmic_axis_shows_all_to_scale_and_zero_at_a_tick_of_its_own() -> None:
    points = [*KLDS, Point("GGUF IQ1_S", 2, 9.0, "9.00000"), Point("EXL3 8.0", 8, -1e-6, "0.00000")]
    figure = draw_kld(points, log_y=True)
    axes, marks = figure.axes[0], artists_of_kind(figure, "point")
    assert axes.get_yscale() == "log"
    zero = [mark for mark in marks if mark.get_markerfacecolor() == style.LIGHT.paper]
    ticks = dict(zip([t.get_text() for t in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    assert [float(mark.get_ydata()[0]) for mark in zero] == [ticks["0"]] * 2
    assert min(tick for name, tick in ticks.items() if name != "0") > 2 * ticks["0"]
    assert sorted(mark.get_ydata()[0] for mark in marks if mark not in zero) == [0.0004, 0.02, 0.3, 9.0]


BARS = [Point("EXL3 2.0", 2, 30.0, error=5.0), Point("EXL3 4.0", 4, 22.0, error=2.0), Point("GGUF Q8_0", 8, 21.0),
        Point("W8A8", 9, 21.0, error=1e-3)]  # fmt: skip


@pytest.mark.parametrize("log_y", [False, True])
def test_error_bars_are_one_error_long_and_behind_their_points(log_y: bool) -> None:
    """None for what has no error, or one that its marker hides."""
    figure = draw(BARS, log_y=log_y)
    bars = {float(bar.get_xdata()[0]): tuple(bar.get_ydata()) for bar in artists_of_kind(figure, "bar")}
    assert bars == {2.0: (25.0, 35.0), 4.0: (20.0, 24.0)}
    low, high = figure.axes[0].get_ylim()
    assert low < 20
    assert 35 < high < 60
    mark = artists_of_kind(figure, "point")[0]
    assert artists_of_kind(figure, "bar")[0].get_zorder() < mark.get_zorder()
    assert artists_of_kind(figure, "bar")[0].get_color() == mark.get_color()
