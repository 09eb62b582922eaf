"""Servers that answer as none should: each costs a row with its reason, and neither the run nor the machine."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.base import ModelFacts, ScoreRequest
from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm_server import client
from compare_q.eval.run.hosts import Hosts
from tests.support.command_line import Run, Specs
from tests.support.toy import toy_windows
from tests.support.vllm_server import Handler, Stub, described, failure, loaded, request_for

ENOUGH = 1 << 27
"""Bytes that a test sends at most, of an answer without an end."""
OK = b"HTTP/1.1 200 OK\r\n"
Act = Callable[[Handler], object]


def forever(piece: bytes, head: bytes = OK + b"\r\n", every: float = 0.0) -> Act:
    """Sends a head, then the same piece until the other side hangs up."""

    def act(handler: Handler) -> None:
        try:
            handler.wfile.write(head)
            for _ in range(ENOUGH // len(piece)):
                handler.wfile.write(piece)
                SENT.append(len(piece))
                time.sleep(every)
        except OSError:
            pass

    return act


SENT: list[int] = []


def whole(body: bytes, status: int = 200, **headers: str) -> Act:
    named = {"Connection": "close"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.reply(status, body, named)


def says(answer: Any) -> Act:
    return whole(json.dumps(answer).encode())


def bad(stub: Stub, path: str, act: Act, *, after: int = 0) -> None:
    """Have the stand-in act so on this path, and else as a server."""
    left = [after]

    def answers(handler: Handler) -> bool:
        if handler.path != path:
            return False
        left[0] -= 1
        if left[0] < 0:
            act(handler)
        return left[0] < 0

    stub.bad = answers


LATE = "no answer from {path} within 0.5 s"
MANNERS: dict[str, tuple[Act, str]] = {
    "endless": (forever(bytes(1 << 16)), "{path} answers more than"),
    "a byte at a time": (forever(b" ", OK + b"\r\n", 0.05), LATE),
    "silent": (lambda handler: time.sleep(2), LATE),
    "endless headers": (forever(b"X: " + b"y" * 1000 + b"\r\n", OK), "cannot be reached ("),
    "no HTTP": (forever(bytes(1000), b""), "cannot be reached ("),
    "gzip": (whole(gzip.compress(bytes(100)), Content_Encoding="gzip"), "{path} answers no JSON object"),
    "deep": (whole(b'{"data":' + b"[" * 100_000), "{path} answers no JSON object (brackets are nested more than 64"),
    "a list": (whole(b"[]"), "{path} answers no JSON object"),
    "elsewhere": (
        whole(b"", 302, Location="http://example.com/"), "HTTP 302 from {path}: Found; give the URL to which it leads: http://"
    ),
    "999": (whole(b"x" * 100_000, 999), "HTTP 999 from {path}: "),
    "escapes": (whole(b'{"error": "\\u001b[2J\\nsecond line"}', 400), "HTTP 400 from {path}: \\x1b[2J second line"),
}  # fmt: skip


@pytest.mark.parametrize("manner", MANNERS)
def test_manners(stub: Stub, monkeypatch: pytest.MonkeyPatch, manner: str) -> None:
    """One line with the server and what to do, soon, and after little of what it sends."""
    monkeypatch.setenv("OUR_KEY", "k" * 40)
    act, message = MANNERS[manner]
    bad(stub, "/v1/models", act)
    SENT.clear()
    said = described(stub, timeout_s=0.5 if message == LATE else 30.0, api_key_env="OUR_KEY")
    assert not said.problem
    assert said.silence.startswith(f"{stub.url}: ")
    assert len(said.silence.splitlines()) == 1
    assert len(said.silence) < 1000
    assert message.format(path="/v1/models") in said.silence
    assert sum(SENT) < 1 << 26


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1/models", {}, "/v1/models names no model"),
        ("/v1/models", {"data": 3}, "data: input should be a valid list (got 3)"),
        ("/v1/models", {"data": [{"id": "x" * 5000}]}, "data.0.id: string should have at most 1000 characters"),
        ("/v1/models", {"data": [{"id": "toy", "max_model_len": "256"}]}, "max_model_len: input should be a valid int"),
        ("/version", {"version": 3}, "version: input should be a valid string"),
        ("/tokenize", {"tokens": [[1]], "token_strs": ["a"]}, "tokens.0: input should be a valid integer"),
    ],
)  # fmt: skip
def test_types(stub: Stub, path: str, answer: Any, message: str) -> None:
    bad(stub, path, says(answer))
    said = described(stub)
    assert not said.problem
    assert said.silence.startswith(f"{stub.url}: ")
    assert message in said.silence


def replaced(**changes: Any) -> Callable[..., Any]:
    return lambda body, answer: answer | changes


def entries(change: Callable[[list[Any]], Any]) -> Callable[..., None]:
    """Change the positions of an answer."""

    def edit(body: dict[str, Any], answer: dict[str, Any]) -> None:
        found = answer["choices"][0]
        found["prompt_logprobs"] = change(found["prompt_logprobs"])

    return edit


def scored(value: Any) -> Callable[..., None]:
    """The last position has this value in all of its entries."""
    return entries(lambda found: [*found[:-1], {token: {"logprob": value} for token in found[-1]}])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (replaced(system_fingerprint={}), "system_fingerprint: input should be a valid string"),
        (entries(len), "prompt_logprobs: input should be a valid list"),
        (scored("-1.0"), "logprob: input should be a valid number"),
        (scored(10**39), "--logprobs-mode"),
        (scored(-1e300), "--logprobs-mode"),
    ],
)  # fmt: skip
def test_types_of_scores(stub: Stub, edit: Callable[..., Any], message: str) -> None:
    """Both of the sample, of which every entry is read, and of a window."""
    engine = loaded(stub)
    stub.edit = edit
    assert message in failure(engine)
    assert message in described(stub).silence


def test_a_wait_has_an_end(stub: Stub) -> None:
    """A server may ask for a year, and gets a minute, of the time that its answer has."""
    engine = loaded(stub)
    engine.served.server.timeout_s = 0.3
    stub.faults = [(503, {"Retry-After": "9" * 400}, "busy")] * 9
    late = "no answer from /v1/completions within 0.3 s; engine.timeout_s allows more, and before that: HTTP 503"
    assert late in failure(engine)
    assert len(stub.windows) == 1


def test_an_answer_grows_with_what_was_asked(stub: Stub) -> None:
    """An honest answer of long tokens is taken, and no answer a few times as long."""
    engine = loaded(stub)
    padding = [client.PER_TOKEN - 200, 40 * client.PER_TOKEN]

    def pad(body: dict[str, Any], answer: dict[str, Any]) -> None:
        for entry in answer["choices"][0]["prompt_logprobs"][1:]:
            for found in entry.values():
                found["decoded_token"] = "x" * padding[0]

    stub.edit = pad
    assert len(list(engine.score(toy_windows(1, 250), ScoreRequest()))) == 1
    padding.pop(0)
    assert "answers more than 4.5 MB" in failure(engine, toy_windows(1, 250))


def test_a_worker_ends_at_the_deadline(stub: Stub) -> None:
    """Whatever the server's own limits are; else it says what the model is."""
    stub.tokens = {"tokens": [5], "token_strs": ["water"]}
    good = Hosts().inspect(None, request_for(stub.url))
    assert (good.stamp, good.facts) == (described(stub).stamp, ModelFacts(context=255, tokenizer={5: "water"}))
    stub.bad = lambda handler: time.sleep(20) is None
    with pytest.raises(ModelError, match=r"did not load for 1 s, and was ended \(--deadline\)"):
        Hosts(load_s=1.0).inspect(None, request_for(stub.url))


