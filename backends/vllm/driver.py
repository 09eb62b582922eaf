"""Scoring in vLLM, in the process of the engine: sends tagged requests and returns the scores of
every token.

Before a model is scored, the probe scores the first tokens of the longest windows in two ways, in
the same steps of the engine: by compare_q and by vLLM's own ``prompt_logprobs=0``.  A difference
larger than the rounding of the logits stops the model.  The probe also finds out whether each
tensor-parallel rank can score its own logits, and whether states are enough for a record.  Then it
scores the same tokens without ``prompt_logprobs``, as in the scoring of all windows: vLLM may leave
out states that no request reads.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import Layer, ScoreRequest, TokenScores, Window
from ..common.errors import ModelError
from ..layers.groups import KVCache, group_kv_caches, group_layers
from ..reference.head import Contents, head_mismatch, spacing
from ..scoring import decode_check, token_statistics
from .scoring_plan import TAG, ScoringPlan

PROBE_WINDOWS = 2
PROBE_BYTES = 256 << 20
"""Memory for vLLM's own log-probabilities in the probe, at 11 bytes per logit: the V1 runner holds
all rows at once."""
BYTES_A_LOGIT = 11
PROBE_TOKENS_OF_SLOW = 64
"""Tokens of each window in the probe, in decode and on a CPU; on a CPU, 2 x 546 tokens took 8 s of
each load."""
STUCK = 8
"""A window is checked again if ``STUCK`` neighbouring positions have equal logits although their
tokens differ."""
COMPANION = "companion"
"""Request that is queued after all windows in decode and never scored: from 0.32 on, vLLM gives a
request that is alone in the queue all tokens of a step (its pull request 57951), despite
``long_prefill_token_threshold``."""


@dataclass(frozen=True)
class Route:
    """How a model's logits are scored and recorded, as the probe found out."""

    gathered: bool  # score logits that vLLM gathers from all ranks, not each rank's own logits
    states: bool  # logits can be recomputed from states and the head
    reason: str  # why not
    checked: int  # tokens that were compared with ``prompt_logprobs=0``
    largest: float  # largest difference from ``prompt_logprobs=0``, in nats
    mean: float  # average difference, in nats


class Beside(NamedTuple):
    """Statistics of some windows and vLLM's own scores, from the same steps."""

    windows: Sequence[Window]
    shards: list[list[NDArray[np.float32]]]  # [L - 1, F] of each window and rank
    theirs: list[NDArray[np.float32]]  # vLLM's log-probabilities [L - 1] of each window
    difference: NDArray[np.float64]  # |ours - theirs| at all positions, in nats
    limit: NDArray[np.float64]  # the largest difference that rounding explains
    report: dict[str, Any]  # of the ranks


