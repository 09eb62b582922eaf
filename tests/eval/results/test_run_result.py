"""What a row and a run say of themselves: where a row's seconds went, and how its numbers are rounded."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from compare_q.backends.base import Storage
from compare_q.eval.results import MARK, ModelResult, RunResult, TextResult, Timing
from compare_q.eval.run.token_scores import timing_of
from compare_q.eval.stats.estimates import Estimates, summarize
from compare_q.eval.stats.uncertainty import Perplexity
from compare_q.eval.table import numbers, render
from tests.support.made import BASE, FAILED, QUANT, REF, replace, results_of, run_of, text_result, with_against


def scored(kld: float) -> Estimates:
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
    return ModelResult.of(label, "fake", spec=spec, estimates=scored(kld))


def run(*models: ModelResult) -> TextResult:
    return text_result("text", {}, "", models)


def test_the_noise_floor_is_the_row_whose_spec_says_so() -> None:
    """Of several the largest KLD; not one that failed or has no KLD, nor a row with a larger one that is none."""
    other = ModelResult.of("other", "fake", spec={"noise_floor": False}, estimates=scored(0.5))
    assert not other.noise_floor
    assert run(other).noise_floor is None
    small, large = floor("small", 0.001), floor("large", 0.01)
    assert run(other, small, large, floor("failed", None)).noise_floor == large
    assert run(large, small).noise_floor == large
    assert run(floor("failed", None)).noise_floor is None
    assert run(floor("no KLD is finite", np.nan)).noise_floor is None
    alone = ModelResult.of("reference", "fake", spec={"noise_floor": True}, estimates=summarize(
        {"logprob": np.full(2, -1, np.float32)}, np.arange(2), np.arange(2)))  # fmt: skip
    assert run(alone).noise_floor is None
    same = floor("the reference again, bit for bit the same", 0.0)
    assert run(same).noise_floor == same


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
    assert TIMED.seconds == PARTS
    assert replace(TIMED, closed=None).seconds == {**PARTS, "close": None}


def test_of_replicas_the_first_begins_and_the_last_ends() -> None:
    one: dict[str, Any] = vars(TIMED)
    other = {**one, "started": 111.0, "loaded": 116.0, "first_window": 118.0, "last_window": 130.0, "closed": 131.0}
    assert timing_of([one]) == TIMED
    assert timing_of([one, other]) == replace(TIMED, loaded=116.0, last_window=130.0, closed=131.0)
    open_still = {name: at for name, at in other.items() if name != "closed"}
    assert timing_of([one, open_still]) == replace(TIMED, loaded=116.0, last_window=130.0, closed=None)
    assert timing_of([one, {}]) is timing_of([]) is None  # records of compare_q 0.2


def test_a_second_text_waits_for_no_load() -> None:
    """Of replicas, one of which was ready earlier than the other one."""
    found = [{**vars(TIMED), "started": at, "loaded": at} for at in (112.0, 115.0)]
    assert timing_of(found) == replace(TIMED, started=115.0)


def test_results_there_and_back(tmp_path: Path) -> None:
    run = run_of(replace(BASE, timing=TIMED), replace(QUANT, timing=None), FAILED)
    results_of(run).with_origin([]).write(tmp_path / "r.json")
    found = RunResult.read(tmp_path / "r.json")
    assert [model.timing for model in found.texts[0].models] == [TIMED, None, None]
    assert found.texts[0].models[0].seconds == PARTS


def test_tables() -> None:
    run = results_of(
        run_of(
            replace(BASE, timing=TIMED), replace(QUANT, timing=replace(TIMED, started=100.0), from_cache=True), FAILED
        )
    )
    console = Console(width=100, file=io.StringIO(), record=True)
    render.show_timing(run, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["base", "5.0", "1.5", "10.0", "1.5"] in lines
    assert ["W4A16*", "15.0", "1.5", "10.0", "1.5"] in lines
    assert render.markdown_text(run, timing=True).splitlines()[-4:] == [
        "| label | load s | first step s | scoring s | close s |",
        "| :-- | --: | --: | --: | --: |",
        "| base | 5.0 | 1.5 | 10.0 | 1.5 |",
        "| W4A16\\* | 15.0 | 1.5 | 10.0 | 1.5 |",
    ]


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        (0.852, "0.85"), (12.34, "12"), (123.4, "120"), (1234.0, "1,200"), (3.55, "3.5"), (9.96, "10"),
        (0.0996, "0.10"), (0.000452, "0.00045"), (0.0001, "0.00010"), (0.0000999, "1.0e-4"), (0.00000446, "4.5e-6"),
        (1e-12, "1.0e-12"),
        (0.0, "0"), (None, ""),
    ],
)  # fmt: skip
def test_errors_have_two_significant_digits(stderr: float | None, text: str) -> None:
    """3.55 is 3.54999... in binary."""
    assert numbers.error_text(stderr) == text
