"""The page's scatter plot in a real browser: places, scales, error bars, labels and tooltips."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from eval.plots import figures, front, measures
from eval.results import digits
from tests.support.report_page import (
    FAILED,
    MODELS,
    REFERENCE,
    SIZELESS,
    ShowPage,
    measured,
    needs_browser,
    run_of,
    with_kld_error,
)

pytestmark = needs_browser


def test_hover_and_focus_tell_everything(show: ShowPage) -> None:
    opened = show(*MODELS)
    model = MODELS[3]
    assert model.estimates
    assert model.estimates.against
    point = opened.page.locator("#scatter .point[aria-label^='W4A16 g32']")
    for reach in (point.hover, point.focus):
        opened.page.mouse.move(0, 0)
        assert opened.page.locator("#tip").is_hidden()
        reach()
        assert opened.heading() == "W4A16 g32 †"
        found, spread = opened.tip(), model.estimates.against.kld_percentiles
        assert found["engine"] == "fake"
        assert found["kernel"] == "Marlin"
        ppl, kld = model.estimates.ppl, model.estimates.against.kld
        assert [found[name] for name in ("layer bpw", "VRAM GiB")] == ["4.50", "2.12"]
        assert found["PPL"] == f"{ppl.value:.4f} ± {digits.error_text(ppl.stderr)}"
        assert found["KLD"].startswith(f"{kld.value:.5f} ± {digits.error_text(kld.stderr)} (median ")
        shown = re.findall(r"(?:median|p99|max) ([\d.]+)", found["KLD"])
        assert [float(each) for each in shown] == pytest.approx([spread["50"], spread["99"], spread["max"]], rel=0.06)
        assert "fp8" in found["†"]
        opened.page.keyboard.press("Escape")
    opened.page.locator("#scatter .point[aria-label^='W4A16 g128']").hover()
    assert "a note" in opened.texts("#tip .wide")


def test_scales(show: ShowPage) -> None:
    """Distances between points are those of the logarithms, or of the values; errors are as long as they should be."""
    opened = show(*MODELS, width=1000)
    kld = {m.label: m.kld.value for m in MODELS if m.kld and m.kld.value}
    names = ("W4A16 g128", "EXL3 4.0", "bf16 other")

    def ratio(of: Callable[[float], float]) -> float:
        a, b, c = (of(kld[name]) for name in names)
        return (a - b) / (b - c)

    def drawn() -> float:
        a, b, c = (opened.centre(name)[1] for name in names)
        return (a - b) / (b - c)

    assert drawn() == pytest.approx(ratio(math.log), rel=1e-6)
    floors = opened.page.locator("#scatter .level.floor")
    assert floors.count() == 1
    opened.pick("scatter", "PPL")
    assert floors.count() == 0  # it is the floor of KLD
    opened.pick("scatter", "KLD")
    opened.page.locator("#scatter .choice:has(legend:text-is('y scale'))").get_by_text("linear").click()
    assert drawn() == pytest.approx(ratio(float), rel=1e-6)
    outlier = opened.page.locator("#scatter .point[aria-label^='GGUF Q2_K']")
    assert outlier.get_attribute("data-off") == "1"
    assert opened.centre("GGUF Q2_K")[1] < min(opened.centre(name)[1] for name in names)


def test_size_axis(show: ShowPage) -> None:
    """A model without a size is named, not drawn; x is bits or GiB, (bits + 4) / 4 here, linear or log."""
    opened = show(*MODELS, SIZELESS, FAILED)
    assert opened.page.locator("#scatter .point").count() == len(MODELS)
    assert "not known: server." in "".join(opened.texts("#scatter .chart .hint"))
    small = [m.label for m in MODELS if (m.storage.bpw_layer or 16) < 16]
    before = [opened.centre(label)[0] for label in small]
    steps = [(b - a) / (before[1] - before[0]) for a, b in itertools.pairwise(before)]
    opened.pick("scatter", "VRAM")
    after = [opened.centre(label)[0] for label in small]
    assert [(b - a) / (after[1] - after[0]) for a, b in itertools.pairwise(after)] == pytest.approx(steps, abs=1e-6)
    opened.page.locator("#scatter .choice:has(legend:text-is('x scale'))").get_by_text("log").click()
    low, middle, high = (opened.centre(name)[0] for name in ("GGUF Q2_K", "EXL3 4.0", "GGUF Q4_K"))
    expected = math.log(8 / 6.5) / math.log(8.5 / 8)
    assert (middle - low) / (high - middle) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("view", "hidden"), [("KLD", ""), ("PPL", ""), ("KLD", "EXL3"), ("KLD", "bf16")])
def test_front_schemes_and_edge_are_the_pngs(show: ShowPage, view: str, hidden: str) -> None:
    """Which points lines join, which labels are bold and what words say of them, and where unquantized rows stand."""
    more = (measured("EXL3 3.5", 0.1, 3.5, seed=9), measured("EXL3 5.0", 0.02, 5.0, seed=10))
    run = run_of(*MODELS, *more, measured("GGUF Q8_0", 0.01, 8.5, seed=11))
    opened = show(run=run)
    opened.pick("scatter", view)
    if hidden:
        opened.page.locator(f"#scatter .group[data-group='{hidden}']").click()
    points = [
        p
        for p in figures.scatter_points(run, measures.BPW, measures.KLD if view == "KLD" else measures.PPL)[0]
        if p.split[0] != hidden
    ]
    best = front.pareto_front(points)
    caption = "".join(opened.texts("#scatter .chart .hint"))
    assert f"Bold: no other row shown is smaller and better: {front.in_words(best, points)}. " in caption
    bold = opened.page.locator("#scatter .label").evaluate_all(
        "all => all.filter(each => getComputedStyle(each).fontWeight === '700').map(each => Number(each.dataset.label))"
    )
    assert {run.models[i].marked_label for i in bold} == {p.label for p in best}
    paths = [path.count(",") for path in opened.page.locator("#scatter .series").evaluate_all(
        "all => all.map(each => each.getAttribute('d'))")]  # fmt: skip
    drawn = [p for p in points if view == "KLD" or p.label != "GGUF Q2_K"]  # whose PPL is off the scale
    assert sorted(paths) == sorted(len(members) for members in front.series(drawn))
    moved, edge = front.at_edge(points)
    places = {p.label: p.x for p in moved}
    a, b = (opened.centre(label)[0] for label in ("W4A16 g128", "GGUF Q8_0"))
    unit = (b - a) / (8.5 - 4.125)
    expected = {label: pytest.approx(a + unit * (x - 4.125), abs=0.01) for label, x in places.items()}
    assert {label: opened.centre(label)[0] for label in places} == expected
    assert opened.page.locator("#scatter .edge").count() == (edge is not None)
    assert ("16" in opened.texts("#scatter .tick[text-anchor='middle']")) == (hidden != "bf16")


KINDS = "#scatter :is(.label, .level-name)", "#scatter .point .mark", "#scatter svg .tick", "#scatter svg .name"


@pytest.mark.parametrize("width", [400, 1400])
def test_no_label_covers_anything(show: ShowPage, width: int) -> None:
    """Labels touch no point and no other label, ticks no axis's name, in any view; the page fits the window."""
    crowd = [measured(f"G{i % 7} number {i}", 0.01 * 1.5 ** (i % 13), 3 + (i * 7 % 11) / 4, seed=i) for i in range(30)]
    opened = show(*MODELS, *crowd, width=width)
    boxes = """kind => [...document.querySelectorAll(kind)].map(node => {
        const box = node.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; })"""
    for view in ("KLD", "PPL", "PPL ratio"):
        opened.pick("scatter", view)
        labels, points, ticks, names = (opened.page.evaluate(boxes, kind) for kind in KINDS)
        assert len(labels) > 8
        # Letters reach less far than the box of a line of text: 1 pixel of it may.
        touching = [
            (a, b)
            for kinds in ((labels, labels), (labels, points), (ticks, names)) for a, b in itertools.product(*kinds)
            if a is not b and min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 2
        ]  # fmt: skip
        assert touching == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("view", ["PPL", "PPL ratio", "KLD"])
