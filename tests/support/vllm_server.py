"""A stand-in for ``vllm serve`` whose scores have a closed form, and functions that use it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

from compare_q.backends.base import EngineInfo, PlannedModel, ScoreRequest, TokenScores, Window
from compare_q.backends.vllm_server.server_engine import SAMPLE_IDS, VllmServerEngine
from compare_q.backends.worker import worker
from tests.support.toy import planned

VOCAB = 320
KEY = "sk-very-secret"


def weight(token: int, before: int, model: int) -> int:
    # At least 1, because a probability of 0 has no logarithm.
    return 1 + (token * 31 + before * 17 + model) % 97


@cache
def total(before: int, model: int) -> int:
    return sum(weight(token, before, model) for token in range(VOCAB))


@cache
def gold(token: int, before: int, model: int = 0) -> float:
    """The stub's log-probability of a token after another one."""
    return math.log(weight(token, before, model) / total(before, model))


@cache
def by_probability(before: int, model: int) -> list[int]:
    """The tokens after another one, the most probable first; many are equally probable."""
    return sorted(range(VOCAB), key=lambda token: -weight(token, before, model))


@cache
def rank_of(token: int, before: int, model: int) -> int:
    """The number of tokens that are at least as probable, which vLLM calls the rank."""
    own = weight(token, before, model)
    return sum(weight(other, before, model) >= own for other in range(VOCAB))


def entries_of(token: int, before: int, model: int, top: int) -> dict[str, dict[str, Any]]:
    """The real token, and the most probable ones with their places as ranks, as vLLM sends them."""
    rank = rank_of(token, before, model)
    entries = {str(token): {"logprob": gold(token, before, model), "rank": rank}}
    for place, other in enumerate(by_probability(before, model)[:top], 1):
        entries[str(other)] = {"logprob": gold(other, before, model), "rank": place}
    return entries


class Stub(ThreadingHTTPServer):
    """A vLLM server with closed-form scores.

    ``most``: its --max-logprobs.  ``faults``: answers to the next windows.  ``edit`` changes
    answers.  ``bad`` may answer a request itself, as no real server should; it then returns True.
    ``route`` chooses the model that answers a prompt, as a router of several deployments does, by
    the client's port and the prompt.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cards = [{"id": "toy", "root": "/models/toy", "parent": None, "max_model_len": 256}]
        self.model = 0
        self.route: Callable[[int, list[int]], int] = lambda port, prompt: self.model
        self.most = 20
        self.faults: list[tuple[int, dict[str, str], str]] = []
        self.edit: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda body, answer: None
        self.hold: Callable[[list[int]], None] = lambda prompt: None
        self.key: str | None = None
        self.tokens: dict[str, Any] | None = None
        self.windows: list[list[int]] = []
        # Prompts that are the beginning of an earlier window.
        self.repeats: list[list[int]] = []
        self.answered = 0
        self.bad: Callable[[Handler], bool] = lambda handler: False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: in some tests the client closes the connection."""

    def completion(self, body: dict[str, Any], port: int) -> dict[str, Any]:
        prompt = body["prompt"]
        top = body["prompt_logprobs"]
        model = self.route(port, prompt)
        entries: list[Any] = [None]
        for before, token in pairwise(prompt):
            entries.append(entries_of(token, before, model, top))
        choice = {"index": 0, "text": "", "prompt_logprobs": entries}
        return {"model": body["model"], "choices": [choice], "system_fingerprint": "vllm-0.0-abc"}


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        """Print nothing."""

    def reply(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        data = answer
        if not isinstance(answer, bytes):
            data = json.dumps(answer).encode()
        all_headers = {"Content-Length": str(len(data)), **(headers or {})}
        self.send_response(status)
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.server.bad(self):
            self.close_connection = True
        elif self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply(401, {"error": f"Unauthorized: {self.headers.get('Authorization')}"})
        elif self.path == "/v1/models" and self.server.cards:
            self.reply(200, {"data": self.server.cards})
        elif self.path == "/version":
            self.reply(200, {"version": "0.0"})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.bad(self):
            self.close_connection = True
        elif self.path == "/tokenize" and self.server.tokens:
            self.reply(200, self.server.tokens)
        elif self.path == "/v1/completions":
            self.complete(body)
        else:
            self.reply(404, {"detail": "Not Found"})

    def complete(self, body: dict[str, Any]) -> None:
        prompt = body["prompt"]
        is_repeat = self.is_repeat(prompt)
        is_window = prompt != list(SAMPLE_IDS) and not is_repeat
        if is_repeat:
            self.server.repeats.append(prompt)
        if is_window:
            self.server.windows.append(prompt)
            self.server.hold(prompt)
            if self.server.faults:
                status, headers, text = self.server.faults.pop(0)
                if status:
                    self.reply(status, {"error": {"message": text}}, headers)
                else:
                    self.close_connection = True
                return
        answer = self.server.completion(body, self.client_address[1])
        replacement = self.server.edit(body, answer)
        if is_window:
            self.server.answered += 1
        requested = body["prompt_logprobs"]
        if requested > self.server.most:
            # This is vLLM's message if --max-logprobs is too small.
            message = (
                f"Requested prompt logprobs of {requested}, which is greater than max allowed: "
                f"{self.server.most}"
            )
            self.reply(400, {"error": {"message": message}})
        elif replacement is None:
            self.reply(200, answer)
        else:
            self.reply(200, replacement)

    def is_repeat(self, prompt: list[int]) -> bool:
        """True if a prompt is the beginning of an earlier window."""
        for window in self.server.windows:
            if len(window) > len(prompt) and window[: len(prompt)] == prompt:
                return True
        return False


def request_for(url: str, tokens: int = 100, **options: Any) -> PlannedModel:
    return planned("served", "vllm_server", url, tokens, {"timeout_s": 30, **options})


def described(stub: Stub, **options: Any) -> EngineInfo:
    """Return a worker's description of the server, before the model is scheduled."""
    return worker.inspect(request_for(stub.url, **options))


def scores_of(
    engine: VllmServerEngine,
    windows: list[Window],
    commits: int = 1,
    reference: Path | None = None,
) -> dict[int, TokenScores]:
    """Return window -> scores, as a worker keeps them.

    Each commit of ``commits`` windows checks that the model has not changed.
    """
    by_window = {}
    for scores in engine.score(windows, ScoreRequest(reference=reference)):
        by_window[scores.window] = scores
        if len(by_window) % commits == 0:
            engine.check_unchanged()
    return by_window


def choice(answer: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = answer["choices"][0]
    return first


def another(body: dict[str, Any], answer: dict[str, Any]) -> None:
    answer["system_fingerprint"] = "vllm-0.1-def"


def moved(by: float) -> Callable[[Stub], None]:
    """Return a change of the stub: its log-probabilities become logits, shifted by a constant."""

    def edit(body: dict[str, Any], answer: dict[str, Any]) -> None:
        for entry in choice(answer)["prompt_logprobs"][1:]:
            for token_scores in entry.values():
                token_scores["logprob"] += by

    def change(stub: Stub) -> None:
        stub.edit = edit

    return change
