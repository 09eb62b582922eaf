"""The driver: jobs -> token scores, from the cache where they are there -> rows; the reference's row comes first.

The driver knows engines only by the contract (``backends/base.py``).  Every check that needs no engine runs before the
first model loads; after that a model that fails is a row that says so, and the other models go on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from backends.common.errors import CompareQError, InputError, ModelError
from backends.common.messages import one_line
from backends.reference import store as reference_store
from backends.reference.reading import open_reference
from eval.results.run_result import ModelResult, RunResult
from eval.run import early, jobs, model_run, references, table_rows, token_scores
from eval.run.hosts import Stoppable
from eval.run.jobs import FetchedJob, Job
from eval.run.references import HeldReference, LostReference, NoReference, Reference
from eval.run.session import Session
from eval.run.spares import Crew, Turn
from eval.run.stopping import concurrently, interrupts_end
from eval.run.token_scores import StoredScores
from eval.specs.types import DataSpec, ModelSpec
from eval.text import windows
from eval.text.windows import EvalData

POLL_S = 0.5
"""Seconds between two looks whether a run was stopped."""


@dataclass(frozen=True)
class FinishedRun:
    """The results of a run, and the windows that were scored; ``signal``: what has ended the run early, 0 if nothing.

    A model that was not finished then is a row with that reason.
    """

    results: RunResult
    data: EvalData
    signal: int = 0


def run(session: Session, data_spec: DataSpec, specs: Sequence[ModelSpec], n_windows: int | None = None) -> FinishedRun:
    """Score every model on ``n_windows`` windows: 0 means all, None the data spec's ``max_rows``.

    InputError with all problems, one a line, before anything loads.  InterruptedRun is raised as long as no model is at
    work; after that it ends the run early.
    """
    if session.divergences and session.logits_file is None and not any(spec.is_reference for spec in specs):
        raise InputError('--divergences: there is no reference; mark a model with "reference": true, or give -lf')
    planned, problems = jobs.plan(specs, data_spec.longest, session.hosts)
    raise_all(problems)  # before the text is tokenized, which takes longer
    with early.begun(session, first_of(session, planned, data_spec)):
        data = windows.build(data_spec, n_windows, session.cache, session.progress, clear=session.clear)
        fitted, problems = jobs.fit(planned, data, session.hosts)
        raise_all(problems)
        scored = score_all(session, fitted, data)
    reference = scored.reference.result()
    known = references.as_json(reference, data.n_scored) if isinstance(reference, HeldReference) else None
    data_json, subtitle = windows.data_json(data_spec, data), windows.subtitle(data_spec, data)
    rows = tuple(scored.rows[job.request.label] for job in fitted)
    return FinishedRun(RunResult(data_json, subtitle, rows, known), data, scored.signal)


def first_of(session: Session, planned: Sequence[Job], data_spec: DataSpec) -> Job | None:
    """The model whose turn comes first; None if the text is tokenized already, and there is nothing to wait for."""
    with suppress(CompareQError):  # tokenizing will say it
        if not session.clear and windows.are_stored(data_spec, session.cache):
            return None
    return next((job for job in planned if job.spec.is_reference), planned[0])


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line a problem, if there are any."""
    if problems:
        raise InputError("\n".join(problems))


@dataclass
class Scored:
    """The rows so far, by label; the signal that has ended the run early, 0 if none has.

    ``expected``: the reference, once its model begins to score, or was not to be scored, for those who want to be ready
    when it is there; ``reference``: as it is in the end.
    """

    rows: dict[str, ModelResult] = field(default_factory=dict)
    expected: Future[Reference] = field(default_factory=Future)
    reference: Future[Reference] = field(default_factory=Future)
    signal: int = 0

    def settle(self, reference: Reference) -> None:
        """Say which reference the run has in the end."""
        for future in (self.expected, self.reference):
            if not future.done():
                future.set_result(reference)


