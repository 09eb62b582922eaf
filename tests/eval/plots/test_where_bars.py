"""Bars of shares: their lengths, errors, order and colours."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from compare_q.eval.plots.where_bars import MOST_BARS, where_bars
from compare_q.eval.where.results import PartRow
from tests.support.where_results import part, result

pytestmark = pytest.mark.slow


def bars_of(figure: Figure) -> list[tuple[float, float, str]]:
    """Return (length, place, colour) of each bar."""
    (axes,) = figure.axes
    bars = []
    for patch in axes.patches:
        x, y = patch.get_x(), patch.get_y()
        if patch.get_gid().startswith("bar"):
            length = patch.get_width() if x == 0 else patch.get_height()
            place = y + patch.get_height() / 2 if x == 0 else x + patch.get_width() / 2
            bars.append((length, round(place, 6), str(patch.get_facecolor())))
    return bars


def test_parts_are_drawn_by_share_with_their_errors() -> None:
    rows = (
        part("q", 0.1, kind="q"),
        part("down", 0.5, 0.02, kind="down"),
        part("o", None, kind="o"),
        part("up", -0.1, kind="up"),
    )
    figure = where_bars(result(*rows))
    bars = bars_of(figure)
    assert [(length, place) for length, place, _ in bars] == [(0.5, 0), (0.1, 1), (-0.1, 2)]
    assert len({colour for _, _, colour in bars}) == 3
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["down", "q", "up"]
    errors = {line.get_gid(): list(line.get_xdata()) for line in axes.lines}
    assert errors["error-0"] == pytest.approx([0.48, 0.52])


def test_layers_are_drawn_in_order_with_the_others_at_the_right() -> None:
    rows = (
        part("layer 0", 0.1, layer=0),
        part("layer 1", 0.4, layer=1),
        part("lm_head", 0.2, kind="lm_head"),
    )
    figure = where_bars(result(*rows, by="layer"))
    (axes,) = figure.axes
    heights = [patch.get_height() for patch in axes.patches]
    assert heights == pytest.approx([0.1, 0.4, 0.2])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "1", "lm_head"]


def test_of_many_parts_the_largest_are_drawn() -> None:
    rows: list[PartRow] = []
    for number in range(MOST_BARS + 5):
        rows.append(part(f"layers.{number}.q_proj", 0.01 * (number + 1), kind="q"))
    bars = bars_of(where_bars(result(*rows, by="matrix")))
    assert len(bars) == MOST_BARS
    assert bars[0][0] == pytest.approx(0.01 * (MOST_BARS + 5))


def test_without_a_known_share_nothing_is_drawn() -> None:
    with pytest.raises(ValueError, match="no share"):
        where_bars(result(part("q", None)))
