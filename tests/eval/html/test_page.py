"""The page of one text in a real browser: table, drawings, selection, differences, tokens, copies, looks."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import image

from compare_q.eval.html import sections
from compare_q.eval.plots.measures import BPW, KLD
from compare_q.eval.plots.points import points_of
from compare_q.eval.results import differences, flat
from compare_q.eval.results.run_result import ModelResult
from compare_q.eval.stats.distributions import Curve, Histogram
from compare_q.eval.table import columns, markdown
from compare_q.eval.table.verdict import verdict
from tests.support.report_page import (
    FAILED,
    LAYER,
    MODELS,
    REFERENCE,
    SIZELESS,
    Opened,
    ShowPage,
    measured,
    needs_browser,
    results_of,
    text_of,
)

pytestmark = needs_browser
SECTIONS = {"table", "scatter", "spread", "position", "differences", "confidence", "tokens", "ran"}
ALONE = measured("one", None)


def test_the_table_is_the_terminals(show: ShowPage) -> None:
    """Every number, error and star; a row a model, failed ones too."""
    text = text_of(*MODELS, SIZELESS, FAILED)
    opened = show(*text.models)
    shown = {each.column.name: each for each in columns.table_columns(text)}
    assert opened.page.locator("#table th[data-column]").evaluate_all("all => all.map(th => th.dataset.column)") == [
        *shown
    ]
    numbers = {name: each.cells for name, each in shown.items() if each.column.digits is not None}
    assert {
        "bpw_layer",
        "vram_gib",
        "ppl",
        "ratio",
        "kld",
        "kld_p99.9",
        "same_top",
        "speed",
        "bpw_head",
    } == numbers.keys()
    for key, cells in numbers.items():
        assert opened.cells(key) == [cell.value for cell in cells], key
    for key in (key for key in numbers if shown[key].column.error):
        errors = opened.texts(f"#table td[data-column='{key}'] .error")
        assert [error.removeprefix("± ") for error in errors] == [cell.error for cell in numbers[key]], key
    assert opened.labels() == [columns.label_of(model) for model in text.models]
    starred = opened.texts("#table tr:has([data-column='kld'] .best) .label span")
    assert starred
    assert set(starred) == differences.best_labels(text.models, "kld")


def test_sorting(show: ShowPage) -> None:
    """A click sorts, a second one reverses; what is not known stays last; the keyboard does the same."""
    opened = show(*MODELS, SIZELESS, FAILED)
    header = opened.page.locator("#table th[data-column='bpw_layer']")
    known = sorted(m.storage.bpw_layer for m in MODELS if m.storage.bpw_layer)
    expected = [f"{bpw:.2f}" for bpw in known]
    header.locator("button").click()
    assert opened.cells("bpw_layer") == [*expected, "n/a", ""]
    assert header.get_attribute("aria-sort") == "ascending"
    header.locator("button").click()
    assert opened.cells("bpw_layer") == [*expected[::-1], "n/a", ""]
    assert header.get_attribute("aria-sort") == "descending"
    opened.page.locator("#table th[data-column='label'] button").focus()
    opened.page.keyboard.press("Enter")
    names = opened.labels()
    assert names[:2] == ["bf16 base", "bf16 other ≈"]
    assert names.index("EXL3 3.0") < names.index("EXL3 4.0") < names.index("GGUF Q2_K")
    assert header.get_attribute("aria-sort") == "none"
    opened.page.locator("#table th[data-column='kld'] button").click()
    klds = sorted(m.kld.value for m in (*MODELS, SIZELESS) if m.kld and m.kld.value)
    assert opened.cells("kld") == ["ref", *(f"{kld:.5f}" for kld in klds), ""]


def test_drawings_tell_and_select(show: ShowPage) -> None:
    """Each mark names its model, tells its numbers to pointer and keyboard, and selects it; another measure, too."""
    opened = show(*MODELS, SIZELESS)
    text = text_of(*MODELS, SIZELESS)
    points, left_out = points_of([text], BPW, KLD)
    marks = opened.page.locator("#scatter figure:visible .point")
    numbers = marks.evaluate_all("all => all.map(mark => Number(mark.dataset.model))")
    assert sorted(numbers) == [point.number for point in points] == list(range(len(MODELS)))
    assert opened.texts("#scatter figure:visible .hint") == left_out
    mark = opened.page.locator("#scatter figure:visible .point[data-model='5']")
    assert mark.get_attribute("aria-label") == f"EXL3 4.0: bits per weight 4.00, KLD {points[5].shown}"
    mark.hover()
    assert opened.heading() == "EXL3 4.0"
    tip = opened.tip()
    assert (tip["kernel"], tip["layer bpw"]) == ("Marlin", "4.00")
    assert tip["KLD"].startswith(f"{MODELS[5].kld.value:.5f} ± ")
    assert opened.page.locator("#table tr.hover").get_attribute("data-model") == "5"
    opened.page.mouse.move(0, 0)
    opened.page.locator("#scatter figure:visible .point[data-model='6']").focus()
    opened.page.keyboard.press("Enter")
    assert opened.texts("#chips .chip") == ["GGUF Q4_K ×"]
    assert opened.page.locator("#table tr.chosen input:checked").count() == 1
    opened.pick("scatter", "PPL")
    marks = opened.page.locator("#scatter figure:visible .point")
    marks.first.wait_for()
    assert marks.count() == len(MODELS)
    fading = marks.evaluate_all("all => all.filter(mark => getComputedStyle(mark).opacity === '1').length")
    assert fading == 1
    opened.page.locator("#spread figure:visible .label[data-model='4'], #spread figure:visible .mean").first.click()
    assert opened.page.locator("#chips .chip").count() == 2
    for drawing in ("#spread .mean.chosen", "#position .line.chosen", "#confidence tr.chosen"):
        assert opened.page.locator(drawing).count() >= 1, drawing


def test_five_of_many_rows_are_selected_at_first(show: ShowPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, the noise floor, and from the smallest to the best of the front; the reader chooses others."""
    monkeypatch.setattr(sections, "FEW", 8)
    assert sections.preselected(text_of(*MODELS)) == []
    more = (*MODELS, replace(MODELS[7], label="GGUF Q2_K again"))
    assert sections.preselected(text_of(*more)) == [0, 1, 7, 4, 6]  # of five on the front, of 2.5 to 4.5 bits
    opened = show(*more, inspect=None)
    chips = ["bf16 base ×", "bf16 other ≈ ×", "GGUF Q2_K ×", "EXL3 3.0 ×", "GGUF Q4_K ×"]
    assert opened.texts("#chips .chip") == chips
    assert opened.page.locator("#table tr.chosen").count() == 5
    assert opened.texts("#scatter > .hint")[0].startswith("5 of 9 rows are selected, the others are pale.")
    opened.page.get_by_role("button", name="Unselect all").click()
    assert opened.page.locator("#chips button").count() == 0
    assert opened.page.locator("#table tr.chosen").count() == 0


