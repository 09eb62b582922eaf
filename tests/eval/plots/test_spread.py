"""How the divergence of tokens is drawn: what lies where, what the numbers say, and that nothing overlaps."""

import functools
import itertools
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from compare_q.eval.plots import labels, looks, spread, style
from compare_q.eval.plots.spread import Divergence
from compare_q.eval.stats.distributions import Histogram, histogram_of, percentiles_of
from tests.support import real_table
from tests.support.drawn import artists_of_kind, extents, is_within, pixels_apart, smallest_gap

pytestmark = pytest.mark.slow

REAL = [
    Divergence(label, kld, percentiles_of(real_table.token_klds(kld)), histogram_of(real_table.token_klds(kld)))
    for label, _, _, _, kld, _, _ in real_table.ROWS
    if kld
]
FLOOR = next(one for one in REAL if one.label == real_table.FLOOR)
PERCENTS = {"1": 0.001, "25": 0.01, "50": 0.02, "75": 0.05, "99": 0.8, "max": 4.0}
SPREADS = [
    Divergence("EXL3 3.0 bpw", 0.07, PERCENTS, Histogram(-3, 1, (10, 50, 30, 5), 0, 5)),
    Divergence("GGUF Q8_0", 0.003, {p: x / 10 for p, x in PERCENTS.items()}, Histogram(-3, 1, (60, 30, 10, 0), 0, 0)),
]


@functools.cache
def real(draw: str) -> Figure:
    return getattr(spread, draw)(REAL, title="Table", subtitle="text", floor=FLOOR)


@pytest.mark.parametrize("draw", ["spread_plot", "ridge_plot"])
def test_rows_and_labels_of_the_real_table_overlap_nothing(draw: str) -> None:
    figure = real(draw)
    axes = figure.axes[0]
    rows, numbers = labels.boxes_of(figure), [
        text for text in extents(axes.texts) if text.x0 >= axes.bbox.x1
    ]  # fmt: skip
    assert len(rows) == 26
    assert len(numbers) == 27 * (4 if draw == "spread_plot" else 1)
    assert smallest_gap(rows) > 1
    assert smallest_gap(numbers) > 1
    assert all(row.x1 < axes.bbox.x0 for row in rows)
    assert all(is_within(box, figure.bbox) for box in [*rows, *numbers])
    (name,) = labels.boxes_of(figure, "level-name")
    drawn = [mark for kind in ("mean", "whisker", "max") for mark in labels.boxes_of(figure, kind)]
    assert smallest_gap([name], [*drawn, *numbers, *rows, *extents(axes.get_xticklabels())]) > 1
    assert is_within(name, axes.bbox)
    assert smallest_gap(extents(axes.get_xticklabels()), [*rows, *drawn]) > 1


@pytest.mark.parametrize("draw", ["spread_plot", "ridge_plot"])
def test_rows_are_sorted_by_mean_and_have_their_groups_colours(draw: str) -> None:
    figure = real(draw)
    ranked = sorted(REAL, key=lambda one: (one.mean, one.label))
    assert [text.get_text() for text in artists_of_kind(figure, "label")] == [one.label for one in ranked]
    assert [round(float(mark.get_xdata()[0]), 9) for mark in artists_of_kind(figure, "mean")] == [
        round(one.mean, 9) for one in ranked
    ]
    places = [box.y0 for box in labels.boxes_of(figure)]
    assert places == sorted(places, reverse=True)
    styles = looks.group_styles([one.label.split()[0] for one in REAL], style.LIGHT.ink)
    for text, mark in zip(artists_of_kind(figure, "label"), artists_of_kind(figure, "mean"), strict=True):
        assert (mark.get_color(), mark.get_marker()) == styles[text.get_text().split()[0]]
        assert text.get_color() == style.ink_of(mark.get_color(), style.LIGHT)
        middle = mark.get_window_extent()
        assert 0 < figure.axes[0].bbox.x0 - text.get_window_extent().x1 < 15
        assert text.get_window_extent().y0 < (middle.y0 + middle.y1) / 2 < text.get_window_extent().y1


