"""The driver: jobs -> token scores, from the cache where they are there -> rows; the reference's row comes first.

The driver knows engines only by the contract (``backends/base.py``).  Every check that needs no engine runs before the
first model loads; after that a model that fails is a row that says so, and the other models go on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from backends.common.errors import CompareQError, InputError, ModelError
from backends.common.messages import one_line
from backends.reference import store as reference_store
from backends.reference.reading import open_reference
from eval.results.run_result import ModelResult, RunResult
from eval.run import jobs, model_run, references, table_rows, token_scores
from eval.run.jobs import FetchedJob, Job
from eval.run.references import HeldReference, LostReference, NoReference, Reference
from eval.run.session import Session
from eval.specs.types import DataSpec, ModelSpec
from eval.text import windows
from eval.text.windows import EvalData


@dataclass(frozen=True)
class FinishedRun:
    """The results of a run, and the windows that were scored."""

    results: RunResult
    data: EvalData


def run(session: Session, data_spec: DataSpec, specs: Sequence[ModelSpec], n_windows: int | None = None) -> FinishedRun:
    """Score every model on ``n_windows`` windows: 0 means all, None the data spec's ``max_rows``.

    InputError with all problems, one a line, before anything loads.
    """
    planned, problems = jobs.plan(specs, data_spec.longest)
    raise_all(problems)  # before the text is tokenized, which takes longer
    data = windows.build(data_spec, n_windows, session.cache, session.progress, clear=session.clear)
    fitted, problems = jobs.fit(planned, data)
    raise_all(problems)
    models, reference = score_all(session, fitted, data)
    known = references.as_json(reference, data.n_scored) if isinstance(reference, HeldReference) else None
    data_json, subtitle = windows.data_json(data_spec, data), windows.subtitle(data_spec, data)
    return FinishedRun(RunResult(data_json, subtitle, models, known), data)


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line a problem, if there are any."""
    if problems:
        raise InputError("\n".join(problems))


def score_all(session: Session, planned: Sequence[Job], data: EvalData) -> tuple[tuple[ModelResult, ...], Reference]:
    """(the rows in the order of the jobs, the reference as it was when all were done): the reference runs first."""
    marked = [job for job in planned if job.spec.is_reference]
    others = [job for job in planned if not job.spec.is_reference]
    reference: Reference = NoReference()
    rows: dict[str, ModelResult] = {}
    for job in marked:  # at most one: ``eval/specs/reading.py``
        rows[job.request.label], reference = reference_row(session, job, others, data)
    if not marked and session.logits_file is not None:
        reference = references.of_store(session.logits_file, data, session.progress)
        session.cache.use("references", reference.path.name)
        if not all_stored(session, others, data, reference):
            verify(session, reference)
    for job in others:
        rows[job.request.label] = model_row(session, job, data, reference)
    return tuple(rows[job.request.label] for job in planned), reference


def reference_row(
    session: Session, job: Job, others: Sequence[Job], data: EvalData
) -> tuple[ModelResult, HeldReference | LostReference]:
    """(the reference's own row, the reference); its store is there, and whole, if any of the others needs it.

    InputError, before anything loads, if there is a store and it is another reference's or damaged.
    """
    try:
        fetched = jobs.fetch(job, data, session.progress)
    except CompareQError as error:
        return replace(table_rows.row_of(job), error=str(error)), LostReference()
    reference = references.of_model(fetched, data, session)
    session.cache.use("references", reference.key)
    if session.clear and reference.exists:
        with session.cache.lock("references", reference.key):
            reference_store.remove(reference.path)
    wanted = session.logits_file is not None or job.spec.out_logits is not None
    needed = not all_stored(session, others, data, reference) or (wanted and not reference.exists)
    if reference.exists and (needed or not is_stored(session, fetched, reference)):
        verify(session, reference)
    again = needed and not reference.exists
    row = row_or_failure(session, job, lambda: fetched_row(session, fetched, data, reference, again=again))
    return row, LostReference() if row.error else reference


def all_stored(session: Session, some: Sequence[Job], data: EvalData, reference: Reference) -> bool:
    """Whether the scores of all these models are in the cache; False also where that cannot be told yet."""
    if session.clear:
        return not some
    for job in some:
        try:
            fetched = jobs.without_download(job, data)
        except CompareQError:  # the model's own row of the table will say it
            return False
        if fetched is None or not is_stored(session, fetched, reference):
            return False
    return True


def is_stored(session: Session, fetched: FetchedJob, reference: Reference) -> bool:
    """Whether a model's scores are in the cache, and may be taken from there."""
    key = fetched.scores_key(references.key_for(reference, fetched.job))
    return not session.clear and session.cache.path("scores", key, ".json").is_file()


def verify(session: Session, reference: HeldReference) -> None:
    """Check every byte of a store; InputError names a damaged file."""
    store = open_reference(reference.path)
    with (
        session.cache.lock("references", reference.key),
        session.progress.phase(f"checking reference {reference.label}", unit="files") as phase,
    ):
        store.verify(phase.advance)


def model_row(session: Session, job: Job, data: EvalData, reference: Reference) -> ModelResult:
    """The row of a model that is not the reference; a failure is a row with its reason."""

    def fetch_and_score() -> ModelResult:
        return fetched_row(session, jobs.fetch(job, data, session.progress), data, reference)

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
    session: Session, fetched: FetchedJob, data: EvalData, reference: Reference, *, again: bool = False
) -> ModelResult:
    """The row of a model on this machine: its scores come from the cache, or are made now and kept there.

    ``again``: score the model even if its scores are there, for the reference store that it leaves.
    """
    cache = session.cache
    key = fetched.scores_key(references.key_for(reference, fetched.job))
    cache.use("scores", key)
    with cache.lock("scores", key):
        if session.clear:
            cache.clear("scores", key)
        # Another run may have made the missing store while this one waited for the lock.
        missing = again and isinstance(reference, HeldReference) and not reference.exists
        stored = None if missing else token_scores.load(cache, key)
        cached = stored is not None
        if stored is None:
            model_run.score(session, fetched, data, reference)
            stored = token_scores.load(cache, key)
    if stored is None:
        raise ModelError(f"{cache.path('scores', key, '.json')}: vanished while the run went on")
    return table_rows.scored_row(fetched.job, stored, data, reference, key=key, cached=cached)
