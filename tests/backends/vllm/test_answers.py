"""vLLM in this process answers prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import Task
from backends.common.answers import Question, Sampling
from backends.vllm import install
from backends.vllm.backend import VllmScoreBackend
from tests.support.toy import refusal, toy_windows
from tests.support.traces import assert_greedy

pytestmark = pytest.mark.engine


def test_answers_of_vllm(toy_engine: VllmScoreBackend, toy_model: Path) -> None:
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
        told = refusal(VllmScoreBackend.check_answers, toy_engine.request, Sampling(12, 1.0))
        assert told.startswith("--temperature: vLLM for CPUs cannot draw with a seed")
        return
    drawn = {each.number: each.token_ids for each in toy_engine.answers(asked, Sampling(12, 1.0))}
    (alone,) = toy_engine.answers(asked[3:4], Sampling(12, 1.0))
    assert alone.token_ids == drawn[3] != greedy[3].token_ids
