"""The front of recipes: its points, forecast, targets and rings."""

from __future__ import annotations

import pytest

from compare_q.eval.plots.where_front import where_front
from compare_q.eval.where.results import FrontRow, Measured, Recipe, WhereResult
from tests.support.where_results import part, result

pytestmark = pytest.mark.slow


def front_result() -> WhereResult:
    """Return a result with two parts: 20 weights of 4.5 bits, and 16 in the reference."""
    front = (
        FrontRow(parts=("a",), kld=Measured(value=0.5), forecast=Measured(value=0.6), bits=205.0),
        FrontRow(parts=("a", "b"), reason="not finite", bits=320.0),
    )
    recipes = (
        Recipe(
            target="kld=0.55",
            keep_bits=16,
            is_reached=True,
            parts=("a",),
            modules=("a",),
            kld=Measured(value=0.5),
            bits=205.0,
        ),
        Recipe(target="bpw=5", keep_bits=16, is_reached=True, kld=Measured(value=1.0), bits=90.0),
    )
    return result(part("a", 0.4), part("b", 0.2), front=front, recipes=recipes)


def test_points_forecast_targets_and_rings() -> None:
    (axes,) = where_front(front_result()).axes
    lines = {}
    for line in axes.lines:
        lines[line.get_gid()] = (list(line.get_xdata()), list(line.get_ydata()))
    # 90, 205 of 20 weights; the unknown point is left out.
    assert lines["front"] == ([4.5, 10.25], [1.0, 0.5])
    assert lines["forecast"] == ([4.5, 10.25], [1.0, 0.6])
    assert lines["target-0"][1] == [0.55, 0.55]
    assert lines["target-1"][0] == [5.0, 5.0]
    assert lines["recipe-0"] == ([10.25], [0.5])
    assert "recipe-1" not in lines
    assert {"ref", "q4", "kld=0.55", "bpw=5"} <= {text.get_text() for text in axes.texts}


def test_without_a_known_kld_nothing_is_drawn() -> None:
    unknown = front_result().updated(whole=None)
    with pytest.raises(ValueError, match="not known"):
        where_front(unknown)
