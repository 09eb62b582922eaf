"""The report as a file: whole, closed, and speaking of the page; no browser is needed."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np

from eval.html import inspector, report
from eval.html.inspector import Damaged, Inspection, Passage
from eval.results import results_json
from tests.support.made import results_of
from tests.support.report_page import FAILED, MODELS, REFERENCE, inspection_of, measured, run_of


def test_the_file_is_whole_and_closed(tmp_path: Path) -> None:
    """One script, one style, named by their hashes; nothing that could load; the payload reads back."""
    run, file = run_of(*MODELS, FAILED), tmp_path / "report.html"
    report.write(results_of(run), inspection_of(run), file, ["compare_q.py"])
    text = file.read_text()
    assert re.findall(r"\b(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text) == []
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    again, (inspection,) = results_json.load(file)
    assert again.texts == (run,)
    report.write(again, inspection, tmp_path / "again.html", ["other"])
    assert results_json.load(tmp_path / "again.html") == (again, [inspection])
    assert (tmp_path / "again.html").read_text() == text


def test_footnotes_speak_of_the_page() -> None:
    """Not of options, nor of marks that only the terminal has."""
    cached = replace(MODELS[2], cached=True)
    found = report.page_payload(results_of(run_of(REFERENCE, cached)), None, [])["footnotes"]
    assert any("differences between rows are far more certain" in note for note in found)
    assert any(note.startswith("1 of 2 rows come from the cache; their speed is") for note in found)
    assert not any("--" in note or "(*)" in note for note in found)


def test_commands_are_for_a_shell() -> None:
    words = ["compare-q", "-t", "Newton's $HOME", "--python", "vllm=/a b/python"]
    assert shlex.split(report.shell_command(words)) == words
    assert report.shell_command(["compare_q.py", "-d", "a.json"]) == "python eval/compare_q.py -d a.json"
    assert [report.shell_command(each) for each in (None, [], "text")] == ["", "", ""]


def test_a_report_of_forty_models_is_below_two_megabytes() -> None:
    """With four passages of 256 tokens and thirty damaged ones a model, with as much around these as in English."""
    models = [measured(f"EXL3 {i / 8} bpw", 0.1, 2 + i / 8, seed=i) for i in range(40)]
    run = run_of(REFERENCE, *models)
    values = np.random.default_rng(0).lognormal(-3, 2, (41, 256)).astype(np.float32)
    numbers = tuple(map(inspector.three_digits, values))
    passage = Passage(7, 300, (" token",) * 256, numbers[0], numbers, numbers, inspector.CHOSEN)
    damaged = Damaged(7, 300, " word" * inspector.BEFORE, " token", " word" * inspector.AFTER, -1.23, -4.56, 7.89)
    excerpts = Inspection((passage,) * inspector.PASSAGES, ((damaged,) * inspector.WORST,) * 41)
    page = report.whole_page(report.page_payload(results_of(run), excerpts, []), report.TITLE)
    assert 1_000_000 < len(page.encode()) < 2_000_000
