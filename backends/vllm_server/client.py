"""A vLLM server over HTTP: URL, key, timeouts and retries, what one of its models is asked, what an answer must hold.

A request that failed on the way (no connection, 429, 500, 502 to 504) is sent again, after a wait that doubles and is
drawn at random, so that many windows do not come back at once.  A request that the server refused is not.

Nothing that a server does can hold or fill this process: a request, with all of its repetitions, has one deadline, of
an answer no more bytes are read than what was asked for can take, and whatever it holds otherwise than vLLM is a
ServerError in one line.  Answers are asked for as they are, and redirections are not followed.

What this file does not know: specs, windows, scores.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from backends.common.errors import InputError
from backends.common.json_files import parsed
from backends.common.messages import bytes_in_words, shortened

if TYPE_CHECKING:
    import httpx2

CONNECT_S = 5.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
LONGEST_ASKED_S = 60.0
"""Seconds that a server may ask to wait (Retry-After)."""
SHORT_S = 120.0
"""Seconds for what takes a server milliseconds, though perhaps behind the windows of others."""
RETRIED = (429, 500, 502, 503, 504)
MESSAGE, READ = 300, 2000
"""Characters of a server's own words that an error quotes, and that are looked at for that."""
SMALL = 1 << 22
"""Bytes of an answer whose length does not depend on what is asked: a list of models, the tokens of ``WORDS``."""
PER_TOKEN = 1 << 10
"""Bytes that one token may take in an answer, beside ``SMALL`` for all of it; vLLM's entries take about 80."""
NAME = 1000
"""Characters of a name in an answer."""
OURS = "give the URL of vLLM's own server, `vllm serve`"
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
    if not usable or not name.isprintable() or " " in name:
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
            headers={"Accept-Encoding": "identity"}
            | ({} if self.key is None else {"Authorization": f"Bearer {self.key}"}),
            timeout=httpx2.Timeout(None, connect=min(CONNECT_S, self.timeout_s)),  # for the rest: ``ask``
            limits=httpx2.Limits(max_connections=connections),
        )

    async def ask(
        self, client: httpx2.AsyncClient, path: str, body: Any = None, *, within: float, largest: int = SMALL
    ) -> dict[str, Any]:
        """The JSON object that answers a GET, or a POST of ``body``; ServerError.

        ``within``: seconds for all of it, at most ``timeout_s``; ``largest``: bytes that a right answer can have.  Who
        has no more than ``CONNECT_S`` tries once whether there is a server.
        """
        import httpx2

        seconds, refused = min(within, self.timeout_s), None
        try:
            async with asyncio.timeout(seconds):
                for attempt in range(self.retries + 1):
                    wait = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) * random.uniform(0.5, 1)
                    try:
                        response, content = await self.exchange(client, path, body, largest)
                    except (httpx2.RequestError, httpx2.InvalidURL, OSError) as error:
                        refused = ServerError(self.unreachable(error))
                        if within <= CONNECT_S:
                            raise refused from None
                    else:
                        if response.status_code == 200:
                            return json_object(content, path)
                        refused = ServerError(self.refusal_text(response, content, path), response.status_code)
                        if response.status_code not in RETRIED:
                            raise refused
                        wait = max(wait, retry_after(response))
                    if attempt < self.retries:
                        self.retried += 1
                        await asyncio.sleep(wait)
        except TimeoutError:
            more = "; engine.timeout_s allows more" if seconds == self.timeout_s else ""
            last = f", and before that: {refused}" if refused else ""
            raise ServerError(f"no answer from {path} within {seconds:g} s{more}{last}") from None
        assert refused is not None
        raise refused

    async def exchange(
        self, client: httpx2.AsyncClient, path: str, body: Any, largest: int
    ) -> tuple[httpx2.Response, bytes]:
        """(status and headers, body) of one answer, as it was sent; of a refusal the beginning; ServerError."""
        content = bytearray()
        async with client.stream("GET" if body is None else "POST", self.url + path, json=body) as response:
            if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                raise ServerError(f"{path} answers in the coding {coding[:NAME]!r}, which was not asked for; {OURS}")
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > largest:
                    if response.status_code != 200:
                        break
                    most = bytes_in_words(largest)
                    raise ServerError(f"{path} answers more than {most}, which nothing that was asked can take; {OURS}")
        return response, bytes(content)

    def unreachable(self, error: Exception) -> str:
        """What to do about a connection that could not be made or broke."""
        reason = self.quoted(str(error)) or type(error).__name__
        return f"cannot be reached ({reason}); start the server, or correct the URL"

    def refusal_text(self, response: httpx2.Response, content: bytes, path: str) -> str:
        """The server's own reason, without the key that some servers quote."""
        try:
            answer = json_object(content, path)
            found = answer.get("error", answer)
            text = str(found.get("message", found.get("detail", found)) if isinstance(found, dict) else found)
        except ServerError:
            text = content.decode(errors="replace")
        text = self.quoted(text) or response.reason_phrase
        hint = "; give engine.api_key_env" if response.status_code == 401 and self.key is None else ""
        if response.has_redirect_location:
            hint = f"; give the URL to which it leads: {self.quoted(response.headers['Location'])}"
        return f"HTTP {response.status_code} from {path}: {text}{hint}"

    def quoted(self, text: str) -> str:
        """The beginning of a server's own words, on one line and without the key."""
        text = " ".join(text.split())
        if len(text) > READ:  # masking takes the square of that, and half a key at the end would not be masked
            text = text[:READ].rpartition(" ")[0]
        return without_key(text, self.key)[:MESSAGE]


