"""Refused servers and requests, the requests for windows, and the values in an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm_server import client
from compare_q.backends.vllm_server.server_engine import VllmServerEngine
from tests.support.toy import toy_windows, with_gaps
from tests.support.vllm_server import (
    KEY,
    Stub,
    another,
    choice,
    described,
    gold,
    moved,
    request_for,
    scores_of,
)


def loaded(stub: Stub, **options: Any) -> VllmServerEngine:
    engine = VllmServerEngine(request_for(stub.url, **options))
    engine.load()
    return engine


def assert_gold(scores: dict[int, TokenScores], windows: list[Window]) -> None:
    assert scores.keys() == {window.index for window in windows}
    for window in windows:
        ids = window.token_ids.tolist()
        expected = np.array([gold(ids[at], ids[at - 1]) for at in window.positions], np.float32)
        logprob = scores[window.index].logprob
        np.testing.assert_array_equal(logprob, expected, strict=True)


def failure(engine: VllmServerEngine, windows: list[Window] | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        scores_of(engine, toy_windows(1) if windows is None else windows)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def without(body: dict[str, Any], answer: dict[str, Any]) -> None:
    del choice(answer)["prompt_logprobs"]


def locked(stub: Stub) -> None:
    stub.key = KEY


def two(stub: Stub) -> None:
    stub.cards.append({**stub.cards[0], "id": "lora", "parent": "toy"})


def short(stub: Stub) -> None:
    stub.cards[0]["max_model_len"] = 100


def capped(stub: Stub) -> None:
    stub.most = 0


def few(stub: Stub) -> None:
    def edit(body: dict[str, Any], answer: dict[str, Any]) -> None:
        entries = choice(answer)["prompt_logprobs"]
        first_five = list(entries[5].items())[:5]
        token = str(body["prompt"][5])
        entries[5] = {**dict(first_five), token: {"logprob": -5.0}}

    stub.edit = edit


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (two, {}, "engine.model: missing; it serves: toy, lora"),
        (two, {"model": "base"}, "engine.model: no 'base'; it serves: toy, lora"),
        (
            short,
            {},
            "takes 100 tokens, windows of 100 and one more to generate need a server started with "
            "--max-model-len 101",
        ),
        (
            capped,
            {},
            "greater than max allowed: 0; start the server with --max-logprobs 20 or more",
        ),
        (few, {}, "entries; start the server with --max-logprobs 20 or more"),
        (
            moved(3.0),
            {},
            "no log-probabilities; start the server with --logprobs-mode raw_logprobs",
        ),
        (
            moved(-20.0),
            {},
            "no log-probabilities; start the server with --logprobs-mode raw_logprobs",
        ),
        (locked, {}, "HTTP 401 from /v1/models: Unauthorized: None; give engine.api_key_env"),
    ],
)
def test_servers_that_are_refused(
    stub: Stub, change: Callable[[Stub], None], options: dict[str, Any], message: str
) -> None:
    """An error that the spec can fix ends the run before it begins; another fails one model."""
    change(stub)
    info = described(stub, **options)
    if change in (two, short):
        reason = info.problem.removeprefix("model_dir: ")
    else:
        assert info.problem == ""
        reason = info.unreachable
    assert reason.startswith(f"{stub.url}: ")
    assert message in reason


def test_the_key_goes_to_the_server_and_nowhere_else(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked(stub)
    monkeypatch.setenv("OUR_KEY", f"{KEY}\n")
    request = request_for(stub.url, api_key_env="OUR_KEY")
    VllmServerEngine.check(request)
    engine = VllmServerEngine(request)
    engine.load()
    assert KEY not in json.dumps(engine.provenance())
    stub.key = "another"
    with pytest.raises(ModelError, match=r"Unauthorized: Bearer \*\*\*$"):
        VllmServerEngine.check(request)


@pytest.mark.parametrize(
    "quoted",
    [
        """sk-a/"b\\c'+9""",
        """sk-a/\\"b\\\\c'+9""",
        "sk-a%2F%22b%5Cc%27%2B9",
        "sk-a/&quot;b\\c&#x27;+9",
    ],
)
def test_a_key_is_masked_in_every_escape(quoted: str) -> None:
    """The key is masked unchanged, and as escaped in JSON, URLs and HTML."""
    assert client.without_key(f"no: Bearer {quoted}!", """sk-a/"b\\c'+9""") == "no: Bearer ***!"
    assert client.without_key(quoted, None) == quoted


