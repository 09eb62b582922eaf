"""The plot: every label readable, every group distinct, the same picture each time."""

import functools
import itertools
import math
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.transforms import Bbox

from eval import plot
from eval.plot import Point

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


def draw(points: list[Point], *, dark: bool = False) -> Figure:
    return plot.scatter(points, x_label="Bits per weight", y_label="PPL", title="Model", subtitle="data", dark=dark)


def named(figure: Figure, kind: str) -> list[Any]:
    """The texts ("label") or markers ("point"), in order of (x, y, label)."""
    return list(figure.findobj(lambda artist: (artist.get_gid() or "").startswith(f"{kind}-")))


def legend_of(figure: Figure) -> Any:
    return figure.axes[0].get_legend()


def apart(box: Bbox, other: Bbox) -> float:
    """Pixels between the boxes, below 0 if they overlap."""
    return float(max(box.x0 - other.x1, other.x0 - box.x1, box.y0 - other.y1, other.y0 - box.y1))


def in_order(points: list[Point]) -> list[Point]:
    return sorted(points, key=lambda p: (p.x, p.y, p.label))


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("EXL3 4.0", ("EXL3", "4.0")),
        ("GGUF Q4_K_M imat", ("GGUF", "Q4_K_M imat")),
        ("bf16", ("bf16", "bf16")),
        ("EXL3 4.0 [h8]", ("EXL3", "4.0")),
        ("  EXL3   4.0 [head 8 bits]  ", ("EXL3", "4.0")),
        ("bf16 [vLLM]", ("bf16", "bf16")),
        ("EXL3 [h8] 4.0", ("EXL3", "[h8] 4.0")),
        ("[only this]", ("[only", "this]")),
        ("", ("?", "?")),
    ],
)
def test_split_label(label: str, expected: tuple[str, str]) -> None:
    assert plot.split_label(label) == expected


def test_select_keeps_what_is_finite_and_within_the_limits() -> None:
    a, b, c = Point("a", 8, 2), Point("b", 4, 3), Point("c", 6, 9)
    broken = [Point("n", float("nan"), 1), Point("i", 1, float("inf")), Point("m", 1, float("nan"))]
    assert plot.select([a, broken[0], b, broken[1], c, broken[2]], None, None) == [a, b, c]
    assert plot.select([a, b, c], 6, None) == [b, c]
    assert plot.select([a, b, c], None, 3) == [a, b]
    assert plot.select([a, b, c], 6, 3) == [b]


def test_no_points_is_an_error() -> None:
    with pytest.raises(ValueError, match="no points"):
        draw([])


@pytest.mark.parametrize("case", CASES)
def test_labels_overlap_nothing(case: str) -> None:
    figure = figure_of(case)
    labels, marks = plot.label_boxes(figure), plot.label_boxes(figure, "point")
    assert len(labels) == len(marks) == len(CASES[case])
    assert min((apart(a, b) for a, b in itertools.combinations(labels, 2)), default=math.inf) > 1
    assert min(apart(a, b) for a in labels for b in marks) > 1
    axes, legend = figure.axes[0].get_window_extent(), legend_of(figure).get_window_extent()
    assert all(axes.x0 <= a.x0 < a.x1 <= axes.x1 and axes.y0 <= a.y0 < a.y1 <= axes.y1 for a in labels)
    assert apart(axes, legend) > 1
    assert legend.x1 <= figure.bbox.x1
    assert legend.y0 >= 0
    assert axes.width > 0.6 * figure.bbox.width


@pytest.mark.parametrize("case", ["table", "clump"])
def test_labels_stay_apart_at_the_resolution_of_svg(case: str) -> None:
    figure = draw(CASES[case])
    figure.set_dpi(72)
    figure.draw_without_rendering()  # texts remember the resolution they were last drawn at
    labels, marks = plot.label_boxes(figure), plot.label_boxes(figure, "point")
    assert min(apart(a, b) for a, b in itertools.combinations(labels, 2)) > 0
    assert min(apart(a, b) for a in labels for b in marks) > 0


def test_labels_give_name_and_value_and_stay_near() -> None:
    figure = figure_of("table")
    expected = [f"{plot.split_label(p.label)[1]}\n{p.y:.3f}" for p in in_order(TABLE)]
    assert [text.get_text() for text in named(figure, "label")] == expected
    boxes = zip(plot.label_boxes(figure), plot.label_boxes(figure, "point"), strict=True)
    assert max(apart(label, mark) for label, mark in boxes) < 100


