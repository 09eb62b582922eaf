"""Where models run: workers, the Python of each engine, the GPUs, how long to wait for who is silent, how a run stops.

``WorkerProcess`` (``eval/common/processes.py``) is a process of this machine, ``InThisProcess`` no process at all.
Whoever runs workers elsewhere writes a third class, and gives it to ``Hosts.make_worker``; nothing else of the driver
asks where a worker is.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from filelock import Timeout

from compare_q.backends.base import Engine, EngineInfo, ModelFacts, ModelFiles, PlannedModel
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError, StoppedError
from compare_q.backends.common.json_files import expanded
from compare_q.backends.common.machine import Gpu
from compare_q.backends.common.process import captured
from compare_q.backends.hub import Watch
from compare_q.backends.worker.engine_process import ENDING
from compare_q.backends.worker.messages import InspectEngine
from compare_q.backends.worker.worker import Worker
from compare_q.eval.common.cache import Cache, Lock, NoLock
from compare_q.eval.common.processes import PROCESSES, WorkerProcess, in_process, outcome
from compare_q.eval.common.progress import Progress, Show
from compare_q.eval.results import ModelResult
from compare_q.eval.run import devices
from compare_q.eval.run.devices import Devices, Kind
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import ModelSpec

LOCK_POLL_S = 0.5
AGAIN_S = 1.0
"""Seconds after which the same signal interrupts once more, if nothing ends the run yet."""


@dataclass(frozen=True)
class Job:
    """One model whose spec was checked: its engine, and what the engine will be told.

    ``python``: the Python that runs the engine, None for this one; ``gpus``: those that it gets, by their kind;
    ``described``: what that Python has of the engine; ``kind``: of the nodes that run it, None: this machine.
    """

    spec: ModelSpec
    engine: str
    engine_class: type[Engine]
    request: PlannedModel
    python: str | None = None
    gpus: tuple[Gpu, ...] = ()
    described: EngineInfo = field(default_factory=EngineInfo)
    kind: Kind | None = None

    @property
    def files(self) -> ModelFiles:
        """What the model is before it is loaded."""
        return self.engine_class.files(self.request)

    @property
    def is_remote(self) -> bool:
        """Whether the model still has to be fetched."""
        return self.files.is_remote

    @property
    def is_settled(self) -> bool:
        """Whether the model is known before its turn: then it is neither fetched, nor asked what it is, nor checked."""
        return self.engine_class.capabilities.here and not self.is_remote

    def facts(self) -> ModelFacts:
        """What the files of a fetched model say, or what a model elsewhere has said."""
        return self.described.facts or self.files.facts()

    def stamp(self) -> str:
        """What changes with a fetched model's files, or with a model elsewhere."""
        return self.described.stamp if self.described.facts else self.files.stamp()


class AnyWorker(Protocol):
    """One worker, for one model, from its making on; ``close`` comes last, whatever happened, also after ``kill``.

    It does the commands of ``backends/worker/messages.py`` one after the other: ``LoadCommand``, which says which GPUs
    it gets, and ``ScoreCommand``.  Files that commands name lie where the driver sees them: the worker reads the model,
    the windows and the reference store there, and leaves its segments in the command's folder ``scores``, and a
    reference in its folder ``record``.  Whoever has no common disk brings and fetches these.
    """

    def perform(self, job: Any, silence_s: float, show: Show) -> Any:
        """Do one job: what it returns, after all that messages on the way say was shown.

        ModelError if it fails, if the worker dies (with the reason and where its log is) or is silent for so long,
        StoppedError if it was killed by ``kill``.
        """

    def kill(self) -> None:
        """End it at once, with all that its engine has started; from any thread, and also twice."""

    def close(self) -> None:
        """Let it end, and wait until nothing of it is left."""