def test_verdict_and_picture_come_before_the_table(show: ShowPage) -> None:
    """And the footnotes are folded below."""
    opened = show(*MODELS)
    assert opened.texts("article .verdict") == [verdict(results_of(*MODELS))]
    places = [box_of(opened, each)[1] for each in ("article .verdict", "#scatter", "#table", "#table details")]
    assert places == sorted(places)
    note = opened.page.locator("#table .notes li").first
    assert not note.is_visible()
    opened.page.locator("#table summary").click()
    assert note.is_visible()


def test_what_is_cut_at_800_pixels_says_so(show: ShowPage) -> None:
    """Until it is scrolled to its end; a wide window cuts nothing."""
    hint = "getComputedStyle(document.querySelector('#table .scroll'), '::before').content"
    opened = show(*MODELS, width=800)
    table = opened.page.locator("#table .scroll")
    assert "cut" in table.get_attribute("class")
    assert "scroll sideways" in opened.page.evaluate(hint)
    table.evaluate("each => { each.scrollLeft = each.scrollWidth; }")
    opened.page.locator("#table .scroll:not(.cut)").wait_for()
    wide = show(*MODELS)
    assert wide.page.locator("#table .scroll").get_attribute("class") == "scroll"
    assert wide.page.evaluate(hint) == "none"


