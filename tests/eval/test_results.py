"""Rows, runs, results.json and CSV, of hand-made results of one text and of several."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q import __version__
from compare_q.backends.base import Storage
from compare_q.backends.common.messages import printable
from compare_q.eval import results
from compare_q.eval.results import MARK, ModelResult, RunResult, TextResult, Timing
from compare_q.eval.run.token_scores import timing_of
from compare_q.eval.stats.estimates import Estimates, summarize
from compare_q.eval.stats.uncertainty import Mean, Perplexity
from compare_q.eval.table.render import csv_text
from tests.support.made import (
    AGAINST,
    BASE,
    FAILED,
    PPL,
    QUANT,
    REF,
    REFERENCE,
    raw_of,
    read_back,
    replace,
    results_of,
    run_of,
    run_result,
    storage_of,
    text_result,
    with_against,
    with_ppl,
)
from tests.support.toy import refusal

CODE = with_against(
    with_ppl(QUANT, replace(PPL, value=30.0, stderr=3.0)),
    kld=replace(AGAINST.kld, value=0.04),
)
TEXTS = run_result(
    (
        replace(run_of(REF, QUANT, FAILED), name="prose"),
        replace(run_of(REF, CODE, FAILED), name="code"),
    ),
    "a title",
)
BROKEN = replace(TEXTS, texts=(*TEXTS.texts, text_result("chat", error="no conversation has a token that is scored")))


def written(text: TextResult, folder: Path) -> dict[str, Any]:
    """The only text in results.json, read strictly: NaN and Infinity are no JSON."""
    results_of(text).with_origin(["compare_q.py"]).write(folder / "r.json")
    content = (folder / "r.json").read_text()
    found: dict[str, Any] = json.loads(content, parse_constant=lambda word: pytest.fail(word))
    return dict(found["texts"][0])


def json_of(text: TextResult) -> dict[str, Any]:
    """results.json of a run of one text."""
    return dict(raw_of(results_of(text), ["x"]))


def scored(seed: int) -> ModelResult:
    """A model with estimates of 500 scores, some of them not finite."""
    random = np.random.default_rng(seed)
    columns = {
        name: -random.exponential(size=500).astype(np.float32)
        for name in ("logprob", "ref_logprob", "ref_top1_logprob")
    }
    columns |= {"kld": random.exponential(size=500).astype(np.float32), "same_top": random.random(500) < 0.9}
    columns["logprob"][7] = -np.inf
    columns["kld"][:3] = np.nan
    estimates = summarize(columns, np.arange(500), np.arange(1, 501), (2000.0, 300.0))
    return replace(
        QUANT,
        label=f"seed {seed}",
        estimates=estimates,
        scores_key="ab",
        spec={"noise_floor": True, "engine": {"a": [1]}},
    )


def test_flat_statistics(tmp_path: Path) -> None:
    reference, quant, failed = written(run_of(REF, QUANT, FAILED), tmp_path)["models"]
    expected = {
        "ppl_stderr": 0.852, "ppl_stderr_independent": 0.0123, "ln_ppl_ratio": 0.0339, "ln_ppl_ratio_stderr": 0.002,
        "kld_stderr": 0.000452, "kld_median": 0.5, "kld_p99": 0.99, "kld_max": 2.0, "same_top_stderr": 0.00521,
        "bits_per_byte": 1.25, "byte_perplexity": 2.378, "word_perplexity": 55.5,
    }  # fmt: skip
    assert {key: quant[key] for key in expected} == expected
    alone = {"ppl_stderr", "ppl_stderr_independent", "bits_per_byte", "byte_perplexity", "word_perplexity"}
    assert {key for key in expected if reference[key] is not None} == alone
    assert not any(failed[key] is not None for key in expected)
    assert written(run_of(replace(BASE, spec={"noise_floor": True})), tmp_path)["models"][0]["noise_floor"] is True
    assert reference["noise_floor"] is False


def test_non_finite_kld(tmp_path: Path) -> None:
    some, none = (with_against(QUANT, kld=found) for found in (Mean(0.5, 4.0, 8, 2), Mean(None, 0.0, 0, 10)))
    _, first, second = written(run_of(REF, some, none), tmp_path)["models"]
    assert [first[key] for key in ("kld", "kld_sum", "kld_tokens", "kld_non_finite")] == [0.5, 4.0, 8, 2]
    assert [second[key] for key in ("kld", "kld_sum", "kld_tokens", "kld_non_finite")] == [None, 0.0, 0, 10]


@pytest.mark.parametrize("reference", [None, REFERENCE])
def test_a_run_comes_back_as_it_was(tmp_path: Path, reference: dict[str, Any] | None) -> None:
    """Every field of every model: floats to the last bit, tuples as tuples."""
    failed = replace(FAILED, notes=("a", "b"), reference=True)
    cached = replace(
        REF,
        from_cache=True,
        scores_key="k",
        storage=replace(storage_of(REF), bpw_head=None, note="unknown", file_bytes=7),
    )
    run = run_of(cached, QUANT, failed, BASE, scored(1), scored(2), reference=reference)
    written(run, tmp_path)
    found = RunResult.read(tmp_path / "r.json")
    assert found.texts == (run,)
    assert list(found.labels) == ["bf16", "W4A16", "broken", "base", "seed 1", "seed 2"]


def test_copies_keep_what_made_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is read back and written on another machine says where it ran, not where it was copied."""
    written(run_of(REF, QUANT), tmp_path)
    found = RunResult.read(tmp_path / "r.json")
    monkeypatch.setattr(results.machine, "versions", lambda: {"python": "0"})
    assert json_of(run_of(REF))["versions"] == {"python": "0", "compare-q": __version__}
    again = raw_of(found, ["other"])
    assert again == json.loads((tmp_path / "r.json").read_text())


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "<html></html>", '<script type="application/json" id="results">{}</script>']
)
def test_files_that_are_no_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    assert refusal(RunResult.read, tmp_path / "x").startswith(f"{tmp_path / 'x'}: n")


