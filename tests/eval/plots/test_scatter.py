"""The plot: every label readable, every group distinct, the same picture each time."""

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.transforms import Bbox

from eval.plots import labels, scatter, style
from eval.plots.scatter import Level, Point
from tests.support.drawn import apart, closest, extents, named, within

ROWS = (
    ("bf16", 16.0, 7.324),
    ("EXL3 2.0", 2.0, 9.010),
    ("EXL3 2.5", 2.5, 8.121),
    ("EXL3 3.0 [h6]", 3.0, 7.702),
    ("EXL3 3.5", 3.5, 7.531),
    ("EXL3 4.0", 4.0, 7.431),
    ("EXL3 5.0", 5.0, 7.352),
    ("EXL3 6.0", 6.0, 7.334),
    ("W4A16 g32", 4.63, 7.442),
    ("W4A16 g128", 4.25, 7.508),
    ("NVFP4", 4.5, 7.611),
    ("FP8", 8.0, 7.342),
    ("W8A8", 8.02, 7.351),
    ("GGUF Q2_K", 2.96, 8.402),
    ("GGUF Q3_K_M", 3.91, 7.682),
    ("GGUF Q4_0", 4.55, 7.590),
    ("GGUF Q4_K_M", 4.85, 7.421),
    ("GGUF Q5_K_M", 5.69, 7.360),
    ("GGUF Q6_K", 6.56, 7.338),
    ("GGUF Q8_0", 8.5, 7.327),
)
TABLE = [Point(*row) for row in ROWS]


def clump(count: int, *, spread: float) -> list[Point]:
    """A cloud around 4 bpw with that standard deviation, and two points far away that keep the axes wide."""
    rng = random.Random(count)
    cloud = [Point(f"G{i % 5} variant{i}", rng.gauss(4, spread), rng.gauss(7, spread / 20)) for i in range(count - 2)]
    return [*cloud, Point("bf16", 16, 6.8), Point("EXL3 2.0", 2, 7.4)]


CASES = {
    "table": TABLE,
    "shuffled table": random.Random(0).sample(TABLE, len(TABLE)),
    "cloud": clump(30, spread=0.6),
    "clump": clump(30, spread=0.2),
    "outlier": [*TABLE, Point("GGUF IQ1_S", 1.8, 9143.2), Point("BNB nf4", 4.1, 88.0)],
    "one": [Point("EXL3 4.0", 4.0, 7.4)],
    "zero": [Point("bf16", 0.0, 0.0)],
    "same x": [Point(f"EXL3 v{i}", 4.0, 7.4 + 0.01 * i) for i in range(8)],
    "same y": [Point(f"EXL3 v{i}", 4.0 + i / 10, 7.4) for i in range(8)],
    "identical": [Point("EXL3 4.0", 4.0, 7.4), Point("AWQ g128", 4.0, 7.4), Point("AWQ g64", 4.0, 7.4)],
    "odd labels": [Point("_x $a$ b$", 1, 1), Point("", 2, 2), Point("[a]", 3, 3), Point("L" * 90 + " m" * 90, 4, 4)],
}


@functools.cache
def figure_of(case: str, *, dark: bool = False) -> Figure:
    return draw(CASES[case], dark=dark)


def draw(points: list[Point], **keys: Any) -> Figure:
    return scatter.scatter(points, x_label="Bits per weight", y_label="PPL", title="Model", subtitle="data", **keys)


def legend_of(figure: Figure) -> Any:
    return figure.axes[0].get_legend()


def in_order(points: list[Point]) -> list[Point]:
    return sorted(points, key=lambda p: (p.x, p.y, p.label))


def test_select_keeps_what_is_finite_and_within_the_limits() -> None:
    a, b, c = Point("a", 8, 2), Point("b", 4, 3), Point("c", 6, 9)
    broken = [Point("n", float("nan"), 1), Point("i", 1, float("inf")), Point("m", 1, float("nan"))]
    assert scatter.select([a, broken[0], b, broken[1], c, broken[2]], None, None) == [a, b, c]
    assert scatter.select([a, b, c], 6, None) == [b, c]
    assert scatter.select([a, b, c], None, 3) == [a, b]
    assert scatter.select([a, b, c], 6, 3) == [b]


