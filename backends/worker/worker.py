"""A worker: it performs the driver's commands one after the other, and sends messages.

It loads a model, scores windows, and commits the scores of finished windows.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compare_q import backends
from compare_q.backends import hub
from compare_q.backends.base import Engine, EngineInfo, ModelFacts, PlannedModel, TokenScores, Window
from compare_q.backends.checkpoint import contents
from compare_q.backends.common import machine
from compare_q.backends.common.errors import CompareQError, InputError, ModelError
from compare_q.backends.common.messages import bytes_in_words, one_line, printable, with_class
from compare_q.backends.common.options import content_of, named_files, strings_in
from compare_q.backends.common.process import ending, in_worker
from compare_q.backends.layers.groups import groups_to_json
from compare_q.backends.reference.store import open_reference
from compare_q.backends.scoring import segments
from compare_q.backends.worker import messages
from compare_q.backends.worker.messages import Command, LoadCommand, Message, ScoreCommand

COMMIT_S = 2.0
"""Seconds of scoring that a killed worker may lose: one file every 2 s, written in about 1 ms."""
POLL_S = 0.5
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|cannot allocate memory|failed to allocate|No available memory for the cache blocks|"
    r"less than desired GPU memory utilization|DefaultCPUAllocator: can't allocate|unable to allocate",
    re.IGNORECASE,
)
"""Messages of torch, CUDA, vLLM, llama.cpp and Python."""
Send = Callable[[Message], None]


def serve(channel: Connection, requested: float, alone: str = "") -> None:
    """Perform commands from the channel until the driver closes it or sends an empty one (arguments: ``Worker``)."""
    lock = threading.Lock()

    def send(message: Message) -> None:
        with lock:  # downloads report progress from their own threads
            channel.send_bytes(messages.encoded(message))

    os.register_at_fork(after_in_child=channel.close)  # an engine's forks would keep it open after this worker's end
    worker = Worker(requested, alone)
    send(messages.Done({"pid": os.getpid(), "code": machine.code()}))
    with suppress(EOFError, ConnectionError):
        while data := channel.recv_bytes():
            worker.perform(messages.parse_command(data), send)
    worker.close()


class Committer:
    """Collects the scores of finished windows, and writes them into a segment every ``COMMIT_S`` seconds.

    InputError if the reference that the windows are compared with cannot be opened.
    """

    def __init__(self, command: ScoreCommand, engine: Engine, windows: list[Window]) -> None:
        self.command = command
        self.engine = engine
        self.last = time.perf_counter()
        self.windows = {window.index: window for window in windows}
        self.recordings = recordings_of(command.request.reference, windows)
        self.waiting: list[tuple[Window, TokenScores]] = []

    def add(self, scores: TokenScores) -> None:
        """Add the scores of one window; only ``commit`` writes those of the last window."""
        if self.waiting and time.perf_counter() - self.last >= COMMIT_S:
            self.commit()
        self.waiting.append((self.windows.pop(scores.window), scores))

    def commit(self) -> None:
        """Write the collected scores; ModelError if the engine's model has changed since it was loaded.

        If it has changed, the scores are dropped, because a second check may reach the right model by chance.
        """
        try:
            self.engine.check_unchanged()
        except BaseException:
            self.waiting = []
            raise
        command = self.command
        now = time.perf_counter()
        seconds = now - self.last
        segments.commit(command.scores, command.tag, self.waiting, command.session, seconds, self.recordings)
        self.waiting = []
        self.last = now


def recordings_of(reference: Path | None, windows: list[Window]) -> dict[str, str]:
    """Return the recordings of the windows in a reference store, by the windows' digests; empty without a store."""
    if reference is None:
        return {}
    opened = open_reference(reference)
    return {window.digest: opened.recording(window.digest) for window in windows}


