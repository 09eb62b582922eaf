"""One model on one text: score the windows that are missing, keep the scores, leave the reference store behind."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from backends.base import Task, Window
from backends.common.errors import CompareQError, LostWorkerError, StoppedError
from backends.reference import store as reference_store
from backends.reference.reading import open_reference
from backends.scoring import segments
from backends.worker.messages import ScoreJob, write_windows
from eval.run import jobs
from eval.run.crew import Crew, death_mark
from eval.run.jobs import Job
from eval.run.references import HeldReference, Reference, lock_of, tag_for
from eval.run.session import Session
from eval.run.stores import Part
from eval.text.windows import EvalData


def score(session: Session, part: Part, reference: Reference, crew: Crew, *, keeps: bool) -> None:
    """``score_once``, and again for the windows that are missing each time that a worker's machine is lost."""
    job = part.fetched.job
    folder, tag = session.cache.path("scores", part.fetched.scores_key, ""), tag_for(reference, job)
    while True:
        before = segments.committed(folder, tag)
        try:
            return score_once(session, part, reference, crew, keeps=keeps)
        except LostWorkerError as lost:
            crew.release()
            there = len(segments.committed(folder, tag) - before)
            again = f"{max(lost.scored - there, 0)} of the {lost.scored} windows that it had scored are scored again"
            session.progress.say(f"{job.request.label}: {lost}; {again}")


def score_once(session: Session, part: Part, reference: Reference, crew: Crew, *, keeps: bool) -> None:
    """Score the windows that have no scores yet; the reference leaves its store behind, if it is needed.

    ``keeps``: the workers stay loaded for another text.  ModelError with the reason if the model fails; what it has
    scored before that is kept.
    """
    job, data = part.fetched.job, part.text.data
    session.cache.check_writable()
    folder = session.cache.path("scores", part.fetched.scores_key, "")
    tag = tag_for(reference, job)
    with task_of(session, job, reference, len(data.windows), crew) as (task, recorded):
        crew.make_ready()
        there = segments.committed(folder, tag) & recorded
        wanted = [window for window in data.windows if window.index not in there]
        if not segments.records(folder):  # a worker was killed before it could say what ran
            wanted = wanted or [data.windows[-1]]
        facts = {
            "label": job.request.label, "known": jobs.known_before(job),
            "reference": comparison_record(job, task, reference),
        }  # fmt: skip
        with ExitStack() as files:
            score_jobs, run = [], uuid.uuid4().hex
            for replica, share in enumerate(shares(wanted, crew.replicas)):
                windows = files.enter_context(session.cache.scratch())
                write_windows(windows, share)
                score_jobs.append(ScoreJob(task, windows, folder, tag, f"{run}-{replica}", facts, keeps))

            def scored() -> None:
                if task.record is not None and isinstance(reference, HeldReference):
                    keep_store(session, task.record, reference, len(data.windows))
                if part.own is not None:
                    part.text.set_reference(part.own)

            follow(session, part.text.of(job.request.label), crew, score_jobs, len(wanted), scored)
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


def has_died(session: Session, job: Job, data: EvalData) -> bool:
    """Whether the worker of a model died in the last run."""
    with suppress(CompareQError):  # the model's own row of the table will say it
        fetched = jobs.without_download(job, data, session)
        return fetched is not None and death_mark(session, fetched.scores_key).exists()
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
        compares = tag_for(reference, job) != segments.ALONE
        entries = open_reference(reference.path).head.vocab_size
        yield Task(reference.path, entries, divergences=reference.divergences) if compares else Task(), every
    elif reference.has(n_windows) or not job.backend.capabilities.compares:
        yield Task(), every
    else:
        with recording_folder(session, reference, crew) as folder:
            yield (
                Task(record=folder),
                frozenset(range(reference.n_windows)) | reference_store.recorded(folder, reference.path),
            )


@contextmanager
def recording_folder(session: Session, reference: HeldReference, crew: Crew) -> Iterator[Path]:
    """The folder beside the place of the store where it is made; no other run records this reference meanwhile.

    What a run has written there that did not come to its end is there for the next run.
    """
    folder = reference_store.building_of(reference.path, reference.identity)
    with session.hosts.running.held(lock_of(reference, session.cache), crew.release):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        finally:
            reference_store.tidy(folder, reference.path)


def keep_store(session: Session, recorded: Path, reference: HeldReference, n_windows: int) -> None:
    """Make a store of what a run has recorded, and say how large it is."""
    label, say = reference.label, session.progress.say
    reference_store.seal(recorded, reference.path, {**reference.identity, "label": label}, n_windows)
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
