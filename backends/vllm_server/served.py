"""A model that a server has: what it is asked, what its answers must hold, and what stands in the place of files.

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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compare_q.backends import hub
from compare_q.backends.base import ModelFacts, ModelFiles, Storage
from compare_q.backends.checkpoint import gguf
from compare_q.backends.checkpoint.folder import storage_of
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.json_files import expanded
from compare_q.backends.common.messages import shortened
from compare_q.backends.common.options import describe, parse_options
from compare_q.backends.vllm_server.client import (
    CONNECT_S,
    OURS,
    PER_TOKEN,
    SHORT_S,
    SMALL,
    Server,
    ServerError,
    base_url,
)

if TYPE_CHECKING:
    import httpx2

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
T = TypeVar("T")
Shape = TypeVar("Shape", bound=BaseModel)
Name = Annotated[str, Field(max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=MOST_LOGITS)]


class ServerOptions(BaseModel):
    """The ``engine`` object.  ``weights``: folder, GGUF file or hub id of the same model, to know its stored size."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    api_key_env: str | None = None
    concurrency: int = Field(32, gt=0)
    timeout_s: float = Field(600.0, gt=0)
    retries: int = Field(5, ge=0)
    weights: str | None = None


class Card(BaseModel):
    """What a server says of one model, by an entry of ``/v1/models`` and by ``/version``; None where it does not."""

    model_config = ConfigDict(populate_by_name=True)

    model: Name = Field(alias="id")
    root: Name | None = None
    parent: Name | None = None
    max_model_len: int | None = Field(None, ge=1)
    version: str | None = None


class ListedModels(BaseModel):
    """What ``/v1/models`` answers."""

    data: list[Card] = Field(default_factory=list)


class Version(BaseModel):
    """What ``/version`` answers."""

    version: Name | None = None


class Tokens(BaseModel):
    """What ``/tokenize`` answers."""

    tokens: list[TokenId] | None = None
    token_strs: list[Name] | None = None


class Entry(BaseModel):
    """A token's entry at a position."""

    logprob: float


class Choice(BaseModel):
    """A prompt and its continuation; a position's entries are by the ids of their tokens."""

    prompt_logprobs: list[dict[str, Entry] | None] | None = None


class Completion(BaseModel):
    """What ``/v1/completions`` answers; ``system_fingerprint`` is vLLM's digest of its version and configuration."""

    choices: list[Choice] = Field(min_length=1)
    system_fingerprint: Name | None = None


def shaped(shape: type[Shape], answer: Any) -> Shape:
    """An answer as vLLM builds it; ServerError for one that is built in another way, or has values of other types."""
    try:
        return shape.model_validate(answer, strict=True)
    except ValidationError as error:
        reason = f"its answer has another shape than vLLM's: {describe(error, ())}"
        raise ServerError(f"{reason}; {OURS}", 200) from None


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


@dataclass(frozen=True)
class Seen:
    """What a server says of a model before any window; ``tokens`` is id -> token of ``WORDS``, or why it says none."""

    card: Card
    sample: Sample
    tokens: dict[int, str] | str


