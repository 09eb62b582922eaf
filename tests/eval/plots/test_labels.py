"""The placement of labels: every row has one, and it covers nothing."""

import pytest

from compare_q.eval.plots import scatter
from compare_q.eval.plots.measures import KLD
from tests.support.figures import CASES, artists_of_kind, boxes_of, draw, is_within, real_run, smallest_gap

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_labels_overlap_nothing(case: str) -> None:
    figure = draw(CASES[case])
    texts, marks = boxes_of(figure), boxes_of(figure, "point")
    assert len(texts) == len(marks) == len(CASES[case])
    assert smallest_gap(texts) > 1
    assert smallest_gap(texts, marks) > 1
    assert all(is_within(text, figure.axes[0].get_window_extent()) for text in texts)


def test_the_published_table_names_every_row() -> None:
    figure = scatter.scatter_figure(real_run(), measure=KLD)
    names = [text.get_text().rpartition("\n")[0] for text in artists_of_kind(figure, "label")]
    assert sorted(names) == sorted(model.marked_label for model in real_run().models)
