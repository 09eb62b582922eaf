"""Where models run: workers, the Python of each engine, the GPUs, how long to wait for who is silent, how a run stops.

``WorkerProcess`` (``eval/common/processes.py``) is a process of this machine, ``InThisProcess`` no process at all.
Whoever runs workers elsewhere writes a third class, and gives ``Hosts.make_worker`` a function that makes it; nothing
else of the driver asks where a worker is.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from filelock import Timeout

from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError, StoppedError
from compare_q.backends.common.json_files import expanded
from compare_q.backends.common.process import captured
from compare_q.backends.hub import Watch
from compare_q.backends.worker import serving
from compare_q.backends.worker.messages import DESCRIBED, Described, DescribeJob
from compare_q.eval.common.cache import Lock, NoLock
from compare_q.eval.common.processes import PROCESSES, Deadline, Wanted, WorkerProcess, in_process, outcome
from compare_q.eval.common.progress import Tell
from compare_q.eval.run import devices
from compare_q.eval.run.devices import Devices, Kind
from compare_q.eval.specs import reading

LOCK_POLL_S = 0.5
DESCRIBED_S = 600.0
"""Seconds for a worker that imports no engine; what an engine may ask a server takes less."""


class Worker(Protocol):
    """One worker, for one model.

    Its life: ``start``; then the jobs of ``backends/worker/messages.py``, one after the other: ``LoadJob``, which says
    which GPUs it gets, and ``ScoreJob``; last ``close``, whatever happened, also after ``kill``.  Files that jobs name
    lie where the driver sees them: the worker reads the model, the windows and the reference store there, and leaves
    its segments in the job's folder ``scores``, and a reference in its folder ``record``.  Whoever has no common disk
    brings and fetches these.
    """

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job, as far as is known."""

    def start(self) -> None:
        """Start it; InputError in one line if that cannot be."""

    def perform(self, job: Any, deadline: Deadline, show: Tell) -> Any:
        """Do one job: what it returns, after all that ``Told`` messages say was shown.

        ModelError if it fails, if the worker dies (with the reason and where its log is) or is silent for too long,
        StoppedError if it was killed by ``kill``.
        """

    def kill(self) -> None:
        """End it at once, with all that its engine has started; from any thread, also before ``start`` and twice."""

    def close(self) -> None:
        """Let it end, and wait until nothing of it is left."""


