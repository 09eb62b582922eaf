"""The workers of one model: one, or a replica for each share of its windows; and the GPUs that they hold."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Self, TypeVar

from compare_q.backends.base import LoadRequest, Window
from compare_q.backends.common.errors import CompareQError, LostWorkerError, NoMemoryError, StoppedError
from compare_q.backends.worker.messages import LoadJob, ScoreJob
from compare_q.eval.common.processes import Deadline
from compare_q.eval.common.progress import Tell
from compare_q.eval.run import token_scores
from compare_q.eval.run.devices import SOON_S, Hold
from compare_q.eval.run.hosts import Worker
from compare_q.eval.run.jobs import Job
from compare_q.eval.run.session import Session

Item = TypeVar("Item")
SAMPLED_WINDOWS, SAMPLED_TOKENS = 2, 2048


class Crew:
    """The workers of one model.  Leaving its context ends them.

    ``key``: of its first scores, which names its log; ``place``: its place among the models of the run, from 0;
    ``begun`` is called once they have GPUs; ``windows``: those of all texts that they may score; ``failure``: why the
    model could not be loaded, None if it could, or was not tried; ``n_lost``: workers that were lost with their
    machines.
    """

    def __init__(
        self, session: Session, job: Job, key: str, place: int, begun: Callable[[], None], windows: Sequence[Window]
    ) -> None:
        self.session, self.job, self.key, self.place, self.begun = session, job, key, place, begun
        self.sample = sample_of(windows)
        self.failure: CompareQError | None = None
        self.n_lost = 0
        self.workers: list[Worker] = []
        self.hold: Hold | None = None
        self.is_loaded = False
        self.at_work, self.held = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.release(at_once=kind is not None)

    def release(self, *, at_once: bool = False) -> None:
        """End the workers, then give the GPUs back."""
        with self.held:
            self._end_workers(at_once=at_once)
        self.hold = None

    def release_for_reference(self) -> None:
        """End the workers of a model that waits for a reference which needs their GPUs; they will load again.

        So it does where another run holds a lock that this one waits for: it may need the GPUs to come to an end.
        """
        hosts = self.session.hosts
        if self.hold is not None and (hosts.running.blocked or hosts.devices.is_wanted_by_reference(self.hold)):
            self.release()

    @cached_property
    def request(self) -> LoadRequest:
        """The model, and the log of its workers, named only now: for rows of the cache nothing need be written."""
        label, verbose = self.job.request.label, self.session.verbose
        return replace(self.job.request, log_file=None if verbose else self.session.cache.log_file(label, self.key))

    @property
    def slots(self) -> int:
        """GPUs that one of its workers takes; on a cluster at least one, for a node without GPUs."""
        return max(len(self.job.gpus), 0 if self.job.kind is None else 1)

    @cached_property
    def replicas(self) -> int:
        """Workers among which its windows are split: those that were asked for, as far as there are GPUs."""
        of_run = (self.job.kind or self.session.hosts.devices).slots
        wanted = 1 if self.session.hosts.in_process else self.job.spec.replicas
        return max(min(wanted, of_run // self.slots), 1) if self.slots else wanted

    @cached_property
    def expected(self) -> float | None:
        """Seconds that its load will likely take."""
        return token_scores.expected_load(self.session.cache, self.job.engine)

    @cached_property
    def limits(self) -> Deadline:
        """How long its workers may be silent."""
        limits = self.session.hosts.limits
        return replace(limits, load_s=max(limits.load_s, limits.patience * (self.expected or 0.0)))

    def numbered(self, title: str) -> str:
        """The title of a phase, with the model's place in the run."""
        return self.session.progress.numbered(title, self.place)

    def make_ready(self) -> None:
        """From nothing to a loaded model whose turn it is; what can be done before the turn, is done before.

        ModelError or StoppedError; a model that could not be loaded is not tried again.
        """
        if self.failure is not None:
            raise self.failure
        if self.is_loaded and all(worker.is_alive for worker in self.workers):
            return
        hosts, n_gpus = self.session.hosts, self.slots * self.replicas
        try:
            if self.hold is None:
                if hosts.devices.gpus:  # elsewhere that would take the cores from the model that scores
                    hosts.import_engine(self.job.wanted(verbose=self.session.verbose))
                needs = share_of_a_gpu(self.job)
                self.hold = self.held.enter_context(hosts.devices.taken(n_gpus, self.place, needs))
                self.begun()
            self._load_or_reload(self.hold)
            hosts.devices.await_turn(self.hold)
            if not all(worker.is_alive for worker in self.workers):  # it has died while it waited
                self._load(self.hold)
        except StoppedError:
            raise StoppedError("interrupted before it was scored; run again to go on") from None
        except LostWorkerError:
            raise
        except CompareQError as error:
            self.failure = error
            raise

    def score(self, jobs: Sequence[ScoreJob], name: str, n_windows: int, scored: Callable[[], None]) -> None:
        """Have the workers score so many windows, a job each, and show it under this ``name``.

        ``scored`` is called when all of them are done, before their engines are closed.  ModelError if one of them
        fails or dies.  With jobs that keep the model it is loaded afterwards, and the GPUs are not offered to the next
        model yet.
        """
        assert self.hold is not None
        hold, keeps, devices = self.hold, jobs[0].keeps, self.session.hosts.devices
        working, began = len(jobs), time.monotonic()
        self.is_loaded = False
        with self.session.progress.phase(self.numbered(f"scoring {name}"), unit="windows", total=n_windows) as phase:

            def show(kind: str, content: Any) -> None:
                nonlocal working
                if kind == "advance":
                    phase.advance(content)
                    seconds_left = (time.monotonic() - began) * (n_windows / phase.done - 1)
                    if not keeps and hold.stage == "scoring" and seconds_left < SOON_S:
                        devices.reach(hold, "ending")
                elif kind == "done":
                    working -= 1
                    if not working and not keeps:
                        devices.reach(hold, "closing")
                    if not working:
                        scored()
                else:
                    phase.say(content)

            try:
                self._perform(jobs, show)
            except LostWorkerError as lost:
                lost.scored = phase.done
                raise
            except StoppedError:
                kept = "what is older than 2 s is kept" if phase.done else "it had scored none"
                text = f"interrupted after {phase.done} of {n_windows} windows; {kept}, run again to go on"
                raise StoppedError(text) from None
        self.is_loaded = keeps

    def _load_or_reload(self, hold: Hold) -> None:
        """Load; once more where memory was short beside the model before, which has gone by then."""
        was_beside = bool(self.session.hosts.devices.beside(hold))
        try:
            self._load(hold)
        except NoMemoryError:
            if not was_beside:
                raise
            self._end_workers(at_once=True)
            self.session.hosts.devices.await_room(hold)
            self._load(hold)

    def _load(self, hold: Hold) -> None:
        if self.workers and not all(worker.is_alive for worker in self.workers):
            self._end_workers(at_once=True)
        self._start()
        jobs = [
            LoadJob(self.job.engine, self.request, devices, cores, self.sample)
            for devices, cores in zip(
                *(parts_of(each, self.replicas) for each in (hold.names, self._cores())), strict=True
            )
        ]
        with self.session.progress.phase(
            self.numbered(f"loading {self.request.label}"), expected=self.expected
        ) as phase:
            self._perform(jobs, lambda _, line: phase.say(line))
        self.is_loaded = True

    def _cores(self) -> tuple[int, ...] | None:
        """The processors to be split among replicas; None where they need not be."""
        if self.replicas == 1 or self.job.gpus or not hasattr(os, "sched_getaffinity"):
            return None
        return tuple(sorted(os.sched_getaffinity(0)))

    def _perform(self, jobs: Sequence[Any], show: Tell) -> None:
        """Give each worker a job; the first failure ends them all."""
        if len(jobs) == 1:
            self.workers[0].perform(jobs[0], self.limits, show)
            return
        lock = threading.Lock()

        def show_one(kind: str, content: Any) -> None:
            with lock:
                show(kind, content)

        with ThreadPoolExecutor(len(jobs)) as pool:
            given = zip(self.workers, jobs, strict=False)
            ends = [pool.submit(worker.perform, job, self.limits, show_one) for worker, job in given]
            try:
                for end in as_completed(ends):
                    end.result()
            except BaseException:
                for worker in self.workers:
                    worker.kill()
                raise

    def _start(self) -> None:
        """Start the workers that are not there."""
        hosts = self.session.hosts
        wanted = self.job.wanted(self.request.log_file, verbose=self.session.verbose)
        for _ in range(self.replicas - len(self.workers)):
            self.workers.append(self.at_work.enter_context(hosts.running.started(hosts.worker(wanted))))

    def _end_workers(self, *, at_once: bool) -> None:
        """End the workers that there are, at once or as they like."""
        if at_once:
            for worker in self.workers:
                worker.kill()
        self.at_work.close()
        self.workers, self.is_loaded = [], False


def sample_of(windows: Sequence[Window]) -> tuple[tuple[int, ...], ...]:
    """The first tokens of the longest windows: of windows of one length, of the first."""
    longest = sorted(windows, key=lambda window: -len(window.token_ids))[:SAMPLED_WINDOWS]
    return tuple(tuple(window.token_ids[:SAMPLED_TOKENS].tolist()) for window in longest)


def parts_of(items: tuple[Item, ...] | None, count: int) -> list[tuple[Item, ...] | None]:
    """Items in as many equal parts, those that are left over in none; with too few items some have a part in common."""
    if items is None:
        return [None] * count
    each = max(len(items) // count, 1)
    return [items[part * each : (part + 1) * each] or items[-1:] for part in range(count)]


def share_of_a_gpu(job: Job) -> int | None:
    """Bytes that a model will take of each of its GPUs (on a CPU: of RAM); None if that is not known."""
    with suppress(CompareQError):  # loading will say it
        needs = job.engine_class(job.request).device_bytes()
        return None if needs is None else needs // max(len(job.gpus), 1)
    return None
