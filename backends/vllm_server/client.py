"""HTTP requests to a vLLM server: deadlines, retries, bounded answers.

A request that fails on the way (no connection, 429, 500, 502 to 504) is sent again, after a random
wait that doubles.  A request that the server refuses is not sent again.  No server can block this
process or fill its memory: a request and its repetitions share one deadline, and an answer that is
longer than the request can explain is an error.  Answers are requested uncompressed, and
redirections are not followed.
"""

from __future__ import annotations

import asyncio
import html
import json
import random
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ValidationError

from ..common.engine_options import describe
from ..common.errors import InputError
from ..common.json_files import parsed
from ..common.message_text import bytes_in_words

if TYPE_CHECKING:
    from types import TracebackType

    import httpx2

CONNECT_S = 5.0
FIRST_WAIT_S = 0.5
"""Longest wait before the first repetition of a request; it doubles with each repetition."""
LONGEST_WAIT_S = 30.0
LONGEST_RETRY_AFTER_S = 60.0
"""Longest wait that a server may request (Retry-After)."""
SHORT_S = 120.0
"""Seconds for requests that take a server milliseconds, but may queue after windows of other users.
"""
RETRIED = (429, 500, 502, 503, 504)
QUOTED_CHARACTERS = 300
"""Characters of a server's own words that an error quotes."""
SMALL_ANSWER_BYTES = 1 << 22
"""Largest answer in bytes if its length does not depend on the request: a list of models, the
tokens of a few words."""
PER_TOKEN = 1 << 10
"""Largest number of bytes that one token may add to an answer; vLLM's entries take about 80."""
OURS = "give the URL of vLLM's own server, `vllm serve`"
Shape = TypeVar("Shape", bound=BaseModel)


class ServerError(Exception):
    """The reason for a missing answer, in one line; ``status`` is the HTTP status, or None."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def base_url(name: str) -> str:
    """Return the server's URL without ``/v1`` from a spec's ``model_dir``.

    InputError if it is not a URL or has a secret.
    """
    if any(mark in name for mark in "@?#"):
        raise InputError(
            "model_dir: the server's URL must hold no password, key or query; "
            "give engine.api_key_env"
        )
    try:
        parts = urlsplit(name)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        usable = False
    if not usable or not name.isprintable() or " " in name:
        raise InputError(
            f"model_dir: must be the server's base URL, as http://localhost:8000 (got {name!r})"
        )
    return name.rstrip("/").removesuffix("/v1")


def without_key(text: str, key: str | None) -> str:
    """Return the text with *** instead of the key, also as JSON, Python, URLs or HTML escape it."""
    if key:
        forms = {
            key,
            json.dumps(key)[1:-1],
            repr(key)[1:-1],
            quote(key),
            quote(key, safe=""),
            html.escape(key),
        }
        # The longest first: a shorter form may be a part of it.
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, "***")
    return text


class Failure(NamedTuple):
    """Why one attempt of a request has no answer."""

    error: ServerError  # its status is None if the server cannot be reached
    may_pass: bool = True  # another attempt may succeed
    retry_after_s: float = 0.0  # the wait that the server requests


@dataclass(frozen=True)
class Server:
    """A server's address, key and time limits."""

    url: str
    key: str | None  # only used in a header
    timeout_s: float
    retries: int


