"""Several finished runs as one: which rows, which reference, what is refused in one line; and runs in which a model
stands twice: measured again, or measured where it had failed."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from compare_q.eval.results import merging, results_json
from compare_q.eval.results.differences import best_labels, difference_or_reason
from compare_q.eval.results.run_result import Damaged, Inspection, ModelResult, Passage
from compare_q.eval.table.columns import filled, machine_letters
from compare_q.eval.table.footnotes import footnotes
from tests.support.command_line import Run, Specs
from tests.support.made import BASE, FAILED, KLD_BLOCKS, QUANT, REF, with_ppl, with_sums
from tests.support.toy import refusal
from tests.support.two_runs import FP8_B, GPU, IDENTITY, ON_GPU, QUANT_A, REF_A, Write, labels, merged, on, writer


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a results.json as another machine would."""
    return writer(tmp_path)


def test_one_file_is_as_it_is(write: Write) -> None:
    file = write("a.json", REF_A, QUANT_A)
    assert merging.load([file]) == results_json.load(file)


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_with_divergences_stands_for_the_same_without(write: Write, order: int) -> None:
    more = on(QUANT, "w4-more", notes=("with divergences",))
    files = [write("a.json", REF_A, QUANT_A), write("b.json", REF_A, more)]
    _, run = merged(files[::order])
    assert run.models == (REF_A, more)


def test_the_same_row_appears_once(write: Write) -> None:
    results, run = merged([write("a.json", REF_A, QUANT_A), write("b.json", REF_A, FP8_B, QUANT_A)])
    assert labels(run) == ["bf16", "W4A16", "FP8"]
    assert [model.is_reference for model in run.models] == [True, False, False]
    assert run.models == (REF_A, QUANT_A, FP8_B)
    assert run.reference == IDENTITY
    assert [(part.file, part.labels) for part in results.parts] == [("a.json", ("bf16", "W4A16")), ("b.json", ("FP8",))]
    assert footnotes(run, results.parts)[0] == (
        "merged from 2 runs: a.json (2026-11-20, AMD EPYC; rows: 2); b.json (2026-11-20, AMD EPYC; rows: 1)"
    )


def test_the_same_row_under_two_names_or_with_two_numbers_says_so(write: Write) -> None:
    """A GPU adds in another order each time; a key stands for one model and machine, not for its last digits."""
    again = with_ppl(replace(QUANT_A, label="int4"), replace(QUANT_A.ppl, value=7.5001))
    _, run = merged([write("a.json", REF_A, QUANT_A), write("b.json", REF_A, again)])
    assert run.models[1].notes == ("called 'int4' in b.json", "b.json measured it as well, with PPL 7.5001")
    assert labels(run) == ["bf16", "W4A16"]


def test_other_rows_of_one_label_are_told_apart(write: Write) -> None:
    """But not rows that failed in both runs, of which no machine is known but that of their run."""
    first = write("x/results.json", REF_A, QUANT_A, FAILED)
    second = write("y/results.json", on(REF, "r2", GPU), on(QUANT, "w2", GPU), FAILED, reference=ON_GPU, hardware=GPU)
    results, run = merged([first, second])
    assert labels(run) == ["bf16", "W4A16", "broken", "bf16 (2)", "W4A16 (2)"]
    assert run.models[4].notes == (
        "called 'W4A16' in y/results.json, measured on 2 × NVIDIA H200, driver 580.1",
    )  # fmt: skip
    assert run.models[2].notes == (
        "failed in x/results.json, on AMD EPYC", "failed in y/results.json, on 2 × NVIDIA H200, driver 580.1",
    )  # fmt: skip
    assert machine_letters(run) == {"AMD EPYC": "A", "2 × NVIDIA H200, driver 580.1": "B"}
    assert [cell.value for cell in filled(run, ["where"])[0].cells] == ["A", "A", "", "B", "B"]
    assert footnotes(run, results.parts)[:2] == ["where A: AMD EPYC", "where B: 2 × NVIDIA H200, driver 580.1"]


