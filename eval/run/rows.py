"""The rows of one model, one a text: its scores come from the cache, or are made now by workers that load it once.

A model that cannot be loaded fails on every text that it would have to score, for one reason, and is tried once.  A
model that fails while it scores one text is loaded afresh for the next one.
"""

from __future__ import annotations

import itertools
import json
import traceback
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from compare_q.backends.base import PlannedModel, ScoreRequest, Window
from compare_q.backends.common.errors import CompareQError, LostWorkerError, ModelError, StoppedError
from compare_q.backends.common.messages import one_line
from compare_q.backends.reference import store as reference_store
from compare_q.backends.reference.store import open_reference
from compare_q.backends.scoring import segments
from compare_q.backends.worker.messages import LoadCommand, ScoreCommand, write_windows
from compare_q.eval.common.progress import Progress, Show
from compare_q.eval.results import ModelResult
from compare_q.eval.run import jobs, references, token_scores
from compare_q.eval.run.hosts import AnyWorker, Job, Session
from compare_q.eval.run.references import Reference, TextRun
from compare_q.eval.run.token_scores import StoredScores
from compare_q.eval.stats import answers, estimates
from compare_q.eval.text.windows import EvalData

MOST_LOST = 3
"""Workers of one model that may be lost with their machines; what ends a fourth is more likely the model."""


