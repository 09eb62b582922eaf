"""Scatter plots: points, bars, lines and legend are the results', and the axes show what matters."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from compare_q.eval.plots import looks, measures, points, scatter, style
from compare_q.eval.plots.measures import ACCURACIES, BPW, KLD, KLD_VALUES, PPL, VRAM, Measure, Size
from compare_q.eval.plots.points import Level, Point
from compare_q.eval.results.run_result import ModelResult, TextResult
from tests.support import real_table
from tests.support.drawn import artists_of_kind, boxes_of, extents
from tests.support.scatter_cases import KLDS, TABLE, draw, draw_kld, figure_of, in_order, legend_of
from tests.support.several_texts import text_of, three, with_answers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unplaced")]


@functools.cache
def real(measure: Measure, size: Size) -> Figure:
    """The plot of the real table, drawn once."""
    return scatter.scatter_figure(real_table.real_text(), measure=measure, size=size)


@pytest.mark.parametrize(("measure", "size"), [(PPL, BPW), (KLD, VRAM)])
def test_every_row_of_the_real_table_is_where_it_belongs(measure: Measure, size: Size) -> None:
    figure = real(measure, size)
    rows, kld, vram = {}, measure.kld, size == VRAM
    sizes = [row[2] / 8 / 2**30 if vram else row[1] for row in real_table.ROWS if row[1] < 16]
    edge = max(sizes) + 0.1 * max(max(sizes) - min(sizes), max(sizes) / 2)
    for label, bpw, bits, ppl, value, ppl_error, kld_error in real_table.ROWS:
        y, error = (value, kld_error) if kld else (ppl, ppl_error)
        decimals = max(-math.floor(math.log10(error)), 0) if error else 3  # down to the error's first digit
        shown = "reference: 0" if kld and not value else f"{y:.{decimals}f}"
        mark = " †" if label == real_table.MARKED else ""
        x = edge if bpw == 16 else bits / 8 / 2**30 if vram else bpw
        if not kld:
            y, error = 100 * (y / 21.991 - 1), 100 * (error or 0) / 21.991
        name = label.split(" ", 1)[1] if label.startswith(("EXL3 ", "GGUF Q")) else label  # a size is enough
        rows[f"{name}{mark}\n{shown}"] = (x, y, error or 0)
    found = zip(artists_of_kind(figure, "label"), artists_of_kind(figure, "point"), strict=True)
    for text, mark in found:
        x, y, _ = rows[text.get_text()]
        assert mark.get_xdata()[0] == pytest.approx(x)
        if y:
            assert mark.get_ydata()[0] == pytest.approx(y)
    bars = {(round(float(bar.get_xdata()[0]), 6), *bar.get_ydata()) for bar in artists_of_kind(figure, "bar")}
    expected = {(round(x, 6), y - error, y + error) for x, y, error in rows.values()}
    assert all(any(bar == pytest.approx(other, rel=1e-9) for other in expected) for bar in bars)
    assert len(bars) == (0 if kld else 18)  # KLD's errors are smaller than any marker


@pytest.mark.parametrize("measure", [PPL, KLD])
def test_a_card_names_the_ends_of_the_front(measure: Measure) -> None:
    figure = scatter.scatter_figure(real_table.real_text(), measure=measure, card=True)
    others = ["Q4_K_M", *(["W8A16 g128"] if measure.kld else [])]
    names = sorted(text.get_text() for text in artists_of_kind(figure, "label"))
    assert names == ["2.0 bpw", "6.0 bpw", *others]  # seven of EXL3 are on it
    assert len(artists_of_kind(figure, "point")) == 27
    assert tuple(figure.get_size_inches() * style.DPI) == (1200, 675)


def crowd(figure: Figure) -> int:
    """Points that share the twentieth of the axis above the lowest one."""
    boxes = boxes_of(figure, "point")
    heights = [(box.y0 + box.y1) / 2 - min((each.y0 + each.y1) / 2 for each in boxes) for box in boxes]
    return sum(height < figure.axes[0].bbox.height / 20 for height in heights)


def test_scales_show_the_rows_that_matter_unless_told_otherwise() -> None:
    """On linear axes, as upstream's are, 17 rows by KLD and 26 by PPL share the lowest twentieth; on ours 1 and 5."""
    found = {}
    for measure, log_y in (KLD, None), (KLD, False), (PPL, None), (PPL, False), (PPL, True):
        figure = scatter.scatter_figure(real_table.real_text(), measure=measure, log_y=log_y)
        found[measure.name, log_y] = (figure.axes[0].get_yscale(), crowd(figure))
        if measure is PPL:
            shown = f"{scatter.EXCESS_AXIS} (logarithmic; linear near 0)" if log_y is None else "Perplexity"
            assert figure.axes[0].get_ylabel() == shown
    assert found == {("KLD", None): ("log", 1), ("KLD", False): ("linear", 17), ("PPL", None): ("asinh", 5),
                     ("PPL", False): ("linear", 26), ("PPL", True): ("log", 17)}  # fmt: skip


