"""One model: load it; score its windows, commit their scores as they finish, and say what ran; or have it answer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from compare_q import backends
from compare_q.backends.base import Engine, TokenScores, Window
from compare_q.backends.common.messages import one_line
from compare_q.backends.common.process import in_worker
from compare_q.backends.layers.groups import groups_to_json
from compare_q.backends.scoring import segments
from compare_q.backends.worker import failures, scoring
from compare_q.backends.worker.messages import AnswerJob, Failed, LoadJob, ScoreJob, Told, read_windows

COMMIT_S = 2.0
"""Seconds of scoring that a killed worker may lose: a file for every 2 s, each of which takes about 1 ms to write."""


@dataclass
class Model:
    """A loaded model.  ``moments``: when what happened, in seconds since 1970, by the names of ``score``.

    For a second text they begin when the first one was done: it finds the model loaded, and waits for no load.
    ``notes``: what has to be said of how it was loaded.
    """

    engine: Engine
    load_seconds: float
    moments: dict[str, float]
    notes: tuple[str, ...] = ()


class Committer:
    """Collects the scores of finished windows, and writes them to a segment every ``COMMIT_S`` seconds."""

    def __init__(self, job: ScoreJob, engine: Engine, windows: list[Window]) -> None:
        self.job, self.engine = job, engine
        self.windows = {window.index: window for window in windows}
        self.waiting: list[tuple[Window, TokenScores]] = []
        self.last = time.perf_counter()

    def add(self, scores: TokenScores) -> None:
        """Take the scores of one window; the last window's are written by ``commit`` only."""
        if self.waiting and time.perf_counter() - self.last >= COMMIT_S:
            self.commit()
        self.waiting.append((self.windows.pop(scores.window), scores))

    def commit(self) -> None:
        """Write what is waiting, if the model is still the same."""
        self.engine.check_unchanged()
        now = time.perf_counter()
        segments.commit(self.job.scores, self.job.tag, self.waiting, self.job.session, now - self.last)
        self.waiting, self.last = [], now


def load(job: LoadJob, asked: float, why: str) -> Model:
    """Load a model on its GPUs, in a worker for which the driver has ``asked`` then; whatever an engine raises.

    ``why``: why the engine is imported for this model alone, if it is (``serving.Server``).
    """
    if job.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(job.devices)
    if job.cores is not None:
        stay_on(job.cores)
    engine_class = backends.engine_class(job.engine)
    with suppress(Exception):  # what is wrong with it, loading says better
        engine_class.import_engine(verbose=job.request.log_file is None)
    engine = engine_class(job.request)
    try:
        engine.load()
        engine.get_ready([Window.scored_from(i, np.array(tokens, np.int32)) for i, tokens in enumerate(job.sample)])
    except BaseException:
        engine.close()
        raise
    loaded = time.time()
    notes = (f"its engine was imported for this model alone, since {why}",) if why else ()
    return Model(engine, loaded - asked, {"started": asked, "loaded": loaded}, notes)


def stay_on(cores: tuple[int, ...]) -> None:
    """Compute on these processors only, with a thread on each."""
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(len(cores))


def score(model: Model, job: ScoreJob, send: Callable[[Any], None]) -> None:
    """Do a job; CompareQError, or whatever an engine raises.  What was committed before an error stays.

    The model is closed, also after an error, unless the job ends well and keeps it.  The session's record is written
    before the last windows are committed, so that scores of all windows are never there without a record.  When the
    engine was closed is added to it after that.
    """
    engine, moments = model.engine, dict(model.moments)
    record: dict[str, Any] = {}
    is_done = False
    try:
        windows = read_windows(job.windows)
        committer = Committer(job, engine, windows)
        moments["score_began"] = time.time()
        try:
            with failures.watched(lambda reason: end_at_once(reason, send)):
                for scores in scoring.token_scores(engine, windows, job):
                    moments["last_window"] = time.time()
                    moments.setdefault("first_window", moments["last_window"])
                    committer.add(scores)
                    send(Told("advance", 1))
        except BaseException:
            if committer.waiting and committer.windows:  # the last windows need the record first
                committer.commit()
            raise
        record = {
            "provenance": what_ran(model), "load_seconds": model.load_seconds, "moments": moments, **job.facts
        }  # fmt: skip
        segments.write_record(job.scores, job.session, record)
        committer.commit()
        is_done = True
        send(Told("done"))
    finally:
        if not (is_done and job.keeps):
            close(model, send)
    moments["closed"] = time.time()
    model.moments = dict.fromkeys(("started", "loaded"), moments["closed"])
    segments.write_record(job.scores, job.session, record)


def answer(model: Model, job: AnswerJob, send: Callable[[Any], None]) -> None:
    """Do a job; CompareQError, or whatever an engine raises.  What was answered before an error has been sent."""
    engine = model.engine
    try:
        with failures.watched(lambda reason: end_at_once(reason, send)):
            for given in engine.answers(job.questions, job.sampling):
                send(Told("answer", asdict(given)))
            engine.check_unchanged()
        send(Told("done"))
    finally:
        close(model, send)


def close(model: Model, send: Callable[[Any], None]) -> None:
    """Close a model's engine; an engine that is stopped in the middle raises what it likes, which is said."""
    try:
        model.engine.close()
    except Exception as error:
        send(Told("say", f"{model.engine.request.label}: closing its engine failed: {one_line(error)}"))


def end_at_once(reason: str, send: Callable[[Any], None]) -> None:
    """Say why, and end this process, whatever its engine waits for; elsewhere than in a worker only say it."""
    send(Failed(reason))
    if in_worker():
        os._exit(1)


def what_ran(model: Model) -> dict[str, Any]:
    """What an engine says of a run that has finished; what it cannot tell any more is a note and loses no score."""
    try:
        found = {**model.engine.provenance(), "layers": groups_to_json(model.engine.layers())}
    except Exception as error:  # whatever an engine raises when it is asked about itself
        found = {"notes": [f"what ran is not known: {type(error).__name__}: {one_line(error)}"]}
    return {**found, "notes": [*model.notes, *found.get("notes", ())]}