@dataclass
class VllmDriver:
    """One loaded vLLM: its ``LLM`` object and the generation of its model ``runner``.

    ``noise_seed``: layers get noise (``backends/layers/noise.py``), except in the probe.  ``step``:
    tokens of a window in a decode step; None in prefill.  ``report``: the ranks' report at the end
    of the last scoring run; ``n_steps``: number of vLLM's steps in that run.
    ``decode_difference``: difference of decode from prefill in nats; None if they were not
    compared, for example without ``compares``.
    """

    llm: Any
    runner: str
    noise_seed: int | None = None
    on_cpu: bool = False
    step: int | None = None
    route: Route | None = None
    report: dict[str, Any] = field(default_factory=dict)
    n_steps: int = 0
    decode_difference: float | None = None
    compares: bool = True

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; return the results in the order of ranks."""
        answers: list[Any] = self.llm.collective_rpc(method, args=args)
        return answers

    def plan(self, request: ScoreRequest, route: Route) -> ScoringPlan:
        """Return the plan of a request, with a probed route."""
        ranks = self.llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size
        gathered = route.gathered or (request.record is not None and not route.states and ranks > 1)
        contents: Contents = "states" if route.states else "logits"
        return ScoringPlan(
            gathered,
            record_contents=contents,
            record_reason=route.reason,
            **request.model_dump(mode="json"),
        )

    def score(
        self, windows: Sequence[Window], plan: ScoringPlan, noise_seed: int | None = None
    ) -> Iterator[TokenScores]:
        """Yield the scores of each window when it finishes; ModelError if a position is missing, or
        logits repeat.
        """
        doubtful: list[tuple[Window, int, list[NDArray[np.float32]]]] = []
        with closing(self.run(windows, plan, noise_seed)) as finished:
            for window, shards, _ in finished:
                if end := repetition(window, shards):
                    doubtful.append((window, end, shards))
                else:
                    yield token_statistics.scores(window.index, window.targets, shards)
        report = self.report
        for window, end, shards in doubtful:
            self.check_repetition(window, end, gathered=plan.gathered)
            yield token_statistics.scores(window.index, window.targets, shards)
        self.report = report

    def run(
        self,
        windows: Sequence[Window],
        plan: ScoringPlan | None,
        noise_seed: int | None = None,
        **sampling: Any,
    ) -> Generator[tuple[Window, list[NDArray[np.float32]], Any], None, None]:
        """Queue all windows, then step; yield (window, statistics of each shard, RequestOutput)
        when a window finishes.

        ``plan`` None: nothing is scored.  The scheduler is paused while windows are queued, so that
        the batches are the same every time: otherwise bf16 perplexities change in the fifth digit.
        """
        engine = self.llm.llm_engine
        waiting = {str(window.index): window for window in windows}
        companions = [COMPANION] if self.step and windows else []
        digests = tuple((window.index, window.digest) for window in windows)
        try:
            if plan is not None:
                self.call(
                    "compare_q_begin",
                    asdict(replace(plan, step=self.step, windows=digests)),
                    noise_seed,
                )
            self.queue(waiting, companions, sampling)
            self.n_steps = 0
            while waiting and engine.has_unfinished_requests():
                self.n_steps += 1
                done = [
                    output
                    for output in engine.step()
                    if output.finished and output.request_id in waiting
                ]
                finished = [waiting.pop(output.request_id) for output in done]
                shards = self.collect(finished) if plan is not None and finished else {}
                for window, output in zip(finished, done, strict=True):
                    yield window, shards.get(window.index, []), output
        except BaseException:  # also if the caller stops iterating
            self.interrupt([*waiting, *companions], scored=plan is not None)
            raise
        if waiting or companions:  # the companion never finishes
            engine.abort_request([*waiting, *companions])
        if plan is not None:
            self.report = self.end()
        if waiting:
            first = min(window.index for window in waiting.values())
            raise ModelError(
                f"vLLM returned no result for {len(waiting)} windows, the first is window {first}"
            )

    def queue(
        self, windows: Mapping[str, Window], companions: Sequence[str], sampling: Mapping[str, Any]
    ) -> None:
        """Queue the requests of windows, by their names, and then of companions, which have the
        longest window.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        common = {"max_tokens": 1, "detokenize": False, "skip_reading_prefix_cache": True}
        with paused(engine):
            for name, window in windows.items():
                params = SamplingParams(
                    **common, extra_args={TAG: [window.index, window.spans]}, **sampling
                )
                engine.add_request(name, {"prompt_token_ids": window.token_ids.tolist()}, params)
            for name in companions:
                longest = max(
                    windows.values(), key=lambda window: len(window.token_ids)
                ).token_ids.tolist()
                engine.add_request(name, {"prompt_token_ids": longest}, SamplingParams(**common))

    def interrupt(self, requests: Sequence[str], *, scored: bool) -> None:
        """Abort requests, and end their scoring run with its threads and the windows that were read
        ahead.

        Errors are ignored: an engine that has died cannot do this, and the error that interrupted
        the run is reported.
        """
        with suppress(Exception):
            if requests:
                self.llm.llm_engine.abort_request(list(requests))
        with suppress(Exception):
            if scored:
                self.call("compare_q_end")

    def collect(self, windows: Sequence[Window]) -> dict[int, list[NDArray[np.float32]]]:
        """Return window -> partial statistics [T, F] per vocabulary shard.

        ModelError if any position is missing, or if a target is outside the vocabulary that is
        scored.
        """
        indices = [window.index for window in windows]
        shards: dict[tuple[int, int], dict[int, NDArray[np.float32]]] = {}
        entries = 0
        for header_text, data in self.call("compare_q_collect", indices):
            header = without_error(header_text)
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
        for window in windows:
            token_statistics.check_targets(window.index, window.targets, entries)
        return {index: [shards[shard][index] for shard in held] for index in indices}

    def end(self) -> dict[str, Any]:
        """Finish a scoring run; return the merged reports of its ranks."""
        ranks = [without_error(answer) for answer in self.call("compare_q_end")]
        largest = ("chunk_rows", "local_difference", "head_difference")
        said = ("reference_head", "logits_dtype", "head_reason", "steps")
        return {
            **{name: max(rank[name] for rank in ranks) for name in largest},
            **{
                name: next((rank[name] for rank in ranks if rank[name]), ranks[0][name])
                for name in said
            },
            "recomputed_positions": sum(rank["recomputed_positions"] for rank in ranks),
        }

    def check_repetition(self, window: Window, end: int, *, gathered: bool) -> None:
        """Raise ModelError if vLLM caused the equal logits at the tokens before ``end``, instead of
        the model itself.

        A model repeats logits itself, for example on repeated text, if a request of only these
        tokens, with ``prompt_logprobs=0``, also repeats them, and vLLM's scores equal compare_q's.
        """
        stretch = Window.scored_from(
            window.index, window.token_ids[max(end - self.probe_tokens, 0) : end]
        )
        found = self.beside_own([stretch], gathered=gathered)
        if not repetition(stretch, found.shards[0]) or not within(found.difference, found.limit):
            raise ModelError(
                f"window {window.index}: vLLM's logits are the same at {STUCK} different tokens in a row"
            )

    @property
    def probe_tokens(self) -> int:
        """Tokens of a window whose scores by vLLM take at most ``PROBE_BYTES``; fewer where vLLM is
        slow.
        """
        vocab_size: int = self.llm.llm_engine.vllm_config.model_config.get_vocab_size()
        tokens = max(PROBE_BYTES // (BYTES_A_LOGIT * vocab_size), 16)
        return min(tokens, PROBE_TOKENS_OF_SLOW) if self.on_cpu or self.step else tokens

    def probe(self, windows: Sequence[Window]) -> Route:
        """Return the route for these windows; ModelError if compare_q's scores are not vLLM's own."""
        longest = sorted(windows, key=lambda window: -len(window.token_ids))[
            :PROBE_WINDOWS
        ]  # the first of equal ones
        short = [
            Window.scored_from(window.index, window.token_ids[: self.probe_tokens])
            for window in longest
        ]
        for gathered in (False, True):
            found = self.beside_own(short, gathered=gathered)
            difference, limit, report = found.difference, found.limit, found.report
            if (
                not report["local_difference"] <= 0
            ):  # a rank's own logits are not those that vLLM serves
                continue
            largest, mean = float(difference.max()), float(difference.mean())
            if not within(difference, limit):
                worst = int(np.nan_to_num(difference - limit, nan=np.inf).argmax())
                raise ModelError(
                    f"scores differ from vLLM's own prompt_logprobs by {difference[worst]:.3g} nats (rounding explains "
                    f"{limit[worst]:.3g}), {mean:.3g} on average: compare_q does not score this model right"
                )
            alone = {}
            for scores in self.score(short, ScoringPlan(gathered=gathered)):
                alone[scores.window] = scores.logprob
            self.check_alone(alone, found, gathered=gathered)
            if self.step and self.compares:
                self.check_decode(short, alone, gathered=gathered)
            apart = report["head_reason"] or report["head_difference"]
            largest_of_all = max(float(largest_logit(shards).max()) for shards in found.shards)
            reason = head_mismatch(apart, largest_of_all, report["logits_dtype"])
            return Route(gathered, not reason, reason, len(difference), largest, mean)
        raise ModelError(
            "vLLM's logits differ from call to call: compare_q cannot score this model"
        )

    def beside_own(self, windows: Sequence[Window], *, gathered: bool) -> Beside:
        """Score windows by compare_q and by ``prompt_logprobs=0`` in the same steps."""
        found, plan = {}, ScoringPlan(gathered=gathered, probe=True)
        with closing(self.run(windows, plan, prompt_logprobs=0, flat_logprobs=True)) as finished:
            for window, shards, output in finished:
                found[window.index] = shards, own_logprobs(window, output.prompt_logprobs)
        shards_of, theirs = map(
            list, zip(*(found[window.index] for window in windows), strict=True)
        )
        ours = [
            token_statistics.scores(w.index, w.targets, own).logprob
            for w, own in zip(windows, shards_of, strict=True)
        ]
        limit = (
            2
            * spacing(self.report["logits_dtype"])
            * np.concatenate(list(map(largest_logit, shards_of)))
            + 1e-4
        )
        return Beside(windows, shards_of, theirs, distance(ours, theirs), limit, self.report)

    def check_alone(
        self, alone: Mapping[int, NDArray[np.float32]], beside: Beside, *, gathered: bool
    ) -> None:
        """Raise ModelError if windows score differently without ``prompt_logprobs`` (``alone``,
        log-probabilities).

        Batches and rounding are the same, except in kernels whose order of additions varies.  One
        more scoring run measures how much the scores of such kernels vary.
        """
        difference = distance([alone[window.index] for window in beside.windows], beside.theirs)
        if within(difference, beside.limit):
            return
        again = distance(self.beside_own(beside.windows, gathered=gathered).theirs, beside.theirs)
        if not difference.mean() <= 4 * again.mean() + beside.limit.mean() / 4:
            raise ModelError(
                f"requests without prompt_logprobs score otherwise in vLLM, by {difference.mean():.3g} nats on average "
                f"(from run to run {again.mean():.3g}): vLLM does not compute all of their states, and compare_q "
                "cannot score this model"
            )

    def check_decode(
        self,
        windows: Sequence[Window],
        decoded: Mapping[int, NDArray[np.float32]],
        *,
        gathered: bool,
    ) -> None:
        """ModelError unless decode (``decoded``: log-probabilities) scores windows as prefill does.

        The scheduler reads its threshold in each step if it is in this process.  If it is in
        another process, vLLM prefills a window that is alone in the queue from 0.32 on; earlier
        versions decode it, and this is recorded.
        """
        step, self.step, whole = self.step or 1, None, list[NDArray[np.float32]]()
        scheduler = self.llm.llm_engine.vllm_config.scheduler_config
        threshold, scheduler.long_prefill_token_threshold = (
            scheduler.long_prefill_token_threshold,
            0,
        )
        try:
            for window in windows:
                whole += [
                    scores.logprob
                    for scores in self.score([window], ScoringPlan(gathered=gathered))
                ]
            is_prefill = self.n_steps < len(windows[-1].token_ids) // step
        finally:
            self.step, scheduler.long_prefill_token_threshold = step, threshold
        layers, caches = self.what_ran()
        formats = [*(layer.activations for layer in layers), *(cache.stored for cache in caches)]
        most = decode_check.limit(formats, on_gpu=not self.on_cpu)
        found = decode_check.difference(
            np.concatenate([decoded[w.index] for w in windows]), np.concatenate(whole)
        )
        self.decode_difference = found if is_prefill else None
        if wrong := decode_check.fault(found, most):
            raise ModelError(wrong)

    def what_ran(self) -> tuple[tuple[Layer, ...], tuple[KVCache, ...]]:
        """Return how the model's layers and caches ran, for all pipeline stages."""
        layers: dict[str, Layer] = {}
        caches: dict[str, KVCache] = {}
        for answer in self.call("compare_q_layers"):
            ran, cached = json.loads(answer)
            layers |= {entry["name"]: Layer(**entry) for entry in ran}
            caches |= {entry["layers"]: KVCache(**entry) for entry in cached}
        return group_layers(layers.values()), group_kv_caches(caches.values())

    def provenance(self) -> dict[str, Any]:
        """Return what ran in the last scoring run, for the results."""
        names = ("chunk_rows", "recomputed_positions", "reference_head", "logits_dtype", "steps")
        known = {
            name: self.report[name]
            for name in names
            if self.report and (self.step or name != "steps")
        }
        known |= {"decode_difference": self.decode_difference} if self.step else {}
        return {
            "model_runner": self.runner,
            **({} if self.route is None else asdict(self.route)),
            **known,
        }


def without_error(answer: str) -> dict[str, Any]:
    """Return a rank's answer (JSON); ModelError with its error."""
    said: dict[str, Any] = json.loads(answer)
    if said["error"]:
        raise ModelError(f"scoring failed in vLLM's worker: {said['error']}")
    return said


def distance(
    ours: Sequence[NDArray[np.float32]], theirs: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """Return |ours - theirs| of log-probabilities, nats; 0 where both are NaN or the same infinity."""
    a, b = np.concatenate(ours).astype(np.float64), np.concatenate(theirs)
    with np.errstate(invalid="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))


def within(difference: NDArray[np.float64], limit: NDArray[np.float64]) -> bool:
    """Return True if the rounding of logits explains the differences, each and on average; False
    for NaN.
    """
    return bool((difference <= limit).all() and difference.mean() <= limit.mean() / 4)


def repetition(window: Window, shards: Sequence[NDArray[np.float32]]) -> int:
    """Return the number of tokens up to the end of the first ``STUCK`` scored positions with equal
    logits; 0: none.

    Logits count as equal if three statistics of each shard are bit-identical.  Logits after equal
    tokens do not count: the keys and values of a repeated token are the same everywhere, except for
    the effect of the position.
    """
    tokens = window.token_ids[window.positions - 1]
    same = tokens[1:] != tokens[:-1]
    for shard in shards:
        same &= (
            shard[1:, : token_statistics.Column.TARGET]
            == shard[:-1, : token_statistics.Column.TARGET]
        ).all(1)
    run = (
        np.convolve(same, np.ones(STUCK - 1, np.int64), "valid")
        if len(same) >= STUCK - 1
        else np.zeros(0)
    )
    found = np.flatnonzero(run == STUCK - 1)
    return int(window.positions[found[0] + STUCK - 1]) + 1 if len(found) else 0


def has_own_process(core: Any) -> bool:
    """Return True if an engine core runs in another process."""
    return hasattr(core, "call_utility")


@contextmanager
def paused(engine: Any) -> Iterator[None]:
    """Pause the scheduler of an engine in another process; an engine in this process steps only on
    request.
    """
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
    top = np.max([shard[:, token_statistics.Column.MAX] for shard in shards], axis=0)
    target = np.max([shard[:, token_statistics.Column.TARGET] for shard in shards], axis=0)
    larger: NDArray[np.float64] = np.maximum(np.abs(top), np.abs(target)).astype(np.float64)
    return np.where(np.isfinite(larger), larger, 0.0)


def own_logprobs(window: Window, prompt_logprobs: Any) -> NDArray[np.float32]:
    """Return vLLM's log-probabilities float32 [L - 1] of a window, from its flat container.

    It has L positions.  The first is empty, and the first entry of position i must be for the
    window's token i.
    """
    where = f"window {window.index}"
    if prompt_logprobs is None or len(prompt_logprobs) != len(window.token_ids):
        count = "none" if prompt_logprobs is None else str(len(prompt_logprobs))
        raise ModelError(
            f"{where}: vLLM returned log-probabilities for {count} of {len(window.token_ids)} positions"
        )
    starts = np.asarray(prompt_logprobs.start_indices[1:], dtype=np.int64)
    is_there = np.asarray(prompt_logprobs.end_indices[1:], dtype=np.int64) > starts
    tokens = np.asarray(prompt_logprobs.token_ids, dtype=np.int64)[np.where(is_there, starts, 0)]
    wrong = ~is_there | (tokens != window.token_ids[1:])
    if wrong.any():
        raise ModelError(
            f"{where}: vLLM scored another token, or none, at position {int(wrong.argmax()) + 1}"
        )
    logprob: NDArray[np.float32] = np.asarray(prompt_logprobs.logprobs, dtype=np.float32)[starts]
    return logprob
