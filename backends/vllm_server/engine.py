"""A running ``vllm serve``, wherever it runs: what its completions endpoint says of each token.

``model_dir`` is the server's base URL.  A window is sent as token ids, with ``prompt_logprobs=0``.  vLLM then answers
with the log-probability of each real token, of which nothing is rounded on the way (JSON keeps all digits of a
float32), and computes the whole window, whatever its prefix cache holds.  Entropy, top-1 and KL divergence need more
than such an answer holds; its ranks count ties, and so do not tell whether the real token is the most probable one.

What the model is, is asked before any window (``backends/vllm_server/served.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from compare_q.backends.base import (
    Capabilities,
    Engine,
    PlannedModel,
    ScoreRequest,
    TokenScores,
    Window,
)
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.vllm_server.client import ServerError
from compare_q.backends.vllm_server.served import Seen, ServedModel, is_stamped, real_logprobs

if TYPE_CHECKING:
    import httpx2


class VllmServerEngine(Engine):
    """See the module's docstring."""

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
    seen: Seen

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.served = ServedModel(model)
        self.options = self.served.options

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        served = ServedModel(model)
        served.storage()
        longest = served.seen.card.max_model_len
        if longest is not None and longest <= model.max_tokens:
            raise InputError(
                f"model_dir: {served.server.url}: takes {longest} tokens, windows of {model.max_tokens} and one more "
                f"to generate need a server started with --max-model-len {model.max_tokens + 1}"
            )

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}  # the server's versions are in the stamp, and nothing on this machine can change a score

    def load(self) -> None:
        self.seen = self.served.see()
        if self.planned.stamp and not is_stamped(self.planned.stamp, self.seen.card, self.seen.sample):
            raise ModelError(f"{self.served.server.url}: the server's model changed before it was scored; run again")

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Scores as windows finish; the first failure cancels all in flight.  ModelError also if the model changed."""
        if request.record is not None:
            raise ModelError("a server cannot be the reference: it hands out no logits; mark another model")
        self.served.server.retried = 0
        queue, most = iter(windows), self.options.concurrency
        flying: set[asyncio.Task[TokenScores]] = set()
        with asyncio.Runner() as runner:
            client = self.served.server.client(most)
            try:
                while True:
                    loop = runner.get_loop()
                    flying |= {loop.create_task(self.window(client, one)) for one in islice(queue, most - len(flying))}
                    if not flying:
                        return
                    for landed in runner.run(asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED))[0]:
                        flying.remove(landed)
                        yield landed.result()
            finally:
                runner.run(abandon(flying, client))

    def check_unchanged(self) -> None:
        """ModelError if the server's model is no longer the one that was loaded."""
        model = self.seen.card.model
        if not self.seen.sample.agrees(self.served.over_a_connection(lambda client: self.served.sample(client, model))):
            raise ModelError(f"{self.served.server.url}: the server's model changed while it was scored; run again")

    async def window(self, client: httpx2.AsyncClient, window: Window) -> TokenScores:
        """Scores of one window; ModelError with the index of the window."""
        ids = window.token_ids.tolist()
        try:
            answer = await self.served.completion(client, self.seen.card.model, ids, 0)
            logprob = real_logprobs(ids, answer)
            self.check_fingerprint(answer.system_fingerprint)
        except ServerError as error:
            raise ModelError(f"window {window.index}: {self.served.server.url}: {error}") from None
        return TokenScores(window.index, logprob[window.positions - 1])

    def check_fingerprint(self, fingerprint: str | None) -> None:
        """ServerError if another server answers than the one whose sample was taken."""
        if fingerprint != self.seen.sample.fingerprint:
            raise ServerError(
                f"{fingerprint} answers in place of {self.seen.sample.fingerprint}; let one server stay at this URL"
            )

    def provenance(self) -> dict[str, Any]:
        tokens = self.seen.tokens
        return {
            "url": self.served.server.url,
            "server": self.seen.card.model_dump(),
            "system_fingerprint": self.seen.sample.fingerprint,
            "probe": self.seen.sample.rounded,  # what results.json has called the sample from the beginning
            "batch": f"up to {self.options.concurrency} windows in flight",
            "retries": self.served.server.retried,
            "tokenizer": f"not compared: {tokens}" if isinstance(tokens, str) else f"{len(tokens)} tokens compared",
            "hardware": "unknown: a server does not say",
            "kernels": "unknown: a server does not say which kernels it runs",
        }

    def close(self) -> None:
        """Nothing to release: the server stays."""


async def abandon(tasks: set[asyncio.Task[TokenScores]], client: httpx2.AsyncClient) -> None:
    """Cancel the tasks, which makes vLLM drop their requests, and close the connections."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()