def test_a_leader_joins_each_label_that_moved_away_to_its_point() -> None:
    figure = figure_of("clump")
    pixels = figure.axes[0].transData.transform
    leaders = [pixels(line.get_xydata()) for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    moved = 0
    for label, mark in zip(plot.label_boxes(figure), plot.label_boxes(figure, "point"), strict=True):
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
    labels, marks = plot.label_boxes(figure), plot.label_boxes(figure, "point")
    assert 3 < len(labels) < 15
    assert all(apart(a, b) > 0 for a, b in itertools.combinations(labels, 2))
    assert all(apart(a, b) > 0 for a in labels for b in marks)
    assert f"no room for {15 - len(labels)} of 15 labels" in {text.get_text() for text in figure.axes[0].texts}


def test_groups_of_the_table_have_their_own_colours() -> None:
    figure = figure_of("table")
    looks: dict[str, set[tuple[object, object]]] = {}
    for point, mark in zip(in_order(TABLE), named(figure, "point"), strict=True):
        look = (mark.get_markerfacecolor(), mark.get_marker())
        looks.setdefault(plot.split_label(point.label)[0], set()).add(look)
    assert all(len(found) == 1 for found in looks.values())
    colours, markers = zip(*(found.pop() for found in looks.values()), strict=True)
    assert len(set(colours)) == len(set(markers)) == len(looks) == 7
    legend = legend_of(figure)
    assert {text.get_text() for text in legend.get_texts()} == set(looks)


def test_many_groups_never_share_colour_and_marker() -> None:
    names = [f"group{i}" for i in range(80)]
    styles = plot.group_styles([*names, *names], "#000000")
    assert list(styles) == sorted(names)
    assert len(set(styles.values())) == 80
    assert len({styles[name][0] for name in sorted(names)[:8]}) == 8
    with pytest.raises(ValueError, match="81 groups"):
        plot.group_styles([*names, "one more"], "#000000")


def test_known_groups_look_the_same_in_every_company() -> None:
    alone = {name: plot.group_styles([name], "#000000")[name] for name in ("EXL3", "GGUF", "AWQ", "vLLM", "bf16")}
    assert len(set(alone.values())) == 5
    together = plot.group_styles(["aaa", "bf16", "vLLM", "AWQ", "GGUF", "EXL3", "zzz"], "#000000")
    assert {name: together[name] for name in alone} == alone
    assert len({colour for colour, _ in together.values()}) == 7
    lookalikes = plot.group_styles(["EXL3", "exl3", "BF16", "FP16"], "#000000")
    assert len({colour for colour, _ in lookalikes.values()}) == 4


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
    return plot.scatter(points, x_label="x", y_label="KLD", title="t", from_zero=True, to_scale=1.0, **keys)


@pytest.mark.parametrize("points", [KLDS, KLDS[:1], KLDS[1:], [Point("a", 4, 0.3), Point("b", 5, 0.31)]])
def test_a_kld_axis_starts_at_zero(points: list[Point]) -> None:
    low, high = draw_kld(points).axes[0].get_ylim()
    assert low == 0
    assert high > max(point.y for point in points)


def test_a_value_below_zero_is_still_on_the_axis() -> None:
    assert draw_kld([*KLDS, Point("EXL3 8.0", 8, -1e-6)]).axes[0].get_ylim()[0] == -1e-6


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


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_save_is_deterministic(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"
    for case, path, seconds in ("table", first, "1000000000"), ("shuffled table", second, "2000000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)  # the time that matplotlib takes for now
        plot.save(figure_of(case), path)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_saved_files_are_readable(tmp_path: Path) -> None:
    for name in ("a.png", "a.svg", "A.PDF"):
        plot.save(figure_of("table"), tmp_path / name)
    assert imread(tmp_path / "a.png").shape == (1440, 2080, 4)
    svg = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert {f"label-{i}" for i in range(20)} <= {element.get("id") for element in svg.iter()}
    assert (tmp_path / "A.PDF").read_bytes().startswith(b"%PDF-")


@pytest.mark.parametrize("name", ["plot.jpg", "plot", "plot.png.txt"])
def test_other_suffixes_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf"):
        plot.save(figure_of("one"), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(part: Path, **_: object) -> None:
        part.write_bytes(b"half")
        raise OSError("disk full")

    figure, path = figure_of("one"), tmp_path / "plot.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plot.save(figure, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_themes(tmp_path: Path) -> None:
    for dark in (False, True):
        plot.save(figure_of("one", dark=dark), tmp_path / "plot.png")
        image = imread(tmp_path / "plot.png")[:, :, :3]
        spots = image[0, 0], image[700, 600]  # outside and inside the axes
        assert all(spot.max() < 0.2 if dark else spot.min() > 0.8 for spot in spots)
        text = named(figure_of("one", dark=dark), "label")[0]
        assert (np.mean(text.get_color()) > 0.5) == dark


def test_nothing_global_changes(tmp_path: Path) -> None:
    plot.save(draw(TABLE, dark=True), tmp_path / "before.svg")
    with mpl.rc_context({"font.family": "monospace", "xtick.major.size": 20, "savefig.facecolor": "red"}):
        before = dict(mpl.rcParams)
        plot.save(draw(TABLE, dark=True), tmp_path / "after.svg")
        assert dict(mpl.rcParams) == before
    assert (tmp_path / "before.svg").read_bytes() == (tmp_path / "after.svg").read_bytes()
    assert plt.get_fignums() == []
