"""The report as a file: whole, closed, small, read back; its numbers are those of the tables; no browser is needed."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.eval.common.files import write_text
from compare_q.eval.html import inspector, report, sections
from compare_q.eval.html.inspector import Damaged, Inspection, Passage
from compare_q.eval.results import results_json
from compare_q.eval.results.differences import SCORES, difference_or_reason
from compare_q.eval.results.run_result import ModelResult, Results, TextResult
from tests.support.made import QUANT, REF, with_sums
from tests.support.report_page import FAILED, MODELS, REFERENCE, inspection_of, measured, results_of, text_of
from tests.support.several_texts import three, with_failed_text


def payload_of(page: str) -> Any:
    found = re.search(r'id="payload">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


@pytest.mark.parametrize("several", [False, True])
def test_the_file_is_closed_and_reads_back(tmp_path: Path, several: bool) -> None:
    """One script and one style, named by their hashes, nothing that could load; what was read back gives the same."""
    results = with_failed_text(three(), "c4", "no </script> file") if several else results_of(*MODELS, FAILED)
    excerpts = [None, None, None] if several else [inspection_of(results.texts[0])]
    file, again = tmp_path / "report.html", tmp_path / "again.html"
    write_text(file, report.page_of(results, excerpts, ["compare_q.py"]))
    text = file.read_text()
    found = re.findall(r'\bsrc=|\bhref="(?!#)|url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)', text)
    assert (found, text.count("<script"), text.count("</script>")) == ([], 2, 2)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-[^']*'; style-src 'sha256-[^']*'; img-src blob:; "
        r"base-uri 'none'; form-action 'none'", policy,
    )  # fmt: skip
    assert re.findall(r"<[^>]* (?:style|on\w+)=", text.split('id="payload"')[0]) == []
    stored, inspections = results_json.load(file)
    before, after = (json.loads(json.dumps(results_json.results_json(each, [])["texts"])) for each in (results, stored))
    assert before == after
    write_text(again, report.page_of(stored, inspections, ["other"]))
    assert again.read_text() == text


def test_every_text_failed(tmp_path: Path) -> None:
    nothing = Results(tuple(TextResult(name, error="no such file") for name in "ab"))
    with pytest.raises(ValueError, match="every text failed"):
        report.page_of(nothing, [None, None], [])
    assert list(tmp_path.iterdir()) == []


def test_footnotes_speak_of_the_page() -> None:
    """Not of options, nor of marks that only the terminal has."""
    page = report.page_of(results_of(REFERENCE, replace(MODELS[2], cached=True)), [None], [])
    notes = re.findall(r"<li>(.*?)</li>", page.split('id="spread"')[0])
    assert any("differences between rows are far more certain" in note for note in notes)
    assert any(note.startswith("1 of 2 rows come from the cache: an earlier run") for note in notes)
    assert not any("--" in note or "(*)" in note for note in notes)


def test_commands_are_for_a_shell() -> None:
    words = ["compare-q", "-t", "Newton's $HOME", "--python", "vllm=/a b/python"]
    assert shlex.split(report.shell_command(words)) == words
    assert report.shell_command(["compare_q.py", "-d", "a.json"]) == "python eval/compare_q.py -d a.json"
    assert report.shell_command([]) == ""


def big(models: int) -> tuple[TextResult, Inspection]:
    """So many models, with as many excerpts as a report has, and as much around these as in English."""
    quantized = [measured(f"EXL3 {i / 8} bpw", 0.1, 2 + i / 8, seed=i) for i in range(models - 1)]
    values = np.random.default_rng(0).lognormal(-3, 2, (models, 256)).astype(np.float32)
    numbers = tuple(map(inspector.three_digits, values))
    passage = Passage(7, 300, (" token",) * 256, numbers[0], numbers, numbers, inspector.CHOSEN)
    damaged = Damaged(7, 300, " word" * inspector.BEFORE, " token", " word" * inspector.AFTER, -1.23, -4.56, 7.89)
    excerpts = Inspection((passage,) * inspector.PASSAGES, ((damaged,) * inspector.WORST,) * models)
    return text_of(REFERENCE, *quantized), excerpts


def test_excerpts_are_left_out_until_the_file_is_below_two_megabytes(tmp_path: Path) -> None:
    """And the report says so; the first passages stay, and the most damaged tokens.  A small report keeps all."""
    text, excerpts = big(20)
    file = tmp_path / "report.html"
    texts = tuple(replace(text, name=f"text {i}") for i in range(3))
    write_text(file, report.page_of(Results(texts), [excerpts] * 3, []))
    assert file.stat().st_size < report.LARGEST
    _, kept = results_json.load(file)
    (passages,) = {len(each.passages) for each in kept}
    (worst,) = {len(each) for one in kept for each in one.worst}
    assert (passages, worst) in report.EXCERPTS[1:-1]
    assert f"{passages} of 4 passages, and {worst} of 30 damaged tokens a model" in file.read_text()
    assert kept[0].passages[0] == excerpts.passages[0]
    write_text(file, report.page_of(Results(texts[:1]), [excerpts], []))
    assert results_json.load(file)[1] == [excerpts]
    assert "of 4 passages" not in file.read_text()


def many(model: ModelResult, groups: int = 30, **sums: Any) -> ModelResult:
    """The model with sums of so many blocks, which repeat those that are given."""
    repeated = {name: own * (groups // len(own)) for name, own in sums.items()}
    return with_sums(model, tokens=(10,) * groups, length=100_000, **repeated)


def test_differences_are_pythons() -> None:
    """The number of every pair, which of the two is better, and why some are not known."""
    models = (
        replace(many(REF, nll=(9.0,)), label="bf16"),
        replace(many(QUANT, nll=(14.0,), kld=(1.0,), same_top=(9.0,)), label="a"),
        replace(many(QUANT, nll=(16.0, 17.0, 18.0), kld=(2.0, 3.0, 2.5), same_top=(8.0, 7.0, 8.0)), label="b"),
        replace(with_sums(QUANT, whole=("kld",)), label="holes"), FAILED,
    )  # fmt: skip
    text = text_of(*models)
    for score in SCORES:
        pairs = sections.pairs_of(text, score)["of"]
        assert set(pairs) == {f"{i}-{j}" for i in range(4) for j in range(i + 1, 4)}
        for key, shown in pairs.items():
            i, j = map(int, key.split("-"))
            found = difference_or_reason(models[i], models[j], score)
            if isinstance(found, str):
                assert shown == found
                continue
            times = 100 if score == "same_top" else 1
            assert float(shown[0].split(" ± ")[0]) == pytest.approx(
                times * found.value, abs=(found.stderr or 1e-5) * times
            )
            assert [float(end) for end in shown[1].split(" to ")] == pytest.approx(
                [times * end for end in found.limits or ()], abs=(found.stderr or 1e-5) * times
            )
    assert [sections.pairs_of(text, score)["of"]["1-2"][2] for score in SCORES] == [1, 1, 1]
    assert [sections.paired_models(text, score) for score in SCORES] == [[0, 1, 2], [1, 3, 2], [1, 2]]


def test_of_many_rows_only_some_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the next one, and with the reference."""
    monkeypatch.setattr(sections, "MOST_PAIRED", 3)
    found = sections.pairs_of(text_of(*MODELS[:5]), "nll")
    assert set(found["of"]) == {"0-1", "0-2", "0-3", "0-4", "1-2", "2-3", "3-4"}
    assert found["order"] == []


def test_nearly_lossless_rows_are_not_ranked() -> None:
    floor = measured("noise", 0.1, seed=1, spec={"noise_floor": True})
    one, other = measured("one", 0.05, seed=2), measured("other", 0.15, seed=3)
    found = sections.pairs_of(text_of(REFERENCE, floor, one, other), "kld")["of"]
    assert found["2-3"][2] == 2
    assert found["1-2"][2] == -1