class Connection:
    """Open connections to one server, in one event loop: ``async with Connection(server) as c``.

    The code that opens a connection also closes it, and does not share it.  Two users of a server
    therefore cannot close each other's connections.  With ``keep=False``, every request opens a new
    connection, because a router may send each connection to another machine.
    """

    def __init__(self, server: Server, connections: int = 1, *, keep: bool = True) -> None:
        import httpx2

        self.server = server
        self.retried = 0  # requests that had to be sent again
        headers = {"Accept-Encoding": "identity"}
        if server.key:
            headers["Authorization"] = f"Bearer {server.key}"
        # ``ask`` limits the time of the whole exchange.
        timeout = httpx2.Timeout(None, connect=min(CONNECT_S, server.timeout_s))
        limits = httpx2.Limits(
            max_connections=connections, max_keepalive_connections=connections if keep else 0
        )
        self.http = httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits)

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; requests that are still running fail."""
        await self.http.aclose()

    async def ask(
        self,
        path: str,
        shape: type[Shape],
        body: Any,
        within: float,
        largest: int = SMALL_ANSWER_BYTES,
    ) -> Shape:
        """Return the answer to a GET, or to a POST of ``body``, as a ``shape``; ServerError.

        ``within``: seconds for the whole exchange, at most ``timeout_s``; with ``CONNECT_S`` or
        less, there is only one attempt.  ``largest``: largest size of a correct answer in bytes.
        """
        seconds = min(within, self.server.timeout_s)
        failure: Failure | None = None
        try:
            async with asyncio.timeout(seconds):
                for attempt in count():
                    wait = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) * random.uniform(0.5, 1)
                    answer = await self.attempt(path, shape, body, largest)
                    if not isinstance(answer, Failure):
                        return answer
                    failure = answer
                    is_short = within <= CONNECT_S
                    if failure.error.status is None and is_short:  # no server: do not wait for it
                        raise failure.error
                    if attempt == self.server.retries or not failure.may_pass:
                        raise failure.error
                    self.retried += 1
                    await asyncio.sleep(max(wait, failure.retry_after_s))
        except TimeoutError:
            text = f"no answer from {path} within {seconds:g} s"
            if seconds == self.server.timeout_s:
                text += "; engine.timeout_s allows more"
            if failure is not None:
                text += f", and before that: {failure.error}"
            raise ServerError(text) from None
        raise AssertionError("the loop above ends by an answer or an error")

    async def attempt(
        self, path: str, shape: type[Shape], body: Any, largest: int
    ) -> Shape | Failure:
        """Send a request once; return the answer, or why there is none.

        ServerError if the answer is not vLLM's.
        """
        import httpx2

        try:
            response, content = await self.exchange(path, body, largest)
            if response.status_code == 200:
                return parse_answer(shape, content, path)
            error = ServerError(self.refusal_text(response, content, path), response.status_code)
        except (httpx2.RequestError, httpx2.InvalidURL, OSError) as fault:
            reason = self.quoted(str(fault)) or type(fault).__name__
            return Failure(
                ServerError(f"cannot be reached ({reason}); start the server, or correct the URL")
            )
        may_pass = response.status_code in RETRIED
        retry_after_s = 0.0
        retry_after = response.headers.get("Retry-After", "")
        if retry_after.isdecimal():  # it may also be a date, which is ignored
            retry_after_s = min(float(retry_after), LONGEST_RETRY_AFTER_S)
        return Failure(error, may_pass, retry_after_s)

    async def exchange(self, path: str, body: Any, largest: int) -> tuple[httpx2.Response, bytes]:
        """Return the status and headers of one answer, and its body; ServerError if it is too long.

        Of the body of a refusal that is too long, only the beginning is returned.
        """
        method = "POST"
        if body is None:
            method = "GET"
        content = bytearray()
        async with self.http.stream(method, self.server.url + path, json=body) as response:
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > largest:
                    if response.status_code != 200:
                        break
                    raise ServerError(
                        f"{path} answers more than {bytes_in_words(largest)}, the most that this "
                        f"request can need; {OURS}"
                    )
        return response, bytes(content)

    def refusal_text(self, response: httpx2.Response, content: bytes, path: str) -> str:
        """Return the server's own reason, without the key that some servers quote."""
        reason: Any
        try:
            reason = parsed(content, path)
        except InputError:
            reason = content.decode(errors="replace")
        # vLLM's refusals are {"error": {"message": ...}}; proxies have other shapes.
        for name in ("error", "message", "detail"):
            if isinstance(reason, dict):
                reason = reason.get(name, reason)
        text = self.quoted(str(reason)) or response.reason_phrase
        hint = ""
        if response.has_redirect_location:
            hint = f"; give its target: {self.quoted(response.headers['Location'])}"
        elif response.status_code == 401 and self.server.key is None:
            hint = "; give engine.api_key_env"
        return f"HTTP {response.status_code} from {path}: {text}{hint}"

    def quoted(self, text: str) -> str:
        """Return the beginning of a server's own words, on one line and without the key."""
        return " ".join(without_key(text, self.server.key).split())[:QUOTED_CHARACTERS]


def parse_answer(shape: type[Shape], content: bytes, path: str) -> Shape:
    """Parse an answer with the keys and types of vLLM's; ServerError with status 200 for others."""
    try:
        answer = parsed(content, path)
        if isinstance(answer, dict):
            return shape.model_validate(answer, strict=True)
        reason = f"{path} answers no JSON object"
    except InputError as error:
        reason = f"{path} answers no JSON object ({str(error).removeprefix(f'{path}: ')})"
    except ValidationError as error:
        reason = f"its answer has another shape than vLLM's: {describe(error, ())}"
    raise ServerError(f"{reason}; {OURS}", 200)
