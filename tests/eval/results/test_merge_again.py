"""Finished runs in which a model stands twice: measured again, or measured where it had failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compare_q.eval.results import merging, results_json
from compare_q.eval.results.differences import best_labels, difference_or_reason
from compare_q.eval.results.run_result import ModelResult
from compare_q.eval.table.footnotes import footnotes
from tests.support.made import BASE, FAILED, QUANT, REF, with_ppl
from tests.support.toy import refusal
from tests.support.two_runs import FP8_B, GPU, IDENTITY, ON_GPU, QUANT_A, REF_A, Write, labels, merged, on

OTHER_VERSIONS = {**IDENTITY, "key": "b" * 40, "versions": "{'vllm': '0.27'}"}
AGAIN = on(REF, "ref again")
ELSEWHERE = with_ppl(AGAIN, replace(REF.ppl, logprob_sum=-80.5))


def test_references_with_the_same_scores_are_one(write: Write) -> None:
    """Whatever their versions are: KLDs against them are paired and starred as in one run."""
    awq = on(QUANT, "awq", label="AWQ")
    files = [write("a.json", REF_A, QUANT_A), write("b.json", AGAIN, awq, reference=OTHER_VERSIONS)]
    results, run = merged(files)
    assert labels(run) == ["bf16", "W4A16", "AWQ"]
    assert run.models[0].notes == ("b.json measured it as well, with the same scores to the last bit",)
    assert [model.reference_key for model in run.models] == [""] * 3
    assert [part.reference for part in results.parts] == [IDENTITY, {**OTHER_VERSIONS, "same_as": "a" * 40}]
    assert not isinstance(difference_or_reason(run.models[1], run.models[2], "kld"), str)
    assert best_labels(run.models, "kld") == {"W4A16", "AWQ"}


@pytest.mark.parametrize(
    ("again", "one", "other", "differ"),
    [
        (AGAIN, {}, {"version": 2}, "compare_q's method of measuring, versions"),
        (AGAIN, {}, {"reference": 2}, "versions, compare_q's method of recording"),
        (AGAIN, {}, {"vocabulary": "v"}, "versions, vocabulary"),
        (ELSEWHERE, {}, {}, "versions"),
        (ELSEWHERE, {"key": None}, {"key": None, "versions": None, "model": "n"}, "model"),
    ],
)
def test_references_that_are_two(
    write: Write, again: ModelResult, one: dict[str, object], other: dict[str, object], differ: str
) -> None:
    """The same scores do not hide another way of measuring; without a key nothing says that two are one."""
    first = write("a.json", REF_A, QUANT_A, reference={**IDENTITY, **one})
    changed = {name: value for name, value in {**OTHER_VERSIONS, **other}.items() if name == "key" or value is not None}
    second = write("b.json", again, FP8_B, reference=changed)
    assert f"which is another reference (they differ in {differ}); measure" in refusal(merging.load, [first, second])


def test_a_reference_measured_again_on_a_machine_of_the_same_kind(write: Write) -> None:
    """A GPU adds in another order each time: its rows keep the reference that they were compared with."""
    first = {**IDENTITY, "content": "c"}
    second = {**first, "model": "of another time", "key": "b" * 40}
    files = [write("a.json", REF_A, QUANT_A, reference=first), write("b.json", ELSEWHERE, FP8_B, reference=second)]
    _, run = merged(files)
    assert [model.reference_key[:1] for model in run.models] == ["a", "a", "b", "b"]
    assert "own run" in str(difference_or_reason(run.models[1], run.models[3], "kld"))


@pytest.mark.parametrize("order", [1, -1])
def test_a_failed_row_gives_way_to_a_measured_one(write: Write, order: int) -> None:
    """On another machine as well; the measured row's run has one row more, and a note tells of the failure."""
    broken, there = replace(FAILED, label="W4A16"), on(QUANT, "w2", GPU)
    first = write("a.json", REF_A, broken, FP8_B)
    second = write("b.json", on(REF, "r2", GPU), there, reference=ON_GPU)
    results, run = merged([first, second][::order])
    assert labels(run) == (
        ["bf16", "W4A16", "FP8", "bf16 (2)"] if order == 1 else ["bf16", "W4A16", "bf16 (2)", "FP8"]
    )  # fmt: skip
    assert run.models[1].ppl == QUANT.ppl
    assert run.models[1].reference_key == ON_GPU["key"]
    assert run.models[1].notes == ("failed in a.json, on AMD EPYC: told to fail",)
    assert sorted((part.file, len(part.labels)) for part in results.parts) == [("a.json", 2), ("b.json", 2)]


