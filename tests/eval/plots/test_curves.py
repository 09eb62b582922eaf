"""Curves over the position in the window: what lies where, gaps, and names beside their lines' ends."""

import functools

import numpy as np
import pytest
from matplotlib.figure import Figure

from compare_q.eval.plots import curves, labels, looks
from compare_q.eval.plots.curves import Line
from tests.support import real_table
from tests.support.drawn import artists_of_kind, extents, is_within, smallest_gap

pytestmark = pytest.mark.slow


@functools.cache
def real(kld: bool, dark: bool = False) -> Figure:
    lines = []
    for model in real_table.real_text().models:
        curve = model.estimates.curve if model.estimates else None
        values = curve.kld if curve and kld else curve.nll if curve else None
        if curve and values:
            lines.append(Line(model.label, curve.edges, values, model.is_reference))
    return curves.over_position(lines, y_label="y", title="t", dark=dark, log_y=kld)


@pytest.mark.parametrize("kld", [False, True])
@pytest.mark.parametrize("dark", [False, True])
def test_names_of_the_real_table_overlap_nothing_and_are_in_the_order_of_their_lines(kld: bool, dark: bool) -> None:
    figure = real(kld, dark)
    axes, texts = figure.axes[0], artists_of_kind(figure, "label")
    boxes = extents(texts)
    assert len(boxes) == (26 if kld else 27)
    assert smallest_gap(boxes) > 0
    assert smallest_gap(boxes, extents([*axes.get_xticklabels(), *axes.get_yticklabels()])) > 1
    assert all(is_within(box, figure.bbox) and box.x0 > axes.bbox.x1 for box in boxes)
    ends = [float(line.get_ydata()[-1]) for line in artists_of_kind(figure, "line")]
    heights = [(box.y0 + box.y1) / 2 for box in boxes]
    assert [end for _, end in sorted(zip(heights, ends, strict=True))] == sorted(ends)
    assert axes.bbox.y0 - 1 <= min(heights) <= max(heights) <= axes.bbox.y1 + 1


@pytest.mark.parametrize("kld", [False, True])
def test_a_leader_joins_each_line_and_its_name(kld: bool) -> None:
    figure = real(kld)
    axes = figure.axes[0]
    leaders = artists_of_kind(figure, "leader")
    for leader, line, box in zip(leaders, artists_of_kind(figure, "line"), labels.boxes_of(figure), strict=True):
        start, *_, end = axes.transAxes.transform(leader.get_xydata())
        assert start == pytest.approx(axes.transData.transform(line.get_xydata()[-1]))
        assert end[1] == pytest.approx((box.y0 + box.y1) / 2, abs=4)
        assert 0 < box.x0 - end[0] < 15


def test_bins_are_drawn_in_their_middle() -> None:
    """Positions 1; 2 and 3; 4 to 9: at 1, the roots of 2 * 3 and of 4 * 9."""
    figure = curves.over_position([Line("EXL3 4.0", (1, 2, 4, 10), (3.0, 2.0, 1.0))], y_label="y", title="t")
    (line,) = artists_of_kind(figure, "line")
    assert line.get_xdata().tolist() == pytest.approx([1, 6**0.5, 6])
    assert line.get_ydata().tolist() == [3.0, 2.0, 1.0]
    assert (figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) == ("log", "linear")
    assert line.get_color() == looks.group_styles(["EXL3"], "")["EXL3"][0].lower()


def test_what_is_not_known_is_a_gap_and_the_last_known_value_is_named() -> None:
    lines = [Line("a", (1, 2, 3, 4), (3.0, None, 1.0)), Line("b", (1, 2, 3, 4), (0.0, 2.0, None)),
             Line("c", (1, 2, 3, 4), (None, None, None))]  # fmt: skip
    figure = curves.over_position(lines, y_label="y", title="t", log_y=True)
    drawn = [line.get_ydata().tolist() for line in artists_of_kind(figure, "line")]
    assert drawn[0] == pytest.approx([3.0, np.nan, 1.0], nan_ok=True)
    assert drawn[1] == pytest.approx([np.nan, 2.0, np.nan], nan_ok=True)
    assert [text.get_text() for text in artists_of_kind(figure, "label")] == ["a", "b"]
    linear = curves.over_position(lines, y_label="y", title="t")
    assert artists_of_kind(linear, "line")[1].get_ydata().tolist() == pytest.approx([0.0, 2.0, np.nan], nan_ok=True)


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="no model has scores by position"):
        curves.over_position([], y_label="y", title="t")
    with pytest.raises(ValueError, match="no model has a value to draw"):
        curves.over_position([Line("a", (1, 2), (0.0,))], y_label="y", title="t", log_y=True)


