"""Start, inspect and stop workers, which load and score one model each.

``WorkerProcess`` (``eval/common/processes.py``) is a process of this machine; ``eval/cluster.py``
has workers on nodes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from ...backends.base import EngineInfo, ModelFacts, PlannedModel
from ...backends.common import machine
from ...backends.common.errors import InputError, ModelError, StoppedError
from ...backends.common.json_files import expanded
from ...backends.common.machine import Gpu
from ...backends.common.process import captured
from ...backends.hub import Watch
from ...backends.worker import worker as worker_side
from ...backends.worker.engine_process import ENDING
from ...backends.worker.protocol import CallCommand, InspectEngine
from ..common.processes import PROCESSES, WorkerProcess, in_process, result_of
from ..common.progress import Show
from .gpu_pool import GpuPool
from .run_model import RunModel

AGAIN_S = 1.0
"""Seconds after which the same signal interrupts once more, if the run has not been stopped yet."""


class Worker(Protocol):
    """One worker of one model, which performs commands one after the other.

    The commands are those of ``backends/worker/protocol.py``.  Paths in commands are paths on the
    driver's machine.  A worker on another machine copies the windows and the reference store from
    there, and copies its segments and its recorded reference back.
    """

    def perform(self, job: Any, silence_s: float, show: Show) -> Any:
        """Return what the command returns; call ``show`` with each message on the way.

        ModelError if it fails, if the worker dies, or if nothing comes from it for ``silence_s``
        seconds.  LostWorkerError if its machine is gone.  StoppedError if it was killed by
        ``kill``.
        """

    def kill(self) -> None:
        """End the worker and all processes of its engine at once.

        May be called from any thread, and twice.
        """

    def close(self) -> None:
        """Let the worker end, and wait until no process of it is left.

        Always called last, also after ``kill``.
        """


class InProcessWorker:
    """A worker in the driver's own process, for debugging and tests: one model at a time.

    Its messages are shown when a command has ended.  ``close`` restores the environment, because
    variables that an engine sets would change the keys of later models.
    """

    def __init__(self, model: PlannedModel) -> None:
        self.log_file = model.log_file
        self.environment = dict(os.environ)
        os.environ.update(machine.DEFAULTS | self.environment)
        self.server = worker_side.Worker(time.time())

    def perform(self, job: Any, silence_s: float, show: Show) -> Any:
        messages: list[Any] = []
        with captured(self.log_file):
            self.server.perform(job, messages.append)
        return result_of(iter(messages), show)

    def kill(self) -> None:
        """Do nothing: the driver's own process cannot be ended."""

    def close(self) -> None:
        with captured(self.log_file):
            self.server.close()
        os.environ.clear()
        os.environ.update(self.environment)


