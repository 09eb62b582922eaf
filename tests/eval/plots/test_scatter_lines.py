"""Error bars and horizontal lines of the scatter plot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compare_q.eval.plots.points import Level, Point
from tests.support.drawn import artists_of_kind, boxes_of, extents, is_within, smallest_gap
from tests.support.scatter_cases import CASES, draw

pytestmark = pytest.mark.slow

BARS = [Point("EXL3 2.0", 2, 30.0, error=5.0), Point("EXL3 4.0", 4, 22.0, error=2.0), Point("GGUF Q8_0", 8, 21.0),
        Point("W8A8", 9, 21.0, error=1e-3)]  # fmt: skip


@pytest.mark.parametrize("log_y", [False, True])
def test_error_bars_are_one_error_long_and_behind_their_points(log_y: bool, unplaced: None) -> None:
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


def test_a_bar_that_its_marker_hides_appears_once_it_is_longer(unplaced: None) -> None:
    figure = draw(BARS)
    box, pixels = boxes_of(figure, "point")[2], figure.axes[0].transData.inverted().transform
    half = float(np.ptp(pixels([(0, box.y0), (0, box.y1)])[:, 1])) / 2
    for factor, drawn in (0.9, 2), (1.1, 3):
        points = [replace(p, error=factor * half) if p.label == "GGUF Q8_0" else p for p in BARS]
        assert len(artists_of_kind(draw(points), "bar")) == drawn


def test_a_bar_down_to_zero_ends_at_the_edge_of_a_logarithmic_axis(unplaced: None) -> None:
    figure = draw([Point("a", 1, 0.1, error=0.2), Point("b", 2, 1.0)], log_y=True)
    assert tuple(artists_of_kind(figure, "bar")[0].get_ydata()) == (figure.axes[0].get_ylim()[0], pytest.approx(0.3))


LEVELS = [Level(7.3, "reference 7.30"), Level(7.9, "noise floor 7.90", dotted=True)]


@pytest.mark.parametrize(("case", "log_y"), [("table", True), ("clump", False)])
def test_lines_lie_right_across_at_their_height_and_their_names_touch_nothing(case: str, log_y: bool) -> None:
    figure = draw(CASES[case], levels=LEVELS, log_y=log_y)
    axes, lines = figure.axes[0], artists_of_kind(figure, "level")
    assert [tuple(line.get_ydata()) for line in lines] == [(7.3, 7.3), (7.9, 7.9)]
    assert all(tuple(line.get_xdata()) == axes.get_xlim() for line in lines)
    names, texts = artists_of_kind(figure, "level-name"), boxes_of(figure)
    assert [name.get_text() for name in names] == ["reference 7.30", "noise floor 7.90"]
    boxes = extents(names)
    assert smallest_gap(boxes) > 1
    assert smallest_gap(boxes, texts) > 1
    assert smallest_gap(boxes, boxes_of(figure, "point")) > 1
    assert smallest_gap(texts) > 1
    for level, box in zip(LEVELS, boxes, strict=True):
        height = axes.transData.transform((5, level.y))[1]
        assert is_within(box, axes.bbox)
        assert 0 < max(box.y0 - height, height - box.y1) < 20
    dashed, dotted = (line._unscaled_dash_pattern[1] for line in lines)
    assert dashed[0] > 3 * dotted[0]