def test_others_are_measured(stub: Stub, compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    """One bad server of each stage, and a good model behind them."""
    stages = {"/v1/models": "deep", "/v1/completions": "endless", "/tokenize": "a byte at a time"}
    stubs = [stub, *(Stub() for _ in range(len(stages)))]
    for each in stubs[1:]:
        threading.Thread(target=each.serve_forever, args=(0.01,), daemon=True).start()
    for each, (path, manner) in zip(stubs, stages.items(), strict=False):
        bad(each, path, MANNERS[manner][0])
    turns = stubs[-1]  # bad once its windows are asked for
    turns.hold = lambda prompt: setattr(turns, "edit", replaced(choices=3))
    served = [
        {"load_fn": "vllm_server", "label": f"bad {at}", "model_dir": each.url, "engine": {"timeout_s": 0.5}}
        for at, each in enumerate(stubs)
    ]
    fake = {"load_fn": "fake", "label": "good", "model_dir": "none", "engine": {"vocab_size": 500}}
    data, models = write_specs([*served, fake])
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out)
    assert ran.status == 1, ran.err
    assert "Traceback" not in ran.err
    rows = {row["label"]: row for row in json.loads(out.read_text())["texts"][0]["models"]}
    assert rows["good"]["ppl"] == pytest.approx(500)
    for at, each in enumerate(stubs):
        assert each.url in rows[f"bad {at}"]["error"]
        assert f"bad {at}: {each.url}: " in ran.err or each is turns
    checked = compare_q("check", "-d", data, "-m", models)
    assert checked.status == 2
    assert "nested more than 64 deep" in checked.err
    for each in stubs[1:]:
        each.shutdown()
        each.server_close()


def test_a_server_that_is_there_at_its_turn(stub: Stub, compare_q: Run, write_specs: Specs) -> None:
    """It is asked again, and then measured, under a key that tells its weights."""
    first = [True]

    def once(handler: Handler) -> bool:
        if first:
            first.clear()
            handler.reply(404, b"starting")
            return True
        return False

    stub.bad = once
    data, models = write_specs([{"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}])
    for model in (0, 1):
        stub.model, first[:] = model, [True]
        stub.windows.clear()
        ran = compare_q("-d", data, "-m", models)
        assert ran.status == 0, ran.err
        assert f"served: {stub.url}: HTTP 404 from /v1/models: starting; asked again at its turn" in ran.err
        assert stub.windows
