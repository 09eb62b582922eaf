"""The driver: jobs -> scores, from the store where they are there -> results.

It knows engines only by the contract (``backends/base.py``).  Every check that needs no engine runs before the first
model loads; after that a model that fails is a row that says so, and the others go on.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from backends.base import Backend, CompareQError, InputError, ModelError, Storage
from backends.messages import one_line
from eval import estimates, jobs, machine, measure, scores, windows
from eval.jobs import Job
from eval.progress import Progress
from eval.results import ModelResult, RunResult
from eval.specs import DataSpec, ModelSpec
from eval.store import Store
from eval.windows import EvalData


class Runner:
    """One run's fixed parts: the store, the progress display, and two switches."""

    def __init__(self, store: Store, progress: Progress, *, clear: bool = False, verbose: bool = False) -> None:
        self.store = store
        self.progress = progress
        self.clear = clear
        self.verbose = verbose

    def run(self, data_spec: DataSpec, specs: Sequence[ModelSpec], max_rows: int | None) -> RunResult:
        """Measure every model.  InputError with all problems, one a line, before anything loads."""
        raise_all(jobs.plan(specs, data_spec.eval_len)[1])  # quick, so it goes before tokenizing
        data = windows.build(data_spec, max_rows, self.store, self.progress, clear=self.clear)
        planned, problems = jobs.plan(specs, data.length)  # the chat prefix may have made the windows longer
        for job in planned:
            try:
                jobs.check_vocabulary(job, data)
            except InputError as error:
                problems.append(f"{job.request.label}: {error}")
        raise_all(problems)
        for spec in specs:
            if spec.out_logits is not None:
                self.progress.say(f"{spec.name}: out_logits is not used: KL divergence is not in this version")
        models = tuple(self.load_or_measure(job, data) for job in planned)
        return RunResult(windows.describe_json(data_spec, data), windows.subtitle(data_spec, data), models)

    def load_or_measure(self, job: Job, data: EvalData) -> ModelResult:
        """One model's result: from the store, or measured and stored; a failure is a result with its reason."""
        described = ModelResult(
            job.request.label, job.engine, spec=json.loads(job.spec.model_dump_json(exclude_unset=True)),
            spec_sha256=job.spec.digest(),
        )  # fmt: skip
        try:
            job = jobs.fetch(job, data, self.progress)
            key = jobs.scores_key(job, data)
            with self.store.lock("scores", key):
                if self.clear:
                    self.store.clear("scores", key)
                stored = scores.load(self.store, key)
                cached = stored is not None
                if stored is None:
                    self.measure(job, data, key)
                    stored = scores.load(self.store, key)
            if stored is None:
                raise ModelError(f"{self.store.path('scores', key, '.json')}: vanished while the run went on")
            ppl = estimates.perplexity(stored.logprob)
            if ppl.value is None:
                raise ModelError(f"no perplexity: {ppl.non_finite} of {len(stored.logprob)} positions are not finite")
            return replace(
                described,
                storage=overridden(job.backend(job.request).storage(), job.spec),
                ppl=ppl,
                rows=stored.rows,
                load_seconds=stored.facts["load_seconds"],
                score_seconds=stored.facts["score_seconds"],
                provenance=stored.facts["provenance"],
                cached=cached,
            )
        except CompareQError as error:
            reason = str(error)
        except Exception as error:  # a bug, here or in an engine, must not lose the other models' results
            reason = f"{type(error).__name__}: {one_line(error)}"
            if self.verbose:
                traceback.print_exc()
        self.progress.say(f"{described.label}: failed")
        return replace(described, error=reason)

    def measure(self, job: Job, data: EvalData, key: str) -> None:
        """Load one model, score every window, store the scores and what is known of the run."""
        label = job.request.label
        log_file = None if self.verbose else self.store.log_file(label, key)
        with opened(replace(job, request=replace(job.request, log_file=log_file))) as backend:
            with self.progress.phase(
                f"loading {label}", expected=scores.expected_load(self.store, job.engine)
            ) as loading:
                backend.load()
            scored = {}
            with self.progress.phase(f"scoring {label}", unit="windows", total=len(data.windows)) as scoring:
                for window_scores in measure.token_scores(backend, data.windows):
                    scored[window_scores.row] = window_scores
                    scoring.advance()
            provenance = {
                "engine": job.engine,
                **job.backend.versions(),
                **machine.hardware(),
                **machine.threads(),
                **backend.provenance(),
            }
        if warnings := provenance.get("warnings"):
            self.progress.say(f"{label}: {len(warnings)} warnings of the engine are in {log_file}")
        facts = {"provenance": provenance, "load_seconds": loading.seconds, "score_seconds": scoring.seconds}
        scores.save(self.store, key, data.windows, scored, facts)


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line a problem, if there are any."""
    if problems:
        raise InputError("\n".join(problems))


@contextmanager
def opened(job: Job) -> Iterator[Backend]:
    """The engine, closed whatever happens."""
    backend = job.backend(job.request)
    try:
        yield backend
    finally:
        backend.close()


def overridden(storage: Storage, spec: ModelSpec) -> Storage:
    """The measured storage with the spec's override_* in its place."""
    return replace(
        storage,
        bpw_layer=storage.bpw_layer if spec.override_bpw_layer is None else spec.override_bpw_layer,
        bpw_head=storage.bpw_head if spec.override_bpw_head is None else spec.override_bpw_head,
        vram_bits=storage.vram_bits if spec.override_vram_bits is None else spec.override_vram_bits,
    )