def json_object(content: bytes, path: str) -> dict[str, Any]:
    """The JSON object of an answer; ServerError with status 200."""
    try:
        answer = parsed(content, path)
    except InputError as error:
        raise ServerError(
            f"{path} answers no JSON object ({str(error).removeprefix(f'{path}: ')}); {OURS}", 200
        ) from None
    if not isinstance(answer, dict):
        raise ServerError(f"{path} answers no JSON object; {OURS}", 200)
    return answer


def retry_after(response: httpx2.Response) -> float:
    """Seconds that the server asks for, and may ask for; 0 if it does not, or names a date."""
    asked = response.headers.get("Retry-After", "")
    return min(float(asked), LONGEST_ASKED_S) if asked.isdecimal() else 0.0


@contextmanager
def shape_of_vllm() -> Iterator[None]:
    """ServerError for an answer that is not built as vLLM's are, or has values of other types."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServerError(f"its answer has another shape than vLLM's: {shortened(repr(error))}; {OURS}", 200) from None


def name_of(value: Any) -> str | None:
    """A name in an answer, None if there is none; TypeError if it is no text, or of a length that no name has."""
    if value is None or (isinstance(value, str) and len(value) <= NAME):
        return value
    raise TypeError(f"{shortened(repr(value), 40)} where a name stands")


def number_of(entry: Any) -> float:
    """The log-probability in a token's entry; TypeError if it is no number."""
    value = entry["logprob"]
    if type(value) not in (int, float):
        raise TypeError(f"logprob is {shortened(repr(value), 40)}, which is no number")
    return float(value)


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
        """What the server says of the model ``name``, or of its only one; InputError if that is not the name of one."""
        listed = (await self.server.ask(client, "/v1/models", within=CONNECT_S)).get("data")
        with shape_of_vllm():
            cards = {name: entry for entry in listed or () if (name := name_of(entry["id"]))}
        if not cards:
            raise ServerError(f"/v1/models names no model; {OURS}")
        wanted = self.name
        if wanted not in cards if wanted else len(cards) != 1:
            names, what = shortened(", ".join(map(str, cards))), f"no {wanted!r}" if wanted else "missing"
            raise InputError(f"model_dir: {self.server.url}: engine.model: {what}; it serves: {names}")
        card = cards[wanted] if wanted else next(iter(cards.values()))
        try:
            version = (await self.server.ask(client, "/version", within=SHORT_S)).get("version")
        except ServerError as error:
            if error.status is None:
                raise
            version = None  # a proxy may pass /v1 only
        with shape_of_vllm():
            longest = card.get("max_model_len")
            if longest is not None and (type(longest) is not int or longest < 1):
                raise TypeError(f"max_model_len is {shortened(repr(longest), 40)}")
            return Card(card["id"], name_of(card.get("root")), name_of(card.get("parent")), longest, name_of(version))

    async def completion(
        self, client: httpx2.AsyncClient, model: str, ids: Sequence[int], top: int, within: float = inf
    ) -> tuple[dict[str, Any], str | None]:
        """(the answer to a prompt of token ids, the server's fingerprint).

        One token is generated, as servers refuse to generate none.
        """
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
        largest = SMALL + PER_TOKEN * len(ids) * (top + 1)
        answer = await self.server.ask(client, "/v1/completions", body, within=within, largest=largest)
        return answer, fingerprint_of(answer)

    async def sample(self, client: httpx2.AsyncClient, model: str) -> Sample:
        """Scores of ``SAMPLE_IDS``, after it was seen that they are log-probabilities."""
        try:
            answer, fingerprint = await self.completion(client, model, SAMPLE_IDS, TOP, SHORT_S)
        except ServerError as error:
            if error.status == 400 and "logprobs" in str(error):
                raise ServerError(f"{error}; start the server with --max-logprobs {TOP} or more") from None
            raise
        logprob = real_logprobs(SAMPLE_IDS, answer)
        check_normalized(answer["choices"][0]["prompt_logprobs"][1:])
        return Sample(logprob, fingerprint)

    async def vocabulary(self, client: httpx2.AsyncClient, model: str) -> dict[int, str] | str:
        """Id -> token of ``WORDS``, or why the server does not say."""
        body = {"model": model, "prompt": WORDS, "add_special_tokens": False, "return_token_strs": True}
        try:
            answer = await self.server.ask(client, "/tokenize", body, within=SHORT_S)
        except ServerError as error:
            if error.status is None:
                raise
            return str(error)
        with shape_of_vllm():
            pairs = zip(answer.get("tokens") or (), map(name_of, answer.get("token_strs") or ()), strict=False)
            found = {number: token or "" for number, token in pairs}
            if not all(type(number) is int and 0 <= number < MOST_LOGITS for number in found):
                raise TypeError("a token that is no number")
        words = {number: token for number, token in found.items() if token.isascii() and token.isalnum()}
        return words or "/tokenize shows no tokens"