def test_a_copy_of_the_reference_on_another_machine_is_the_same_model(write: Write) -> None:
    """Its files have another time and so another stamp; what they hold decides, where both runs say it."""
    first = write("a.json", REF_A, QUANT_A, reference={**IDENTITY, "content": "c"})
    copied = {**ON_GPU, "model": "of another time", "content": "c"}
    there = [on(REF, "r2", GPU), on(QUANT, "w2", GPU, label="AWQ")]
    _, run = merged([first, write("b.json", *there, reference=copied, hardware=GPU)])
    assert labels(run) == ["bf16", "W4A16", "bf16 (2)", "AWQ"]
    for strange in ({**copied, "content": "d"}, {key: copied[key] for key in copied if key != "content"}):
        second = write("b.json", *there, reference=strange, hardware=GPU)
        found = refusal(merging.load, [first, second])
        assert "they differ in model, hardware" in found or "they differ in hardware, model" in found


def test_a_reference_measured_on_each_machine_keeps_its_rows(write: Write) -> None:
    """Rows of one reference are compared as ever; of two, PPL is, and KLD is not; no KLD has a star."""
    other = with_ppl(on(REF, "r2", GPU), replace(REF.ppl, value=7.575))
    first = write("a.json", REF_A, QUANT_A, FP8_B)
    second = write("b.json", other, on(QUANT, "w2", GPU, label="AWQ"), reference=ON_GPU, hardware=GPU, torch="2.14")
    results, run = merged([first, second])
    assert [model.reference_key[:1] for model in run.models] == ["a", "a", "a", "b", "b"]
    _, w4, fp8, _, awq = run.models
    assert difference_or_reason(w4, awq, "kld") == "each was compared with the reference of its own run"
    assert not isinstance(difference_or_reason(w4, fp8, "kld"), str)
    assert not isinstance(difference_or_reason(w4, awq, "nll"), str)
    assert best_labels(run.models, "nll") == {"W4A16", "FP8", "AWQ"}
    assert best_labels(run.models, "kld") == best_labels(run.models, "same_top") == frozenset()
    assert best_labels(run.models[:3], "kld") == {"W4A16", "FP8"}
    notes = footnotes(run, results.parts)
    assert "versions that differ between these runs: torch (2.13 in a.json, 2.14 in b.json)" in notes
    (said,) = [note for note in notes if note.startswith("each row's KLD and same top")]
    assert "PPL is 7.5000 on AMD EPYC (a.json); 7.5750 on 2 × NVIDIA H200, driver 580.1 (b.json), 1.000 % apart" in said


def test_rows_of_a_run_without_a_reference_say_why_they_have_no_kld(write: Write) -> None:
    """Its own row of the reference is the reference; wherever in the order it comes."""
    plain = on(BASE, "plain", label="plain")
    bare = write("bare.json", plain, replace(REF_A, is_reference=False), reference=None)
    full = write("full.json", REF_A, QUANT_A)
    for files in ([bare, full], [full, bare]):
        _, run = merged(files)
        rows = {model.label: model for model in run.models}
        assert rows["plain"].notes == ("no KLD: bare.json has no reference; measure it again with one",)
        assert (rows["bf16"].is_reference, rows["bf16"].notes) == (True, ())
        assert rows["W4A16"].kld == QUANT_A.kld
        assert run.reference == IDENTITY
    _, run = merged([bare, write("bare2.json", on(BASE, "p2"), reference=None)])
    assert (run.reference, [model.notes for model in run.models]) == (None, [()] * 3)


