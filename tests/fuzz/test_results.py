"""Damaged results.json and report.html: a run that every reader shows, or one line."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from eval.results.merge import runs as merge
from eval.results.texts import TextResult, TextsResult
from hypothesis import given
from rich.console import Console

from backends.common.messages import CONTROL
from eval.html import report
from eval.results import results_csv, results_json, texts_json
from eval.results.run_result import Part, StoredRun
from eval.table import columns, llama_statistics, markdown, pairs, several_texts, terminal, text_columns
from eval.table.registry import BY_NAME
from tests.support.hostile import answer_of, damaged, fuzzed, randoms
from tests.support.made import FAILED, LAYERS, QUANT, REF, REFERENCE, run_of
from tests.support.report_page import inspection_of

DATA = {"windows": 2, "windows_sha256": "w", "vocabulary_sha256": "v", "text_tokens": 100_000, "method": "exllamav3"}
PROVENANCE = {
    "gpus": ["NVIDIA H200"],
    "driver": "580",
    "layers": [{**LAYERS, "weights": "nvfp4 g16", "asked": "nvfp4"}],
}
RUN = run_of(REF, QUANT, FAILED)
WHOLE = json.loads(json.dumps(results_json.run_json(RUN, ["x"]))) | {"data": DATA}
WHOLE["models"][1] |= {"provenance": PROVENANCE, "spec": {"group": "g", "noise_floor": True}, "scores_key": "k"}
ORIGIN = {key: WHOLE[key] for key in results_json.ORIGIN}
PARTS = [Part("a.json", ("bf16",), ORIGIN, REFERENCE, 7.5), Part("b.json", ("W4A16",), ORIGIN)]
MERGED = WHOLE | {"parts": json.loads(json.dumps([asdict(part) for part in PARTS]))}
PAGE = {"run": WHOLE, "inspection": json.loads(json.dumps(asdict(inspection_of(RUN))))}

TEXTS = json.loads(
    json.dumps(
        texts_json.texts_json(
            TextsResult((TextResult("a", RUN), TextResult("b", RUN), TextResult("c", None, "no such file"))), ["x"]
        )
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("results")
    (found / "whole.json").write_text(json.dumps(WHOLE))
    return found


def show(run: StoredRun, inspection: Any, folder: Path) -> None:
    """Every reader of a run but the pictures: table, pairs, statistics, Markdown, CSV, JSON, report."""
    for key in (None, *BY_NAME):
        table = columns.ordered(run, key)
    stream = io.StringIO()
    terminal.show(table, Console(file=stream, width=120))
    terminal.show(table, Console(file=stream, width=80), tuple(BY_NAME))
    lines = [*stream.getvalue().split("\n"), *llama_statistics.statistics_lines(table)]
    lines += pairs.pair_lines(pairs.neighbours(table), table.data.get("text_tokens"))
    lines += markdown.markdown_text(table, tuple(BY_NAME)).split("\n")
    assert not [line for line in lines if CONTROL.search(line)]
    results_csv.write_csv(table, folder / "out.csv")
    results_json.write_json(run, folder / "out.json", ["x"])
    assert results_json.load(folder / "out.json")[0] == run
    report.whole_page(report.page_payload(run, inspection, ["x"]), run.title or "").encode()


@fuzzed
@given(random=randoms)
def test_results_of_several_texts(folder: Path, random: Random) -> None:
    file = folder / "texts.json"
    file.write_bytes(damaged(TEXTS, random))
    found = answer_of(lambda: texts_json.load([file]))
    if found is None or not isinstance(found[0], texts_json.StoredTexts):
        return
    result = found[0]
    stream = io.StringIO()
    for key in ("kld", "label", "top1"):
        table = text_columns.ordered(result, key)
    several_texts.show(table, Console(file=stream, width=100))
    lines = [*stream.getvalue().split("\n"), *several_texts.markdown_text(table, timing=True).split("\n")]
    assert not [line for line in lines if CONTROL.search(line)]
    results_csv.csv_text(result)
    texts_json.write_json(result, folder / "again.json", ["x"])
    assert texts_json.load([folder / "again.json"])[0] == result


@fuzzed
@given(random=randoms)
def test_results(folder: Path, random: Random) -> None:
    document = random.choice([WHOLE, WHOLE, MERGED, PAGE])
    content = damaged(document, random)
    if document is PAGE:
        content = b'<script type="application/json" id="payload">' + content + b"</script>"
    file = folder / "damaged.json"
    file.write_bytes(content)
    found = answer_of(lambda: results_json.load(file))
    if found is not None:
        show(*found, folder)
        merged = answer_of(lambda: merge.load([folder / "whole.json", file]))
        if merged is not None:
            show(*merged, folder)