def test_quartiles_whiskers_mean_and_maximum_are_where_the_percentiles_say() -> None:
    figure = spread.spread_plot(SPREADS, title="t")
    for i, one in enumerate(reversed(SPREADS)):
        p = one.percentiles
        found = {kind: artists_of_kind(figure, kind)[i] for kind in ("box", "whisker", "median", "max", "mean")}
        box = found["box"]
        assert (box.get_x(), box.get_x() + box.get_width()) == pytest.approx((p["25"], p["75"]))
        assert box.get_y() + box.get_height() / 2 == pytest.approx(i)
        assert tuple(found["whisker"].get_xdata()) == (p["1"], p["99"])
        assert tuple(found["median"].get_xdata()) == (p["50"], p["50"])
        assert float(found["max"].get_xdata()[0]) == p["max"]
        assert float(found["mean"].get_xdata()[0]) == one.mean
        assert {float(found[kind].get_ydata()[0]) for kind in ("whisker", "max", "mean")} == {i}
    assert figure.axes[0].get_xscale() == "log"
    assert not artists_of_kind(figure, "level")


def test_the_numbers_are_those_of_the_row_and_right_aligned() -> None:
    figure = spread.spread_plot(SPREADS, title="t")
    numbers = artists_of_kind(figure, "number")
    rows = [artists_of_kind(figure, "head"), numbers[:4], numbers[4:]]
    table = [[text.get_text() for text in row] for row in rows]
    assert table == [["median", "mean", "p99", "max"], ["0.00200", "0.00300", "0.0800", "0.400"],
                     ["0.0200", "0.0700", "0.800", "4.00"]]  # fmt: skip
    for column in range(4):
        assert len({round(row[column].get_window_extent().x1) for row in rows}) == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (-9e-9, "0"), (-1e-7, "-1.0e-7"), (-0.02, "-0.0200"),
     (4.56e-6, "4.6e-6"), (0.000123, "0.000123"), (0.00154, "0.00154"), (1.0, "1.00"),
     (12.34, "12.3"), (842.2, "842")],
)  # fmt: skip
def test_numbers_have_two_or_three_digits(value: float, shown: str) -> None:
    models = [replace(SPREADS[0], mean=value)]
    figure = spread.spread_plot(models, title="t")
    assert artists_of_kind(figure, "number")[1].get_text() == shown


def test_what_is_not_above_zero_comes_out_of_the_edge() -> None:
    """A reference against itself in most tokens: the whisker has no cap there, and nothing is drawn beyond the axis."""
    zeros = replace(SPREADS[0], label="W8A8", percentiles=PERCENTS | {"1": -1e-9, "25": 0.0})
    figure = spread.spread_plot([zeros, SPREADS[1]], title="t")
    edge = figure.axes[0].get_xlim()[0]
    assert edge == pytest.approx(1e-4 / 1.5)
    assert tuple(artists_of_kind(figure, "whisker")[1].get_xdata()) == (edge, 0.8)
    assert artists_of_kind(figure, "box")[1].get_x() == edge
    caps = [tuple(line.get_xdata()) for line in artists_of_kind(figure, "cap")]
    assert caps == [(1e-4, 0.08), (0.8,)]
    with pytest.raises(ValueError, match="no model was compared"):
        spread.spread_plot([], title="t")
    with pytest.raises(ValueError, match="no token has a KLD above 0"):
        spread.spread_plot([replace(zeros, mean=0.0, percentiles=dict.fromkeys(PERCENTS, 0.0))], title="t")


@pytest.mark.parametrize("draw", ["spread_plot", "ridge_plot"])
def test_the_noise_floor_is_a_line_at_its_mean(draw: str) -> None:
    figure = real(draw)
    (line,), (name,) = artists_of_kind(figure, "level"), artists_of_kind(figure, "level-name")
    assert tuple(line.get_xdata()) == (FLOOR.mean, FLOOR.mean)
    assert name.get_text() == "noise floor (bf16 Transformers) 0.00154"
    assert 0 < pixels_apart(name.get_window_extent(), line.get_window_extent()) < 25


