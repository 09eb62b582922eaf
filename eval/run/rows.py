"""The rows of one model, one a text: its scores come from the cache, or are made now by workers that load it once.

A model that cannot be loaded fails on every text that it would have to score, for one reason, and is tried once.  A
model that fails while it scores one text is loaded afresh for the next one.
"""

from __future__ import annotations

import itertools
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from compare_q.backends.base import Window
from compare_q.backends.common.errors import CompareQError, InputError, LostWorkerError, ModelError
from compare_q.backends.common.messages import one_line
from compare_q.backends.reference import store as reference_store
from compare_q.backends.reference.reading import open_reference
from compare_q.backends.scoring import segments
from compare_q.backends.worker.messages import ScoreJob, write_windows
from compare_q.eval.results.run_result import ModelResult
from compare_q.eval.run import jobs, references, stores, table_rows, token_scores
from compare_q.eval.run.crew import Crew
from compare_q.eval.run.jobs import Job
from compare_q.eval.run.references import HeldReference, LostReference, Reference
from compare_q.eval.run.session import Session
from compare_q.eval.run.stores import TextRun, wait_for_reference

MOST_LOST = 3
"""Workers of one model that may be lost with their machines; what ends a fourth is more likely the model."""


def reference_rows(session: Session, job: Job, others: Sequence[Job], texts: Sequence[TextRun], place: int) -> None:
    """The rows of the reference; its store for each text is there, and whole, if any of the others needs it.

    InputError, before anything loads, if the store for the only text is another reference's or damaged; of several
    texts, one with such a store has no rows, and says why.  ``place``: as of ``Crew``.
    """
    try:
        local, ready = prepared(session, job, texts)
        for text in ready:
            try:
                stores.prepare_reference(session, local, text, others)
            except InputError as error:
                if len(texts) == 1:
                    raise
                text.error = str(error)
                text.set_reference(LostReference())
        make_rows(session, local, [text for text in ready if not text.error], place)
    finally:
        for text in texts:
            text.set_reference(LostReference())  # unless it is set


def model_rows(session: Session, job: Job, texts: Sequence[TextRun], place: int) -> None:
    """The rows of a model that is not the reference."""
    try:
        wait_for_reference(session, texts[0].expected)
    except CompareQError as error:
        fail(session, job, texts, error)
        return
    make_rows(session, *prepared(session, job, texts), place)


def prepared(session: Session, job: Job, texts: Sequence[TextRun]) -> tuple[Job, list[TextRun]]:
    """(the model on this machine, the texts that it can score); on the others its row says why it cannot."""
    try:
        local = jobs.fetch(job, session)
    except Exception as error:  # a model that cannot be had fails on all texts
        fail(session, job, texts, error)
        return job, []
    ready = []
    for text in texts:
        try:
            if not job.is_settled:  # nothing has checked it before
                jobs.check_vocabulary(local, text.data)
            text.scores_keys[job.request.label] = jobs.scores_key(local, text.data, session)
            ready.append(text)
        except Exception as error:
            fail(session, job, [text], error)
    return local, ready


def make_rows(session: Session, job: Job, texts: Sequence[TextRun], place: int) -> None:
    """Give each text the model's row, by workers that stay until no further text may need them.

    After an error the crew has no workers, and the next text gets fresh ones.
    """
    if not texts:
        return

    def begun() -> None:
        for text in texts:
            if job.spec.is_reference and not text.expected.done():
                text.expected.set_result(text.made)

    windows = [window for text in texts for window in text.data.windows]
    with Crew(session, job, texts[0].scores_keys[job.request.label], place, begun, windows) as crew:
        for number, text in enumerate(texts):
            try:
                row = scored_row(crew, text, texts[number + 1 :])
            except BaseException as error:
                if not text.error:  # the text's failure is not the model's
                    crew.release(at_once=True)
                if not isinstance(error, Exception):
                    raise
                row = failed_row(session, job, text, error)
            if not text.error:
                text.rows[job.request.label] = row
                session.row_done(text.name, row)
            if job.spec.is_reference:
                text.set_reference(LostReference() if row.error else text.made)


def fail(session: Session, job: Job, texts: Sequence[TextRun], error: Exception) -> None:
    """Give the texts a row that says why a model failed."""
    for text in texts:
        text.rows[job.request.label] = row = failed_row(session, job, text, error)
        session.row_done(text.name, row)


def failed_row(session: Session, job: Job, text: TextRun, error: Exception) -> ModelResult:
    """A row that says why a model failed: no failure loses the other rows."""
    reason = str(error) if isinstance(error, CompareQError) else f"{type(error).__name__}: {one_line(error)}"
    if session.verbose and not isinstance(error, CompareQError):  # a bug, in compare_q or in an engine
        traceback.print_exception(error)
    session.progress.say(f"{text.of(job)}: failed")
    return replace(table_rows.row_of(job), error=reason)