def score_all(session: Session, planned: Sequence[Job], data: EvalData) -> Scored:
    """The rows of all jobs: the reference's first, then the others', as many at a time as there are GPUs for them.

    A model whose worker died in an earlier run comes last, so that it cannot keep the others from being measured.
    """
    marked = [job for job in planned if job.spec.is_reference]
    others = [job for job in planned if not job.spec.is_reference]
    scored = Scored()

    def score(job: Job, turn: Turn) -> None:
        if not job.spec.is_reference:
            scored.rows[job.request.label] = model_row(session, job, data, scored, turn)
            return
        try:
            scored.rows[job.request.label], reference = reference_row(session, job, others, data, scored, turn)
            scored.settle(reference)
        finally:
            scored.settle(LostReference())  # unless it is settled

    with interrupts_end(scored):
        if not marked:
            given = session.logits_file
            scored.settle(NoReference() if given is None else given_store(session, given, others, data))
        others.sort(key=lambda job: model_run.has_died(session, job, data))
        concurrently(session.hosts, [*marked, *others], score)  # at most one is marked: ``eval/specs/reading.py``
    scored.settle(NoReference())
    for job in planned:
        unfinished = replace(table_rows.row_of(job), error="interrupted before it was scored; run again to go on")
        scored.rows.setdefault(job.request.label, unfinished)
    return scored


def awaited(session: Session, reference: Future[Reference]) -> Reference:
    """A reference that another thread makes; StoppedError if the run is stopped meanwhile."""
    while True:
        session.hosts.running.check()
        with suppress(TimeoutError):
            return reference.result(timeout=POLL_S)


def given_store(session: Session, path: Path, others: Sequence[Job], data: EvalData) -> HeldReference:
    """The reference that is a store without a model; every byte is checked if any of the others needs it."""
    reference = references.of_store(path, data, session)
    session.cache.use("references", reference.path.name)
    if not all_stored(session, others, data, reference):
        verify(session, reference)
    return reference


def reference_row(
    session: Session, job: Job, others: Sequence[Job], data: EvalData, scored: Scored, turn: Turn
) -> tuple[ModelResult, HeldReference | LostReference]:
    """(the reference's own row, the reference); its store is there, and whole, if any of the others needs it.

    InputError, before anything loads, if there is a store and it is another reference's or damaged.
    """
    try:
        fetched = jobs.fetch(job, data, session)
    except CompareQError as error:
        return replace(table_rows.row_of(job), error=str(error)), LostReference()
    reference = references.of_model(fetched, data, session)
    session.cache.use("references", reference.key)
    if session.clear:
        with session.hosts.running.held(session.cache.lock("references", reference.key)):
            forget_store(session, reference)
    wanted = session.logits_file is not None or job.spec.out_logits is not None
    needed = not all_stored(session, others, data, reference) or (wanted and not reference.exists)
    if reference.exists and (needed or not is_stored(session, fetched, data, reference)):
        verify(session, reference)
    records = needed and not reference.has(len(data.windows))

    def begun() -> None:
        if not scored.expected.done():
            scored.expected.set_result(reference)
        turn.begun()

    def make_row() -> ModelResult:
        with Crew(session, fetched, replace(turn, begun=begun), data.windows) as crew:
            return fetched_row(
                session, fetched, data, lambda: reference, crew, records=records, kept=lambda: scored.settle(reference)
            )

    row = row_or_failure(session, job, make_row)
    return row, LostReference() if row.error else reference


def forget_store(session: Session, reference: HeldReference) -> None:
    """Delete a store: in the cache by the names that compare_q gives, elsewhere by what its manifest lists."""
    if reference.path.parent == session.cache.root / "references":
        session.cache.clear("references", reference.key)
    else:
        reference_store.remove(reference.path)
    reference_store.discard(reference_store.building_of(reference.path, reference.identity))


