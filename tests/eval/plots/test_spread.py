"""How the divergence of tokens is drawn: what lies where, what the numbers say, and that nothing overlaps."""

import functools
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.figure import Figure

from compare_q.eval.plots import looks, spread, style
from compare_q.eval.results.run_result import ModelResult
from compare_q.eval.stats.distributions import Histogram
from compare_q.eval.stats.uncertainty import Mean
from tests.support import real_table
from tests.support.drawn import artists_of_kind, boxes_of, extents, is_within, pixels_apart, smallest_gap
from tests.support.made import QUANT, run_of, with_against

pytestmark = pytest.mark.slow

DRAWN = {"spread": spread.spread_plot, "ridge": spread.ridge_plot}
PERCENTS = {"1": 0.001, "25": 0.01, "50": 0.02, "75": 0.05, "99": 0.8, "max": 4.0}
TENTHS = {percent: value / 10 for percent, value in PERCENTS.items()}


def model_of(label: str, mean: float, percentiles: dict[str, float], histogram: Histogram, **keys: Any) -> ModelResult:
    against = {"kld": Mean(mean, 0.0, 40, 0), "kld_percentiles": percentiles, "kld_histogram": histogram}
    return with_against(replace(QUANT, label=label, **keys), **against)


LARGE = model_of("EXL3 3.0 bpw", 0.07, PERCENTS, Histogram(-3, 1, (10, 50, 30, 5), 0, 5))
SMALL = model_of("GGUF Q8_0", 0.003, TENTHS, Histogram(-3, 1, (60, 30, 10, 0), 0, 0))


@functools.cache
def real(draw: str) -> Figure:
    return DRAWN[draw](real_table.real_text())


@pytest.mark.parametrize("draw", DRAWN)
def test_rows_of_the_real_table_are_sorted_by_mean_in_their_groups_colours_and_overlap_nothing(draw: str) -> None:
    figure = real(draw)
    axes, rows = figure.axes[0], boxes_of(figure)
    numbers = [text for text in extents(axes.texts) if text.x0 >= axes.bbox.x1]
    assert (len(rows), len(numbers)) == (26, 27 * (4 if draw == "spread" else 1))
    assert smallest_gap(rows) > 1
    assert smallest_gap(numbers) > 1
    assert all(row.x1 < axes.bbox.x0 for row in rows)
    assert all(is_within(box, figure.bbox) for box in [*rows, *numbers])
    (name,) = boxes_of(figure, "level-name")
    drawn = [mark for kind in ("mean", "whisker", "max") for mark in boxes_of(figure, kind)]
    assert smallest_gap([name], [*drawn, *numbers, *rows, *extents(axes.get_xticklabels())]) > 1
    assert is_within(name, axes.bbox)
    assert smallest_gap(extents(axes.get_xticklabels()), [*rows, *drawn]) > 1

    ranked = sorted((row[4], row[0]) for row in real_table.ROWS if row[4])
    shown = [f"{label} †" if label == real_table.MARKED else label for _, label in ranked]
    texts, means = artists_of_kind(figure, "label"), artists_of_kind(figure, "mean")
    assert [text.get_text() for text in texts] == shown
    assert [float(mark.get_xdata()[0]) for mark in means] == pytest.approx([kld for kld, _ in ranked])
    assert [box.y0 for box in rows] == sorted((box.y0 for box in rows), reverse=True)
    styles = looks.group_styles([label.split()[0] for label in shown], style.LIGHT.ink)
    for text, mark in zip(texts, means, strict=True):
        assert (mark.get_color(), mark.get_marker()) == styles[text.get_text().split()[0]]
        assert text.get_color() == style.ink_of(mark.get_color(), style.LIGHT)
        middle, box = mark.get_window_extent(), text.get_window_extent()
        assert 0 < axes.bbox.x0 - box.x1 < 15
        assert box.y0 < (middle.y0 + middle.y1) / 2 < box.y1


