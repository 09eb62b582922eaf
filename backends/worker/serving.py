"""A worker's life: jobs in, messages out.  It loads a model, scores windows, commits their scores as they finish, and
says what ran; or it says what its Python has of an engine.
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
from typing import Any

from compare_q import backends
from compare_q.backends import hub
from compare_q.backends.base import Engine, EngineInfo, ModelFacts, PlannedModel, TokenScores, Window
from compare_q.backends.common import machine
from compare_q.backends.common.errors import CompareQError, InputError, ModelError
from compare_q.backends.common.messages import bytes_in_words, one_line, printable
from compare_q.backends.common.options import named_files, strings_in
from compare_q.backends.common.process import in_worker
from compare_q.backends.layers.groups import groups_to_json
from compare_q.backends.scoring import segments
from compare_q.backends.worker.messages import (
    CallCommand,
    Failed,
    InspectEngine,
    LoadCommand,
    Ready,
    Returned,
    ScoreCommand,
    Told,
    encoded,
    ending,
    parse_command,
    read_windows,
)

COMMIT_S = 2.0
"""Seconds of scoring that a killed worker may lose: a file for every 2 s, each of which takes about 1 ms to write."""
POLL_S = 0.5
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|cannot allocate memory|failed to allocate|No available memory for the cache blocks|"
    r"less than desired GPU memory utilization|DefaultCPUAllocator: can't allocate|unable to allocate",
    re.IGNORECASE,
)
"""What torch, CUDA, vLLM, llama.cpp and Python say."""
Send = Callable[[Any], None]


def serve(channel: Connection, asked: float, why: str = "") -> None:
    """Do every job that comes through the channel to the driver, until that closes it or sends an empty one.

    What goes wrong is a message.  ``asked``, ``why``: as of ``Server``.
    """
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:  # a download tells from threads of its own
            channel.send_bytes(encoded(message))

    os.register_at_fork(after_in_child=channel.close)  # an engine's forks would keep it open after this worker's end
    server = Server(asked, why)
    send(Ready(os.getpid(), machine.code()))
    with suppress(EOFError, ConnectionError):
        while job := channel.recv_bytes():
            server.perform(parse_command(job), send)
    server.close()


class Committer:
    """Collects the scores of finished windows, and writes them to a segment every ``COMMIT_S`` seconds."""

    def __init__(self, job: ScoreCommand, engine: Engine, windows: list[Window]) -> None:
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


class Server:
    """A worker, for which the driver has ``asked`` then, in seconds since 1970, and its model, if one is loaded.

    ``why``: why no worker can be forked from a process that has imported the engine, so that this one imports it for
    its model alone; else empty.  ``moments``: when what happened, in seconds since 1970, by the names of ``score``; for
    a second text they begin when the first one was done: it finds the model loaded, and waits for no load.
    """

    def __init__(self, asked: float, why: str = "") -> None:
        machine.keep_compiled_kernels_apart()
        self.asked, self.why = asked, why
        self.engine: Any = None
        self.moments: dict[str, float] = {}
        self.load_seconds = 0.0
        self.last: tuple[ScoreCommand, dict[str, Any]] | None = None  # with its record
        self.planned: PlannedModel | None = None  # the last one, for what is said of its memory

    def perform(self, job: Any, send: Send) -> None:
        """Do one job, whose last message is ``Returned`` or ``Failed``."""
        self.planned = getattr(job, "model", self.planned)
        try:
            outcome: Any = Returned(self._do(job, send))
        except Exception as error:
            reason = str(error) if isinstance(error, CompareQError) else f"{type(error).__name__}: {one_line(error)}"
            if not isinstance(error, CompareQError):  # a bug, in compare_q or in an engine
                os.write(2, traceback.format_exc().encode())
            advice = memory_advice(self.planned, error) if self.planned else ""
            outcome = Failed(advice or reason)
        send(outcome)

    def _do(self, job: Any, send: Send) -> Any:
        if isinstance(job, InspectEngine):
            return inspect(job.model).model_dump()
        if isinstance(job, CallCommand):
            module, _, name = job.function.partition(":")
            function = getattr(importlib.import_module(module), name)
            return function(lambda kind, content: send(Told(kind, content)), **job.arguments)
        if isinstance(job, LoadCommand):
            return self.load(job)
        assert self.engine is not None, "no model is loaded"
        return self.score(job, send)

    def load(self, job: LoadCommand) -> None:
        """Load a model on its GPUs; whatever an engine raises."""
        self.close()
        if job.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(job.devices)
        if job.share is not None:
            keep_to_share(*job.share)
        engine_class = backends.engine_class(job.model.engine)
        with suppress(Exception):  # what is wrong with it, loading says better
            engine_class.import_engine(verbose=job.model.log_file is None)
        machine.choose_mkl_kernels()
        self.engine = engine_class(job.model)
        self.engine.load()
        self.moments = {"started": self.asked, "loaded": time.time()}
        self.load_seconds = self.moments["loaded"] - self.asked

    def score(self, job: ScoreCommand, send: Send) -> None:
        """Do a job; CompareQError, or whatever an engine raises.  What was committed before an error stays.

        The session's record is written before the last windows are committed, so that scores of all windows are never
        there without a record.  When the engine was closed, ``close`` adds.
        """
        moments, windows = dict(self.moments), read_windows(job.windows)
        committer = Committer(job, self.engine, windows)
        moments["score_began"] = time.time()
        try:
            with watched(send):
                for scores in self.engine.score(windows, job.request):
                    moments["last_window"] = time.time()
                    moments.setdefault("first_window", moments["last_window"])
                    committer.add(scores)
                    send(Told("advance", 1))
        except BaseException:
            if committer.waiting and committer.windows:  # the last windows need the record first
                committer.commit()
            raise
        moments["closed"] = time.time()
        self.moments = dict.fromkeys(("started", "loaded"), moments["closed"])
        ran = {"provenance": self.what_ran(), "load_seconds": self.load_seconds, "moments": moments, **job.facts}
        segments.write_record(job.scores, job.session, ran)
        committer.commit()
        self.last = job, ran

    def what_ran(self) -> dict[str, Any]:
        """What an engine says of a run that has finished; what it cannot tell any more is a note and loses no score."""
        try:
            found = {**self.engine.provenance(), "layers": groups_to_json(self.engine.layers())}
        except Exception as error:  # whatever an engine raises when it is asked about itself
            found = {"notes": [f"what ran is not known: {type(error).__name__}: {one_line(error)}"]}
        alone = [f"its engine was imported for this model alone, since {self.why}"] if self.why else []
        return {**found, "notes": [*alone, *found.get("notes", ())]}

    def close(self) -> None:
        """Close the engine, if there is one, and note when; one that is stopped in the middle raises what it likes."""
        engine, self.engine = self.engine, None
        try:
            if engine is not None:
                engine.close()
        except Exception:
            os.write(2, traceback.format_exc().encode())
        if self.last is not None:
            (job, ran), self.last = self.last, None
            ran["moments"]["closed"] = time.time()
            segments.write_record(job.scores, job.session, ran)


def keep_to_share(number: int, count: int) -> None:
    """Compute on one of so many equal shares of the processors only, with a thread on each."""
    if count == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // count, 1)
    mine = cores[number * each : (number + 1) * each] or cores[-1:]
    os.sched_setaffinity(0, mine)
    os.environ["OMP_NUM_THREADS"] = str(each)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(each)


def inspect(model: PlannedModel) -> EngineInfo:
    """What this Python has of the model's engine, and why the model cannot run with it, if so."""
    engine = backends.engine_class(model.engine)
    capabilities = engine.capabilities
    installed = capabilities.installed()
    if installed is None:
        return EngineInfo()
    found: dict[str, Any] = {} if capabilities.here else {"facts": ModelFacts()}
    try:
        engine.check(model)
        if capabilities.here:
            check_pinned(model)
            if importlib.util.find_spec("torch") is None:
                raise InputError(f"load_fn: scoring needs torch, which {sys.executable} lacks")
        else:
            files = engine.files(model)
            found = {"facts": files.facts(), "stamp": files.stamp()}
        found["versions"] = {**engine.versions(), **named_files(model.options)}
    except InputError as error:
        found["problem"] = str(error)
    except ModelError as error:
        found["silence"] = str(error)
    return EngineInfo(installed=installed, cpu_only=capabilities.torch and machine.cpu_build_of_torch(), **found)