def test_csv_is_flat() -> None:
    text = csv_text(results_of(run_of(FAILED, REF, replace(QUANT, notes=("a, b", "c")))))
    failed, reference, quant = csv.DictReader(io.StringIO(text, newline=""))
    assert (reference["reference"], reference["kld"], reference["kld_sum"]) == ("True", "0.0", "")
    errors = ("ppl_stderr", "ln_ppl_ratio_stderr")
    assert [quant[key] for key in ("kld", "kld_stderr", "kld_p99", "same_top", *errors)] == [
        "0.01234567", "0.000452", "0.99", "0.98765", "0.852", "0.002",
    ]  # fmt: skip
    assert (quant["entropy"], quant["notes"], quant["noise_floor"]) == ("1.25", "a, b; c", "False")
    assert (failed["kld"], failed["error"]) == ("", "told to fail")
    assert not {"spec", "provenance", "estimates"} & quant.keys()


@pytest.mark.parametrize("sign", [*"=+-@\t", "＝", "＋"])
def test_no_cell_of_a_csv_is_a_formula(tmp_path: Path, sign: str) -> None:
    """Text that a spreadsheet would run has an apostrophe before it; a number below zero stays one."""
    text = f"{sign}HYPERLINK(A1)"
    told = replace(QUANT, label=text, notes=(text,), windows=3)
    result = results_of(replace(run_of(REF, told), name=text), text_result("failed", error=text))
    rows = list(csv.reader(io.StringIO(csv_text(result), newline="")))
    for cell in (cell for row in rows for cell in row if "HYPERLINK" in cell):
        assert cell == f"'{printable(text)}"
    assert [sum(cell.startswith("'") for cell in row) for row in rows] == [0, 1, 3, 1]
    assert "-80.0" in rows[2]


def test_several_texts_come_back_as_they_were(tmp_path: Path) -> None:
    for result in (TEXTS, BROKEN):
        raw = raw_of(result, ["compare-q"])
        assert (raw["format"], raw["command"], raw["title"]) == (8, ["compare-q"], "a title")
        again = read_back(raw, tmp_path)
        assert again.texts == result.texts
        assert raw_of(again, ["another"]) == raw


