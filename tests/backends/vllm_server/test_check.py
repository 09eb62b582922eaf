"""Which servers and requests are refused before anything is scored, and where the key goes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm_server import client
from compare_q.backends.vllm_server.engine import VllmServerEngine
from compare_q.backends.vllm_server.served import ServedModel
from tests.support.toy import refusal
from tests.support.vllm_server import KEY, Stub, choice, described, gold, locked, moved, request_for, two


def short(stub: Stub) -> None:
    stub.cards[0]["max_model_len"] = 100


def capped(stub: Stub) -> None:
    stub.edit = lambda body, answer: 400


def few(stub: Stub) -> None:
    def edit(body: dict[str, Any], answer: dict[str, Any]) -> None:
        entries = choice(answer)["prompt_logprobs"]
        entries[5] = dict(list(entries[5].items())[:5]) | {str(body["prompt"][5]): {"logprob": -5.0}}

    stub.edit = edit


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
        (locked, {}, "HTTP 401 from /v1/models: Unauthorized: None; give engine.api_key_env"),
    ],
)  # fmt: skip
def test_servers_that_are_refused(
    stub: Stub, change: Callable[[Stub], None], options: dict[str, Any], message: str
) -> None:
    """What the spec can mend is a problem, which ends the run before it begins; the rest fails one model."""
    change(stub)
    said = described(stub, **options)
    assert bool(said.problem) == (change in (two, short))
    found = said.problem.removeprefix("model_dir: ") or said.silence
    assert found.startswith(f"{stub.url}: ")
    assert message in found


def test_a_server_that_fits(stub: Stub) -> None:
    two(stub)
    request = request_for(f"{stub.url}/v1/", 255, model="lora")
    VllmServerEngine.check(request)
    assert ServedModel(request).facts().context == 255
    engine = VllmServerEngine(request)
    engine.load()
    said = engine.provenance()
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
    for asked in (VllmServerEngine.check, lambda request: VllmServerEngine(request).load()):
        with pytest.raises(ModelError, match=f"^{url}: cannot be reached \\("):
            asked(request)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("localhost:8000", {}, "must be the server's base URL"),
        (f"http://me:{KEY}@localhost", {}, "must hold no password"),
        ("http://exam ple", {}, "must be the server's base URL"),
        (f"http://localhost/?key={KEY}", {}, "must hold no password"),
        ("http://localhost", {"api_key_env": KEY}, "engine.api_key_env: must name an environment variable"),
        ("http://localhost", {"concurrency": 0}, "engine.concurrency: "),
        ("http://localhost", {"concurency": 3}, "did you mean 'concurrency'"),
        ("http://localhost", {"weights": "/nowhere"}, "engine.weights: /nowhere: no such folder"),
        ("http://localhost", {"weights": "/nowhere.gguf"}, "engine.weights: /nowhere.gguf: no such file"),
    ],
)
def test_bad_requests(url: str, options: dict[str, Any], message: str) -> None:
    found = refusal(VllmServerEngine.check, request_for(url, **options))
    assert message in found
    assert KEY not in found


def test_the_key_goes_to_the_server_and_nowhere_else(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
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
    "quoted", ["""sk-a/"b\\c'+9""", """sk-a/\\"b\\\\c'+9""", "sk-a%2F%22b%5Cc%27%2B9", "sk-a/&quot;b\\c&#x27;+9"]
)
def test_a_key_is_masked_in_every_escape(quoted: str) -> None:
    """As it is, and as JSON, URLs and HTML write it."""
    assert client.without_key(f"no: Bearer {quoted}!", """sk-a/"b\\c'+9""") == "no: Bearer ***!"
    assert client.without_key(quoted, None) == quoted
