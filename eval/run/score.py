"""Scoring of one model of a run: its scores come from the cache or from its workers, and become its rows."""

from __future__ import annotations

import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from compare_q import backends
from compare_q.backends.base import PlannedModel, ScoreRequest
from compare_q.backends.common import storage
from compare_q.backends.common.errors import CompareQError, InputError, LostWorkerError, ModelError, StoppedError
from compare_q.backends.common.messages import with_class
from compare_q.backends.reference import store
from compare_q.backends.scoring import segments
from compare_q.backends.worker.messages import LoadCommand, ScoreCommand, write_windows
from compare_q.eval.common.cache import Cache
from compare_q.eval.results import ModelResult, TextResult
from compare_q.eval.run import plan, reference, token_scores
from compare_q.eval.run.config import RunConfig
from compare_q.eval.run.reference import Reference
from compare_q.eval.run.token_scores import Work, of_scores, row_of
from compare_q.eval.run.workers import Worker
from compare_q.eval.text import windows
from compare_q.eval.text.windows import EvalData

TAG_DIGITS = 16
MOST_LOST = 3
"""Workers of one model that may be lost with their machines.  A fourth loss is more likely caused by the model."""


class Rows:
    """The rows of a run and the references of its texts, by the texts' names; threads add them.

    ``marked``: the reference, if there is one; ``scored``: works whose rows the main thread makes; ``numbers``: which
    of the models a label is, for titles.
    """

    def __init__(self, config: RunConfig, models: Sequence[PlannedModel], texts: Mapping[str, EvalData]) -> None:
        self.config, self.models, self.texts = config, models, texts
        self.marked = [model for model in models if model.is_reference]
        self.others = [model for model in models if not model.is_reference]
        of = f" of {len(models)})" if len(models) > 1 else ""
        self.numbers = {each.label: of and f" (model {n}{of}" for n, each in enumerate(self.marked + self.others, 1)}
        self.by_text: dict[str, dict[str, ModelResult]] = {name: {} for name in texts}
        self.references: dict[str, Reference | None] = dict.fromkeys(texts)
        self.scored: list[Work] = []
        self.cleared: set[str] = set()

    def add(self, work: Work, *, locked: bool = False, cached: bool = True) -> bool:
        """Add the row of a work whose scores are complete; return True if it has one, with scores or with an error.

        ``locked``: the work's locks are held; damaged files are deleted, and reported.  ``cached``: an earlier run has
        made the scores.
        """
        cache, progress = self.config.cache, self.config.progress if locked else None
        if work.model.label in self.by_text[work.name]:
            return True
        if work.lacks_windows:
            return False
        ready, work.stored = work.stored, None
        try:
            stored = ready or token_scores.load(cache, work.key, work.tag, work.text.windows, progress)
            if stored is None and cached:
                return False
            if stored is None:
                raise ModelError(f"{cache.path('scores', work.key, '')}: vanished during the run")
            row = of_scores(work, stored, has_reference=bool(self.marked), from_cache=cached)
        except Exception as error:
            self.fail(work.model, [work.name], error)
            return True
        if work.store is not None and not work.unkept:
            self.references[work.name] = work.store
        self.by_text[work.name][row.label] = row
        self.config.on_row(work.name, row)
        return True

    def fail(self, model: PlannedModel, names: Iterable[str], error: Exception) -> None:
        """Add a row with the error for each of these texts, so that one failure does not affect the other rows.

        InputError, which ends the run, if the reference is a pack: no other row can be compared without the reference.
        """
        reason = str(error) if isinstance(error, CompareQError) else with_class(error)
        if model.is_reference and backends.files_of(model).is_store and not isinstance(error, StoppedError):
            raise InputError(f"{model.label}: {reason}")
        if self.config.verbose and not isinstance(error, CompareQError):  # a bug, in compare_q or in an engine
            traceback.print_exception(error)
        for name in names:
            self.config.progress.say(f"{model.label}{name and f' on {name}'}: failed")
            row = self.by_text[name][model.label] = row_of(model, error=reason)
            self.config.on_row(name, row)

    @contextmanager
    def failing(self, model: PlannedModel, name: str, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Turn an error of the block into the model's row of this text, after a call of ``then``."""
        try:
            yield
        except Exception as error:
            then()
            self.fail(model, [name], error)

    def forget(self, work: Work) -> None:
        """Delete the cached data of a work, whose locks are held; only once, since two works may share a key.

        A store that another run reads is kept.
        """
        if work.key not in self.cleared:
            self.cleared.add(work.key)
            self.config.cache.clear("scores", work.key)
        if work.store is None or work.store.is_pack:
            return
        if work.store.key in self.config.cache.used_by_runs(others=True):
            self.config.progress.say(f"{work.store.path}: kept, because another run uses this reference")
        else:
            store.discard(work.store.path)

    def result(self, name: str, key: str) -> TextResult:
        """Return the results of the text with this key, in the order of the models."""
        text, found, against = self.texts[key], self.by_text[key], self.references[key]
        unfinished = str(StoppedError())
        return TextResult(
            name=name, data=windows.data_json(text), subtitle=windows.subtitle(text),
            models=tuple(found.get(model.label) or row_of(model, error=unfinished) for model in self.models),
            reference=None if against is None else reference.as_json(against, text.n_scored),
        )  # fmt: skip


class Downloads:
    """Downloads and fingerprints the models of a run in their order, one model ahead of those that score."""

    def __init__(self, rows: Rows, loader: Executor) -> None:
        self.rows, self.loader, self.lock = rows, loader, threading.Lock()
        self.models, self.begun = iter(rows.marked + rows.others), dict[str, Future[PlannedModel]]()

    def result(self, model: PlannedModel) -> PlannedModel:
        """Return a model that is on this machine, and start with the next one; InputError or ModelError."""
        with self.lock:
            for ahead in self.models:
                is_ahead = model.label in self.begun
                self.begun[ahead.label] = self.loader.submit(plan.fetched, self.rows.config, ahead)
                if is_ahead:
                    break
        return self.begun[model.label].result()


def score_model(config: RunConfig, model: PlannedModel, downloads: Downloads, rows: Rows) -> None:
    """Add the rows of one model; its last text is left in ``rows.scored``, and the main thread makes that row.

    Everything is acquired in one order: this thread, the locks of all texts, GPUs.  A model that has GPUs waits only
    for its engine, so that two runs never wait for each other.  InputError, which ends the run before any model loads,
    if the store of a reference is another reference's, or damaged.
    """
    cache, progress, check = config.cache, config.progress, config.workers.check
    works, settled = list[Work](), plan.is_known(model)
    try:
        model = downloads.result(model)
    except Exception as error:
        return rows.fail(model, rows.texts, error)
    for name, text in rows.texts.items():
        with rows.failing(model, name):
            if not settled:
                plan.raise_all(plan.vocabulary_problems(model, {name: text}))
            key, against = Cache.key("scores", plan.identity(config, model, text)), rows.references[name]
            cache.use("scores", key)
            works.append(Work(model, name, text, key, tag_of(model, against), against))
    for work in works if model.is_reference else ():
        work.store = found = reference.of_model(config, model, work.text)
        cache.use("references", found.key)
        wanted = (config.logits_file is not None or model.out_logits is not None) and not found.exists
        work.needs_store = wanted or not all_cached(config, rows.models, work.text, found)
    # Complete rows need no lock: another run may hold the lock while it scores for hours.
    todo = [work for work in works if config.clear or work.needs_store or not rows.add(work)]
    files = {cache.path("scores", work.key, ".lock") for work in todo}
    files |= {work.store.lock_file for work in todo if work.store is not None and not work.store.is_pack}
    waits = f"{model.label}: another run is scoring it; this one waits for that"
    with cache.locked(files, check, lambda: progress.say(waits)):
        for work in todo:
            if config.clear:
                rows.forget(work)
            if work.needs_store and work.store is not None and work.store.exists and not work.store.is_pack:
                reference.verify(config, work.store)
            if work.lacks_windows:
                cache.check_writable()
        todo = [work for work in todo if not rows.add(work, locked=True)]  # another run may have made these scores
        if not todo:
            return None
        count, last = max(model.n_gpus, 1) * model.replicas, list[Work]()
        with config.gpus.take(count, check) as gpus, closing(Replicas(config, model, gpus, rows)) as replicas:
            for work in todo:
                with rows.failing(model, work.name, replicas.end):  # the next text gets new workers
                    if rows.add(work):  # another text may have the same windows
                        continue
                    replicas.score(work)
                    if work is todo[-1]:
                        last = [work]
                    else:
                        rows.add(work, locked=True, cached=False)
        for work in last:  # read before another run can forget them
            with rows.failing(model, work.name):
                work.stored = token_scores.load(cache, work.key, work.tag, work.text.windows)
                rows.scored.append(work)
    return None


def tag_of(model: PlannedModel, against: Reference | None) -> str:
    """Return the tag of a model's scores: the reference's key, or ``ALONE`` for scores without a reference."""
    if against is None or model.is_reference or not backends.engine_class(model.engine).capabilities.compares:
        return segments.ALONE
    return against.key[:TAG_DIGITS]


def use_given_store(config: RunConfig, path: Path, rows: Rows) -> None:
    """Make a store the reference of all texts; every byte is checked if a model needs it."""
    for name, text in rows.texts.items():
        rows.references[name] = found = reference.of_store(config, path, text)
        config.cache.use("references", found.path.name)
        if not all_cached(config, rows.others, text, found):
            with config.cache.locked([found.lock_file], config.workers.check):
                reference.verify(config, found)


def all_cached(config: RunConfig, models: Sequence[PlannedModel], text: EvalData, against: Reference) -> bool:
    """Return whether the scores of all windows of all these models are in the cache; False if that is not known yet."""
    needed = {window.index for window in text.windows}
    for model in models:
        try:
            here = backends.files_of(model).cached()
            if config.clear or here is None:
                return False
            key = Cache.key("scores", plan.identity(config, here, text))
        except CompareQError:  # the model's own row reports it
            return False
        if not needed <= segments.committed(config.cache.path("scores", key, ""), tag_of(model, against)):
            return False
    return True


class Replicas:
    """The workers of one model on its GPUs.  They start, and load the model, before the first scoring."""

    def __init__(self, config: RunConfig, model: PlannedModel, gpus: Sequence[str] | None, rows: Rows) -> None:
        self.config, self.model, self.gpus, self.number = config, model, gpus, rows.numbers[model.label]
        self.workers: list[Worker] = []
        self.failure: CompareQError | None = None
        self.n_lost = 0
        self.held = ExitStack()

    def close(self) -> None:
        """Let all workers end.  New ones start before the next scoring."""
        self.workers = []
        self.held.close()

    def end(self) -> None:
        """End all workers at once."""
        for worker in self.workers:
            worker.kill()
        self.close()

    def score(self, work: Work) -> None:
        """Score the windows of a text that have no scores yet, split among the workers; record a reference's store.

        If the machine of a worker is lost, new workers continue.  ModelError if the model fails; committed scores stay.
        """
        own, n_windows = work.store, len(work.text.windows)
        if own is not None and (work.unkept or own.has(n_windows)):
            own = None  # nothing has to be recorded
        self.config.cache.check_writable()
        with ExitStack() as held:
            if own is not None:
                held.callback(store.tidy, own.path)
            try:
                commands, n_missing = self.commands(work, own, held)
                if commands:
                    self.load(work.key)
                    title, timeout = f"scoring {work.title}{self.number}", self.config.window_timeout_s
                    self.each(commands, timeout, title, "windows", n_missing)
                if own is not None:
                    with storage.keeping("the reference", own.path):
                        reference.seal(self.config, own, n_windows)
                return None
            except LostWorkerError as lost:
                self.end()
                self.n_lost += 1
                if self.n_lost > MOST_LOST:
                    raise ModelError(f"{lost}, as {MOST_LOST} workers of this model before") from None
                self.config.progress.say(f"{work.title}: {lost}; what is not kept of it is scored again")
            except (InputError, ModelError) as error:
                if own is None or storage.NOT_KEPT not in str(error):
                    raise
                self.end()  # without a store there may be room for the scores
                work.unkept = reference.unkept(own, n_windows, error)
                self.config.progress.say(f"{work.title}: {work.unkept}; it is scored without")
            return self.score(work)

    def commands(self, work: Work, own: Reference | None, held: ExitStack) -> tuple[list[ScoreCommand], int]:
        """Return a command for each worker that has windows to score, and the number of these windows.

        ``own``: the reference whose store is recorded, and begins here; ``held``: removes the files of the windows.
        """
        cache, windows, against = self.config.cache, work.text.windows, work.reference
        folder, request = cache.path("scores", work.key, ""), ScoreRequest()
        have = segments.committed(folder, work.tag)
        facts: dict[str, Any] = {"label": self.model.label, "known": self.model.known, "reference": None}
        if against is not None and work.tag != segments.ALONE:
            entries = store.open_reference(against.path).head.vocab_size
            request = ScoreRequest(reference=against.path, vocab_size=entries)
            facts["reference"] = {"label": against.label, "key": against.key, "vocab_size": entries,
                                  "model_vocab_size": plan.facts_of(self.model).vocab_size}  # fmt: skip
        if own is not None:
            with storage.keeping("the reference", own.path):
                store.begin(own.path, own.identity)
            request, have = ScoreRequest(record=own.path), have & store.recorded(own.path)
        missing = [window for window in windows if window.index not in have]
        if not segments.records(folder):  # a worker was killed before it could write what ran
            missing = missing or [windows[-1]]
        session, count, commands = uuid.uuid4().hex, min(self.model.replicas, len(missing)), []
        for number in range(count):  # shares differ by one window at most
            begin, end = (len(missing) * part // count for part in (number, number + 1))
            file = held.enter_context(cache.scratch())
            with storage.keeping("the windows of a run", file.parent):
                write_windows(file, missing[begin:end])
            commands.append(ScoreCommand(request, file, folder, work.tag, f"{session}-{number}", facts))
        return commands, len(missing)

    def load(self, key: str) -> None:
        """Start the workers and have them load the model, unless they have; a load that failed is not tried again."""
        if self.failure is not None:
            raise self.failure
        if self.workers:
            return
        config, model, n_gpus, count, commands = self.config, self.model, self.model.n_gpus, self.model.replicas, []
        try:
            log = None if config.verbose else config.cache.log_file(model.label, key)
            model = model.updated(log_file=log)
            for number in range(count):
                create = config.workers.started(lambda: config.workers.create(model))
                self.workers.append(self.held.enter_context(create))
                gpus = None if self.gpus is None else tuple(self.gpus[number * n_gpus : (number + 1) * n_gpus])
                commands.append(LoadCommand(model, gpus, None if n_gpus else (number, count)))
            self.each(commands, config.load_timeout_s, f"loading {model.label}{self.number}")
        except (StoppedError, LostWorkerError):
            raise
        except CompareQError as error:
            self.failure = error
            raise

    def each(
        self, commands: Sequence[Any], silence_s: float, title: str, unit: str = "", total: int | None = None
    ) -> None:
        """Give each worker a command, and show their progress; the first failure ends all workers."""
        with (
            self.config.progress.phase(title, unit=unit, total=total) as phase,
            self.config.workers.pool(len(commands)) as pool,
        ):
            pairs = zip(self.workers, commands, strict=False)
            ends = [pool.submit(worker.perform, command, silence_s, phase.show) for worker, command in pairs]
            try:
                for end in as_completed(ends):
                    end.result()
            except BaseException:
                for worker in self.workers:
                    worker.kill()
                raise
