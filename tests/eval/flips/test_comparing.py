"""Samples of 12 questions by hand, and samples that cannot be compared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q.eval.flips.comparing import Comparison, FlipReport, Selection, compare
from compare_q.eval.flips.sample_files import run_files
from tests.support import samples
from tests.support.samples import NEW, REFERENCE, Line, lines_of, write
from tests.support.toy import refusal

Edit = Callable[[list[Line]], Any]


def compared(
    tmp_path: Path, reference: list[Line], new: list[Line], **selection: Any
) -> FlipReport:
    """Compare the samples of two models in lm-eval's layout."""
    write(tmp_path / "ref" / "org__base", reference)
    write(tmp_path / "new" / "org__quantized", new)
    runs = [run_files(str(tmp_path / name)) for name in ("ref", "new")]
    return compare(runs[0], runs[1:], Selection(**selection))


def only(report: FlipReport) -> Comparison:
    (row,) = report.comparisons
    return row


def test_twelve_questions_by_hand(tmp_path: Path) -> None:
    """The table in tests/support/samples.py: 7 and 5 of 12 right, 3 lost, 1 gained, 2 wrong answers
    changed.
    """
    report = compared(tmp_path, lines_of(REFERENCE), lines_of(NEW), margin=0.6)
    row = only(report)
    assert (report.reference, row.label, row.task, row.metric_and_filter) == (
        "org__base",
        "org__quantized",
        "toy",
        "acc",
    )
    assert (row.reference_accuracy.value, row.accuracy.value) == (7 / 12, 5 / 12)
    assert row.accuracy.stderr == pytest.approx(math.sqrt(35 / 144 / 11))
    flips = row.flips
    assert (flips.questions, flips.lost, flips.gained, flips.other_wrong) == (12, 3, 1, 2)
    assert (row.lost_documents, row.gained_documents) == ((4, 5, 6), (7,))
    assert (flips.difference, flips.mcnemar_p) == (-2 / 12, 0.625)
    assert row.equivalence
    # Even 12 questions reject a loss of 60 points.
    assert row.equivalence.outcome == "equivalent"


def test_the_answer_per_character(tmp_path: Path) -> None:
    """By acc_norm the sums -2, -3, -3 of "a", "bb", "ccc" are -2, -1.5 and -1 per character."""
    lines = lines_of([0])
    lines[0]["filtered_resps"] = [["-2.0", "False"], ["-3.0", "False"], ["-3.0", "False"]]
    lines[0] |= {"metrics": ["acc", "acc_norm"], "acc": 0.0, "acc_norm": 0.0}
    new_lines = json.loads(json.dumps(lines))
    # The answer of acc stays "a"; that of acc_norm is "bb", the right one.
    new_lines[0]["filtered_resps"][2] = ["-9.0", "False"]
    new_lines[0]["acc_norm"] = 1.0
    rows = compared(tmp_path, lines, new_lines).comparisons
    assert [(row.metric, row.flips.gained, row.flips.other_wrong) for row in rows] == [
        ("acc", 0, 0),
        ("acc_norm", 1, 0),
    ]


def test_an_answer_that_contradicts_its_metric_is_not_known(tmp_path: Path) -> None:
    """A task may choose by other rules than lm-eval's; its wrong answers are then not counted."""
    lines = lines_of(REFERENCE)
    lines[3]["filtered_resps"] = [["-1.0", "False"], ["-9.0", "False"], ["-9.0", "False"]]
    assert only(compared(tmp_path, lines, lines_of(NEW))).flips.other_wrong is None


def generated(number: int, text: str, name: str, is_right: bool) -> Line:
    """Return the sample of a generated text, by the filter of this name."""
    options = {"until": ["\n"], "do_sample": False}
    line = samples.sample(number, 0)
    del line["acc"]
    return line | {
        "arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": options}},
        "filter": name,
        "filtered_resps": [text],
        "metrics": ["exact_match", "f1"],
        "exact_match": is_right,
        "f1": [1, 0],
    }