def test_hiding_a_group(show: ShowPage) -> None:
    """Its marks, rows and pairs vanish everywhere, and come back."""
    opened = show(*MODELS)
    visible = "#scatter figure:visible .point:visible"
    opened.page.locator("#table .group[data-group='GGUF']").click()
    assert opened.page.locator(visible).count() == len(MODELS) - 2
    for names in (opened.labels(), opened.texts(".matrix tbody th span"), opened.labels("#confidence")):
        assert names
        assert not [name for name in names if name.startswith("GGUF")]
    button = opened.page.locator("#table .group[data-group='GGUF']")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert opened.page.locator(visible).count() == len(MODELS)


def test_differences(show: ShowPage) -> None:
    """Of the two rows that were selected last, as Python has them; a cell of the matrix picks its pair."""
    opened = show(*MODELS)
    text = text_of(*MODELS)
    for model in (6, 2):
        opened.page.locator(f"#table tr[data-model='{model}'] input").check()
    assert [opened.page.locator(f"[data-key='pick-{name}']").input_value() for name in "AB"] == ["2", "6"]
    for score in differences.SCORES:
        value, interval, *_ = sections.pairs_of(text, score)["of"]["2-6"]
        assert opened.texts(f"#differences tr[data-difference='{score}'] .number") == [value, interval]
    assert opened.texts("#differences tr[data-difference='kld'] td")[-1] == "GGUF Q4_K is better"
    opened.pick("differences", "KLD")
    cell = opened.page.locator(".cell[data-a='4'][data-b='2']")
    assert cell.get_attribute("aria-label") == "EXL3 3.0 against W4A16 g128: EXL3 3.0 is better"
    assert cell.inner_text() == "+"
    assert opened.page.locator(".cell[data-a='2'][data-b='4']").inner_text() == "−"
    cell.focus()
    opened.page.keyboard.press("Space")
    assert [opened.page.locator(f"[data-key='pick-{name}']").input_value() for name in "AB"] == ["2", "4"]
    assert opened.page.evaluate("document.activeElement.dataset.key") == "pair-4-2"


def test_tokens(show: ShowPage) -> None:
    """Texts as they are, coloured by Python's steps; a hover tells the numbers; the damaged ones below."""
    opened = show(*MODELS)
    opened.page.locator("#tokens select").select_option("2")
    shown = opened.page.locator("#tokens .token[role='listitem']")
    assert opened.texts("#tokens figcaption") == [
        "Tokens 1023 to 1042 of the text, 17 to 36 of window 3 in scoring order: for its words"
    ]
    assert opened.texts("#tokens .passage .token")[:5] == ["▯", "Ü", "↵\n↵", "<b>", "</script>"]
    steps = shown.evaluate_all("all => all.map(each => Number(each.dataset.step || 0))")
    assert steps == [0] * 10 + [1] * 5 + [2] * 3 + [3] + [5]  # of 20 tokens: one half, a quarter, a tenth, ...
    shown.nth(7).hover()
    assert opened.heading() == '" t2"'
    assert opened.tip() == {
        "logprob": "−2.1 (12.2 %)", "reference's": "−0.7 (49.7 %)", "KLD": "0.14",
        "token": "1030 of the text, 24 of window 3 in scoring order",
    }  # fmt: skip
    assert opened.texts("#tokens .worst tbody td") == ["4.25", "50 %", "1 %", "before↵ <i> after"]
    opened.page.locator("#table tr[data-model='5'] input").check()
    assert opened.page.locator("#tokens select").input_value() == "5"
    opened.page.locator("#tokens select").select_option("0")
    assert opened.texts("#tokens .choice label") == ["loss"]


def test_what_ran(show: ShowPage) -> None:
    opened = show(*MODELS, FAILED)
    details = opened.page.locator("#ran details[data-model='3']")
    details.locator("summary").click()
    details.locator("pre").wait_for()  # a details element tells of its opening a moment later
    for expected in ("Marlin", "0.26.0", "fp8", "float16"):
        assert expected in details.text_content()
    assert opened.texts("#ran .command") == ["python eval/compare_q.py -d '<d>'"]
    failed = opened.page.locator(f"#ran details[data-model='{len(MODELS)}']")
    failed.locator("summary").click()
    failed.locator("pre").wait_for()
    assert "told to fail" in failed.text_content()


