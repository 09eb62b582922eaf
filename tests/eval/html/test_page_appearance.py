"""How the page looks, and what it does not let through, in a real browser: hostile and long texts, themes, paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.report_page import FAILED, LAYER, MODELS, REFERENCE, Opened, ShowPage, measured, needs_browser

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


CONTRASTS = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const colour = (text, below) => {  // what a colour is on top of another
    pen.fillStyle = `rgb(${below.join(" ")})`; pen.fillRect(0, 0, 1, 1);
    pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) =>
    node ? colour(getComputedStyle(node).backgroundColor, ground(node.parentElement)) : [255, 255, 255];
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (words.nextNode()) {
    const node = words.currentNode.parentElement;
    if (!words.currentNode.textContent.trim() || !node.getClientRects().length || node.closest(".swatch")) continue;
    const style = getComputedStyle(node), below = ground(node.closest("svg") ? node.closest("div") : node);
    const ink = light(colour(node.closest("svg") ? style.fill : style.color, below)), paper = light(below);
    found.push([(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), node.className.baseVal ?? node.className,
      words.currentNode.textContent.slice(0, 30)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(show: ShowPage, scheme: str) -> None:
    """4.5 to 1 (WCAG AA), also of hidden groups' buttons, coloured tokens, gains, and cells of the matrix."""
    opened = show(*MODELS, FAILED, color_scheme=scheme)
    opened.page.locator("#tokens select").select_option("2")
    for paint in ("loss − reference", "KLD"):
        opened.pick("tokens", paint)
        found = opened.page.evaluate(CONTRASTS)
        assert len(found) > 400
        assert [each for each in found if each[0] < 4.5] == []
    opened.page.locator("#table .group[data-group='W4A16']").click()
    assert [each for each in opened.page.evaluate(CONTRASTS) if each[0] < 4.5] == []


def box_of(opened: Opened, selector: str) -> Any:
    return opened.page.locator(selector).first.evaluate(
        "each => { const box = each.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; }"
    )


def test_a_phone_shows_the_numbers(show: ShowPage) -> None:
    """Size, KLD and PPL with their errors beside the model's name; nothing is wider than the window; tooltips by touch,
    beside what they are about and inside the window."""
    opened = show(*MODELS, width=390, has_touch=True)
    for key in ("label", "bpw_layer", "kld", "ppl"):
        cell = "tbody tr:nth-child(5) th" if key == "label" else f"tbody tr:nth-child(5) [data-cell='{key}']"
        left, _, right, _ = box_of(opened, f"#table {cell}")
        assert 0 <= left < right <= 390, key
    assert opened.page.locator("#table tbody tr:nth-child(5) small.error").count() == 4
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    point, token, cell = (
        "#scatter .point[data-model='{}']",
        "#tokens .token:nth-child(12)",
        ".cell[data-a='4'][data-b='2']",
    )
    for target in (point.format(4), point.format(7), token, cell):
        opened.page.locator(target).tap()
        opened.page.locator("#tip").wait_for(state="visible", timeout=10_000)
        tip, place = box_of(opened, "#tip"), box_of(opened, target)
        assert 0 <= tip[0] < tip[2] <= 390, target
        assert 0 <= tip[1] < tip[3] <= 900, target
        assert tip[0] >= place[2] or tip[2] <= place[0] or tip[1] >= place[3] or tip[3] <= place[1], target
    opened.page.locator("#position svg[tabindex]").tap()
    assert opened.heading().startswith("position ")