def test_means_are_worked_out_by_hand() -> None:
    found = {each["label"]: each for each in raw_of(TEXTS, ["x"])["means"]}
    quant = found["W4A16"]
    assert quant["mean_kld"] == pytest.approx((0.01234567 + 0.04) / 2)
    assert quant["mean_kld_stderr"] == pytest.approx((2 * 0.000452**2) ** 0.5 / 2)
    assert quant["mean_ppl"] == pytest.approx((7.5 * 30) ** 0.5)  # 15
    relative = ((0.852 / 7.5) ** 2 + 0.1**2) ** 0.5 / 2
    assert quant["mean_ppl_stderr"] == pytest.approx(15 * relative)
    assert (found["bf16"]["mean_kld"], found["bf16"]["mean_kld_stderr"]) == (0.0, None)
    assert found["broken"]["mean_ppl"] is None
    without = {each["label"]: each for each in raw_of(BROKEN, ["x"])["means"]}
    assert without["W4A16"]["mean_kld"] is None  # a mean over some of the texts would look like one over all


def test_a_file_is_read_whatever_it_holds(tmp_path: Path) -> None:
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    run_result(TEXTS.texts[:1]).with_origin(["x"]).write(one)
    TEXTS.with_origin(["x"]).write(many)
    assert results.load([one]).texts[0].subtitle == "letters"
    assert [text.name for text in results.load([many]).texts] == ["prose", "code"]
    assert "number of texts" in refusal(results.load, [one, many])


def test_csv_has_a_line_for_each_text_and_model() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(BROKEN))))
    assert [(row["text"], row["label"]) for row in rows] == [
        *(("prose", label) for label in ("bf16", "W4A16", "broken")),
        *(("code", label) for label in ("bf16", "W4A16", "broken")),
        ("chat", ""),
    ]
    assert rows[-1]["error"] == "no conversation has a token that is scored"
    assert {float(row["kld"]) for row in rows if row["label"] == "W4A16"} == {0.01234567, 0.04}
    chosen = csv_text(TEXTS, ["label", "kld"]).splitlines()
    assert chosen[:3] == ["text,label,kld", "prose,bf16,0.0", "prose,W4A16,0.01234567"]


def three_tokens(kld: float) -> Estimates:
    """Three tokens against a reference, of this KLD each."""
    half = np.log(np.full(3, 0.5, np.float32))
    columns = {
        "logprob": half, "ref_logprob": half, "ref_top1_logprob": half, "kld": np.full(3, kld, np.float32),
        "same_top": np.ones(3, np.bool_),
    }  # fmt: skip
    return summarize(columns, np.arange(3), np.arange(1, 4))


def floor(label: str, kld: float | None) -> ModelResult:
    """A row that its spec calls the noise floor; failed if there is no KLD."""
    spec = {"noise_floor": True}
    if kld is None:
        return ModelResult.of(label, "fake", spec=spec, error="no")
    return ModelResult.of(label, "fake", spec=spec, estimates=three_tokens(kld))


def text_of(*models: ModelResult) -> TextResult:
    return text_result("text", {}, "", models)


def test_the_noise_floor_is_the_row_whose_spec_says_so() -> None:
    """Of several the largest KLD; not one that failed or has no KLD, nor a row with a larger one that is none."""
    other = ModelResult.of("other", "fake", spec={"noise_floor": False}, estimates=three_tokens(0.5))
    assert not other.noise_floor
    assert text_of(other).noise_floor is None
    small, large = floor("small", 0.001), floor("large", 0.01)
    assert text_of(other, small, large, floor("failed", None)).noise_floor == large
    assert text_of(large, small).noise_floor == large
    assert text_of(floor("failed", None)).noise_floor is None
    assert text_of(floor("no KLD is finite", np.nan)).noise_floor is None
    alone = ModelResult.of("reference", "fake", spec={"noise_floor": True}, estimates=summarize(
        {"logprob": np.full(2, -1, np.float32)}, np.arange(2), np.arange(2)))  # fmt: skip
    assert text_of(alone).noise_floor is None
    same = floor("the reference again, bit for bit the same", 0.0)
    assert text_of(same).noise_floor == same