def test_generated_texts(tmp_path: Path) -> None:
    """Two filters of one text; another wrong text is another answer; a metric that is not 0 or 1 is
    left out.
    """
    reference = [
        generated(0, "x", "strict", True),
        generated(1, "y", "strict", False),
        generated(0, "x", "loose", True),
        generated(1, "y", "loose", True),
    ]
    new = [
        generated(0, "x", "strict", True),
        generated(1, "z", "strict", False),
        generated(0, "w", "loose", False),
        generated(1, "y", "loose", True),
    ]
    report = compared(tmp_path, reference, new)
    strict, loose = report.comparisons
    assert strict.metric_and_filter == "exact_match, strict"
    assert (strict.flips.lost, strict.flips.other_wrong) == (0, 1)
    assert loose.metric_and_filter == "exact_match, loose"
    assert (loose.flips.lost, loose.flips.other_wrong) == (1, 0)
    assert any("f1" in note for note in report.notes)


def test_answers_drawn_at_random_have_a_note(tmp_path: Path) -> None:
    lines = lines_of(REFERENCE)
    assert not compared(tmp_path, lines, lines).notes
    for line in lines:
        line["arguments"]["gen_args_0"]["arg_1"] = {"temperature": 0.7}
    assert "chance" in compared(tmp_path, lines, lines).notes[0]


def test_order_of_lines_is_irrelevant(tmp_path: Path) -> None:
    """With several GPUs lm-eval writes documents in another order."""
    straight = only(compared(tmp_path, lines_of(REFERENCE), lines_of(NEW)))
    assert only(compared(tmp_path, lines_of(REFERENCE), lines_of(NEW)[::-1])) == straight


def test_newest_run_of_each_task(tmp_path: Path) -> None:
    """Several runs in one folder: the newest file of each task counts, with a note."""
    folder = tmp_path / "new" / "org__quantized"
    write(folder, lines_of(REFERENCE), date="2025-12-31T23-59-59.9")
    write(folder, lines_of(REFERENCE), task="toy_2")
    report = compared(tmp_path, lines_of(REFERENCE), lines_of(NEW))
    assert only(report).flips.lost == 3
    assert any("2 runs" in note for note in report.notes)
    assert any("toy_2" in note for note in report.notes)


def test_a_task_that_a_model_lacks_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "ref" / "org__base", lines_of(REFERENCE), task="other")
    report = compared(tmp_path, lines_of(REFERENCE), lines_of(NEW))
    assert report.absent == (("org__quantized", "other"),)
    assert compared(tmp_path, lines_of(REFERENCE), lines_of(NEW), tasks=["toy"]).absent == ()


def changed(key: str, value: Any, at: int = 3) -> Edit:
    """Return an edit that sets a key of a sample."""

    def edit(lines: list[Line]) -> None:
        lines[at][key] = value

    return edit


def without(key: str) -> Edit:
    def edit(lines: list[Line]) -> None:
        del lines[3][key]

    return edit


def everywhere(**keys: Any) -> Edit:
    def edit(lines: list[Line]) -> None:
        for line in lines:
            line |= keys

    return edit


def limited(lines: list[Line]) -> None:
    del lines[10:]


def repeated(lines: list[Line]) -> None:
    lines.append(lines[3])


def half_filtered(lines: list[Line]) -> None:
    lines += [line | {"filter": "strict"} for line in lines[:6]]


def other_choices(lines: list[Line]) -> None:
    lines[3]["arguments"]["gen_args_2"]["arg_1"] = " dddd"


EDITS: tuple[tuple[Edit, list[str]], ...] = (
    (changed("prompt_hash", "x"), ["1 of 12 prompts", "document 3"]),
    (everywhere(prompt_hash="x"), ["12 of 12 prompts", "document 0"]),
    (changed("doc_hash", "x"), ["1 of 12 documents", "document 3"]),
    (changed("target_hash", "x"), ["1 of 12 right answers", "document 3"]),
    (other_choices, ["1 of 12 requests", "document 3"]),
    (limited, ["lacks 2 of 12 documents", "such as 10", "--limit"]),
    (changed("doc_id", 99), ["lacks 1 of 12 documents", "such as 3"]),
    (repeated, ["line 13", "document 3", "twice"]),
    (everywhere(filter="strict"), ["filters are strict, not none"]),
    (half_filtered, ["6 documents, such as 6", "filters none and strict"]),
    (everywhere(metrics=["acc", "acc_norm"], acc_norm=1.0), ["metrics are acc, acc_norm, not acc"]),
    (changed("metrics", []), ["1 document, such as 3", "other metrics"]),
    (changed("metrics", ["f1"]), ["line 4", "metrics", "f1", "no value"]),
    (changed("acc", 0.5), ["acc of document 3 is 0.5", "0 or 1"]),
    (changed("acc", [1, 0]), ["acc of document 3 is [1, 0]"]),
    # Python's json writes and reads NaN, which is no JSON.
    (changed("acc", math.nan), ["line 4", "acc is NaN"]),
    # lm-eval writes log-probabilities as text, in which "nan" is valid JSON.
    (changed("filtered_resps", [["nan", "False"]] * 3), ["line 4", "log-probability", "NaN"]),
    (changed("filtered_resps", "x"), ["line 4", "filtered_resps", "expected a list"]),
    (changed("doc_id", "3"), ["line 4", "doc_id", "expected a whole number"]),
    (changed("doc_hash", 7), ["line 4", "doc_hash", "expected a text"]),
    (without("prompt_hash"), ["line 4", "'prompt_hash'", "--log_samples"]),
    (without("filter"), ["line 4", "'filter'", "--log_samples"]),
)
"""Changes of the new model's samples, and what the refusal names."""