class Worker:
    """One worker and the model that it has loaded, if any; times are in seconds since 1970.

    ``requested``: when the driver requested the worker.  ``alone``: why the worker imports its engine itself; empty if
    it is a fork of a process that has imported the engine.
    """

    def __init__(self, requested: float, alone: str = "") -> None:
        machine.keep_compiled_kernels_apart()
        self.requested, self.alone = requested, alone
        self.notes = list[str]()  # notes about the weights of the loaded model
        self.shared = ""  # the processes that used its GPUs before it loaded its model
        self.model: PlannedModel | None = None
        self.engine: Engine | None = None
        self.moments: dict[str, float] = {}  # for a second text, without the moments of loading
        self.load_seconds = 0.0
        self.last: tuple[ScoreCommand, dict[str, Any]] | None = None  # with its record

    def perform(self, command: Command, send: Send) -> None:
        """Perform one command; the last message is ``Done`` or ``Failed``."""
        self.model = getattr(command, "model", self.model)
        value: Any = None
        try:
            if isinstance(command, LoadCommand):
                self.load(command, send)
            elif isinstance(command, ScoreCommand):
                self.score(command, send)
            elif isinstance(command, messages.InspectEngine):
                value = inspect(command.model).model_dump()
            else:
                module, _, name = command.function.partition(":")
                value = getattr(importlib.import_module(module), name)(send, **command.arguments)
        except Exception as error:
            reason = str(error)
            if not isinstance(error, CompareQError):  # a bug, in compare_q or in an engine
                os.write(2, traceback.format_exc().encode())
                reason = self.engine.explained(error) if self.engine else with_class(error)
            send(messages.Failed(out_of_memory(self.model, error, self.shared) or reason))
        else:
            send(messages.Done(value))

    def load(self, command: LoadCommand, send: Send) -> None:
        """Close the last model, and load a model on its GPUs."""
        self.close()
        model = command.model
        if self.alone:
            send(messages.Log(f"{model.label}: {self.alone}"))
        if command.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(command.devices)
            self.shared = machine.gpu_users(command.devices)
        if command.share is not None:
            keep_to_share(*command.share)
        engine_class = backends.engine_class(model.engine)
        with suppress(Exception):  # loading reports the same error more clearly
            engine_class.import_engine(verbose=model.log_file is None)
        machine.choose_mkl_kernels()
        self.notes = contents.checked(engine_class.files(model))
        if fault := engine_class.misreads(model):
            raise ModelError(fault)
        self.engine = engine_class(model)
        self.engine.load()
        self.moments = {"started": self.requested, "loaded": time.time()}
        self.load_seconds = self.moments["loaded"] - self.requested

    def score(self, command: ScoreCommand, send: Send) -> None:
        """Score windows and commit their scores.  Scores committed before an error are kept.

        The session's record is written before the last windows are committed, so that complete scores always have it.
        """
        assert self.engine is not None, "no model is loaded"
        moments, windows = dict(self.moments), messages.read_windows(command.windows)
        committer = Committer(command, self.engine, windows)
        moments["score_began"] = time.time()
        try:
            with watched_children(send):
                for scores in self.engine.score(windows, command.request):
                    moments["last_window"] = time.time()
                    moments.setdefault("first_window", moments["last_window"])
                    committer.add(scores)
                    send(messages.Progress(1))
        except BaseException:
            if committer.waiting and committer.windows:  # the last windows need the record first
                committer.commit()
            raise
        moments["closed"] = time.time()
        self.moments = dict.fromkeys(("started", "loaded"), moments["closed"])
        ran = {"provenance": what_ran(self.engine, self.notes), "load_seconds": self.load_seconds, "moments": moments}
        record = {**ran, **command.facts}
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        one_gpu = in_worker() and len(gpus) == 1 and gpus[0]
        if shared := self.shared or (machine.gpu_users(gpus, ours=1) if one_gpu else ""):
            record["shared_gpu"] = shared
        segments.write_record(command.scores, command.session, record)
        committer.commit()
        self.last = command, record

    def close(self) -> None:
        """Close the engine, if one is loaded, and record the time; errors of an interrupted engine are logged."""
        engine, self.engine = self.engine, None
        try:
            if engine is not None:
                engine.close()
        except Exception:
            os.write(2, traceback.format_exc().encode())
        if self.last is not None:
            (command, record), self.last = self.last, None
            record["moments"]["closed"] = time.time()
            segments.write_record(command.scores, command.session, record)


