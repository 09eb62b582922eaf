"""What happens to one model of a run: its scores come from the cache or from its workers, and become its rows."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from compare_q import backends
from compare_q.backends.base import PlannedModel, ScoreRequest, Window
from compare_q.backends.common.errors import CompareQError, LostWorkerError, ModelError, StoppedError
from compare_q.backends.reference import store
from compare_q.backends.reference.store import open_reference
from compare_q.backends.scoring import segments
from compare_q.backends.worker.messages import LoadCommand, ScoreCommand, write_windows
from compare_q.eval.run import plan, reference
from compare_q.eval.run.config import RunConfig
from compare_q.eval.run.gpus import GpuLease
from compare_q.eval.run.reference import Reference
from compare_q.eval.run.rows import Rows, Work, tag_of
from compare_q.eval.run.workers import Worker
from compare_q.eval.text.windows import EvalData

MOST_LOST = 3
"""Workers of one model that may be lost with their machines.  A fourth loss is more likely caused by the model."""


class Downloads:
    """Downloads and fingerprints the models of a run in their order, one model ahead of those that score."""

    def __init__(self, config: RunConfig, models: Sequence[PlannedModel], loader: Executor) -> None:
        self.config, self.loader, self.lock = config, loader, threading.Lock()
        self.models, self.begun = iter(models), dict[str, Future[PlannedModel]]()

    def result(self, model: PlannedModel) -> PlannedModel:
        """Return a model that is on this machine, and start with the next one; InputError or ModelError."""
        with self.lock:
            for ahead in self.models:
                is_ahead = model.label in self.begun
                self.begun[ahead.label] = self.loader.submit(self.fetch, ahead)
                if is_ahead:
                    break
        return self.begun[model.label].result()

    def fetch(self, model: PlannedModel) -> PlannedModel:
        """Return a model that is on this machine; its engine is imported while others have the GPUs."""
        found = plan.stamped(self.config, model, plan.download(self.config, model))
        if self.config.gpus.gpus:
            self.config.workers.import_ahead(found, verbose=self.config.verbose)
        return found


def score_model(
    config: RunConfig, model: PlannedModel, downloads: Downloads, texts: Mapping[str, EvalData], rows: Rows,
    others: Sequence[PlannedModel],
) -> None:  # fmt: skip
    """Add the rows of one model, but for the last, which is left in ``rows.scored``; ``others``: all but the reference.

    Everything is acquired in one order: this thread, the locks of all texts, GPUs.  Whoever has GPUs waits for nothing
    but its engine, so that no run waits for another for ever.  InputError, which ends the run before any model loads,
    if the store of a reference is another reference's, or damaged.
    """
    settled = plan.is_settled(model)
    try:
        model = downloads.result(model)
    except Exception as error:
        return rows.fail(model, list(texts), error)
    todo = works_of(config, model, texts, rows, others, checked=settled)
    todo = [work for work in todo if config.clear or work.reads_store or not rows.from_cache(work)]
    if not todo:  # complete rows need no lock, which another run may hold for as long as it scores
        return None
    files = {config.cache.path("scores", work.key, ".lock") for work in todo}
    files |= {work.reference.lock_file for work in todo if work.reference is not None and model.is_reference}
    waits = f"{model.label}: another run is scoring it; this one waits for that"
    with config.cache.locked(files, config.workers.check, lambda: config.progress.say(waits)):
        for work in todo:
            if config.clear:
                rows.forget(work)
            if work.reads_store and work.reference is not None and work.reference.exists:
                reference.verify(config, work.reference)
            if work.lacks_windows:
                config.cache.check_writable()
        todo = [work for work in todo if not rows.from_cache(work, config.progress)]  # another run may have made them
        if not todo:
            return None
        count, place = max(model.n_gpus, 1) * model.replicas, rows.places[model.label]
        with (
            config.gpus.take(count, config.workers.check, place) as lease,
            Replicas(config, model, lease, rows, todo[0].key) as replicas,
        ):
            for work in todo:
                with rows.failing(model, work.name, replicas.end):  # the next text gets new workers
                    if not rows.from_cache(work):  # another text may have the same windows
                        replicas.score(work)
                        rows.scored.append(work)
                if work is not todo[-1]:
                    rows.add_scored()
    return None


def works_of(
    config: RunConfig, model: PlannedModel, texts: Mapping[str, EvalData], rows: Rows, others: Sequence[PlannedModel],
    *, checked: bool,
) -> list[Work]:  # fmt: skip
    """Return the works of a model on this machine.  A text that it cannot score gets a row with the reason.

    ``checked``: its vocabulary was checked before it was downloaded.
    """
    works = []
    for name, text in texts.items():
        try:
            if not checked:
                plan.raise_all(plan.vocabulary_problems(model, {name: text}))
            key = plan.score_key(config, model, text)
        except Exception as error:
            rows.fail(model, [name], error)
            continue
        config.cache.use("scores", key)
        works.append(Work(model, name, text, key, rows.references[name]))
        if model.is_reference:
            works[-1] = as_reference(config, works[-1], others)
    return works


def as_reference(config: RunConfig, work: Work, others: Sequence[PlannedModel]) -> Work:
    """Return a work of the reference model with its reference, and whether the others need the store of that."""
    found = reference.of_model(config, work.model, work.text)
    config.cache.use("references", found.key)
    wanted = config.logits_file is not None or work.model.out_logits is not None
    records = not all_cached(config, others, work.text, found) or (wanted and not found.exists)
    reads = records or not is_cached(config, work.model, work.text, segments.ALONE)
    return replace(work, reference=found, records=records, reads_store=reads)


def given_store(config: RunConfig, path: Path, text: EvalData, others: Sequence[PlannedModel]) -> Reference:
    """Return the reference of a store without a model; every byte is checked if any of the others needs it."""
    found = reference.of_store(config, path, text)
    config.cache.use("references", found.path.name)
    if not all_cached(config, others, text, found):
        with config.cache.locked([found.lock_file], config.workers.check):
            reference.verify(config, found)
    return found


def is_cached(config: RunConfig, model: PlannedModel, text: EvalData, tag: str) -> bool:
    """Return whether a model's scores of all windows can be taken from the cache; False if it must be downloaded."""
    local = backends.files_of(model).cached()
    if config.clear or local is None:
        return False
    there = segments.committed(config.cache.path("scores", plan.score_key(config, local, text), ""), tag)
    return {window.index for window in text.windows} <= there