def test_bins_hold_all_tokens_and_pool_the_smallest() -> None:
    edges, shares, note = spread.binned_shares([one.histogram for one in SPREADS])
    assert shares.sum(axis=1) == pytest.approx(1)
    assert shares[0].tolist() == pytest.approx([0, 0.1, 0.5, 0.3, 0.05, 0.05])
    assert shares[1].tolist() == pytest.approx([0, 0.6, 0.3, 0.1, 0, 0])
    assert edges == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100])
    assert note == "the last bin holds all that is more"


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


def test_the_axis_says_what_the_outer_bins_hold() -> None:
    drawn = ("ridge_plot", [SPREADS]), ("histogram_plot", SPREADS[:1]), ("histogram_plot", SPREADS[1:])
    notes = [getattr(spread, draw)(*what, title="t").axes[0].get_xlabel().splitlines()[1:] for draw, what in drawn]
    assert notes == [["the last bin holds all that is more"]] * 2 + [[]]
    both = replace(SPREADS[0], histogram=Histogram(-3, 1, (10,), 3, 3))
    figure = spread.histogram_plot(both, title="t")
    assert figure.axes[0].bbox.width > 0.8 * figure.bbox.width


def test_ridges_are_the_shares_at_one_scale() -> None:
    figure = real("ridge_plot")
    edges, shares, _ = spread.binned_shares(
        [one.histogram for one in sorted(REAL, key=lambda one: (one.mean, one.label))]
    )
    ridges = artists_of_kind(figure, "ridge")
    assert len(ridges) == 26
    for i, (ridge, expected) in enumerate(zip(ridges, shares, strict=True)):
        drawn = ridge.get_data()
        assert drawn.edges.tolist() == edges.tolist()
        heights = (i - drawn.values) / spread.RIDGE * shares.max()
        assert heights == pytest.approx(expected)
        assert heights.sum() == pytest.approx(1)
    low = figure.axes[0].get_ylim()[1]
    assert low < min((i - spread.RIDGE * row.max() / shares.max()) for i, row in enumerate(shares))


@pytest.mark.parametrize("dark", [False, True])
def test_the_histogram_of_one_model(dark: bool) -> None:
    one = next(one for one in REAL if one.label == "EXL3 4.0 bpw")
    figure = spread.histogram_plot(one, title="t", subtitle="text", floor=FLOOR, dark=dark)
    axes = figure.axes[0]
    edges, shares, _ = spread.binned_shares([one.histogram, FLOOR.histogram])
    for steps, expected in zip(artists_of_kind(figure, "share"), shares, strict=True):
        assert steps.get_data().values.tolist() == expected.tolist()
        assert steps.get_data().values.sum() == pytest.approx(1)
        assert steps.get_data().edges.tolist() == edges.tolist()
    assert float(artists_of_kind(figure, "median")[0].get_xdata()[0]) == one.percentiles["50"]
    assert float(artists_of_kind(figure, "mean")[0].get_xdata()[0]) == one.mean
    texts = {text.get_text(): text.get_window_extent() for text in artists_of_kind(figure, "label")}
    assert set(texts) == {f"median {one.percentiles['50']:.4f}", "mean 0.0465"}
    top = axes.transData.transform((1, shares.max()))[1]
    assert all(is_within(box, axes.bbox) and box.y0 > top for box in texts.values())
    assert smallest_gap(list(texts.values()), labels.boxes_of(figure, "median") + labels.boxes_of(figure, "mean")) > 1
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "EXL3 4.0 bpw", "noise floor (bf16 Transformers)"
    ]  # fmt: skip
    assert axes.texts[0].get_text().splitlines() == ["EXL3 4.0 bpw", "text"]


def test_the_noise_floor_is_not_compared_with_itself() -> None:
    figure = spread.histogram_plot(FLOOR, title="t", floor=FLOOR)
    assert len(artists_of_kind(figure, "share")) == 1
    assert figure.axes[0].get_legend() is None