def test_no_points_is_an_error() -> None:
    with pytest.raises(ValueError, match="no points"):
        draw([])


@pytest.mark.parametrize("case", CASES)
def test_labels_overlap_nothing(case: str) -> None:
    figure = figure_of(case)
    texts, marks = labels.boxes_of(figure), labels.boxes_of(figure, "point")
    assert len(texts) == len(marks) == len(CASES[case])
    assert closest(texts) > 1
    assert closest(texts, marks) > 1
    axes, legend = figure.axes[0].get_window_extent(), legend_of(figure).get_window_extent()
    assert all(within(text, axes) for text in texts)
    assert apart(axes, legend) > 1
    assert legend.x1 <= figure.bbox.x1
    assert legend.y0 >= 0
    assert axes.width > 0.6 * figure.bbox.width


@pytest.mark.parametrize("case", ["table", "clump"])
def test_labels_stay_apart_at_the_resolution_of_svg(case: str) -> None:
    figure = draw(CASES[case])
    figure.set_dpi(72)
    figure.draw_without_rendering()  # texts remember the resolution they were last drawn at
    texts, marks = labels.boxes_of(figure), labels.boxes_of(figure, "point")
    assert closest(texts) > 0
    assert closest(texts, marks) > 0


def test_labels_give_name_and_value_and_stay_near() -> None:
    figure = figure_of("table")
    expected = [f"{style.split_label(p.label)[1]}\n{p.y:.3f}" for p in in_order(TABLE)]
    assert [text.get_text() for text in named(figure, "label")] == expected
    boxes = zip(labels.boxes_of(figure), labels.boxes_of(figure, "point"), strict=True)
    assert max(apart(label, mark) for label, mark in boxes) < 100