def test_a_merged_run_can_be_merged_again(write: Write, tmp_path: Path) -> None:
    second = write("b.json", on(REF, "r2", GPU), on(QUANT, "w2", GPU, label="AWQ"), reference=ON_GPU, hardware=GPU)
    two, _ = merging.load([write("a.json", REF_A, QUANT_A, title="Mine"), second])
    results_json.write_json(two, tmp_path / "two.json", ["x"])
    assert merging.load([tmp_path / "two.json"]) == (two, [None])
    third = write("c.json", REF_A, QUANT_A, FP8_B, created="2026-11-21T00:00:00+00:00", title="Other")
    results, run = merged([tmp_path / "two.json", third])
    assert labels(run) == ["bf16", "W4A16", "bf16 (2)", "AWQ", "FP8"]
    assert [model.reference_key[:1] for model in run.models] == ["a", "a", "b", "b", "a"]
    assert [(part.file, len(part.labels)) for part in results.parts] == [("a.json", 2), ("b.json", 2), ("c.json", 1)]
    assert [part.origin["command"][-1] for part in results.parts] == ["a.json", "b.json", "c.json"]
    assert (results.origin["created"][:10], results.origin["versions"], results.title) == (
        "2026-11-21",
        {"torch": "2.13"},
        "Mine",
    )


def test_what_cannot_stand_in_one_table_is_refused(write: Write) -> None:
    first = write("a.json", REF_A)
    other_reference = with_ppl(on(REF, "r2"), replace(REF.ppl, logprob_sum=-80.5))

    def against(**keys: Any) -> str:
        return refusal(merging.load, [first, write("b.json", other_reference, **keys)])

    windows = against(data={"windows_sha256": "x", "windows": 3})
    assert windows.startswith("b.json: its windows differ from the windows of a.json (windows 3 and 2); ")
    assert "(another text)" in against(data={"windows_sha256": "x"})
    assert "b.json: its tokenizer differs from the tokenizer of a.json" in against(data={"vocabulary_sha256": "x"})
    assert "b.json: does not say which windows" in against(data={"windows_sha256": None})
    other = against(reference={**ON_GPU, "label": "fp16", "model": "n"})
    assert "b.json: its KL divergences are against 'fp16', and the KL divergences of a.json are against 'bf16'" in other
    assert "which is another reference (they differ in model, hardware); measure" in other
    assert "(they differ in compare_q's method of measuring)" in against(
        reference={**IDENTITY, "key": "c", "version": 2}
    )
    assert "(they differ in key)" in against(reference={**IDENTITY, "key": "c"})
    assert "a.json: is given twice" in refusal(merging.load, [first, first.parent / "." / "a.json"])


def test_two_runs_become_one_table_and_one_report(compare_q: Run, write: Write, tmp_path: Path) -> None:
    """What is shown, written and drawn of one run is of the merged one too."""
    third = with_sums(on(QUANT, "w2", label="AWQ"), kld=(2.0, 2.0, 2.0, 2.0), tokens=KLD_BLOCKS.tokens)
    first, second = write("a.json", REF_A, QUANT_A, title="Two boxes"), write("b.json", REF_A, third)
    files = {"-o": "o.json", "--csv": "o.csv", "--markdown": "o.md", "-pf": "o.svg"}
    written = [word for flag, name in files.items() for word in (flag, tmp_path / name)]
    ran = compare_q("show", first, second, *written, "--pair", "AWQ", "W4A16")
    assert ran.status == 0, ran.err
    assert "AWQ against W4A16" in ran.out
    assert "Two boxes" in (tmp_path / "o.svg").read_text()
    assert "merged from 2 runs: a.json" in (tmp_path / "o.md").read_text()
    with (tmp_path / "o.csv").open(newline="") as stream:
        assert [(row["label"], row["where"]) for row in csv.DictReader(stream)] == [
            (label, "AMD EPYC") for label in ("bf16", "W4A16", "AWQ")
        ]
    raw = json.loads((tmp_path / "o.json").read_text())
    assert (raw["title"], [part["file"] for part in raw["parts"]]) == ("Two boxes", ["a.json", "b.json"])
    shown, other = (compare_q("show", *each).out for each in ([tmp_path / "o.json"], [first, second]))
    assert shown == other
    assert compare_q("show", first, second).out == other
    ran = compare_q("show", first, second, "--csv", second)
    assert "--csv: " in ran.err
    assert "is read here" in ran.err