def what_ran(engine: Engine, notes: list[str]) -> dict[str, Any]:
    """Return the provenance, with further ``notes``, and layers of a finished run; a note if the engine fails."""
    try:
        found = engine.provenance()
        return {**found, "notes": [*notes, *found.get("notes", ())], "layers": groups_to_json(engine.layers())}
    except Exception as error:
        return {"notes": [*notes, f"what ran is not known: {with_class(error)}"]}


def keep_to_share(number: int, count: int) -> None:
    """Restrict this process to share ``number`` of ``count`` equal shares of the processors, one thread on each."""
    if count > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        each = max(len(cores) // count, 1)
        os.sched_setaffinity(0, cores[number * each : (number + 1) * each] or cores[-1:])
        os.environ["OMP_NUM_THREADS"] = str(each)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(each)


def refusal(_: Any, *, model: dict[str, Any]) -> str:
    """Return ``Engine.refusal`` of a model, which is given as JSON types."""
    planned = PlannedModel.model_validate(model)
    return backends.engine_class(planned.engine).refusal(planned)


def inspect(model: PlannedModel) -> EngineInfo:
    """Return the model's engine as installed in this Python, and why the model cannot run with it, if so."""
    engine = backends.engine_class(model.engine)
    capabilities = engine.capabilities
    installed = capabilities.installed()
    if installed is None:
        return EngineInfo()
    found: dict[str, Any] = {} if capabilities.here else {"facts": ModelFacts()}
    try:
        engine.check(model)
        if capabilities.here:
            for name, value in model.options.items():
                for each in filter(hub.is_hub_id, strings_in(value)):
                    raise InputError(
                        f"engine.{name}: {printable(each)} is no path here, and a repository on the hub may change; "
                        "fetch it and give its folder, or owner/name@commit where the engine takes that"
                    )
            if importlib.util.find_spec("torch") is None:
                raise InputError(f"load_fn: scoring needs torch, which {sys.executable} lacks")
        else:
            files = engine.files(model)
            found = {"facts": files.facts(), "stamp": files.stamp()}
        source = sys.modules[engine.__module__].__file__  # part of the key for an engine outside compare_q
        own = {} if model.engine in backends.ENGINES or not source else {engine.__module__: content_of(Path(source))}
        found["versions"] = {**engine.versions(), **own, **named_files(model.options)}
    except InputError as error:
        found["problem"] = str(error)
    except ModelError as error:
        found["silence"] = str(error)
    return EngineInfo(installed=installed, cpu_only=capabilities.torch and machine.cpu_build_of_torch(), **found)


def out_of_memory(model: PlannedModel | None, error: BaseException, shared: str) -> str:
    """Return a line with sizes about an out-of-memory error; empty for other errors (``shared``: see Worker)."""
    if model is None or not (isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error))):
        return ""
    numbers = []
    with suppress(Exception):  # a failure here must not hide the error itself
        if weights := backends.files_of(model).storage().vram_bits:
            numbers.append(f"its weights take {bytes_in_words(weights / 8)}")
    with suppress(Exception):
        if (cuda := sys.modules["torch"].cuda).is_initialized():
            numbers.append("{} of the GPU's {} are free".format(*map(bytes_in_words, cuda.mem_get_info())))
    numbers += [f"before it loaded, {shared} used the GPU"] if shared else []
    found = f" ({', '.join(numbers)})" if numbers else ""
    advice = "close what else uses it, give the model more GPUs, or shorten eval_len"
    return f"out of memory{found}: {advice}; the engine says: {one_line(error)}"


@contextmanager
def watched_children(send: Send) -> Iterator[None]:
    """End this worker, after a ``Failed``, if a process of its engine dies in the block while the engine waits for it.

    Exit status 0 does not count: an engine may end its helpers.
    """
    children = multiprocessing.active_children()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            for child in children:
                if child.exitcode:
                    send(messages.Failed(f"{child.name}, a process of its engine, {ending(child.exitcode)}"))
                    if in_worker():
                        os._exit(1)
                    return

    if children:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