def test_a_mean_below_the_median_has_its_name_on_the_other_side() -> None:
    skewed = replace(SPREADS[0], mean=0.005)
    texts = artists_of_kind(spread.histogram_plot(skewed, title=""), "label")
    boxes = {text.get_text().split()[0]: text.get_window_extent() for text in texts}
    assert boxes["mean"].x1 < boxes["median"].x0


def test_a_median_of_zero_and_a_mean_beyond_all_bins_have_no_line() -> None:
    beyond = replace(SPREADS[0], percentiles=PERCENTS | {"50": 0.0}, mean=1e9)
    for figure in (spread.histogram_plot(beyond, title="t"), spread.ridge_plot([beyond], title="t")):
        assert not artists_of_kind(figure, "median") + artists_of_kind(figure, "mean")
        assert figure.axes[0].bbox.width > 0.6 * figure.bbox.width


@pytest.mark.parametrize("draw", ["spread_plot", "ridge_plot"])
def test_one_row_below_a_long_heading_has_room(draw: str) -> None:
    figure = getattr(spread, draw)([FLOOR], title="word " * 30, subtitle="words " * 30, floor=FLOOR)
    axes = figure.axes[0]
    assert axes.bbox.height > 0.4 * style.DPI
    assert is_within(axes.xaxis.label.get_window_extent(), figure.bbox)
    assert is_within(axes._left_title.get_window_extent(), figure.bbox)
    assert smallest_gap(labels.boxes_of(figure, "level-name"), labels.boxes_of(figure, "mean")) > 1


def long_ones() -> list[Divergence]:
    """Labels of 300 letters, with spaces and without, the last words of which differ."""
    return [
        replace(one, label=f"{'W' * 300}{i}" if i % 2 else f"{'word ' * 60}Q{i} †") for i, one in enumerate(REAL[::3])
    ]


@pytest.mark.parametrize("draw", ["spread_plot", "ridge_plot"])
@pytest.mark.filterwarnings("error")
def test_long_labels_leave_room_for_all_else(draw: str) -> None:
    models = long_ones()
    for floor in min(models, key=lambda one: one.mean), max(models, key=lambda one: one.mean):
        figure = getattr(spread, draw)(models, title="word " * 20, subtitle="word " * 30, floor=floor)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        rows, ticks = labels.boxes_of(figure), extents(axes.get_xticklabels())
        assert all(is_within(box, figure.bbox) for box in [*rows, *extents(axes.texts)])
        assert is_within(axes._left_title.get_window_extent(), figure.bbox)
        assert smallest_gap(rows) > 1
        assert smallest_gap(ticks) > 1
        assert axes.bbox.width > 0.4 * figure.bbox.width
        assert is_within(*labels.boxes_of(figure, "level-name"), axes.bbox)
    assert len({text.get_text() for text in artists_of_kind(figure, "label")}) == len(models)
    assert all(text.get_text()[-1] in "†13579" for text in artists_of_kind(figure, "label"))


@pytest.mark.filterwarnings("error")
def test_a_long_label_is_whole_in_the_heading_of_its_histogram() -> None:
    for one, floor in itertools.permutations(long_ones()[:2]):
        figure = spread.histogram_plot(one, title="t", subtitle="text", floor=floor)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        heading, legend = axes.texts[0], axes.get_legend().get_window_extent()
        assert "".join(heading.get_text().split()) == "".join(f"{one.label}text".split())
        assert all(is_within(box, figure.bbox) for box in (heading.get_window_extent(), legend))
        assert pixels_apart(legend, axes.xaxis.label.get_window_extent()) > 0


@pytest.mark.parametrize("draw", ["spread_plot", "ridge_plot"])
def test_colours_repeat_where_there_are_too_many_groups(draw: str) -> None:
    figure = getattr(spread, draw)([replace(SPREADS[0], label=f"group{i} 4.0") for i in range(81)], title="t")
    assert len(artists_of_kind(figure, "label")) == 81