def fingerprint_of(answer: Mapping[str, Any]) -> str | None:
    """What an answer says of the server's version and configuration; ServerError."""
    with shape_of_vllm():
        return name_of(answer.get("system_fingerprint"))


def real_logprobs(ids: Sequence[int], answer: Mapping[str, Any]) -> NDArray[np.float32]:
    """Log-probabilities float32 [L - 1] of a prompt's tokens but the first, from ``prompt_logprobs``; ServerError.

    Entry i scores token i: one of its keys must be the id of the real token.  The first entry is empty.
    """
    with shape_of_vllm():
        entries = answer["choices"][0].get("prompt_logprobs")
        if entries is None:
            raise ServerError("its answer has no prompt_logprobs; compare_q needs vLLM's own server, `vllm serve`")
        if len(entries) != len(ids) or entries[0] is not None:
            raise ServerError(f"its answer has prompt_logprobs of {len(entries)} positions for {len(ids)} tokens")
        missing = [at for at in range(1, len(ids)) if str(ids[at]) not in (entries[at] or ())]
        if missing:
            raise ServerError(f"its answer does not score token {ids[missing[0]]} at position {missing[0]}")
        logprob = np.array([number_of(entries[at][str(ids[at])]) for at in range(1, len(ids))])
    if (logprob > ROUNDING).any() or (logprob < np.finfo(np.float32).min).any():
        raise ServerError(NO_LOGPROBS)
    logprob[logprob == CLAMPED] = -np.inf
    return logprob.astype(np.float32)


def check_normalized(entries: Sequence[Mapping[str, Any]]) -> None:
    """ServerError unless the entries can be log-probabilities.

    The ``TOP`` entries of a position must sum to 1 at most, and reach 1 if every other token were as probable as the
    last of them.
    """
    for entry in entries:
        if len(entry) < TOP:
            raise ServerError(
                f"answers {len(entry)} of {TOP} entries; start the server with --max-logprobs {TOP} or more"
            )
        with shape_of_vllm():
            values = np.array([number_of(found) for found in entry.values()])
        with np.errstate(over="ignore"):
            top = np.exp(np.sort(values)[-TOP:])
        if not top.sum() <= 1 + ROUNDING or top.sum() + MOST_LOGITS * top[0] < 1 - ROUNDING:
            raise ServerError(NO_LOGPROBS)
