"""The page of several texts in a real browser: its table, its drawing, its tabs, and what it copies."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from compare_q.eval.results import flat
from compare_q.eval.results.run_result import Results, TextResult
from compare_q.eval.table import columns, markdown
from tests.support.report_page import FAILED, MODELS, ShowPage, measured, needs_browser, text_of
from tests.support.several_texts import NAMES, three, with_answers, with_failed_text, with_text

pytestmark = needs_browser
LABELS = "#texts tbody .label > span"


def measured_texts() -> Results:
    """Two texts of one run with another KLD, and one that failed; a model failed on the second."""
    others = [measured(m.label, None if m.is_reference else 0.2 + i / 10, m.storage.bpw_layer, seed=9 + i,
                       is_reference=m.is_reference, spec=m.spec) for i, m in enumerate(MODELS)]  # fmt: skip
    others[4] = replace(FAILED, label=MODELS[4].label, error="out of memory")
    second = replace(text_of(*others, FAILED, name="c4 & <b>"), subtitle="c4, 4 × 1000 tokens")
    return Results((text_of(*MODELS, FAILED), second, TextResult("x", error="no such file")))


def test_the_table_of_all_texts(show: ShowPage) -> None:
    """Means first, then each text, as the terminal has them; sorted by a text's KLD, what is not known last."""
    results = three(c4={"GGUF Q4_K": "out of memory"})
    opened = show(results=results)
    assert opened.texts(LABELS) == ["bf16", "noise ≈", "EXL3 4.0", "GGUF Q4_K"]
    heads = opened.texts("#texts thead th")
    assert heads[:3] == ["label", "mean PPL", "mean KLD"]
    for each in (each for each in columns.columns_of_texts(results) if each.block):
        at = heads.index(each.column.title) + 1
        shown = opened.texts(f"#texts tbody tr > :nth-child({at})")
        assert shown == [f"{cell.shown}± {cell.error}" if cell.error else cell.shown for cell in each.cells]
    assert "GGUF Q4_K on c4 failed: out of memory" in opened.texts("#texts .notes li")
    opened.page.locator("#texts thead button", has_text="c4 KLD").click()
    assert opened.texts(LABELS) == ["bf16", "noise ≈", "EXL3 4.0", "GGUF Q4_K"]
    opened.page.keyboard.press("Enter")  # the focus stays on the heading
    assert opened.texts(LABELS) == ["EXL3 4.0", "noise ≈", "bf16", "GGUF Q4_K"]


def test_tabs_choose_the_text_of_all_below(show: ShowPage) -> None:
    """By click and by key, named in the address, and back again; the selected models and the focus stay."""
    opened = show(results=measured_texts())
    page = opened.page
    heads = "article:not([hidden]) > h2, article:not([hidden]) .lead"
    assert opened.texts(heads) == ["wiki2", "wikitext2, 4 × 1000 tokens"]
    for model in (2, 4):
        page.locator(f"#table tr[data-model='{model}'] input").check()
    tab = page.get_by_role("tab", name="c4 & <b>")
    tab.click()
    page.locator("#text-0").wait_for(state="hidden")
    assert page.evaluate("location.hash") == "#text=c4%20%26%20%3Cb%3E"
    assert opened.texts(heads) == ["c4 & <b>", "c4, 4 × 1000 tokens"]
    assert opened.texts("#chips .chip") == ["W4A16 g128 ×", "EXL3 3.0 ×"]
    assert page.locator("#table-1 tr.chosen").count() == 2
    assert page.evaluate("document.activeElement.textContent") == "c4 & <b>"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator(".failure:visible").wait_for()
    assert opened.texts("article:not([hidden]) .failure") == ["This text failed: no such file"]
    assert opened.texts("#tabs [aria-selected='true']") == ["x (failed)"]
    page.go_back()
    page.locator("#text-1").wait_for()
    page.locator("#links a", has_text="Tokens").click()  # goes there, and keeps the text in the address
    page.wait_for_function("() => scrollY > 1000")
    page.reload()
    assert opened.texts(heads)[0] == "c4 & <b>"
    opened.requests.pop()  # of the reload


def test_a_text_that_failed_first_is_not_the_first_shown(show: ShowPage) -> None:
    opened = show(results=with_failed_text(three(), "wiki2", "no such file"))
    assert opened.texts("#tabs [aria-selected='true']") == ["c4"]
    assert not any(head.startswith("mean") for head in opened.texts("#texts thead th"))


@pytest.mark.parametrize("width", [390, 1400])
def test_many_texts_and_long_names_scroll_no_page(show: ShowPage, width: int) -> None:
    names = ("</script><img src=x onerror=alert(1)>", "x" * 200, "\udc80", "__proto__")
    labelled = tuple(
        replace(t, name=name, models=tuple(replace(m, label=f"{m.label} {'W' * 100}") for m in t.models))
        for name, t in zip(names, three().texts * 2, strict=False)
    )
    opened = show(results=Results(labelled), width=width)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    assert opened.page.locator("img").count() == 0
    for i, tab in enumerate(opened.page.locator("#tabs button").all()):
        tab.click()
        opened.page.locator(f"#text-{i}").wait_for()


def test_the_table_of_all_texts_as_text(show: ShowPage) -> None:
    results = measured_texts()
    opened = show(results=results)
    assert opened.copied("#texts [data-copy='markdown']") == markdown.markdown_text(results)
    opened.load()
    rows = list(csv.reader(io.StringIO(opened.copied("#texts [data-copy='csv']"))))
    assert rows == list(csv.reader(io.StringIO(flat.csv_text(results))))


def test_accuracy_of_one_text_among_others(show: ShowPage) -> None:
    """Per cent, with the error of independent questions: 3 of 4 is 75 ± 25; drawn over size, and first of its text."""
    right = {"bf16": "1110", "noise": "1110", "EXL3_4.0": "1001", "GGUF_Q4_K": "1011"}
    results = three()
    opened = show(results=with_text(results, with_answers(results.texts[2], **right)), inspect=False)
    at = opened.texts("#texts thead th").index("chat acc %") + 1
    assert opened.texts(f"#texts tbody tr > :nth-child({at})") == ["75.00± 25", "75.00± 25", "50.00± 29", "75.00± 25"]
    opened.pick("texts", "acc")
    opened.page.locator("#texts figure:visible .point").first.wait_for()
    assert opened.page.locator("#texts figure:visible .point").count() == 4
    opened.page.get_by_role("tab", name="chat").click()
    opened.page.locator("#scatter-2").wait_for()
    assert opened.texts("#scatter-2 .choice label")[0] == "acc"
    assert NAMES[2] in opened.texts("#tabs [aria-selected='true']")
    mark = opened.page.locator("#scatter-2 figure:visible .point[data-model='2']")
    assert mark.get_attribute("aria-label") == "EXL3 4.0: bits per weight 4.00, acc 50"
