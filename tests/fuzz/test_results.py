"""Damaged results and reports, and messages from damaged workers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from rich.console import Console

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common.message_text import CONTROL
from compare_q.backends.reference.head import Head
from compare_q.backends.reference.store import (
    STORE_MANIFEST,
    Manifest,
    read_manifest,
    write_manifest,
)
from compare_q.backends.scoring import segments
from compare_q.eval import merging
from compare_q.eval.report import html_page
from compare_q.eval.results import RunResult
from compare_q.eval.table import columns, markdown, pairs, terminal_table
from compare_q.eval.table.columns import BY_NAME
from compare_q.eval.table.csv_text import csv_of_run
from compare_q.eval.table.tables import table_of
from tests.support.hostile import answer_of, damaged, damaged_bytes, fuzzed, randoms
from tests.support.made import FAILED, LAYERS, QUANT, REF, WORST, raw_of, run_of
from tests.support.several_texts import TEXT_NAMES, three

DATA = {"windows_sha256": "w", "vocabulary_sha256": "v"}
TEXT = {"name": "text", "windows": 2, "text_tokens": 100_000, "method": "exllamav3"}
LAYER = {**LAYERS, "weights": "nvfp4 g16", "asked": "nvfp4"}
PROVENANCE = {"gpus": ["NVIDIA H200"], "driver": "580", "layers": [LAYER]}
RUN = raw_of(run_of(REF, QUANT, FAILED, texts=[TEXT], data=DATA), ["x"])
SPEC = {"group": "g", "noise_floor": True}
RUN["models"][1] |= {"provenance": PROVENANCE, "spec": SPEC, "scores_key": "k"}
RUN["models"][1]["worst_tokens"] = [token.model_dump() for token in WORST]
TEXTS = raw_of(three(failed={"noise": "told to fail"}), ["x"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    (results / "run.json").write_text(json.dumps(RUN))
    return results


def show(run: RunResult, folder: Path) -> None:
    """Write all outputs of a run except pictures: table, pairs, Markdown, CSV, JSON, report."""
    sliced = []
    for column in columns.OF_SLICES:
        sliced += [f"{column}:{name}" for name in TEXT_NAMES]
    for key in (None, *BY_NAME, *sliced):
        ordered = columns.sorted_rows(run, key)
    table = table_of(ordered)
    stream = io.StringIO()
    terminal_table.show(table, Console(file=stream, width=120))
    terminal_table.show(table_of(ordered, (*BY_NAME, *sliced)), Console(file=stream, width=80))
    terminal_table.conclude(table, Console(file=stream, width=80))
    lines = stream.getvalue().split("\n")
    lines += pairs.pair_lines(pairs.neighbours(ordered), ordered)
    lines += markdown.markdown_text(table_of(ordered, tuple(BY_NAME))).split("\n")
    assert not [line for line in lines if CONTROL.search(line)]
    (folder / "out.csv").write_text(csv_of_run(ordered))
    with_origin = run.with_origin(["x"])
    with_origin.write(folder / "out.json")
    assert RunResult.read(folder / "out.json") == with_origin
    with mock.patch.object(html_page, "figures_of", return_value=[]):
        html_page.page_of(ordered)


@fuzzed
@given(random=randoms)
def test_results(folder: Path, random: Random) -> None:
    document = random.choice([RUN, RUN, TEXTS])
    content = damaged(document, random)
    if random.random() < 0.2:
        content = b'<script type="application/json" id="results">' + content + b"</script>"
    file = folder / "damaged.json"
    file.write_bytes(content)
    run = answer_of(lambda: RunResult.read(file))
    if run is not None:
        show(run, folder)
        combined = answer_of(lambda: merging.load([folder / "run.json", file]))
        if combined is not None:
            show(combined, folder)


WINDOW = Window.scored_from(0, np.arange(9, dtype=np.int32))
SCORES = TokenScores(0, np.linspace(-9, 0, 8, dtype=np.float32), top1=np.zeros(8, np.bool_))
STORE = Manifest(
    identity={"model": "m"},
    contents="states",
    reason="",
    head=Head(9, "bfloat16"),
    made=True,
    files={f"row.{'0' * 32}.{'0' * 40}.safetensors": 9},
)


@fuzzed
@given(random=randoms)
def test_scores_are_those_that_were_kept_or_none(
    tmp_path_factory: pytest.TempPathFactory, random: Random
) -> None:
    folder = tmp_path_factory.mktemp("scores")
    segments.commit(folder, segments.ALONE, [(WINDOW, SCORES)], "s", 1.0)
    segments.write_record(folder, "s", {"known": {}})
    for file in sorted(folder.iterdir()):
        file.write_bytes(damaged_bytes(file.read_bytes(), random))
    loaded = answer_of(lambda: segments.load(folder, segments.ALONE, [WINDOW]))
    records = answer_of(lambda: segments.records(folder))
    for scores in loaded.scores.values():
        assert np.array_equal(scores.logprob, SCORES.logprob)
    for record in records.values():
        assert record == {"known": {}}


@fuzzed
@given(random=randoms)
def test_manifests(tmp_path_factory: pytest.TempPathFactory, random: Random) -> None:
    folder = tmp_path_factory.getbasetemp() / "store"
    folder.mkdir(exist_ok=True)
    write_manifest(folder, STORE)
    content = (folder / STORE_MANIFEST).read_bytes()
    if random.random() < 0.5:
        content = damaged_bytes(content, random)
    else:
        content = damaged(json.loads(content), random)
    (folder / STORE_MANIFEST).write_bytes(content)
    manifest = answer_of(lambda: read_manifest(folder))
    assert manifest is None or manifest == STORE
