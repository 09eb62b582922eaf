"""The driver: jobs -> token scores, from the cache where they are there -> rows; the reference's rows come first.

The driver knows engines only by the contract (``backends/base.py``).  Every check that needs no engine runs before the
first model loads; after that a model that fails is a row that says so, and the other models go on.  A run is models x
texts: each model loads once, and scores one text after the other.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from compare_q.backends.common.errors import CompareQError, InputError
from compare_q.backends.common.json_files import check_unicode
from compare_q.backends.common.messages import one_line
from compare_q.eval.results.run_result import Results, TextResult
from compare_q.eval.run import jobs, rows, stores
from compare_q.eval.run.hosts import Hosts
from compare_q.eval.run.jobs import Job
from compare_q.eval.run.references import NoReference
from compare_q.eval.run.session import Session
from compare_q.eval.run.stores import TextRun
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.text import windows
from compare_q.eval.text.windows import EvalData

Item = TypeVar("Item")


@dataclass(frozen=True)
class Finished:
    """The results of a run, and the windows of each text that were scored, None if it has none.

    ``signal``: what has ended the run early, 0 if nothing.  A model that was not finished then is a row with that
    reason.
    """

    results: Results
    data: tuple[EvalData | None, ...]
    signal: int = 0


def run(
    session: Session, data_specs: Mapping[str, DataSpec], specs: Sequence[ModelSpec], n_windows: int | None = None
) -> Finished:
    """Score every model on ``n_windows`` windows of each text, by the texts' names: 0 means all, None the data spec's
    ``max_rows``.

    InputError with all problems, one a line, before anything loads.  Of several texts one whose windows cannot be made
    says why, and the others go on; InputError if none of them can be scored.  InterruptedRun is raised as long as no
    model is at work; after that it ends the run early.
    """
    several = len(data_specs) > 1
    if several and session.logits_file is not None:
        raise InputError("--logits_file: a reference store is of one text; leave it out, or run once for each text")
    planned = checked(session, list(data_specs.values()), specs)
    import_ahead(session, planned, list(data_specs.values()))
    failed: dict[str, str] = {}
    built = build_all(session, data_specs, n_windows, failed)
    jobs.raise_all([f"{name}: {reason}" for name, reason in failed.items()] if not built else [])
    runs = {name: TextRun(name if several else "", data) for name, data in built.items()}
    fitted = jobs.fit(planned, {text.name: text.data for text in runs.values()}, session.hosts)
    if said := jobs.emulated_dtypes(fitted):
        session.progress.say(said)
    ended = score_all(session, fitted, list(runs.values()))
    results = {name: text.result(name, fitted) for name, text in runs.items()}
    failed |= {name: result.error for name, result in results.items() if result.error}
    jobs.raise_all([f"{name}: {failed[name]}" for name in data_specs] if len(failed) == len(data_specs) else [])
    return Finished(
        Results(tuple(results.get(name) or TextResult(name, error=failed[name]) for name in data_specs)),
        tuple(None if name in failed else built[name] for name in data_specs),
        ended,
    )


def build_all(
    session: Session, data_specs: Mapping[str, DataSpec], n_windows: int | None, failed: dict[str, str]
) -> dict[str, EvalData]:
    """The windows of every text, by their names; of several, one that fails is in ``failed`` with its reason."""
    built = {}
    for name, spec in data_specs.items():
        try:
            built[name] = windows.build(spec, n_windows, session.cache, session.progress, clear=session.clear)
        except (CompareQError, OSError) as error:
            if len(data_specs) == 1:
                raise
            failed[name] = one_line(error)
            session.progress.say(f"{name}: failed")
    return built


def checked(session: Session, data_specs: Sequence[DataSpec], specs: Sequence[ModelSpec]) -> list[Job]:
    """The models' jobs; InputError with all problems before the texts are tokenized, which takes longer."""
    if session.divergences and session.logits_file is None and not any(spec.is_reference for spec in specs):
        raise InputError('--divergences: there is no reference; mark a model with "reference": true, or give -lf')
    check_unicode("--logits_file", session.logits_file)
    planned, problems = jobs.plan(specs, max(spec.longest for spec in data_specs), session.hosts)
    jobs.raise_all(problems)
    for job in planned:
        if job.described.silence:
            session.progress.say(f"{job.request.label}: {job.described.silence}; asked again at its turn")
    return planned


def import_ahead(session: Session, planned: Sequence[Job], data_specs: Sequence[DataSpec]) -> None:
    """Import the engine of the model whose turn comes first while the texts are tokenized, if any of them has to be."""
    with suppress(CompareQError):  # tokenizing will say it
        if not session.clear and all(windows.are_stored(spec, session.cache) for spec in data_specs):
            return
    first = next((job for job in planned if job.spec.is_reference), planned[0])
    if session.hosts.place is None and not first.is_remote:
        session.hosts.import_engine(first.wanted(verbose=session.verbose))


def score_all(session: Session, planned: Sequence[Job], texts: Sequence[TextRun]) -> int:
    """Give the texts their rows: the reference's first, then the others', as many at a time as there are GPUs for them.

    Returns the signal that has ended the run early, 0 if none has.
    """
    marked = [job for job in planned if job.spec.is_reference]
    others = [job for job in planned if not job.spec.is_reference]
    session.progress.models = len(planned)

    def score(job: Job, place: int) -> None:
        if job.spec.is_reference:
            rows.reference_rows(session, job, others, texts, place)
        else:
            rows.model_rows(session, job, texts, place)

    ended = 0
    try:
        if not marked:
            given = session.logits_file
            for text in texts:
                text.set_reference(NoReference() if given is None else stores.given_store(session, given, others, text))
        concurrently(session.hosts, [*marked, *others], score)  # at most one is marked: ``eval/specs/reading.py``
    except KeyboardInterrupt as interrupt:  # it goes no further: the rows so far are shown
        session.hosts.running.stop()
        ended = getattr(interrupt, "signal", signal.SIGINT)
    for text in texts:
        text.set_reference(NoReference())
    return ended


def concurrently(hosts: Hosts, items: Sequence[Item], work: Callable[[Item, int], None]) -> None:
    """Do ``work`` on every item and its place, in their order, twice as many at a time as there are GPUs: some score,
    and as many load beside them, or wait with what they could do before.

    The work is done in threads, so that an interrupt, which comes to the main thread, ends all workers first, and what
    they were doing yields rows that say so.
    """
    devices = hosts.devices
    if hosts.in_process:
        for place, item in enumerate(items):
            work(item, place)
            devices.pass_by(place)
        return
    with ThreadPoolExecutor(2 * devices.slots) as pool:
        try:
            futures = []
            for place, item in enumerate(items):
                futures.append(pool.submit(work, item, place))
                futures[-1].add_done_callback(partial(devices.pass_by, place))
            for future in as_completed(futures):
                future.result()
        except BaseException:
            hosts.running.stop()
            pool.shutdown(cancel_futures=True)
            raise
