"""A running ``vllm serve``, wherever it runs: what its completions endpoint says of each token.

``model_dir`` is the server's base URL.  A window goes as token ids, with ``prompt_logprobs=0``: vLLM then answers with
the log-probability of each real token, of which nothing is rounded on the way (JSON keeps all digits of a float32), and
computes the whole window, whatever its prefix cache holds.  Entropy, top-1 and KL divergence need more than that and
are not there; the rank that comes along counts ties and so does not tell whether the real token is the top one.

Before anything is scored, a probe of 32 token ids asks for ``TOP`` entries a position, which shows whether
log-probabilities or logits come back.  Its values are part of the scores' key (``stamp``), since a server can be
started again with other weights under the same name.  Rounded to 0.01 nats they survive float32 noise; where other
traffic moves bf16 roundings (0.03) they change, and the model is measured again, which costs time and nothing else.
Other weights would have to agree in all 31 of them.  The probe is repeated when the model is loaded and after its last
window: scores of a model that was swapped in between are not kept.  One swapped and swapped back meanwhile is not seen.

The server's tokenizer must split ``WORDS`` into tokens that mean the same to the data's; tokens that do not occur
there are not compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from backends.base import Capabilities, LoadRequest, ModelFacts, ScoringBackend, Storage, Task, TokenScores, Window
from backends.checkpoint import gguf, stored_bits
from backends.common.errors import InputError, ModelError
from backends.common.options import parse_options
from backends.hub import repositories
from backends.vllm_server.client import Card, Probe, ServedModel, Server, ServerError, base_url, real_logprobs

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

STAMPED: dict[tuple[str, str | None], tuple[Card, Probe]] = {}
"""(URL, ``engine.model``) -> what its last ``stamp`` saw, part of the scores' key: ``load`` must see the same."""


class ServerOptions(BaseModel):
    """The ``engine`` object.  ``weights``: folder, GGUF file or hub id of the same model, for its stored size alone."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    api_key_env: str | None = None
    concurrency: int = Field(32, gt=0)
    timeout_s: float = Field(600.0, gt=0)
    retries: int = Field(5, ge=0)
    weights: str | None = None


class VllmServerBackend(ScoringBackend):
    """See the module's docstring."""

    capabilities = Capabilities(
        load_fns=("vllm_server",),
        fwd_fn="vllm_server",
        packages=("httpx2",),
        install="pip install httpx2",
        summary="a running `vllm serve`, by its URL: perplexity only",
        reference=False,
        compares=False,
        here=False,
    )

    def __init__(self, request: LoadRequest) -> None:
        super().__init__(request)
        self.options = parse_options(ServerOptions, request.options)
        self.served = served_model(request)
        self.card: Card | None = None
        self.probe: Probe | None = None
        self.tokenizer = ""

    @classmethod
    def check(cls, request: LoadRequest) -> None:
        async def look(served: ServedModel, client: httpx2.AsyncClient) -> None:
            card = await served.card(client)
            longest = card.max_model_len
            if longest is not None and longest <= request.max_tokens:
                raise ServerError(
                    f"takes {longest} tokens, windows of {request.max_tokens} and one more to generate need a server "
                    f"started with --max-model-len {request.max_tokens + 1}"
                )
            await served.probe(client, card.model)

        stored(parse_options(ServerOptions, request.options))
        asked(request, look)

    @classmethod
    def facts(cls, request: LoadRequest) -> ModelFacts:
        async def look(served: ServedModel, client: httpx2.AsyncClient) -> ModelFacts:
            card = await served.card(client)
            tokens = await served.vocabulary(client, card.model)
            context = None if card.max_model_len is None else card.max_model_len - 1
            return ModelFacts(context=context, tokenizer=None if isinstance(tokens, str) else tokens)

        return asked(request, look)

    @classmethod
    def stamp(cls, request: LoadRequest) -> str:
        async def look(served: ServedModel, client: httpx2.AsyncClient) -> str:
            card = await served.card(client)
            probe = await served.probe(client, card.model)
            STAMPED[served.server.url, served.name] = card, probe
            identity = [served.server.url, asdict(card), probe.fingerprint, probe.rounded]
            return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

        return asked(request, look)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}  # the server's is in the stamp; nothing here can change a score

    def load(self) -> None:
        async def look(served: ServedModel, client: httpx2.AsyncClient) -> None:
            self.card = card = await served.card(client)
            self.probe = probe = await served.probe(client, card.model)
            key_card, key_probe = STAMPED.get((served.server.url, served.name), (card, probe))
            if card != key_card or not probe.agrees(key_probe):
                raise ServerError("the server's model changed before it was scored; run again")
            tokens = await served.vocabulary(client, card.model)
            self.tokenizer = f"not compared: {tokens}" if isinstance(tokens, str) else f"{len(tokens)} tokens compared"

        try:
            talk(self.served, look)
        except ServerError as error:
            raise ModelError(f"{self.served.server.url}: {error}") from None

    def score(self, windows: Iterable[Window], task: Task) -> Iterator[TokenScores]:
        """As they finish; the first that fails cancels those in flight.  ModelError too if the model was swapped."""
        if task.record is not None:
            raise ModelError("a server cannot be the reference: it hands out no logits; mark another model")
        queue, most = iter(windows), self.options.concurrency
        flying: set[asyncio.Task[TokenScores]] = set()
        with asyncio.Runner() as runner:
            client = self.served.server.client(most)
            try:
                while True:
                    loop = runner.get_loop()
                    flying |= {loop.create_task(self.window(client, w)) for w in islice(queue, most - len(flying))}
                    if not flying:
                        runner.run(self.check_same(client))
                        return
                    for landed in runner.run(first_of(flying)):
                        flying.remove(landed)
                        yield landed.result()
            finally:
                runner.run(abandon(flying, client))

    async def check_same(self, client: httpx2.AsyncClient) -> None:
        """ModelError if the server's model is no longer the one that was loaded."""
        assert self.card is not None
        assert self.probe is not None
        try:
            if not self.probe.agrees(await self.served.probe(client, self.card.model)):
                raise ServerError("the server's model changed while it was scored; run again")
        except ServerError as error:
            raise ModelError(f"{self.served.server.url}: {error}") from None

    async def window(self, client: httpx2.AsyncClient, window: Window) -> TokenScores:
        """Scores of one window; ModelError with the index of the window."""
        assert self.card is not None
        assert self.probe is not None
        ids = window.token_ids.tolist()
        try:
            answer = await self.served.completion(client, self.card.model, ids, 0)
            logprob = real_logprobs(ids, answer)
            fingerprint = answer.get("system_fingerprint")
            if fingerprint != self.probe.fingerprint:
                raise ServerError(
                    f"{fingerprint} answers in place of {self.probe.fingerprint}; let one server stay at this URL"
                )
        except ServerError as error:
            raise ModelError(f"window {window.index}: {self.served.server.url}: {error}") from None
        return TokenScores(window.index, logprob[window.score_from - 1 :])

    def storage(self) -> Storage:
        return stored(self.options)

    def provenance(self) -> dict[str, Any]:
        assert self.card is not None
        assert self.probe is not None
        return {
            "url": self.served.server.url,
            "server": asdict(self.card),
            "system_fingerprint": self.probe.fingerprint,
            "probe": self.probe.rounded,
            "batch": f"up to {self.options.concurrency} windows in flight",
            "retries": self.served.server.retried,
            "tokenizer": self.tokenizer,
            "hardware": "unknown: a server does not say",
            "kernels": "unknown: a server does not say which kernels it runs",
        }

    def close(self) -> None:
        """Nothing to release: the server stays."""


