"""A vLLM server over HTTP: URL, key, timeouts and retries, what one of its models is asked, what an answer must hold.

A request that failed on the way (no connection, 429, 500, 502 to 504) is sent again, after a wait that doubles and is
drawn at random, so that many windows do not come back at once.  A request that the server refused, or did not answer in
time, is not.

What this file does not know: specs, windows, scores.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from backends.common.errors import InputError

if TYPE_CHECKING:
    import httpx2

CONNECT_S = 5.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
RETRIED = (429, 500, 502, 503, 504)
MESSAGE = 300
"""Characters of a server's own words that an error quotes."""
SAMPLE_IDS = tuple(range(33, 65))
"""Ordinary tokens in every vocabulary: single bytes or letters."""
TOP = 20
"""vLLM's own default of --max-logprobs."""
MOST_LOGITS = 1 << 20
"""Four times the largest vocabulary."""
CLAMPED = -9999.0
"""What vLLM's server writes for minus infinity, which JSON does not have."""
ROUNDING = 1e-3
"""How far above 1 a sum of probabilities, and above 0 a log-probability, may be."""
MOVED = 0.05
"""Nats: above what other traffic does to a sample in bfloat16 (0.03).  Other weights would have to pass 31 times."""
NO_LOGPROBS = "its values are no log-probabilities; start the server with --logprobs-mode raw_logprobs"
WORDS = (
    "water government photosynthesis antidisestablishmentarianism Mississippi unbelievably strength xylophone quickly "
    "JavaScript HttpRequest return lambda function1024 2048 password kilometre Wissenschaft naturellement "
    "electroencephalography counterrevolutionaries zygote rhythm Azerbaijan tokenization perplexity hexadecimal "
    "misunderstanding quantization 31415926 incomprehensibilities jeopardize bookkeeper Shakespeare oxygen"
).replace(" ", "\n")
"""Words on lines of their own: tokens of letters and digits alone look the same in every kind of vocabulary."""


class ServerError(Exception):
    """One line: why there is no answer.  ``status`` is the HTTP status, None where there was none."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def base_url(name: str) -> str:
    """The server's URL without ``/v1`` from a spec's ``model_dir``; InputError if it is none, or holds a secret."""
    if any(mark in name for mark in "@?#"):
        raise InputError("model_dir: the server's URL must hold no password, key or query; give engine.api_key_env")
    try:
        parts = urlsplit(name)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        usable = False
    if not usable:
        raise InputError(f"model_dir: must be the server's base URL, as http://localhost:8000 (got {name!r})")
    return name.rstrip("/").removesuffix("/v1")


def without_key(text: str, key: str | None) -> str:
    """The text with *** for the key, also where its letters are escaped as in JSON, Python, URLs or HTML."""

    def letter(one: str) -> str:
        number = ord(one)
        escapes = rf"(?i:\\+u00{number:02x}|\\+x{number:02x}|%{number:02x}|&\#0*{number};|&\#x0*{number:x};)"
        named = {"&": "|&amp;", "<": "|&lt;", ">": "|&gt;", '"': "|&quot;", "'": "|&apos;", " ": r"|\+|\s+"}
        return rf"(?:\\*{re.escape(one)}|{escapes}{named.get(one, '')})"

    return re.sub("".join(map(letter, key)), "***", text) if key else text


class Server:
    """Where a server is and how patiently it is asked.  ``key`` goes into a header and nowhere else.

    ``retried`` counts the requests that had to be sent again.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float, retries: int) -> None:
        self.url = url
        self.key = key
        self.timeout_s = timeout_s
        self.retries = retries
        self.retried = 0

    def client(self, connections: int = 1) -> httpx2.AsyncClient:
        """Connections for one event loop; to be closed."""
        import httpx2

        return httpx2.AsyncClient(
            headers={} if self.key is None else {"Authorization": f"Bearer {self.key}"},
            timeout=httpx2.Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s), pool=None),
            limits=httpx2.Limits(max_connections=connections),
        )

    async def ask(self, client: httpx2.AsyncClient, path: str, body: Any = None, *, quick: bool = False) -> Any:
        """Parsed JSON of a GET, or a POST of ``body``; ServerError.  ``quick``: one try at a connection, short wait."""
        import httpx2

        method, url = ("GET" if body is None else "POST"), self.url + path
        timeout = httpx2.Timeout(min(CONNECT_S, self.timeout_s)) if quick else client.timeout
        for attempt in range(self.retries + 1):
            wait = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) * random.uniform(0.5, 1)
            try:
                response = await client.request(method, url, json=body, timeout=timeout)
            except (httpx2.ReadTimeout, httpx2.WriteTimeout):
                raise ServerError(f"no answer from {path} within {timeout.read:g} s") from None
            except (httpx2.RequestError, httpx2.InvalidURL) as error:
                refused = ServerError(self.unreachable(error))
                if quick:
                    raise refused from None
            else:
                if response.status_code == 200:
                    return json_object(response)
                refused = ServerError(self.refusal_text(response, path), response.status_code)
                if response.status_code not in RETRIED:
                    raise refused
                wait = max(wait, retry_after(response))
            if attempt < self.retries:
                self.retried += 1
                await asyncio.sleep(wait)
        raise refused

    def unreachable(self, error: Exception) -> str:
        """What to do about a connection that could not be made or broke."""
        reason = without_key(" ".join(str(error).split()), self.key) or type(error).__name__
        return f"cannot be reached ({reason}); start the server, or correct the URL"

    def refusal_text(self, response: httpx2.Response, path: str) -> str:
        """The server's own reason, without the key that some servers quote."""
        try:
            answer = response.json()
            found = answer.get("error", answer)
            text = str(found.get("message", found.get("detail", found)) if isinstance(found, dict) else found)
        except (ValueError, AttributeError):
            text = response.text
        text = without_key(" ".join(text.split()), self.key) or response.reason_phrase
        hint = "; give engine.api_key_env" if response.status_code == 401 and self.key is None else ""
        return f"HTTP {response.status_code} from {path}: {text[:MESSAGE]}{hint}"