class SameThreadExecutor(Executor):
    """An executor that calls each function when it is submitted, in this thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **keys: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **keys))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Hardware:
    """The hardware that a model runs on; all of it is part of the scores' key.

    ``gpus``: GPUs of one machine; ``processor``, ``settings``: what ``machine`` returns there.
    """

    gpus: tuple[Gpu, ...]
    processor: Mapping[str, Any]
    settings: Mapping[str, str]

    def most_replicas(self, n_gpus: int) -> int | None:
        """Return how many replicas of ``n_gpus`` GPUs can run at the same time.

        None for any number.
        """
        if not n_gpus:
            return None
        return len(self.gpus) // n_gpus


class Workers:
    """The workers of a run on this machine.

    ``pythons``: engine or load_fn -> the Python that runs it; ``inspect_s``: seconds in which it
    must report its engine's versions, and a server its model; ``in_process``: engines run in this
    process.  A subclass for another place overrides ``create``, ``inspect`` and ``import_ahead``,
    and is not ``is_local``.
    """

    is_local = True

    def __init__(
        self,
        pythons: Mapping[str, str] | None = None,
        gpus: GpuPool | None = None,
        inspect_s: float = 600.0,
    ) -> None:
        self.pythons = dict(pythons or {})
        self.gpus = gpus or GpuPool()
        self.inspect_s = inspect_s
        self.in_process = in_process()
        self.running: set[Worker] = set()
        self.stopped = threading.Event()
        self.lock = threading.Lock()

    def create(self, model: RunModel) -> Worker:
        """Return a new worker, which prints into the model's ``log_file``."""
        if self.in_process:
            return InProcessWorker(model.planned)
        file = model.planned.log_file
        return WorkerProcess(
            model.python, model.engine, self.gpus.names, log_file=file, verbose=file is None
        )

    def inspect(self, model: RunModel) -> tuple[EngineInfo, Hardware]:
        """Return the engine's versions in the model's Python, and the hardware of this machine.

        InputError if that Python cannot run workers.  A separate worker sends requests to a server,
        since it may never answer; ``EngineInfo.unreachable`` is the reason if it did not.
        """
        hardware = Hardware(self.gpus.gpus, machine.processor(), machine.settings())
        is_on_server = not model.capabilities.here
        if model.python is None and (self.in_process or not is_on_server):
            return worker_side.inspect(model.planned), hardware
        try:
            return self.inspect_in_worker(model.planned, model.python), hardware
        except ModelError as error:
            if not is_on_server:
                raise InputError(python_problem(model, error)) from None
            info = EngineInfo(installed=("", ""), facts=ModelFacts(), unreachable=str(error))
            return info, hardware

    def inspect_in_worker(self, planned: PlannedModel, python: str | None) -> EngineInfo:
        """Return the facts about a model's engine that a worker in a Python finds.

        ModelError if it fails.
        """
        # This worker imports no engine.
        with self.started(lambda: WorkerProcess(python)) as worker:
            command = InspectEngine(planned)
            answer = worker.perform(command, self.inspect_s, show_nothing)
            return EngineInfo.model_validate(answer)

    def refusal(self, model: RunModel) -> str:
        """Return why the engine's own checks of the config would refuse the model.

        Empty if they accept it.
        """
        if not self.can_refuse(model):
            return ""
        function = f"{worker_side.__name__}:{worker_side.refusal.__name__}"
        command = CallCommand(function, {"model": model.planned.model_dump(mode="json")})
        silent_model = model.with_planned(log_file=Path(os.devnull))
        with self.started(lambda: self.create(silent_model)) as worker:
            return str(worker.perform(command, self.inspect_s, show_nothing))

    def can_refuse(self, model: RunModel) -> bool:
        """Return True if the model's engine checks configs, and is on this machine."""
        return self.is_local and model.capabilities.refuses

    def import_for_refusal(self, model: RunModel) -> None:
        """Start to import the engine that ``refusal`` will ask, if there is one."""
        if self.can_refuse(model):
            self.start_import(model.engine, model.python, verbose=False)

    def import_ahead(self, model: RunModel, *, verbose: bool) -> None:
        """Start to import a model's engine, so that its worker need not wait for the import."""
        self.start_import(model.engine, model.python, verbose=verbose)

    def start_import(self, engine: str, python: str | None, *, verbose: bool) -> None:
        """Start to import an engine in a Python on this machine.

        Nothing is started if engines run in this process.
        The calling thread must live until the import has ended: the system ends a process that a
        thread has started when that thread ends (``backends/common/process.py``).
        """
        if self.in_process:
            return
        # Starting the worker reports the error.
        with suppress(InputError):
            PROCESSES.get(python or sys.executable, engine, self.gpus.names, verbose=verbose)

    def pool(self, threads: int) -> Executor:
        """Return an executor for work that is done at the same time.

        In this process, it is done one after the other.
        """
        if self.in_process:
            return SameThreadExecutor()
        return ThreadPoolExecutor(threads)

    @contextmanager
    def started(self, create: Callable[[], Worker]) -> Iterator[Worker]:
        """Run the block with a new worker, which is ended in any case.

        StoppedError if the run was stopped.
        """
        # Under the lock, so that ``stop`` ends each worker that has started.
        with self.lock:
            self.check()
            worker = create()
            self.running.add(worker)
        try:
            yield worker
        except BaseException:
            worker.kill()
            raise
        finally:
            self.running.discard(worker)
            worker.close()

    def stop(self) -> None:
        """End every worker at once; none starts from now on."""
        with self.lock:
            self.stopped.set()
            for worker in list(self.running):
                worker.kill()

    def check(self) -> None:
        """StoppedError if the run was stopped; long work of the driver calls it again and again."""
        if self.stopped.is_set():
            raise StoppedError()

    def stoppable(self, watch: Watch) -> Any:
        """Return a ``Watch`` like ``watch``, whose ``advance`` also calls ``check``."""

        def advance(amount: int = 1) -> None:
            self.check()
            watch.advance(amount)

        return SimpleNamespace(expect=watch.expect, advance=advance, say=watch.say)

    def python(self, of_spec: str | None, engine: str, load_fn: str) -> str | None:
        """Return the Python that runs a model.

        It is its spec's, its engine's in the settings, or None for this one.  A virtual environment
        may be given by its folder.  InputError if it is not a program.
        """
        name = of_spec or self.pythons.get(load_fn) or self.pythons.get(engine)
        if name is None:
            return None
        path = expanded(name)
        if path.is_dir():
            path = path / "bin" / "python"
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise InputError(
                f"python: {name}: not a program; give a Python, or the folder of a virtual "
                "environment"
            )
        return os.path.abspath(path)


def show_nothing(message: Any) -> None:
    """Ignore a worker's message."""


def python_problem(model: RunModel, error: ModelError) -> str:
    """Return why a Python cannot inspect a model's engine."""
    # The worker's own message about its Python names it.
    if str(error).startswith("python: "):
        return str(error)
    return (
        f"python: {model.python}: {error}; "
        "give a Python that has the engine, or the folder of its virtual environment"
    )


class InterruptedRun(KeyboardInterrupt):
    """A signal that asks a run to end; ``signal`` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


@contextmanager
def signals_interrupt(workers: Workers) -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the block as Ctrl-C does.

    Not if this process ignores them (nohup).  Only the first signal interrupts, until the process
    ends: a second interrupt could leave threading's locks in a wrong state, and the finished rows
    are still to be shown.  The same signal interrupts once more after ``AGAIN_S`` if the run has
    not been stopped, because Python drops exceptions that are raised while it deletes an object.
    """
    first_signal = 0
    time_of_first = 0.0

    def interrupt(number: int, _: Any) -> None:
        nonlocal first_signal, time_of_first
        now = time.monotonic()
        was_dropped = (
            number == first_signal
            and now > time_of_first + AGAIN_S
            and not workers.stopped.is_set()
        )
        if not first_signal or was_dropped:
            first_signal = number
            time_of_first = now
            raise InterruptedRun(number)

    handlers_before = {}
    for number in ENDING:
        # None: the handler was not set by Python.
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            handlers_before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            if first_signal:
                # While Python ends, our handler would kill the process.
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, handler)
