"""A running ``vllm serve``: log-probabilities of tokens from its completions endpoint.

``model_dir`` is the server's base URL.  A window is sent as token ids with ``prompt_logprobs=0``.
vLLM answers with the log-probability of each real token, with all digits of a float32.  vLLM
computes the whole window, without its prefix cache.  The entropy is unknown, because an answer does
not have all logits.

With a reference, ``prompt_logprobs`` is ``TOP``, or as many as the server allows.  vLLM then also
answers with its most probable tokens, which give a bound or an estimate of the KLD (``ServerKld``).

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
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from math import inf
from typing import Any, NamedTuple, TypeVar

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
from ..common.packages import installed_versions
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
from .prompt_logprobs import (
    MORE_LOGPROBS,
    TOP,
    Completion,
    Name,
    check_normalized,
    real_logprobs,
    top_entries,
)
from .repeats import Beginning, Repeats
from .server_kld import ServerKld

SAMPLE_IDS = tuple(range(33, 65))
"""Ordinary tokens in every vocabulary: single bytes or characters."""
MOVED = 0.05
"""Largest change of a sample, in nats.  Other requests change it by 0.03 in bfloat16.  Other
weights would only pass if all 31 values agreed to this precision."""
NO_FINGERPRINT = (
    "the server sends no system_fingerprint: its model was only sampled, and a second deployment "
    "that answers few requests may go unnoticed"
)
NO_TORCH = "torch is not installed here; pip install torch, and run again"
SAMPLE_WORDS = (
    "water government photosynthesis antidisestablishmentarianism Mississippi unbelievably "
    "strength xylophone quickly JavaScript HttpRequest return lambda function1024 2048 password "
    "kilometre Wissenschaft naturellement electroencephalography counterrevolutionaries zygote "
    "rhythm Azerbaijan tokenization perplexity hexadecimal misunderstanding quantization 31415926 "
    "incomprehensibilities jeopardize bookkeeper Shakespeare oxygen"
).replace(" ", "\n")
"""One word per line; tokens of letters and digits look the same in every kind of vocabulary."""
T = TypeVar("T")


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


class Sample(NamedTuple):
    """A model's scores of ``SAMPLE_IDS``, and the server's fingerprint.

    ``top``: how many of the most probable tokens the server returns at a position.  ``no_top``: why
    the server's entries are not these tokens; empty if they are.
    """

    logprob: NDArray[np.float32]  # [len(SAMPLE_IDS) - 1]
    fingerprint: str | None
    top: int
    no_top: str = ""

    @property
    def rounded(self) -> list[str]:
        """The values to 0.01 nats, as text, since JSON has no infinity."""
        return [f"{value:.2f}" for value in self.logprob]

    def agrees(self, other: Sample) -> bool:
        """True if both can be of the same model."""
        # For allclose, equal infinities are close.
        close = np.allclose(self.logprob, other.logprob, rtol=0, atol=MOVED)
        return close and (self.fingerprint, self.top) == (other.fingerprint, other.top)


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

    async def sample(self, connection: Connection, served: Served, top: int = TOP) -> Sample:
        """Return the sample, after a check that its values are log-probabilities.

        With fewer than ``top`` tokens per position if the server allows fewer.
        """
        # Another seed changes nothing at temperature 0, but a proxy that caches answers by the
        # request's body must ask the model again.
        seed = random.getrandbits(31)
        try:
            answer = await self.completion(connection, served, SAMPLE_IDS, top, SHORT_S, seed=seed)
        except ServerError as error:
            is_limit = error.status == 400 and "logprobs" in str(error)
            if not is_limit:
                raise
            fewer = allowed_logprobs(str(error))
            if 0 < fewer < top:
                return await self.sample(connection, served, fewer)
            raise ServerError(f"{error}; {MORE_LOGPROBS}", error.status) from None
        logprob = real_logprobs(SAMPLE_IDS, answer)
        check_normalized(answer, top)
        no_top = ""
        try:
            top_entries(SAMPLE_IDS, range(1, len(SAMPLE_IDS)), answer, top)
        except ServerError as error:
            no_top = f"{self.server.url}: {error}"
        return Sample(logprob, answer.system_fingerprint, top, no_top)

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
        parts = [self.server.url, card, sample.fingerprint, sample.rounded, sample.top]
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


def allowed_logprobs(refusal: str) -> int:
    """Return the server's --max-logprobs from its words; 0 if they do not name it."""
    found = re.search(r"max allowed: (\d{1,9})\b", refusal)
    if found is None:
        return 0
    return int(found[1])


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


