"""A running ``vllm serve``: log-probabilities of tokens from its completions endpoint.

``model_dir`` is the server's base URL.  A window is sent as token ids with ``prompt_logprobs=0``.
vLLM answers with the log-probability of each real token, with all digits of a float32.  vLLM
computes the whole window, without its prefix cache.  Entropy, top-1 and KL divergence are unknown,
because an answer does not have all logits.  The returned rank does not identify the top token
either, because it also counts tokens of equal probability.

Before any window is scored, the engine takes a sample: the server scores ``SAMPLE_IDS`` with
``TOP`` entries per position.  The sample shows whether the server returns log-probabilities or
logits.  The sample, rounded to 0.01 nats, is part of the scores' key (``stamp``), because a server
may be restarted with other weights under the same name.  The engine takes the sample again after
loading and before scores are kept.  Between windows, and before scores are kept, it requests the
first tokens of windows again over new connections (``Repeats``), to find a second model at the
address.

The server must split ``SAMPLE_WORDS`` into tokens that the tokenizer of the data also has.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from math import inf
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from .. import hub
from ..base import (
    Capabilities,
    Engine,
    ModelFacts,
    ModelFiles,
    PlannedModel,
    ScoreRequest,
    Storage,
    TokenScores,
    Window,
)
from ..checkpoint import gguf
from ..checkpoint.folder import storage_of
from ..common.engine_options import parse_options
from ..common.errors import InputError, ModelError
from ..common.json_files import expanded
from ..common.message_text import shortened
from .client import (
    CONNECT_S,
    OURS,
    PER_TOKEN,
    SHORT_S,
    SMALL_ANSWER_BYTES,
    Connection,
    Server,
    ServerError,
    base_url,
)
from .placeholders import placeholder
from .repeats import Beginning, Repeats

SAMPLE_IDS = tuple(range(33, 65))
"""Ordinary tokens in every vocabulary: single bytes or characters."""
TOP = 20
"""vLLM's own default of --max-logprobs."""
MOST_LOGITS = 1 << 20
"""Four times the largest vocabulary."""
CLAMPED = -9999.0
"""vLLM's server writes this for minus infinity, which JSON does not have."""
ROUNDING = 1e-3
"""Largest excess of a sum of probabilities over 1, or of a log-probability over 0."""
MOVED = 0.05
"""Largest change of a sample, in nats.  Other requests change it by 0.03 in bfloat16.  Other
weights would only pass if all 31 values agreed to this precision."""
MORE_LOGPROBS = f"start the server with --max-logprobs {TOP} or more"
NO_LOGPROBS = (
    "its values are no log-probabilities; start the server with --logprobs-mode raw_logprobs"
)
NO_FINGERPRINT = (
    "the server sends no system_fingerprint: its model was only sampled, and a second deployment "
    "that answers few requests may go unnoticed"
)
SAMPLE_WORDS = (
    "water government photosynthesis antidisestablishmentarianism Mississippi unbelievably "
    "strength xylophone quickly JavaScript HttpRequest return lambda function1024 2048 password "
    "kilometre Wissenschaft naturellement electroencephalography counterrevolutionaries zygote "
    "rhythm Azerbaijan tokenization perplexity hexadecimal misunderstanding quantization 31415926 "
    "incomprehensibilities jeopardize bookkeeper Shakespeare oxygen"
).replace(" ", "\n")
"""One word per line; tokens of letters and digits look the same in every kind of vocabulary."""
T = TypeVar("T")
Name = Annotated[str, Field(max_length=1000)]


class ServerOptions(BaseModel):
    """The ``engine`` object of a spec."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    api_key_env: str | None = None
    concurrency: int = Field(32, gt=0)
    timeout_s: float = Field(600.0, gt=0)
    retries: int = Field(5, ge=0)
    weights: str | None = None  # folder, GGUF file or hub id of the same model, for its stored size


class Card(BaseModel):
    """One model of a server: an entry of ``/v1/models``, and the server's ``/version``."""

    model_config = ConfigDict(populate_by_name=True)

    model: Name = Field(alias="id")
    root: Name | None = None
    parent: Name | None = None
    max_model_len: int | None = Field(None, ge=1)
    version: str | None = None


class Answer(BaseModel):
    """Answer of ``/v1/models``, of ``/version``, or of ``/tokenize``."""

    data: list[Card] = []
    version: Name | None = None
    tokens: list[int] | None = None
    token_strs: list[Name] | None = None


