"""``compare-q flips`` from words to files and exit statuses, on files that lm-eval 0.4.13 wrote."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from pathlib import Path

import pytest

from compare_q.eval.flips import flips_report
from compare_q.eval.flips.comparing import Selection, compare
from compare_q.eval.flips.sample_files import run_files
from tests.support.made import QUANT, REF, replace, run_of
from tests.support.samples import NEW, REFERENCE, lines_of, write
from tests.support.toy import Run, assert_refused

DATA = Path(__file__).parents[2] / "data" / "flips"
"""Samples and results of two toy models; tests/support/lm_eval_samples.py made them."""


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """The samples of 12 questions by hand (tests/support/samples.py), of the reference and of a new
    model.
    """
    write(tmp_path / "ref", lines_of(REFERENCE))
    write(tmp_path / "W4A16", lines_of(NEW))
    return tmp_path / "ref", tmp_path / "W4A16"


@pytest.mark.parametrize("name", ["toy", "toy-noise"])
def test_accuracies_are_lm_evals(name: str) -> None:
    """Multiple choice, and generated texts with two filters: every accuracy and error in lm-eval's
    own results.
    """
    results = json.loads((DATA / name / "results.json").read_text())["results"]
    reference = {"toy": "toy-noise", "toy-noise": "toy"}[name]
    report = compare(run_files(str(DATA / reference)), [run_files(str(DATA / name))], Selection())
    assert len(report.comparisons) == 4
    for row in report.comparisons:
        gold = results[row.task]
        assert row.accuracy.value == gold[f"{row.metric},{row.filter}"]
        assert row.accuracy.stderr == pytest.approx(
            gold[f"{row.metric}_stderr,{row.filter}"], rel=1e-12
        )
        assert row.flips.other_wrong is not None


def test_every_output_has_the_numbers(
    compare_q: Run, both: tuple[Path, Path], tmp_path: Path
) -> None:
    files = {
        "--output": tmp_path / "outoutput",
        "--csv": tmp_path / "outcsv",
        "--markdown": tmp_path / "outmarkdown",
    }
    ran = compare_q("flips", *both, "--margin", "10%", *itertools.chain(*files.items()))
    assert ran.status == 0, ran.err
    (row,) = json.loads(files["--output"].read_text())["comparisons"]
    gold = {
        "task": "toy",
        "metric": "acc",
        "label": "W4A16",
        "questions": 12,
        "lost": 3,
        "gained": 1,
        "other_wrong": 2,
        "mcnemar_p": 0.625,
        "reference_accuracy": 7 / 12,
        "accuracy": 5 / 12,
        "margin": 0.1,
        "outcome": "undecided",
        "lost_documents": [4, 5, 6],
        "gained_documents": [7],
    }
    assert {key: row[key] for key in gold} == gold
    (line,) = csv.DictReader(files["--csv"].open())
    assert (line["lost"], line["gained"], float(line["accuracy"])) == ("3", "1", 5 / 12)
    for text in (ran.out, files["--markdown"].read_text()):
        assert "58.33" in text
        assert "-16.67" in text
        assert "not shown" in text


@pytest.mark.parametrize(
    ("flags", "status", "facts"),
    [
        (["--fail-if", "lost > 3"], 0, []),
        (["--fail-if", "lost > 2"], 4, ["W4A16, toy, acc: lost > 2 (3)"]),
        (["--fail-if", "gained >= 1"], 4, ["gained >= 1 (1)"]),
        # 5 of 12 right answers are 41.67 %.
        (["--fail-if", "accuracy < 41.6"], 0, []),
        (["--fail-if", "accuracy < 42"], 4, ["accuracy < 42 (41.6667)"]),
        (
            ["--fail-if", "difference < -16", "--fail-if", "lost > 9"],
            4,
            ["difference < -16 (-16.6667)"],
        ),
        # 12 questions are too few for a margin of 10 points.
        (["--margin", "10%", "--fail-if", "not_equivalent"], 4, ["not_equivalent (not shown)"]),
        (["--margin", "60%", "--fail-if", "not_equivalent"], 0, []),
    ],
)
def test_conditions(
    compare_q: Run, both: tuple[Path, Path], flags: list[str], status: int, facts: list[str]
) -> None:
    ran = compare_q("flips", *both, *flags)
    assert ran.status == status
    assert [fact for fact in facts if fact not in ran.err] == []


def test_a_missing_task_is_status_1_and_fails_every_condition(
    compare_q: Run, both: tuple[Path, Path]
) -> None:
    write(both[0], lines_of(REFERENCE), task="other")
    assert compare_q("flips", *both).status == 1
    assert compare_q("flips", *both, "--tasks", "toy").status == 0
    ran = compare_q("flips", *both, "--fail-if", "lost > 9")
    assert (ran.status, "W4A16, other: lost > 9 (n/a)" in ran.err) == (4, True)


def test_several_new_models_with_klds(
    compare_q: Run, both: tuple[Path, Path], tmp_path: Path
) -> None:
    """A label that is also in the results.json has that row's KLD next to its flips; another one
    has n/a.
    """
    run_of(REF, replace(QUANT, kld_kind="bound")).write(tmp_path / "results.json")
    write(tmp_path / "more" / "same", lines_of(REFERENCE))
    words = [
        both[0],
        both[1],
        tmp_path / "more",
        "--results",
        tmp_path / "results.json",
        "-o",
        tmp_path / "flips.json",
    ]
    ran = compare_q("flips", *words)
    assert ran.status == 0, ran.err
    rows = json.loads((tmp_path / "flips.json").read_text())["comparisons"]
    assert QUANT.kld
    assert [(row["label"], row["lost"], row["kld"]) for row in rows] == [
        ("W4A16", 3, QUANT.kld),
        ("same", 0, None),
    ]
    assert (rows[0]["kld_stderr"], rows[0]["kld_kind"]) == (QUANT.kld_stderr, "bound")
    assert rows[1]["kld_kind"] is None
    # 0.01234567, rounded down.
    assert flips_report.kld_cell(replace(QUANT, kld_kind="bound")).value == ">=0.01234"


def test_a_folder_that_lm_eval_wrote_is_named_by_its_parent(compare_q: Run, tmp_path: Path) -> None:
    for name in ("toy", "toy-noise"):
        # lm-eval names the folder after the model's path, with __ for the slashes.
        shutil.copytree(DATA / name, tmp_path / name / f"__models__{name}")
    ran = compare_q("flips", tmp_path / "toy", f"noise={tmp_path / 'toy-noise'}")
    assert ran.status == 0, ran.err
    assert "__models__toy" in ran.out
    assert "noise against __models__toy" in ran.out


def test_what_is_refused(compare_q: Run, both: tuple[Path, Path], tmp_path: Path) -> None:
    reference, new = both
    run_of(REF, QUANT).write(tmp_path / "results.json")
    (file,) = new.iterdir()
    for words, *facts in (
        ([], "at least one other model"),
        ([reference], "at least one other model"),
        ([reference, reference], "has the same samples as"),
        ([reference, new, "--margin", "1"], "--margin: '1': expected a percentage"),
        ([reference, new, "--margin", "0%"], "--margin: "),
        (
            [reference, new, "--fail-if", "not_equivalent"],
            "--fail-if: not_equivalent needs --margin",
        ),
        ([reference, new, "--fail-if", "losst > 5"], "--fail-if: ", "did you mean 'lost'"),
        ([reference, new, "--fail-if", "lost"], "--fail-if: ", "'lost > 5'"),
        ([reference, new, "--tasks", "tyo"], "--tasks: ", "did you mean 'toy'"),
        ([reference, new, "--metrics", "acc_norm"], "--metrics: ", "it has acc"),
        (
            [reference, f"x={new}", "--results", tmp_path / "results.json"],
            "--results: ",
            "no row called x",
        ),
        ([reference, new, "-o", file], "--output: ", "is read here"),
        ([reference, new, "-d", "wiki2"], "-d: is a flag of compare-q run"),
    ):
        assert_refused(compare_q("flips", *words), *facts)
    assert len(file.read_text().splitlines()) == 12
