"""What a run finds: which scores are in the cache, and which reference stores are there and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backends.common.errors import CompareQError
from backends.reference import store as reference_store
from backends.reference.reading import open_reference
from eval.run import jobs, references, token_scores
from eval.run.hosts import Stoppable
from eval.run.jobs import FetchedJob, Job
from eval.run.references import HeldReference, Reference
from eval.run.rows.text_run import TextRun
from eval.run.session import Session
from eval.text.windows import EvalData


@dataclass(frozen=True)
class Part:
    """A fetched model's part on one text.

    ``own``: the reference that the model itself is, None for a model that may be compared with one; ``records``: the
    model runs even if its scores are there, for the windows that the reference's store lacks.
    """

    text: TextRun
    fetched: FetchedJob
    own: HeldReference | None = None
    records: bool = False


def given_store(session: Session, path: Path, others: Sequence[Job], data: EvalData) -> HeldReference:
    """The reference that is a store without a model; every byte is checked if any of the others needs it."""
    reference = references.of_store(path, data, session)
    session.cache.use("references", reference.path.name)
    if not all_stored(session, others, data, reference):
        verify(session, reference)
    return reference


def part_of_reference(session: Session, part: Part, others: Sequence[Job]) -> Part:
    """The part of the reference; if any of the others needs its store, and it is there, every byte of it is checked.

    InputError, before anything loads, if there is a store and it is another reference's or damaged.
    """
    fetched, data, spec = part.fetched, part.text.data, part.fetched.job.spec
    reference = references.of_model(fetched, data, session)
    session.cache.use("references", reference.key)
    if session.clear:
        with session.hosts.running.held(references.lock_of(reference, session.cache)):
            forget_store(session, reference)
    wanted = session.logits_file is not None or spec.out_logits is not None
    needed = not all_stored(session, others, data, reference) or (wanted and not reference.exists)
    if reference.exists and (needed or not is_stored(session, fetched, data, reference)):
        verify(session, reference)
    records = needed and not reference.has(len(data.windows))
    if records:  # before anything loads
        session.cache.check_writable()
    return replace(part, own=reference, records=records)


def is_pending(session: Session, part: Part) -> bool:
    """Whether the model may have to score this text; True where that cannot be told yet."""
    data, expected = part.text.data, part.text.expected
    if part.own is not None:
        return part.records or not is_stored(session, part.fetched, data, part.own)
    if not expected.done():
        return True
    return not (part.text.error or is_stored(session, part.fetched, data, expected.result()))


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
        session.hosts.running.held(references.lock_of(reference, session.cache)),
        session.progress.phase(f"checking reference {reference.label}", unit="files") as phase,
    ):
        store.verify(Stoppable(phase, session.hosts.running).advance)