class Crew:
    """The workers of one model, none as long as it is not loaded; ``release`` comes last.

    ``key``: of its first scores, which names its log; ``place``: its place among the models of the run, from 0;
    ``failure``: why the model could not be loaded, None if it could, or was not tried; ``n_lost``: workers that were
    lost with their machines.
    """

    def __init__(self, session: Session, job: Job, key: str, place: int) -> None:
        self.session, self.job, self.key, self.place = session, job, key, place
        self.failure: CompareQError | None = None
        self.n_lost, self.is_waiting = 0, False
        self.workers: list[AnyWorker] = []
        self.held = ExitStack()

    def release(self, *, at_once: bool = False) -> None:
        """End the workers, at once or as they like, give the GPUs back, and let later models go first."""
        for worker in self.workers if at_once else ():
            worker.kill()
        self.workers = []
        self.held.close()
        self.session.hosts.devices.pass_by(self.place)

    def wait_for_other_run(self) -> None:
        """Another run holds a lock that this model waits for, which is said once; it may wait for one of these GPUs."""
        self.release()
        if not self.is_waiting:
            self.is_waiting = True
            self.session.progress.say(f"{self.job.request.label}: another run is scoring it; this one waits for that")

    @cached_property
    def request(self) -> PlannedModel:
        """The model, and the log of its workers, named only now: for rows of the cache nothing need be written."""
        label, verbose = self.job.request.label, self.session.verbose
        return self.job.request.updated(log_file=None if verbose else self.session.cache.log_file(label, self.key))

    @property
    def slots(self) -> int:
        """GPUs that one of its workers takes; on a cluster at least one, for a node without GPUs."""
        return max(len(self.job.gpus), 0 if self.job.kind is None else 1)

    @cached_property
    def replicas(self) -> int:
        """Workers among which its windows are split: those that were asked for, as far as there are GPUs."""
        of_run = (self.job.kind or self.session.hosts.devices).slots
        wanted = 1 if self.session.hosts.in_process else self.job.spec.replicas
        return max(min(wanted, of_run // self.slots), 1) if self.slots else wanted

    def get_ready(self) -> None:
        """Wait for GPUs and load the model, unless it is loaded.

        ModelError or StoppedError; a model that could not be loaded is not tried again.
        """
        if self.failure is not None:
            raise self.failure
        if self.workers:
            return
        try:
            self._load()
        except (StoppedError, LostWorkerError):
            raise
        except CompareQError as error:
            self.failure = error
            raise

    def score(self, text: TextRun, reference: Reference | None, *, keeps: bool) -> None:
        """Score the windows of a text that have no scores yet, again each time that a worker's machine is lost.

        ``keeps``: the workers stay loaded for another text.  ModelError with the reason if the model fails; what it has
        scored before that is kept.
        """
        while True:
            try:
                return self._score(text, reference, keeps=keeps)
            except LostWorkerError as lost:
                self.release()
                self.n_lost += 1
                if self.n_lost > MOST_LOST:
                    raise ModelError(f"{lost}, as {MOST_LOST} workers of this model before") from None
                self.session.progress.say(f"{text.of(self.job)}: {lost}; what is not kept of it is scored again")

    def _score(self, text: TextRun, reference: Reference | None, *, keeps: bool) -> None:
        """Give the workers a share of the windows each; the reference leaves its store behind, if it is needed."""
        session, job, windows = self.session, self.job, text.data.windows
        session.cache.check_writable()
        folder = session.cache.path("scores", text.scores_keys[job.request.label], "")
        tag, request = references.tag_for(reference, job), ScoreRequest()
        there = segments.committed(folder, tag)
        facts = {"label": job.request.label, "known": jobs.known_before(job), "reference": None}
        with ExitStack() as held:
            if reference is not None and tag != segments.ALONE:
                entries = open_reference(reference.path).head.vocab_size
                request = ScoreRequest(reference=reference.path, vocab_size=entries, divergences=reference.divergences)
                facts["reference"] = {"label": reference.label, "key": reference.key, "vocab_size": entries,
                                      "model_vocab_size": job.facts().vocab_size}  # fmt: skip
            elif reference is not None and job.spec.is_reference and not reference.has(len(windows)):
                request = ScoreRequest(record=held.enter_context(self._recording_folder(reference)))
                there &= reference_store.recorded(reference.path)
            wanted = [window for window in windows if window.index not in there]
            if not segments.records(folder):  # a worker was killed before it could say what ran
                wanted = wanted or [windows[-1]]
            score_jobs, run = [], uuid.uuid4().hex
            for replica, share in enumerate(shares(wanted, self.replicas)):
                file = held.enter_context(session.cache.scratch())
                write_windows(file, share)
                score_jobs.append(ScoreCommand(request, file, folder, tag, f"{run}-{replica}", facts))
            self._watch_scoring(score_jobs, text.of(job), len(wanted))
            if request.record is not None and reference is not None:
                keep_store(session, reference, len(windows))
            if not keeps:
                self.release()

    @contextmanager
    def _recording_folder(self, reference: Reference) -> Iterator[Path]:
        """The folder in which the store is made; no other run records this reference meanwhile.

        What a run has written there that did not come to its end is there for the next run.
        """
        with self.session.hosts.held(reference.lock(self.session.cache), self.wait_for_other_run):
            reference_store.begin(reference.path, reference.identity)
            try:
                yield reference.path
            finally:
                reference_store.tidy(reference.path)

    def _watch_scoring(self, jobs: Sequence[ScoreCommand], name: str, n_windows: int) -> None:
        """Have the workers score so many windows, and show it under this ``name``."""
        self.get_ready()
        title = self.session.progress.numbered(f"scoring {name}", self.place)
        with self.session.progress.phase(title, unit="windows", total=n_windows) as phase:
            self._perform(jobs, self.session.hosts.window_s, phase.show)

    def _load(self) -> None:
        """Wait for GPUs, start the workers, and have them load the model, each with its share of GPUs or processors."""
        hosts, jobs, slots, count = self.session.hosts, [], self.slots, self.replicas
        if hosts.devices.gpus:  # elsewhere that would take the cores from the model that scores
            hosts.import_engine(self.job, verbose=self.session.verbose)
        hold = self.held.enter_context(hosts.devices.taken(slots * count, self.place))
        make = partial(hosts.worker, replace(self.job, request=self.request))
        for number in range(count):
            names = hold.names and hold.names[number * slots : (number + 1) * slots]
            share = None if self.job.gpus else (number, count)
            jobs.append(LoadCommand(self.request, names, share))
            self.workers.append(self.held.enter_context(hosts.started(make)))
        title = self.session.progress.numbered(f"loading {self.request.label}", self.place)
        with self.session.progress.phase(title) as phase:
            self._perform(jobs, hosts.load_s, phase.show)

    def _perform(self, jobs: Sequence[Any], silence_s: float, show: Show) -> None:
        """Give each worker a job; the first failure ends them all."""
        if len(jobs) == 1:
            self.workers[0].perform(jobs[0], silence_s, show)
            return
        with ThreadPoolExecutor(len(jobs)) as pool:
            given = zip(self.workers, jobs, strict=False)
            ends = [pool.submit(worker.perform, job, silence_s, show) for worker, job in given]
            try:
                for end in as_completed(ends):
                    end.result()
            except BaseException:
                for worker in self.workers:
                    worker.kill()
                raise


def shares(windows: Sequence[Window], count: int) -> list[Sequence[Window]]:
    """Windows in so many shares that differ by one window at most, none of them empty unless there is no window."""
    count = max(min(count, len(windows)), 1)
    ends = [len(windows) * part // count for part in range(count + 1)]
    return [windows[begin:end] for begin, end in itertools.pairwise(ends)]


def keep_store(session: Session, reference: Reference, n_windows: int) -> None:
    """Make a store of what a run has recorded, and say how large it is."""
    label, say = reference.label, session.progress.say
    reference_store.seal(reference.path, {**reference.identity, "label": label}, n_windows)
    store = open_reference(reference.path)
    size = f"{store.stored_bytes / 1024**2:,.0f} MiB of {store.contents}"
    say(f"{label}: kept as the reference, {size}, in {reference.path}")
    if store.reason:
        say(f"{label}: {store.head.dtype} logits are kept, not states: {store.reason}")


def reference_rows(session: Session, job: Job, others: Sequence[Job], texts: Sequence[TextRun], place: int) -> None:
    """The rows of the reference; its store for each text is there, and whole, if any of the others needs it.

    InputError, before anything loads, if such a store is another reference's or damaged.  ``place``: as of ``Crew``.
    """
    try:
        local, ready = prepared(session, job, texts)
        for text in ready:
            references.prepare(session, local, text, others)
        make_rows(session, local, ready, place)
    finally:
        for text in texts:
            text.set_reference(None)  # unless it is set


def model_rows(session: Session, job: Job, texts: Sequence[TextRun], place: int) -> None:
    """The rows of a model that is not the reference."""
    make_rows(session, *prepared(session, job, texts), place)


def prepared(session: Session, job: Job, texts: Sequence[TextRun]) -> tuple[Job, list[TextRun]]:
    """(the model on this machine, the texts that it can score); on the others its row says why it cannot."""
    try:
        local = jobs.fetch(job, session)
    except Exception as error:  # a model that cannot be had fails on all texts
        for text in texts:
            fail(session, job, text, error)
        return job, []
    ready = []
    for text in texts:
        try:
            if not job.is_settled:  # nothing has checked it before
                jobs.raise_all(jobs.vocabulary_problems(local, {text.name: text.data}))
            identity = jobs.identity(local, text.data, session)
            text.scores_keys[job.request.label] = session.cache.key("scores", identity)
            ready.append(text)
        except Exception as error:
            fail(session, job, text, error)
    return local, ready


def make_rows(session: Session, job: Job, texts: Sequence[TextRun], place: int) -> None:
    """Give each text the row of a model on this machine, by workers that stay until no further text may need them.

    After an error the crew has no workers, and the next text gets fresh ones.  ``place``: as of ``Crew``.
    """
    if not texts:
        return
    label = job.request.label
    crew = Crew(session, job, texts[0].scores_keys[label], place)
    try:
        for number, text in enumerate(texts):
            try:
                text.rows[label] = scored_row(crew, text, texts[number + 1 :])
                session.row_done(text.name, text.rows[label])
            except Exception as error:
                crew.release(at_once=True)
                fail(session, job, text, error)
            if job.spec.is_reference:
                text.set_reference(None if text.rows[label].error else text.own)
    finally:
        crew.release()


def fail(session: Session, job: Job, text: TextRun, error: Exception) -> None:
    """Give a text a row that says why a model failed: no failure loses the other rows."""
    reason = str(error) if isinstance(error, CompareQError) else f"{type(error).__name__}: {one_line(error)}"
    if session.verbose and not isinstance(error, CompareQError):  # a bug, in compare_q or in an engine
        traceback.print_exception(error)
    session.progress.say(f"{text.of(job)}: failed")
    text.rows[job.request.label] = row = row_of(job, error=reason)
    session.row_done(text.name, row)


def scored_row(crew: Crew, text: TextRun, later: Sequence[TextRun]) -> ModelResult:
    """The row of a model on this machine: its scores come from the cache, or are made now and kept there.

    A reference is set when all windows are scored and stored, before its engine is closed.
    """
    session, job, data, cache = crew.session, crew.job, text.data, crew.session.cache
    key = text.scores_keys[job.request.label]
    reference = text.own if job.spec.is_reference else text.reference.result()
    cache.use("scores", key)
    tag = references.tag_for(reference, job)

    def load(progress: Progress | None = None) -> StoredScores | None:
        lacks = job.spec.is_reference and text.lacks_windows
        return None if lacks else token_scores.load(cache, key, tag, data.windows, progress)

    stored = None if session.clear else load()  # a complete row needs no lock, which another run may hold for long
    cached = stored is not None
    if stored is None:
        with session.hosts.held(cache.lock("scores", key), crew.wait_for_other_run):
            if session.clear and key not in session.cleared:  # another text may be the beginning of this one
                session.cleared.add(key)
                cache.clear("scores", key)
            stored = load(session.progress)  # another run may have made them while this one waited for the lock
            cached = stored is not None
            if stored is None:
                crew.score(text, reference, keeps=any(references.is_pending(session, job, other) for other in later))
                stored = load(session.progress)
    if stored is None:
        raise ModelError(f"{cache.path('scores', key, '')}: vanished while the run went on")
    notes = (*notes_of(job, stored, text, reference), *stored.run_record["provenance"].get("notes", ()))
    return filled_row(job, stored, data, scores_key=f"{key}/{tag}", from_cache=cached, notes=notes)


def row_of(job: Job, **fields: Any) -> ModelResult:
    """The row of a model, with what its spec says and these fields."""
    return ModelResult.of(
        job.request.label, job.engine, spec=json.loads(job.spec.model_dump_json(exclude_unset=True)),
        spec_sha256=job.spec.digest(), reference=job.spec.is_reference, **fields,
    )  # fmt: skip


def filled_row(job: Job, stored: StoredScores, data: EvalData, **fields: Any) -> ModelResult:
    """The row of a model that has been scored, with these fields; ModelError if none of its scores is finite."""
    index, size, record = data.text_index(stored.window, stored.position), data.text_size, stored.run_record
    found = estimates.summarize(
        stored.columns, index, stored.position, None if size is None else (size.n_bytes, size.n_words),
        data.begins(stored.window),
    )  # fmt: skip
    if not found.ppl.tokens:
        raise ModelError(f"no perplexity: none of {len(stored.token_id)} positions is finite")
    if data.is_spread:
        sampled = estimates.sampled(stored.columns, stored.window, data.starts, data.available)
        found = replace(found, sampled=sampled)
    elif data.answers is not None:
        found = replace(found, answers=answers.summarize(stored.columns, stored.window, data.answers.requests))
    given = {name: getattr(job.spec, f"override_{name}") for name in ("bpw_layer", "bpw_head", "vram_bits")}
    given = {name: value for name, value in given.items() if value is not None}  # in place of what is measured
    storage = replace(job.files.storage(), file_bytes=file_bytes(job), **given)
    return row_of(
        job, storage=storage, estimates=found, windows=len(data.windows), timing=stored.timing,
        load_seconds=record["load_seconds"], score_seconds=record["score_seconds"], provenance=record["provenance"],
        **fields,
    )  # fmt: skip


def file_bytes(job: Job) -> int | None:
    """Bytes on disk of the files that the engine loads; None where they are not here (a server, or removed since)."""
    try:
        return sum(file.stat().st_size for file in job.files.weight_files()) or None
    except OSError:
        return None


def notes_of(job: Job, stored: StoredScores, text: TextRun, reference: Reference | None) -> Iterator[str]:
    """What has to be said of replicas, of runs whose batches and so whose roundings differ, and of a lacking KLD."""
    asked, count = job.spec.replicas, stored.replicas
    if max(asked, count) > 1:
        fewer = f", not by {asked}: there were no more GPUs, or no more windows"
        yield f"scored by {count} replicas{fewer if count < asked else ''}"
    decode = job.request.decode
    if stored.sessions > 1 and (decode.batch > 1 if decode else job.engine_class.capabilities.batches):
        yield f"scored in {stored.sessions} runs: its batches, and so its rounding, differ from those of one run"
    if reference is None or job.spec.is_reference:
        if text.marked and not job.spec.is_reference:
            yield "no KLD: the reference failed"
        return
    if "kld" not in stored.columns:
        more = ", nor what --divergences asks for" if reference.divergences else ""
        yield f"no KLD{more}: this engine gives no more than the real tokens' log-probabilities"
        return
    entries = stored.run_record["reference"]["vocab_size"]
    size = stored.run_record["reference"]["model_vocab_size"]
    if size not in (None, entries):
        yield f"of {size} and {entries} logits, only those that both have count"