class InThisProcess:
    """No worker: jobs are done in the driver's own process, one model after the other, for debugging and for tests.

    What a job tells is shown once it has ended.  What an engine sets in the environment goes with its model.
    """

    def __init__(self, job: Job) -> None:
        self.log_file, self.environment = job.request.log_file, dict(os.environ)
        self.worker = Worker(time.time())

    def perform(self, job: Any, silence_s: float, show: Show) -> Any:
        messages: list[Any] = []
        with captured(self.log_file):
            self.worker.perform(job, messages.append)
        return outcome(iter(messages), show)

    def kill(self) -> None:
        pass

    def close(self) -> None:
        with captured(self.log_file):
            self.worker.close()
        os.environ.clear()
        os.environ.update(self.environment)


@dataclass(frozen=True)
class Hosts:
    """``pythons``: engine or load_fn -> the Python that runs it; ``load_s``, ``window_s``: seconds that a worker may be
    silent until its model is loaded, and between two windows or answers; ``in_process``: run engines in this process,
    for debugging and for tests; ``make_worker``: makes a worker of a model elsewhere, and ``place`` says what is there
    of its engine, and on which kind of machine it runs (InputError if none fits), None: they run here.

    ``workers``: those that are at work; once the run is ``stopped`` no other is started.
    """

    devices: Devices = field(default_factory=Devices)
    pythons: Mapping[str, str] = field(default_factory=dict)
    load_s: float = 3600.0
    window_s: float = 1800.0
    in_process: bool = False
    make_worker: Callable[[Job], AnyWorker] | None = None
    place: Callable[[Job], tuple[EngineInfo, Kind]] | None = None
    workers: set[AnyWorker] = field(default_factory=set)
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        """End every worker at once."""
        with self.lock:
            self.stopped.set()
            for worker in list(self.workers):
                worker.kill()

    def check(self) -> None:
        """StoppedError if the run has been stopped: what takes long and is no worker asks from time to time."""
        if self.stopped.is_set():
            raise StoppedError()

    def stoppable(self, watch: Watch) -> Any:
        """A ``Watch`` of a download, or of another long work of this process, which ends once the run is stopped."""

        def advance(amount: int = 1) -> None:
            self.check()
            watch.advance(amount)

        return SimpleNamespace(expect=watch.expect, advance=advance, say=watch.say)

    @contextmanager
    def held(self, lock: Lock, let_go: Callable[[], object] = lambda: None) -> Iterator[None]:
        """A lock of the cache or of a reference, waited for as long as another run holds it; StoppedError.

        ``let_go`` gives back the GPUs that the thread holds, if the lock is not free soon.  No two runs wait for each
        other for ever, whatever the order of their models and texts, since all wait in one order:

        1. for the lock of a model's scores, with no other lock and no GPU;
        2. for the lock of a reference's store, with no other lock but that one, and no GPU;
        3. for GPUs, with these locks or without, but for no model of the run that waits for a lock.
        """
        while True:
            self.check()
            try:
                lock.acquire(timeout=LOCK_POLL_S)
                break
            except Timeout:
                let_go()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                lock = NoLock()  # what is finished is served from a full disk, too; nothing else can be kept there
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def started(self, make: Callable[[], AnyWorker]) -> Iterator[AnyWorker]:
        """A worker, which is ended whatever happens; StoppedError if the run was stopped before."""
        with self.lock:
            self.check()
            worker = make()
            self.workers.add(worker)
        try:
            yield worker
        except BaseException:
            worker.kill()
            raise
        finally:
            self.workers.discard(worker)
            worker.close()

    def worker(self, job: Job) -> AnyWorker:
        """A worker of a model, which prints where the model's request says."""
        if self.in_process:
            return InThisProcess(job)
        if self.make_worker is not None:
            return self.make_worker(job)
        log_file = job.request.log_file
        return WorkerProcess(job.python, job.engine, self.visible, log_file=log_file, verbose=log_file is None)

    def import_engine(self, job: Job, *, verbose: bool) -> None:
        """Begin to import a model's engine, so that a worker, once it is wanted, need not wait for that."""
        if self.make_worker is None and not self.in_process:
            with suppress(InputError):  # starting the worker will say it
                PROCESSES.get(job.python or sys.executable, job.engine, self.visible, verbose=verbose)

    @property
    def visible(self) -> tuple[str, ...] | None:
        """The GPUs that an engine sees while it is imported: vLLM asks for the kind of the first."""
        return tuple(gpu.device for gpu in self.devices.gpus) or None

    def inspect(self, python: str | None, model: PlannedModel) -> EngineInfo:
        """What a Python has of an engine, said by a worker; ModelError if it cannot, or is silent for too long."""
        with self.started(partial(WorkerProcess, python)) as worker:
            # It imports no engine, and what an engine may ask a server takes less.
            told = worker.perform(InspectEngine(model), min(600.0, self.load_s), lambda message: None)
        return EngineInfo.model_validate(told)

    def python(self, of_spec: str | None, engine: str, load_fn: str) -> str | None:
        """The Python that runs a model: of its spec, of its engine in the settings, or None for this one.

        InputError if it is no program.  A virtual environment may be given by its folder.
        """
        chosen = of_spec or self.pythons.get(load_fn) or self.pythons.get(engine)
        if chosen is None:
            return None
        path = expanded(chosen)
        path = path / "bin" / "python" if path.is_dir() else path
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise InputError(f"python: {chosen}: is no program; give a Python, or the folder of a virtual environment")
        return os.path.abspath(path)


