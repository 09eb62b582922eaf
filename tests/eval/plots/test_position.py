"""Curves over the position in the window: their coordinates and bands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compare_q.eval.plots import picture_style, position
from compare_q.eval.results import RunResult
from compare_q.eval.stats.curve import Curve
from tests.support.figures import artists_of_kind, texts_of
from tests.support.made import QUANT, REF, replace, run_of

pytestmark = pytest.mark.slow


def run_with(
    edges: tuple[int, ...],
    errors: tuple[float | None, ...] | None = None,
    **values_of: tuple[float | None, ...],
) -> RunResult:
    """Return a run of models with these labels, and these curves for both loss and KLD.

    Underscores in labels are spaces; bf16 is the reference.
    """
    models = []
    for label, values in values_of.items():
        model = QUANT
        if label == "bf16":
            model = REF
        curve = Curve(edges, values, values, errors, errors)
        models.append(replace(model, label=label.replace("_", " "), curve=curve))
    return run_of(*models)


def test_bins_are_drawn_in_their_middle() -> None:
    """Bins of the positions 1; 2 and 3; 4 to 9 are drawn at 1, root(2 * 3) and root(4 * 9)."""
    figure = position.by_position(run_with((1, 2, 4, 10), EXL3_4=(3.0, 2.0, 1.0)))
    (line,) = artists_of_kind(figure, "line")
    assert line.get_xdata().tolist() == pytest.approx([1, 6**0.5, 6])
    assert line.get_ydata().tolist() == [3.0, 2.0, 1.0]
    assert (figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) == ("log", "linear")
    colours = {family.name: family.light for family in picture_style.FAMILIES}
    assert line.get_color() == colours["EXL3"]


EDGES = (1, 2, 3, 4)
VALUES = (1.0, 2.0, 40.0)


def heights_at(band: Any, x: float) -> list[float]:
    """Return the y of the corners of a band at this x, sorted."""
    corners = band.get_paths()[0].vertices
    return sorted({float(y) for corner_x, y in corners if corner_x == x})


def test_standard_errors_are_bands() -> None:
    """All rows have bands in KLD, only the reference in loss.

    On a logarithmic axis, a band is the error of the logarithm.
    """
    run = run_with(EDGES, (0.5, 1.0, None), a=VALUES, bf16=VALUES)
    log = position.by_position(run, kld=True)
    linear = position.by_position(run, kld=False)
    assert (log.axes[0].get_yscale(), linear.axes[0].get_yscale()) == ("log", "linear")
    log_band, other_log_band = artists_of_kind(log, "band")
    assert heights_at(log_band, 1.0) == pytest.approx([np.exp(-0.5), np.exp(0.5)])
    (linear_band,) = artists_of_kind(linear, "band")
    assert linear_band.get_gid() == "band-1"
    assert heights_at(linear_band, 1.0) == pytest.approx([0.5, 1.5])
    # The last bin has no error.
    for band in (log_band, other_log_band, linear_band):
        assert band.get_paths()[0].vertices[:, 0].max() < 3
    assert "± one standard error" in log.axes[0].texts[0].get_text()


def test_results_without_errors_have_no_bands() -> None:
    figure = position.by_position(run_with(EDGES, a=VALUES, bf16=VALUES))
    assert artists_of_kind(figure, "band") == []


def test_the_name_of_a_bound_says_so_in_klds() -> None:
    run = run_with((1, 2, 4, 10), EXL3_4=(3.0, 2.0, 1.0), EXL3_5=(2.0, 1.0, 0.5))
    run = run.updated(models=(replace(run.models[0], kld_kind="bound"), run.models[1]))
    names = texts_of(position.by_position(run, kld=True), "label")
    assert [name.partition(" (")[2] != "" for name in names] == [True, False]
    names = texts_of(position.by_position(run), "label")
    assert [name.partition(" (")[2] for name in names] == ["", ""]