def served_model(request: LoadRequest) -> ServedModel:
    """The model that a request is about; InputError for what is wrong with its options."""
    options = parse_options(ServerOptions, request.options)
    server = Server(base_url(request.model_dir), key_of(options), options.timeout_s, options.retries)
    return ServedModel(server, options.model)


def key_of(options: ServerOptions) -> str | None:
    """The key, from the environment.  No error quotes the option: it may hold the key itself by mistake."""
    if options.api_key_env is None:
        return None
    key = os.environ.get(options.api_key_env, "").strip()
    if not (key.isascii() and key.isprintable() and key):  # else the HTTP library would quote it
        raise InputError("engine.api_key_env: must name an environment variable that is set, and holds the key")
    return key


def stored(options: ServerOptions) -> Storage:
    """Size of ``weights``, if they are given; InputError if they are not there or damaged."""
    if options.weights is None:
        return Storage(note="a server does not say what it stores; give engine.weights or override_*")
    try:
        if options.weights.endswith(".gguf"):
            return gguf.read_model(Path(options.weights).expanduser()).storage()
        return stored_bits.storage_of(repositories.resolve(options.weights, None, download=False))
    except InputError as error:
        raise InputError(f"engine.weights: {str(error).removeprefix('model_dir: ')}") from None


Look = Callable[[ServedModel, "httpx2.AsyncClient"], Coroutine[Any, Any, T]]


def talk(served: ServedModel, look: Look[T]) -> T:
    """What ``look`` finds over a connection of its own; ServerError."""

    async def connected() -> T:
        async with served.server.client() as client:
            return await look(served, client)

    return asyncio.run(connected())


def asked(request: LoadRequest, look: Look[T]) -> T:
    """The same before anything is loaded; InputError."""
    served = served_model(request)
    try:
        return talk(served, look)
    except ServerError as error:
        raise InputError(f"model_dir: {served.server.url}: {error}") from None


async def first_of(tasks: set[asyncio.Task[T]]) -> set[asyncio.Task[T]]:
    """Those that have ended, as soon as one has."""
    return (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]


async def abandon(tasks: set[asyncio.Task[T]], client: httpx2.AsyncClient) -> None:
    """Cancel what is in flight, which makes vLLM drop the requests, and close the connections."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()