@pytest.mark.parametrize(("edit", "facts"), EDITS)
def test_samples_that_cannot_be_compared(tmp_path: Path, edit: Edit, facts: list[str]) -> None:
    lines = lines_of(REFERENCE)
    edit(lines)
    message = refusal(compared, tmp_path, lines_of(REFERENCE), lines)
    for fact in (*facts, str(tmp_path / "new")):
        assert fact in message


CONTENTS: tuple[tuple[bytes, list[str]], ...] = (
    (b"", ["is empty"]),
    (b"\n \n", ["is empty"]),
    (b'{"doc_id": 0,\n', ["line 1", "not valid JSON"]),
    (b"[1, 2]\n", ["line 1", "no object"]),
    # A user who names lm-eval's results instead of its samples.
    (b'{"results": {"toy": {"acc,none": 0.5}}}\n', ["line 1", "'doc_id'", "--log_samples"]),
    (b'{"a": "\xff"}\n', ["line 1", "UTF-8"]),
    # So deep that Python's JSON parser may raise RecursionError.
    (b"[" * 5000 + b"\n", ["line 1"]),
)
"""Files that are no samples of lm-eval, and what the refusal names."""


@pytest.mark.parametrize(("content", "facts"), CONTENTS)
def test_files_that_are_no_samples(tmp_path: Path, content: bytes, facts: list[str]) -> None:
    reference = write(tmp_path / "ref", lines_of(REFERENCE))
    file = write(tmp_path / "new", [])
    file.write_bytes(content)
    message = refusal(compare, run_files(str(reference)), [run_files(str(file))], Selection())
    for fact in (*facts, str(file)):
        assert fact in message


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    """No such place, no samples, samples of several models, and words without a label or a path."""
    write(tmp_path / "two" / "org__a", lines_of(NEW))
    write(tmp_path / "two" / "org__b", lines_of(NEW))
    (tmp_path / "empty").mkdir()
    for word, fact in (
        (tmp_path / "nowhere", "no such file or folder"),
        (tmp_path / "empty", "holds no samples_*.jsonl"),
        (tmp_path / "two", "2 models: org__a, org__b"),
        ("=x", "LABEL=PATH"),
        ("x=", "LABEL=PATH"),
    ):
        assert fact in refusal(run_files, str(word))


def test_tasks_and_metrics_that_do_not_exist(tmp_path: Path) -> None:
    reference = run_files(str(write(tmp_path / "ref", lines_of(REFERENCE))))
    other = run_files(str(write(tmp_path / "other", lines_of(NEW), task="other")))
    message = refusal(compare, reference, [other], Selection())
    assert "no task of ref: other, not toy" in message
    message = refusal(compare, reference, [reference], Selection(tasks=["tyo"]))
    assert "did you mean 'toy'" in message
    message = refusal(compare, reference, [reference], Selection(metrics=["acc_norm"]))
    assert "it has acc" in message


def test_labels(tmp_path: Path) -> None:
    """A label before =, or the folder's name; a path with = in it is a path."""
    file = write(tmp_path / "a=b" / "org__x", lines_of(NEW))
    assert run_files(str(tmp_path / "a=b")).label == "org__x"
    assert run_files(str(file)).label == "org__x"
    assert run_files(f"W4A16 g32={file}").label == "W4A16 g32"
