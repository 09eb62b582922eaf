"""The page's other drawings and its tokens, in a real browser: what is drawn is what Python computed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from eval.results import differences
from eval.results.run_result import ModelResult
from tests.support.report_page import MODELS, REFERENCE, N, ShowPage, measured, needs_browser, with_kld_error

pytestmark = needs_browser


def test_differences_are_pythons(show: ShowPage) -> None:
    """Value and error of every pair, and the intervals of one, to 1e-9."""
    opened = show(*MODELS)
    compared = [model for model in MODELS if not model.is_reference]
    for name, button, count in (("nll", "PPL", 8), ("kld", "KLD", 7), ("same_top", "same top", 7)):
        opened.pick("differences", button)
        found = opened.page.evaluate(
            "[...document.querySelectorAll('.cell')].map(c => [c.dataset.a, c.dataset.b, c.dataset.value,"
            " c.dataset.stderr, c.classList.contains('told')])"
        )
        assert len(found) == count**2
        for a, b, value, stderr, told in found:
            if a == b:
                continue
            one, other = (MODELS[int(i)].estimates.blocks for i in (a, b))  # type: ignore[union-attr]
            expected = differences.difference_with_interval(one, other, name)
            assert expected is not None
            assert float(value) == pytest.approx(expected.value, rel=1e-9, abs=1e-12)
            assert float(stderr) == pytest.approx(expected.stderr, rel=1e-9, abs=1e-12)
            assert told == expected.is_seen
    a, b = compared[1], compared[3]
    for name, model in (("A", a), ("B", b)):
        opened.page.locator(f"[data-key='pick-{name}']").select_option(label=model.label)
    rows = opened.page.locator("#pair tbody tr")
    for name in ("nll", "kld", "same_top"):
        assert a.estimates
        assert b.estimates
        expected = differences.difference_with_interval(a.estimates.blocks, b.estimates.blocks, name)
        row = rows.locator(f"xpath=self::*[@data-difference='{name}']")
        got = [float(row.get_attribute(f"data-{key}")) for key in ("value", "stderr", "low", "high")]
        assert expected is not None
        assert expected.limits is not None
        assert got == pytest.approx([expected.value, expected.stderr, *expected.limits], rel=1e-9)
        assert "EXL3 3.0 is better" in row.text_content()


def test_too_many_for_a_matrix(show: ShowPage) -> None:
    crowd = [measured(f"G{i % 2} {i}", None, 4.0, seed=i) for i in range(61)]
    opened = show(*crowd, inspect=False)
    assert opened.page.locator(".matrix").count() == 0
    assert "of the 61, hide groups" in "".join(opened.texts("#differences .hint"))
    assert opened.page.locator("#pair tbody tr").count() == 2
    opened.page.locator("#table .group").first.click()
    assert opened.page.locator(".matrix tbody tr").count() == 30


def smoothed(values: tuple[float | None, ...], edges: tuple[int, ...]) -> list[float]:
    """Means over five bins (fewer at the ends), weighted by their positions and by how near they are."""
    found, width = [], np.diff(edges)
    for i in range(len(values)):
        span = min(2, i, len(values) - 1 - i)
        bins = slice(i - span, i + span + 1)
        near = span + 1 - np.abs(np.arange(-span, span + 1))
        found.append(float(np.average([value or 0.0 for value in values[bins]], weights=near * width[bins])))
    return found


def test_curves_are_pythons(show: ShowPage) -> None:
    """Smoothed, each bin at the middle of its first and last position; its own number in the tooltip."""
    opened = show(*MODELS)
    model = MODELS[5]
    assert model.estimates
    edges, kld = model.estimates.curve.edges, model.estimates.curve.kld
    assert kld
    opened.page.locator("#chips .drop").nth(0).wait_for()
    if "EXL3 4.0×" not in opened.texts("#chips .chip"):
        opened.page.locator("#table tr[data-model='5'] td").first.click()
    opened.pick("position", "KLD")
    first = next(i for i, edge in enumerate(edges) if edge >= 32)
    for start, button in ((first, str(edges[first])), (0, "1")):
        opened.pick("position", button)
        to_x, to_y = opened.scale("#position", "x", log=True), opened.scale("#position", "y", log=False)
        path = opened.page.locator("#position .curve[data-model='5']").get_attribute("d")
        found = [tuple(map(float, pair.split(","))) for pair in path[1:].split("L")]
        expected = [
            (to_x(math.sqrt(a * (b - 1))), to_y(value))
            for (a, b), value in zip(
                itertools.pairwise(edges[start:]), smoothed(kld[start:], edges[start:]), strict=True
            )
        ]  # what is not drawn is in no mean
        assert np.array(found) == pytest.approx(np.array(expected), abs=0.01)
        assert f"Lines begin at position {button}" in opened.texts("#position > .hint")[0]
        box = opened.page.locator("#position svg[tabindex]").bounding_box()
        opened.page.mouse.move(box["x"] + found[20 - start][0], box["y"] + 50)
        assert opened.heading() == f"position {edges[20]} to {edges[21] - 1}"
        assert float(opened.tip()["EXL3 4.0"]) == pytest.approx(kld[20], rel=6e-4)


def test_histograms_are_pythons(show: ShowPage) -> None:
    """Steps at the shares of the tokens, the marks at median and p99."""
    opened = show(*MODELS)
    (model,) = (m for m in MODELS if m.label == "EXL3 4.0")
    assert model.estimates
    assert model.estimates.against
    found, percentiles = model.estimates.against.kld_histogram, model.estimates.against.kld_percentiles
    for drop in opened.page.locator("#chips .drop").all()[::-1]:
        drop.click()
    opened.page.locator("#table tr[data-model='5'] td").first.click()
    to_x, to_y = opened.scale("#spread", "x", log=True), opened.scale("#spread", "y", log=False)
    path = opened.page.locator("#spread .chart .fill").get_attribute("d")
    drawn = [tuple(map(float, pair.split(","))) for pair in path[1:].split("V")[0].split("L")[1:]]
    steps = [
        (to_x(10 ** (found.first + end / found.per_decade)), to_y(100 * count / N))
        for i, count in enumerate(found.counts) for end in (i, i + 1)
    ]  # fmt: skip
    (first,) = {i for i in range(0, len(steps), 2) if abs(steps[i][0] - drawn[0][0]) < 0.01}
    assert np.array(drawn) == pytest.approx(np.array(steps[first : first + len(drawn)]), abs=0.01)
    assert sum(found.counts[first // 2 : (first + len(drawn)) // 2]) > 0.99 * N
    for name, percent in (("median", "50"), ("p99", "99")):
        box = opened.page.locator(f"#spread [aria-label='EXL3 4.0 {name}']").evaluate(
            "each => { const box = each.getBBox(); return box.x + box.width / 2; }"
        )
        assert box == pytest.approx(to_x(percentiles[percent]), abs=0.05)


def test_confidence_is_pythons(show: ShowPage) -> None:
    """The table's cells, and bars that stay inside the drawing however long they are."""
    models = (REFERENCE, *MODELS[2:5], with_kld_error(MODELS[5], 3.0))
    opened = show(*models)
    rows = opened.page.locator("#confidence tbody tr")
    assert rows.count() == 4
    for i, model in enumerate(models[1:]):
        assert model.estimates
        assert model.estimates.against
        buckets = model.estimates.against.confidence
        assert opened.texts(f"#confidence tbody tr:nth-child({i + 1}) td") == [f"{b.kld.value:.5f}" for b in buckets]
    bars, to_y = opened.bars("#confidence"), opened.scale("#confidence", "y", log=True)
    drawn = sorted({model for model, *_ in bars})
    assert 4 in drawn
    least = min(b.kld.value for i in drawn for b in models[i].estimates.against.confidence) / 2  # type: ignore[union-attr]
    for i in drawn:
        buckets = models[i].estimates.against.confidence  # type: ignore[union-attr]
        ends = [(b.kld.value - b.kld.stderr, b.kld.value + b.kld.stderr) for b in buckets]
        expected = [(to_y(max(low, least)), to_y(high)) for low, high in ends]
        assert [ends for model, *ends in bars if model == i] == [pytest.approx(each, abs=0.01) for each in expected]
    height = float(opened.page.locator("#confidence .axis").get_attribute("y1"))
    assert all(12 <= high <= low <= height for _, low, high in bars)


