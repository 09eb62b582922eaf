"""Answers in a real vLLM: the sums and the accuracy that lm-eval's own model class finds in the same engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.vllm.backend import VllmScoreBackend
from eval.stats.answers import Asked, summarize
from tests.support import ROOT
from tests.support.questions import asked, evaluated, model_class
from tests.support.toy import ATOL_LOGPROB, TOY_CONTEXT
from tests.support.vllm_engine import scores_of

QUESTIONS = 40


def lm_eval_on(backend: VllmScoreBackend, folder: Path) -> Any:
    """lm-eval's vLLM model around an engine that runs already, so that none more is started."""
    from lm_eval.api.model import TemplateLM
    from transformers import AutoTokenizer

    model = object.__new__(model_class("vllm"))
    TemplateLM.__init__(model)
    model.model = backend.llm
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    model.batch_size, model._max_length, model.data_parallel_size = "auto", TOY_CONTEXT, 1
    model.add_bos_token = model.custom_prefix_token_id = None
    model.lora_request = model.enable_thinking = None
    return model


@pytest.mark.engine
@pytest.mark.parametrize("task", ["common_facts", "opticks_endings"])
def test_answers_against_lm_evals_own(
    toy_engine: VllmScoreBackend, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.chdir(ROOT)  # where the tasks find their data
    file = ROOT / "demo" / "questions" / f"{task}.yaml"
    # lm-eval's model leaves a place for a generated token, and feeds the last token too: its windows are two shorter.
    data = asked(tmp_path, file, toy_model, eval_len=TOY_CONTEXT - 2, max_rows=QUESTIONS)
    assert data.answers is not None
    found = scores_of(toy_engine, list(data.windows))
    columns = {"logprob": np.concatenate([found[window.index].logprob for window in data.windows])}
    numbers = np.concatenate([np.full(window.n_scored, window.index) for window in data.windows])
    answers = data.answers
    ours = summarize(columns, numbers, Asked(*map(np.array, (answers.question, answers.right, answers.chars))))
    own = evaluated(lm_eval_on(toy_engine, toy_model), file, QUESTIONS)
    sums = np.bincount(numbers, columns["logprob"].astype(np.float64))
    np.testing.assert_allclose(sums, own.sums, atol=ATOL_LOGPROB * 10)
    assert ours.acc.accuracy.value == own.results["acc,none"]
    assert ours.acc.accuracy.stderr == own.results["acc_stderr,none"]
    assert ours.acc_norm.accuracy.value == own.results["acc_norm,none"]
