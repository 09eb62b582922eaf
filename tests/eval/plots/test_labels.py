"""Places for labels: in one column, and the names of lines; labels of a scatter plot: test_scatter_labels.py."""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure

from compare_q.eval.plots import labels, style
from tests.support.drawn import boxes_of, extents, pixels_apart


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


def test_spread_out_is_as_near_as_can_be() -> None:
    """Against every arrangement of four on a grid of halves."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        wanted = np.sort(rng.integers(0, 21, 4) / 2)
        places = labels.spread_out(wanted, 2.0, 0.0, 10.0)
        assert np.diff(places).min() >= 2.0 - 1e-9
        assert 0.0 <= places.min() <= places.max() <= 10.0
        grid = np.array(list(itertools.combinations(np.arange(21) / 2, 4)))
        allowed = grid[(np.diff(grid, axis=1) >= 2.0).all(axis=1)]
        assert ((places - wanted) ** 2).sum() <= ((allowed - wanted) ** 2).sum(axis=1).min() + 1e-9


def crowded(crowd: np.ndarray) -> Figure:
    """Points at these x along a line through 0, which has a name."""
    with style.canvas(4.0, "", "", dark=False) as (figure, axes, _):
        axes.set(xlim=(0, 10), ylim=(-1, 1))
        marks = [axes.plot(x, 0.0, "o", gid=f"point-{i}")[0] for i, x in enumerate(crowd)]
        texts = [axes.text(x, 0.0, "here", gid=f"label-{i}") for i, x in enumerate(crowd)]
        axes.plot([0, 10], [0, 0], gid="level-0")
        name = axes.text(5, 0.0, "name of the line", ha="center", va="center", gid="level-name-0")
        style.freeze_layout(figure)
        labels.place_labels(axes, marks, texts, [name])
    return figure


@pytest.mark.parametrize("gap", [(1.0, 4.0), (4.0, 7.0), (6.5, 9.5)])
def test_the_name_of_a_line_goes_where_no_points_are(gap: tuple[float, float]) -> None:
    figure = crowded(np.array([x for x in np.arange(0.2, 10, 0.45) if not gap[0] < x < gap[1]]))
    (name,) = boxes_of(figure, "level-name")
    left, right = (figure.axes[0].transData.transform((x, 0))[0] for x in gap)
    assert left - 5 < name.x0 < name.x1 < right + 5
    assert min(pixels_apart(name, mark) for mark in boxes_of(figure, "point")) > 20


def test_the_name_of_a_line_is_at_its_right_end_where_all_is_free() -> None:
    figure = crowded(np.array([1.0]))
    (name,) = boxes_of(figure, "level-name")
    (line,) = extents(figure.findobj(lambda artist: artist.get_gid() == "level-0"))
    assert 0 < figure.axes[0].bbox.x1 - name.x1 < 12
    assert 0 < name.y0 - line.y1 < 10