def test_the_reference_is_thicker_above_the_others_and_named() -> None:
    reference, *others = artists_of_kind(real(False), "line")
    assert reference.get_linewidth() == 3.0 > max(line.get_linewidth() for line in others)
    assert reference.get_zorder() > max(line.get_zorder() for line in others)
    names = [text.get_text() for text in artists_of_kind(real(False), "label")]
    assert [name for name in names if "reference" in name] == [names[0]]
    assert names[0].endswith(" (reference)")


@pytest.mark.parametrize("dark", [False, True])
def test_of_many_models_those_that_matter_are_coloured(dark: bool) -> None:
    """The reference, the noise floor, and EXL3, Q4_K_M and W8A16, which no row of the table beats; no style twice."""
    drawn = {}
    for kld in (False, True):
        figure = curves.by_position(real_table.real_text(), kld=kld, dark=dark)
        names = [text.get_text() for text in artists_of_kind(figure, "label")]
        lines = artists_of_kind(figure, "line")
        looks = {name: (line.get_color(), line._unscaled_dash_pattern) for name, line in zip(names, lines, strict=True)}
        (grey,) = {look for look in looks.values() if list(looks.values()).count(look) > 1}
        drawn[kld] = {name: look for name, look in looks.items() if look != grey}
        assert len(set(drawn[kld].values())) == len(drawn[kld])
        assert f"grey: the {len(looks) - len(drawn[kld])} others" in figure.axes[0].texts[0].get_text()
    reference = drawn[False].pop("bf16 vLLM (reference)")
    assert drawn[False] == drawn[True]
    assert reference not in drawn[True].values()
    bits = ("2.0", "2.5", "3.0", "3.5", "4.0", "5.0", "6.0")
    assert set(drawn[True]) == {real_table.FLOOR, "GGUF Q4_K_M", "W8A16 g128", *(f"EXL3 {each} bpw" for each in bits)}


def test_many_names_get_a_smaller_font() -> None:
    many = [Line(f"EXL3 {i}", (1, 2, 3), (1.0, 1.0 + i / 1000)) for i in range(70)]
    figure = curves.over_position(many, y_label="y", title="t")
    assert smallest_gap(labels.boxes_of(figure)) > 0
    assert artists_of_kind(figure, "label")[0].get_fontsize() < curves.LARGEST
    assert all(is_within(box, figure.bbox) for box in labels.boxes_of(figure))


def test_names_without_room_are_left_out_and_counted() -> None:
    """151 models of as many groups: the reference and the outermost have their names."""
    many = [Line(f"G{i} model", (1, 2, 3), (1.0, 1.0 + i / 1000), i == 70) for i in range(151)]
    figure = curves.over_position(many, y_label="y", title="t")
    figure.draw_without_rendering()
    texts, (note,) = artists_of_kind(figure, "label"), artists_of_kind(figure, "note")
    assert note.get_text() == f"no room for {151 - len(texts)} of 151 names"
    assert 60 < len(texts) < 151
    assert {text.get_fontsize() for text in texts} == {curves.SMALLEST}
    assert {"G0 model", "G70 model (reference)", "G150 model"} <= {text.get_text() for text in texts}
    boxes = [*extents(texts), note.get_window_extent()]
    assert smallest_gap(boxes) > 0
    assert all(is_within(box, figure.bbox) for box in boxes)
    assert smallest_gap(boxes, extents([*figure.axes[0].get_xticklabels(), figure.axes[0].xaxis.label])) > 0
    assert len(artists_of_kind(figure, "line")) == 151
    assert not artists_of_kind(real(False), "note")


@pytest.mark.filterwarnings("error")
def test_long_names_stay_in_the_figure() -> None:
    long = [Line(f"{i} " + ("W" * 300 if i % 2 else "word " * 60), (1, 2, 3), (1.0, 1.0 + i), i == 0) for i in range(9)]
    figure = curves.over_position(long, y_label="y", title="t")
    assert all(is_within(box, figure.bbox) for box in labels.boxes_of(figure))
    assert figure.axes[0].bbox.width > 0.4 * figure.bbox.width