def all_cached(config: RunConfig, models: Sequence[PlannedModel], text: EvalData, against: Reference) -> bool:
    """Return whether the scores of all these models are in the cache; False also if that is not known yet."""
    try:
        return all(is_cached(config, model, text, tag_of(model, against)) for model in models)
    except CompareQError:  # the model's own row reports it
        return False


class Replicas:
    """The workers of one model on the GPUs of a lease.  They start, and load the model, before the first scoring."""

    def __init__(self, config: RunConfig, model: PlannedModel, lease: GpuLease, rows: Rows, key: str) -> None:
        self.config, self.model, self.lease, self.rows, self.key = config, model, lease, rows, key
        self.workers: list[Worker] = []
        self.failure: CompareQError | None = None
        self.n_lost = 0
        self.held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.held.__exit__(*error)
        self.workers = []

    def end(self) -> None:
        """End all workers at once.  New ones start before the next scoring."""
        for worker in self.workers:
            worker.kill()
        self.workers = []
        self.held.close()

    def score(self, work: Work) -> None:
        """Score the windows of a text that have no scores yet.

        If the machine of a worker is lost, others go on.  ModelError if the model fails; committed scores are kept.
        """
        while True:
            try:
                return self.score_missing(work)
            except LostWorkerError as lost:
                self.end()
                self.n_lost += 1
                if self.n_lost > MOST_LOST:
                    raise ModelError(f"{lost}, as {MOST_LOST} workers of this model before") from None
                self.config.progress.say(f"{work.title}: {lost}; what is not kept of it is scored again")

    def score_missing(self, work: Work) -> None:
        """Split the windows without scores among the workers.  The reference records its store if that is needed."""
        cache, windows, against = self.config.cache, work.text.windows, work.reference
        cache.check_writable()
        folder, request, recorded = cache.path("scores", work.key, ""), ScoreRequest(), None
        have = segments.committed(folder, work.tag)
        facts: dict[str, Any] = {"label": self.model.label, "known": self.model.known, "reference": None}
        if against is not None and work.tag != segments.ALONE:
            entries = open_reference(against.path).head.vocab_size
            request = ScoreRequest(reference=against.path, vocab_size=entries, divergences=against.divergences)
            facts["reference"] = {"label": against.label, "key": against.key, "vocab_size": entries,
                                  "model_vocab_size": plan.facts_of(self.model).vocab_size}  # fmt: skip
        with ExitStack() as held:
            if against is not None and self.model.is_reference and not against.has(len(windows)):
                recorded = against.path
                store.begin(recorded, against.identity)
                held.callback(store.tidy, recorded)
                request, have = ScoreRequest(record=recorded), have & store.recorded(recorded)
            missing = [window for window in windows if window.index not in have]
            if not segments.records(folder):  # a worker was killed before it could write what ran
                missing = missing or [windows[-1]]
            commands, session = [], uuid.uuid4().hex
            for number, share in enumerate(shares(missing, self.model.replicas)):
                file = held.enter_context(cache.scratch())
                write_windows(file, share)
                commands.append(ScoreCommand(request, file, folder, work.tag, f"{session}-{number}", facts))
            if missing:
                self.load_once()
                title = self.rows.numbered(f"scoring {work.title}", self.model)
                self.each(commands, self.config.window_timeout_s, title, len(missing))
            if against is not None and recorded is not None:
                reference.seal(self.config, against, len(windows))

    def load_once(self) -> None:
        """Start the workers and have them load the model, unless they have; a load that failed is not tried again."""
        if self.failure is not None:
            raise self.failure
        if self.workers:
            return
        workers, n_gpus, count = self.config.workers, self.model.n_gpus, self.model.replicas
        try:
            log = None if self.config.verbose else self.config.cache.log_file(self.model.label, self.key)
            model = self.model.updated(log_file=log)
            commands = []
            for number in range(count):
                self.workers.append(self.held.enter_context(workers.started(lambda: workers.create(model))))
                share = None if n_gpus else (number, count)
                commands.append(LoadCommand(model, self.lease.share(number, n_gpus), share))
            title = self.rows.numbered(f"loading {model.label}", model)
            self.each(commands, self.config.load_timeout_s, title, None)
        except (StoppedError, LostWorkerError):
            raise
        except CompareQError as error:
            self.failure = error
            raise

    def each(self, commands: Sequence[Any], silence_s: float, title: str, n_windows: int | None) -> None:
        """Give each worker a command, and show their progress; the first failure ends all workers."""
        unit = "" if n_windows is None else "windows"
        with self.config.progress.phase(title, unit=unit, total=n_windows) as phase:
            if len(commands) == 1:
                self.workers[0].perform(commands[0], silence_s, phase.show)
                return
            with ThreadPoolExecutor(len(commands)) as pool:
                pairs = zip(self.workers, commands, strict=False)
                ends = [pool.submit(worker.perform, command, silence_s, phase.show) for worker, command in pairs]
                try:
                    for end in as_completed(ends):
                        end.result()
                except BaseException:
                    for worker in self.workers:
                        worker.kill()
                    raise


def shares(windows: Sequence[Window], count: int) -> list[Sequence[Window]]:
    """Split windows into ``count`` shares that differ by one window at most; fewer if there are fewer windows."""
    count = max(min(count, len(windows)), 1)
    ends = [len(windows) * part // count for part in range(count + 1)]
    return [windows[begin:end] for begin, end in itertools.pairwise(ends)]