def check_pinned(model: PlannedModel) -> None:
    """InputError for an option that names a repository of the hub, whose content may change under its name."""
    for name, value in model.options.items():
        for each in filter(hub.is_hub_id, strings_in(value)):
            raise InputError(
                f"engine.{name}: {printable(each)} is no path here, and a repository on the hub may change; fetch it "
                "and give its folder, or owner/name@commit where the engine takes that"
            )


def memory_advice(model: PlannedModel, error: BaseException) -> str:
    """One line on an error that came of too little memory: what the model takes, what is free; empty for others."""
    if not (isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error))):
        return ""
    numbers = []
    with suppress(Exception):  # an error in finding numbers must not hide the one that they are for
        weights = backends.files_of(model).storage().vram_bits
        numbers += [f"its weights take {bytes_in_words(weights / 8)}"] if weights else []
    with suppress(Exception):
        cuda = sys.modules["torch"].cuda
        free, total = cuda.mem_get_info() if cuda.is_initialized() else (0, 0)
        numbers += [f"{bytes_in_words(free)} of the GPU's {bytes_in_words(total)} are free"] if total else []
    found = f" ({', '.join(numbers)})" if numbers else ""
    cure = "close what else uses it, give the model more GPUs, or shorten eval_len"
    return f"out of memory{found}: {cure}; the engine says: {one_line(error)}"


@contextmanager
def watched(send: Send) -> Iterator[None]:
    """In the block, a process that the engine had before and that dies is told, and ends this worker, whatever the
    engine waits for.

    Only a death by a signal counts, or an exit status other than 0: an engine may end its helpers.
    """
    children = multiprocessing.active_children()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            for child in children:
                if child.exitcode:
                    send(Failed(f"{child.name}, a process of its engine, {ending(child.exitcode)}"))
                    if in_worker():
                        os._exit(1)
                    return

    if children:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
