"""The report as a file: whole, closed, and speaking of the page; no browser is needed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from eval.html import report
from eval.results import results_json
from tests.support.report_page import FAILED, MODELS, REFERENCE, inspection_of, run_of


def test_the_file_is_whole_and_closed(tmp_path: Path) -> None:
    """One script, one style, named by their hashes; nothing that could load; the payload reads back."""
    run, file = run_of(*MODELS, FAILED), tmp_path / "report.html"
    report.write(run, inspection_of(run), file, ["compare_q.py"])
    text = file.read_text()
    assert re.findall(r"\b(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text) == []
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    again, inspection = results_json.load(file)
    before, after = (json.loads(json.dumps(results_json.run_json(each, [])["models"])) for each in (run, again))
    assert before == after
    report.write(again, inspection, tmp_path / "again.html", ["other"])
    assert results_json.load(tmp_path / "again.html") == (again, inspection)
    assert (tmp_path / "again.html").read_text() == text


def test_footnotes_speak_of_the_page() -> None:
    """Not of options, nor of marks that only the terminal has."""
    cached = replace(MODELS[2], cached=True)
    found = report.page_payload(run_of(REFERENCE, cached), None, [])["footnotes"]
    assert any("differences between rows are far more certain" in note for note in found)
    assert any(note.startswith("1 of 2 rows come from the cache; their seconds are") for note in found)
    assert not any("--" in note or "(*)" in note for note in found)