def test_error_bars_are_the_pngs(show: ShowPage, view: str) -> None:
    """As long as Python's errors to 1e-6, on both scales; unpaired ones are named."""
    server = measured("server", 0.3, 5.0, seed=8)
    assert server.estimates
    text = replace(server.estimates, against=None)  # but on the same blocks
    server = replace(server, estimates=text)
    other = replace(server, label="other text", estimates=replace(text, blocks=replace(text.blocks, whole=())))
    run = run_of(*MODELS[:-1], server, other)
    opened = show(*run.models)
    opened.pick("scatter", view)
    expected = {}
    for i, model in enumerate(run.models):
        error, ppl = measures.ppl_error(run, model)[0], model.ppl.value if model.ppl else None
        assert ppl
        if view == "KLD":
            value, error = (model.kld.value, model.kld.stderr) if model.kld else (0.0, None)
        elif view == "PPL":
            value = ppl
        elif model is other:
            continue
        else:
            against = model.estimates.against if model.estimates else None
            base = against.ref_ppl.value if against else REFERENCE.ppl.value  # type: ignore[union-attr]
            value, error = ppl / base, error and error / base  # type: ignore[operator]
        if error:
            expected[i] = value, error
    assert len(expected) == {"PPL": 8, "PPL ratio": 7, "KLD": 6}[view]
    for scale in ("linear", "log"):
        opened.page.locator("#scatter .choice:has(legend:text-is('y scale'))").get_by_text(scale).click()
        to_y = opened.scale("#scatter", "y", log=scale == "log")
        found = {model: (low, high) for model, low, high in opened.bars("#scatter")}
        assert {
            model: pytest.approx((to_y(v - e), to_y(v + e)), abs=0.01) for model, (v, e) in expected.items()
        } == found
    caption = "".join(opened.texts("#scatter .chart .hint"))
    assert {"PPL": "the ratio to the reference's (other text: of the perplexity).", "KLD": "of the mean.",
            "PPL ratio": "the ratio to the reference's."}[view] in caption  # fmt: skip