def all_stored(session: Session, some: Sequence[Job], data: EvalData, reference: Reference) -> bool:
    """Whether the scores of all these models are in the cache; False also where that cannot be told yet."""
    if session.clear:
        return not some
    for job in some:
        try:
            fetched = jobs.without_download(job, data, session)
        except CompareQError:  # the model's own row of the table will say it
            return False
        if fetched is None or not is_stored(session, fetched, data, reference):
            return False
    return True


def is_stored(session: Session, fetched: FetchedJob, data: EvalData, reference: Reference) -> bool:
    """Whether a model's scores of all windows are in the cache, and may be taken from there."""
    tag = references.tag_for(reference, fetched.job)
    return not session.clear and token_scores.are_stored(session.cache, fetched.scores_key, tag, data.windows)


def verify(session: Session, reference: HeldReference) -> None:
    """Check every byte of a store; InputError names a damaged file."""
    store = open_reference(reference.path)
    with (
        session.hosts.running.held(session.cache.lock("references", reference.key)),
        session.progress.phase(f"checking reference {reference.label}", unit="files") as phase,
    ):
        store.verify(Stoppable(phase, session.hosts.running).advance)


def model_row(session: Session, job: Job, data: EvalData, scored: Scored, turn: Turn) -> ModelResult:
    """The row of a model that is not the reference; a failure is a row with its reason."""

    def fetch_and_score() -> ModelResult:
        expected = awaited(session, scored.expected)
        fetched = jobs.fetch(job, data, session)
        with Crew(session, fetched, turn, data.windows) as crew:
            return fetched_row(
                session, fetched, data, lambda: awaited(session, scored.reference), crew, expected=expected
            )

    return row_or_failure(session, job, fetch_and_score)


def row_or_failure(session: Session, job: Job, make_row: Callable[[], ModelResult]) -> ModelResult:
    """What ``make_row`` returns, or a row that says why it failed: no failure loses the other models' results."""
    try:
        return make_row()
    except CompareQError as error:
        reason = str(error)
    except Exception as error:  # a bug, in compare_q or in an engine
        reason = f"{type(error).__name__}: {one_line(error)}"
        if session.verbose:
            traceback.print_exc()
    session.progress.say(f"{job.request.label}: failed")
    return replace(table_rows.row_of(job), error=reason)


def fetched_row(
    session: Session,
    fetched: FetchedJob,
    data: EvalData,
    get_reference: Callable[[], Reference],
    crew: Crew,
    *,
    expected: Reference | None = None,
    records: bool = False,
    kept: Callable[[], None] = lambda: None,
) -> ModelResult:
    """The row of a model on this machine: its scores come from the cache, or are made now and kept there.

    ``get_reference`` waits for the run's reference; ``expected``: what it will most likely be, with which the model can
    be loaded meanwhile.  ``records``: run the model even if its scores are there, for the windows that the reference
    store lacks; ``kept`` is called when all windows are scored and stored, before the engine is closed.
    """
    cache, key = session.cache, fetched.scores_key
    cache.use("scores", key)
    with session.hosts.running.held(cache.lock("scores", key)):
        if session.clear:
            cache.clear("scores", key)
        if expected is not None and session.hosts.spares and not is_stored(session, fetched, data, expected):
            crew.make_ready()
        reference = get_reference()
        tag = references.tag_for(reference, fetched.job)

        def load() -> StoredScores | None:
            return token_scores.load(cache, key, tag, data.windows, session.progress)

        # Another run may have made the missing store while this one waited for the lock.
        missing = records and isinstance(reference, HeldReference) and not reference.has(len(data.windows))
        stored = None if missing else load()
        cached = stored is not None
        if stored is None:
            model_run.score(session, fetched, data, reference, crew, kept)
            stored = load()
    if stored is None:
        raise ModelError(f"{cache.path('scores', key, '')}: vanished while the run went on")
    return table_rows.scored_row(fetched.job, stored, data, reference, key=f"{key}/{tag}", cached=cached)