class ServedModel(ModelFiles):
    """One model of a server, which has no files here: what it is asked, and what its answers must hold.

    The methods that ask over a given connection raise ServerError where an answer holds something else, the others
    ModelError for that, and for a server that is silent.
    """

    @cached_property
    def options(self) -> ServerOptions:
        """The ``engine`` object; InputError."""
        return parse_options(ServerOptions, self.planned.options)

    @cached_property
    def server(self) -> Server:
        """Where it is asked; InputError if the spec does not say it."""
        key = api_key(self.options)
        return Server(base_url(self.planned.model_dir), key, self.options.timeout_s, self.options.retries)

    def over_a_connection(self, ask: Callable[[httpx2.AsyncClient], Awaitable[T]]) -> T:
        """What ``ask`` finds over a connection of its own; ModelError."""

        async def connected() -> T:
            async with self.server.client() as client:
                return await ask(client)

        try:
            return asyncio.run(connected())
        except ServerError as error:
            raise ModelError(f"{self.server.url}: {error}") from None

    def see(self) -> Seen:
        """What the server says of the model; ModelError, and InputError if it has no such model."""

        async def ask(client: httpx2.AsyncClient) -> Seen:
            card = await self.card(client)
            return Seen(card, await self.sample(client, card.model), await self.vocabulary(client, card.model))

        return self.over_a_connection(ask)

    async def card(self, client: httpx2.AsyncClient) -> Card:
        """What the server says of the model that the spec names, or of its only one; InputError if it has no such."""
        listed = shaped(ListedModels, await self.server.ask(client, "/v1/models", within=CONNECT_S)).data
        cards = {card.model: card for card in listed}
        if not cards:
            raise ServerError(f"/v1/models names no model; {OURS}")
        wanted = self.options.model
        if wanted not in cards if wanted else len(cards) != 1:
            names, what = shortened(", ".join(cards)), f"no {wanted!r}" if wanted else "missing"
            raise InputError(f"model_dir: {self.server.url}: engine.model: {what}; it serves: {names}")
        card = cards[wanted] if wanted else listed[0]
        try:
            version = shaped(Version, await self.server.ask(client, "/version", within=SHORT_S)).version
        except ServerError as error:
            if error.status in (None, 200):
                raise
            version = None  # a proxy may pass /v1 only
        return card.model_copy(update={"version": version})

    async def completion(
        self, client: httpx2.AsyncClient, model: str, ids: Sequence[int], top: int, within: float = inf
    ) -> Completion:
        """The answer to a prompt of token ids.  One token is generated, as servers refuse to generate none."""
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
        largest = SMALL + PER_TOKEN * len(ids) * (top + 1)
        answer = await self.server.ask(client, "/v1/completions", body, within=within, largest=largest)
        return shaped(Completion, answer)

    async def sample(self, client: httpx2.AsyncClient, model: str) -> Sample:
        """Scores of ``SAMPLE_IDS``, after it was seen that they are log-probabilities."""
        try:
            answer = await self.completion(client, model, SAMPLE_IDS, TOP, SHORT_S)
        except ServerError as error:
            if error.status == 400 and "logprobs" in str(error):
                raise ServerError(f"{error}; start the server with --max-logprobs {TOP} or more") from None
            raise
        logprob = real_logprobs(SAMPLE_IDS, answer)
        check_normalized(answer)
        return Sample(logprob, answer.system_fingerprint)

    async def vocabulary(self, client: httpx2.AsyncClient, model: str) -> dict[int, str] | str:
        """Id -> token of ``WORDS``, or why the server does not say."""
        body = {"model": model, "prompt": WORDS, "add_special_tokens": False, "return_token_strs": True}
        try:
            answer = await self.server.ask(client, "/tokenize", body, within=SHORT_S)
        except ServerError as error:
            if error.status is None:
                raise
            return str(error)
        found = shaped(Tokens, answer)
        pairs = zip(found.tokens or (), found.token_strs or (), strict=False)
        words = {number: token for number, token in pairs if token.isascii() and token.isalnum()}
        return words or "/tokenize shows no tokens"

    @cached_property
    def seen(self) -> Seen:
        """What the server says, asked once."""
        return self.see()

    def facts(self) -> ModelFacts:
        longest, tokens = self.seen.card.max_model_len, self.seen.tokens
        context = None if longest is None else longest - 1
        return ModelFacts(context=context, tokenizer=None if isinstance(tokens, str) else tokens)

    def stamp(self) -> str:
        card, sample = self.seen.card, self.seen.sample
        return json.dumps([self.server.url, card.model_dump(), sample.fingerprint, sample.rounded], sort_keys=True)

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
        weights = self.options.weights
        if weights is None:
            return Storage(note="a server does not say what it stores; give engine.weights or override_*")
        try:
            if weights.endswith(".gguf"):
                return gguf.read_model(expanded(weights)).storage()
            return storage_of(hub.resolve(weights, None, download=False))
        except InputError as error:
            raise InputError(f"engine.weights: {str(error).removeprefix('model_dir: ')}") from None


def is_stamped(stamp: str, card: Card, sample: Sample) -> bool:
    """Whether a server still is what ``stamp`` saw, which is part of the scores' key."""
    _, of_card, fingerprint, rounded = json.loads(stamp)
    return card.model_dump() == of_card and sample.agrees(Sample(np.array(rounded, np.float32), fingerprint))


def api_key(options: ServerOptions) -> str | None:
    """The server's key, from the environment.  No error quotes the option, which may hold the key by mistake."""
    if options.api_key_env is None:
        return None
    key = os.environ.get(options.api_key_env, "").strip()
    if not (key.isascii() and key.isprintable() and key):  # else the HTTP library would quote it
        raise InputError("engine.api_key_env: must name an environment variable that is set, and holds the key")
    return key


def real_logprobs(ids: Sequence[int], answer: Completion) -> NDArray[np.float32]:
    """Log-probabilities float32 [L - 1] of a prompt's tokens but the first, from ``prompt_logprobs``; ServerError.

    Entry i scores token i: one of its keys must be the id of the real token.  The first entry is empty.
    """
    entries = answer.choices[0].prompt_logprobs
    if entries is None:
        raise ServerError("its answer has no prompt_logprobs; compare_q needs vLLM's own server, `vllm serve`")
    if len(entries) != len(ids) or entries[0] is not None:
        raise ServerError(f"its answer has prompt_logprobs of {len(entries)} positions for {len(ids)} tokens")
    found = [(entry or {}).get(str(token)) for token, entry in zip(ids, entries, strict=True)]
    if None in found[1:]:
        at = found.index(None, 1)
        raise ServerError(f"its answer does not score token {ids[at]} at position {at}")
    logprob = np.array([entry.logprob for entry in found if entry is not None])
    if (logprob > ROUNDING).any() or (logprob < np.finfo(np.float32).min).any():
        raise ServerError(NO_LOGPROBS)
    logprob[logprob == CLAMPED] = -np.inf
    return logprob.astype(np.float32)


def check_normalized(answer: Completion) -> None:
    """ServerError unless the entries of every position but the first can be log-probabilities.

    The ``TOP`` entries of a position must sum to 1 at most, and reach 1 if every other token were as probable as the
    last of them.
    """
    for entry in (answer.choices[0].prompt_logprobs or ())[1:]:
        if entry is None or len(entry) < TOP:
            few = f"answers {len(entry or ())} of {TOP} entries"
            raise ServerError(f"{few}; start the server with --max-logprobs {TOP} or more")
        values = np.array([each.logprob for each in entry.values()])
        with np.errstate(over="ignore"):
            top = np.exp(np.sort(values)[-TOP:])
        if not top.sum() <= 1 + ROUNDING or top.sum() + MOST_LOGITS * top[0] < 1 - ROUNDING:
            raise ServerError(NO_LOGPROBS)
