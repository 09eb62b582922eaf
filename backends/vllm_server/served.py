"""A model that a server has: what it is, asked before any window, in the place of files.

Before anything is scored, a sample is taken: 32 token ids are scored with ``TOP`` entries a position, which shows
whether the server answers log-probabilities or logits.  The sample's values are part of the scores' key (``stamp``),
since a server can be started again with other weights under the same name.  Values rounded to 0.01 nats survive float32
noise.  Where other traffic on the server moves bf16 roundings (by 0.03 nats), they change, and the model is measured
again, which costs time and nothing else.  Other weights would have to agree in all 31 values.  The sample is taken
again when the model is loaded and before scores are kept: scores of a model that was swapped in are not kept.  A model
that was swapped and swapped back in between is not noticed.

The server's tokenizer must split ``WORDS`` into tokens that mean the same to the tokenizer of the data; tokens that do
not occur in ``WORDS`` are not compared.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from backends import hub
from backends.base import LoadRequest, ModelFacts, ModelFiles, Storage
from backends.checkpoint import gguf, stored_bits
from backends.common.errors import InputError, ModelError
from backends.common.json_files import expanded
from backends.common.options import parse_options
from backends.vllm_server.client import Card, Sample, ServedModel, Server, ServerError, base_url

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")


class ServerOptions(BaseModel):
    """The ``engine`` object.  ``weights``: folder, GGUF file or hub id of the same model, to know its stored size."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    api_key_env: str | None = None
    concurrency: int = Field(32, gt=0)
    timeout_s: float = Field(600.0, gt=0)
    retries: int = Field(5, ge=0)
    weights: str | None = None


class ServedModelFiles(ModelFiles):
    """See the module's docstring; ModelError for a server that is silent, or no vLLM."""

    def facts(self) -> ModelFacts:
        async def look(served: ServedModel, client: httpx2.AsyncClient) -> ModelFacts:
            card = await served.card(client)
            tokens = await served.vocabulary(client, card.model)
            context = None if card.max_model_len is None else card.max_model_len - 1
            return ModelFacts(context=context, tokenizer=None if isinstance(tokens, str) else tokens)

        return over_a_connection(served_model(self.request), look)

    def stamp(self) -> str:
        async def look(served: ServedModel, client: httpx2.AsyncClient) -> str:
            card = await served.card(client)
            sample = await served.sample(client, card.model)
            return json.dumps([served.server.url, asdict(card), sample.fingerprint, sample.rounded], sort_keys=True)

        return over_a_connection(served_model(self.request), look)

    def content(self) -> str:
        return ""  # a server is the same from every machine

    @classmethod
    def same_model(cls, stamp: str, other: str) -> bool:
        try:
            url, card, fingerprint, rounded = json.loads(stamp)
            sample = Sample(np.array(rounded, np.float32), fingerprint)
            return bool(json.loads(other)[0] == url) and is_stamped(other, Card(**card), sample)
        except (ValueError, TypeError, LookupError):  # a stamp from a file, which may be damaged
            return False

    def storage(self) -> Storage:
        return stored_size(parse_options(ServerOptions, self.request.options))


def is_stamped(stamp: str, card: Card, sample: Sample) -> bool:
    """Whether a server still is what ``stamp`` saw, which is part of the scores' key."""
    _, of_card, fingerprint, rounded = json.loads(stamp)
    return asdict(card) == of_card and sample.agrees(Sample(np.array(rounded, np.float32), fingerprint))


def served_model(request: LoadRequest) -> ServedModel:
    """The model that a request is about; InputError for what is wrong with its options."""
    options = parse_options(ServerOptions, request.options)
    server = Server(base_url(request.model_dir), api_key(options), options.timeout_s, options.retries)
    return ServedModel(server, options.model)


def api_key(options: ServerOptions) -> str | None:
    """The server's key, from the environment.  No error quotes the option, which may hold the key by mistake."""
    if options.api_key_env is None:
        return None
    key = os.environ.get(options.api_key_env, "").strip()
    if not (key.isascii() and key.isprintable() and key):  # else the HTTP library would quote it
        raise InputError("engine.api_key_env: must name an environment variable that is set, and holds the key")
    return key


def stored_size(options: ServerOptions) -> Storage:
    """Stored size of the model that ``weights`` names; InputError if its files are not there, or damaged."""
    if options.weights is None:
        return Storage(note="a server does not say what it stores; give engine.weights or override_*")
    try:
        if options.weights.endswith(".gguf"):
            return gguf.read_model(expanded(options.weights)).storage()
        return stored_bits.storage_of(hub.resolve(options.weights, None, download=False))
    except InputError as error:
        raise InputError(f"engine.weights: {str(error).removeprefix('model_dir: ')}") from None


Look = Callable[[ServedModel, "httpx2.AsyncClient"], Coroutine[Any, Any, T]]


def over_a_connection(served: ServedModel, look: Look[T]) -> T:
    """What ``look`` finds over a connection of its own; ModelError."""

    async def connected() -> T:
        async with served.server.client() as client:
            return await look(served, client)

    try:
        return asyncio.run(connected())
    except ServerError as error:
        raise ModelError(f"{served.server.url}: {error}") from None
