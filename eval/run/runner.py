"""The driver: jobs -> token scores, from the cache where they are there -> rows; the reference's rows come first.

The driver knows engines only by the contract (``backends/base.py``).  Every check that needs no engine runs before the
first model loads; after that a model that fails is a row that says so, and the other models go on.  A run is models x
texts: each model loads once, and scores one text after the other.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from compare_q.backends.common.errors import CompareQError, InputError
from compare_q.backends.common.json_files import check_unicode
from compare_q.backends.common.messages import one_line
from compare_q.eval.results.run_result import Results, TextResult
from compare_q.eval.run import jobs, rows, stores
from compare_q.eval.run.crew import Turn
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
    raise_all([f"{name}: {reason}" for name, reason in failed.items()] if not built else [])
    runs = {name: TextRun(name if several else "", data) for name, data in built.items()}
    fitted = fitting(session, planned, {text.name: text.data for text in runs.values()})
    ended = score_all(session, fitted, list(runs.values()))
    results = {name: text.result(name, fitted) for name, text in runs.items()}
    failed |= {name: result.error for name, result in results.items() if result.error}
    raise_all([f"{name}: {failed[name]}" for name in data_specs] if len(failed) == len(data_specs) else [])
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
    raise_all(problems)
    for job in planned:
        if job.described.silence:
            session.progress.say(f"{job.request.label}: {job.described.silence}; asked again at its turn")
    return planned


def fitting(session: Session, planned: Sequence[Job], texts: Mapping[str, EvalData]) -> list[Job]:
    """The jobs for these texts; InputError with all problems."""
    fitted, problems = jobs.fit(planned, texts, session.hosts)
    raise_all(problems)
    if said := jobs.emulated_dtypes(fitted):
        session.progress.say(said)
    return fitted


def import_ahead(session: Session, planned: Sequence[Job], data_specs: Sequence[DataSpec]) -> None:
    """Import the engine of the model whose turn comes first while the texts are tokenized, if any of them has to be."""
    with suppress(CompareQError):  # tokenizing will say it
        if not session.clear and all(windows.are_stored(spec, session.cache) for spec in data_specs):
            return
    first = next((job for job in planned if job.spec.is_reference), planned[0])
    if session.hosts.nodes is None and not first.is_remote:
        session.hosts.import_engine(first.wanted(verbose=session.verbose))


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line a problem, if there are any."""
    if problems:
        raise InputError("\n".join(problems))


def score_all(session: Session, planned: Sequence[Job], texts: Sequence[TextRun]) -> int:
    """Give the texts their rows: the reference's first, then the others', as many at a time as there are GPUs for them.

    Returns the signal that has ended the run early, 0 if none has.  A model whose worker died in an earlier run comes
    last, so that it cannot keep the others from being measured.
    """
    marked = [job for job in planned if job.spec.is_reference]
    others = [job for job in planned if not job.spec.is_reference]

    def score(job: Job, turn: Turn) -> None:
        if job.spec.is_reference:
            rows.reference_rows(session, job, others, texts, turn)
        else:
            rows.model_rows(session, job, texts, turn)

    ended = 0
    try:
        if not marked:
            given = session.logits_file
            for text in texts:
                text.set_reference(NoReference() if given is None else stores.given_store(session, given, others, text))
        others.sort(key=lambda job: any(rows.has_died(session, job, text) for text in texts))
        concurrently(session.hosts, [*marked, *others], score)  # at most one is marked: ``eval/specs/reading.py``
    except KeyboardInterrupt as interrupt:  # it goes no further: the rows so far are shown
        session.hosts.running.stop()
        ended = getattr(interrupt, "signal", signal.SIGINT)
    for text in texts:
        text.set_reference(NoReference())
    return ended


def concurrently(hosts: Hosts, items: Sequence[Item], work: Callable[[Item, Turn], None]) -> None:
    """Do ``work`` on every item, in their order, twice as many at a time as there are GPUs: some score, and as many
    load beside them, or wait with what they could do before.

    The work is done in threads, so that an interrupt, which comes to the main thread, ends all workers first, and what
    they were doing yields rows that say so.
    """
    if hosts.in_process:
        for place, item in enumerate(items):
            work(item, Turn(place))
        return
    waiting = threading.Semaphore(hosts.devices.slots)
    with ThreadPoolExecutor(2 * hosts.devices.slots) as pool:
        futures: list[Future[None]] = []
        try:
            for place, item in enumerate(items):
                waiting.acquire()
                for future in futures:
                    if future.done():
                        future.result()
                turn = Turn(place, once(waiting.release))
                futures.append(pool.submit(work, item, turn))
                futures[-1].add_done_callback(turn.over)
            for future in futures:
                future.result()
        except BaseException:
            hosts.running.stop()
            pool.shutdown(cancel_futures=True)
            raise


def once(function: Callable[[], None]) -> Callable[[], None]:
    """A function that calls another one the first time that it is called, and never again."""
    calls = itertools.count()
    return lambda: function() if next(calls) == 0 else None