def test_runs_of_two_caches_are_the_run_of_all_models(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    """Measured apart, each with its own cache and its own store of the reference: the same rows and numbers."""
    fake = {"load_fn": "fake", "model_dir": "none"}
    reference, *others = (
        {**fake, "label": f"boost {boost}", "engine": {"vocab_size": 500, "boost": boost}} for boost in (3.0, 2.0, 1.0)
    )
    reference["reference"] = True
    for name, models in {"a": others[:1], "b": others[1:], "all": others}.items():
        data, spec = write_specs([reference, *models], max_rows=4)
        out = ("-o", tmp_path / f"{name}.json", "--html", tmp_path / f"{name}.html", "--cache-dir", tmp_path / name)
        ran = compare_q("-d", data, "-m", spec, *out)
        assert ran.status == 0, ran.err
    (whole,) = results_json.load(tmp_path / "all.html")[0].texts
    results, (excerpts,) = merging.load([tmp_path / "a.html", tmp_path / "b.html"])
    (run,) = results.texts
    measured = [[(m.label, m.scores_key, m.estimates, m.is_reference, m.notes) for m in r.models] for r in (run, whole)]
    assert measured[0] == measured[1]
    assert best_labels(run.models, "kld") == best_labels(whole.models, "kld")
    assert [each is not None for each in excerpts.worst] == [True] * 3
    ran = compare_q("show", tmp_path / "a.html", tmp_path / "b.json", "--html", tmp_path / "m.html", "-t", "M")
    assert ran.status == 0, ran.err
    again, (found,) = results_json.load(tmp_path / "m.html")
    assert (again.title, len(again.parts)) == ("M", 2)
    assert [each is not None for each in found.worst] == [True, True, False]


def test_excerpts_follow_their_models(write: Write) -> None:
    def report_of(file: Path, *passages: tuple[int, float, float], worst: str) -> Path:
        """Passages of two tokens: the window, and one number a token of each of two models."""
        inspection = Inspection(
            tuple(
                Passage(row, 1, ("x",) * 2, (-1.0,) * 2, ((a,) * 2, (b,) * 2), (None, (b,) * 2))
                for row, a, b in passages
            ),
            tuple(worst_of(letter) for letter in worst),
        )
        payload = {"results": json.loads(file.read_text()), "inspections": [asdict(inspection)]}
        page = f'<script type="application/json" id="payload">{json.dumps(payload)}</script>'
        file.with_suffix(".html").write_text(page)
        return file.with_suffix(".html")

    def worst_of(letter: str) -> tuple[Damaged, ...]:
        return (Damaged(0, 1, "", letter, "", -1.0, -2.0, None),)

    first = report_of(write("a.json", REF_A, QUANT_A), (0, -1.0, -2.0), (5, -1.0, -3.0), worst="rq")
    second = report_of(write("b.json", FP8_B, REF_A), (0, -4.0, -1.0), (7, -5.0, -1.0), worst="fr")
    bare = write("c.json", on(QUANT, "awq", label="AWQ"))
    results, (found,) = merging.load([first, bare, second])
    assert list(results.labels) == ["bf16", "W4A16", "AWQ", "FP8"]
    assert found.worst == (worst_of("r"), worst_of("q"), None, worst_of("f"))
    assert [each.window for each in found.passages] == [0, 5, 7]
    assert [each.logprob for each in found.passages] == [
        ((-1, -1), (-2, -2), None, (-4, -4)), ((-1, -1), (-3, -3), None, None), ((-1, -1), None, None, (-5, -5)),
    ]  # fmt: skip


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
