"""Labels of the scatter plot: readable, near their points, touching nothing."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from matplotlib.transforms import Bbox

from compare_q.eval.plots import looks, scatter
from compare_q.eval.plots.measures import KLD
from compare_q.eval.plots.points import Level, Point
from compare_q.eval.results import results_json
from tests.support.drawn import artists_of_kind, boxes_of, extents, is_within, pixels_apart, smallest_gap
from tests.support.scatter_cases import CASES, TABLE, draw, figure_of, in_order, legend_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_labels_overlap_nothing(case: str) -> None:
    figure = figure_of(case)
    texts, marks = boxes_of(figure), boxes_of(figure, "point")
    assert len(texts) == len(marks) == len(CASES[case])
    assert smallest_gap(texts) > 1
    assert smallest_gap(texts, marks) > 1
    axes, legend = figure.axes[0].get_window_extent(), legend_of(figure).get_window_extent()
    assert all(is_within(text, axes) for text in texts)
    assert pixels_apart(axes, legend) > 1
    assert legend.x1 <= figure.bbox.x1
    assert legend.y0 >= 0
    assert axes.width > 0.6 * figure.bbox.width


def test_labels_stay_apart_at_the_resolution_of_svg() -> None:
    figure = draw(CASES["clump"])
    figure.set_dpi(72)
    figure.draw_without_rendering()  # texts remember the resolution they were last drawn at
    texts, marks = boxes_of(figure), boxes_of(figure, "point")
    assert smallest_gap(texts) > 0
    assert smallest_gap(texts, marks) > 0


def test_labels_give_name_and_value_and_stay_near() -> None:
    figure = figure_of("table")
    names = looks.drawn_names([(p.label, "") for p in in_order(TABLE)])
    expected = [f"{name}\n{p.y:.3f}" for name, p in zip(names, in_order(TABLE), strict=True)]
    assert [text.get_text() for text in artists_of_kind(figure, "label")] == expected
    boxes = zip(boxes_of(figure), boxes_of(figure, "point"), strict=True)
    assert max(pixels_apart(label, mark) for label, mark in boxes) < 160


def test_a_leader_joins_each_label_that_moved_away_to_its_point() -> None:
    figure = figure_of("clump")
    pixels = figure.axes[0].transData.transform
    leaders = [pixels(line.get_xydata()) for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    moved = 0
    for label, mark in zip(boxes_of(figure), boxes_of(figure, "point"), strict=True):
        if pixels_apart(label, mark) > 30:
            moved += 1
            middle = (mark.x0 + mark.x1) / 2, (mark.y0 + mark.y1) / 2
            own = [end for start, end in leaders if np.allclose(start, middle, atol=0.5)]
            assert any(pixels_apart(label, Bbox([end, end])) < 8 for end in own)
    assert moved >= 10
    assert sum(line.get_linestyle() == "-" for line in figure_of("one").axes[0].lines) == 0


def test_labels_without_room_are_left_out_and_counted() -> None:
    rng = random.Random(1)
    figure = draw([Point(f"G{i} " + "word " * 200, rng.random(), rng.random()) for i in range(11)])
    texts, marks = boxes_of(figure), boxes_of(figure, "point")
    assert 3 < len(texts) < 11
    assert smallest_gap(texts) > 0
    assert smallest_gap(texts, marks) > 0
    assert f"no room for {11 - len(texts)} of 11 labels" in {text.get_text() for text in figure.axes[0].texts}


def test_the_published_table_names_every_row_and_no_label_stands_beside_another_row() -> None:
    """41 rows, "bf16 vLLM, noise" among them, whose label once stood beside the lone point of "bf16 vLLM, FP8 KV"."""
    run = results_json.load(Path(__file__).parents[3] / "results/h200/table/results.json")[0].texts[0]
    figure = scatter.scatter_figure(run, measure=KLD)
    texts, marks = artists_of_kind(figure, "label"), extents(artists_of_kind(figure, "point"))
    names = {text.get_text().rpartition("\n")[0] for text in texts}
    assert len(names) == len(texts) == len(marks) == len(run.models) == 41
    assert not names & {"W4A16", "W4A4", "g32", "g128", "int8", "dynamic", "block", "vLLM", "F16", "3.0 bpw"}
    assert {"NVFP4 W4A16", "W4A16 g32", "EXL2 3.0 bpw", "EXL3 3.0 bpw", "FP8 dynamic", "Q4_K_M"} <= names
    for label, own in zip(extents(texts), marks, strict=True):
        assert pixels_apart(label, own) < 40 or min(pixels_apart(label, mark) for mark in marks) > 8


def test_odd_labels_are_shown_as_written() -> None:
    figure = figure_of("odd labels")
    legend = [text.get_text() for text in legend_of(figure).get_texts()]
    assert {"_x", "?", "[a]"} <= set(legend)
    first = artists_of_kind(figure, "label")[0]
    assert first.get_text() == "_x $a$ b$\n1.000"
    assert not first.get_parse_math()


def test_labels_keep_clear_of_lines_and_bars_where_they_can() -> None:
    figure = draw([Point("EXL3 4.0", 4.0, 7.4, error=0.3), Point("b", 8, 7.0)], levels=[Level(7.4, "here")])
    label = boxes_of(figure)[0]
    assert smallest_gap([label], boxes_of(figure, "level")) >= 0
    assert smallest_gap([label], boxes_of(figure, "bar")) >= 0
