"""Rows, runs and results.json, from runs of one or several texts that are made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q import __version__
from compare_q.backends.base import Storage
from compare_q.backends.common import machine
from compare_q.eval.results import MARK, ModelResult, RunResult, Timing, deviations_of
from compare_q.eval.run.stored_scores import timing_of
from compare_q.eval.stats.row_statistics import statistics_of
from compare_q.eval.stats.slices import Slice
from compare_q.eval.stats.uncertainty import Mean, Perplexity, assign_blocks
from tests.support.made import (
    BASE,
    FAILED,
    LAYERS,
    QUANT,
    RECORD,
    REF,
    REFERENCE,
    SIZE,
    raw_of,
    read_back,
    replace,
    row,
    run_of,
    storage_of,
    with_against,
)
from tests.support.several_texts import TEXT_NAMES, three
from tests.support.toy import refusal


def written(run: RunResult) -> list[dict[str, Any]]:
    """Return the rows in results.json, read strictly: NaN and Infinity are not valid JSON."""
    content = run.with_origin(["compare_q.py"]).json_text()
    raw: dict[str, Any] = json.loads(content, parse_constant=lambda word: pytest.fail(word))
    return list(raw["models"])


def scored(seed: int) -> ModelResult:
    """Return a model with the statistics of 500 scores, some of them not finite."""
    random = np.random.default_rng(seed)
    columns = {}
    for name in ("logprob", "ref_logprob", "ref_top1_logprob"):
        columns[name] = -random.exponential(size=500).astype(np.float32)
    columns["kld"] = random.exponential(size=500).astype(np.float32)
    columns["same_top"] = random.random(500) < 0.9
    columns["logprob"][7] = -np.inf
    columns["kld"][:3] = np.nan
    assignment = assign_blocks(np.arange(500))
    statistics = statistics_of(columns, assignment, np.arange(1, 501), (2000.0, 300.0))
    spec = {"noise_floor": True, "engine": {"a": [1]}}
    return row(f"seed {seed}", statistics, SIZE, **RECORD, scores_key="ab", spec=spec)


def test_flat_statistics() -> None:
    some = with_against(QUANT, kld=Mean(0.5, 4.0, 8, 2))
    none = with_against(QUANT, kld=Mean(None, 0.0, 0, 10))
    floor = replace(BASE, spec={"noise_floor": True})
    run = run_of(REF, QUANT, FAILED, some, none, floor)
    reference, quant, failed, first, second, floor_row = written(run)
    expected = {
        "ppl_stderr": 0.852,
        "ppl_stderr_independent": 0.0123,
        "ln_ppl_ratio": 0.0339,
        "ln_ppl_ratio_stderr": 0.002,
        "kld_stderr": 0.000452,
        "kld_median": 0.5,
        "kld_p99": 0.99,
        "kld_max": 2.0,
        "same_top_stderr": 0.00521,
        "bits_per_byte": 1.25,
        "byte_perplexity": 2.378,
        "word_perplexity": 55.5,
    }
    assert {key: quant[key] for key in expected} == expected
    alone = {
        "ppl_stderr",
        "ppl_stderr_independent",
        "bits_per_byte",
        "byte_perplexity",
        "word_perplexity",
    }
    assert {key for key in expected if reference[key] is not None} == alone
    assert all(failed[key] is None for key in expected)
    assert (reference["noise_floor"], floor_row["noise_floor"]) == (False, True)
    names = ("kld", "kld_sum", "kld_tokens", "kld_non_finite")
    assert [first[name] for name in names] == [0.5, 4.0, 8, 2]
    assert [second[name] for name in names] == [None, 0.0, 0, 10]


@pytest.mark.parametrize("reference", [None, REFERENCE])
def test_a_run_comes_back_as_it_was(tmp_path: Path, reference: dict[str, Any] | None) -> None:
    """Every field of every model is the same: floats to the last bit, tuples as tuples."""
    failed = replace(FAILED, notes=("a", "b"), reference=True)
    size = replace(storage_of(REF), bpw_head=None, note="unknown", file_bytes=7)
    cached = replace(REF, from_cache=True, scores_key="k", storage=size)
    run = run_of(cached, QUANT, failed, BASE, scored(1), scored(2), reference=reference)
    run = run.with_origin(["x"])
    run.write(tmp_path / "r.json")
    stored = RunResult.read(tmp_path / "r.json")
    assert stored == run
    assert list(stored.labels) == ["bf16", "W4A16", "broken", "base", "seed 1", "seed 2"]


def test_copies_keep_what_made_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is read and written again on another machine keeps the machine on which it ran."""
    run = three().updated(title="a title")
    raw = raw_of(run, ["first"])
    assert (raw["format"], raw["command"], raw["title"]) == (10, ["first"], "a title")
    monkeypatch.setattr(machine, "versions", lambda: {"python": "0"})
    assert raw_of(run)["versions"] == {"python": "0", "compare-q": __version__}
    assert read_back(raw, tmp_path).models == run.models
    assert raw_of(read_back(raw, tmp_path), ["other"]) == raw


def test_each_kld_of_format_9_is_exact(tmp_path: Path) -> None:
    bound = replace(QUANT, kld_kind="bound")
    run = run_of(REF, bound).with_origin(["x"])
    raw = raw_of(run)
    assert [row["kld_kind"] for row in raw["models"]] == ["exact", "bound"]
    for model in raw["models"]:
        del model["kld_kind"]
    read = read_back({**raw, "format": 9}, tmp_path)
    assert [row.kld_kind for row in read.models] == ["exact", "exact"]
    assert raw_of(read)["format"] == 10
    assert refusal(read_back, {**raw, "format": 8}, tmp_path).endswith("are used)")