def test_quartiles_whiskers_mean_and_maximum_are_where_the_percentiles_say() -> None:
    figure = spread.spread_plot(run_of(LARGE, SMALL))
    for i, (p, mean) in enumerate(((TENTHS, 0.003), (PERCENTS, 0.07))):
        found = {kind: artists_of_kind(figure, kind)[i] for kind in ("box", "whisker", "median", "max", "mean")}
        box = found["box"]
        assert (box.get_x(), box.get_x() + box.get_width()) == pytest.approx((p["25"], p["75"]))
        assert box.get_y() + box.get_height() / 2 == pytest.approx(i)
        assert tuple(found["whisker"].get_xdata()) == (p["1"], p["99"])
        assert tuple(found["median"].get_xdata()) == (p["50"], p["50"])
        assert (float(found["max"].get_xdata()[0]), float(found["mean"].get_xdata()[0])) == (p["max"], mean)
        assert {float(found[kind].get_ydata()[0]) for kind in ("whisker", "max", "mean")} == {i}
    assert figure.axes[0].get_xscale() == "log"
    assert not artists_of_kind(figure, "level")


def test_the_numbers_are_those_of_the_row_and_right_aligned() -> None:
    figure = spread.spread_plot(run_of(LARGE, SMALL))
    numbers = artists_of_kind(figure, "number")
    rows = [artists_of_kind(figure, "head"), numbers[:4], numbers[4:]]
    table = [[text.get_text() for text in row] for row in rows]
    assert table == [["median", "mean", "p99", "max"], ["0.00200", "0.00300", "0.0800", "0.400"],
                     ["0.0200", "0.0700", "0.800", "4.00"]]  # fmt: skip
    for column in range(4):
        assert len({round(row[column].get_window_extent().x1) for row in rows}) == 1


def test_numbers_have_two_or_three_digits() -> None:
    values = {0.0: "0", -9e-9: "0", -1e-7: "-1.0e-7", -0.02: "-0.0200", 4.56e-6: "4.6e-6", 0.000123: "0.000123",
              0.00154: "0.00154", 1.0: "1.00", 12.34: "12.3", 842.2: "842"}  # fmt: skip
    text = run_of(*(model_of("a", value, PERCENTS, Histogram(-3, 1, (1,), 0, 0)) for value in values))
    numbers = [text.get_text() for text in artists_of_kind(spread.spread_plot(text), "number")]
    assert numbers[1::4] == [values[value] for value in sorted(values)]


def test_what_is_not_above_zero_comes_out_of_the_edge() -> None:
    """A reference against itself in most tokens: the whisker has no cap there, and nothing is drawn beyond the axis."""
    zeros = with_against(replace(LARGE, label="W8A8"), kld_percentiles=PERCENTS | {"1": -1e-9, "25": 0.0})
    figure = spread.spread_plot(run_of(zeros, SMALL))
    edge = figure.axes[0].get_xlim()[0]
    assert edge == pytest.approx(1e-4 / 1.5)
    assert tuple(artists_of_kind(figure, "whisker")[1].get_xdata()) == (edge, 0.8)
    assert artists_of_kind(figure, "box")[1].get_x() == edge
    caps = [tuple(line.get_xdata()) for line in artists_of_kind(figure, "cap")]
    assert caps == [(1e-4, 0.08), (0.8,)]
    with pytest.raises(ValueError, match="no model was compared"):
        spread.spread_plot(run_of())
    with pytest.raises(ValueError, match="no token has a KLD above 0"):
        spread.spread_plot(run_of(model_of("a", 0.0, dict.fromkeys(PERCENTS, 0.0), Histogram(-3, 1, (1,), 0, 0))))


@pytest.mark.parametrize("draw", DRAWN)
def test_the_noise_floor_is_a_line_at_its_mean(draw: str) -> None:
    (line,), (name,) = artists_of_kind(real(draw), "level"), artists_of_kind(real(draw), "level-name")
    assert tuple(line.get_xdata()) == (0.00154269, 0.00154269)
    assert name.get_text() == "noise floor (bf16 Transformers) 0.00154"
    assert 0 < pixels_apart(name.get_window_extent(), line.get_window_extent()) < 25


def test_bins_hold_all_tokens_and_pool_the_smallest() -> None:
    histograms = [each.histogram for each in spread.spreads_of(run_of(LARGE, SMALL))]
    edges, shares, note = spread.binned_shares(histograms)
    assert shares.sum(axis=1) == pytest.approx(1)
    assert shares[1].tolist() == pytest.approx([0, 0.1, 0.5, 0.3, 0.05, 0.05])
    assert shares[0].tolist() == pytest.approx([0, 0.6, 0.3, 0.1, 0, 0])
    assert edges == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100])
    assert note == "the last bin holds all that is more"
    assert spread.ridge_plot(run_of(LARGE, SMALL)).axes[0].get_xlabel().splitlines()[1:] == [note]
    assert spread.ridge_plot(run_of(SMALL)).axes[0].get_xlabel().splitlines()[1:] == []


