"""Results of several texts: what results.json has of them, that they come back, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from compare_q.eval.results import flat, merging, results_json
from compare_q.eval.results.run_result import Results, TextResult
from tests.support.made import FAILED, QUANT, REF, run_of, with_against, with_ppl
from tests.support.toy import refusal

CODE = with_against(with_ppl(QUANT, replace(QUANT.ppl, value=30.0, stderr=3.0)), kld=replace(QUANT.kld, value=0.04))
TEXTS = Results(
    (
        replace(run_of(REF, QUANT, FAILED), name="prose"),
        replace(run_of(REF, CODE, FAILED), name="code"),
    ),
    "a title",
)
BROKEN = replace(TEXTS, texts=(*TEXTS.texts, TextResult("chat", error="no conversation has a token that is scored")))


def test_several_texts_come_back_as_they_were() -> None:
    for result in (TEXTS, BROKEN):
        raw = json.loads(json.dumps(results_json.results_json(result, ["compare-q"])))
        assert (raw["format"], raw["command"], raw["title"]) == (7, ["compare-q"], "a title")
        again = results_json.from_json(raw)
        assert again.texts == result.texts
        assert json.loads(json.dumps(results_json.results_json(again, ["another"]))) == raw


def test_means_are_worked_out_by_hand() -> None:
    found = {each["label"]: each for each in results_json.results_json(TEXTS, ["x"])["means"]}
    quant = found["W4A16"]
    assert quant["mean_kld"] == pytest.approx((0.01234567 + 0.04) / 2)
    assert quant["mean_kld_stderr"] == pytest.approx((2 * 0.000452**2) ** 0.5 / 2)
    assert quant["mean_ppl"] == pytest.approx((7.5 * 30) ** 0.5)  # 15
    relative = ((0.852 / 7.5) ** 2 + 0.1**2) ** 0.5 / 2
    assert quant["mean_ppl_stderr"] == pytest.approx(15 * relative)
    assert (found["bf16"]["mean_kld"], found["bf16"]["mean_kld_stderr"]) == (0.0, None)
    assert found["broken"]["mean_ppl"] is None
    without = {each["label"]: each for each in results_json.results_json(BROKEN, ["x"])["means"]}
    assert without["W4A16"]["mean_kld"] is None  # a mean over some of the texts would look like one over all


def test_a_file_is_read_whatever_it_holds(tmp_path: Path) -> None:
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    results_json.write_json(Results(TEXTS.texts[:1]), one, ["x"])
    results_json.write_json(TEXTS, many, ["x"])
    run, inspection = merging.load([one])
    assert (run.texts[0].subtitle, inspection) == ("letters", [None])
    texts, inspection = merging.load([many])
    assert ([text.name for text in texts.texts], inspection) == (["prose", "code"], [None, None])
    assert "several texts" in refusal(merging.load, [one, many])
    many.write_text(many.read_text().replace('"subtitle"', '"title"', 1))
    assert refusal(merging.load, [many]).startswith(f"{many}: damaged results: subtitle")


def test_csv_has_a_line_for_each_text_and_model() -> None:
    rows = list(csv.DictReader(io.StringIO(flat.csv_text(BROKEN))))
    assert [(row["text"], row["label"]) for row in rows] == [
        *(("prose", label) for label in ("bf16", "W4A16", "broken")),
        *(("code", label) for label in ("bf16", "W4A16", "broken")),
        ("chat", ""),
    ]
    assert rows[-1]["error"] == "no conversation has a token that is scored"
    assert {float(row["kld"]) for row in rows if row["label"] == "W4A16"} == {0.01234567, 0.04}
    chosen = flat.csv_text(TEXTS, ["label", "kld"]).splitlines()
    assert chosen[:3] == ["text,label,kld", "prose,bf16,0.0", "prose,W4A16,0.01234567"]
