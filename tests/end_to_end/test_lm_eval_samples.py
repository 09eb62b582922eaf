"""Samples that lm-eval writes now, of a task with several choices and of generated texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compare_q.eval.flips.comparing import Comparison, Selection, compare
from compare_q.eval.flips.sample_files import RunFiles, run_files
from tests.support import lm_eval_samples
from tests.support.toy import refusal

pytest.importorskip("lm_eval")


def right_documents(run: RunFiles, row: Comparison) -> set[int]:
    """Return the documents that a run has right, by the task, filter and metric of a row."""
    documents = set()
    for line in run.tasks[row.task].read_text().splitlines():
        sample = json.loads(line)
        if sample["filter"] == row.filter and sample[row.metric] == 1:
            documents.add(sample["doc_id"])
    return documents


@pytest.mark.engine
def test_flips_of_samples_that_lm_eval_writes(tmp_path: Path) -> None:
    """Accuracies equal lm-eval's; the flips are counted again from lm-eval's file; a run with a
    limit is refused.
    """
    folders = lm_eval_samples.make(tmp_path)
    reference, new = (run_files(str(folder)) for folder in folders)
    assert (reference.label[-3:], new.label[-9:]) == ("toy", "toy-noise")
    report = compare(reference, [new], Selection())
    (file,) = folders[1].glob("results_*.json")
    results = json.loads(file.read_text())["results"]
    names = {(row.task, row.metric, row.filter) for row in report.comparisons}
    assert names == {
        ("toy_choice", "acc", "none"),
        ("toy_choice", "acc_norm", "none"),
        ("toy_generate", "exact_match", "whole"),
        ("toy_generate", "exact_match", "first"),
    }
    for row in report.comparisons:
        assert row.accuracy.value == results[row.task][f"{row.metric},{row.filter}"]
        assert row.accuracy.stderr == pytest.approx(
            results[row.task][f"{row.metric}_stderr,{row.filter}"], rel=1e-12
        )
        reference_right = right_documents(reference, row)
        new_right = right_documents(new, row)
        assert set(row.lost_documents) == reference_right - new_right
        assert set(row.gained_documents) == new_right - reference_right
        assert row.flips.other_wrong is not None
    limited = lm_eval_samples.evaluate(
        tmp_path / "toy-noise", tmp_path / "tasks", tmp_path / "limited", limit=3
    )
    message = refusal(compare, reference, [run_files(str(limited))], Selection())
    n_questions = lm_eval_samples.QUESTIONS
    assert f"lacks {n_questions - 3} of {n_questions} documents" in message
