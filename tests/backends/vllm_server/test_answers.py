"""What is read from an answer: scores, tokens; and the answers that are not taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.vllm_server.served import ServedModel
from tests.support.toy import BPW_BF16, toy_windows, with_gaps
from tests.support.vllm_server import (
    Stub,
    another,
    assert_gold,
    choice,
    failure,
    loaded,
    request_for,
    scores_of,
    without,
)


def test_each_score_is_the_real_tokens(stub: Stub) -> None:
    windows = [toy_windows(1, 60, 4)[0], *map(with_gaps, toy_windows(5, 60)[1:])]
    found = scores_of(loaded(stub, concurrency=2), windows)
    assert_gold(found, windows)
    assert found[0].kld is found[0].entropy is found[0].top1 is None
    assert sorted(stub.windows) == sorted(window.token_ids.tolist() for window in windows)


def test_minus_infinity_comes_back(stub: Stub) -> None:
    def clamp(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["prompt_logprobs"] == 0:  # a window, not the sample
            choice(answer)["prompt_logprobs"][7][str(body["prompt"][7])]["logprob"] = -9999.0

    engine = loaded(stub)
    stub.edit = clamp
    logprob = scores_of(engine, toy_windows(1, 20))[0].logprob
    assert logprob[6] == -np.inf
    assert np.isfinite(np.delete(logprob, 6)).all()


def shift(body: dict[str, Any], answer: dict[str, Any]) -> None:
    """Entry i for token i + 1: the classic mistake."""
    entries = choice(answer)["prompt_logprobs"]
    choice(answer)["prompt_logprobs"] = [None, *entries[2:], entries[1]]


def cut(body: dict[str, Any], answer: dict[str, Any]) -> None:
    del choice(answer)["prompt_logprobs"][-1]


def hole(body: dict[str, Any], answer: dict[str, Any]) -> None:
    choice(answer)["prompt_logprobs"][3] = None


def positive(body: dict[str, Any], answer: dict[str, Any]) -> None:
    next(iter(choice(answer)["prompt_logprobs"][-1].values()))["logprob"] = 0.5


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (shift, "does not score token"),
        (cut, "prompt_logprobs of 99 positions for 100 tokens"),
        (hole, "at position 3"),
        (positive, "--logprobs-mode raw_logprobs"),
        (another, "vllm-0.1-def answers in place of vllm-0.0-abc"),
        (without, "needs vLLM's own server"),
        (lambda body, answer: [1], "answers no JSON object"),
        (lambda body, answer: {"choices": []}, "another shape than vLLM's"),
    ],
)
def test_answers_that_are_not_taken(stub: Stub, edit: Callable[..., Any], message: str) -> None:
    engine = loaded(stub)
    stub.edit = edit
    found = failure(engine)
    assert found.startswith(f"window 0: {stub.url}: ")
    assert message in found


def test_tokenizer(stub: Stub) -> None:
    stub.tokens = {"tokens": [5, 6, 7, 8], "token_strs": ["water", "Ċ", "▁the", "48"]}
    assert ServedModel(request_for(stub.url)).facts().tokenizer == {5: "water", 8: "48"}
    assert loaded(stub).provenance()["tokenizer"] == "2 tokens compared"
    stub.tokens = {"tokens": [5]}
    assert ServedModel(request_for(stub.url)).facts().tokenizer is None


def test_stored_size(stub: Stub, toy_model: Path) -> None:
    assert "engine.weights" in ServedModel(request_for(stub.url)).storage().note
    assert ServedModel(request_for(stub.url, weights=str(toy_model))).storage().bpw_layer == BPW_BF16
