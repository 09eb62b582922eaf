"""The y axis of the scatter plot: outliers, zero, logarithms."""

from __future__ import annotations

import math

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from compare_q.eval.plots import scatter
from compare_q.eval.plots.measures import PPL
from compare_q.eval.plots.points import Level, Point
from compare_q.eval.plots.style import is_wide
from compare_q.eval.results.run_result import TextResult
from tests.support import real_table
from tests.support.drawn import artists_of_kind, boxes_of, extents, pixels_apart
from tests.support.scatter_cases import KLDS, draw, draw_kld

pytestmark = pytest.mark.usefixtures("unplaced")


@pytest.mark.parametrize("points", [KLDS, KLDS[:1], KLDS[1:], [Point("a", 4, 0.3), Point("b", 5, 0.31)]])
def test_a_kld_axis_has_zero_and_room_for_a_marker_below_it(points: list[Point]) -> None:
    figure = draw_kld(points)
    axes, (low, high) = figure.axes[0], figure.axes[0].get_ylim()
    assert -0.05 < low / high < -0.04
    assert high > max(point.y for point in points)
    assert min(tick for tick in axes.get_yticks() if tick >= low) == 0
    ticks = extents(axes.get_xticklabels())
    assert min(pixels_apart(mark, tick) for mark in boxes_of(figure, "point") for tick in ticks) > 1


def test_a_value_below_zero_is_still_on_the_axis() -> None:
    low, high = draw_kld([*KLDS, Point("EXL3 8.0", 8, -0.1)]).axes[0].get_ylim()
    assert low == pytest.approx(-0.1 - scatter.FLOOR * high)


def test_a_logarithmic_axis_shows_all_to_scale_and_zero_at_a_tick_of_its_own() -> None:
    points = [*KLDS, Point("GGUF IQ1_S", 2, 9.0, "9.00000"), Point("EXL3 8.0", 8, -1e-6, "0.00000")]
    figure = draw_kld(points, log_y=True)
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    marks = {
        text.get_text(): mark
        for text, mark in zip(artists_of_kind(figure, "label"), artists_of_kind(figure, "point"), strict=True)
    }
    zero = [marks["bf16\nreference"], marks["EXL3 8.0\n0.00000"]]
    assert all(mark.get_markerfacecolor() == "#ffffff" for mark in zero)
    ticks = dict(zip([t.get_text() for t in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    assert {float(mark.get_ydata()[0]) for mark in zero} == {ticks["0"]}
    assert ticks["0"] < 0.0003
    assert min(tick for name, tick in ticks.items() if name != "0") > 2 * ticks["0"]
    shown = [mark for mark in artists_of_kind(figure, "point") if mark not in zero]
    assert sorted(mark.get_ydata()[0] for mark in shown) == [0.0004, 0.02, 0.3, 9.0]
    gap = min(box.y0 for box in extents(shown)) - max(box.y1 for box in extents(zero))
    assert gap > 0.08 * axes.bbox.height
    below = extents(axes.get_xticklabels())
    assert min(pixels_apart(mark, tick) for mark in extents(zero) for tick in below) > 1


def test_without_zero_a_logarithmic_axis_has_no_such_tick() -> None:
    figure = draw_kld(KLDS[1:], log_y=True)
    assert "0" not in [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert min(mark.get_ydata()[0] for mark in artists_of_kind(figure, "point")) == 0.0004


def test_nothing_above_zero_cannot_be_logarithmic() -> None:
    with pytest.raises(ValueError, match="nothing above 0"):
        draw_kld(KLDS[:1], log_y=True)


@pytest.mark.parametrize(("other", "name"), [(16.0, "16"), (16.01, "16"), (32.0, "unquantized")])
def test_the_break_is_behind_the_last_quantized_point_and_the_edge_says_what_is_there(other: float, name: str) -> None:
    """The tick has the size of the unquantized rows if it is one size; the ticks before the break are all there."""
    points = [
        Point("Q 4.5", 4.5, 9.0), Point("Q 8.02", 8.02, 8.0),
        Point("bf16 a", 16, 7.0, unquantized=True), Point("bf16 b", other, 7.1, unquantized=True),
    ]  # fmt: skip
    axes = draw(points).axes[0]
    edge = 8.02 + 0.1 * (8.02 / 2)
    assert axes.get_xticks()[-1] == pytest.approx(edge)
    assert 8.0 in axes.get_xticks()
    assert axes.get_xticklabels()[-1].get_text() == name
    (broken,) = [text for text in axes.texts if text.get_gid() == "break-0"]
    assert broken.get_position()[0] == pytest.approx((8.02 + edge) / 2)


def test_the_break_covers_no_tick_of_a_card() -> None:
    """Long labels make the legend wide and the axes narrow: there the break is near the ticks beside it."""
    points = [
        Point("smollm2-135m-nvfp4", 4.5, 0.5), Point("smollm2-135m-w8a8", 8.02, 0.05),
        Point("smollm2-135m", 16, 0.0, unquantized=True),
    ]  # fmt: skip
    figure = draw(points, card=True)
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    (broken,) = [each for each in axes.texts if each.get_gid() == "break-0"]
    patch = broken.get_bbox_patch()
    assert patch is not None
    covered = patch.get_window_extent()
    assert not any(covered.overlaps(name.get_window_extent()) for name in axes.get_xticklabels() if name.get_text())


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


def test_ticks_of_excesses_are_percents() -> None:
    """Powers of ten, and 2 and 5 times these as long as they are few."""
    near = -1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000
    assert scatter.percent_ticks(1.0, -1.5, 2500.0, scatter.MOST_TICKS) == pytest.approx(near)
    assert scatter.percent_ticks(1.0, -1.5, 2500.0, scatter.MOST_SPARSE) == pytest.approx([-1, 0, 1, 10, 100, 1000])
    assert scatter.percent_ticks(1e-3, -1.5, 2500.0, scatter.MOST_TICKS)[-2:] == pytest.approx([100, 1000])
    axes = draw([Point("a", 4, -0.5), Point("b", 5, 2000.0)], near=1.0).axes[0]
    assert axes.get_yscale() == "asinh"
    assert {"0 %", "+1 %", "+1,000 %"} <= {text.get_text() for text in axes.get_yticklabels()}


@pytest.mark.parametrize(
    ("values", "wide"),
    [([0.33, 1.0], False), ([0.0, 0.1, 3.16], False), ([0.0, 0.1, 3.17], True), ([-1.0, 0.0], False), ([], False)],
)
def test_a_decade_and_a_half_by_hand(values: list[float], wide: bool) -> None:
    """10^1.5 is 31.62."""
    assert is_wide(values) == wide


@pytest.mark.parametrize("reference", [math.inf, None])
def test_a_reference_of_no_finite_perplexity_has_no_excess(
    reference: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axis is perplexity itself then, and no line is drawn."""
    monkeypatch.setattr(TextResult, "reference_ppl", property(lambda run: reference))
    figure = scatter.scatter_figure(real_table.real_text(), measure=PPL)
    assert (figure.axes[0].get_yscale(), figure.axes[0].get_ylabel()) == ("linear", "Perplexity")
    assert not artists_of_kind(figure, "level")