def scored_row(crew: Crew, text: TextRun, later: Sequence[TextRun]) -> ModelResult:
    """The row of a model on this machine: its scores come from the cache, or are made now and kept there.

    While the text's reference is still being made, the model may be loaded for what that will most likely be.  A
    reference is set when all windows are scored and stored, before its engine is closed.
    """
    session, job, data, cache = crew.session, crew.job, text.data, crew.session.cache
    key = text.scores_keys[job.request.label]
    reference: Reference
    if job.spec.is_reference:
        reference = text.made
    else:
        expected = wait_for_reference(session, text.expected, crew.release_for_reference)
        if text.error:
            raise ModelError(text.error)
        if session.hosts.devices.gpus and not stores.is_stored(session, job, text, expected):
            crew.make_ready()
        reference = wait_for_reference(session, text.reference, crew.release_for_reference)
    cache.use("scores", key)
    tag = references.tag_for(reference, job)
    with session.hosts.running.held(cache.lock("scores", key), crew.release):
        if session.clear and key not in session.cleared:  # another text may be the beginning of this one
            session.cleared.add(key)
            cache.clear("scores", key)
        load = partial(token_scores.load, cache, key, tag, data.windows, session.progress)
        # Another run may have made the missing store while this one waited for the lock.
        stored = None if job.spec.is_reference and text.lacks_windows else load()
        cached = stored is not None
        if stored is None:
            keeps = any(stores.is_pending(session, job, other) for other in later)
            score(crew, text, reference, keeps=keeps)
            stored = load()
    if stored is None:
        raise ModelError(f"{cache.path('scores', key, '')}: vanished while the run went on")
    return table_rows.scored_row(job, stored, data, reference, key=f"{key}/{tag}", cached=cached)


def score(crew: Crew, text: TextRun, reference: Reference, *, keeps: bool) -> None:
    """``score_once``, and again for the windows that are missing each time that a worker's machine is lost."""
    folder = crew.session.cache.path("scores", text.scores_keys[crew.job.request.label], "")
    tag = references.tag_for(reference, crew.job)
    while True:
        before = segments.committed(folder, tag)
        try:
            return score_once(crew, text, reference, keeps=keeps)
        except LostWorkerError as lost:
            crew.release()
            crew.n_lost += 1
            if crew.n_lost > MOST_LOST:
                raise ModelError(f"{lost}, as {MOST_LOST} workers of this model before") from None
            there = len(segments.committed(folder, tag) - before)
            again = f"{max(lost.scored - there, 0)} of the {lost.scored} windows that it had scored are scored again"
            crew.session.progress.say(f"{text.of(crew.job)}: {lost}; {again}")


def score_once(crew: Crew, text: TextRun, reference: Reference, *, keeps: bool) -> None:
    """Score the windows that have no scores yet; the reference leaves its store behind, if it is needed.

    ``keeps``: the workers stay loaded for another text.  ModelError with the reason if the model fails; what it has
    scored before that is kept.
    """
    session, job, windows = crew.session, crew.job, text.data.windows
    session.cache.check_writable()
    folder = session.cache.path("scores", text.scores_keys[job.request.label], "")
    task = ScoreJob(scores=folder, tag=references.tag_for(reference, job), keeps=keeps)
    there = segments.committed(folder, task.tag)
    facts = {"label": job.request.label, "known": jobs.known_before(job), "reference": None}
    with ExitStack() as held:
        if isinstance(reference, HeldReference) and task.tag != segments.ALONE:
            entries = open_reference(reference.path).head.vocab_size
            task = replace(task, reference=reference.path, vocab_size=entries, divergences=reference.divergences)
            facts["reference"] = {"label": reference.label, "key": reference.key, "vocab_size": entries,
                                  "model_vocab_size": job.facts().vocab_size}  # fmt: skip
        elif job.spec.is_reference and job.engine_class.capabilities.compares and not text.made.has(len(windows)):
            task = replace(task, record=held.enter_context(recording_folder(crew, text.made)))
            there &= reference_store.recorded(text.made.path)
        crew.make_ready()
        wanted = [window for window in windows if window.index not in there]
        if not segments.records(folder):  # a worker was killed before it could say what ran
            wanted = wanted or [windows[-1]]

        def scored() -> None:
            if task.record is not None:
                keep_store(session, text.made, len(windows))
            if job.spec.is_reference:
                text.set_reference(text.made)

        score_jobs, run = [], uuid.uuid4().hex
        for replica, share in enumerate(shares(wanted, crew.replicas)):
            file = held.enter_context(session.cache.scratch())
            write_windows(file, share)
            score_jobs.append(replace(task, windows=file, session=f"{run}-{replica}", facts=facts))
        crew.score(score_jobs, text.of(job), len(wanted), scored)
        if not keeps:
            crew.release()


def shares(windows: Sequence[Window], count: int) -> list[Sequence[Window]]:
    """Windows in so many shares that differ by one window at most, none of them empty unless there is no window."""
    count = max(min(count, len(windows)), 1)
    ends = [len(windows) * part // count for part in range(count + 1)]
    return [windows[begin:end] for begin, end in itertools.pairwise(ends)]


@contextmanager
def recording_folder(crew: Crew, reference: HeldReference) -> Iterator[Path]:
    """The folder in which the store is made; no other run records this reference meanwhile.

    What a run has written there that did not come to its end is there for the next run.
    """
    session = crew.session
    with session.hosts.running.held(references.lock_of(reference, session.cache), crew.release):
        reference_store.begin(reference.path, reference.identity)
        try:
            yield reference.path
        finally:
            reference_store.tidy(reference.path)


def keep_store(session: Session, reference: HeldReference, n_windows: int) -> None:
    """Make a store of what a run has recorded, and say how large it is."""
    label, say = reference.label, session.progress.say
    reference_store.seal(reference.path, {**reference.identity, "label": label}, n_windows)
    store = open_reference(reference.path)
    size = f"{store.stored_bytes / 1024**2:,.0f} MiB of {store.contents}"
    say(f"{label}: kept as the reference, {size}, in {reference.path}")
    if store.reason:
        say(f"{label}: {store.head.dtype} logits are kept, not states: {store.reason}")