def test_sections_that_have_nothing_to_show_are_absent(
    show: ShowPage, models: tuple[ModelResult, ...], absent: set[str]
) -> None:
    opened = show(*models)
    shown = opened.page.locator("article section").evaluate_all("all => all.filter(s => s.offsetHeight).map(s => s.id)")
    assert set(shown) == SECTIONS - absent
    assert opened.page.locator("#links a").count() == len(shown)
    for button in opened.page.locator(".choice label").all():
        button.click()
    for group in opened.page.locator("#table .group").all():
        group.click()
    assert opened.labels() == []
    assert show(*models, inspect=False).page.locator("#tokens").count() == 0


def bare(model: ModelResult) -> ModelResult:
    """A model without errors and distributions, as a text of one block has it."""
    found = model.estimates
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
    """No empty section, no word of bars that are not there; KLD is drawn all the same."""
    opened = show(*map(bare, MODELS), inspect=False)
    assert opened.texts("#links a") == ["Scatter", "Table", "What ran"]
    assert opened.page.locator("#scatter figure:visible .point").count() == len(MODELS)
    assert "rror bar" not in "".join(opened.texts("#scatter text"))


def test_the_table_as_markdown_and_csv(show: ShowPage) -> None:
    """All of it, as the command line writes it; then the rows that are shown, in their order."""
    odd = replace(MODELS[2], label='W4A16 "a", b', notes=("one", "two"))
    results = results_of(*MODELS[:2], odd, *MODELS[3:], FAILED)
    opened, expected = show(results=results), markdown.markdown_text(results).split("\n")
    assert opened.copied("#table [data-copy='markdown']").split("\n") == expected
    opened.load()
    rows = list(csv.reader(io.StringIO(opened.copied("#table [data-copy='csv']"))))
    assert rows == list(csv.reader(io.StringIO(flat.csv_text(results))))
    opened.load()
    opened.page.locator("#table .group[data-group='EXL3']").click()
    opened.page.locator("#table th[data-column='label'] button").click()
    found = opened.copied("#table [data-copy='markdown']").split("\n")
    assert (found[:4], found[-1]) == (expected[:4], expected[-1])
    lines = [line for line in found if line in expected[4 : 4 + len(results.labels)]]
    assert [line.split(" | ")[0].removeprefix("| ").replace("\\", "") for line in lines] == opened.labels()
    assert len(lines) == len(results.labels) - 2


def test_copying_without_a_clipboard(show: ShowPage) -> None:
    opened = show(*MODELS)
    opened.page.evaluate("""() => {
        Object.defineProperty(navigator, "clipboard", { value: undefined });
        document.addEventListener("copy", () => { window.copied = document.activeElement.value; });
    }""")
    opened.page.locator("#ran .act").click()
    opened.page.wait_for_function("() => window.copied")
    assert opened.page.evaluate("window.copied") == "python eval/compare_q.py -d '<d>'"
    assert opened.page.locator("textarea").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_saved_drawings_stand_alone(show: ShowPage, tmp_path: Path, scheme: str) -> None:
    """As SVG: no variable or style, with letters and colours; as PNG: the same colours, three times as large."""
    opened = show(*MODELS, color_scheme=scheme)
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    files = {}
    for kind in ("svg", "png"):
        with opened.page.expect_download() as download:
            opened.page.locator(f"#scatter [data-save='{kind}']").click()
        assert download.value.suggested_filename == f"scatter_mean_bpw.{kind}"
        files[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[kind])
    opened.requests[:] = [url for url in opened.requests if not url.startswith("blob:")]
    text = files["svg"].read_text()
    assert re.findall(r"var\(|light-dark|style=", text) == []
    words = "".join(ElementTree.fromstring(text).itertext())
    assert all(name in words for name in ("wikitext2, 4 × 1000 tokens", "EXL3 4.0", "GGUF"))
    pixels = 255 * image.imread(files["png"])[..., :3]
    assert pixels.shape[1] == 3 * 756
    assert np.allclose(pixels[2, 2], ground, atol=1)
    assert (np.abs(pixels - (0xCC, 0x79, 0xA7)).max(axis=2) < 2).sum() > 200  # the markers of EXL3


