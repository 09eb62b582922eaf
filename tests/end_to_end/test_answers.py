"""Two tasks of lm-eval from local files to the table, compared with lm-eval's own numbers of the model; and flips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from tests.support import ROOT
from tests.support.questions import model_class
from tests.support.toy import ATOL_LOGPROB, Run, Specs, in_transformers, needs_accelerate

TASKS = ROOT / "demo" / "questions"
QUESTIONS = 40
EVAL_LEN = 200
"""Tokens per window; the longest prompts of ``common_facts`` have 212 bytes, one toy token per byte."""


def evaluated(model: Any, task: Path) -> tuple[dict[str, Any], list[float]]:
    """Return lm-eval's results of a task with default options, and its summed log-probability of each answer."""
    import lm_eval

    found = lm_eval.simple_evaluate(model=model, tasks=[str(task)], limit=QUESTIONS, log_samples=True)
    (name,) = found["results"]
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return found["results"][name], [answer[0] for sample in samples for answer in sample["filtered_resps"]]


@needs_accelerate
@pytest.mark.engine
@pytest.mark.parametrize("task", ["common_facts", "opticks_endings"])
def test_answers_against_lm_evals_own(
    compare_q: Run, write_specs: Specs, tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """float32, the reference, has lm-eval's accuracies; the flips of bfloat16 are consistent with its accuracy."""
    monkeypatch.chdir(ROOT)  # the tasks' data paths start here
    file = TASKS / f"{task}.yaml"
    models = [in_transformers(toy_model, label=name, engine={"dtype": name}) for name in ("float32", "bfloat16")]
    models[0]["reference"] = True
    asked = {"dataset": "lm_eval", "task": str(file), "eval_len": EVAL_LEN, "max_rows": QUESTIONS,
             "trust_remote_code": True}  # fmt: skip
    data, specs = write_specs(models, path=..., eval_stride=..., **asked)
    words = ["-d", data, "-m", specs, "-o", tmp_path / "r.json", "--tokens-out", tmp_path / "tokens", "--pairs"]
    ran = compare_q(*words)
    assert ran.status == 0, ran.err
    first, second = json.loads((tmp_path / "r.json").read_text())["texts"][0]["models"]
    arguments = {"pretrained": str(toy_model), "max_length": EVAL_LEN, "batch_size": 1, "device": "cpu"}
    own, own_sums = evaluated(model_class("hf")(dtype="float32", **arguments), file)
    columns = parquet.read_table(tmp_path / "tokens" / "float32.parquet").to_pydict()
    sums = np.bincount(columns["window"], columns["logprob"])
    np.testing.assert_allclose(sums, own_sums, atol=10 * ATOL_LOGPROB)
    for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr"):
        assert first[name] == own[f"{name},none"]
    assert (first["questions"], first["flips"]) == (QUESTIONS, None)
    assert second["flips_lost"] + second["flips_won"] == round(second["flips"] * QUESTIONS)
    assert second["acc"] == pytest.approx(first["acc"] + (second["flips_won"] - second["flips_lost"]) / QUESTIONS)
    assert second["flips"] <= second["changed"]
    assert f"{QUESTIONS} questions" in ran.out
    assert "McNemar's exact p = " in ran.out
    again = compare_q("show", tmp_path / "r.json", "--pairs")
    assert again.out.splitlines()[:5] == ran.out.splitlines()[:5]