def test_what_fails_on_the_way_is_asked_again(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(client, "FIRST_WAIT_S", 1.0)
    engine = loaded(stub, retries=4)
    stub.faults = [
        (500, {}, "oops"),
        (0, {}, ""),
        (429, {"Retry-After": "37"}, "slow"),
        (503, {}, "busy"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(client.asyncio, "sleep", note)
        assert_gold(scores_of(engine, toy_windows(1)), toy_windows(1))
    assert engine.provenance()["retries"] == 4
    first, second, third, fourth = waits
    assert 0.5 <= first <= 1
    assert 1 <= second <= 2
    assert third == 37
    assert 4 <= fourth <= 8


def test_each_score_is_the_real_tokens(stub: Stub) -> None:
    (first,) = toy_windows(1, 60, 4)
    windows = [first, *map(with_gaps, toy_windows(5, 60)[1:])]
    scores = scores_of(loaded(stub, concurrency=2), windows)
    assert_gold(scores, windows)
    assert scores[0].kld is None
    assert scores[0].entropy is None
    assert scores[0].top1 is None
    assert sorted(stub.windows) == sorted(window.token_ids.tolist() for window in windows)


def shift(body: dict[str, Any], answer: dict[str, Any]) -> None:
    """Shift the entries by one: entry i scores token i + 1, a common mistake."""
    entries = choice(answer)["prompt_logprobs"]
    choice(answer)["prompt_logprobs"] = [None, *entries[2:], entries[1]]


def cut(body: dict[str, Any], answer: dict[str, Any]) -> None:
    del choice(answer)["prompt_logprobs"][-1]


def hole(body: dict[str, Any], answer: dict[str, Any]) -> None:
    choice(answer)["prompt_logprobs"][3] = None


def positive(body: dict[str, Any], answer: dict[str, Any]) -> None:
    next(iter(choice(answer)["prompt_logprobs"][-1].values()))["logprob"] = 0.5


def constant(value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Return an edit that replaces all log-probabilities by one value."""

    def edit(body: dict[str, Any], answer: dict[str, Any]) -> None:
        for entry in choice(answer)["prompt_logprobs"][1:]:
            for token_scores in entry.values():
                token_scores["logprob"] = value

    return edit


def zeros_after_the_first(body: dict[str, Any], answer: dict[str, Any]) -> None:
    entries = choice(answer)["prompt_logprobs"][1:]
    for entry in entries[1:]:
        for token_scores in entry.values():
            token_scores["logprob"] = 0.0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (constant(0.0), "99 log-probabilities of its answer are 0: placeholders"),
        (constant(-1.0), "are -1: placeholders"),
        (constant(-9999.0), "are -inf: placeholders"),
        (zeros_after_the_first, "or 0: placeholders"),
        (constant("NaN"), "another shape than vLLM's"),
        (constant(float("nan")), "nan is not a number in JSON"),
        (shift, "does not score token"),
        (cut, "prompt_logprobs of 99 positions for 100 tokens"),
        (hole, "at position 3"),
        (positive, "--logprobs-mode raw_logprobs"),
        (another, "vllm-0.1-def answers in place of vllm-0.0-abc"),
        (lambda body, answer: answer | {"model": "other"}, "other answers in place of toy"),
        (without, "needs vLLM's own server"),
        (lambda body, answer: [1], "answers no JSON object"),
        (lambda body, answer: {"choices": []}, "another shape than vLLM's"),
    ],
)
def test_answers_that_are_not_taken(stub: Stub, edit: Callable[..., Any], message: str) -> None:
    engine = loaded(stub)
    stub.edit = edit
    reason = failure(engine)
    assert reason.startswith(f"window 0: {stub.url}: ")
    assert message in reason


@pytest.mark.parametrize(("parent", "answers"), [(None, True), ("toy", False)])
def test_an_alias_answers_and_an_adapter_does_not(
    stub: Stub, parent: str | None, answers: bool
) -> None:
    """For an alias, vLLM's answer has the first of the model's names."""
    stub.cards.append({**stub.cards[0], "id": "other", "parent": parent})
    stub.edit = lambda body, answer: answer | {"model": "toy"}
    reason = described(stub, model="other").unreachable
    assert ("toy answers in place of other" in reason) != answers
