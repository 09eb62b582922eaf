"""One model in its engine: load it, score every window, keep the scores, and leave the reference store behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from backends.base import Task, TokenScores
from backends.reference import store as reference_store
from backends.reference.reading import open_reference
from eval.run import jobs, scoring, token_scores
from eval.run.jobs import FetchedJob, Job
from eval.run.references import HeldReference, Reference, key_for
from eval.run.session import Session
from eval.text.windows import EvalData


def score(session: Session, fetched: FetchedJob, data: EvalData, reference: Reference) -> None:
    """Load one model, score every window, store the scores and what is known of the run.

    The reference leaves its store behind, if that is not there.
    """
    job, label = fetched.job, fetched.job.request.label
    key = fetched.scores_key(key_for(reference, job))
    log_file = None if session.verbose else session.cache.log_file(label, key)
    logged = replace(job, request=replace(job.request, log_file=log_file))
    with task_of(session, job, reference) as task, jobs.opened(logged, session.progress) as backend:
        expected = token_scores.expected_load(session.cache, job.engine)
        with session.progress.phase(f"loading {label}", expected=expected) as loading:
            backend.load()
        scored: dict[int, TokenScores] = {}
        with session.progress.phase(f"scoring {label}", unit="windows", total=len(data.windows)) as scoring_phase:
            for window_scores in scoring.token_scores(backend, data.windows, task):
                scored[window_scores.window] = window_scores
                scoring_phase.advance()
        if task.record is not None and isinstance(reference, HeldReference):
            keep_store(session, task.record, reference, len(data.windows))
        provenance = jobs.what_ran(job, backend)
    if warnings := provenance.get("warnings"):
        session.progress.say(f"{label}: {len(warnings)} warnings of the engine are in {log_file}")
    run_record = {
        "label": label, "provenance": provenance, "load_seconds": loading.seconds,
        "score_seconds": scoring_phase.seconds, "reference": comparison_record(job, task, reference),
    }  # fmt: skip
    token_scores.save(session.cache, key, data.windows, scored, run_record)
    if (alone := fetched.scores_key(None)) != key:
        keep_alone(session, alone, data, scored, run_record)


def keep_alone(
    session: Session, key: str, data: EvalData, scored: Mapping[int, TokenScores], run_record: Mapping[str, Any]
) -> None:
    """Keep what does not depend on the reference under its own ``key`` too: a run without one need not score again."""
    cache = session.cache
    if not session.clear and cache.path("scores", key, ".json").is_file():
        return
    with suppress(Timeout), cache.lock("scores", key).acquire(timeout=0):
        without = {index: scores.alone() for index, scores in scored.items()}
        token_scores.save(cache, key, data.windows, without, {**run_record, "reference": None})


@contextmanager
def task_of(session: Session, job: Job, reference: Reference) -> Iterator[Task]:
    """What a model's run has to do with the reference; a folder that a failed recording leaves is removed."""
    if not isinstance(reference, HeldReference):
        yield Task()
    elif not job.spec.is_reference:
        compares = key_for(reference, job) is not None
        yield Task(reference.path, open_reference(reference.path).head.vocab_size) if compares else Task()
    elif reference.exists or not job.backend.capabilities.compares:
        yield Task()
    else:
        with recording_folder(session, reference) as folder:
            yield Task(record=folder)


@contextmanager
def recording_folder(session: Session, reference: HeldReference) -> Iterator[Path]:
    """An empty folder beside the place of the store, gone afterwards; no other run records this reference meanwhile."""
    folder = reference.path.with_name(f".{reference.path.name}.part")
    with session.cache.lock("references", reference.key):
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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
