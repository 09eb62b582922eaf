"""Percentiles of the tokens' KLD: one row per model, sorted by mean, with its numbers."""

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from compare_q.eval.plots.percentiles import percentile_plot, short_bound
from compare_q.eval.results import ModelResult
from compare_q.eval.stats.uncertainty import Mean
from tests.support.figures import artists_of_kind, real_run, texts_of
from tests.support.made import BASE, FAILED, PERCENTILES, QUANT, REF, replace, run_of, with_against

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
    compared = [model for model in real_run().models if not model.reference]
    compared.sort(key=lambda model: (model.kld, model.marked_label))
    labels = texts_of(figure, "label")
    assert labels == [model.marked_label for model in compared]
    means = [float(mark.get_xdata()[0]) for mark in artists_of_kind(figure, "mean")]
    assert means == pytest.approx([model.kld for model in compared])


def check_row(figure: Figure, place: int, percentiles: dict[str, float], mean: float) -> None:
    """The marks of row ``place`` are at these values."""
    box = artists_of_kind(figure, "box")[place]
    assert box.get_x() == pytest.approx(percentiles["25"])
    assert box.get_x() + box.get_width() == pytest.approx(percentiles["75"])
    assert box.get_y() + box.get_height() / 2 == pytest.approx(place)
    gold = {
        "whisker": [percentiles["1"], percentiles["99"]],
        "median": [percentiles["50"], percentiles["50"]],
        "max": [percentiles["max"]],
        "mean": [mean],
    }
    for kind, values in gold.items():
        line = artists_of_kind(figure, kind)[place]
        assert list(line.get_xdata()) == values
        # The median is a vertical line through the middle of its row.
        assert np.mean(line.get_ydata()) == pytest.approx(place)


def test_quartiles_whiskers_mean_and_maximum_are_where_the_percentiles_say() -> None:
    figure = percentile_plot(run_of(LARGE, SMALL))
    check_row(figure, 0, TENTHS, 0.003)
    check_row(figure, 1, PERCENTS, 0.07)
    assert figure.axes[0].get_xscale() == "log"
    assert not artists_of_kind(figure, "level")
    heads = texts_of(figure, "head")
    assert heads == ["median", "mean", "p99", "max"]
    numbers = texts_of(figure, "number")
    assert numbers[:4] == ["0.00200", "0.00300", "0.0800", "0.400"]
    assert numbers[4:] == ["0.0200", "0.0700", "0.800", "4.00"]


def test_what_is_not_above_zero_comes_out_of_the_edge() -> None:
    """The whisker of percentiles of 0 or less begins at the edge, without a cap.

    Nothing is drawn outside the axes.
    """
    zeros = with_against(
        replace(LARGE, label="W8A8"), kld_percentiles=PERCENTS | {"1": -1e-9, "25": 0.0}
    )
    figure = percentile_plot(run_of(zeros, SMALL))
    edge = figure.axes[0].get_xlim()[0]
    # The smallest percentile above 0 is 0.001 / 10; the axis begins 1.5 times below it.
    assert edge == pytest.approx(1e-4 / 1.5)
    assert tuple(artists_of_kind(figure, "whisker")[1].get_xdata()) == (edge, 0.8)
    assert artists_of_kind(figure, "box")[1].get_x() == edge
    caps = [tuple(line.get_xdata()) for line in artists_of_kind(figure, "cap")]
    assert caps == [(1e-4, 0.08), (0.8,)]


def test_without_klds_there_is_no_picture() -> None:
    with pytest.raises(ValueError, match="no model was compared"):
        percentile_plot(run_of())
    with pytest.raises(ValueError, match="no token has a KLD above 0"):
        percentile_plot(run_of(model_of("a", 0.0, dict.fromkeys(PERCENTS, 0.0))))


def test_bounds_have_an_arrow_and_numbers_that_are_rounded_down() -> None:
    bound = replace(LARGE, kld_kind="bound")
    figure = percentile_plot(run_of(bound, SMALL))
    (arrow,) = artists_of_kind(figure, "bound")
    assert list(arrow.get_xdata()) == [4.0]
    numbers = texts_of(figure, "number")
    assert numbers[4:] == ["≥0.020", "≥0.070", "≥0.80", "≥4.0"]
    assert [short_bound(value) for value in (0.0199, 12.99, 4.59e-5, 1e-9)] == [
        "≥0.019",
        "≥12",
        "≥4.5e-5",
        "≥0",
    ]
    assert not artists_of_kind(percentile_plot(run_of(LARGE, SMALL)), "bound")


ESTIMATE = replace(model_of("GGUF Q4_K_M", 0.05, {}), kld_kind="estimate")


def heading_of(figure: Figure) -> str:
    """Return the longest text above the axes, on one line."""
    texts = [text.get_text() for text in figure.axes[0].texts]
    return " ".join(max(texts, key=len).split())


def test_missing_rows_are_named_with_their_reasons() -> None:
    """Estimates, rows without a KLD and failed rows; not the reference, nor rows with a bound."""
    bound = replace(LARGE, label="bounded", kld_kind="bound")
    rows = [REF, SMALL, bound, ESTIMATE, replace(BASE, label="server"), FAILED]
    figure = percentile_plot(run_of(*rows))
    assert texts_of(figure, "label") == ["GGUF Q8_0", "bounded"]
    heading = heading_of(figure)
    _, _, missing = heading.partition("not in the plot: ")
    of_estimates, _, without = missing.partition("; ")
    assert of_estimates.startswith(ESTIMATE.label)
    assert "estimate" in of_estimates
    assert without == "server and broken (no KLD)"


def test_all_rows_in_the_plot_leave_no_line_about_missing_ones() -> None:
    assert "not in the plot" not in heading_of(percentile_plot(run_of(REF, LARGE, SMALL)))


def test_estimates_alone_are_the_reason_why_there_is_no_picture() -> None:
    with pytest.raises(ValueError, match=f"{ESTIMATE.label} .*estimate"):
        percentile_plot(run_of(REF, ESTIMATE))


def test_a_line_about_missing_rows_does_not_make_the_rows_smaller() -> None:
    def height(*rows: ModelResult) -> float:
        box = percentile_plot(run_of(*rows)).axes[0].get_window_extent()
        return float(box.height)

    assert height(REF, LARGE, SMALL, ESTIMATE, FAILED) >= height(REF, LARGE, SMALL) - 1
