"""The page of answers to questions, in a real browser: accuracy and flips in the tables, and accuracy over size."""

from __future__ import annotations

import csv
import io

import pytest

from eval.plots import figures
from eval.plots.measures import ACCURACIES, BPW
from eval.results.run_result import Results
from tests.support.report_page import OpenTexts, ShowPage, cell, copied, needs_browser
from tests.support.several_texts import text_of, three, with_answers, with_text

pytestmark = needs_browser
RIGHT = {"bf16": "1110", "noise": "1110", "EXL3_4.0": "1001", "GGUF_Q4_K": "1011"}


def test_accuracy_and_flips_of_one_text_among_others(open_texts: OpenTexts) -> None:
    """Per cent, with the error of independent questions: 3 of 4 is 75 ± 25; the CSV has fractions."""
    result = three()
    opened = open_texts(with_text(result, with_answers(result.texts[2], **RIGHT)))
    assert opened.texts("#texts [data-column^='2-'] button") == ["acc %", "flips %", "KLD"]
    assert [cell(opened, 1, key) for key in ("2-acc", "2-flips", "2-kld")] == ["75.00± 25", "ref", "ref"]
    assert [cell(opened, 3, key) for key in ("2-acc", "2-flips")] == ["50.00± 29", "75.00± 25"]
    opened.page.locator("#texts [data-column='2-acc'] button").click()
    assert opened.texts("#texts tbody th .label > span")[0] == "EXL3 4.0"
    rows = list(csv.DictReader(io.StringIO(copied(opened, "csv"))))
    assert [row["chat acc"] for row in rows] == ["0.5", "0.75", "0.75", "0.75"]
    opened.load()
    opened.pick("texts", "acc")
    spots = opened.page.locator("#texts [data-spot]")
    assert spots.evaluate_all("all => all.map(e => e.dataset.spot)")[0].endswith("/chat")
    assert spots.count() == 4


def test_accuracy_over_size(show: ShowPage) -> None:
    """It is what is first seen of a task; places and errors are those of the Python plot, and more is better."""
    text = with_answers(text_of("chat", 2), **RIGHT)
    opened = show(run=text, inspect=False)
    points = {p.label: p for p in figures.scatter_points(text, BPW, ACCURACIES["acc"])[0]}
    to_y = opened.scale("#scatter", "y", log=False)
    for label in ("EXL3 4.0", "GGUF Q4_K"):
        assert opened.centre(label)[1] == pytest.approx(to_y(points[label].y), abs=0.6)
    gold = [(to_y(p.y - p.error), to_y(p.y + p.error)) for p in points.values() if p.error]
    assert [tuple(ends) for _, *ends in opened.bars("#scatter")] == [pytest.approx(each, abs=0.6) for each in gold]
    hint = " ".join(opened.texts("#scatter .hint"))
    assert "smaller and better: EXL3 4.0, GGUF Q4_K." in hint
    assert "one standard error of the difference from the reference's." in hint


def test_all_texts_are_tasks(open_texts: OpenTexts) -> None:
    result = Results(tuple(with_answers(text_of(name, i), **RIGHT) for i, name in enumerate(("c4", "chat"), 1)))
    opened = open_texts(result)
    assert opened.texts("#texts .group-name")[-2:] == ["c4", "chat"]
    opened.pick("texts", "acc norm")
    assert opened.page.locator("#texts [data-spot^='EXL3 4.0/']").count() == 2
