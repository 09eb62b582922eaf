"""The placement of labels: every row has one, and it covers nothing."""

import tracemalloc

import pytest

from compare_q.eval.plots import labels, scatter
from compare_q.eval.plots.measures import KLD
from compare_q.eval.plots.points import Level, Point
from tests.support.figures import (
    CASES,
    artists_of_kind,
    boxes_of,
    draw,
    is_within,
    real_run,
    smallest_gap,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_labels_overlap_nothing(case: str) -> None:
    figure = draw(CASES[case])
    texts = boxes_of(figure)
    marks = boxes_of(figure, "point")
    assert len(texts) == len(marks) == len(CASES[case])
    assert smallest_gap(texts) > 1
    assert smallest_gap(texts, marks) > 1
    assert all(is_within(text, figure.axes[0].get_window_extent()) for text in texts)


def test_a_card_without_quantized_points_has_no_labels() -> None:
    """With more points than it can name, a card names only quantized ones."""
    # Nine such rows are more than a card names; it once ended in ZeroDivisionError.
    points = [Point(f"bf16 {i}", 16.0, 1.0 + i, unquantized=True) for i in range(9)]
    figure = draw(points, card=True, levels=[Level(0.15, "noise floor")])
    assert artists_of_kind(figure, "label") == []
    assert len(artists_of_kind(figure, "point")) == len(points)


def test_the_published_table_names_every_row() -> None:
    figure = scatter.scatter_figure(real_run(), measure=KLD)
    names = [text.get_text().rpartition("\n")[0] for text in artists_of_kind(figure, "label")]
    assert sorted(names) == sorted(model.marked_label for model in real_run().models)


BYTES = 100e6
"""Upper bound on the memory of one picture, whose arrays of pixels are not made."""


# A plot of small files once took 9 GB.
@pytest.mark.parametrize("sizes", [(2.9e-3, 2.9000001e-3), (0.0, 0.0), (4.0, 1e300), (1e-12, 16.0)])
def test_memory_does_not_depend_on_the_sizes(sizes: tuple[float, float]) -> None:
    """The level's line spans the axes of any range.

    Read as data, its 0 to 1 would be millions of pixels.
    """
    points = [Point("a", sizes[0], 0.1), Point("b", sizes[1], 0.2)]
    tracemalloc.start()
    try:
        figure = draw(points, levels=[Level(0.15, "noise floor")])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BYTES
    assert len(artists_of_kind(figure, "label")) == 2


def test_very_many_points_have_labels_near_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "MOST_LABELS", 8)
    points = [Point("reference", 16.0, 0.0, unquantized=True)]
    for i in range(20):
        points.append(Point(f"bad {i}", 4 + 0.01 * i, 9.0 + 0.01 * i))
    for i in range(5):
        points.append(Point(f"good {i}", 3 + i, 1.0 / (i + 1)))
    figure = draw(points)
    names = [text.get_text().partition("\n")[0] for text in artists_of_kind(figure, "label")]
    assert {"reference", "good 0", "good 1", "good 2", "good 3", "good 4"} <= set(names)
    assert len(names) <= 8
    assert len(artists_of_kind(figure, "point")) == len(points)
