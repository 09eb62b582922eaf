"""The scatter plots of a run: which values, errors, lines and words, on the real table and on results made by hand."""

import functools
import math
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from compare_q.backends.base import Storage
from compare_q.backends.layers.groups import KVCache
from compare_q.eval.plots import labels, measures, pictures, points, scatter, style
from compare_q.eval.plots.measures import BPW, FILES, KLD, KLD_VALUES, PPL, SIZES, VRAM, Measure, Size
from compare_q.eval.plots.points import Point
from compare_q.eval.results.run_result import ModelResult, Results, TextResult
from compare_q.eval.stats.uncertainty import Mean, Perplexity
from tests.support import real_table
from tests.support.drawn import artists_of_kind, boxes_of, extents, is_within, smallest_gap
from tests.support.made import BASE, FAILED, QUANT, REF, run_of, with_against, with_ppl, with_sums

pytestmark = pytest.mark.slow


@functools.cache
def real(measure: Measure, size: Size) -> Figure:
    """The finished plot of the real table, drawn once."""
    return scatter.scatter_figure(real_table.real_text(), measure=measure, size=size)


@pytest.mark.parametrize(("measure", "size"), [(PPL, BPW), (KLD, VRAM), (KLD_VALUES["p99.9"], FILES)])
def test_nothing_overlaps_on_the_real_table(measure: Measure, size: Size) -> None:
    figure = real(measure, size)
    axes = figure.axes[0]
    texts, marks, names = (boxes_of(figure, kind) for kind in ("label", "point", "level-name"))
    assert (len(texts), len(marks), len(names)) == (27, 27, 1)
    assert smallest_gap(texts) > 1
    assert smallest_gap(texts, marks) > 1
    assert smallest_gap(names, [*texts, *marks]) > 1
    assert all(is_within(box, axes.bbox) for box in [*texts, *names])
    outside = extents([axes.get_legend(), *axes.get_xticklabels(), *axes.get_yticklabels()])
    assert smallest_gap(outside, [*texts, *marks, *names]) > 1
    assert {text.get_fontsize() for text in artists_of_kind(figure, "label")} == {labels.FONT_SIZES[0]}


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
def test_a_card_names_the_ends_of_the_front_and_covers_nothing(measure: Measure, tmp_path: Path) -> None:
    figure = scatter.scatter_figure(real_table.real_text(), measure=measure, card=True)
    texts, marks = (artists_of_kind(figure, kind) for kind in ("label", "point"))
    others = ["Q4_K_M", *(["W8A16 g128"] if measure.kld else [])]
    assert sorted(text.get_text() for text in texts) == ["2.0 bpw", "6.0 bpw", *others]  # seven of EXL3 are on it
    assert len(marks) == 27
    assert smallest_gap(extents(texts)) > 1
    assert smallest_gap(extents(texts), extents(marks)) > 1
    assert {text.get_fontsize() for text in texts} == {labels.FONT_SIZES[0]}
    style.save_figure(figure, tmp_path / "card.png")
    assert struct.unpack(">II", (tmp_path / "card.png").read_bytes()[16:24]) == (1200, 675)


def crowd(figure: Figure) -> int:
    """Points that share the twentieth of the axis above the lowest one."""
    boxes = boxes_of(figure, "point")
    heights = [(box.y0 + box.y1) / 2 - min((each.y0 + each.y1) / 2 for each in boxes) for box in boxes]
    return sum(height < figure.axes[0].bbox.height / 20 for height in heights)


def test_scales_show_the_rows_that_matter_unless_told_otherwise(unplaced: None) -> None:
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
def test_an_axis_begins_at_zero_where_all_is_within_a_decade_and_a_half(kind: Measure, unplaced: None) -> None:
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


def test_a_group_has_one_colour_and_marker_whatever_rows_are_shown(unplaced: None) -> None:
    """In the table of 27 rows, and in tables of the reference and one row."""

    def looks_of(run: TextResult) -> dict[str, tuple[object, object]]:
        figure = scatter.scatter_figure(run, measure=KLD)
        drawn = sorted(points.points_of(run, BPW, KLD)[0], key=lambda p: (p.x, p.y, p.label))
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