def test_tokens(show: ShowPage) -> None:
    """Texts as they are; a hover tells the numbers; the damaged ones below."""
    opened = show(*MODELS)
    opened.page.locator("#tokens select").select_option("2")
    assert "excerpts of the text" in opened.texts("#about dd")
    tokens = opened.page.locator("#tokens .passage .token")
    assert tokens.all_text_contents()[:5] == ["▯", "Ü", "↵\n↵\n", " <b>", "</script>"]
    assert opened.texts("#tokens figcaption") == ["Window 3, positions 17 to 36: for its words"]
    tokens.nth(10).hover()
    assert opened.heading() == '" t5"'
    assert opened.tip() == {
        "logprob": "−3.00 (5.0 %)", "reference's": "−1.00 (36.8 %)", "KLD": "0.200", "above the floor": "0.199",
        "position": "27 of window 3",
    }  # fmt: skip
    tokens.nth(0).focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.heading() == '"Ü"'
    assert opened.texts("#worst tbody td") == ["4.25", "50.0 %", "1.0 %", "before↵ <i> after"]


STEPS = [*[0] * 10, *[1] * 5, *[2] * 3, 3, 5]
"""Twenty tokens of growing value: half of them have a colour, the last one lies above the upper 5 and 1 %."""


@pytest.mark.parametrize(
    ("models", "model", "paint", "steps", "said", "first"),
    [
        pytest.param(MODELS, "2", "KLD", STEPS, "above that of the noise floor (bf16 other)", 0.199, id="above it"),
        pytest.param(MODELS, "2", "loss − reference", STEPS, "above that of the noise floor", 1.99, id="loss above it"),
        pytest.param(MODELS, "2", "loss", STEPS, "a loss has no noise floor", 3.0, id="loss"),
        pytest.param(MODELS, "1", "KLD", STEPS, "it is the noise floor", 0.001, id="the floor"),
        pytest.param(
            (REFERENCE, *MODELS[2:4]), "1", "KLD", STEPS, "the run has no noise floor", 0.1, id="without a floor"
        ),
        pytest.param(
            (*MODELS[:2], measured("x", 0.1, spec={"noise_floor": True}), MODELS[3]),
            "1", "KLD", [0] * 20, "nothing here can be told from noise", None, id="within the floor",
        ),
    ],
)  # fmt: skip
def test_tokens_are_coloured_by_quantiles(
    show: ShowPage, models: tuple[ModelResult, ...], model: str, paint: str, steps: list[int], said: str,
    first: float | None,
) -> None:  # fmt: skip
    """The colour of each token, and the least value of each colour."""
    opened = show(*models)
    opened.page.locator("#tokens select").select_option(model)
    opened.pick("tokens", paint)
    tokens = opened.page.locator("#tokens .passage .token")
    assert tokens.evaluate_all("all => all.map(each => Number(each.dataset.step || 0))") == steps
    assert said in opened.texts("#tokens .hint")[0]
    legend = [float(text.removeprefix("≥ ")) for text in opened.texts("#colours .token:not(.gain)")]
    assert legend[:1] == ([] if first is None else [pytest.approx(first, rel=0.03)])
    assert legend == sorted(legend)