@pytest.mark.parametrize(
    ("counts", "below", "expected", "first", "note"),
    [
        ((0, 0, 1, 998, 1), 0, [0.001, 0.998, 0.001], -6, ""),  # a thousandth may be pooled
        ((1, 1, 2998), 1, [3 / 3001, 2998 / 3001], -7, ""),
        ((0, 1, 1, 997, 1), 0, [0.001, 0.001, 0.997, 0.001], -7, ""),
        ((0, 1, 1, 995, 1), 2, [0.002, 0, 0.001, 0.001, 0.995, 0.001], -9, "the first bin holds all that is less"),
    ],
)
def test_which_bins_are_pooled(counts: tuple, below: int, expected: list, first: int, note: str) -> None:
    edges, shares, said = spread.binned_shares([Histogram(-8, 1, counts, below, 0)])
    assert shares[0].tolist() == pytest.approx(expected)
    assert edges[0] == pytest.approx(10.0**first)
    assert len(edges) == len(expected) + 1
    assert said == note


def test_ridges_are_the_shares_at_one_scale() -> None:
    figure = real("ridge")
    edges, shares, _ = spread.binned_shares([each.histogram for each in spread.spreads_of(real_table.real_text())])
    for i, (ridge, expected) in enumerate(zip(artists_of_kind(figure, "ridge"), shares, strict=True)):
        drawn = ridge.get_data()
        assert drawn.edges.tolist() == edges.tolist()
        heights = (i - drawn.values) / spread.RIDGE * shares.max()
        assert heights == pytest.approx(expected)
        assert heights.sum() == pytest.approx(1)
    peaks = [i - spread.RIDGE * row.max() / shares.max() for i, row in enumerate(shares)]
    assert figure.axes[0].get_ylim()[1] < min(peaks)


def test_a_mean_beyond_all_bins_has_no_marker() -> None:
    figure = spread.ridge_plot(run_of(with_against(LARGE, kld=Mean(1e9, 0.0, 40, 0))))
    assert not artists_of_kind(figure, "mean")


@pytest.mark.parametrize("draw", DRAWN)
@pytest.mark.filterwarnings("error")
def test_long_labels_and_headings_leave_room_for_all_else(draw: str) -> None:
    """300 letters, with spaces and without, the last words of which differ; one row, and nine."""
    models = [model for model in real_table.real_text().models if not model.is_reference][::3]
    models = [
        replace(model, label=f"{'W' * 300}{i}" if i % 2 else f"{'word ' * 60}Q{i}", spec={}, provenance={})
        for i, model in enumerate(models)
    ]
    for floor, count in (0, 9), (-1, 9), (0, 1):
        rows = [*models[:count]]
        rows[floor] = replace(rows[floor], spec={"noise_floor": True})
        text = replace(run_of(*rows), subtitle="word " * 30)
        figure = DRAWN[draw](text, title="word " * 30)
        figure.draw_without_rendering()
        axes, boxes = figure.axes[0], boxes_of(figure)
        assert all(is_within(box, figure.bbox) for box in [*boxes, *extents(axes.texts)])
        assert is_within(axes._left_title.get_window_extent(), figure.bbox)
        assert is_within(axes.xaxis.label.get_window_extent(), figure.bbox)
        assert smallest_gap(boxes) > 1
        assert smallest_gap(extents(axes.get_xticklabels())) > 1
        assert axes.bbox.width > 0.4 * figure.bbox.width
        assert axes.bbox.height > 0.4 * style.DPI
        assert is_within(*boxes_of(figure, "level-name"), axes.bbox)
        assert len({label.get_text() for label in artists_of_kind(figure, "label")}) == count


@pytest.mark.parametrize("draw", DRAWN)
def test_colours_repeat_where_there_are_too_many_groups(draw: str) -> None:
    figure = DRAWN[draw](run_of(*(replace(LARGE, label=f"group{i} 4.0") for i in range(81))))
    assert len(artists_of_kind(figure, "label")) == 81