def json_object(response: httpx2.Response) -> dict[str, Any]:
    """The JSON object of an answer; ServerError."""
    try:
        answer = json.loads(response.content)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ServerError(f"{response.url.path} answered no JSON object", response.status_code)
    return answer


def retry_after(response: httpx2.Response) -> float:
    """Seconds that the server asks for; 0 if it does not, or names a date."""
    asked = response.headers.get("Retry-After", "")
    return float(asked) if asked.isdecimal() else 0.0


@dataclass(frozen=True)
class Card:
    """What a server says of one model; None where it does not."""

    model: str
    root: str | None
    parent: str | None
    max_model_len: int | None
    version: str | None


@dataclass(frozen=True)
class Sample:
    """A model's scores of ``SAMPLE_IDS``, by which it is told from another model.

    ``logprob``: float32 [len(SAMPLE_IDS) - 1]; ``fingerprint``: what vLLM makes of its own version and configuration.
    """

    logprob: NDArray[np.float32]
    fingerprint: str | None

    @property
    def rounded(self) -> list[str]:
        """To 0.01 nats; text, as JSON has no infinity."""
        return [f"{value:.2f}" for value in self.logprob]

    def agrees(self, other: Sample) -> bool:
        """Whether the same model can have answered both."""
        close = np.allclose(self.logprob, other.logprob, rtol=0, atol=MOVED)  # equal infinities are close
        return close and self.fingerprint == other.fingerprint