class InThisProcess:
    """No worker: jobs are done in the driver's own process, one model after the other, for debugging and for tests.

    What a job tells is shown once it has ended.
    """

    is_alive = True

    def __init__(self, wanted: Wanted) -> None:
        self.log_file = wanted.log_file
        self.environment: dict[str, str] = {}

    def start(self) -> None:
        self.server = serving.Server()

    def perform(self, job: Any, deadline: Deadline, show: Tell) -> Any:
        messages: list[Any] = []
        with captured(self.log_file), self.own_environment():
            self.server.perform(job, messages.append)
        return outcome(iter(messages), show)

    @contextmanager
    def own_environment(self) -> Iterator[None]:
        """What an engine sets in the environment is there for its model only, and in no other model's key."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            yield
        finally:
            self.environment = {name: value for name, value in os.environ.items() if before.get(name) != value}
            os.environ.clear()
            os.environ.update(before)

    def kill(self) -> None:
        pass

    def close(self) -> None:
        self.server.close()


@dataclass
class Running:
    """The workers of a run that are at work; ``stop`` ends them, and keeps others from being started.

    ``blocked``: the locks that its threads wait for, since other runs hold them.
    """

    workers: set[Worker] = field(default_factory=set)
    blocked: list[Lock] = field(default_factory=list)
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """StoppedError if the run has been stopped: what takes long and is no worker asks from time to time."""
        if self.stopped:
            raise StoppedError("interrupted before it was scored; run again to go on")

    @contextmanager
    def held(self, lock: Lock, let_go: Callable[[], object] = lambda: None) -> Iterator[None]:
        """A lock of the cache or of a reference, waited for as long as another run holds it; StoppedError.

        ``let_go`` gives back the GPUs that the thread holds, if the lock is not free soon.  No two runs wait for each
        other for ever, whatever the order of their models and texts, since all wait in one order:

        1. for the reference of a text, which another thread of the run makes, with no lock, and with GPUs only as long
           as that thread neither waits for GPUs nor any thread of the run for a lock (``Crew.release_for_reference``);
        2. for the lock of a model's scores, with no other lock and no GPU;
        3. for the lock of a reference's store, with no other lock but that one, and no GPU;
        4. for GPUs, with these locks or without: who has the GPUs scores, or waits for 1.
        """
        with ExitStack() as waiting:
            while True:
                self.check()
                try:
                    lock.acquire(timeout=LOCK_POLL_S)
                    break
                except Timeout:
                    if lock not in self.blocked:
                        let_go()
                        self.blocked.append(lock)
                        waiting.callback(self.blocked.remove, lock)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    lock = NoLock()  # what is finished is served from a full disk, too; nothing else can be kept there
                    break
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def started(self, worker: Worker) -> Iterator[Worker]:
        """The worker, started, and ended whatever happens; StoppedError if the run was stopped before."""
        try:
            with self.lock:
                self.check()
                worker.start()
                self.workers.add(worker)
            yield worker
        except BaseException:
            worker.kill()
            raise
        finally:
            self.workers.discard(worker)
            worker.close()

    def stop(self) -> None:
        """End every worker at once."""
        with self.lock:
            self.stopped = True
            for worker in list(self.workers):
                worker.kill()


Place = Callable[[str, Mapping[str, float], str | None, DescribeJob, str | None], tuple[Described, Kind]]
"""(a model's label, the resources that it needs, its Python, the question to this, the content of the model's files,
None if they are still to be fetched) -> (what other machines have of its engine, the kind of machine on which it runs).
InputError if none fits.
"""


@dataclass(frozen=True)
class Hosts:
    """``pythons``: engine or load_fn -> the Python that runs it; ``deadline_s``: for silent workers, None: generous.

    ``in_process``: run engines in this process, one model after the other, for debugging and for tests;
    ``make_worker``: makes a worker otherwise, which is not started yet; ``place``: says where on other machines a model
    runs, None: they run here.
    """

    devices: Devices = field(default_factory=Devices)
    pythons: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float | None = None
    in_process: bool = False
    running: Running = field(default_factory=Running)
    make_worker: Callable[[Wanted], Worker] = WorkerProcess
    place: Place | None = None

    @property
    def limits(self) -> Deadline:
        """How long workers may be silent."""
        return Deadline() if self.deadline_s is None else Deadline(self.deadline_s, self.deadline_s, patience=0)

    def worker(self, wanted: Wanted) -> Worker:
        """A worker that is not started yet."""
        return InThisProcess(wanted) if self.in_process else self.make_worker(self.among_gpus(wanted))

    def import_engine(self, wanted: Wanted) -> None:
        """Begin to import a worker's engine, so that the worker, once it is wanted, need not wait for that."""
        if self.make_worker is WorkerProcess and not self.in_process:
            with suppress(InputError):  # starting the worker will say it
                PROCESSES.get(self.among_gpus(wanted), verbose=wanted.log_file is None)

    def among_gpus(self, wanted: Wanted) -> Wanted:
        """A worker whose engine sees the GPUs of the run while it is imported: vLLM asks for the kind of the first."""
        names = tuple(gpu.device for gpu in self.devices.gpus)
        return replace(wanted, visible=names or None)

    def describe(self, python: str | None, question: DescribeJob) -> Described:
        """What a Python has of an engine, said by a worker; ModelError if it cannot, or is silent for too long."""
        worker = WorkerProcess(Wanted(question.request.label, python=python, log_file=Path(os.devnull)))
        with self.running.started(worker):
            deadline = Deadline(min(DESCRIBED_S, self.limits.load_s))
            return DESCRIBED.validate_python(worker.perform(question, deadline, lambda kind, content: None))

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
    return Hosts(Devices(usable), {**reading.load_settings().python, **(pythons or {})}, deadline_s, in_process()), said


@dataclass(frozen=True)
class Stoppable:
    """A watch that ends a download, or another long work of this process, once the run has been stopped."""

    watch: Watch
    running: Running

    def expect(self, total: int) -> None:
        self.watch.expect(total)

    def advance(self, amount: int = 1) -> None:
        self.running.check()
        self.watch.advance(amount)

    def say(self, text: str) -> None:
        self.watch.say(text)
