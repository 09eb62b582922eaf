"""vLLM in the process of the engine: sends tagged requests, steps, and collects the results.

How results become scores is in ``vllm_scores.py``.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..base import Layer, ModuleDifference, Window
from ..common.errors import ModelError
from ..layers.groups import KVCache, group_kv_caches, group_layers
from ..module_differences import differences_from_json
from ..scoring import token_statistics
from .scoring_plan import EXTRA_ARGS_KEY, ProbePlan, ScoringPlan

Floats: TypeAlias = NDArray[np.float32]
COMPANION = "companion"
"""Request that is queued after all windows in decode and never scored.

From 0.32 on, vLLM gives a request that is alone in the queue all tokens of a step (its pull request
57951), despite ``long_prefill_token_threshold``.
"""
LARGEST_OF_RANKS = ("chunk_rows", "local_difference", "head_difference")
"""Entries of a report that are the largest of all ranks'."""


@dataclass
class VllmDriver:
    """One loaded vLLM: its ``LLM`` object and the generation of its model ``runner``.

    Attributes:
        on_cpu: vLLM computes on a CPU.
        step: tokens of a window in a decode step; None in prefill.
        report: the ranks' report at the end of the last scoring run.
        n_steps: number of vLLM's steps in the last run.
    """

    llm: Any
    runner: str
    on_cpu: bool = False
    step: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    n_steps: int = 0

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; return the results in the order of ranks."""
        answers: list[Any] = self.llm.collective_rpc(method, args=args)
        return answers

    def run(
        self,
        windows: Sequence[Window],
        plan: ScoringPlan | ProbePlan | None,
        noise_seed: int | None = None,
        **sampling: Any,
    ) -> Generator[tuple[Window, list[Floats], Any], None, None]:
        """Queue all windows, then step; yield each window's results when it finishes.

        The results are (window, statistics [T, F] of each shard, RequestOutput).  With ``plan``
        None, nothing is scored.  With a seed, layers get noise (``backends/layers/noise.py``).
        ModelError if vLLM returns no result for a window.
        """
        engine = self.llm.llm_engine
        waiting = {str(window.index): window for window in windows}
        companions = []
        if self.step is not None and windows:
            companions.append(COMPANION)
        try:
            if plan is not None:
                self.begin(windows, plan, noise_seed)
            self.queue(waiting, companions, sampling)
            self.n_steps = 0
            while waiting and engine.has_unfinished_requests():
                self.n_steps += 1
                outputs = []
                for output in engine.step():
                    if output.finished and output.request_id in waiting:
                        outputs.append(output)
                finished = [waiting.pop(output.request_id) for output in outputs]
                shards: dict[int, list[Floats]] = {}
                if plan is not None and finished:
                    shards = self.collect(finished)
                for window, output in zip(finished, outputs, strict=True):
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

    def begin(
        self, windows: Sequence[Window], plan: ScoringPlan | ProbePlan, noise_seed: int | None
    ) -> None:
        """Start a scoring run in all ranks; a run of the probe has no noise."""
        if isinstance(plan, ProbePlan):
            self.call("compare_q_begin_probe", asdict(replace(plan, step=self.step)))
            return
        digests = tuple((window.index, window.digest) for window in windows)
        complete = replace(plan, step=self.step, windows=digests)
        self.call("compare_q_begin", asdict(complete), noise_seed)

    def load_reference(self, windows: Sequence[Window], plan: ScoringPlan) -> None:
        """Load the head of a plan's reference in all ranks, and read the first of the windows.

        Both stay for the next scoring run.  On a CPU no window is read, since reading is as fast
        while windows are scored.
        """
        self.begin(windows, plan, noise_seed=None)
        if not self.on_cpu:
            self.call("compare_q_read_ahead")
        self.end()

    def queue(
        self, windows: Mapping[str, Window], companions: Sequence[str], sampling: Mapping[str, Any]
    ) -> None:
        """Queue the requests of windows, by their names, and then of companions.

        A companion is a request that is not scored (``COMPANION``): no window may ever be alone.
        The scheduler is paused while windows are queued, so that the batches are the same every
        time: otherwise bf16 perplexities change in the fifth digit.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        common = {"max_tokens": 1, "detokenize": False, "skip_reading_prefix_cache": True}
        with paused(engine):
            for name, window in windows.items():
                params = SamplingParams(
                    **common, extra_args={EXTRA_ARGS_KEY: [window.index, window.spans]}, **sampling
                )
                engine.add_request(name, {"prompt_token_ids": window.token_ids.tolist()}, params)
            for name in companions:
                # As long as the longest window, so that no window outlasts it in the queue.
                longest = max(windows.values(), key=lambda window: len(window.token_ids))
                prompt = {"prompt_token_ids": longest.token_ids.tolist()}
                engine.add_request(name, prompt, SamplingParams(**common))

    def interrupt(self, requests: Sequence[str], *, scored: bool) -> None:
        """Abort requests, and end their scoring run with its threads and the windows read ahead.

        Errors are ignored: an engine that has died cannot do this, and the error that interrupted
        the run is reported.
        """
        with suppress(Exception):
            if requests:
                self.llm.llm_engine.abort_request(list(requests))
        with suppress(Exception):
            if scored:
                self.call("compare_q_end")

    def collect(self, windows: Sequence[Window]) -> dict[int, list[Floats]]:
        """Return window -> partial statistics [T, F] per vocabulary shard.

        ModelError if any position is missing, or if a target is outside the vocabulary that is
        scored.
        """
        indices = [window.index for window in windows]
        statistics: dict[tuple[int, int], dict[int, Floats]] = {}  # shard -> window -> [T, F]
        entries = 0
        for header_text, data in self.call("compare_q_collect", indices):
            header = without_error(header_text)
            counts = header["counts"]
            if not counts:  # vLLM gives this rank no logits
                continue
            rows = np.frombuffer(data, np.float32).reshape(sum(counts), -1)
            parts = np.split(rows, np.cumsum(counts)[:-1])
            entries = header["entries"]
            first, last = header["shard"]
            # Of ranks with the same logits, the first one counts.
            statistics.setdefault((first, last), dict(zip(indices, parts, strict=True)))
        # A rank may hold only padding, and then has no entries.
        shards = sorted((first, last) for first, last in statistics if last > first)
        begins = [first for first, _ in shards]
        ends = [last for _, last in shards]
        if [0, *ends] != [*begins, entries]:
            raise ModelError(
                f"vLLM's ranks scored the vocabulary entries {shards}, which are not all "
                f"{entries}, each once"
            )
        results = {}
        for window in windows:
            token_statistics.check_targets(window.index, window.targets, entries)
            results[window.index] = [statistics[shard][window.index] for shard in shards]
        return results

    def end(self) -> dict[str, Any]:
        """Finish a scoring run; return the merged reports of its ranks."""
        reports = [without_error(answer) for answer in self.call("compare_q_end")]
        merged = {}
        for name in reports[0]:
            values = [report[name] for report in reports]
            if name == "recomputed_positions":
                merged[name] = sum(values)
            elif name in LARGEST_OF_RANKS:
                merged[name] = max(values)
            else:
                merged[name] = first_filled(values)
        return merged

    def outputs(
        self, window: Window, file: Path, noise_seed: int | None, *, compare: bool
    ) -> list[ModuleDifference]:
        """Run a window alone; write what modules take and return, or compare it with the file.

        ModelError if the model has several ranks, or runs compiled graphs.
        """
        config = self.llm.llm_engine.vllm_config
        if config.parallel_config.world_size > 1:
            raise ModelError("several ranks share the model")
        if not config.model_config.enforce_eager:
            raise ModelError("compiled graphs do not show their layers")
        length = len(window.token_ids)
        self.call("compare_q_begin_outputs", str(file), compare, length, noise_seed)
        for _ in self.run([window], None):
            pass
        (answer,) = self.call("compare_q_end_outputs")
        return differences_from_json(without_error(answer)["differences"])

    def what_ran(self) -> tuple[tuple[Layer, ...], tuple[KVCache, ...]]:
        """Return how the model's layers and caches ran, for all pipeline stages."""
        layers: dict[str, Layer] = {}
        caches: dict[str, KVCache] = {}
        for answer in self.call("compare_q_layers"):
            layers_of_rank, caches_of_rank = json.loads(answer)
            for fields in layers_of_rank:
                layers[fields["name"]] = Layer(**fields)
            for fields in caches_of_rank:
                caches[fields["layers"]] = KVCache(**fields)
        return group_layers(layers.values()), group_kv_caches(caches.values())


def without_error(answer: str) -> dict[str, Any]:
    """Return the other fields of a rank's answer (JSON); ModelError with its error."""
    fields: dict[str, Any] = json.loads(answer)
    error = fields.pop("error")
    if error:
        raise ModelError(f"scoring failed in vLLM's worker: {error}")
    return fields


def first_filled(values: Sequence[Any]) -> Any:
    """Return the first value that is not empty; the first one if all are."""
    for value in values:
        if value:
            return value
    return values[0]


def has_own_process(core: Any) -> bool:
    """Return True if an engine core runs in another process."""
    return hasattr(core, "call_utility")


@contextmanager
def paused(engine: Any) -> Iterator[None]:
    """Pause the scheduler of an engine in another process.

    An engine in this process steps only on request.
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