def test_rows_of_one_label_with_other_scores_stay_two(write: Write) -> None:
    """Of the same perplexity, but of another KLD: another model."""
    other = replace(QUANT.estimates.against, kld=replace(QUANT.kld, total=0.5))
    second = on(replace(QUANT, estimates=replace(QUANT.estimates, against=other)), "w5")
    _, run = merged([write("a.json", REF_A, QUANT_A), write("b.json", AGAIN, second, reference=OTHER_VERSIONS)])
    assert labels(run) == ["bf16", "W4A16", "W4A16 (2)"]


def test_a_row_measured_without_a_reference_takes_a_failed_ones_place(write: Write) -> None:
    first = write("a.json", REF_A, replace(FAILED, label="base"))
    _, run = merged([first, write("b.json", on(BASE, "base"), reference=None)])
    assert (labels(run), run.models[1].error) == (["bf16", "base"], "")
    assert run.models[1].notes == (
        "no KLD: b.json has no reference; measure it again with one", "failed in a.json, on AMD EPYC: told to fail",
    )  # fmt: skip


@pytest.mark.parametrize("changed", [{"engine": "other"}, {"spec": {"model_dir": "/m/other"}}])
def test_a_failed_row_of_another_model_stays(write: Write, changed: dict[str, object]) -> None:
    failed = replace(FAILED, label="W4A16", spec={"model_dir": "/n/w4"})
    measured = write("b.json", REF_A, replace(QUANT_A, spec={"model_dir": "/m/w4"}))
    other = replace(failed, **changed)  # type: ignore[arg-type]
    assert labels(merged([write("a.json", REF_A, other), measured])[1]) == ["bf16", "W4A16", "W4A16 (2)"]
    assert labels(merged([write("a.json", REF_A, failed), measured])[1]) == ["bf16", "W4A16"]


def test_the_same_reference_in_three_files_in_any_grouping(write: Write, tmp_path: Path) -> None:
    """The third run has only a reference store, of the second's key, and so no row of the reference."""
    first, second = write("a.json", REF_A, QUANT_A), write("b.json", AGAIN, FP8_B, reference=OTHER_VERSIONS)
    third = write("c.json", on(QUANT, "awq", label="AWQ"), reference=OTHER_VERSIONS)
    two = tmp_path / "two.json"
    results_json.write_json(merging.load([first, second])[0], two, ["x"])
    for files in ([first, second, third], [first, third, second], [two, third], [third, two], [third, first, second]):
        results, run = merged(files)
        assert sorted(labels(run)) == ["AWQ", "FP8", "W4A16", "bf16"]
        assert {model.reference_key for model in run.models} == {""}
        assert not any("own run" in note for note in footnotes(run, results.parts))


def test_a_reference_that_came_as_a_plain_row_keeps_its_key(write: Write, tmp_path: Path) -> None:
    """c has the second machine's bf16 without a reference; a later run against that reference stays apart from a's."""
    there = on(ELSEWHERE, "ref there", GPU)
    first = write("a.json", REF_A, QUANT_A)
    bare = write("c.json", replace(there, is_reference=False), reference=None, hardware=GPU)
    second = write("b.json", there, on(FP8_B, "fp8", GPU), reference=ON_GPU, hardware=GPU)
    results_json.write_json(merging.load([first, bare, second])[0], tmp_path / "m.json", ["x"])
    later = write("d.json", there, on(QUANT, "awq", GPU, label="AWQ"), reference=ON_GPU, hardware=GPU)
    _, run = merged([tmp_path / "m.json", later])
    keys = {model.label: model.reference_key[:1] for model in run.models}
    assert keys == {"bf16": "a", "W4A16": "a", "bf16 (2)": "b", "FP8": "b", "AWQ": "b"}
    rows = {model.label: model for model in run.models}
    assert "own run" in str(difference_or_reason(rows["W4A16"], rows["AWQ"], "kld"))
