"""What a model has to do on a text: which scores are in the cache, and which reference stores are there and whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from compare_q.backends.common.errors import CompareQError
from compare_q.backends.reference import store as reference_store
from compare_q.backends.reference.reading import open_reference
from compare_q.eval.results.run_result import ModelResult, TextResult
from compare_q.eval.run import jobs, references, table_rows, token_scores
from compare_q.eval.run.hosts import Stoppable
from compare_q.eval.run.jobs import Job
from compare_q.eval.run.references import HeldReference, Reference
from compare_q.eval.run.session import Session
from compare_q.eval.text import windows
from compare_q.eval.text.windows import EvalData

POLL_S = 0.5
"""Seconds between two looks whether a run was stopped."""


@dataclass(eq=False)
class TextRun:
    """A text of a run; ``name`` tells several texts apart, and is empty for the only one.

    ``rows``: by the models' labels.  ``expected``: the reference, once its model has GPUs, or was not to be scored, for
    those who want to be ready when it is there; ``reference``: as it is in the end.  ``error``: why the text has no
    rows, set before the reference is: its reference's store is another one's, or damaged.  ``scores_keys``: of the
    models, by their labels, whose turn has come; ``own``: the reference that a model of the run is; ``records``: others
    need its store, which lacks windows.
    """

    name: str
    data: EvalData
    rows: dict[str, ModelResult] = field(default_factory=dict)
    expected: Future[Reference] = field(default_factory=Future)
    reference: Future[Reference] = field(default_factory=Future)
    error: str = ""
    scores_keys: dict[str, str] = field(default_factory=dict)
    own: HeldReference | None = None
    records: bool = False

    @property
    def made(self) -> HeldReference:
        """The reference that a model of this run is, once ``prepare_reference`` has found out which."""
        assert self.own is not None
        return self.own

    @property
    def lacks_windows(self) -> bool:
        """Whether the reference has to run although its scores may be there, for windows that its store lacks."""
        return self.records and not self.made.has(len(self.data.windows))

    def set_reference(self, reference: Reference) -> None:
        """Say which reference the text has in the end, unless that was said before."""
        for future in (self.expected, self.reference):
            if not future.done():
                future.set_result(reference)

    def of(self, job: Job) -> str:
        """A model in messages, with the text that it scores where there are several."""
        return f"{job.request.label} on {self.name}" if self.name else job.request.label

    def result(self, name: str, jobs: Sequence[Job]) -> TextResult:
        """The results of these models, in their order; a model that was not finished is a row that says so."""
        if self.error:
            return TextResult(name, error=self.error)
        for job in jobs:
            unfinished = replace(table_rows.row_of(job), error="interrupted before it was scored; run again to go on")
            self.rows.setdefault(job.request.label, unfinished)
        reference = self.reference.result()
        known = references.as_json(reference, self.data.n_scored) if isinstance(reference, HeldReference) else None
        rows = tuple(self.rows[job.request.label] for job in jobs)
        return TextResult(name, windows.data_json(self.data), windows.subtitle(self.data), rows, known)


def wait_for_reference(
    session: Session, reference: Future[Reference], idle: Callable[[], None] = lambda: None
) -> Reference:
    """A reference that another thread makes; StoppedError if the run is stopped meanwhile.

    ``idle`` is called again and again while it is not there.
    """
    while True:
        session.hosts.running.check()
        with suppress(TimeoutError):
            return reference.result(timeout=POLL_S)
        idle()


def given_store(session: Session, path: Path, others: Sequence[Job], text: TextRun) -> HeldReference:
    """The reference that is a store without a model; every byte is checked if any of the others needs it."""
    reference = references.of_store(path, text.data, session)
    session.cache.use("references", reference.path.name)
    if not all_stored(session, others, text, reference):
        verify(session, reference)
    return reference


def prepare_reference(session: Session, job: Job, text: TextRun, others: Sequence[Job]) -> None:
    """Say which reference a model is; if any of the others needs its store, and it is there, every byte is checked.

    InputError, before anything loads, if there is a store and it is another reference's or damaged.
    """
    text.own = reference = references.of_model(job, text.data, session)
    session.cache.use("references", reference.key)
    if session.clear:
        with session.hosts.running.held(references.lock_of(reference, session.cache)):
            reference_store.discard(reference.path)
    wanted = session.logits_file is not None or job.spec.out_logits is not None
    needed = not all_stored(session, others, text, reference) or (wanted and not reference.exists)
    if reference.exists and (needed or not is_stored(session, job, text, reference)):
        verify(session, reference)
    text.records = needed
    if text.lacks_windows:  # before anything loads
        session.cache.check_writable()


def is_pending(session: Session, job: Job, text: TextRun) -> bool:
    """Whether the model may have to score this text; True where that cannot be told yet."""
    if job.spec.is_reference:
        return text.lacks_windows or not is_stored(session, job, text, text.made)
    if not text.expected.done():
        return True
    return not (text.error or is_stored(session, job, text, text.expected.result()))


def all_stored(session: Session, some: Sequence[Job], text: TextRun, reference: Reference) -> bool:
    """Whether the scores of all these models are in the cache; False also where that cannot be told yet."""
    try:
        return all(is_stored(session, job, text, reference) for job in some)
    except CompareQError:  # the model's own row of the table will say it
        return False


def is_stored(session: Session, job: Job, text: TextRun, reference: Reference) -> bool:
    """Whether a model's scores of all windows may be taken from the cache; False if it has to be downloaded."""
    request = job.files.cached()
    if session.clear or request is None:
        return False
    key = text.scores_keys.get(job.request.label)
    key = key or jobs.scores_key(replace(job, request=request), text.data, session)
    return token_scores.are_stored(session.cache, key, references.tag_for(reference, job), text.data.windows)


def verify(session: Session, reference: HeldReference) -> None:
    """Check every byte of a store; InputError names a damaged file."""
    store = open_reference(reference.path)
    with (
        session.hosts.running.held(references.lock_of(reference, session.cache)),
        session.progress.phase(f"checking reference {reference.label}", unit="files") as phase,
    ):
        store.verify(Stoppable(phase, session.hosts.running).advance)
