"""Servers with wrong answers: each fails its own row with the reason, and affects neither the run
nor the machine.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

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


def whole(body: bytes, status: int = 200, **headers: str) -> Act:
    named = {"Connection": "close"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return lambda handler: handler.reply(status, body, named)


def bad(stub: Stub, path: str, act: Act) -> None:
    """Make the stand-in act badly on this path, and like a server on other paths."""

    def answers(handler: Handler) -> bool:
        if handler.path == path:
            act(handler)
        return handler.path == path

    stub.bad = answers


LATE = "no answer from {path} within 0.5 s"
MANNERS: dict[str, tuple[Act, str]] = {
    "endless": (forever(bytes(1 << 16)), "{path} answers more than"),
    "a byte at a time": (forever(b" ", OK + b"\r\n", 0.05), LATE),
    "silent": (lambda handler: time.sleep(2), LATE),
    "endless headers": (forever(b"X: " + b"y" * 1000 + b"\r\n", OK), "cannot be reached ("),
    "no HTTP": (forever(bytes(1000), b""), "cannot be reached ("),
    "gzip": (
        whole(gzip.compress(bytes(100)), Content_Encoding="gzip"),
        "{path} answers no JSON object",
    ),
    "deep": (
        whole(b'{"data":' + b"[" * 100_000),
        "{path} answers no JSON object (brackets are nested more than 64",
    ),
    "a list": (whole(b"[]"), "{path} answers no JSON object"),
    "elsewhere": (
        whole(b"", 302, Location="http://example.com/"),
        "HTTP 302 from {path}: Found; give its target: http://",
    ),
    "999": (whole(b"x" * 100_000, 999), "HTTP 999 from {path}: "),
    "escapes": (
        whole(b'{"error": "\\u001b[2J\\nsecond line"}', 400),
        "HTTP 400 from {path}: \\x1b[2J second line",
    ),
}


@pytest.mark.parametrize("manner", MANNERS)
def test_each_is_one_line(stub: Stub, manner: str) -> None:
    act, said = MANNERS[manner]
    bad(stub, "/v1/completions", act)
    reason = described(stub, timeout_s=0.5, retries=0).unreachable
    assert reason.startswith(f"{stub.url}: ")
    assert said.format(path="/v1/completions") in reason
    assert len(reason.splitlines()) == 1


def test_a_worker_ends_at_the_deadline(stub: Stub) -> None:
    """At the deadline a worker is ended, whatever time limits the server has; before that, it
    describes the model.
    """
    stub.tokens = {"tokens": [5], "token_strs": ["water"]}
    good = Workers().inspect_in_worker(request_for(stub.url), None)
    assert (good.stamp, good.facts) == (
        described(stub).stamp,
        ModelFacts(context=255, tokenizer={5: "water"}),
    )
    stub.bad = lambda handler: time.sleep(20) is None
    with pytest.raises(ModelError, match=r"did not load for 1 s, and was ended \(--deadline\)"):
        Workers(inspect_s=1.0).inspect_in_worker(request_for(stub.url), None)


def test_others_are_measured(
    stub: Stub, compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    """One bad server for each stage, and a good model after them."""
    stages = {"/v1/models": "deep", "/v1/completions": "endless", "/tokenize": "a byte at a time"}
    stubs = [stub, *(Stub() for _ in range(len(stages)))]
    for each in stubs[1:]:
        threading.Thread(target=each.serve_forever, args=(0.01,), daemon=True).start()
    for each, (path, manner) in zip(stubs, stages.items(), strict=False):
        bad(each, path, MANNERS[manner][0])
    turns = stubs[-1]  # bad from the first request for a window on
    turns.hold = lambda prompt: setattr(turns, "edit", lambda body, answer: answer | {"choices": 3})
    served = [
        {
            "load_fn": "vllm_server",
            "label": f"bad {at}",
            "model_dir": each.url,
            "engine": {"timeout_s": 0.5},
        }
        for at, each in enumerate(stubs)
    ]
    fake = {"load_fn": "fake", "label": "good", "model_dir": "none", "engine": {"vocab_size": 500}}
    data, models = write_specs([*served, fake])
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out)
    assert ran.status == 1, ran.err
    assert "Traceback" not in ran.err
    rows = {row["label"]: row for row in json.loads(out.read_text())["models"]}
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