class VllmServerEngine(Engine):
    """Scores windows by requests to a server, several in flight."""

    capabilities = Capabilities(
        load_fns=("vllm_server",),
        fwd_fn="vllm_server",
        packages=("httpx2",),
        install="pip install httpx2",
        summary="a running `vllm serve`, by its URL: perplexity, and a bound of the KLD",
        reference=False,
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
        self.no_kld = ""  # why the last run has no KLD, although it has a reference
        self.kld: ServerKld | None = None  # of the run that scores now

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
        # The server's versions are in the stamp.  On this machine, only a missing torch changes
        # what is known.
        if installed_versions(("torch",)):
            return {}
        return {"torch": "missing"}

    def load(self) -> None:
        self.info = self.served.info
        if not self.planned.stamp:
            return
        # The stamp is part of the scores' key.
        _, card, fingerprint, rounded, top = json.loads(self.planned.stamp)
        stamped = Sample(np.array(rounded, np.float32), fingerprint, top)
        if self.info.served.card.model_dump() != card or not self.info.sample.agrees(stamped):
            url = self.served.server.url
            raise ModelError(f"{url}: the server's model changed before it was scored; run again")

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield scores as windows finish; ModelError also if the model changed.

        A failure cancels all requests.  Repetitions count as requests in flight, so that the number
        of requests never exceeds the user's limit.
        """
        self.kld = self.comparison(request)
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
                if self.kld is not None:
                    self.kld.close()

    def comparison(self, request: ScoreRequest) -> ServerKld | None:
        """Return what computes the KLD of a run; None without a reference, or with ``no_kld``."""
        self.no_kld = ""
        if request.reference is None:
            return None
        self.no_kld = self.info.sample.no_top
        if self.no_kld:
            return None
        try:
            return ServerKld(request.reference)
        except ImportError:
            self.no_kld = NO_TORCH
            return None

    def check_unchanged(self) -> None:
        """ModelError if the loaded model is no longer the server's, or not the only one.

        It is called between two windows of ``score``, which has its own connections.
        """
        if self.repeats.problem:  # an error of ``score`` leads to a last commit
            raise ModelError(f"{self.served.server.url}: {self.repeats.problem}")

        async def question(connection: Connection) -> Sample:
            sampling = self.served.sample(connection, self.info.served, self.info.sample.top)
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
        top = 0
        if self.kld is not None:
            top = self.info.sample.top
        try:
            answer = await self.answer(connection, ids, top)
            logprob = real_logprobs(ids, answer)
            self.repeats.add(window.token_ids, logprob)
            of_targets = logprob[window.positions - 1]
            if self.kld is None:
                return TokenScores(window.index, of_targets)
            entries = top_entries(ids, window.positions.tolist(), answer, top)
        except ServerError as error:
            raise ModelError(f"window {window.index}: {self.served.server.url}: {error}") from None
        return await self.kld.compared(window, of_targets, entries)

    async def repeat(self, connection: Connection, window: Beginning) -> None:
        """Request the first tokens of a window again; ModelError if another model answers."""
        try:
            ids = window.ids.tolist()
            answer = await self.answer(connection, ids)
            self.repeats.compare(window, real_logprobs(ids, answer))
        except ServerError as error:
            raise ModelError(f"{self.served.server.url}: {error}") from None

    async def answer(self, connection: Connection, ids: Sequence[int], top: int = 0) -> Completion:
        """Return the answer to a prompt; ServerError if it is another deployment's."""
        answer = await self.served.completion(connection, self.info.served, ids, top)
        fingerprint = self.info.sample.fingerprint
        if answer.system_fingerprint != fingerprint:
            raise ServerError(
                f"{answer.system_fingerprint} answers in place of {fingerprint}; "
                "let one server stay at this URL"
            )
        return answer

    def provenance(self) -> dict[str, Any]:
        tokens = self.info.tokens
        if isinstance(tokens, str):
            tokenizer = f"not compared: {tokens}"
        else:
            tokenizer = f"{len(tokens)} tokens compared"
        notes = self.repeats.notes()
        sample = self.info.sample
        if sample.fingerprint is None:
            notes.append(NO_FINGERPRINT)
        if self.kld is not None and sample.top < TOP:
            notes.append(
                f"the server returns {sample.top} instead of {TOP} tokens per position, which are "
                f"less of the KLD; {MORE_LOGPROBS}"
            )
        if self.kld is not None:
            notes += self.kld.outside_tokens.notes()
        provenance: dict[str, Any] = {
            "url": self.served.server.url,
            "server": self.info.served.card.model_dump(),
            "system_fingerprint": sample.fingerprint,
            "top_logprobs": sample.top,
            "probe": sample.rounded,  # results.json has always called the sample "probe"
            "batch": f"up to {self.options.concurrency} windows in flight",
            "retries": self.retries,
            "repeats": self.repeats.provenance(),
            "notes": notes,
            "tokenizer": tokenizer,
            "hardware": "unknown: a server does not report it",
            "kernels": "unknown: a server does not report its kernels",
        }
        if self.no_kld:
            provenance["no_kld"] = self.no_kld
        return provenance


async def abandon(tasks: set[asyncio.Task[TokenScores | None]], *connections: Connection) -> None:
    """Cancel the tasks and close the connections."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for connection in connections:
        await connection.close()
