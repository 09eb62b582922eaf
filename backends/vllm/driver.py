"""Scoring in vLLM, in the process of the engine: sends tagged requests and returns the scores of every token.

Before a model is scored, the probe scores the first tokens of the longest windows twice in the same steps: by
compare_q and by vLLM's own ``prompt_logprobs=0``.  A difference larger than the rounding of the logits stops the model.
The probe also finds out whether each tensor-parallel rank can score its own logits, and whether the head can be
recomputed from states.  Then it scores the same tokens as all windows will be, without ``prompt_logprobs``, since vLLM
may leave out states that no request reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compare_q.backends.base import Layer, ScoreRequest, TokenScores, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.layers.groups import KVCache, group_kv_caches, group_layers
from compare_q.backends.reference.head import head_mismatch, spacing
from compare_q.backends.scoring import divergences, statistics
from compare_q.backends.vllm.hooks import TAG
from compare_q.backends.vllm.scorer import Plan

PROBE_WINDOWS = 2
PROBE_BYTES = 256 << 20
"""Memory for vLLM's own log-probabilities in the probe, at 11 bytes per logit: the V1 runner holds all rows at once."""
BYTES_A_LOGIT = 11
PROBE_TOKENS_OF_SLOW = 64
"""Tokens of each window in decode, and on a CPU, where 2 x 546 tokens took 8 s of each load."""
STUCK = 8
"""Neighbouring positions with equal logits, after different tokens, from which a window is checked again."""
COMPANION = "companion"
"""Request that is queued after all windows in decode and never scored: from 0.32 on, vLLM gives a request that is alone
in the queue all tokens of a step (its pull request 57951), despite ``long_prefill_token_threshold``."""


@dataclass(frozen=True)
class Route:
    """How a model's logits are scored and recorded, as the probe found out.

    ``gathered``: by vLLM's gather.  ``states``: the head can be recomputed from states; ``reason``: why not.
    ``checked`` tokens differed from ``prompt_logprobs=0`` by at most ``largest``, and ``mean`` on average (nats).
    """

    gathered: bool
    states: bool
    reason: str
    checked: int
    largest: float
    mean: float


class Beside(NamedTuple):
    """Statistics of some windows and vLLM's own scores, from the same steps.

    ``shards`` [L - 1, F] and ``theirs`` [L - 1] of each window.  Of all positions: |ours - theirs|, and the part that
    rounding explains (``limit``), in nats.  The largest logit.  The ranks' report.
    """

    shards: list[list[NDArray[np.float32]]]
    theirs: list[NDArray[np.float32]]
    difference: NDArray[np.float64]
    limit: NDArray[np.float64]
    largest: float
    report: dict[str, Any]


