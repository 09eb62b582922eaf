"""The report of several texts as a file: whole, small, read back; no browser is needed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from eval.html import inspector, texts_report
from eval.html.inspector import Damaged, Inspection, Passage
from eval.results import results_json
from eval.results.run_result import Results, TextResult
from tests.support.report_page import REFERENCE, inspection_of, measured, run_of
from tests.support.several_texts import three, with_failed_text


def test_the_file_is_closed_and_reads_back(tmp_path: Path) -> None:
    """One script and one style, nothing that could load; a report of what was read back is the same file."""
    result, file = with_failed_text(three(), "c4", "no such </script> file"), tmp_path / "report.html"
    texts_report.write_report(result, [None, None, None], file, ["compare_q.py"])
    text = file.read_text()
    assert re.findall(r"\b(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert text.count("</script>") == 2
    again, inspections = results_json.load(file)
    assert again.texts == result.texts
    texts_report.write_report(again, inspections, tmp_path / "again.html", ["other"])
    assert (tmp_path / "again.html").read_text() == text


def test_every_text_failed(tmp_path: Path) -> None:
    nothing = Results(tuple(TextResult(name, error="no such file") for name in "ab"))
    with pytest.raises(ValueError, match="every text failed"):
        texts_report.write_report(nothing, [None, None], tmp_path / "report.html", [])
    assert list(tmp_path.iterdir()) == []


def test_the_drawing_has_the_values_as_they_are_written() -> None:
    payload = texts_report.page_payload(three(), [None] * 3, ["compare_q.py"])
    kld, ppl = payload["overview"]["drawings"]
    assert (kld["key"], kld["floor"], ppl["key"], ppl["floor"]) == ("kld", ("noise", pytest.approx(0.002)), "ppl", None)
    assert [row["label"] for row in kld["rows"]] == ["noise ≈", "GGUF Q4_K", "EXL3 4.0"]
    assert [spot["shown"] for spot in kld["rows"][2]["spots"]] == ["0.050", "0.020", "0.080"]
    assert [row["shown"] for row in kld["rows"]] == ["0.0020", "0.030", "0.050"]
    assert payload["pages"][0]["commands"] == ["python eval/compare_q.py"]


def big(models: int, texts: int) -> tuple[Results, list[Inspection]]:
    """So many models and texts, each with as many excerpts as a report of one text has."""
    found = [measured(f"EXL3 {i / 8} bpw", 0.1, 2 + i / 8, seed=i) for i in range(models)]
    run = run_of(REFERENCE, *found)
    values = np.random.default_rng(0).lognormal(-3, 2, (models + 1, 256)).astype(np.float32)
    numbers = tuple(map(inspector.three_digits, values))
    passage = Passage(7, 300, (" token",) * 256, numbers[0], numbers, numbers, inspector.CHOSEN)
    damaged = Damaged(7, 300, " word" * inspector.BEFORE, " token", " word" * inspector.AFTER, -1.23, -4.56, 7.89)
    excerpts = Inspection((passage,) * inspector.PASSAGES, ((damaged,) * inspector.WORST,) * (models + 1))
    result = Results(tuple(replace(run, name=f"text {i}") for i in range(texts)))
    return result, [excerpts] * texts


def test_excerpts_are_left_out_until_the_file_is_below_two_megabytes(tmp_path: Path) -> None:
    """And the report says so; of the passages the first stay, and of the tokens the most damaged."""
    result, excerpts = big(20, 3)
    file = tmp_path / "report.html"
    texts_report.write_report(result, excerpts, file, [])
    assert file.stat().st_size < texts_report.LARGEST
    _, kept = results_json.load(file)
    (passages,) = {len(each["passages"]) for each in kept}
    (worst,) = {len(each) for one in kept for each in one["worst"]}
    assert (passages, worst) in texts_report.EXCERPTS[1:-1]
    assert f"{passages} of 4 passages, and {worst} of 30 damaged tokens a model" in file.read_text()
    assert kept[0]["passages"][0] == json.loads(json.dumps(asdict(excerpts[0].passages[0])))


def test_a_small_report_keeps_all_excerpts(tmp_path: Path) -> None:
    run = run_of(REFERENCE, measured("EXL3 4.0", 0.1))
    result = Results((replace(run, name="a"), replace(run, name="b", subtitle="other")))
    excerpts = [inspection_of(run), None]
    texts_report.write_report(result, excerpts, tmp_path / "report.html", [])
    _, kept = results_json.load(tmp_path / "report.html")
    assert kept == [json.loads(json.dumps(asdict(inspection_of(run)))), None]
    assert "passages, and" not in (tmp_path / "report.html").read_text().split('id="payload"')[1].split("<script>")[0]