def of_rows(*labels: str) -> TextResult:
    """The real table with these rows alone."""
    run = real_table.real_text()
    return replace(run, models=tuple(model for model in run.models if model.label in labels))


TWO = "bf16 vLLM", "W4A16 g128", "EXL3 2.5 bpw"


@pytest.mark.parametrize("kind", [KLD, PPL])
def test_an_axis_begins_at_zero_where_all_is_within_a_decade_and_a_half(kind: Measure) -> None:
    """KLD 0.354 is two thirds of 0.537, and PPL 31.3 is 75 % of the way from the reference's to 34.4: so they stand."""
    figure = scatter.scatter_figure(of_rows(*TWO), measure=kind)
    values = [float(mark.get_ydata()[0]) for mark in artists_of_kind(figure, "point")]
    heights = [(box.y0 + box.y1) / 2 for box in extents(artists_of_kind(figure, "point"))]
    (small, large, none), (a, b, zero) = values, heights
    assert (a - zero) / (b - zero) == pytest.approx((small - none) / (large - none), abs=0.005)
    assert (a - zero) / (b - zero) == pytest.approx(0.659 if kind is KLD else 0.749, abs=0.005)
    ticks = {text.get_text() for text in figure.axes[0].get_yticklabels()}
    assert ticks >= ({"0.0", "0.2", "0.4"} if kind is KLD else {"0 %", "+20 %", "+40 %"})
    assert figure.axes[0].get_ylabel() == (measures.kld_axis(of_rows(*TWO)) if kind is KLD else scatter.EXCESS_AXIS)
    more = scatter.scatter_figure(of_rows(*TWO, "W8A16 g128"), measure=kind)
    assert more.axes[0].get_yscale() == ("log" if kind is KLD else "asinh")
    assert "(logarithmic" in more.axes[0].get_ylabel() or kind is KLD


def test_a_group_has_one_colour_and_marker_whatever_rows_are_shown() -> None:
    """In the table of 27 rows, and in tables of the reference and one row."""

    def looks_of(run: TextResult) -> dict[str, tuple[object, object]]:
        figure = scatter.scatter_figure(run, measure=KLD)
        drawn = sorted(points.points_of([run], BPW, KLD)[0], key=lambda p: (p.x, p.y, p.label))
        marks = artists_of_kind(figure, "point")
        return {p.label: (m.get_color(), m.get_marker()) for p, m in zip(drawn, marks, strict=True)}

    together = looks_of(real_table.real_text())
    for model in real_table.real_text().models[1::5]:
        alone = looks_of(of_rows("bf16 vLLM", model.label))
        assert alone[model.marked_label] == together[model.marked_label]
    assert len(set(together.values())) == 8  # bf16, W4A16, W8A16, W8A8, FP8, NVFP4, EXL3, GGUF


