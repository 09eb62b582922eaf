"""Places for labels: in one column, along lines, and in scatter plots, where none covers anything."""

import random
from pathlib import Path

import numpy as np
import pytest

from compare_q.eval.plots import labels, scatter
from compare_q.eval.plots.measures import KLD
from compare_q.eval.plots.points import Point
from compare_q.eval.results import results_json
from tests.support.drawn import artists_of_kind, boxes_of, extents, is_within, pixels_apart, smallest_gap
from tests.support.scatter_cases import CASES, draw, figure_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([5.0], [5.0]),
        ([2.0, 9.0], [2.0, 9.0]),
        ([5.0, 5.0], [4.0, 6.0]),
        ([6.0, 5.0], [6.5, 4.5]),  # in their order, each half of what is missing
        ([5.0, 5.0, 8.0], [4.0, 6.0, 8.0]),
        ([5.0, 5.0, 6.5], [3.5, 5.5, 7.5]),  # a run that grows moves as a whole
        ([0.0, 0.0], [0.0, 2.0]),
        ([10.0, 10.0, 10.0], [6.0, 8.0, 10.0]),
        ([4.0] * 9, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]),  # no room: from the lower end on
    ],
)
def test_spread_out(wanted: list[float], expected: list[float]) -> None:
    assert labels.spread_out(np.array(wanted), 2.0, 0.0, 10.0).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("case", CASES)
def test_labels_overlap_nothing(case: str) -> None:
    figure = figure_of(case)
    texts, marks = boxes_of(figure), boxes_of(figure, "point")
    assert len(texts) == len(marks) == len(CASES[case])
    assert smallest_gap(texts) > 1
    assert smallest_gap(texts, marks) > 1
    assert all(is_within(text, figure.axes[0].get_window_extent()) for text in texts)


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
