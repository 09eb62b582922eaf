"""The driver: jobs -> token scores, from the cache where they are there -> rows; the reference's row comes first.

The driver knows engines only by the contract (``backends/base.py``).  Every check that needs no engine runs before the
first model loads; after that a model that fails is a row that says so, and the other models go on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from backends.common.errors import CompareQError, InputError, ModelError
from backends.common.messages import one_line
from backends.reference import store as reference_store
from backends.reference.reading import open_reference
from eval.results.run_result import ModelResult, RunResult
from eval.run import jobs, model_run, references, table_rows, token_scores
from eval.run.hosts import Stoppable
from eval.run.jobs import FetchedJob, Job
from eval.run.references import HeldReference, LostReference, NoReference, Reference
from eval.run.session import Session
from eval.run.stopping import concurrently, interrupts_end
from eval.run.token_scores import StoredScores
from eval.specs.types import DataSpec, ModelSpec
from eval.text import windows
from eval.text.windows import EvalData


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
    planned, problems = jobs.plan(specs, data_spec.longest, session.hosts)
    raise_all(problems)  # before the text is tokenized, which takes longer
    data = windows.build(data_spec, n_windows, session.cache, session.progress, clear=session.clear)
    fitted, problems = jobs.fit(planned, data, session.hosts)
    raise_all(problems)
    scored = score_all(session, fitted, data)
    reference = scored.reference
    known = references.as_json(reference, data.n_scored) if isinstance(reference, HeldReference) else None
    data_json, subtitle = windows.data_json(data_spec, data), windows.subtitle(data_spec, data)
    rows = tuple(scored.rows[job.request.label] for job in fitted)
    return FinishedRun(RunResult(data_json, subtitle, rows, known), data, scored.signal)


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line a problem, if there are any."""
    if problems:
        raise InputError("\n".join(problems))


@dataclass
class Scored:
    """The rows so far, by label; the reference as it is; the signal that has ended the run early, 0 if none has."""

    rows: dict[str, ModelResult] = field(default_factory=dict)
    reference: Reference = field(default_factory=NoReference)
    signal: int = 0


def score_all(session: Session, planned: Sequence[Job], data: EvalData) -> Scored:
    """The rows of all jobs: the reference's first, then the others', as many at a time as there are GPUs for them.

    A model whose worker died in an earlier run comes last, so that it cannot keep the others from being measured.
    """
    marked = [job for job in planned if job.spec.is_reference]
    others = [job for job in planned if not job.spec.is_reference]
    scored = Scored()

    def score_reference(job: Job) -> None:
        scored.rows[job.request.label], scored.reference = reference_row(session, job, others, data)

    def score_other(job: Job) -> None:
        scored.rows[job.request.label] = model_row(session, job, data, scored.reference)

    with interrupts_end(scored):
        concurrently(session.hosts, marked, score_reference)  # at most one: ``eval/specs/reading.py``
        if not marked and session.logits_file is not None:
            scored.reference = given_store(session, session.logits_file, others, data)
        concurrently(session.hosts, sorted(others, key=lambda job: model_run.has_died(session, job, data)), score_other)
    for job in planned:
        unfinished = replace(table_rows.row_of(job), error="interrupted before it was scored; run again to go on")
        scored.rows.setdefault(job.request.label, unfinished)
    return scored


def given_store(session: Session, path: Path, others: Sequence[Job], data: EvalData) -> HeldReference:
    """The reference that is a store without a model; every byte is checked if any of the others needs it."""
    reference = references.of_store(path, data, session.progress)
    session.cache.use("references", reference.path.name)
    if not all_stored(session, others, data, reference):
        verify(session, reference)
    return reference


def reference_row(
    session: Session, job: Job, others: Sequence[Job], data: EvalData
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
    row = row_or_failure(session, job, lambda: fetched_row(session, fetched, data, reference, records=records))
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


def model_row(session: Session, job: Job, data: EvalData, reference: Reference) -> ModelResult:
    """The row of a model that is not the reference; a failure is a row with its reason."""

    def fetch_and_score() -> ModelResult:
        return fetched_row(session, jobs.fetch(job, data, session), data, reference)

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
    session: Session, fetched: FetchedJob, data: EvalData, reference: Reference, *, records: bool = False
) -> ModelResult:
    """The row of a model on this machine: its scores come from the cache, or are made now and kept there.

    ``records``: run the model even if its scores are there, for the windows that the reference store lacks.
    """
    cache, key, tag = session.cache, fetched.scores_key, references.tag_for(reference, fetched.job)

    def load() -> StoredScores | None:
        return token_scores.load(cache, key, tag, data.windows, session.progress)

    cache.use("scores", key)
    with session.hosts.running.held(cache.lock("scores", key)):
        if session.clear:
            cache.clear("scores", key)
        # Another run may have made the missing store while this one waited for the lock.
        missing = records and isinstance(reference, HeldReference) and not reference.has(len(data.windows))
        stored = None if missing else load()
        cached = stored is not None
        if stored is None:
            model_run.score(session, fetched, data, reference)
            stored = load()
    if stored is None:
        raise ModelError(f"{cache.path('scores', key, '')}: vanished while the run went on")
    return table_rows.scored_row(fetched.job, stored, data, reference, key=f"{key}/{tag}", cached=cached)