def test_hostile_texts_stay_texts(show: ShowPage) -> None:
    """In labels, notes, specs and errors; the policy would stop what got through, which the page then complains of."""
    evil = "</script><img/src=x:1/onerror=alert(1)><!--<script> [h8]"
    model = replace(MODELS[4], label=evil, notes=(evil,), spec={evil: evil}, provenance={evil: evil, "layers": []})
    opened = show(REFERENCE, model, MODELS[5], replace(FAILED, label=f"{evil} 2", error=evil))
    assert opened.labels()[1] == evil
    for summary in opened.page.locator("#ran summary").all():
        summary.click()
    opened.page.locator("#ran details pre").nth(3).wait_for()
    opened.page.locator("#scatter .point[data-model='1']").hover()
    assert opened.heading() == evil
    assert evil in "".join(opened.texts("#ran pre"))
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("script").count() == 2


def test_dark_and_light(show: ShowPage) -> None:
    """Of page and drawings, by the system and by the button."""
    colours = """() => [getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector("#scatter figure:not([hidden]) svg path")).fill]"""
    light, dark = ["rgb(255, 255, 255)"] * 2, ["rgb(20, 23, 28)"] * 2
    for scheme, first, second in (("light", light, dark), ("dark", dark, light)):
        opened = show(*MODELS, color_scheme=scheme)
        for expected in (first, second, first):
            assert opened.page.evaluate(colours) == expected
            opened.page.locator("#theme").click()


@pytest.mark.parametrize("width", [390, 1400])
def test_long_labels_scroll_no_page(show: ShowPage, width: int) -> None:
    opened = show(*(replace(model, label=f"{model.label}{'x' * 300}") for model in MODELS), width=width)
    for head in ("#table", ".matrix"):  # which are as wide as they like, but not for one label
        assert opened.page.locator(f"{head} tbody th").first.bounding_box()["width"] < 0.6 * width
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width


def test_print(show: ShowPage) -> None:
    """Light whatever the theme, and nothing wider than a page of A4 (718 pixels within its margins)."""
    layers = {"layers": [{**LAYER, "kernel": "LinearEXL3.reconstruct_hgemm"}]}
    crowd = [measured(f"NVFP4 W4A4 emulated {i}", 0.1, 4.5, seed=i, provenance=layers) for i in range(20)]
    opened = show(*MODELS, *crowd, color_scheme="dark")
    opened.page.emulate_media(media="print")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    opened.page.set_viewport_size({"width": 718, "height": 1000})
    edges = opened.page.locator("table:visible, .chart svg:visible").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().right)"
    )
    assert max(edges) <= 718


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
    if (!words.currentNode.textContent.trim() || !node.getClientRects().length || node.closest("svg")) continue;
    const style = getComputedStyle(node), below = ground(node);
    const ink = light(colour(style.color, below)), paper = light(below);
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
        assert len(found) > 300
        assert [each for each in found if each[0] < 4.5] == []
    opened.page.locator("#table .group[data-group='W4A16']").click()
    assert [each for each in opened.page.evaluate(CONTRASTS) if each[0] < 4.5] == []


def box_of(opened: Opened, selector: str) -> Any:
    return opened.page.locator(selector).first.evaluate(
        "each => { const box = each.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; }"
    )


def test_a_phone_shows_the_numbers(show: ShowPage) -> None:
    """Size, KLD and PPL beside the model's name; nothing is wider than the window; tooltips by touch, inside it."""
    opened = show(*MODELS, width=390, has_touch=True)
    for key in ("label", "bpw_layer", "kld", "ppl"):
        cell = "th" if key == "label" else f"[data-column='{key}']"
        left, _, right, _ = box_of(opened, f"#table tbody tr:nth-child(5) {cell}")
        assert 0 <= left < right <= 390, key
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    token = opened.page.locator("#tokens .passage .token").nth(9)
    token.tap()
    assert opened.heading() == '" t4"'
    left, top, right, bottom = box_of(opened, "#tip")
    assert 0 <= left < right <= 390
    assert 0 <= top < bottom <= 900
