"""What the page copies and saves, in a real browser: texts of ``--markdown`` and ``--csv``, whole pictures."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import image

from eval.results import flat
from eval.table import markdown
from tests.support.made import results_of
from tests.support.report_page import FAILED, MODELS, Opened, ShowPage, needs_browser, run_of

pytestmark = needs_browser


def copied(opened: Opened, what: str) -> str:
    """The clipboard after a click on a button."""
    opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = opened.page.locator(f"[data-key='copy-{what}']")
    button.click()
    opened.page.wait_for_function(
        "key => document.querySelector(key).textContent === 'Done'", arg=f"[data-key='copy-{what}']"
    )
    return str(opened.page.evaluate("navigator.clipboard.readText()"))


def test_the_table_as_markdown(show: ShowPage) -> None:
    """All of it; then the rows that are shown, in their order."""
    run = run_of(*MODELS, FAILED)
    opened, expected = show(*run.models), markdown.markdown_text(results_of(run)).split("\n")
    assert copied(opened, "markdown").split("\n") == expected
    opened.page.locator("#table .group[data-group='EXL3']").click()
    opened.page.locator("th[data-column='label'] button").click()
    found = copied(opened, "markdown").split("\n")
    assert (found[:4], found[-1]) == (expected[:4], expected[-1])
    rows = [line for line in found if line in expected[4 : 4 + len(run.models)]]
    assert [row.split(" | ")[0].removeprefix("| ").replace("\\", "") for row in rows] == opened.labels()
    assert len(rows) == len(run.models) - 2


def test_the_table_as_csv(show: ShowPage, tmp_path: Path) -> None:
    """Names and values are those of ``--csv``, as numbers to their last digit."""
    odd = replace(MODELS[2], label='W4A16 "a", b', notes=("one", "two"))
    run = run_of(*MODELS[:2], odd, FAILED)
    flat.write_csv(results_of(run), tmp_path / "run.csv")
    found = list(csv.reader(io.StringIO(copied(show(*run.models), "csv"))))
    with (tmp_path / "run.csv").open(encoding="utf-8", newline="") as stream:
        expected = list(csv.reader(stream))

    def value(text: str) -> str | float:
        return float(text) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", text) else text

    assert [list(map(value, row)) for row in found] == [list(map(value, row)) for row in expected]


def test_copying_without_a_clipboard(show: ShowPage) -> None:
    opened = show(*MODELS)
    opened.page.evaluate("""() => {
        Object.defineProperty(navigator, "clipboard", { value: undefined });
        document.addEventListener("copy", () => { window.copied = document.activeElement.value; });
    }""")
    opened.page.locator("#ran .act").click()
    opened.page.wait_for_function("window.copied")
    assert opened.page.evaluate("window.copied") == "python eval/compare_q.py -d '<d>'"
    assert opened.page.locator("textarea").count() == 0


@pytest.mark.parametrize(
    ("scheme", "sections"), [("light", ("scatter", "spread", "position", "confidence")), ("dark", ("scatter",))]
)
def test_saved_drawings_stand_alone(show: ShowPage, tmp_path: Path, scheme: str, sections: tuple[str, ...]) -> None:
    """As SVG: no class, variable or link, with title, letters and legend; as PNG: the same colours and places."""
    opened = show(*MODELS, color_scheme=scheme)
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    for section in sections:
        files = {}
        for kind in ("svg", "png"):
            with opened.page.expect_download() as download:
                opened.page.locator(f"#{section} [data-key^='{kind}-']").click()
            files[kind] = tmp_path / download.value.suggested_filename
            download.value.save_as(files[kind])
        text = files["svg"].read_text()
        assert re.findall(r"class=|var\(|color-mix|color\(|href|style=", text) == []
        root = ElementTree.fromstring(text)
        words = "".join(root.itertext())
        assert "wikitext2, 4 × 1000 tokens" in words
        names = opened.texts(f"#{section} .legend li") or opened.texts(f"#{section} .group")
        assert [name for name in names if name not in words] == []
        pixels = image.imread(files["png"])
        height, width = (float(root.get(key, 0)) for key in ("height", "width"))
        times = pixels.shape[1] / width
        assert pixels.shape[1] >= 1600
        assert pixels.shape[0] == pytest.approx(times * height, abs=1)
        assert np.allclose(255 * pixels[2, 2, :3], ground, atol=1)
        if section == "scatter":
            x, y = opened.centre("EXL3 4.0")
            below = float(root.findall("{*}svg")[0].get("y", 0))
            red, green, blue = (255 * pixels[round(times * (y + below)), round(times * x), :3]).round()
            assert (red, green, blue) == (0xCC, 0x79, 0xA7)