class Entry(BaseModel):
    """One token at one position."""

    logprob: float


class Choice(BaseModel):
    """The scores of a prompt: for each position, token id -> entry."""

    prompt_logprobs: list[dict[str, Entry] | None] | None = None


class Completion(BaseModel):
    """Answer of ``/v1/completions``."""

    model: Name | None = None
    choices: list[Choice] = Field(min_length=1)
    system_fingerprint: Name | None = None  # vLLM's digest of its version and configuration


class Sample(NamedTuple):
    """A model's scores of ``SAMPLE_IDS``, and the server's fingerprint."""

    logprob: NDArray[np.float32]  # [len(SAMPLE_IDS) - 1]
    fingerprint: str | None

    @property
    def rounded(self) -> list[str]:
        """The values to 0.01 nats, as text, since JSON has no infinity."""
        return [f"{value:.2f}" for value in self.logprob]

    def agrees(self, other: Sample) -> bool:
        """True if both can be of the same model."""
        # For allclose, equal infinities are close.
        close = np.allclose(self.logprob, other.logprob, rtol=0, atol=MOVED)
        return close and self.fingerprint == other.fingerprint


class Served(NamedTuple):
    """The model that a spec names."""

    card: Card
    names: frozenset[str]  # all names under which the server has the model


class ServerInfo(NamedTuple):
    """A server's answers before any window."""

    served: Served
    sample: Sample
    tokens: dict[int, str] | str  # id -> token of ``SAMPLE_WORDS``, or why they are missing