def test_the_lines_of_the_real_table() -> None:
    floor = f"noise floor ({real_table.FLOOR}) 0.0015"
    for measure, size, height, name in (PPL, BPW, 0, "reference 21.99"), (KLD, VRAM, 0.00154269, floor):
        figure = real(measure, size)
        (line,), (text,) = artists_of_kind(figure, "level"), artists_of_kind(figure, "level-name")
        assert tuple(line.get_ydata()) == (height, height)
        assert text.get_text() == name


def subtitles(run: TextResult, **keys: Any) -> list[str]:
    return str(scatter.scatter_figure(run, **keys).axes[0].texts[0].get_text()).splitlines()


def test_what_is_below_the_title() -> None:
    mark = "wikitext2, 586 × 2048 tokens (†: ran otherwise than its checkpoint asks)"
    bars = "error bars, where longer than the marker: one standard error of"
    run = real_table.real_text()
    best = "bold: the best of their size or smaller: EXL3 2.0 bpw to EXL3 6.0 bpw, GGUF Q4_K_M"
    assert subtitles(run) == [mark, f"{bars} the ratio to the reference's", best]
    assert subtitles(run, measure=KLD) == [mark, f"{bars} the mean", f"{best}, W8A16 g128"]
    unknown = "no error bars: errors of percentiles are not known"
    assert subtitles(run, measure=KLD_VALUES["median"])[1] == unknown
    assert subtitles(run, card=True) == [mark.split(" (")[0]]
    alone = replace(run, models=tuple(on_its_own(model) for model in run.models if model.label != real_table.MARKED))
    assert subtitles(alone)[:2] == [mark.split(" (")[0], f"{bars} the perplexity (mostly common to all)"]
    mixed = replace(run, models=tuple(on_its_own(m) if "Q8" in m.label else m for m in run.models))
    assert " ".join(subtitles(mixed)[1:3]) == f"{bars} the ratio to the reference's (GGUF Q8_0: of the perplexity)"
    assert subtitles(replace(run, models=run.models[:1])) == [mark.split(" (")[0]]


def on_its_own(model: ModelResult) -> ModelResult:
    """A model that was not compared with a reference, from windows that no other has."""
    estimates = model.estimates
    assert estimates
    blocks = replace(estimates.blocks, tokens=(40,), nll=(100.0,))
    return replace(model, is_reference=False, estimates=replace(estimates, against=None, blocks=blocks))


def test_limits_leave_points_and_lines_out() -> None:
    figure = scatter.scatter_figure(real_table.real_text(), max_x=5, max_y=25)
    shown = {text.get_text().split("\n")[0] for text in artists_of_kind(figure, "label")}
    assert shown == {"EXL3 3.5 bpw", "EXL3 4.0 bpw", "GGUF Q4_K_M"}
    assert len(artists_of_kind(figure, "level")) == 1
    low = replace(
        real_table.real_text(), models=real_table.real_text().models[2:3]
    )  # ExLlamaV3, below the reference's 21.991
    assert artists_of_kind(scatter.scatter_figure(low, max_y=21.99), "level") == []
    with pytest.raises(ValueError, match="no model has both PPL and bits per weight within the limits"):
        scatter.scatter_figure(real_table.real_text(), max_x=1)


def test_several_texts_are_one_plot_of_their_means() -> None:
    figure = scatter.scatter_figure(*three().texts, measure=KLD)
    assert [mark.get_ydata()[0] for mark in artists_of_kind(figure, "point")][:2] == pytest.approx([0.05, 0.03])
    assert artists_of_kind(figure, "level")[0].get_ydata()[0] == pytest.approx(0.002)
    figure = scatter.scatter_figure(*three().texts, measure=PPL)
    assert figure.axes[0].get_ylabel().startswith(scatter.EXCESS_AXIS)
    best = artists_of_kind(figure, "point")[0].get_ydata()[0]
    assert best == pytest.approx(100 * (math.prod((1.05, 1.02, 1.08)) ** (1 / 3) - 1))


