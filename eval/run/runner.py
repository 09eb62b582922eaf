"""The driver: jobs -> scores, from the cache where they are there -> results; the reference first.

It knows engines only by the contract (``backends/base.py``).  Every check that needs no engine runs before the first
model loads; after that a model that fails is a row that says so, and the others go on.
"""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from filelock import Timeout

from backends.base import Task, TokenScores
from backends.common.errors import CompareQError, InputError, ModelError
from backends.common.messages import one_line
from backends.reference import store as reference_store
from backends.reference.reading import open_reference
from eval.common.cache import Cache
from eval.common.progress import Progress
from eval.results.run_result import ModelResult, RunResult
from eval.run import jobs, references, table_rows, token_scores
from eval.run import scoring as measure
from eval.run.jobs import Job
from eval.run.references import Reference
from eval.specs.types import DataSpec, ModelSpec
from eval.text import windows
from eval.text.windows import EvalData


class Runner:
    """One run's fixed parts: cache, progress display, two switches; its reference and windows once they are known."""

    def __init__(
        self,
        cache: Cache,
        progress: Progress,
        *,
        clear: bool = False,
        verbose: bool = False,
        logits_file: Path | None = None,
    ) -> None:
        self.cache = cache
        self.progress = progress
        self.clear = clear
        self.verbose = verbose
        self.logits_file = logits_file
        self.reference: Reference | None = None
        self.lost_reference = False
        self.data: EvalData | None = None

    def run(self, data_spec: DataSpec, specs: Sequence[ModelSpec], max_rows: int | None) -> RunResult:
        """Measure every model.  InputError with all problems, one a line, before anything loads."""
        raise_all(jobs.plan(specs, data_spec.longest)[1])  # quick, so it goes before tokenizing
        data = self.data = windows.build(data_spec, max_rows, self.cache, self.progress, clear=self.clear)
        planned, problems = jobs.plan(specs, data.length)  # the chat prefix may have made the windows longer
        for job in planned:
            try:
                jobs.check_vocabulary(job, data)
            except InputError as error:
                problems.append(f"{job.request.label}: {error}")
        raise_all(problems)
        results = self.measure_all(planned, data)
        n_tokens = sum(window.n_scored for window in data.windows)
        described = None if self.reference is None else references.describe_json(self.reference, n_tokens)
        return RunResult(windows.describe_json(data_spec, data), windows.subtitle(data_spec, data), results, described)

    def measure_all(self, planned: Sequence[Job], data: EvalData) -> tuple[ModelResult, ...]:
        """The reference, then the others; results in the order of the jobs."""
        marked = [job for job in planned if job.spec.is_reference]
        others = [job for job in planned if not job.spec.is_reference]
        results = {job.request.label: self.measure_reference(job, others, data) for job in marked}
        if not marked and self.logits_file is not None:
            self.reference = references.given(self.logits_file, data, self.progress)
            self.cache.use("references", self.reference.path.name)
            if not self.all_stored(others, data):
                self.verify(self.reference)
        results |= {job.request.label: self.load_or_measure(job, data) for job in others}
        return tuple(results[job.request.label] for job in planned)

    def measure_reference(self, job: Job, others: Sequence[Job], data: EvalData) -> ModelResult:
        """The reference's own result; its store is there, and whole, if any of the others needs it.

        InputError, before anything loads, if there is a store and it is another reference's or damaged.
        """
        try:
            job = jobs.fetch(job, data, self.progress)
            jobs.scores_identity(job, data)  # reads the checkpoint's headers
        except CompareQError as error:
            self.lost_reference = True
            return replace(table_rows.described(job), error=str(error))
        self.reference = references.planned(job, data, self.cache, self.logits_file, clear=self.clear)
        self.cache.use("references", self.reference.key)
        if self.clear and self.reference.exists:
            with self.cache.lock("references", self.reference.key):
                reference_store.remove(self.reference.path)
        wanted = self.logits_file is not None or job.spec.out_logits is not None
        needed = not self.all_stored(others, data) or (wanted and not self.reference.exists)
        if self.reference.exists and (needed or not self.all_stored([job], data)):
            self.verify(self.reference)
        result = self.load_or_measure(job, data, again=needed and not self.reference.exists)
        if result.error:
            self.reference, self.lost_reference = None, True
        return result

    def all_stored(self, some: Sequence[Job], data: EvalData) -> bool:
        """Whether these models' scores are there already; False also where that cannot be told yet."""
        return all(self.is_stored(job, data) for job in some)

    def is_stored(self, job: Job, data: EvalData) -> bool:
        """Whether a model's scores are there; False for one that is still to be fetched or damaged."""
        request = job.backend.here(job.request)
        if self.clear or request is None:
            return False
        try:
            key = self.scores_key(replace(job, request=request), data)
            return self.cache.path("scores", key, ".json").is_file()
        except CompareQError:  # its own row of the table will say it
            return False

    def verify(self, reference: Reference) -> None:
        """Check every byte of a store; InputError names a damaged file."""
        store = open_reference(reference.path)
        with (
            self.cache.lock("references", reference.key),
            self.progress.phase(f"checking reference {reference.label}", unit="files") as phase,
        ):
            store.verify(phase.advance)

    def scores_key(self, job: Job, data: EvalData) -> str:
        """Key of a model's scores in this run; a reference changes nothing for an engine that cannot be compared."""
        alone = self.reference is None or job.spec.is_reference or not job.backend.capabilities.compares
        return jobs.scores_key(job, data, None if alone or self.reference is None else self.reference.key)

    def load_or_measure(self, job: Job, data: EvalData, *, again: bool = False) -> ModelResult:
        """One model's result: from the cache, or measured and kept there; a failure is a result with its reason.

        ``again``: measure it even if its scores are there, for the store that it leaves.
        """
        try:
            job = jobs.fetch(job, data, self.progress)
            key = self.scores_key(job, data)
            self.cache.use("scores", key)
            with self.cache.lock("scores", key):
                if self.clear:
                    self.cache.clear("scores", key)
                # Another run may have made the missing store while this one waited for the lock.
                missing = again and self.reference is not None and not self.reference.exists
                stored = None if missing else token_scores.load(self.cache, key)
                cached = stored is not None
                if stored is None:
                    self.measure(job, data, key)
                    stored = token_scores.load(self.cache, key)
            if stored is None:
                raise ModelError(f"{self.cache.path('scores', key, '.json')}: vanished while the run went on")
            found = table_rows.summarize(stored, data)
            if not found.ppl.tokens:
                raise ModelError(f"no perplexity: none of {len(stored.logprob)} positions is finite")
            return replace(
                table_rows.described(job),
                storage=table_rows.overridden(job.backend(job.request).storage(), job.spec),
                estimates=found,
                windows=stored.windows,
                load_seconds=stored.facts["load_seconds"],
                score_seconds=stored.facts["score_seconds"],
                provenance=stored.facts["provenance"],
                scores_key=key,
                cached=cached,
                notes=(*self.notes(job, stored), *stored.facts["provenance"].get("notes", ())),
            )
        except CompareQError as error:
            reason = str(error)
        except Exception as error:  # a bug, here or in an engine, must not lose the other models' results
            reason = f"{type(error).__name__}: {one_line(error)}"
            if self.verbose:
                traceback.print_exc()
        self.progress.say(f"{job.request.label}: failed")
        return replace(table_rows.described(job), error=reason)

    def notes(self, job: Job, stored: token_scores.StoredScores) -> tuple[str, ...]:
        """What has to be said of a model's KL divergence."""
        if job.spec.is_reference or (self.reference is None and not self.lost_reference):
            return ()
        if self.lost_reference:
            return ("no KLD: the reference failed",)
        if "kld" not in stored.columns:
            return ("no KLD: this engine gives no more than the real tokens' log-probabilities",)
        entries = stored.facts["reference"]["vocab_size"]
        size = stored.facts["reference"]["model_vocab_size"]
        return () if size in (None, entries) else (f"of {size} and {entries} logits, only those that both have count",)

    def measure(self, job: Job, data: EvalData, key: str) -> None:
        """Load one model, score every window, store the scores and what is known of the run.

        The reference leaves its store behind, if that is not there.
        """
        label = job.request.label
        log_file = None if self.verbose else self.cache.log_file(label, key)
        with (
            self.task(job) as task,
            jobs.opened(replace(job, request=replace(job.request, log_file=log_file)), self.progress) as backend,
        ):
            with self.progress.phase(
                f"loading {label}", expected=token_scores.expected_load(self.cache, job.engine)
            ) as loading:
                backend.load()
            scored = {}
            with self.progress.phase(f"scoring {label}", unit="windows", total=len(data.windows)) as scoring:
                for window_scores in measure.token_scores(backend, data.windows, task):
                    scored[window_scores.window] = window_scores
                    scoring.advance()
            self.keep_reference(task, len(data.windows))
            provenance = jobs.what_ran(job, backend)
        if warnings := provenance.get("warnings"):
            self.progress.say(f"{label}: {len(warnings)} warnings of the engine are in {log_file}")
        facts = {
            "label": label, "provenance": provenance, "load_seconds": loading.seconds, "score_seconds": scoring.seconds,
            "reference": self.compared_with(job, task),
        }  # fmt: skip
        token_scores.save(self.cache, key, data.windows, scored, facts)
        self.keep_alone(job, data, key, scored, facts)

    def keep_alone(
        self, job: Job, data: EvalData, key: str, scored: Mapping[int, TokenScores], facts: Mapping[str, object]
    ) -> None:
        """Keep what does not depend on the reference under its own key too: a run without one need not measure it."""
        alone = jobs.scores_key(job, data, None)
        if alone == key or (not self.clear and self.cache.path("scores", alone, ".json").is_file()):
            return
        with suppress(Timeout), self.cache.lock("scores", alone).acquire(timeout=0):
            without = {index: each.alone() for index, each in scored.items()}
            token_scores.save(self.cache, alone, data.windows, without, {**facts, "reference": None})

    @contextmanager
    def task(self, job: Job) -> Iterator[Task]:
        """What a model's run has to do with the reference; a folder that a failed recording leaves is removed."""
        reference = self.reference
        compares = job.backend.capabilities.compares
        if reference is None or not compares or (job.spec.is_reference and reference.exists):
            yield Task()
        elif not job.spec.is_reference:
            yield Task(reference.path, open_reference(reference.path).head.vocab_size)
        else:
            building = reference.path.with_name(f".{reference.path.name}.part")
            with self.cache.lock("references", reference.key):
                shutil.rmtree(building, ignore_errors=True)  # of a run that was killed
                building.mkdir(parents=True)
                try:
                    yield Task(record=building)
                finally:
                    shutil.rmtree(building, ignore_errors=True)

    def keep_reference(self, task: Task, n_windows: int) -> None:
        """Make a store of what a run has recorded."""
        if task.record is None or self.reference is None:
            return
        identity = {**self.reference.identity, "label": self.reference.label}
        reference_store.seal(task.record, self.reference.path, identity, n_windows)
        store = open_reference(self.reference.path)
        size = f"{store.stored_bytes / 1024**2:,.0f} MiB of {store.contents}"
        self.progress.say(f"{self.reference.label}: kept as the reference, {size}, in {self.reference.path}")
        if store.reason:
            self.progress.say(f"{self.reference.label}: {store.head.dtype} logits are kept, not states: {store.reason}")

    def compared_with(self, job: Job, task: Task) -> dict[str, object] | None:
        """The facts of a comparison that the results need."""
        if task.reference is None or self.reference is None:
            return None
        return {
            "label": self.reference.label, "key": self.reference.key, "vocab_size": task.vocab_size,
            "model_vocab_size": job.facts().vocab_size,
        }  # fmt: skip


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line a problem, if there are any."""
    if problems:
        raise InputError("\n".join(problems))