class ServedModel(ModelFiles):
    """One model of a server, without files on this machine.

    Coroutines send requests over the connection that they receive, and raise ServerError.  The
    other methods open their own connection.  They raise ModelError if the server does not answer or
    answers something unexpected, and InputError if the spec is wrong.
    """

    @cached_property
    def options(self) -> ServerOptions:
        """The spec's ``engine`` object; InputError."""
        return parse_options(ServerOptions, self.planned.options)

    @cached_property
    def server(self) -> Server:
        """The server that the spec names; InputError."""
        key = self.api_key()
        url = base_url(self.planned.model_dir)
        return Server(url, key, self.options.timeout_s, self.options.retries)

    def api_key(self) -> str | None:
        """Return the server's key from the environment; None if the spec names no variable."""
        variable = self.options.api_key_env
        if variable is None:
            return None
        key = os.environ.get(variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            # The message must not quote the name, which may be the key itself.
            raise InputError(
                "engine.api_key_env: must name an environment variable that is set, "
                "and holds the key"
            )
        return key

    def connected(
        self,
        question: Callable[[Connection], Awaitable[T]],
        connections: int = 1,
        *,
        keep: bool = True,
    ) -> T:
        """Return the answer to a question over new connections, which are closed; ModelError.

        ``connections`` and ``keep``: see ``Connection``.
        """

        async def answer() -> T:
            async with Connection(self.server, connections, keep=keep) as connection:
                return await question(connection)

        try:
            return asyncio.run(answer())
        except ServerError as error:
            raise ModelError(f"{self.server.url}: {error}") from None

    @cached_property
    def info(self) -> ServerInfo:
        """Card, sample and tokens; ModelError, or InputError if the server lacks the model."""

        async def question(connection: Connection) -> ServerInfo:
            served = await self.lookup(connection)
            sample = await self.sample(connection, served)
            tokens = await self.vocabulary(connection, served.card.model)
            return ServerInfo(served, sample, tokens)

        return self.connected(question)

    async def lookup(self, connection: Connection) -> Served:
        """Return the model that the spec names, or the server's only model.

        ServerError if the server has no model, InputError if it lacks the named one.
        """
        answer = await connection.ask("/v1/models", Answer, None, CONNECT_S)
        cards = {card.model: card for card in answer.data}
        if not cards:
            raise ServerError(f"/v1/models names no model; {OURS}")
        card = self.card_of_spec(cards)
        version = None
        answer_or_reason = await answer_or_refusal(connection, "/version")
        if not isinstance(answer_or_reason, str):
            version = answer_or_reason.version
        return Served(card.model_copy(update={"version": version}), names_of(card, cards))

    def card_of_spec(self, cards: Mapping[str, Card]) -> Card:
        """Return the card of the model that the spec names, or the only card; InputError."""
        name = self.options.model
        if name and name in cards:
            return cards[name]
        if not name and len(cards) == 1:
            return next(iter(cards.values()))
        fault = "missing"
        if name:
            fault = f"no {name!r}"
        names = shortened(", ".join(cards))
        raise InputError(f"model_dir: {self.server.url}: engine.model: {fault}; it serves: {names}")

    async def completion(
        self,
        connection: Connection,
        served: Served,
        ids: Sequence[int],
        top: int,
        within: float = inf,
        **more: int,
    ) -> Completion:
        """Return the answer to a prompt of token ids.

        ``more``: further keys of the request.  ServerError if another model answers, for example a
        router's fallback.
        """
        model = served.card.model
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,  # servers refuse to generate 0 tokens
            "temperature": 0,
            "prompt_logprobs": top,
            **more,
        }
        largest = SMALL_ANSWER_BYTES + PER_TOKEN * len(ids) * (top + 1)
        answer = await connection.ask("/v1/completions", Completion, body, within, largest)
        if answer.model is not None and answer.model not in served.names:
            raise ServerError(
                f"{connection.quoted(answer.model)} answers in place of {model}; {OURS}"
            )
        return answer

    async def sample(self, connection: Connection, served: Served) -> Sample:
        """Return the sample, after a check that its values are log-probabilities."""
        # Another seed changes nothing at temperature 0, but a proxy that caches answers by the
        # request's body must ask the model again.
        seed = random.getrandbits(31)
        try:
            answer = await self.completion(connection, served, SAMPLE_IDS, TOP, SHORT_S, seed=seed)
        except ServerError as error:
            hint = ""
            if error.status == 400 and "logprobs" in str(error):
                hint = f"; {MORE_LOGPROBS}"
            raise ServerError(f"{error}{hint}", error.status) from None
        logprob = real_logprobs(SAMPLE_IDS, answer)
        check_normalized(answer)
        return Sample(logprob, answer.system_fingerprint)

    async def vocabulary(self, connection: Connection, model: str) -> dict[int, str] | str:
        """Return id -> token of ``SAMPLE_WORDS``, or why the server does not return them."""
        body = {
            "model": model,
            "prompt": SAMPLE_WORDS,
            "add_special_tokens": False,
            "return_token_strs": True,
        }
        answer = await answer_or_refusal(connection, "/tokenize", body)
        if isinstance(answer, str):
            return answer
        tokens = {}
        for number, token in zip(answer.tokens or (), answer.token_strs or (), strict=False):
            # Vocabularies write other characters, such as a leading space, in different ways.
            if token.isascii() and token.isalnum():
                tokens[number] = token
        return tokens or "/tokenize shows no tokens"

    def facts(self) -> ModelFacts:
        max_model_len = self.info.served.card.max_model_len
        context = None
        if max_model_len is not None:
            context = max_model_len - 1  # one token is generated
        tokenizer = None
        if not isinstance(self.info.tokens, str):
            tokenizer = self.info.tokens
        return ModelFacts(context=context, tokenizer=tokenizer)

    def stamp(self) -> str:
        card = self.info.served.card.model_dump()
        sample = self.info.sample
        parts = [self.server.url, card, sample.fingerprint, sample.rounded]
        return json.dumps(parts, sort_keys=True)

    def content(self) -> str:
        return ""  # a server is the same from every machine

    def storage(self) -> Storage:
        weights = self.options.weights
        if weights is None:
            return Storage(
                note="a server does not report what it stores; give engine.weights or override_*"
            )
        try:
            if weights.endswith(".gguf"):
                return gguf.read_model(expanded(weights)).storage()
            return storage_of(hub.resolve(weights, None, download=False))
        except InputError as error:
            raise InputError(f"engine.weights: {str(error).removeprefix('model_dir: ')}") from None


def names_of(card: Card, cards: Mapping[str, Card]) -> frozenset[str]:
    """Return all names of the model of a card, which have the same root.

    vLLM answers with the first of them.
    """
    names = set()
    for name, other in cards.items():
        if (other.root or name, other.parent) == (card.root or card.model, card.parent):
            names.add(name)
    return frozenset(names)


async def answer_or_refusal(connection: Connection, path: str, body: Any = None) -> Answer | str:
    """Return the answer, or the reason of a refusal: a proxy may forward only /v1."""
    try:
        return await connection.ask(path, Answer, body, SHORT_S)
    except ServerError as error:
        if error.status in (None, 200):
            raise
        return str(error)


