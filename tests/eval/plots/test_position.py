"""Curves over the position in the window: their coordinates, gaps, and names at the ends of lines."""

from __future__ import annotations

import numpy as np
import pytest

from compare_q.eval.plots import picture_style, position
from compare_q.eval.results import RunResult
from compare_q.eval.stats.curve import Curve
from tests.support.figures import artists_of_kind
from tests.support.made import QUANT, REF, replace, run_of

pytestmark = pytest.mark.slow


def run_with(
    edges: tuple[int, ...],
    errors: tuple[float | None, ...] | None = None,
    **values_of: tuple[float | None, ...],
) -> RunResult:
    """Return a run of models with these labels (underscores are spaces), with these curves for both
    loss and KLD.
    """
    models = []
    for label, values in values_of.items():
        known = REF if label == "bf16" else QUANT
        curve = Curve(edges, values, values, errors, errors)
        models.append(replace(known, label=label.replace("_", " "), curve=curve))
    return run_of(*models)


def test_bins_are_drawn_in_their_middle() -> None:
    """Bins of the positions 1; 2 and 3; 4 to 9 are drawn at 1, root(2 * 3) and root(4 * 9)."""
    figure = position.by_position(run_with((1, 2, 4, 10), EXL3_4=(3.0, 2.0, 1.0)))
    (line,) = artists_of_kind(figure, "line")
    assert line.get_xdata().tolist() == pytest.approx([1, 6**0.5, 6])
    assert line.get_ydata().tolist() == [3.0, 2.0, 1.0]
    assert (figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) == ("log", "linear")
    assert line.get_color() == next(
        each.light for each in picture_style.FAMILIES if each.name == "EXL3"
    )


def test_standard_errors_are_bands() -> None:
    """All rows have bands in KLD, only the reference in loss.  On a logarithmic axis, a band is the
    error of the logarithm.  An unknown error is a gap; results without errors have no bands.
    """
    edges, values, errors = (1, 2, 3, 4), (1.0, 2.0, 40.0), (0.5, 1.0, None)
    run = run_with(edges, errors, a=values, bf16=values)
    log, linear = (position.by_position(run, kld=kld) for kld in (True, False))
    assert [len(artists_of_kind(figure, "band")) for figure in (log, linear)] == [2, 1]
    assert artists_of_kind(linear, "band")[0].get_gid() == "band-1"
    for figure, scale, ends in (
        (log, "log", [np.exp(-0.5), np.exp(0.5)]),
        (linear, "linear", [0.5, 1.5]),
    ):
        assert figure.axes[0].get_yscale() == scale
        corners = artists_of_kind(figure, "band")[0].get_paths()[0].vertices
        assert sorted({float(y) for x, y in corners if x == 1}) == pytest.approx(ends)
        assert corners[:, 0].max() < 3
    assert "± one standard error" in log.axes[0].texts[0].get_text()
    assert (
        artists_of_kind(position.by_position(run_with(edges, a=values, bf16=values)), "band") == []
    )