@dataclass
class VllmDriver:
    """One loaded vLLM.

    Attributes:
        llm: vLLM's ``LLM`` object.
        runner: generation of its model runner.
        noise_seed: if set, layers get noise (``backends/layers/noise.py``), except in the probe.
        step: tokens of a window in a decode step; None in prefill.
        pass_report: report of the ranks at the end of the last scoring run.
    """

    llm: Any
    vocab_size: int
    tp_size: int
    runner: str
    noise_seed: int | None = None
    on_cpu: bool = False
    step: int | None = None
    route: Route | None = None
    pass_report: dict[str, Any] = field(default_factory=dict)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; return the results in the order of ranks."""
        answers: list[Any] = self.llm.collective_rpc(method, args=args)
        return answers

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield the scores of every window as they finish; ModelError if a position is missing."""
        self.route = route = self.probe(windows)
        limit = None if request.vocab_size is None else min(request.vocab_size, self.vocab_size)
        plan = Plan(
            gathered=route.gathered or (request.record is not None and not route.states and self.tp_size > 1),
            vocab_size=limit,
            reference=None if request.reference is None else str(request.reference),
            record=None if request.record is None else str(request.record),
            record_contents="states" if route.states else "logits",
            record_reason=route.reason,
            divergences=request.divergences,
        )
        yield from self.scored(windows, plan, self.noise_seed)

    def scored(self, windows: Sequence[Window], plan: Plan, noise_seed: int | None = None) -> Iterator[TokenScores]:
        """Yield the scores of every window by a plan that fits the model."""
        self.call("compare_q_begin", asdict(replace(plan, step=self.step)), noise_seed)
        finished = self.requests(windows, {})
        pending = {window.index: window for window in windows}
        doubtful: list[tuple[Window, int, list[NDArray[np.float32]]]] = []
        for indices in finished:
            collected = self.collect(list(indices))
            for index in indices:
                window = pending.pop(index)
                if end := repetition(window, collected[index]):
                    doubtful.append((window, end, collected[index]))
                else:
                    yield divergences.scores(index, window.targets, collected[index])
        self.pass_report = self.end()
        if pending:
            raise ModelError(f"vLLM returned no result for {len(pending)} windows, the first is window {min(pending)}")
        for window, end, shards in doubtful:
            self.check_repetition(window, end, gathered=plan.gathered)
            yield divergences.scores(window.index, window.targets, shards)

    def check_repetition(self, window: Window, end: int, *, gathered: bool) -> None:
        """Raise ModelError unless equal logits at the tokens before ``end`` are the model's own, as for repeated text.

        They are if these tokens alone repeat in the same way with ``prompt_logprobs=0``, and vLLM's scores are ours.
        """
        stretch = Window.scored_from(window.index, window.token_ids[max(end - self.probe_tokens, 0) : end])
        found = self.beside_own([stretch], gathered=gathered)
        if not repetition(stretch, found.shards[0]) or not within(found.difference, found.limit):
            raise ModelError(f"window {window.index}: vLLM's logits are the same at {STUCK} different tokens in a row")

    def requests(self, windows: Sequence[Window], sampling: Mapping[str, Any]) -> Iterator[dict[int, Any]]:
        """Queue every window, then step; yield {index of the window: RequestOutput} of each step that finished some.

        The scheduler is paused while they are queued, so that the batches are the same every time: otherwise bf16
        perplexities change in the fifth digit.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        waiting = {str(window.index): window.index for window in windows}
        common = {"max_tokens": 1, "detokenize": False, "skip_reading_prefix_cache": True}
        try:
            with paused(engine):
                for window in windows:
                    params = SamplingParams(**common, extra_args={TAG: [window.index, window.spans]}, **sampling)
                    engine.add_request(str(window.index), {"prompt_token_ids": window.token_ids.tolist()}, params)
                if self.step and windows:
                    longest = max(windows, key=lambda window: len(window.token_ids)).token_ids.tolist()
                    engine.add_request(COMPANION, {"prompt_token_ids": longest}, SamplingParams(**common))
            while waiting and engine.has_unfinished_requests():
                done = [output for output in engine.step() if output.finished and output.request_id in waiting]
                if done:
                    yield {waiting.pop(output.request_id): output for output in done}
        finally:
            # The caller stopped iterating, or a request was refused; the companion never finishes.
            if waiting or self.step:
                engine.abort_request([*waiting, *([COMPANION] if self.step else [])])

    def collect(self, indices: Sequence[int]) -> dict[int, list[NDArray[np.float32]]]:
        """Return window -> partial statistics [T, F] per vocabulary shard; ModelError if any position is missing."""
        shards: dict[tuple[int, int], dict[int, NDArray[np.float32]]] = {}
        entries = 0
        for header_text, data in self.call("compare_q_collect", list(indices)):
            header = self.without_error(header_text)
            if header["counts"]:
                flat = np.frombuffer(data, np.float32).reshape(sum(header["counts"]), -1)
                parts = np.split(flat, np.cumsum(header["counts"])[:-1])
                entries = header["entries"]
                shards.setdefault(tuple(header["shard"]), dict(zip(indices, parts, strict=True)))
        held = sorted(shard for shard in shards if shard[1] > shard[0])
        if [0, *(last for _, last in held)] != [*(first for first, _ in held), entries]:
            raise ModelError(
                f"vLLM's ranks scored the vocabulary entries {held}, which are not all {entries}, each once"
            )
        return {index: [shards[shard][index] for shard in held] for index in indices}

    @staticmethod
    def without_error(answer: str) -> dict[str, Any]:
        """Return a rank's answer (JSON); ModelError with its error."""
        said: dict[str, Any] = json.loads(answer)
        if said["error"]:
            raise ModelError(f"scoring failed in vLLM's worker: {said['error']}")
        return said

    def end(self) -> dict[str, Any]:
        """Finish a scoring run; return the merged reports of its ranks."""
        ranks = [self.without_error(answer) for answer in self.call("compare_q_end")]
        largest = ("chunk_rows", "extra_device_bytes", "local_difference", "head_difference")
        said = ("reference_head", "logits_dtype", "head_reason")
        return {
            **{name: max(rank[name] for rank in ranks) for name in largest},
            **{name: next((rank[name] for rank in ranks if rank[name]), "") for name in said},
            "recomputed_positions": sum(rank["recomputed_positions"] for rank in ranks),
            "steps": next((rank["steps"] for rank in ranks if rank["steps"].get("graphs")), {}),
        }

    def what_ran(self) -> tuple[tuple[Layer, ...], tuple[KVCache, ...]]:
        """Return how the model's layers and caches ran, of all pipeline stages."""
        layers: dict[str, Layer] = {}
        caches: dict[str, KVCache] = {}
        for answer in self.call("compare_q_layers"):
            ran, cached = json.loads(answer)
            layers |= {entry["name"]: Layer(**entry) for entry in ran}
            caches |= {entry["layers"]: KVCache(**entry) for entry in cached}
        return group_layers(layers.values()), group_kv_caches(caches.values())

    def provenance(self) -> dict[str, Any]:
        """Return what ran in the last scoring run, for the results."""
        route, report = {} if self.route is None else asdict(self.route), self.pass_report
        names = ("chunk_rows", "extra_device_bytes", "recomputed_positions", "reference_head", "logits_dtype", "steps")
        known = {name: report[name] for name in names if report and (self.step or name != "steps")}
        return {"model_runner": self.runner, **route, **known}

    @property
    def probe_tokens(self) -> int:
        """Tokens of a window whose scores by vLLM take at most ``PROBE_BYTES``; fewer where vLLM is slow."""
        tokens = max(PROBE_BYTES // (BYTES_A_LOGIT * self.vocab_size), 16)
        return min(tokens, PROBE_TOKENS_OF_SLOW) if self.on_cpu or self.step else tokens

    def probe(self, windows: Sequence[Window]) -> Route:
        """Return the route for these windows; ModelError if compare_q's scores are not vLLM's own."""
        tokens = self.probe_tokens
        longest = sorted(windows, key=lambda window: -len(window.token_ids))[:PROBE_WINDOWS]  # of equals, the first
        short = [Window.scored_from(window.index, window.token_ids[:tokens]) for window in longest]
        for gathered in (False, True):
            if route := self.probe_by(short, gathered=gathered):
                return route
        raise ModelError("vLLM's logits differ from call to call: compare_q cannot score this model")

    def probe_by(self, short: Sequence[Window], *, gathered: bool) -> Route | None:
        """Return the route by local or gathered logits; None if a rank's own logits are not those that vLLM serves."""
        found = self.beside_own(short, gathered=gathered)
        if not found.report["local_difference"] <= 0:
            return None
        difference, limit = found.difference, found.limit
        if not within(difference, limit):
            worst = int(np.nan_to_num(difference - limit, nan=np.inf).argmax())
            raise ModelError(
                f"scores differ from vLLM's own prompt_logprobs by {difference[worst]:.3g} nats (rounding explains "
                f"{limit[worst]:.3g}), {difference.mean():.3g} on average: compare_q does not score this model right"
            )
        self.probe_alone(short, found, gathered=gathered)
        apart = found.report["head_reason"] or found.report["head_difference"]
        reason = head_mismatch(apart, found.largest, found.report["logits_dtype"])
        return Route(gathered, not reason, reason, len(difference), float(difference.max()), float(difference.mean()))

    def beside_own(self, short: Sequence[Window], *, gathered: bool) -> Beside:
        """Score windows by compare_q and by ``prompt_logprobs=0`` in the same steps."""
        self.call("compare_q_begin", asdict(Plan(gathered=gathered, probe=True, step=self.step)))
        outputs = {index: output for finished in self.requests(short, {"prompt_logprobs": 0, "flat_logprobs": True})
                   for index, output in finished.items()}  # fmt: skip
        collected, report = self.collect([window.index for window in short]), self.end()
        theirs = [own_logprobs(window, outputs[window.index].prompt_logprobs) for window in short]
        shards = [collected[window.index] for window in short]
        ours = [statistics.scores(w.index, w.targets, own).logprob for w, own in zip(short, shards, strict=True)]
        largest = np.concatenate([largest_logit(each) for each in shards])
        limit = 2 * spacing(report["logits_dtype"]) * largest + 1e-4
        return Beside(shards, theirs, distance(ours, theirs), limit, float(largest.max()), report)

    def probe_alone(self, short: Sequence[Window], beside: Beside, *, gathered: bool) -> None:
        """Raise ModelError if the windows score differently without ``prompt_logprobs``.

        Batches and roundings are the same, except in kernels that add in the order of threads; one more scoring run
        measures how far these differ.
        """
        alone = {scores.window: scores.logprob for scores in self.scored(short, Plan(gathered=gathered))}
        difference, limit = distance([alone[window.index] for window in short], beside.theirs), beside.limit
        if within(difference, limit):
            return
        again = distance(self.beside_own(short, gathered=gathered).theirs, beside.theirs)
        if not difference.mean() <= 4 * again.mean() + limit.mean() / 4:
            raise ModelError(
                f"requests without prompt_logprobs score otherwise in vLLM, by {difference.mean():.3g} nats on average "
                f"(from run to run {again.mean():.3g}): it does not compute all of their states, and compare_q cannot "
                "score this model"
            )


def distance(ours: Sequence[NDArray[np.float32]], theirs: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return |ours - theirs| of log-probabilities, nats; 0 where both are NaN or the same infinity."""
    a, b = np.concatenate(ours).astype(np.float64), np.concatenate(theirs)
    with np.errstate(invalid="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))


def within(difference: NDArray[np.float64], limit: NDArray[np.float64]) -> bool:
    """Return True if the rounding of logits explains the differences, each and on average; False for NaN."""
    return bool((difference <= limit).all() and difference.mean() <= limit.mean() / 4)


def repetition(window: Window, shards: Sequence[NDArray[np.float32]]) -> int:
    """Return the number of tokens up to the end of the first ``STUCK`` scored positions with equal logits; 0: none.

    Logits are equal where three statistics of each shard are, to the bit.  Those after equal tokens do not count: the
    keys and values of a repeated token are the same everywhere, except for what positions add.
    """
    tokens = window.token_ids[window.positions - 1]
    same = tokens[1:] != tokens[:-1]
    for shard in shards:
        same &= (shard[1:, : statistics.Column.TARGET] == shard[:-1, : statistics.Column.TARGET]).all(1)
    run = np.convolve(same, np.ones(STUCK - 1, np.int64), "valid") if len(same) >= STUCK - 1 else np.zeros(0)
    found = np.flatnonzero(run == STUCK - 1)
    return int(window.positions[found[0] + STUCK - 1]) + 1 if len(found) else 0


def has_own_process(core: Any) -> bool:
    """Return True if an engine core runs in another process."""
    return hasattr(core, "call_utility")


@contextmanager
def paused(engine: Any) -> Iterator[None]:
    """Pause the scheduler of an engine in another process; an engine in this process steps only on request."""
    if not has_own_process(engine.engine_core):
        yield
        return
    call = engine.engine_core.call_utility
    call("pause_scheduler", "keep", False)
    try:
        yield
    finally:
        call("resume_scheduler")


def largest_logit(shards: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return the larger size [T] of the top logit and the target's; 0 where one is masked or NaN."""
    top = np.max([shard[:, statistics.Column.MAX] for shard in shards], axis=0)
    target = np.max([shard[:, statistics.Column.TARGET] for shard in shards], axis=0)
    larger: NDArray[np.float64] = np.maximum(np.abs(top), np.abs(target)).astype(np.float64)
    return np.where(np.isfinite(larger), larger, 0.0)


def own_logprobs(window: Window, prompt_logprobs: Any) -> NDArray[np.float32]:
    """Return vLLM's log-probabilities float32 [L - 1] of a window, from its flat container.

    It has L positions.  The first is empty, and the first entry of position i must be for the window's token i.
    """
    where = f"window {window.index}"
    if prompt_logprobs is None or len(prompt_logprobs) != len(window.token_ids):
        count = "none" if prompt_logprobs is None else str(len(prompt_logprobs))
        raise ModelError(f"{where}: vLLM returned log-probabilities for {count} of {len(window.token_ids)} positions")
    starts = np.asarray(prompt_logprobs.start_indices[1:], dtype=np.int64)
    is_there = np.asarray(prompt_logprobs.end_indices[1:], dtype=np.int64) > starts
    tokens = np.asarray(prompt_logprobs.token_ids, dtype=np.int64)[np.where(is_there, starts, 0)]
    wrong = ~is_there | (tokens != window.token_ids[1:])
    if wrong.any():
        raise ModelError(f"{where}: vLLM scored another token, or none, at position {int(wrong.argmax()) + 1}")
    logprob: NDArray[np.float32] = np.asarray(prompt_logprobs.logprobs, dtype=np.float32)[starts]
    return logprob