def real_logprobs(ids: Sequence[int], answer: Completion) -> NDArray[np.float32]:
    """Return log-probabilities [L - 1] of a prompt's tokens except the first; ServerError.

    Entry i of ``prompt_logprobs`` scores token i: one of its keys must be the id of the real token.
    The first entry is empty.
    """
    entries = answer.choices[0].prompt_logprobs
    if entries is None:
        raise ServerError(
            "its answer has no prompt_logprobs; compare_q needs vLLM's own server, `vllm serve`"
        )
    if len(entries) != len(ids) or entries[0] is not None:
        raise ServerError(
            f"its answer has prompt_logprobs of {len(entries)} positions for {len(ids)} tokens"
        )
    scored = [(entry or {}).get(str(token)) for token, entry in zip(ids, entries, strict=True)]
    if None in scored[1:]:
        at = scored.index(None, 1)
        raise ServerError(f"its answer does not score token {ids[at]} at position {at}")
    logprob = np.array([entry.logprob for entry in scored if entry is not None])
    # Below the range of float32, the conversion would turn a value into minus infinity.
    if (logprob > ROUNDING).any() or (logprob < np.finfo(np.float32).min).any():
        raise ServerError(NO_LOGPROBS)
    # vLLM sends minus infinity, which JSON does not have, as CLAMPED.
    logprob[logprob == CLAMPED] = -np.inf
    logprob_f32 = logprob.astype(np.float32)
    problem = placeholder(logprob_f32)
    if problem:
        raise ServerError(problem)
    return logprob_f32


def check_normalized(answer: Completion) -> None:
    """ServerError unless the entries of every position except the first can be log-probabilities.

    The probabilities of a position's ``TOP`` entries sum to at most 1.  No other token is more
    probable than the least probable entry: with its probability for every other token, the sum
    over all tokens is at least 1.
    """
    for entry in (answer.choices[0].prompt_logprobs or ())[1:]:
        if entry is None or len(entry) < TOP:
            raise ServerError(f"answers {len(entry or ())} of {TOP} entries; {MORE_LOGPROBS}")
        values = np.array([scores.logprob for scores in entry.values()])
        with np.errstate(over="ignore"):  # logits may be large; the sum is then infinite
            top = np.exp(np.sort(values)[-TOP:])
            most_of_all = top.sum() + MOST_LOGITS * top[0]
        # NaN fails the first comparison.
        if not top.sum() <= 1 + ROUNDING or most_of_all < 1 - ROUNDING:
            raise ServerError(NO_LOGPROBS)


