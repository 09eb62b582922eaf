"""What a model has to do on a text: which scores are in the cache, and which reference stores are there and whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compare_q.backends.common.errors import CompareQError
from compare_q.backends.reference import store as reference_store
from compare_q.backends.reference.reading import open_reference
from compare_q.eval.common.cache import Cache
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

    ``rows``: by the models' labels.  ``expected``: the reference, once its model has GPUs, or was not to be
    scored, for those who want to be ready when it is there; ``reference``: as it is in the end.  ``error``: why the
    text has no rows, set before the reference is: its reference's store is another one's, or damaged.
    """

    name: str
    data: EvalData
    rows: dict[str, ModelResult] = field(default_factory=dict)
    expected: Future[Reference] = field(default_factory=Future)
    reference: Future[Reference] = field(default_factory=Future)
    error: str = ""

    def set_reference(self, reference: Reference) -> None:
        """Say which reference the text has in the end, unless that was said before."""
        for future in (self.expected, self.reference):
            if not future.done():
                future.set_result(reference)

    def of(self, label: str) -> str:
        """A model in messages, with the text that it scores where there are several."""
        return f"{label} on {self.name}" if self.name else label

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


@dataclass(frozen=True)
class Part:
    """A model's part on one text: the model, which is on this machine, and everything that its scores depend on.

    ``own``: the reference that the model itself is, None for a model that may be compared with one; ``records``: the
    model runs even if its scores are there, for the windows that the reference's store lacks.
    """

    text: TextRun
    job: Job
    identity: Mapping[str, Any]
    own: HeldReference | None = None
    records: bool = False

    @property
    def scores_key(self) -> str:
        """Key of the model's token scores."""
        return Cache.key("scores", self.identity)

    @property
    def label(self) -> str:
        """The model in messages, with the text where there are several."""
        return self.text.of(self.job.request.label)


def part_of(session: Session, job: Job, text: TextRun) -> Part:
    """The part of a model on this machine; InputError if its files are damaged."""
    identity = jobs.identity(job, text.data, session)
    return Part(text, replace(job, request=replace(job.request, stamp=identity["model"])), identity)


def part_without_download(session: Session, job: Job, text: TextRun) -> Part | None:
    """The part of a model that is on this machine already; None if something would have to be downloaded."""
    request = job.files.cached()
    return None if request is None else part_of(session, replace(job, request=request), text)


def given_store(session: Session, path: Path, others: Sequence[Job], text: TextRun) -> HeldReference:
    """The reference that is a store without a model; every byte is checked if any of the others needs it."""
    reference = references.of_store(path, text.data, session)
    session.cache.use("references", reference.path.name)
    if not all_stored(session, others, text, reference):
        verify(session, reference)
    return reference


def part_of_reference(session: Session, part: Part, others: Sequence[Job]) -> Part:
    """The part of the reference; if any of the others needs its store, and it is there, every byte of it is checked.

    InputError, before anything loads, if there is a store and it is another reference's or damaged.
    """
    reference = references.of_model(part.job, part.identity, part.text.data, session)
    session.cache.use("references", reference.key)
    if session.clear:
        with session.hosts.running.held(references.lock_of(reference, session.cache)):
            reference_store.discard(reference.path)
    wanted = session.logits_file is not None or part.job.spec.out_logits is not None
    needed = not all_stored(session, others, part.text, reference) or (wanted and not reference.exists)
    if reference.exists and (needed or not is_stored(session, part, reference)):
        verify(session, reference)
    records = needed and not reference.has(len(part.text.data.windows))
    if records:  # before anything loads
        session.cache.check_writable()
    return replace(part, own=reference, records=records)


def is_pending(session: Session, part: Part) -> bool:
    """Whether the model may have to score this text; True where that cannot be told yet."""
    expected = part.text.expected
    if part.own is not None:
        return part.records or not is_stored(session, part, part.own)
    if not expected.done():
        return True
    return not (part.text.error or is_stored(session, part, expected.result()))


def all_stored(session: Session, some: Sequence[Job], text: TextRun, reference: Reference) -> bool:
    """Whether the scores of all these models are in the cache; False also where that cannot be told yet."""
    if session.clear:
        return not some
    try:
        parts = (part_without_download(session, job, text) for job in some)
        return all(part is not None and is_stored(session, part, reference) for part in parts)
    except CompareQError:  # the model's own row of the table will say it
        return False


def is_stored(session: Session, part: Part, reference: Reference) -> bool:
    """Whether a model's scores of all windows are in the cache, and may be taken from there."""
    tag = references.tag_for(reference, part.job)
    stored = token_scores.are_stored(session.cache, part.scores_key, tag, part.text.data.windows)
    return stored and not session.clear


def verify(session: Session, reference: HeldReference) -> None:
    """Check every byte of a store; InputError names a damaged file."""
    store = open_reference(reference.path)
    with (
        session.hosts.running.held(references.lock_of(reference, session.cache)),
        session.progress.phase(f"checking reference {reference.label}", unit="files") as phase,
    ):
        store.verify(Stoppable(phase, session.hosts.running).advance)
