"""The page of several texts, in a real browser: its table, its drawing, its tabs, and what it copies and saves."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from eval.results.run_result import Results, TextResult
from tests.support.report_page import (
    FAILED,
    MODELS,
    OpenTexts,
    cell,
    copied,
    measured,
    needs_browser,
    plain,
    run_of,
)  # fmt: skip
from tests.support.several_texts import NAMES, three, with_failed_text

pytestmark = needs_browser


def measured_texts() -> Results:
    """Two texts of one run with another KLD, and one that failed; a model failed on the second."""
    first = run_of(*MODELS, FAILED)
    others = [measured(m.label, None if m.is_reference else 0.2 + i / 10, m.storage.bpw_layer, seed=9 + i,
                       is_reference=m.is_reference, spec=m.spec) for i, m in enumerate(MODELS)]  # fmt: skip
    others[4] = replace(FAILED, label=MODELS[4].label, error="out of memory")
    second = replace(run_of(*others, FAILED), subtitle="c4, 4 × 1000 tokens")
    return Results(
        (replace(first, name="wiki2"), replace(second, name="c4 & <b>"), TextResult("x", error="no such file"))
    )


def test_the_table_of_all_texts(open_texts: OpenTexts) -> None:
    """Means first, then each text; KLD with five decimals, PPL with four, errors with two digits."""
    opened = open_texts(three(c4={"GGUF Q4_K": "out of memory"}))
    assert opened.texts("#texts .group-name") == ["mean of the texts", *NAMES]
    assert opened.texts("#texts tbody th .label > span") == ["bf16", "noise ≈", "EXL3 4.0", "GGUF Q4_K"]
    assert [cell(opened, 1, key) for key in ("mean-kld", "0-kld", "0-ppl")] == ["ref", "ref", "20.0000± 2.0"]
    found = [cell(opened, 3, key) for key in ("mean-kld", "0-kld", "1-kld", "2-kld", "2-ppl")]
    assert found == ["0.05000± 0.0032", "0.05000± 0.0050", "0.02000± 0.0020", "0.08000± 0.0080", "21.6000± 2.0"]
    assert [cell(opened, 4, key) for key in ("mean-kld", "1-kld", "1-ppl")] == ["n/a"] * 3
    assert opened.page.locator("#texts tr:nth-child(4) [data-cell='1-ppl']").get_attribute("title") == "out of memory"
    assert "GGUF Q4_K on c4 failed: out of memory" in opened.texts("#texts .notes li")


def test_sorting_the_table_of_all_texts(open_texts: OpenTexts) -> None:
    """By a text's KLD, upwards and downwards, what is not known last; another text shown keeps the order."""
    opened = open_texts(three(c4={"GGUF Q4_K": "out of memory"}))
    names = "#texts tbody th .label > span"
    head = opened.page.locator("#texts [data-column='1-kld'] button")
    head.click()
    assert opened.texts(names) == ["bf16", "noise ≈", "EXL3 4.0", "GGUF Q4_K"]
    opened.page.keyboard.press("Enter")  # the focus stays on the heading
    down = ["EXL3 4.0", "noise ≈", "bf16", "GGUF Q4_K"]
    assert opened.texts(names) == down
    opened.page.get_by_role("tab", name="chat").click()
    assert opened.texts(names) == down


def test_the_drawing_of_all_texts(open_texts: OpenTexts) -> None:
    """Markers at the values, read off the axis; a tooltip with value and interval; KLD or PPL."""
    opened = open_texts(three())
    to_x = opened.scale("#texts", "x", log=True)
    spots = opened.page.locator("#texts [data-spot]")
    boxes = spots.evaluate_all("all => all.map(e => [e.dataset.spot, e.getBBox().x + e.getBBox().width / 2])")
    centres = dict(boxes)
    klds = {"EXL3 4.0/wiki2": 0.05, "EXL3 4.0/c4": 0.02, "noise ≈/chat": 0.003, "GGUF Q4_K/chat": 0.01}
    assert [centres[spot] for spot in klds] == pytest.approx([to_x(kld) for kld in klds.values()], abs=0.6)
    opened.page.locator("#texts [data-spot='EXL3 4.0/c4']").hover()
    assert opened.heading() == "EXL3 4.0: c4"
    found = {name: plain(text) for name, text in opened.tip().items()}
    assert found == {
        "KLD": "0.0200 ± 0.0020",
        "95 %": "0.0144 to 0.0256",
        "mean of the texts": "0.050",
        "size": "4.00 bpw",
    }
    opened.pick("texts", "PPL")
    assert opened.page.locator("#texts [data-spot^='bf16/']").count() == 3
    assert opened.texts("#texts .legend li") == list(NAMES)