def test_a_leader_joins_each_label_that_moved_away_to_its_point() -> None:
    figure = figure_of("clump")
    pixels = figure.axes[0].transData.transform
    leaders = [pixels(line.get_xydata()) for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    moved = 0
    for label, mark in zip(labels.boxes_of(figure), labels.boxes_of(figure, "point"), strict=True):
        if apart(label, mark) > 30:
            moved += 1
            middle = (mark.x0 + mark.x1) / 2, (mark.y0 + mark.y1) / 2
            own = [end for start, end in leaders if np.allclose(start, middle, atol=0.5)]
            assert any(apart(label, Bbox([end, end])) < 8 for end in own)
    assert moved >= 10
    assert sum(line.get_linestyle() == "-" for line in figure_of("one").axes[0].lines) == 0


def test_labels_without_room_are_left_out_and_counted() -> None:
    rng = random.Random(1)
    figure = draw([Point(f"G{i} " + "word " * 200, rng.random(), rng.random()) for i in range(15)])
    texts, marks = labels.boxes_of(figure), labels.boxes_of(figure, "point")
    assert 3 < len(texts) < 15
    assert closest(texts) > 0
    assert closest(texts, marks) > 0
    assert f"no room for {15 - len(texts)} of 15 labels" in {text.get_text() for text in figure.axes[0].texts}


def test_groups_of_the_table_have_their_own_colours() -> None:
    figure = figure_of("table")
    looks: dict[str, set[tuple[object, object]]] = {}
    for point, mark in zip(in_order(TABLE), named(figure, "point"), strict=True):
        seen = (mark.get_markerfacecolor(), mark.get_marker())
        looks.setdefault(style.split_label(point.label)[0], set()).add(seen)
    assert all(len(found) == 1 for found in looks.values())
    colours, markers = zip(*(found.pop() for found in looks.values()), strict=True)
    assert len(set(colours)) == len(set(markers)) == len(looks) == 7
    legend = legend_of(figure)
    assert {text.get_text() for text in legend.get_texts()} == set(looks)


def test_dotted_line_through_groups_in_x_order() -> None:
    dotted = [line for line in figure_of("table").axes[0].lines if line.get_linestyle() == ":"]
    paths = sorted([tuple(np.asarray(line.get_xdata())) for line in dotted], key=len)
    assert paths == [
        (4.25, 4.63),
        (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0),
        (2.96, 3.91, 4.55, 4.85, 5.69, 6.56, 8.5),
    ]


def test_huge_outliers_do_not_flatten_the_rest() -> None:
    figure = figure_of("outlier")
    low, high = figure.axes[0].get_ylim()
    assert low < 7.324
    assert 9.01 < high < 10
    texts = {text.get_text() for text in named(figure, "label")}
    assert {"IQ1_S\n9143.200 (off the scale)", "nf4\n88.000 (off the scale)", "2.0\n9.010"} <= texts
    hollow = [mark for mark in named(figure, "point") if mark.get_markerfacecolor() == "#ffffff"]
    assert [mark.get_ydata()[0] for mark in hollow] == [high, high]


def test_what_is_merely_high_stays_to_scale() -> None:
    steep = [Point(f"EXL3 {b}", b, 7 + 200 / 4**b) for b in (1, 2, 3, 4, 5, 6)]
    figures = figure_of("table"), draw(steep), draw([Point("a", 1, 7.0), Point("b", 2, 7.001), Point("c", 3, 7.5)])
    assert not any("scale" in text.get_text() for figure in figures for text in named(figure, "label"))


KLDS = [Point("bf16", 16, 0.0, "reference"), Point("vLLM bf16", 16, 0.0004, "0.00040"),
        Point("vLLM FP8", 8, 0.02, "0.02000"), Point("vLLM W4A16", 4.5, 0.3, "0.30000")]  # fmt: skip


def draw_kld(points: list[Point], **keys: Any) -> Figure:
    return scatter.scatter(points, x_label="x", y_label="KLD", title="t", from_zero=True, to_scale=1.0, **keys)


@pytest.mark.parametrize("points", [KLDS, KLDS[:1], KLDS[1:], [Point("a", 4, 0.3), Point("b", 5, 0.31)]])
def test_a_kld_axis_has_zero_and_room_for_a_marker_below_it(points: list[Point]) -> None:
    figure = draw_kld(points)
    axes, (low, high) = figure.axes[0], figure.axes[0].get_ylim()
    assert -0.05 < low / high < -0.04
    assert high > max(point.y for point in points)
    assert min(tick for tick in axes.get_yticks() if tick >= low) == 0
    ticks = extents(axes.get_xticklabels())
    assert min(apart(mark, tick) for mark in labels.boxes_of(figure, "point") for tick in ticks) > 1


def test_a_value_below_zero_is_still_on_the_axis() -> None:
    low, high = draw_kld([*KLDS, Point("EXL3 8.0", 8, -0.1)]).axes[0].get_ylim()
    assert low == pytest.approx(-0.1 - scatter.FLOOR * high)


def test_what_is_shown_for_y_can_be_given() -> None:
    texts = [text.get_text() for text in named(draw_kld(KLDS), "label")]
    assert texts == ["W4A16\n0.30000", "FP8\n0.02000", "bf16\nreference", "bf16\n0.00040"]


def test_ordinary_klds_stay_to_scale_and_a_broken_model_does_not() -> None:
    """0.3 is more than ten times 0.02, and 8-bit against 4-bit no outlier; 9 nats are."""
    assert not any("scale" in text.get_text() for text in named(draw_kld(KLDS), "label"))
    figure = draw_kld([*KLDS, Point("GGUF IQ1_S", 2, 9.0, "9.00000")])
    assert [text.get_text() for text in named(figure, "label") if "scale" in text.get_text()] == [
        "IQ1_S\n9.00000 (off the scale)"
    ]
    assert 0.3 < figure.axes[0].get_ylim()[1] < 0.4


def test_a_point_that_another_all_but_covers_shows_around_it() -> None:
    sizes = {mark.get_ydata()[0]: mark.get_markersize() for mark in named(draw_kld(KLDS), "point")}
    assert sizes[0.0] > sizes[0.0004] == sizes[0.02] == sizes[0.3]


def test_identical_points_all_show() -> None:
    sizes = [mark.get_markersize() for mark in named(figure_of("identical"), "point")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_odd_labels_are_shown_as_written() -> None:
    figure = figure_of("odd labels")
    legend = [text.get_text() for text in legend_of(figure).get_texts()]
    assert {"_x", "?", "[a]"} <= set(legend)
    first = named(figure, "label")[0]
    assert first.get_text() == "$a$ b$\n1.000"
    assert not first.get_parse_math()


def test_themes(tmp_path: Path) -> None:
    for dark in (False, True):
        style.save(figure_of("one", dark=dark), tmp_path / "plot.png")
        image = imread(tmp_path / "plot.png")[:, :, :3]
        spots = image[0, 0], image[700, 600]  # outside and inside the axes
        assert all(spot.max() < 0.2 if dark else spot.min() > 0.8 for spot in spots)
        text = named(figure_of("one", dark=dark), "label")[0]
        assert (np.mean(text.get_color()) > 0.5) == dark


def test_nothing_global_changes(tmp_path: Path) -> None:
    style.save(draw(TABLE, dark=True), tmp_path / "before.svg")
    with mpl.rc_context({"font.family": "monospace", "xtick.major.size": 20, "savefig.facecolor": "red"}):
        before = dict(mpl.rcParams)
        style.save(draw(TABLE, dark=True), tmp_path / "after.svg")
        assert dict(mpl.rcParams) == before
    assert (tmp_path / "before.svg").read_bytes() == (tmp_path / "after.svg").read_bytes()
    assert plt.get_fignums() == []


BARS = [Point("EXL3 2.0", 2, 30.0, error=5.0), Point("EXL3 4.0", 4, 22.0, error=2.0), Point("GGUF Q8_0", 8, 21.0),
        Point("W8A8", 9, 21.0, error=1e-3), Point("GGUF Q2_K", 3, 500.0, error=50.0)]  # fmt: skip


@pytest.mark.parametrize("log_y", [False, True])
def test_error_bars_are_one_error_long_and_behind_their_points(log_y: bool) -> None:
    """None for what has no error, has one that its marker hides, or is off the scale."""
    points = BARS[:4] if log_y else BARS
    figure = draw(points, log_y=log_y)
    bars = {float(bar.get_xdata()[0]): tuple(bar.get_ydata()) for bar in named(figure, "bar")}
    assert bars == {2.0: (25.0, 35.0), 4.0: (20.0, 24.0)}
    low, high = figure.axes[0].get_ylim()
    assert low < 20
    assert 35 < high < 60
    mark = named(figure, "point")[0]
    assert named(figure, "bar")[0].get_zorder() < mark.get_zorder()
    assert named(figure, "bar")[0].get_color() == mark.get_color()


def test_a_bar_that_its_marker_hides_appears_once_it_is_longer() -> None:
    figure = draw(BARS)
    box, pixels = labels.boxes_of(figure, "point")[3], figure.axes[0].transData.inverted().transform
    half = float(np.ptp(pixels([(0, box.y0), (0, box.y1)])[:, 1])) / 2
    for factor, drawn in (0.9, 2), (1.1, 3):
        points = [replace(p, error=factor * half) if p.label == "GGUF Q8_0" else p for p in BARS]
        assert len(named(draw(points), "bar")) == drawn


def test_a_bar_down_to_zero_ends_at_the_edge_of_a_logarithmic_axis() -> None:
    figure = draw([Point("a", 1, 0.1, error=0.2), Point("b", 2, 1.0)], log_y=True)
    assert tuple(named(figure, "bar")[0].get_ydata()) == (figure.axes[0].get_ylim()[0], pytest.approx(0.3))


LEVELS = [Level(7.3, "reference 7.30"), Level(7.9, "noise floor 7.90", dotted=True)]


@pytest.mark.parametrize("case", ["table", "cloud", "clump"])
@pytest.mark.parametrize("log_y", [False, True])
def test_lines_lie_right_across_at_their_height_and_their_names_touch_nothing(case: str, log_y: bool) -> None:
    figure = draw(CASES[case], levels=LEVELS, log_y=log_y)
    axes, lines = figure.axes[0], named(figure, "level")
    assert [tuple(line.get_ydata()) for line in lines] == [(7.3, 7.3), (7.9, 7.9)]
    assert all(tuple(line.get_xdata()) == axes.get_xlim() for line in lines)
    names, texts = named(figure, "level-name"), labels.boxes_of(figure)
    assert [name.get_text() for name in names] == ["reference 7.30", "noise floor 7.90"]
    boxes = extents(names)
    assert closest(boxes) > 1
    assert closest(boxes, texts) > 1
    assert closest(boxes, labels.boxes_of(figure, "point")) > 1
    assert closest(texts) > 1
    for level, box in zip(LEVELS, boxes, strict=True):
        height = axes.transData.transform((5, level.y))[1]
        assert within(box, axes.bbox)
        assert 0 < max(box.y0 - height, height - box.y1) < 20
    dashed, dotted = (line._unscaled_dash_pattern[1] for line in lines)
    assert dashed[0] > 3 * dotted[0]


def test_a_line_beyond_the_axis_is_not_drawn() -> None:
    """The outliers of the table are far above, and a line among them belongs there too."""
    figure = draw(CASES["outlier"], levels=[Level(5000.0, "high")])
    assert not named(figure, "level") + named(figure, "level-name")
    assert figure.axes[0].get_ylim()[1] < 10
    assert named(draw(CASES["outlier"], levels=[Level(6.0, "low")]), "level")


def test_labels_keep_clear_of_lines_and_bars_where_they_can() -> None:
    figure = draw([Point("EXL3 4.0", 4.0, 7.4, error=0.3), Point("b", 8, 7.0)], levels=[Level(7.4, "here")])
    label = labels.boxes_of(figure)[0]
    assert closest([label], labels.boxes_of(figure, "level")) >= 0
    assert closest([label], labels.boxes_of(figure, "bar")) >= 0


def test_a_logarithmic_axis_shows_all_to_scale_and_zero_at_a_tick_of_its_own() -> None:
    points = [*KLDS, Point("GGUF IQ1_S", 2, 9.0, "9.00000"), Point("EXL3 8.0", 8, -1e-6, "0.00000")]
    figure = draw_kld(points, log_y=True)
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    assert not any("off the scale" in text.get_text() for text in named(figure, "label"))
    marks = {text.get_text(): mark for text, mark in zip(named(figure, "label"), named(figure, "point"), strict=True)}
    zero = [marks["bf16\nreference"], marks["8.0\n0.00000"]]
    assert all(mark.get_markerfacecolor() == "#ffffff" for mark in zero)
    ticks = dict(zip([t.get_text() for t in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    assert {float(mark.get_ydata()[0]) for mark in zero} == {ticks["0"]}
    assert ticks["0"] < 0.0003
    assert min(tick for name, tick in ticks.items() if name != "0") > 2 * ticks["0"]
    shown = [mark for mark in named(figure, "point") if mark not in zero]
    assert sorted(mark.get_ydata()[0] for mark in shown) == [0.0004, 0.02, 0.3, 9.0]
    gap = min(box.y0 for box in extents(shown)) - max(box.y1 for box in extents(zero))
    assert gap > 0.08 * axes.bbox.height
    below = extents(axes.get_xticklabels())
    assert min(apart(mark, tick) for mark in extents(zero) for tick in below) > 1


def test_without_zero_a_logarithmic_axis_has_no_such_tick() -> None:
    figure = draw_kld(KLDS[1:], log_y=True)
    assert "0" not in [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert min(mark.get_ydata()[0] for mark in named(figure, "point")) == 0.0004


def test_nothing_above_zero_cannot_be_logarithmic() -> None:
    with pytest.raises(ValueError, match="nothing above 0"):
        draw_kld(KLDS[:1], log_y=True)


def test_the_legend_is_sorted_and_each_name_has_the_look_of_its_group() -> None:
    figure = draw([Point(name, 1, y) for y, name in enumerate(["gguf 1", "EXL3 2", "bf16", "AWQ 4"])])
    legend = legend_of(figure)
    assert [text.get_text() for text in legend.get_texts()] == ["AWQ", "bf16", "EXL3", "gguf"]
    looks = [(handle.get_color(), handle.get_marker()) for handle in legend.get_lines()]
    marks = named(figure, "point")
    assert looks == [(marks[i].get_color(), marks[i].get_marker()) for i in (3, 2, 1, 0)]
