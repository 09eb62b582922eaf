"""The rows of one model, one a text: its scores come from the cache, or are made now by workers that load it once.

A model that cannot be loaded fails on every text that it would have to score, for one reason, and is tried once.  A
model that fails while it scores one text is loaded afresh for the next one.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from backends.common.errors import CompareQError, InputError, ModelError
from backends.common.messages import one_line
from eval.results.run_result import ModelResult
from eval.run import jobs, model_run, references, stores, table_rows, token_scores
from eval.run.crew import Crew, Turn
from eval.run.jobs import Job
from eval.run.references import HeldReference, LostReference
from eval.run.session import Session
from eval.run.stores import Part, TextRun, wait_for_reference
from eval.run.token_scores import StoredScores


def reference_rows(session: Session, job: Job, others: Sequence[Job], texts: Sequence[TextRun], turn: Turn) -> None:
    """The rows of the reference; its store for each text is there, and whole, if any of the others needs it.

    InputError, before anything loads, if the store for the only text is another reference's or damaged; of several
    texts, one with such a store has no rows, and says why.
    """
    try:
        parts = reference_parts(session, job, others, texts)

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


def reference_parts(session: Session, job: Job, others: Sequence[Job], texts: Sequence[TextRun]) -> list[Part]:
    """The reference's part on each text; a text that has none is told why, in its row or in its ``error``."""
    found = []
    for part in parts_of(session, job, texts):
        try:
            found.append(stores.part_of_reference(session, part, others))
        except InputError as error:
            if not part.text.name:  # the only one
                raise
            part.text.error = str(error)
            part.text.set_reference(LostReference())
    return found


def parts_of(session: Session, job: Job, texts: Sequence[TextRun]) -> list[Part]:
    """The model's part on each text, once it is on this machine; on other texts its row says why it has none."""
    found: list[Part] = []
    try:
        local = jobs.fetch(job, session)
    except Exception as error:  # a model that cannot be had fails on all texts
        fail(session, job, texts, error)
        return found
    for text in texts:
        try:
            found.append(Part(text, jobs.on_text(local, text.data, session, is_new=not job.is_settled)))
        except Exception as error:
            fail(session, job, [text], error)
    return found


def make_rows(session: Session, job: Job, parts: Sequence[Part], turn: Turn) -> None:
    """Give each text the model's row, by workers that stay until no further text may need them.

    After an error the crew has no workers, and the next text gets fresh ones.
    """
    if not parts:
        return
    windows = [window for part in parts for window in part.text.data.windows]
    with Crew(session, parts[0].fetched, turn, windows) as crew:
        for number, part in enumerate(parts):

            def made(part: Part = part, later: Sequence[Part] = parts[number + 1 :]) -> ModelResult:
                try:
                    return scored_row(session, part, crew, later)
                except BaseException as error:
                    if not part.text.error:  # the text's failure is not the model's
                        crew.give_up(error, part.fetched.scores_key)
                    raise

            row = row_or_failure(session, job, part.text, made)
            if not part.text.error:
                part.text.rows[job.request.label] = row
            if part.own is not None:
                part.text.set_reference(LostReference() if row.error else part.own)


def scored_row(session: Session, part: Part, crew: Crew, later: Sequence[Part]) -> ModelResult:
    """The row of a model on this machine: its scores come from the cache, or are made now and kept there.

    While the text's reference is still being made, the model may be loaded for what that will most likely be.  A
    reference is set when all windows are scored and stored, before its engine is closed.
    """
    text, fetched, data = part.text, part.fetched, part.text.data
    expected = None if part.own else wait_for_reference(session, text.expected, crew.release_for_reference)
    if text.error:
        raise ModelError(text.error)
    cache, key = session.cache, fetched.scores_key
    cache.use("scores", key)
    if expected and session.hosts.devices.gpus and not stores.is_stored(session, fetched, data, expected):
        crew.make_ready()
    reference = part.own or wait_for_reference(session, text.reference, crew.release_for_reference)
    tag = references.tag_for(reference, fetched.job)
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
            model_run.score(session, part, reference, crew, keeps=keeps)
            stored = load()
    if stored is None:
        raise ModelError(f"{cache.path('scores', key, '')}: vanished while the run went on")
    return table_rows.scored_row(fetched.job, stored, data, reference, key=f"{key}/{tag}", cached=cached)


def fail(session: Session, job: Job, texts: Sequence[TextRun], error: Exception) -> None:
    """Give the texts a row that says why a model failed."""

    def raised() -> ModelResult:
        raise error

    for text in texts:
        text.rows[job.request.label] = row_or_failure(session, job, text, raised)


def row_or_failure(session: Session, job: Job, text: TextRun, make_row: Callable[[], ModelResult]) -> ModelResult:
    """What ``make_row`` returns, or a row that says why it failed: no failure loses the other rows."""
    try:
        return make_row()
    except CompareQError as error:
        reason = str(error)
    except Exception as error:  # a bug, in compare_q or in an engine
        reason = f"{type(error).__name__}: {one_line(error)}"
        if session.verbose:
            traceback.print_exc()
    session.progress.say(f"{text.of(job.request.label)}: failed")
    return replace(table_rows.row_of(job), error=reason)