def test_accuracy_is_on_a_linear_axis() -> None:
    run = with_answers(text_of("c4", 1), **{"bf16": "1111", "noise": "1111", "EXL3_4.0": "1010", "GGUF_Q4_K": "0111"})
    figure = scatter.scatter_figure(run, measure=ACCURACIES["acc"])
    assert figure.axes[0].get_yscale() == "linear"
    assert figure.axes[0].get_ylabel().startswith("Accuracy / %")
    assert [mark.get_ydata()[0] for mark in artists_of_kind(figure, "point")] == [50, 75, 100, 100]


def test_dotted_lines_through_schemes_in_x_order() -> None:
    dotted = [line for line in figure_of("table").axes[0].lines if line.get_linestyle() == ":"]
    paths = sorted(tuple(np.asarray(line.get_xdata())) for line in dotted)
    assert paths == [
        (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0),
        (2.96, 3.91, 4.85, 5.69, 6.56),  # Q2_K to Q6_K
        (4.25, 4.63),
        (4.55, 8.5),  # Q4_0 and Q8_0
    ]


def test_a_point_that_another_all_but_covers_shows_around_it() -> None:
    figure = draw_kld(KLDS)
    texts = [text.get_text() for text in artists_of_kind(figure, "label")]
    assert texts == ["vLLM W4A16\n0.30000", "vLLM FP8\n0.02000", "bf16\nreference", "vLLM bf16\n0.00040"]
    sizes = {mark.get_ydata()[0]: mark.get_markersize() for mark in artists_of_kind(figure, "point")}
    assert sizes[0.0] > sizes[0.0004] == sizes[0.02] == sizes[0.3]


def test_nothing_global_changes(tmp_path: Path) -> None:
    style.save_figure(draw(TABLE, dark=True), tmp_path / "before.svg")
    with mpl.rc_context({"font.family": "monospace", "xtick.major.size": 20, "savefig.facecolor": "red"}):
        before = dict(mpl.rcParams)
        style.save_figure(draw(TABLE, dark=True), tmp_path / "after.svg")
        assert dict(mpl.rcParams) == before
    assert (tmp_path / "before.svg").read_bytes() == (tmp_path / "after.svg").read_bytes()
    assert plt.get_fignums() == []


def test_the_legend_is_sorted_and_each_name_has_the_look_of_its_group() -> None:
    figure = draw([Point(name, 1, y) for y, name in enumerate(["gguf 1", "EXL3 2", "bf16", "AWQ 4"])])
    legend = legend_of(figure)
    assert [text.get_text() for text in legend.get_texts()] == ["AWQ", "bf16", "EXL3", "gguf"]
    looks = [(handle.get_color(), handle.get_marker()) for handle in legend.get_lines()]
    marks = artists_of_kind(figure, "point")
    assert looks == [(marks[i].get_color(), marks[i].get_marker()) for i in (3, 2, 1, 0)]


def test_labels_give_name_and_value() -> None:
    names = looks.drawn_names([(p.label, "") for p in in_order(TABLE)])
    expected = [f"{name}\n{p.y:.3f}" for name, p in zip(names, in_order(TABLE), strict=True)]
    assert [text.get_text() for text in artists_of_kind(draw(TABLE), "label")] == expected


def test_odd_labels_are_shown_as_written() -> None:
    figure = figure_of("odd labels")
    legend = [text.get_text() for text in legend_of(figure).get_texts()]
    assert {"_x", "?", "[a]"} <= set(legend)
    first = artists_of_kind(figure, "label")[0]
    assert first.get_text() == "_x $a$ b$\n1.000"
    assert not first.get_parse_math()


def test_a_value_below_zero_is_still_on_the_axis() -> None:
    low, high = draw_kld([*KLDS, Point("EXL3 8.0", 8, -0.1)]).axes[0].get_ylim()
    assert low == pytest.approx(-0.1 - scatter.FLOOR * high)


