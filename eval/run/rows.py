"""The rows of one model, one a text: its scores come from the cache, or are made now by workers that load it once.

A model that cannot be loaded fails on every text that it would have to score, for one reason, and is tried once.  A
model that fails while it scores one text is loaded afresh for the next one.
"""

from __future__ import annotations

import itertools
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare_q.backends.base import Task, Window
from compare_q.backends.common.errors import CompareQError, InputError, LostWorkerError, ModelError, StoppedError
from compare_q.backends.common.messages import one_line
from compare_q.backends.reference import store as reference_store
from compare_q.backends.reference.reading import open_reference
from compare_q.backends.scoring import segments
from compare_q.backends.worker.messages import ScoreJob, write_windows
from compare_q.eval.results.run_result import ModelResult
from compare_q.eval.run import jobs, references, stores, table_rows, token_scores
from compare_q.eval.run.crew import Crew, Turn, death_mark
from compare_q.eval.run.jobs import Job
from compare_q.eval.run.references import HeldReference, LostReference, Reference, lock_of
from compare_q.eval.run.session import Session
from compare_q.eval.run.stores import Part, TextRun, wait_for_reference
from compare_q.eval.run.token_scores import StoredScores


def reference_rows(session: Session, job: Job, others: Sequence[Job], texts: Sequence[TextRun], turn: Turn) -> None:
    """The rows of the reference; its store for each text is there, and whole, if any of the others needs it.

    InputError, before anything loads, if the store for the only text is another reference's or damaged; of several
    texts, one with such a store has no rows, and says why.
    """
    try:
        parts = []
        for part in parts_of(session, job, texts):
            try:
                parts.append(stores.part_of_reference(session, part, others))
            except InputError as error:
                if len(texts) == 1:
                    raise
                part.text.error = str(error)
                part.text.set_reference(LostReference())

        def begun() -> None:
            for part in parts:
                if part.own is not None and not part.text.expected.done():
                    part.text.expected.set_result(part.own)
            turn.begun()

        make_rows(session, job, parts, replace(turn, begun=begun))
    finally:
        for text in texts:
            text.set_reference(LostReference())  # unless it is set


def model_rows(session: Session, job: Job, texts: Sequence[TextRun], turn: Turn) -> None:
    """The rows of a model that is not the reference."""
    try:
        wait_for_reference(session, texts[0].expected)
    except CompareQError as error:
        fail(session, job, texts, error)
        return
    make_rows(session, job, parts_of(session, job, texts), turn)


def parts_of(session: Session, job: Job, texts: Sequence[TextRun]) -> list[Part]:
    """The model's part on each text, once it is on this machine; on other texts its row says why it has none."""
    parts: list[Part] = []
    try:
        local = jobs.fetch(job, session)
    except Exception as error:  # a model that cannot be had fails on all texts
        fail(session, job, texts, error)
        return parts
    for text in texts:
        try:
            if not job.is_settled:  # nothing has checked it before
                jobs.check_vocabulary(local, text.data)
            parts.append(stores.part_of(session, local, text))
        except Exception as error:
            fail(session, job, [text], error)
    return parts


def make_rows(session: Session, job: Job, parts: Sequence[Part], turn: Turn) -> None:
    """Give each text the model's row, by workers that stay until no further text may need them.

    After an error the crew has no workers, and the next text gets fresh ones.
    """
    if not parts:
        return
    windows = [window for part in parts for window in part.text.data.windows]
    with Crew(session, parts[0].job, parts[0].scores_key, turn, windows) as crew:
        for number, part in enumerate(parts):
            try:
                row = scored_row(session, part, crew, parts[number + 1 :])
            except BaseException as error:
                if not part.text.error:  # the text's failure is not the model's
                    crew.give_up(error, part.scores_key)
                if not isinstance(error, Exception):
                    raise
                row = failed_row(session, job, part.text, error)
            if not part.text.error:
                part.text.rows[job.request.label] = row
            if part.own is not None:
                part.text.set_reference(LostReference() if row.error else part.own)


