"""The scatter plot: which points it has, how groups look, the same picture each time."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt

from compare_q.eval.plots import style
from compare_q.eval.plots.points import Point, points_within
from tests.support.drawn import artists_of_kind
from tests.support.scatter_cases import KLDS, TABLE, draw, draw_kld, figure_of, legend_of

pytestmark = pytest.mark.slow


def test_select_keeps_what_is_finite_and_within_the_limits() -> None:
    a, b, c = Point("a", 8, 2), Point("b", 4, 3), Point("c", 6, 9)
    broken = [Point("n", float("nan"), 1), Point("i", 1, float("inf")), Point("m", 1, float("nan"))]
    assert points_within([a, broken[0], b, broken[1], c, broken[2]], math.inf, math.inf) == [a, b, c]
    assert points_within([a, b, c], 6, math.inf) == [b, c]
    assert points_within([a, b, c], math.inf, 3) == [a, b]
    assert points_within([a, b, c], 6, 3) == [b]


def test_dotted_lines_through_schemes_in_x_order() -> None:
    dotted = [line for line in figure_of("table").axes[0].lines if line.get_linestyle() == ":"]
    paths = sorted(tuple(np.asarray(line.get_xdata())) for line in dotted)
    assert paths == [
        (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0),
        (2.96, 3.91, 4.85, 5.69, 6.56),  # Q2_K to Q6_K
        (4.25, 4.63),
        (4.55, 8.5),  # Q4_0 and Q8_0
    ]


def test_a_point_that_another_all_but_covers_shows_around_it() -> None:
    figure = draw_kld(KLDS)
    texts = [text.get_text() for text in artists_of_kind(figure, "label")]
    assert texts == ["vLLM W4A16\n0.30000", "vLLM FP8\n0.02000", "bf16\nreference", "vLLM bf16\n0.00040"]
    sizes = {mark.get_ydata()[0]: mark.get_markersize() for mark in artists_of_kind(figure, "point")}
    assert sizes[0.0] > sizes[0.0004] == sizes[0.02] == sizes[0.3]


def test_identical_points_all_show() -> None:
    sizes = [mark.get_markersize() for mark in artists_of_kind(figure_of("identical"), "point")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_nothing_global_changes(tmp_path: Path) -> None:
    style.save_figure(draw(TABLE, dark=True), tmp_path / "before.svg")
    with mpl.rc_context({"font.family": "monospace", "xtick.major.size": 20, "savefig.facecolor": "red"}):
        before = dict(mpl.rcParams)
        style.save_figure(draw(TABLE, dark=True), tmp_path / "after.svg")
        assert dict(mpl.rcParams) == before
    assert (tmp_path / "before.svg").read_bytes() == (tmp_path / "after.svg").read_bytes()
    assert plt.get_fignums() == []


def test_the_legend_is_sorted_and_each_name_has_the_look_of_its_group() -> None:
    figure = draw([Point(name, 1, y) for y, name in enumerate(["gguf 1", "EXL3 2", "bf16", "AWQ 4"])])
    legend = legend_of(figure)
    assert [text.get_text() for text in legend.get_texts()] == ["AWQ", "bf16", "EXL3", "gguf"]
    looks = [(handle.get_color(), handle.get_marker()) for handle in legend.get_lines()]
    marks = artists_of_kind(figure, "point")
    assert looks == [(marks[i].get_color(), marks[i].get_marker()) for i in (3, 2, 1, 0)]