def test_a_deviation_marks_the_label() -> None:
    """NVFP4 weights whose activations were to be NVFP4 and stayed bfloat16."""
    group = {"layers": "*.q_proj", "count": 3, "weights": "nvfp4 g16", "activations": "bfloat16", "kernel": "Marlin",
             "asked": "nvfp4"}  # fmt: skip
    row = ModelResult.of("a", "fake", provenance={"layers": [group]})
    assert len(row.deviation_clauses) == 1
    assert row.marked_label == f"a {MARK}"
    assert ModelResult.of("a", "fake").marked_label == "a"


def test_a_reference_without_a_row_has_the_perplexity_of_most_of_its_tokens() -> None:
    fewer = with_against(QUANT, ref_ppl=Perplexity(6.0, -70.0, 39, 1))
    assert run_of(fewer, QUANT).reference_ppl == 7.25
    assert run_of(fewer, QUANT, REF).reference_ppl == 7.5
    assert run_of(with_against(QUANT, ref_ppl=Perplexity(None, -1e9, 40, 0))).reference_ppl is None


@pytest.mark.parametrize(("bpw", "weights", "quantized"), [
    (16.0, ["int4 g128"], False), (32.0, [], False), (8.02, ["bfloat16"], True), (None, [], True),
    (None, ["bfloat16", "float32"], False), (None, ["bfloat16", "nvfp4 g16"], True),
])  # fmt: skip
def test_what_is_quantized(bpw: float | None, weights: list[str], quantized: bool) -> None:
    """The size decides, or else the layers' weights; a row of which nothing is known counts as quantized."""
    layers = [{"layers": "a", "count": 1, "weights": each, "activations": "bfloat16", "kernel": "K", "asked": ""}
              for each in weights]  # fmt: skip
    assert replace(QUANT, storage=Storage(bpw), provenance={"layers": layers}).is_quantized == quantized


TIMED = Timing(110.0, 115.0, 116.0, 117.5, 127.5, 129.0)
PARTS = {"load": 5.0, "first_step": 1.5, "scoring": 10.0, "close": 1.5}


def test_the_parts_of_a_workers_life() -> None:
    assert replace(BASE, timing=TIMED).seconds == TIMED.seconds == PARTS
    assert replace(TIMED, closed=None).seconds == {**PARTS, "close": None}


def test_of_replicas_the_first_begins_and_the_last_ends() -> None:
    one: dict[str, Any] = vars(TIMED)
    other = {**one, "started": 111.0, "loaded": 116.0, "first_window": 118.0, "last_window": 130.0, "closed": 131.0}
    assert timing_of([one]) == TIMED
    assert timing_of([one, other]) == replace(TIMED, loaded=116.0, last_window=130.0, closed=131.0)
    open_still = {name: at for name, at in other.items() if name != "closed"}
    assert timing_of([one, open_still]) == replace(TIMED, loaded=116.0, last_window=130.0, closed=None)
    assert timing_of([one, {}]) is timing_of([]) is None  # records of compare_q 0.2


def test_moments_of_replicas_that_overlap_and_of_a_clock_that_was_set_back_are_in_order() -> None:
    one: dict[str, Any] = vars(TIMED)
    late = {**one, "loaded": 119.0, "score_began": 120.0, "first_window": 121.0}
    found = timing_of([one, late])
    assert found == Timing(110.0, 119.0, 119.0, 119.0, 127.5, 129.0)
    back = timing_of([{**one, "first_window": 100.0}])
    assert back == replace(TIMED, first_window=116.0)
    assert min(each for each in back.seconds.values() if each is not None) >= 0


def test_a_second_text_waits_for_no_load() -> None:
    """Of replicas, one of which was ready earlier than the other one."""
    found = [{**vars(TIMED), "started": at, "loaded": at} for at in (112.0, 115.0)]
    assert timing_of(found) == replace(TIMED, started=115.0)