def fail(session: Session, job: Job, texts: Sequence[TextRun], error: Exception) -> None:
    """Give the texts a row that says why a model failed."""
    for text in texts:
        text.rows[job.request.label] = failed_row(session, job, text, error)


def failed_row(session: Session, job: Job, text: TextRun, error: Exception) -> ModelResult:
    """A row that says why a model failed: no failure loses the other rows."""
    reason = str(error) if isinstance(error, CompareQError) else f"{type(error).__name__}: {one_line(error)}"
    if session.verbose and not isinstance(error, CompareQError):  # a bug, in compare_q or in an engine
        traceback.print_exception(error)
    session.progress.say(f"{text.of(job.request.label)}: failed")
    return replace(table_rows.row_of(job), error=reason)


def scored_row(session: Session, part: Part, crew: Crew, later: Sequence[Part]) -> ModelResult:
    """The row of a model on this machine: its scores come from the cache, or are made now and kept there.

    While the text's reference is still being made, the model may be loaded for what that will most likely be.  A
    reference is set when all windows are scored and stored, before its engine is closed.
    """
    text, data, cache, key = part.text, part.text.data, session.cache, part.scores_key
    expected = None if part.own else wait_for_reference(session, text.expected, crew.release_for_reference)
    if text.error:
        raise ModelError(text.error)
    cache.use("scores", key)
    if expected and session.hosts.devices.gpus and not stores.is_stored(session, part, expected):
        crew.make_ready()
    reference = part.own or wait_for_reference(session, text.reference, crew.release_for_reference)
    tag = references.tag_for(reference, part.job)
    with session.hosts.running.held(cache.lock("scores", key), crew.release):
        if session.clear and key not in session.cleared:  # another text may be the beginning of this one
            session.cleared.add(key)
            cache.clear("scores", key)

        def load() -> StoredScores | None:
            return token_scores.load(cache, key, tag, data.windows, session.progress)

        # Another run may have made the missing store while this one waited for the lock.
        missing = part.records and isinstance(reference, HeldReference) and not reference.has(len(data.windows))
        stored = None if missing else load()
        cached = stored is not None
        if stored is None:
            keeps = any(stores.is_pending(session, other) for other in later)
            score(session, part, reference, crew, keeps=keeps)
            stored = load()
    if stored is None:
        raise ModelError(f"{cache.path('scores', key, '')}: vanished while the run went on")
    return table_rows.scored_row(part.job, stored, data, reference, key=f"{key}/{tag}", cached=cached)


def score(session: Session, part: Part, reference: Reference, crew: Crew, *, keeps: bool) -> None:
    """``score_once``, and again for the windows that are missing each time that a worker's machine is lost."""
    folder, tag = session.cache.path("scores", part.scores_key, ""), references.tag_for(reference, part.job)
    while True:
        before = segments.committed(folder, tag)
        try:
            return score_once(session, part, reference, crew, keeps=keeps)
        except LostWorkerError as lost:
            crew.release()
            there = len(segments.committed(folder, tag) - before)
            again = f"{max(lost.scored - there, 0)} of the {lost.scored} windows that it had scored are scored again"
            session.progress.say(f"{part.job.request.label}: {lost}; {again}")


