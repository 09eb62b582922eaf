"""Which sections the page has, and choices that reach all of them, in a real browser."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.results.run_result import ModelResult
from eval.stats.distributions import Curve, Histogram
from tests.support.report_page import FAILED, MODELS, REFERENCE, ShowPage, measured, needs_browser

pytestmark = needs_browser


def test_hiding_a_group(show: ShowPage) -> None:
    """Its points and rows vanish everywhere, both axes rescale; it comes back."""
    opened = show(*MODELS)
    points, ticks = opened.page.locator("#scatter .point"), "#scatter svg .tick[text-anchor='end']"
    before = opened.texts(ticks)
    assert points.count() == len(MODELS)
    opened.page.locator("#scatter .group[data-group='GGUF']").click()
    assert points.count() == len(MODELS) - 2
    assert not [label for label in opened.labels() if label.startswith("GGUF")]
    assert not [label for label in opened.texts(".matrix tbody th span") if label.startswith("GGUF")]
    assert not [label for label in opened.texts(".multiples span") if label.startswith("GGUF")]
    assert opened.page.locator("#table .group[data-group='GGUF']").get_attribute("aria-pressed") == "false"
    after = opened.texts(ticks)
    assert max(map(float, before)) > max(map(float, after))
    opened.page.locator("#table .group[data-group='GGUF']").click()
    assert points.count() == len(MODELS)
    assert opened.texts(ticks) == before


def test_selection_reaches_all_sections(show: ShowPage) -> None:
    opened = show(*MODELS)
    for drop in opened.page.locator("#chips .drop").all()[::-1]:
        drop.click()
    curves = opened.page.locator("#position .curve")
    assert curves.count() == 0
    opened.page.locator("#table tr[data-model='5'] td").first.click()
    opened.page.locator("#table tr[data-model='6'] input").focus()
    opened.page.keyboard.press("Space")
    assert opened.texts("#chips .chip") == ["EXL3 4.0×", "GGUF Q4_K×"]
    assert curves.evaluate_all("nodes => nodes.map(node => node.dataset.model)") == ["5", "6"]
    assert opened.page.locator("#spread .chart .fill").count() == 2
    assert opened.texts("#confidence .legend li") == ["EXL3 4.0", "GGUF Q4_K"]
    opened.page.locator("#table tr[data-model='4'] td").first.click()
    dashes = [
        opened.page.locator(f"#confidence {each}").evaluate_all(
            "all => all.map(each => getComputedStyle(each).strokeDasharray)"
        )
        for each in (".curve", ".legend line")
    ]
    assert dashes == [["none", "7px, 3px", "2px, 3px"]] * 2
    opened.page.locator("#table tr[data-model='4'] td").first.click()
    assert opened.page.locator("#tokens select").input_value() == "6"
    assert opened.page.locator("#scatter .ring").count() == 2
    opened.page.locator("#spread .small", has_text="GGUF Q2_K").click()
    assert curves.count() == 3
    opened.page.locator("#position svg[tabindex]").focus()
    # Focus scrolls the page, and the scroll, which comes with a later frame, hides the tooltip.
    opened.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    for position in ("44 to 52", "53 to 64"):
        opened.page.keyboard.press("ArrowRight")
        assert opened.heading() == f"position {position}"
        assert opened.texts("#tip dt") == ["EXL3 4.0", "GGUF Q4_K", "GGUF Q2_K"]


SECTIONS = {"table", "scatter", "spread", "position", "differences", "confidence", "tokens", "ran"}
ALONE = measured("one", None)


@pytest.mark.parametrize(
    ("models", "absent"),
    [
        pytest.param((ALONE, measured("two", None, seed=1)), {"spread", "confidence"}, id="no reference"),
        pytest.param((ALONE,), {"spread", "confidence", "differences"}, id="one model"),
        pytest.param((REFERENCE,), {"spread", "confidence", "differences"}, id="the reference alone"),
        pytest.param((REFERENCE, FAILED), {"spread", "confidence", "differences"}, id="the others failed"),
        pytest.param(
            (replace(FAILED, is_reference=True), ALONE),
            {"spread", "confidence", "differences"},
            id="the reference failed",
        ),
        pytest.param(
            (measured("one", None, None), measured("two", None, None)), {"spread", "confidence"}, id="no sizes"
        ),
        pytest.param(MODELS[1:], set(), id="the reference has no row"),
        pytest.param(MODELS, set(), id="all"),
    ],
)
def test_sections_that_have_nothing_to_show_are_absent(
    show: ShowPage, models: tuple[ModelResult, ...], absent: set[str]
) -> None:
    opened = show(*models)
    shown = opened.page.locator("main > section").evaluate_all("all => all.filter(s => s.offsetHeight).map(s => s.id)")
    assert set(shown) == SECTIONS - absent
    assert opened.page.locator("#links a").count() == len(shown)
    for button in opened.page.locator(".choice label").all():
        button.click()
    for group in opened.page.locator("#table .group").all():
        group.click()
    assert opened.labels() == []
    assert show(*models, inspect=False).page.locator("#tokens").is_hidden()


def bare(model: ModelResult) -> ModelResult:
    """A model of an old results.json: without errors and distributions."""
    found = model.estimates
    assert found
    against = found.against and replace(
        found.against, kld=replace(found.against.kld, stderr=None), kld_percentiles={},
        kld_histogram=Histogram(-8, 8, (), 0, 0), confidence=(),
        ln_ppl_ratio=replace(found.against.ln_ppl_ratio, stderr=None),
        ppl_ratio=replace(found.against.ppl_ratio, stderr=None),
    )  # fmt: skip
    none = replace(found.blocks, tokens=(), nll=(), kld=None, same_top=None, whole=())
    ppl = replace(found.ppl, stderr=None)
    return replace(model, estimates=replace(found, ppl=ppl, against=against, blocks=none, curve=Curve((), (), None)))


def test_results_without_distributions(show: ShowPage) -> None:
    """No empty section, no word of bars that are not there; KLD can be drawn all the same."""
    opened = show(*map(bare, MODELS), inspect=False)
    shown = opened.page.locator("main > section").evaluate_all("all => all.filter(s => s.offsetHeight).map(s => s.id)")
    assert shown == ["table", "scatter", "ran"]
    assert opened.texts("#links a") == ["Table", "Quality over size", "What ran"]
    assert opened.page.locator("th[data-column='p99']").count() == 0
    assert opened.page.locator("th[data-column='kld']").count() == 1
    for view in ("PPL", "PPL ratio", "KLD"):
        opened.pick("scatter", view)
        assert opened.page.locator("#scatter .point").count() == len(MODELS)
        assert "rror bar" not in "".join(opened.texts("#scatter .hint"))
    assert "blocks" not in opened.texts("#meaning")[0]


def test_the_keyboard_keeps_its_place(show: ShowPage) -> None:
    """After a radio button, an unselected model, and a pair."""
    opened = show(*MODELS)
    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.value"
    opened.page.locator("#scatter input[value='kld']").focus()
    for expected in ("ppl", "ratio"):
        opened.page.keyboard.press("ArrowRight")
        assert opened.page.evaluate(focused) == expected
    chips = [text.removesuffix("×") for text in opened.texts("#chips .chip")]
    assert len(chips) > 2
    opened.page.locator("#chips .drop").first.focus()
    for label in chips[1:]:
        opened.page.keyboard.press("Enter")
        assert opened.page.evaluate(focused) == f"unselect {label}"
    cell = opened.page.locator(".cell[data-a='4'][data-b='2']")
    assert cell.get_attribute("role") == "button"
    assert cell.get_attribute("aria-label") == "EXL3 3.0 against W4A16 g128: EXL3 3.0 is better"
    cell.focus()
    opened.page.keyboard.press("Space")
    picked = [opened.page.locator(f"[data-key='pick-{name}']").input_value() for name in "AB"]
    assert picked == ["4", "2"]
    assert opened.page.evaluate("document.activeElement.dataset.key") == "pair-4-2"
