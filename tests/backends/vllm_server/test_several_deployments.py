"""Addresses with more than one deployment, or with a model that is replaced, are refused.

Servers whose answers only differ by rounding, or that fail for a while, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm_server.repeats import difference
from compare_q.backends.vllm_server.server_engine import SAMPLE_IDS, VllmServerEngine
from tests.support.toy import toy_windows
from tests.support.vllm_server import Handler, Stub, choice, gold, request_for, scores_of

OTHER = 40
"""A model whose log-probabilities differ from the first model's by about one nat."""
Route = Callable[[int, list[int]], int]


def in_turn() -> Route:
    numbers = count()
    return lambda port, prompt: OTHER * (next(numbers) % 2)


def one_of_ten() -> Route:
    numbers = count()
    return lambda port, prompt: OTHER * (next(numbers) % 10 == 9)


def one_of_ten_windows() -> Route:
    """Only long prompts go to the other deployment."""
    numbers = count()
    return lambda port, prompt: OTHER * (len(prompt) > 64 and next(numbers) % 10 == 9)


def by_length() -> Route:
    return lambda port, prompt: OTHER * (len(prompt) > 64)


def by_connection() -> Route:
    ports: dict[int, int] = {}
    return lambda port, prompt: OTHER * (ports.setdefault(port, len(ports)) % 3 == 2)


def replaced_in_the_middle() -> Route:
    numbers = count()
    return lambda port, prompt: OTHER * (next(numbers) > 30)


def replaced_and_sample_cached() -> Route:
    """A proxy answers the sample from a cache, although each request has another seed."""
    numbers = count()
    return lambda port, prompt: OTHER * (next(numbers) > 30 and len(prompt) != len(SAMPLE_IDS))


ROUTES = [
    in_turn,
    one_of_ten,
    one_of_ten_windows,
    by_length,
    by_connection,
    replaced_in_the_middle,
    replaced_and_sample_cached,
]


def loaded(stub: Stub, **options: Any) -> VllmServerEngine:
    engine = VllmServerEngine(request_for(stub.url, **options))
    engine.load()
    return engine


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("route", ROUTES)
def test_a_second_model_is_found(stub: Stub, route: Callable[[], Route], concurrency: int) -> None:
    stub.route = lambda port, prompt: 0
    engine = loaded(stub, concurrency=concurrency)
    stub.route = route()
    with pytest.raises(ModelError) as caught:
        scores_of(engine, toy_windows(40), commits=10)
    reason = str(caught.value)
    assert reason.startswith(f"{stub.url}: ")
    changed = "model changed while it was scored" in reason
    assert changed or "more than one model answers here" in reason
    with pytest.raises(ModelError):
        engine.check_unchanged()  # the windows that wait are not committed


@pytest.fixture
def rounded_anew(stub: Stub) -> Iterator[Callable[[float], None]]:
    """Return a function that makes each answer differ by normal noise, as other batches round."""
    random = np.random.default_rng(0)

    def begin(size: float) -> None:
        def edit(body: dict[str, Any], answer: dict[str, Any]) -> None:
            if body["prompt_logprobs"] == 0:
                for entry in choice(answer)["prompt_logprobs"][1:]:
                    for token_scores in entry.values():
                        token_scores["logprob"] -= abs(random.normal(0, size))

        stub.edit = edit

    return begin


@pytest.mark.parametrize(("size", "is_noted"), [(0.0, False), (0.05, False), (0.3, True)])
def test_rounding_is_no_second_model(
    stub: Stub, rounded_anew: Callable[[float], None], size: float, is_noted: bool
) -> None:
    """Noise of bfloat16 has no note, much more of it has one; both rows are kept."""
    rounded_anew(size)
    engine = loaded(stub)
    assert len(scores_of(engine, toy_windows(40), commits=10)) == 40
    ran = engine.provenance()
    assert bool(ran["notes"]) == is_noted
    assert ran["repeats"]["windows"] >= 32 + 4
    assert (ran["repeats"]["largest"] > 0.1) == is_noted
    assert (ran["repeats"]["largest"] == 0) == (size == 0)


@pytest.mark.parametrize(("tokens", "weight"), [(8, (8 / 31) ** 0.5), (31, 1.0), (63, 1.0)])
def test_short_windows_count_less(tokens: int, weight: float) -> None:
    """The mean of few tokens varies more by rounding."""
    before = np.full(tokens, -3.0, np.float32)
    assert difference(before, before - np.float32(0.25)) == pytest.approx(0.25 * weight)


@pytest.mark.parametrize("length", [2, 5, 31, 33, 100])
def test_windows_of_every_length(stub: Stub, length: int) -> None:
    scores = scores_of(loaded(stub, concurrency=3), toy_windows(6, length), commits=2)
    for window in toy_windows(6, length):
        ids = window.token_ids.tolist()
        expected = [gold(ids[at], ids[at - 1]) for at in window.positions]
        logprob = scores[window.index].logprob
        np.testing.assert_array_equal(logprob, np.asarray(expected, np.float32))


def test_repetitions_are_few(stub: Stub) -> None:
    """One token in 32 is requested again, or 32 windows if that is more."""
    engine = loaded(stub)
    scores_of(engine, toy_windows(80, 512), commits=41)
    assert len(stub.repeats) == 80 * 512 / 32 / 32 + 1  # one commit
    # Different prompts: no cache of a proxy has their answers.
    prompts = {tuple(prompt) for prompt in stub.repeats}
    assert len(prompts) == len(stub.repeats)


def test_failures_between_commits_are_asked_again(stub: Stub) -> None:
    """Any request may meet a busy server, a gateway without a server, or a lost connection."""
    engine = loaded(stub, concurrency=4)
    # Five in all: each request is sent six times at most, and threads choose who meets a fault.
    faults = iter([None, 503, None, 429, None, "lost", None, None, None, 503, None, None, "lost"])

    def flaky(handler: Handler) -> bool:
        fault = next(faults, None)
        if isinstance(fault, int):
            handler.reply(fault, {"error": {"message": "busy"}})
        return fault is not None

    stub.bad = flaky
    assert len(scores_of(engine, toy_windows(20), commits=2)) == 20
    assert engine.provenance()["retries"] > 0


@pytest.mark.parametrize("fingerprint", [None, "vllm-0.0-abc"])
def test_without_a_fingerprint_a_note_says_so(stub: Stub, fingerprint: str | None) -> None:
    stub.edit = lambda body, answer: answer | {"system_fingerprint": fingerprint}
    engine = loaded(stub)
    scores_of(engine, toy_windows(2))
    assert len(engine.provenance()["notes"]) == (fingerprint is None)
