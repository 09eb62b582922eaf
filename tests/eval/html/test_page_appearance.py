"""How the page looks, and what it does not let through, in a real browser: hostile and long texts, themes, paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.report_page import FAILED, LAYER, MODELS, REFERENCE, ShowPage, measured, needs_browser

pytestmark = needs_browser


def test_hostile_texts_stay_texts(show: ShowPage) -> None:
    """In labels, notes, specs and errors; the policy would stop what got through, which the page then complains of."""
    evil = "</script><img/src=x:1/onerror=alert(1)><!--<script> [h8]"
    model = replace(MODELS[4], label=evil, notes=(evil,), spec={evil: evil}, provenance={evil: evil, "layers": []})
    opened = show(REFERENCE, model, MODELS[5], replace(FAILED, label=f"{evil} 2", error=evil))
    assert opened.labels()[1] == evil
    for summary in opened.page.locator("#ran summary").all():
        summary.click()
    opened.page.locator("#ran details pre").nth(3).wait_for()
    opened.page.locator("#scatter .point").nth(1).hover()
    assert opened.heading() == evil
    assert evil in "".join(opened.texts("#ran pre"))
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("script").count() == 2


def test_dark_and_light(show: ShowPage) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 28)"
    for scheme, first, second in (("light", light, dark), ("dark", dark, light)):
        opened = show(*MODELS, color_scheme=scheme)
        assert opened.page.evaluate(background) == first
        opened.page.locator("#theme").click()
        assert opened.page.evaluate(background) == second
        opened.page.locator("#theme").click()
        assert opened.page.evaluate(background) == first


@pytest.mark.parametrize("width", [400, 1400])
def test_long_labels_scroll_no_page(show: ShowPage, width: int) -> None:
    models = [replace(model, label=f"{model.label}{'x' * 300}") for model in MODELS]
    opened = show(*models, width=width)
    for head in ("#table", ".matrix"):  # which are as wide as they like, but not for one label
        assert opened.page.locator(f"{head} tbody th").first.bounding_box()["width"] < 0.6 * width
    for view in ("KLD", "PPL"):
        opened.pick("scatter", view)
        assert opened.page.evaluate("document.documentElement.scrollWidth") == width


def test_print(show: ShowPage) -> None:
    """Light whatever the theme, and nothing wider than a page of A4 (718 pixels within its margins)."""
    layers = {"layers": [{**LAYER, "kernel": "LinearEXL3.reconstruct_hgemm"}]}
    crowd = [measured(f"NVFP4 W4A4 emulated {i}", 0.1, 4.5, seed=i, provenance=layers) for i in range(20)]
    opened = show(*MODELS, *crowd, width=1400, color_scheme="dark")
    for _ in range(3):
        opened.page.emulate_media(media="print")
        names = ("paper", "ink", "muted", "grid", "chosen", "raised", "better")
        found = opened.page.evaluate(
            "names => names.map(name => getComputedStyle(document.body).getPropertyValue('--' + name).trim())",
            list(names),
        )
        assert found == ["#ffffff", "#1b1f24", "#57606a", "#e9ebee", "#e8f1f8", "#f6f7f9", "0 114 178"]
        opened.page.emulate_media(media="screen")
        opened.page.locator("#theme").click()
    opened.page.emulate_media(media="print")
    opened.page.set_viewport_size({"width": 718, "height": 1000})
    widths = opened.page.locator("table, svg").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().right)"
    )
    assert max(widths) <= 718
