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

from compare_q.backends.common.errors import CompareQError, InputError, StoppedError
from compare_q.backends.common.json_files import check_unicode
from compare_q.backends.common.messages import one_line
from compare_q.eval.results import RunResult, TextResult
from compare_q.eval.run import jobs, references, rows
from compare_q.eval.run.hosts import Hosts, Job, Session
from compare_q.eval.run.references import TextRun
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.text import windows
from compare_q.eval.text.windows import EvalData


@dataclass(frozen=True)
class Finished:
    """The results of a run, and the windows of each text that were scored, None if it has none.

    ``signal``: what has ended the run early, 0 if nothing.  A model that was not finished then is a row with that
    reason.
    """

    results: RunResult
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
    marked = any(job.spec.is_reference for job in planned)
    runs = {name: TextRun(name if several else "", data, marked) for name, data in built.items()}
    fitted = jobs.fit(planned, {text.name: text.data for text in runs.values()}, session.hosts)
    if said := jobs.emulated_dtypes(fitted):
        session.progress.say(said)
    ended = score_all(session, fitted, list(runs.values()))
    results = {name: result_of(text, name, fitted) for name, text in runs.items()}
    results |= {name: TextResult(name=name, error=reason) for name, reason in failed.items()}
    return Finished(
        RunResult(texts=tuple(results[name] for name in data_specs)), tuple(map(built.get, data_specs)), ended
    )


def result_of(text: TextRun, name: str, planned: Sequence[Job]) -> TextResult:
    """The results of these models on a text, in their order; one that was not finished is a row that says so."""
    for job in planned:
        text.rows.setdefault(job.request.label, rows.row_of(job, error=str(StoppedError())))
    reference = text.reference.result()
    known = None if reference is None else references.as_json(reference, text.data.n_scored)
    models = tuple(text.rows[job.request.label] for job in planned)
    return TextResult(
        name=name, data=windows.data_json(text.data), subtitle=windows.subtitle(text.data), models=models,
        reference=known,
    )  # fmt: skip


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
                raise InputError(spec.blamed(error)) from None
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
    if not first.is_remote:
        session.hosts.import_engine(first, verbose=session.verbose)


def score_all(session: Session, planned: Sequence[Job], texts: Sequence[TextRun]) -> int:
    """Give the texts their rows: the reference's first, then the others', as many at a time as there are GPUs for them.

    Returns the signal that has ended the run early, 0 if none has.
    """
    marked = [job for job in planned if job.spec.is_reference]  # at most one: ``eval/specs/reading.py``
    others = [job for job in planned if not job.spec.is_reference]
    work = [partial(rows.reference_rows, session, job, others, texts) for job in marked]
    work += [partial(rows.model_rows, session, job, texts) for job in others]
    session.progress.models, ended = len(work), 0
    try:
        for text in texts if not marked else ():
            given = session.logits_file
            text.set_reference(None if given is None else references.given_store(session, given, others, text))
        concurrently(session.hosts, work[: len(marked)])  # the reference is there before any other model loads
        concurrently(session.hosts, work[len(marked) :], len(marked))
    except KeyboardInterrupt as interrupt:  # it goes no further: the rows so far are shown
        session.hosts.stop()
        ended = getattr(interrupt, "signal", signal.SIGINT)
    for text in texts:
        text.set_reference(None)
    return ended


def concurrently(hosts: Hosts, work: Sequence[Callable[[int], None]], first: int = 0) -> None:
    """Call every function with its place, from ``first`` on, in their order, twice as many at a time as there are GPUs:
    some score, and others wait with what they could do before.

    They run in threads, so that an interrupt, which comes to the main thread, ends all workers first, and what they
    were doing yields rows that say so.
    """
    if hosts.in_process:
        for place, each in enumerate(work, first):
            each(place)
            hosts.devices.pass_by(place)
        return
    with ThreadPoolExecutor(2 * hosts.devices.slots) as pool:
        try:
            futures = [pool.submit(each, place) for place, each in enumerate(work, first)]
            for place, future in enumerate(futures, first):
                future.add_done_callback(partial(hosts.devices.pass_by, place))
            for future in as_completed(futures):
                future.result()
        except BaseException:
            hosts.stop()
            pool.shutdown(cancel_futures=True)
            raise