def test_without_zero_a_logarithmic_axis_has_no_such_tick() -> None:
    figure = draw_kld(KLDS[1:], log_y=True)
    assert "0" not in [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert min(mark.get_ydata()[0] for mark in artists_of_kind(figure, "point")) == 0.0004


def test_nothing_above_zero_cannot_be_logarithmic() -> None:
    with pytest.raises(ValueError, match="nothing above 0"):
        draw_kld(KLDS[:1], log_y=True)


@pytest.mark.parametrize(("other", "name"), [(16.0, "16"), (16.01, "16"), (32.0, "unquantized")])
def test_the_break_is_behind_the_last_quantized_point_and_the_edge_says_what_is_there(other: float, name: str) -> None:
    """The tick has the size of the unquantized rows if it is one size; the ticks before the break are all there."""
    points = [
        Point("Q 4.5", 4.5, 9.0), Point("Q 8.02", 8.02, 8.0),
        Point("bf16 a", 16, 7.0, unquantized=True), Point("bf16 b", other, 7.1, unquantized=True),
    ]  # fmt: skip
    axes = draw(points).axes[0]
    edge = 8.02 + 0.1 * (8.02 / 2)
    assert axes.get_xticks()[-1] == pytest.approx(edge)
    assert 8.0 in axes.get_xticks()
    assert axes.get_xticklabels()[-1].get_text() == name
    (broken,) = [text for text in axes.texts if text.get_gid() == "break-0"]
    assert broken.get_position()[0] == pytest.approx((8.02 + edge) / 2)


@pytest.mark.parametrize(
    ("rows", "near"),
    [
        ([("a", 20.2, None, False), ("b", 30.0, None, False), ("bf16", 20.001, None, True)], 1.0),
        ([("a", 20.01, 0.1, False), ("b", 30.0, 1.0, False)], 0.5),  # no nearer than its error says
        ([("a", 20.0001, None, False), ("b", 30.0, None, False)], 1e-3),
        ([("a", 20.0, None, False), ("b", 30.0, None, False)], math.inf),
        ([("a", 60.0, None, False)], math.inf),
        ([("bf16", 20.5, None, True)], math.inf),
    ],
)
def test_the_scale_of_excesses_resolves_what_the_errors_of_quantized_rows_allow(rows: list, near: float) -> None:
    points = [Point(label, 4.0, y, "", error, "", unquantized) for label, y, error, unquantized in rows]
    percents, levels, found = scatter.excesses(20.0, points, [Level(20.0, "reference")])
    assert found == pytest.approx(near)
    assert [p.y for p in percents] == pytest.approx([5 * y - 100 for _, y, _, _ in rows])
    assert [p.error for p in percents] == [None if e is None else pytest.approx(5 * e) for _, _, e, _ in rows]
    assert levels[0].y == 0


def test_ticks_of_excesses_are_percents() -> None:
    """Powers of ten, and 2 and 5 times these as long as they are few."""
    near = -1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000
    assert scatter.percent_ticks(1.0, -1.5, 2500.0, scatter.MOST_TICKS) == pytest.approx(near)
    assert scatter.percent_ticks(1.0, -1.5, 2500.0, scatter.MOST_SPARSE) == pytest.approx([-1, 0, 1, 10, 100, 1000])
    assert scatter.percent_ticks(1e-3, -1.5, 2500.0, scatter.MOST_TICKS)[-2:] == pytest.approx([100, 1000])
    axes = draw([Point("a", 4, -0.5), Point("b", 5, 2000.0)], near=1.0).axes[0]
    assert axes.get_yscale() == "asinh"
    assert {"0 %", "+1 %", "+1,000 %"} <= {text.get_text() for text in axes.get_yticklabels()}


@pytest.mark.parametrize(
    ("values", "wide"),
    [([0.33, 1.0], False), ([0.0, 0.1, 3.16], False), ([0.0, 0.1, 3.17], True), ([-1.0, 0.0], False), ([], False)],
)
def test_a_decade_and_a_half_by_hand(values: list[float], wide: bool) -> None:
    """10^1.5 is 31.62."""
    assert style.is_wide(values) == wide


@pytest.mark.parametrize("reference", [math.inf, None])
def test_a_reference_of_no_finite_perplexity_has_no_excess(
    reference: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The axis is perplexity itself then, and no line is drawn."""
    monkeypatch.setattr(TextResult, "reference_ppl", property(lambda run: reference))
    figure = scatter.scatter_figure(real_table.real_text(), measure=PPL)
    assert (figure.axes[0].get_yscale(), figure.axes[0].get_ylabel()) == ("linear", "Perplexity")
    assert not artists_of_kind(figure, "level")


def test_a_logarithmic_axis_shows_all_to_scale_and_zero_at_a_tick_of_its_own() -> None:
    points = [*KLDS, Point("GGUF IQ1_S", 2, 9.0, "9.00000"), Point("EXL3 8.0", 8, -1e-6, "0.00000")]
    figure = draw_kld(points, log_y=True)
    axes, marks = figure.axes[0], artists_of_kind(figure, "point")
    assert axes.get_yscale() == "log"
    zero = [mark for mark in marks if mark.get_markerfacecolor() == style.LIGHT.paper]
    ticks = dict(zip([t.get_text() for t in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    assert [float(mark.get_ydata()[0]) for mark in zero] == [ticks["0"]] * 2
    assert min(tick for name, tick in ticks.items() if name != "0") > 2 * ticks["0"]
    assert sorted(mark.get_ydata()[0] for mark in marks if mark not in zero) == [0.0004, 0.02, 0.3, 9.0]


BARS = [Point("EXL3 2.0", 2, 30.0, error=5.0), Point("EXL3 4.0", 4, 22.0, error=2.0), Point("GGUF Q8_0", 8, 21.0),
        Point("W8A8", 9, 21.0, error=1e-3)]  # fmt: skip


@pytest.mark.parametrize("log_y", [False, True])
def test_error_bars_are_one_error_long_and_behind_their_points(log_y: bool) -> None:
    """None for what has no error, or one that its marker hides."""
    figure = draw(BARS, log_y=log_y)
    bars = {float(bar.get_xdata()[0]): tuple(bar.get_ydata()) for bar in artists_of_kind(figure, "bar")}
    assert bars == {2.0: (25.0, 35.0), 4.0: (20.0, 24.0)}
    low, high = figure.axes[0].get_ylim()
    assert low < 20
    assert 35 < high < 60
    mark = artists_of_kind(figure, "point")[0]
    assert artists_of_kind(figure, "bar")[0].get_zorder() < mark.get_zorder()
    assert artists_of_kind(figure, "bar")[0].get_color() == mark.get_color()


def test_a_bar_down_to_zero_ends_at_the_edge_of_a_logarithmic_axis() -> None:
    figure = draw([Point("a", 1, 0.1, error=0.2), Point("b", 2, 1.0)], log_y=True)
    assert tuple(artists_of_kind(figure, "bar")[0].get_ydata()) == (figure.axes[0].get_ylim()[0], pytest.approx(0.3))


def test_lines_lie_right_across_at_their_height() -> None:
    levels = [Level(7.3, "reference 7.30"), Level(7.9, "noise floor 7.90", dotted=True)]
    figure = draw(TABLE, levels=levels, log_y=True)
    lines = artists_of_kind(figure, "level")
    assert [tuple(line.get_ydata()) for line in lines] == [(7.3, 7.3), (7.9, 7.9)]
    assert all(tuple(line.get_xdata()) == figure.axes[0].get_xlim() for line in lines)
    assert [name.get_text() for name in artists_of_kind(figure, "level-name")] == ["reference 7.30", "noise floor 7.90"]