def of_this_machine(
    gpus: Sequence[str] | None = None, pythons: Mapping[str, str] | None = None, deadline_s: float | None = None
) -> tuple[Hosts, str]:
    """(where models run on this machine, what to tell the user): the settings file, and what overrides it."""
    machine.code()  # of now: the digest that workers are compared with is to be that of what has been imported
    usable, said = devices.chosen(machine.gpus(), gpus)
    all_pythons = {**reading.load_settings().python, **(pythons or {})}
    found = Hosts(Devices(usable), all_pythons, in_process=in_process())
    return found if deadline_s is None else replace(found, load_s=deadline_s, window_s=deadline_s), said


@dataclass(frozen=True)
class Session:
    """``clear``: forget what the cache holds of this text and these models; ``verbose``: engines print their own logs.
    ``logits_file``: the path of a reference store that the user gave, which is read, or made there; ``verify_weights``:
    scores belong to every byte of a model's files, and not to samples of them; ``digests``: of files that were hashed,
    by path, size and time; ``cleared``: keys of scores that this run has forgotten; ``divergences``: compare with the
    reference by reverse KLD, Jensen-Shannon, total variation and top-5 agreement too; ``row_done``: is told each row
    that is known, and its text's name where there are several.
    """

    cache: Cache
    progress: Progress
    clear: bool = False
    verbose: bool = False
    logits_file: Path | None = None
    hosts: Hosts = field(default_factory=Hosts)
    verify_weights: bool = False
    digests: dict[tuple[str, int, int], str] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)
    divergences: bool = False
    row_done: Callable[[str, ModelResult], None] = lambda _text, _row: None


class InterruptedRun(KeyboardInterrupt):
    """A signal that asks a run to end; ``signal`` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


@contextmanager
def signals_interrupt(hosts: Hosts) -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt as Ctrl-C does; what this process was started to ignore (nohup) stays ignored.

    The first signal interrupts.  From then on to the end of this process others change nothing: an interrupt in the
    midst of another one leaves threading's locks in a wrong state, and what was finished is still to be shown.  Only
    the same signal interrupts once more, as long as the run has not been stopped: Python can lose the first.
    """
    first, at = 0, 0.0

    def interrupt(number: int, _: Any) -> None:
        nonlocal first, at
        now = time.monotonic()
        if not first or (number == first and now > at + AGAIN_S and not hosts.stopped.is_set()):
            first, at = number, now
            raise InterruptedRun(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():  # Python's own end would let a handler of ours kill the process
            signal.signal(number, signal.SIG_IGN if first else handler)