class VllmServerEngine(Engine):
    """Scores windows by requests to a server, several in flight."""

    capabilities = Capabilities(
        load_fns=("vllm_server",),
        fwd_fn="vllm_server",
        packages=("httpx2",),
        install="pip install httpx2",
        summary="a running `vllm serve`, by its URL: perplexity only",
        reference=False,
        compares=False,
        schemes=("http://", "https://"),
        here=False,
    )
    files = ServedModel
    info: ServerInfo

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.served = ServedModel(model)
        self.options = self.served.options
        self.retries = 0  # requests of the last run that had to be sent again
        self.repeats = Repeats()

    @classmethod
    def option_names(cls) -> Collection[str]:
        return ServerOptions.model_fields.keys()

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        served = ServedModel(model)
        # For its InputError: ``engine.weights`` may be wrong.
        served.storage()
        max_model_len = served.info.served.card.max_model_len
        if max_model_len is not None and max_model_len <= model.max_tokens:
            raise InputError(
                f"model_dir: {served.server.url}: takes {max_model_len} tokens, windows of "
                f"{model.max_tokens} and one more to generate need a server started with "
                f"--max-model-len {model.max_tokens + 1}"
            )

    @classmethod
    def versions(cls) -> dict[str, str]:
        # The server's versions are in the stamp, and nothing on this machine can change a score.
        return {}

    def load(self) -> None:
        self.info = self.served.info
        if not self.planned.stamp:
            return
        # The stamp is part of the scores' key.
        _, card, fingerprint, rounded = json.loads(self.planned.stamp)
        stamped = Sample(np.array(rounded, np.float32), fingerprint)
        if self.info.served.card.model_dump() != card or not self.info.sample.agrees(stamped):
            url = self.served.server.url
            raise ModelError(f"{url}: the server's model changed before it was scored; run again")

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield scores as windows finish; ModelError also if the model changed.

        A failure cancels all requests.  Repetitions count as requests in flight, so that the number
        of requests never exceeds the user's limit.
        """
        queue = iter(windows)
        limit = self.options.concurrency
        connections = Connection(self.served.server, limit)
        # A router may send each new connection to another deployment.
        new_connections = Connection(self.served.server, limit, keep=False)
        in_flight: set[asyncio.Task[TokenScores | None]] = set()
        with asyncio.Runner() as runner:
            loop = runner.get_loop()

            def request_again() -> None:
                repetition = self.repeat(new_connections, self.repeats.next())
                in_flight.add(loop.create_task(repetition))

            try:
                while True:
                    for window in islice(queue, limit - len(in_flight)):
                        in_flight.add(loop.create_task(self.window(connections, window)))
                    if not in_flight:  # all windows are answered
                        for _ in range(min(self.repeats.n_due, limit)):
                            request_again()
                    if not in_flight:
                        return
                    finished, _ = runner.run(
                        asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                    )
                    for task in finished:
                        in_flight.remove(task)
                        scores = task.result()
                        if scores is None:  # a repetition
                            continue
                        while len(in_flight) < limit and self.repeats.is_due():
                            request_again()
                        yield scores
            finally:
                self.retries = connections.retried + new_connections.retried
                # vLLM drops the requests of cancelled tasks.
                runner.run(abandon(in_flight, connections, new_connections))

    def check_unchanged(self) -> None:
        """ModelError if the loaded model is no longer the server's, or not the only one.

        It is called between two windows of ``score``, which has its own connections.
        """
        if self.repeats.problem:  # an error of ``score`` leads to a last commit
            raise ModelError(f"{self.served.server.url}: {self.repeats.problem}")

        async def question(connection: Connection) -> Sample:
            sampling = self.served.sample(connection, self.info.served)
            window = self.repeats.at_commit()
            if window is None:
                return await sampling
            sample, _ = await asyncio.gather(sampling, self.repeat(connection, window))
            return sample

        sample = self.served.connected(question, connections=2, keep=False)
        if not self.info.sample.agrees(sample):
            self.repeats.problem = "the server's model changed while it was scored; run again"
            raise ModelError(f"{self.served.server.url}: {self.repeats.problem}")

    async def window(self, connection: Connection, window: Window) -> TokenScores:
        """Return the scores of one window; ModelError with the index of the window."""
        ids = window.token_ids.tolist()
        try:
            logprob = await self.logprobs(connection, ids)
        except ServerError as error:
            raise ModelError(f"window {window.index}: {self.served.server.url}: {error}") from None
        self.repeats.add(window.token_ids, logprob)
        return TokenScores(window.index, logprob[window.positions - 1])

    async def repeat(self, connection: Connection, window: Beginning) -> None:
        """Request the first tokens of a window again; ModelError if another model answers."""
        try:
            logprob = await self.logprobs(connection, window.ids.tolist())
            self.repeats.compare(window, logprob)
        except ServerError as error:
            raise ModelError(f"{self.served.server.url}: {error}") from None

    async def logprobs(self, connection: Connection, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return log-probabilities [L - 1] of a prompt's tokens except the first; ServerError."""
        answer = await self.served.completion(connection, self.info.served, ids, 0)
        logprob = real_logprobs(ids, answer)
        fingerprint = self.info.sample.fingerprint
        if answer.system_fingerprint != fingerprint:
            raise ServerError(
                f"{answer.system_fingerprint} answers in place of {fingerprint}; "
                "let one server stay at this URL"
            )
        return logprob

    def provenance(self) -> dict[str, Any]:
        tokens = self.info.tokens
        if isinstance(tokens, str):
            tokenizer = f"not compared: {tokens}"
        else:
            tokenizer = f"{len(tokens)} tokens compared"
        notes = self.repeats.notes()
        if self.info.sample.fingerprint is None:
            notes.append(NO_FINGERPRINT)
        return {
            "url": self.served.server.url,
            "server": self.info.served.card.model_dump(),
            "system_fingerprint": self.info.sample.fingerprint,
            "probe": self.info.sample.rounded,  # results.json has always called the sample "probe"
            "batch": f"up to {self.options.concurrency} windows in flight",
            "retries": self.retries,
            "repeats": self.repeats.provenance(),
            "notes": notes,
            "tokenizer": tokenizer,
            "hardware": "unknown: a server does not report it",
            "kernels": "unknown: a server does not report its kernels",
        }


async def abandon(tasks: set[asyncio.Task[TokenScores | None]], *connections: Connection) -> None:
    """Cancel the tasks and close the connections."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for connection in connections:
        await connection.close()