def test_tabs_choose_the_text_of_all_below(open_texts: OpenTexts) -> None:
    """By click and by key, named in the address, and back again; the selected models and the focus stay."""
    opened = open_texts(measured_texts())
    page, ppl = opened.page, [opened.cells("ppl")]
    assert opened.texts("#about-text h2, #subtitle") == ["wiki2", "wikitext2, 4 × 1000 tokens"]
    page.locator("#table tr[data-model='2'] td").first.click()
    chips = [chip.replace(" †", "") for chip in opened.texts("#chips .chip")]
    page.get_by_role("tab", name="c4 & <b>").click()
    assert page.evaluate("location.hash") == "#text=c4%20%26%20%3Cb%3E"
    assert opened.texts("#about-text h2, #subtitle") == ["c4 & <b>", "c4, 4 × 1000 tokens"]
    assert [chip for chip in chips if chip != "EXL3 3.0×"] == opened.texts("#chips .chip")
    ppl.append(opened.cells("ppl"))
    assert ppl[0] != ppl[1]
    assert page.evaluate("document.activeElement.textContent") == "c4 & <b>"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("#about-text .failure").wait_for()
    assert opened.texts("#about-text .failure") == ["This text failed: no such file"]
    assert page.locator("main > section:visible").count() == 1
    assert opened.texts("#tabs [aria-selected='true']") == ["x (failed)"]
    page.go_back()
    page.locator("#about-text h2", has_text="c4").wait_for()
    assert opened.texts("#about-text h2") == ["c4 & <b>"]
    page.locator("#links a", has_text="Tokens").click()  # goes there, and keeps the text in the address
    assert page.evaluate("scrollY") > 1000
    page.reload()
    assert opened.cells("ppl") == ppl[1]
    opened.requests.pop()  # of the reload


def test_a_text_that_failed_first_is_not_the_first_shown(open_texts: OpenTexts) -> None:
    opened = open_texts(with_failed_text(three(), "wiki2", "no such file"))
    assert opened.texts("#tabs [aria-selected='true']") == ["c4"]
    assert opened.texts("#texts .group-name") == list(NAMES)  # and no means, which no model has


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_many_texts_and_long_names_scroll_no_page(open_texts: OpenTexts, width: int) -> None:
    names = ("</script><img src=x onerror=alert(1)>", "x" * 200, "word " * 40, "\udc80", "__proto__")
    texts = tuple(replace(text, name=name) for name, text in zip(names, three().texts * 2, strict=False))
    labelled = tuple(
        replace(t, models=tuple(replace(m, label=f"{m.label} {'W' * 100}") for m in t.models))
        for t in texts
    )  # fmt: skip
    opened = open_texts(Results(labelled), width=width)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    assert opened.page.locator("img").count() == 0
    for tab in opened.page.locator("#tabs button").all():
        tab.click()
    edges = opened.page.locator("#texts .chart > svg text").evaluate_all(
        "all => all.map(each => [each.getBoundingClientRect().left, each.getBoundingClientRect().right])"
    )
    assert all(left >= 0 and right <= width for left, right in edges)


def test_the_table_of_all_texts_as_text(open_texts: OpenTexts) -> None:
    opened = open_texts(measured_texts())
    lines = copied(opened, "markdown").split("\n")
    odd = "c4 \\& \\<b\\>"
    assert lines[0] == f"| model | size | wiki2: KLD | wiki2: PPL | {odd}: KLD | {odd}: PPL | x: KLD | x: PPL |"
    assert lines[1].count("--:") == 7
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(MODELS) + 1
    assert "- x failed: no such file" in lines
    opened.load()
    rows = list(csv.DictReader(io.StringIO(copied(opened, "csv"))))
    model = MODELS[5]
    assert model.kld
    (row,) = (row for row in rows if row["label"] == model.label)
    assert float(row["wiki2 kld"]) == model.kld.value
    assert (row["x kld"], rows[4]["c4 & <b> ppl"]) == ("", "")


def test_the_saved_drawing_of_all_texts_stands_alone(open_texts: OpenTexts, tmp_path: Path) -> None:
    opened = open_texts(three())
    for kind in ("svg", "png"):
        with opened.page.expect_download() as download:
            opened.page.locator(f"#texts [data-key^='{kind}-']").click()
        assert download.value.suggested_filename == f"all_texts.{kind}"
        download.value.save_as(tmp_path / download.value.suggested_filename)
    text = (tmp_path / "all_texts.svg").read_text()
    assert re.findall(r"class=|var\(|color-mix|color\(|href|style=", text) == []
    words = "".join(ElementTree.fromstring(text).itertext())
    assert all(each in words for each in (*NAMES, "KL divergence on 3 texts", "EXL3 4.0", "noise floor"))
    assert (tmp_path / "all_texts.png").read_bytes().startswith(b"\x89PNG")
