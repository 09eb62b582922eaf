"""The backend around a real vLLM: what it says of a run, why it refuses a model, its noise floor, its answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import LoadRequest, Question, Sampling, Task
from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm import install
from compare_q.backends.vllm.engine import VllmEngine
from compare_q.eval.stats.answers import summarize
from tests.support import ROOT
from tests.support.questions import asked, evaluated, model_class
from tests.support.toy import ATOL_BATCH, ATOL_LOGPROB, GPU, TOY_CONTEXT, brute_force, refusal, toy_windows
from tests.support.traces import assert_greedy
from tests.support.vllm_engine import WINDOWS, against, assert_same, engine, scores_of


@pytest.mark.engine
def test_provenance_says_what_ran(toy_engine: VllmEngine) -> None:
    scores_of(toy_engine, WINDOWS)
    said = toy_engine.provenance()
    json.dumps(said)
    assert said["dtype"] == "float32"
    assert said["enforce_eager"] is True
    assert said["max_num_batched_tokens"] == 64
    assert said["model_class"] == "LlamaForCausalLM"
    longest = sorted(len(window.token_ids) for window in WINDOWS)[-2:]  # the probe takes these
    assert longest == [100, 150]
    assert said["scorer"]["checked"] == (2 * 63 if install.is_cpu_build() else 99 + 149)
    assert said["scorer"]["largest"] < ATOL_BATCH
    assert said["scorer"]["gathered"] is False


@pytest.mark.engine
def test_refused_checkpoint_gives_the_reason(toy_model: Path, tmp_path: Path) -> None:
    """A config that asks for one layer more than the file holds: found in the worker, reported in one line."""
    broken = tmp_path / "broken"
    shutil.copytree(toy_model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 160}))
    reason = pytest.raises(ModelError, match=r"vLLM refused .*broken: .*exceeds dimension size")
    with reason as failure, engine(broken, tmp_path / "log"):
        pass
    assert "root cause" not in str(failure.value)
    assert "\n" not in str(failure.value)


def test_kernel_settings_of_the_environment_are_part_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8", raising=False)
    before = VllmEngine.versions()
    assert "torch" in before
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert VllmEngine.versions() == before
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    assert VllmEngine.versions() == {**before, "VLLM_CPU_INT4_W4A8": "0"}


@pytest.mark.engine
def test_noise_is_the_same_in_every_run(floor_engine: VllmEngine, toy_store: Path) -> None:
    """Also in a run that goes on after a crash, and in a replica; the hooks of the run before are gone."""
    first, second = (scores_of(floor_engine, WINDOWS, against(toy_store)) for _ in range(2))
    assert_same(second, first, atol=0.0)
    rest = scores_of(floor_engine, WINDOWS[3:], against(toy_store))
    assert_same(rest, {index: first[index] for index in rest}, ATOL_BATCH)
    assert 1e-6 < np.mean([scores.kld.mean() for scores in first.values()]) < 0.1
    said = floor_engine.provenance()
    assert (said["enforce_eager"], said["noise"]["seed"], len(said["notes"])) == (True, 3, 1)
    assert said["scorer"]["largest"] < ATOL_BATCH
    assert said["scorer"]["reference_head"] == "the model's own, bit for bit"


@pytest.mark.engine
@pytest.mark.skipif(GPU, reason="TF32 products hide noise of this size")
def test_noise_is_that_of_transformers(toy_model: Path, toy_engine: VllmEngine, floor_engine: VllmEngine) -> None:
    """Each layer of either engine has the same numbers for the same elements, in whatever steps and order."""
    from compare_q.backends.hf.engine import TransformersEngine

    windows = toy_windows(3, 100)
    options = {"dtype": "float32", "noise": "bf16", "noise_seed": 3}
    backend = TransformersEngine(LoadRequest("hf", "transformers", str(toy_model), 100, options))
    backend.load()
    gold = {window.index: np.array(brute_force(backend.logits(window), window)) for window in reversed(windows)}
    found, plain = (scores_of(each, windows) for each in (floor_engine, toy_engine))
    for index in gold:
        np.testing.assert_allclose(found[index].logprob, gold[index], atol=ATOL_LOGPROB, rtol=0)
        assert np.abs(plain[index].logprob - gold[index]).mean() > 20 * ATOL_LOGPROB


@pytest.mark.engine
def test_answers_of_vllm(toy_engine: VllmEngine, toy_model: Path) -> None:
    """Greedy ones are the most probable tokens; a stop token ends one; drawn ones depend on their own seed alone."""
    asked = [
        Question(index, index, tuple(window.token_ids.tolist())) for index, window in enumerate(toy_windows(5, 90))
    ]
    greedy = {each.number: each for each in toy_engine.answers(asked, Sampling(12))}
    assert sorted(greedy) == list(range(5))
    assert {(len(each.token_ids or ()), each.finish) for each in greedy.values()} == {(12, "length")}
    rows = [{"input_ids": each.token_ids, "response_ids": greedy[each.number].token_ids} for each in asked]
    assert_greedy(toy_model, rows)

    stop = (greedy[2].token_ids or ())[7]
    cut = {each.number: each for each in toy_engine.answers(asked, Sampling(12, stop=(stop,)))}
    ids = greedy[2].token_ids or ()
    assert (cut[2].token_ids, cut[2].finish) == (ids[: ids.index(stop) + 1], "stop")

    (scored,) = toy_engine.score(toy_windows(1), Task())
    assert len(scored.logprob) == 99
    if install.is_cpu_build():
        told = refusal(VllmEngine.check_answers, toy_engine.request, Sampling(12, 1.0))
        assert told.startswith("--temperature: vLLM for CPUs cannot draw with a seed")
        return
    drawn = {each.number: each.token_ids for each in toy_engine.answers(asked, Sampling(12, 1.0))}
    (alone,) = toy_engine.answers(asked[3:4], Sampling(12, 1.0))
    assert alone.token_ids == drawn[3] != greedy[3].token_ids


QUESTIONS = 40


def lm_eval_on(backend: VllmEngine, folder: Path) -> Any:
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
    toy_engine: VllmEngine, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
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
    ours = summarize(columns, numbers, answers.requests)
    own = evaluated(lm_eval_on(toy_engine, toy_model), file, QUESTIONS)
    sums = np.bincount(numbers, columns["logprob"].astype(np.float64))
    np.testing.assert_allclose(sums, own.sums, atol=ATOL_LOGPROB * 10)
    assert ours.acc.accuracy.value == own.results["acc,none"]
    assert ours.acc.accuracy.stderr == own.results["acc_stderr,none"]
    assert ours.acc_norm.accuracy.value == own.results["acc_norm,none"]
