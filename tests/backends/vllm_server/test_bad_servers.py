"""Servers with wrong answers: each fails only its own row, with the reason."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.base import ModelFacts
from compare_q.backends.common.errors import ModelError
from compare_q.eval.run.workers import Workers
from tests.support.toy import Run, Specs
from tests.support.vllm_server import Handler, Stub, described, request_for

ENOUGH = 1 << 27
"""Maximum number of bytes that a test sends of an endless answer."""
OK = b"HTTP/1.1 200 OK\r\n"
Act = Callable[[Handler], object]


def forever(piece: bytes, head: bytes = OK + b"\r\n", every: float = 0.0) -> Act:
    """Send a head, then the same bytes again and again until the client closes the connection."""

    def act(handler: Handler) -> None:
        try:
            handler.wfile.write(head)
            for _ in range(ENOUGH // len(piece)):
                handler.wfile.write(piece)
                time.sleep(every)
        except OSError:
            pass

    return act


def once(body: bytes, status: int = 200, **headers: str) -> Act:
    """Send a body, and close the connection."""
    all_headers = {"Connection": "close"}
    for name, value in headers.items():
        all_headers[name.replace("_", "-")] = value
    return lambda handler: handler.reply(status, body, all_headers)


def bad(stub: Stub, path: str, act: Act) -> None:
    """Make the stand-in act badly on this path, and like a server on other paths."""

    def act_on_path(handler: Handler) -> bool:
        if handler.path != path:
            return False
        act(handler)
        return True

    stub.bad = act_on_path


LATE_S = 2
"""Seconds after which an answer is late: a busy machine sends other answers in less."""
LATE = f"no answer from {{path}} within {LATE_S} s"
MANNERS: dict[str, tuple[Act, str]] = {
    "endless": (forever(bytes(1 << 16)), "{path} answers more than"),
    "a byte at a time": (forever(b" ", OK + b"\r\n", 0.05), LATE),
    "silent": (lambda handler: time.sleep(LATE_S + 1), LATE),
    "endless headers": (forever(b"X: " + b"y" * 1000 + b"\r\n", OK), "cannot be reached ("),
    "no HTTP": (forever(bytes(1000), b""), "cannot be reached ("),
    "gzip": (
        once(gzip.compress(bytes(100)), Content_Encoding="gzip"),
        "{path} answers no JSON object",
    ),
    "deep": (
        once(b'{"data":' + b"[" * 100_000),
        "{path} answers no JSON object (brackets are nested more than 64",
    ),
    "a list": (once(b"[]"), "{path} answers no JSON object"),
    "elsewhere": (
        once(b"", 302, Location="http://example.com/"),
        "HTTP 302 from {path}: Found; give its target: http://",
    ),
    "999": (once(b"x" * 100_000, 999), "HTTP 999 from {path}: "),
    # A server's text must not control the user's terminal or add lines to the message.
    "escapes": (
        once(b'{"error": "\\u001b[2J\\nsecond line"}', 400),
        "HTTP 400 from {path}: \\x1b[2J second line",
    ),
}


@pytest.mark.parametrize("manner", MANNERS)
def test_each_is_one_line(stub: Stub, manner: str) -> None:
    act, message = MANNERS[manner]
    bad(stub, "/v1/completions", act)
    options: dict[str, Any] = {"retries": 0}
    if message == LATE:
        options["timeout_s"] = LATE_S
    reason = described(stub, **options).unreachable
    assert reason.startswith(f"{stub.url}: ")
    assert message.format(path="/v1/completions") in reason
    assert len(reason.splitlines()) == 1


def test_a_worker_ends_at_the_deadline(stub: Stub) -> None:
    """A worker is ended at the deadline, whatever time limits the server has."""
    stub.tokens = {"tokens": [5], "token_strs": ["water"]}
    good = Workers().inspect_in_worker(request_for(stub.url), None)
    assert good.stamp == described(stub).stamp
    assert good.facts == ModelFacts(context=255, tokenizer={5: "water"})
    stub.bad = lambda handler: time.sleep(20) is None
    with pytest.raises(ModelError, match=r"did not load for 1 s, and was ended \(--deadline\)"):
        Workers(inspect_s=1.0).inspect_in_worker(request_for(stub.url), None)


def test_others_are_measured(
    stub: Stub, compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    """One bad server for each stage, and a good model after them."""
    stages = {"/v1/models": "deep", "/v1/completions": "endless", "/tokenize": "a byte at a time"}
    stubs = [stub]
    for _ in stages:
        other = Stub()
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        stubs.append(other)
    for bad_stub, (path, manner) in zip(stubs, stages.items(), strict=False):
        act, _ = MANNERS[manner]
        bad(bad_stub, path, act)
    turns = stubs[-1]  # bad from the first request for a window on

    def turn_bad(prompt: list[int]) -> None:
        turns.edit = lambda body, answer: answer | {"choices": 3}

    turns.hold = turn_bad
    specs: list[dict[str, Any]] = []
    for number, bad_stub in enumerate(stubs):
        served = {
            "load_fn": "vllm_server",
            "label": f"bad {number}",
            "model_dir": bad_stub.url,
            "engine": {"timeout_s": LATE_S},
        }
        specs.append(served)
    fake = {"load_fn": "fake", "label": "good", "model_dir": "none", "engine": {"vocab_size": 500}}
    data, models = write_specs([*specs, fake])
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out)
    assert ran.status == 1, ran.err
    assert "Traceback" not in ran.err
    rows = {row["label"]: row for row in json.loads(out.read_text())["models"]}
    assert rows["good"]["ppl"] == pytest.approx(500)
    for number, bad_stub in enumerate(stubs):
        assert bad_stub.url in rows[f"bad {number}"]["error"]
        if bad_stub is not turns:
            assert f"bad {number}: {bad_stub.url}: " in ran.err
    checked = compare_q("check", "-d", data, "-m", models)
    assert checked.status == 2
    assert "nested more than 64 deep" in checked.err
    for other in stubs[1:]:
        other.shutdown()
        other.server_close()
