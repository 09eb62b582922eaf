"""How windows are asked for: retries, refusals, waiting, and several windows in flight."""

from __future__ import annotations

import threading

import pytest

from compare_q.backends.base import Task
from compare_q.backends.vllm_server import client
from tests.support.toy import toy_windows
from tests.support.vllm_server import Stub, assert_gold, failure, loaded, scores_of, suppress_result


def test_what_fails_on_the_way_is_asked_again(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def noted(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(client, "FIRST_WAIT_S", 1.0)
    engine = loaded(stub, retries=4)
    stub.faults = [(500, {}, "oops"), (0, {}, ""), (429, {"Retry-After": "37"}, "slow"), (503, {}, "busy")]
    with monkeypatch.context() as patch:
        patch.setattr(client.asyncio, "sleep", noted)
        assert_gold(scores_of(engine, toy_windows(1)), toy_windows(1))
    assert engine.provenance()["retries"] == 4
    assert waits[2] == 37
    for wait, longest in zip((waits[0], waits[1], waits[3]), (1, 2, 8), strict=True):
        assert longest / 2 <= wait <= longest


@pytest.mark.parametrize(
    ("status", "text", "asked"), [(503, "engine is\ndead", 3), (400, "Token id 400 is out of vocabulary", 1)]
)
def test_it_gives_up_and_asks_no_more_what_was_refused(stub: Stub, status: int, text: str, asked: int) -> None:
    engine = loaded(stub, retries=2)
    stub.faults = [(status, {}, text)] * 9
    told = f"HTTP {status} from /v1/completions: {' '.join(text.split())}"
    assert failure(engine) == f"window 0: {stub.url}: {told}"
    assert len(stub.windows) == asked


def test_windows_in_flight(stub: Stub) -> None:
    """Three are always under way, never four; each comes back as soon as it is there."""
    barrier, lock, flying, most = threading.Barrier(3, timeout=20), threading.Lock(), 0, 0

    def hold(prompt: list[int]) -> None:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        barrier.wait()
        with lock:
            flying -= 1

    stub.hold = hold
    windows = toy_windows(9, 20)
    assert_gold(scores_of(loaded(stub, concurrency=3), windows), windows)
    assert most == 3


def test_results_as_they_finish(stub: Stub) -> None:
    windows, release = toy_windows(2, 20), threading.Event()
    slow = windows[0].token_ids.tolist()
    stub.hold = lambda prompt: suppress_result(prompt != slow or release.wait(20))
    found = loaded(stub).score(windows, Task())
    assert next(found).window == 1
    release.set()
    assert [scores.window for scores in found] == [0]


def test_the_first_failure_cancels_the_others(stub: Stub) -> None:
    engine, windows, release = loaded(stub, retries=0), toy_windows(6, 20), threading.Event()
    bad = windows[2].token_ids.tolist()
    together = threading.Barrier(4, timeout=20)

    def hold(prompt: list[int]) -> None:
        together.wait()
        if prompt == bad:
            stub.faults = [(500, {}, "oops")]
        else:
            release.wait(20)

    stub.hold = hold
    engine.options.concurrency = 4
    assert failure(engine, windows).startswith("window 2: ")
    assert (stub.answered, len(stub.windows)) == (0, 4)
    release.set()
