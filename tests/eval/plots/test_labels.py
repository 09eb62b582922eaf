"""The placement of labels: each label is next to its point and covers nothing."""

import pytest

from compare_q.eval.plots import scatter
from compare_q.eval.plots.measures import KLD
from compare_q.eval.results import RunResult, TextResult
from tests.support import ROOT
from tests.support.figures import (
    CASES,
    artists_of_kind,
    boxes_of,
    draw,
    extents,
    is_within,
    pixels_apart,
    real_text,
    smallest_gap,
)


def demo(machine: str) -> TextResult:
    return RunResult.read(ROOT / f"results/cpu/demo_{machine}.json").texts[0]


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_labels_overlap_nothing(case: str) -> None:
    figure = draw(CASES[case])
    texts, marks = boxes_of(figure), boxes_of(figure, "point")
    assert len(texts) == len(marks) == len(CASES[case])
    assert smallest_gap(texts) > 1
    assert smallest_gap(texts, marks) > 1
    assert all(is_within(text, figure.axes[0].get_window_extent()) for text in texts)


@pytest.mark.parametrize("machine", ["amx", "avx2"])
def test_labels_of_the_demo_stand_at_their_points(machine: str) -> None:
    """Each label is next to its own point, even if two points are at one place (avx2)."""
    figure = scatter.scatter_figure(demo(machine), measure=KLD)
    texts, marks = boxes_of(figure), boxes_of(figure, "point")
    assert all(pixels_apart(text, mark) < 15 for text, mark in zip(texts, marks, strict=True))
    assert not artists_of_kind(figure, "leader")


@pytest.mark.parametrize("rows", [2, 6, 41])
def test_a_label_is_next_to_its_point_or_a_line_joins_them(rows: int) -> None:
    text = demo("avx2") if rows == 6 else real_text().updated(models=real_text().models[:rows])
    figure = scatter.scatter_figure(text, measure=KLD)
    by_row = {kind: {each.get_gid().rpartition("-")[2]: each for each in artists_of_kind(figure, kind)}
              for kind in ("label", "point", "leader")}  # fmt: skip
    assert len(by_row["label"]) == len(by_row["point"]) == len(text.models)
    for row, label in by_row["label"].items():
        box, point = label.get_window_extent(), by_row["point"][row].get_window_extent()
        if leader := by_row["leader"].get(row):
            start, end = figure.axes[0].transData.transform(leader.get_xydata())
            assert point.padded(1).contains(*start)
            assert box.padded(6).contains(*end)
        else:
            assert pixels_apart(box, point) < 20


def test_the_published_table_names_every_row_and_no_label_stands_beside_another_row() -> None:
    """Each label of the 41 rows is near its own point, or does not touch any other point."""
    figure = scatter.scatter_figure(real_text(), measure=KLD)
    texts, marks = artists_of_kind(figure, "label"), extents(artists_of_kind(figure, "point"))
    names = {text.get_text().rpartition("\n")[0] for text in texts}
    assert names == {model.marked_label for model in real_text().models}
    assert len(texts) == len(marks) == 41
    for label, own in zip(extents(texts), marks, strict=True):
        assert pixels_apart(label, own) < 40 or min(pixels_apart(label, mark) for mark in marks) > 4