def test_what_is_below_the_title(unplaced: None) -> None:
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


def test_the_error_of_ppl_is_that_of_the_ratio_to_the_reference() -> None:
    """PPL 8 times the error of ln(ratio), 0.002."""
    quant = with_ppl(with_against(QUANT, ln_ppl_ratio=Mean(0.1, 1.0, 10, 0, 0.002)), Perplexity(8.0, -20.8, 10, 0, 0.9))
    run = run_of(REF, quant)
    assert measures.ppl_error(run, REF) == (None, True)
    assert measures.ppl_error(run, quant) == (0.016, True)
    assert measures.ppl_error(run, with_against(quant, ln_ppl_ratio=Mean(0.1, 1.0, 10, 0))) == (None, True)


def test_a_server_is_paired_with_the_reference_by_its_blocks() -> None:
    """nll off by (0, 0, 0, 4), 0.1 a token of 40, left over (-1, -1, -1, 3): 0.115487
    (tests/eval/results/test_differences.py); times PPL 8."""
    server = with_sums(with_ppl(BASE, Perplexity(8.0, -83.2, 40, 0, 0.9)), nll=(10.0, 20.0, 30.0, 40.0))
    reference = with_sums(with_ppl(REF, Perplexity(5.0, -64.0, 40, 0, 0.8)), nll=(10.0, 20.0, 30.0, 36.0))
    error, paired = measures.ppl_error(run_of(reference, server), server)
    assert paired
    assert error == pytest.approx(8 * 0.115487, rel=1e-5)
    elsewhere = with_sums(server, tokens=(10, 10, 10, 9))
    with_holes = with_sums(server, whole=())
    for other in (elsewhere, with_holes):
        assert measures.ppl_error(run_of(reference, other), other) == (0.9, False)
    assert measures.ppl_error(run_of(server, reference=None), server) == (0.9, False)


def test_pairing_by_blocks_is_the_difference_that_a_reference_beside_it_gives() -> None:
    """The two ways to the same error, from one set of token scores."""
    from compare_q.eval.stats import estimates

    rng = np.random.default_rng(0)
    reference = -rng.exponential(3, 5000)
    scores = reference - rng.normal(0.1, 0.5, 5000)
    zeros = {"ref_logprob": reference, "ref_top1_logprob": reference, "kld": np.zeros(5000), "same_top": np.ones(5000)}
    index = np.arange(5000)
    both = estimates.summarize({"logprob": scores, **zeros}, index, index % 100 + 1)
    alone = estimates.summarize({"logprob": scores}, index, index % 100 + 1)
    ref = replace(REF, estimates=estimates.summarize({"logprob": reference}, index, index % 100 + 1))
    beside, server = replace(QUANT, estimates=both), replace(QUANT, estimates=alone)
    expected = measures.ppl_error(run_of(ref, beside), beside)[0]
    assert measures.ppl_error(run_of(ref, server), server)[0] == pytest.approx(expected)
    assert both.against is not None
    assert expected == pytest.approx(both.ppl.value * both.against.ln_ppl_ratio.stderr)


def test_points_are_what_is_known() -> None:
    sizeless = replace(QUANT, label="sizeless", storage=Storage(file_bytes=2_500_000_000))
    run = run_of(REF, QUANT, sizeless, BASE, FAILED)
    drawn, left_out = points.points_of(run, BPW, PPL)
    assert drawn == [
        Point("bf16", 4.5, 7.5, "7.500"),
        Point("W4A16", 4.5, 7.5, "7.50", error=0.015, number=1),
        Point("base", 4.5, 7.5, "7.500", error=0.0, number=3),
    ]
    assert left_out == ["sizeless: not in the plot: bits per weight unknown", "broken: not in the plot: PPL unknown"]
    drawn, left_out = points.points_of(run, VRAM, KLD)
    assert drawn == [
        Point("bf16", 1.0, 0.0, "reference: 0"),
        Point("W4A16", 1.0, 0.01234567, "0.0123", 0.000452, number=1),
    ]
    assert left_out == ["sizeless: not in the plot: VRAM unknown", "base: not in the plot: KLD unknown",
                        "broken: not in the plot: KLD unknown"]  # fmt: skip


