"""Percentiles of the tokens' KLD: one row per model, sorted by mean, with the numbers of its marks
on the right.
"""

from typing import Any

import pytest

from compare_q.eval.plots.percentiles import percentile_plot
from compare_q.eval.results import ModelResult
from compare_q.eval.stats.uncertainty import Mean
from tests.support.figures import artists_of_kind, real_run
from tests.support.made import PERCENTILES, QUANT, replace, run_of, with_against

pytestmark = pytest.mark.slow

PERCENTS = PERCENTILES | {"1": 0.001, "25": 0.01, "50": 0.02, "75": 0.05, "99": 0.8, "max": 4.0}
TENTHS = {percent: value / 10 for percent, value in PERCENTS.items()}


def model_of(label: str, mean: float, percentiles: dict[str, float], **keys: Any) -> ModelResult:
    return with_against(
        replace(QUANT, label=label, **keys), kld=Mean(mean, 0.0, 40, 0), kld_percentiles=percentiles
    )


LARGE = model_of("EXL3 3.0 bpw", 0.07, PERCENTS)
SMALL = model_of("GGUF Q8_0", 0.003, TENTHS)


def test_rows_of_the_real_table_are_sorted_by_mean() -> None:
    figure = percentile_plot(real_run())
    ranked = sorted((m.kld, m.marked_label) for m in real_run().models if not m.reference)
    assert [text.get_text() for text in artists_of_kind(figure, "label")] == [
        label for _, label in ranked
    ]
    means = [float(mark.get_xdata()[0]) for mark in artists_of_kind(figure, "mean")]
    assert means == pytest.approx([kld for kld, _ in ranked])


def test_quartiles_whiskers_mean_and_maximum_are_where_the_percentiles_say() -> None:
    figure = percentile_plot(run_of(LARGE, SMALL))
    for i, (p, mean) in enumerate(((TENTHS, 0.003), (PERCENTS, 0.07))):
        found = {
            kind: artists_of_kind(figure, kind)[i]
            for kind in ("box", "whisker", "median", "max", "mean")
        }
        box = found["box"]
        assert (box.get_x(), box.get_x() + box.get_width()) == pytest.approx((p["25"], p["75"]))
        assert box.get_y() + box.get_height() / 2 == pytest.approx(i)
        assert tuple(found["whisker"].get_xdata()) == (p["1"], p["99"])
        assert tuple(found["median"].get_xdata()) == (p["50"], p["50"])
        assert (float(found["max"].get_xdata()[0]), float(found["mean"].get_xdata()[0])) == (
            p["max"],
            mean,
        )
        assert {float(found[kind].get_ydata()[0]) for kind in ("whisker", "max", "mean")} == {i}
    assert figure.axes[0].get_xscale() == "log"
    assert not artists_of_kind(figure, "level")
    numbers = [text.get_text() for text in artists_of_kind(figure, "number")]
    assert [text.get_text() for text in artists_of_kind(figure, "head")] == [
        "median",
        "mean",
        "p99",
        "max",
    ]
    assert numbers == ["0.00200", "0.00300", "0.0800", "0.400", "0.0200", "0.0700", "0.800", "4.00"]


def test_what_is_not_above_zero_comes_out_of_the_edge() -> None:
    """Percentiles of 0 or less: the whisker begins at the edge, without a cap; nothing is drawn
    outside the axes.
    """
    zeros = with_against(
        replace(LARGE, label="W8A8"), kld_percentiles=PERCENTS | {"1": -1e-9, "25": 0.0}
    )
    figure = percentile_plot(run_of(zeros, SMALL))
    edge = figure.axes[0].get_xlim()[0]
    assert edge == pytest.approx(1e-4 / 1.5)
    assert tuple(artists_of_kind(figure, "whisker")[1].get_xdata()) == (edge, 0.8)
    assert artists_of_kind(figure, "box")[1].get_x() == edge
    caps = [tuple(line.get_xdata()) for line in artists_of_kind(figure, "cap")]
    assert caps == [(1e-4, 0.08), (0.8,)]
    with pytest.raises(ValueError, match="no model was compared"):
        percentile_plot(run_of())
    with pytest.raises(ValueError, match="no token has a KLD above 0"):
        percentile_plot(run_of(model_of("a", 0.0, dict.fromkeys(PERCENTS, 0.0))))