class ServedModel:
    """One model of a server: what it is asked, and what its answers must hold; ServerError where they do not."""

    def __init__(self, server: Server, name: str | None) -> None:
        self.server = server
        self.name = name

    async def card(self, client: httpx2.AsyncClient) -> Card:
        """What the server says of the model ``name``, or of its only one."""
        listed = (await self.server.ask(client, "/v1/models", quick=True)).get("data")
        cards = {entry.get("id"): entry for entry in listed or () if isinstance(entry, dict)}
        wanted = self.name
        if wanted not in cards if wanted else len(cards) != 1:
            names = ", ".join(map(str, cards)) or "none"
            raise ServerError(f"engine.model: {'no ' + repr(wanted) if wanted else 'missing'}; it serves: {names}")
        card = cards[wanted] if wanted else next(iter(cards.values()))
        try:
            version = (await self.server.ask(client, "/version")).get("version")
        except ServerError as error:
            if error.status is None:
                raise
            version = None  # a proxy may pass /v1 only
        return Card(card["id"], card.get("root"), card.get("parent"), card.get("max_model_len"), version)

    async def completion(self, client: httpx2.AsyncClient, model: str, ids: Sequence[int], top: int) -> dict[str, Any]:
        """The answer to a prompt of token ids; one token is generated, as servers refuse to generate none."""
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
        answer: dict[str, Any] = await self.server.ask(client, "/v1/completions", body)
        return answer

    async def sample(self, client: httpx2.AsyncClient, model: str) -> Sample:
        """Scores of ``SAMPLE_IDS``, after it was seen that they are log-probabilities."""
        try:
            answer = await self.completion(client, model, SAMPLE_IDS, TOP)
        except ServerError as error:
            if error.status == 400 and "logprobs" in str(error):
                raise ServerError(f"{error}; start the server with --max-logprobs {TOP} or more") from None
            raise
        logprob = real_logprobs(SAMPLE_IDS, answer)
        check_normalized(answer["choices"][0]["prompt_logprobs"][1:])
        return Sample(logprob, answer.get("system_fingerprint"))

    async def vocabulary(self, client: httpx2.AsyncClient, model: str) -> dict[int, str] | str:
        """Id -> token of ``WORDS``, or why the server does not say."""
        body = {"model": model, "prompt": WORDS, "add_special_tokens": False, "return_token_strs": True}
        try:
            answer = await self.server.ask(client, "/tokenize", body)
        except ServerError as error:
            if error.status is None:
                raise
            return str(error)
        pairs = zip(answer.get("tokens") or (), answer.get("token_strs") or (), strict=False)
        found = {number: token for number, token in pairs if str(token).isascii() and str(token).isalnum()}
        return found or "/tokenize shows no tokens"


def real_logprobs(ids: Sequence[int], answer: Mapping[str, Any]) -> NDArray[np.float32]:
    """Log-probabilities float32 [L - 1] of a prompt's tokens but the first, from ``prompt_logprobs``; ServerError.

    Entry i scores token i: one of its keys must be the id of the real token.  The first entry is empty.
    """
    try:
        entries = answer["choices"][0].get("prompt_logprobs")
        if entries is None:
            raise ServerError("its answer has no prompt_logprobs; compare_q needs vLLM's own server, `vllm serve`")
        if len(entries) != len(ids) or entries[0] is not None:
            raise ServerError(f"its answer has prompt_logprobs of {len(entries)} positions for {len(ids)} tokens")
        missing = [at for at in range(1, len(ids)) if str(ids[at]) not in (entries[at] or ())]
        if missing:
            raise ServerError(f"its answer does not score token {ids[missing[0]]} at position {missing[0]}")
        values = [float(entries[at][str(ids[at])]["logprob"]) for at in range(1, len(ids))]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"its answer has another shape than vLLM's: {error!r}") from None
    logprob = np.asarray(values)
    logprob[logprob == CLAMPED] = -np.inf
    if (logprob > ROUNDING).any():
        raise ServerError(NO_LOGPROBS)
    return logprob.astype(np.float32)


def check_normalized(entries: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
    """ServerError unless the entries can be log-probabilities.

    The ``TOP`` entries of a position must sum to 1 at most, and reach 1 if every other token were as probable as the
    last of them.
    """
    for entry in entries:
        if len(entry) < TOP:
            raise ServerError(
                f"answers {len(entry)} of {TOP} entries; start the server with --max-logprobs {TOP} or more"
            )
        with np.errstate(over="ignore"):
            top = np.exp(np.sort([found["logprob"] for found in entry.values()])[-TOP:])
        if not top.sum() <= 1 + ROUNDING or top.sum() + MOST_LOGITS * top[0] < 1 - ROUNDING:
            raise ServerError(NO_LOGPROBS)