def score_once(session: Session, part: Part, reference: Reference, crew: Crew, *, keeps: bool) -> None:
    """Score the windows that have no scores yet; the reference leaves its store behind, if it is needed.

    ``keeps``: the workers stay loaded for another text.  ModelError with the reason if the model fails; what it has
    scored before that is kept.
    """
    data = part.text.data
    session.cache.check_writable()
    folder, tag = session.cache.path("scores", part.scores_key, ""), references.tag_for(reference, part.job)
    with task_of(session, part.job, reference, len(data.windows), crew) as (task, recorded):
        crew.make_ready()
        there = segments.committed(folder, tag) & recorded
        wanted = [window for window in data.windows if window.index not in there]
        if not segments.records(folder):  # a worker was killed before it could say what ran
            wanted = wanted or [data.windows[-1]]
        facts = {
            "label": part.job.request.label, "known": jobs.known_before(part.job),
            "reference": comparison_record(part.job, task, reference),
        }  # fmt: skip

        def scored() -> None:
            if task.record is not None and isinstance(reference, HeldReference):
                keep_store(session, reference, len(data.windows))
            if part.own is not None:
                part.text.set_reference(part.own)

        with ExitStack() as files:
            score_jobs, run = [], uuid.uuid4().hex
            for replica, share in enumerate(shares(wanted, crew.replicas)):
                windows = files.enter_context(session.cache.scratch())
                write_windows(windows, share)
                score_jobs.append(ScoreJob(task, windows, folder, tag, f"{run}-{replica}", facts, keeps))
            follow(session, part.label, crew, score_jobs, len(wanted), scored)
        if not keeps:
            crew.release()


def shares(windows: Sequence[Window], count: int) -> list[Sequence[Window]]:
    """Windows in so many shares that differ by one window at most, none of them empty unless there is no window."""
    count = max(min(count, len(windows)), 1)
    ends = [len(windows) * part // count for part in range(count + 1)]
    return [windows[begin:end] for begin, end in itertools.pairwise(ends)]


def follow(
    session: Session, name: str, crew: Crew, score_jobs: list[ScoreJob], n_windows: int, scored: Callable[[], None]
) -> None:
    """Have the workers score and show how far they are; ModelError or StoppedError if they do not come to their end.

    ``scored`` is called when they have, before their engines are closed.
    """
    with session.progress.phase(f"scoring {name}", unit="windows", total=n_windows) as phase:

        def show(kind: str, content: Any) -> None:
            if kind == "done":
                scored()
            else:
                (phase.advance if kind == "advance" else phase.say)(content)

        try:
            crew.score(score_jobs, n_windows, show)
        except LostWorkerError as lost:
            lost.scored = phase.done
            raise
        except StoppedError:
            kept = "what is older than 2 s is kept" if phase.done else "it had scored none"
            text = f"interrupted after {phase.done} of {n_windows} windows; {kept}, run again to go on"
            raise StoppedError(text) from None


def has_died(session: Session, job: Job, text: TextRun) -> bool:
    """Whether the worker of a model died in the last run."""
    with suppress(CompareQError):  # the model's own row of the table will say it
        part = stores.part_without_download(session, job, text)
        return part is not None and death_mark(session, part.scores_key).exists()
    return False


@contextmanager
def task_of(
    session: Session, job: Job, reference: Reference, n_windows: int, crew: Crew
) -> Iterator[tuple[Task, frozenset[int]]]:
    """(what a model's run has to do with the reference, the windows that it need not score for that)."""
    every = frozenset(range(n_windows))
    if not isinstance(reference, HeldReference):
        yield Task(), every
    elif not job.spec.is_reference:
        compares = references.tag_for(reference, job) != segments.ALONE
        entries = open_reference(reference.path).head.vocab_size
        yield Task(reference.path, entries, divergences=reference.divergences) if compares else Task(), every
    elif reference.has(n_windows) or not job.engine_class.capabilities.compares:
        yield Task(), every
    else:
        with recording_folder(session, reference, crew) as folder:
            yield Task(record=folder), reference_store.recorded(folder)


@contextmanager
def recording_folder(session: Session, reference: HeldReference, crew: Crew) -> Iterator[Path]:
    """The folder in which the store is made; no other run records this reference meanwhile.

    What a run has written there that did not come to its end is there for the next run.
    """
    with session.hosts.running.held(lock_of(reference, session.cache), crew.release):
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


def comparison_record(job: Job, task: Task, reference: Reference) -> dict[str, Any] | None:
    """What the results need to know of a comparison (JSON types); None if there was none."""
    if task.reference is None or not isinstance(reference, HeldReference):
        return None
    return {
        "label": reference.label, "key": reference.key, "vocab_size": task.vocab_size,
        "model_vocab_size": job.facts().vocab_size,
    }  # fmt: skip