def test_points_of_file_sizes_and_percentiles() -> None:
    """The reference's KLD is 0; 0.999 is the 99.9 % KLD of results made by hand, shown with two digits."""
    files = [replace(model, storage=Storage(file_bytes=size)) for model, size in ((REF, 10**9), (QUANT, 3 * 10**8))]
    drawn, left_out = points.points_of(run_of(*files, BASE), FILES, KLD_VALUES["p99.9"])
    assert drawn == [Point("bf16", 1.0, 0.0, "reference: 0"), Point("W4A16", 0.3, 0.999, "1.0", number=1)]
    assert left_out == ["base: not in the plot: 99.9 % KLD unknown"]
    drawn, _ = points.points_of(run_of(*files), FILES, KLD_VALUES["median"])
    assert [point.shown for point in drawn] == ["reference: 0", "0.500"]
    cache = {"kv_cache_layers": [asdict(KVCache("*", 32, "fp8", prefill="", named=True, token_bytes=2048.0))]}
    drawn, left_out = points.points_of(run_of(replace(QUANT, provenance=cache), BASE), SIZES["kv"], PPL)
    assert [(p.label, p.x) for p in drawn] == [(f"{QUANT.label}", 65.536)]
    assert left_out == ["base: not in the plot: KV cache unknown"]
    assert points.points_of(run_of(QUANT), FILES, KLD) == ([], ["W4A16: not in the plot: file size unknown"])


def test_lines_are_the_reference_and_the_noise_floor() -> None:
    floor = replace(QUANT, label="bf16 " + "noise " * 20, spec={"noise_floor": True})
    run = run_of(REF, floor)
    assert [(level.y, level.name, level.dotted) for level in points.levels_of(run, PPL)] == [
        (7.5, "reference 7.50", False)
    ]
    name = "noise floor (bf16 noise noise noi...noise noise noise) 0.012"
    assert [(level.y, level.name, level.dotted) for level in points.levels_of(run, KLD)] == [(0.01234567, name, True)]
    assert [level.y for level in points.levels_of(run, KLD_VALUES["p99.9"])] == [0.999]
    assert points.levels_of(run_of(REF, QUANT), KLD) == []
    assert points.levels_of(run_of(REF, with_against(floor, kld=Mean(0.0, 0.0, 40, 0))), KLD) == []
    assert points.levels_of(run_of(BASE, reference=None), PPL) == []


def test_limits_leave_points_and_lines_out(unplaced: None) -> None:
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


def test_the_kld_axis_names_the_reference_where_that_fits() -> None:
    axis = "KL divergence (nats, mean over tokens)"
    assert measures.kld_axis(real_table.real_text()) == f"{axis} against bf16 vLLM"
    assert measures.kld_axis(run_of(REF, QUANT, reference={"label": "x" * 60})) == axis
    assert measures.kld_axis(run_of(REF, QUANT, reference=None)) == axis
    figure = scatter.scatter_figure(run_of(REF, QUANT, reference={"label": "x" * 22}), measure=KLD)
    assert figure.axes[0].get_ylabel().endswith("x" * 22)
    figure.draw_without_rendering()
    assert is_within(figure.axes[0].yaxis.label.get_window_extent(), figure.bbox)


def test_draw_writes_the_plot_and_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures.draw(Results((run_of(REF, QUANT, FAILED),), "mine"), tmp_path / "a.png", PPL, dark=True)
    assert capsys.readouterr().out.splitlines() == [
        "broken: not in the plot: PPL unknown", f"plot: {tmp_path / 'a.png'}"
    ]  # fmt: skip
    assert (tmp_path / "a.png").is_file()
    pictures.draw(Results((run_of(REF, QUANT),)), tmp_path / "b.png", PPL, max_x=1)
    assert capsys.readouterr().out == "no plot: no model has both PPL and bits per weight within the limits\n"
    many = run_of(*(replace(QUANT, label=f"group{i}") for i in range(81)))
    pictures.draw(Results((many,)), tmp_path / "b.png", PPL)
    assert capsys.readouterr().out == "no plot: 81 groups, but only 80 can be told apart\n"
    assert not (tmp_path / "b.png").exists()