def test_within_a_decade_and_a_half_the_axis_begins_at_zero_and_labels_are_whole(show: ShowPage) -> None:
    """As in the PNG: each point is as high above the reference's as its KLD says, and has its group's word."""
    models = (REFERENCE, MODELS[2], MODELS[5])
    opened = show(*models)
    zero, *heights = (opened.centre(model.label)[1] for model in models)
    one, other = (model.kld.value for model in models[1:] if model.kld and model.kld.value)
    assert 1 / 31.6 < one / other < 31.6
    assert (heights[0] - zero) / (heights[1] - zero) == pytest.approx(one / other, rel=1e-6)
    assert set(opened.texts("#scatter .label")) == {model.marked_label for model in models}


def test_the_foot_of_a_logarithm(show: ShowPage) -> None:
    """A bar that would reach 0 ends at half the lowest value; 0 has a tick below all; alone, it has a linear axis."""
    models = (REFERENCE, with_kld_error(MODELS[2], 2.0), MODELS[5])
    opened = show(*models)
    opened.page.locator("#scatter .choice:has(legend:text-is('y scale'))").get_by_text("log").click()
    to_y = opened.scale("#scatter", "y", log=True)
    low = MODELS[5].kld.value / 2 if MODELS[5].kld and MODELS[5].kld.value else 0.0
    value = MODELS[2].kld.value if MODELS[2].kld and MODELS[2].kld.value else 0.0
    found = {model: ends for model, *ends in opened.bars("#scatter")}
    assert found[1] == pytest.approx([to_y(low), to_y(3 * value)], abs=0.01)
    ticks = opened.page.locator("#scatter .tick[text-anchor='end']")
    at = dict(ticks.evaluate_all("all => all.map(each => [each.textContent, each.getAttribute('y') - 4])"))
    assert opened.centre("bf16 base")[1] == pytest.approx(at["0"])
    assert all(y < to_y(low) < at["0"] for text, y in at.items() if text != "0")
    assert "Hollow, at 0" in "".join(opened.texts("#scatter .hint"))
    for group in ("W4A16", "EXL3"):
        opened.page.locator(f"#scatter .group[data-group='{group}']").click()
    assert opened.page.locator("#scatter .point").get_attribute("data-off") is None
    assert "Hollow" not in "".join(opened.texts("#scatter .hint"))