@pytest.mark.parametrize(
    "text", ["", "[]", "<html></html>", '<script type="application/json" id="results">{}</script>']
)
def test_files_that_are_no_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    assert refusal(RunResult.read, tmp_path / "x").startswith(f"{tmp_path / 'x'}: n")


def test_a_page_of_opening_tags_is_read_once(tmp_path: Path) -> None:
    """Searching for an end from each of 200,000 tags would take hours."""
    file = tmp_path / "o.html"
    file.write_text('<script type="application/json" id="results">' * 200_000)
    assert refusal(RunResult.read, file).startswith(f"{file}: ")


def test_texts_and_slices_of_a_run() -> None:
    """A run has the slices of all its rows, and the tokens and windows of all texts, if known."""
    run = three()
    assert run.slices == TEXT_NAMES
    only = replace(QUANT, slices={"special": Slice(3)})
    assert run.updated(models=(only, *run.models)).slices == ("special", *TEXT_NAMES)
    first = {"name": "a", "windows": 3, "text_tokens": 5}
    second = {"name": "b", "windows": 4, "windows_of_the_text": 9}
    run = run_of(REF, QUANT, texts=[first, {**second, "text_tokens": 7}])
    # 5 + 7 tokens, and 3 + 9 windows.
    assert (run.text_tokens, run.available_windows, run.is_sample) == (12, 12, True)
    run = run_of(REF, QUANT, texts=[first, {**second, "windows_of_the_text": None}])
    assert (run.text_tokens, run.available_windows, run.is_sample) == (None, 7, False)


def test_a_deviation_marks_the_label() -> None:
    """The checkpoint requests NVFP4 activations, but they stayed bfloat16."""
    group = {
        "layers": "*.q_proj",
        "count": 3,
        "weights": "nvfp4 g16",
        "activations": "bfloat16",
        "kernel": "Marlin",
        "asked": "nvfp4",
    }
    row = ModelResult.of("a", "fake", provenance={"layers": [group]})
    assert (len(deviations_of(row.provenance)), row.marked_label) == (1, f"a {MARK}")
    assert ModelResult.of("a", "fake").marked_label == "a"


def test_a_reference_without_a_row_has_the_perplexity_of_most_of_its_tokens() -> None:
    fewer = with_against(QUANT, ref_ppl=Perplexity(6.0, -70.0, 39, 1))
    # 7.25 is from 40 tokens, and 6.0 from 39.
    assert run_of(fewer, QUANT).reference_ppl == 7.25
    assert run_of(fewer, QUANT, REF).reference_ppl == 7.5
    assert run_of(with_against(QUANT, ref_ppl=Perplexity(None, -1e9, 40, 0))).reference_ppl is None


@pytest.mark.parametrize(
    ("bpw", "weights", "quantized"),
    [
        (16.0, ["int4 g128"], False),
        (32.0, [], False),
        (8.02, ["bfloat16"], True),
        (None, [], True),
        (None, ["bfloat16", "float32"], False),
        (None, ["bfloat16", "nvfp4 g16"], True),
    ],
)
def test_what_is_quantized(bpw: float | None, weights: list[str], quantized: bool) -> None:
    """The size decides, or if unknown, the layers' weights; without both, a row is quantized."""
    layers = [{**LAYERS, "weights": weights_of_layer} for weights_of_layer in weights]
    row = replace(QUANT, storage=Storage(bpw), provenance={"layers": layers})
    assert row.is_quantized == quantized


TIMED = Timing(110.0, 115.0, 116.0, 117.5, 127.5, 129.0)
ONE: dict[str, Any] = vars(TIMED)
OTHER = {
    **ONE,
    "started": 111.0,
    "loaded": 116.0,
    "first_window": 118.0,
    "last_window": 130.0,
    "closed": 131.0,
}


def test_the_parts_of_a_workers_life() -> None:
    # 115 - 110, 117.5 - 116, 127.5 - 117.5 and 129 - 127.5.
    parts = {"load": 5.0, "first_step": 1.5, "scoring": 10.0, "close": 1.5}
    assert replace(BASE, timing=TIMED).seconds == TIMED.seconds == parts
    assert replace(TIMED, closed=None).seconds == {**parts, "close": None}


@pytest.mark.parametrize(
    ("records", "timing"),
    [
        # the first replica begins, the last one ends
        ([ONE], TIMED),
        ([ONE, OTHER], replace(TIMED, loaded=116.0, last_window=130.0, closed=131.0)),
        (
            [ONE, {name: at for name, at in OTHER.items() if name != "closed"}],
            replace(TIMED, loaded=116.0, last_window=130.0, closed=None),
        ),
        ([], None),
        # Records of compare_q 0.2.
        ([ONE, {}], None),
        # times of overlapping replicas, or of a clock that was set back, are put in order
        (
            [ONE, {**ONE, "loaded": 119.0, "score_began": 120.0, "first_window": 121.0}],
            Timing(110.0, 119.0, 119.0, 119.0, 127.5, 129.0),
        ),
        ([{**ONE, "first_window": 100.0}], replace(TIMED, first_window=116.0)),
        # a second text does not wait for loading; its replicas were ready at different times
        (
            [{**ONE, "started": at, "loaded": at} for at in (112.0, 115.0)],
            replace(TIMED, started=115.0),
        ),
    ],
)
def test_timing_of_the_records_of_workers(
    records: list[dict[str, Any]], timing: Timing | None
) -> None:
    assert timing_of(records) == timing
