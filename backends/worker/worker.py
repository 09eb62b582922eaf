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
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ... import backends
from .. import hub
from ..base import (
    Engine,
    EngineInfo,
    ModelFacts,
    ModuleDifference,
    PlannedModel,
    TokenScores,
    Window,
)
from ..checkpoint import contents
from ..common import machine
from ..common.engine_options import content_of, named_files, strings_in
from ..common.errors import MEMORY_TOO_SMALL, CompareQError, InputError, ModelError
from ..common.message_text import bytes_in_words, one_line, printable, with_class
from ..common.process import ending, in_worker
from ..layers.groups import groups_to_json
from ..module_differences import differences_to_json
from ..reference.store import open_reference
from ..sampling import Continuations
from ..scoring import segments
from . import protocol
from .protocol import (
    CallCommand,
    Command,
    InspectEngine,
    LoadCommand,
    Message,
    OutputsCommand,
    PrepareCommand,
    ReferenceCommand,
    SampleCommand,
    ScoreCommand,
    TrialsCommand,
)
from .trial_committer import TrialCommitter

COMMIT_S = 2.0
"""Seconds of scoring that a killed worker may lose: one file every 2 s, written in about 1 ms."""
POLL_S = 0.5
ENDING_S = 10.0
"""Seconds, after a model has scored, that the process of an earlier model may still take to end.

A process that takes longer counts as another program's.
"""
ENDING_POLL_S = 0.2
SAMPLED_S = 1.0
"""Seconds of sampling between two messages of progress."""
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|cannot allocate memory|failed to allocate|"
    r"No available memory for the cache blocks|less than desired GPU memory utilization|"
    r"DefaultCPUAllocator: can't allocate|unable to allocate",
    re.IGNORECASE,
)
"""Messages of torch, CUDA, vLLM, llama.cpp and Python."""
Send = Callable[[Message], None]


def serve(channel: Connection, requested: float, import_note: str = "") -> None:
    """Perform commands from the channel until the driver closes it or sends an empty one.

    Arguments: see ``Worker``.
    """
    lock = threading.Lock()

    def send(message: Message) -> None:
        # Downloads report progress from their own threads.
        with lock:
            channel.send_bytes(protocol.encoded(message))

    # Forks of this process, such as vLLM's ranks, would keep the channel open after its end, and
    # the driver would not notice the end.
    os.register_at_fork(after_in_child=channel.close)
    worker = Worker(requested, import_note)
    send(protocol.Done({"pid": os.getpid(), "code": machine.code()}))
    with suppress(EOFError, ConnectionError):
        data = channel.recv_bytes()
        while data:
            worker.perform(protocol.parse_command(data), send)
            data = channel.recv_bytes()
    worker.close()


class Committer:
    """Collects the scores of windows, and writes them into a segment every ``COMMIT_S`` seconds.

    InputError if the reference that the windows are compared with cannot be opened.
    """

    def __init__(self, command: ScoreCommand, engine: Engine, windows: list[Window]) -> None:
        self.command = command
        self.engine = engine
        self.last_commit = time.perf_counter()
        self.scored_at: float | None = None  # when the last window of all had been scored
        self.windows = {window.index: window for window in windows}  # that have no scores yet
        self.recordings = recordings_of(command.request.reference, windows)
        self.waiting: list[tuple[Window, TokenScores]] = []

    def add(self, scores: TokenScores) -> None:
        """Add the scores of one window; call ``commit`` after the last window.

        The windows before this one may be written first.  This one waits for the next commit: the
        session's record has to be written before the last window of all (``Worker.score``).
        """
        if self.waiting and time.perf_counter() - self.last_commit >= COMMIT_S:
            self.commit()
        window = self.windows.pop(scores.window)
        self.waiting.append((window, scores))

    def stop_clock(self) -> None:
        """Count no more time as scoring: all windows have been scored."""
        self.scored_at = time.perf_counter()

    def commit(self) -> None:
        """Write the collected scores; ModelError if the engine's model has changed.

        If the model has changed since it was loaded, the scores are dropped.
        """
        try:
            self.engine.check_unchanged()
        except BaseException:
            # A caller may commit once more, and the second check may reach the right model by
            # chance.
            self.waiting = []
            raise
        command = self.command
        now = time.perf_counter()
        if self.scored_at is not None:
            now = self.scored_at
        seconds = now - self.last_commit
        segments.commit(
            command.scores, command.tag, self.waiting, command.session, seconds, self.recordings
        )
        self.waiting = []
        self.last_commit = now


def recordings_of(reference: Path | None, windows: list[Window]) -> dict[str, str]:
    """Return window digest -> its recording in a reference store; empty without a store."""
    if reference is None:
        return {}
    store = open_reference(reference)
    return {window.digest: store.recording(window.digest) for window in windows}


class Worker:
    """One worker and the model that it has loaded, if any; times are in seconds since 1970.

    ``requested``: when the driver requested the worker.  ``import_note``: why the worker imports
    its engine itself; empty if it is a fork of a process that has imported the engine.
    """

    def __init__(self, requested: float, import_note: str = "") -> None:
        machine.keep_compiled_kernels_apart()
        self.requested = requested
        self.import_note = import_note
        self.notes = list[str]()  # notes about the weights of the loaded model
        self.shared = ""  # the processes that used its GPUs before it loaded its model
        self.model: PlannedModel | None = None
        self.engine: Engine | None = None
        self.reference: Engine | None = None  # loaded beside the engine, for trials
        self.prepared_at: float | None = None  # None: the engine's model was not prepared
        self.moments: dict[str, float] = {}  # for a second text, without the moments of loading
        self.load_seconds = 0.0
        self.last: tuple[ScoreCommand, dict[str, Any]] | None = None  # with its record

    def perform(self, command: Command, send: Send) -> None:
        """Perform one command; the last message is ``Done`` or ``Failed``."""
        if isinstance(command, PrepareCommand | LoadCommand | InspectEngine):
            self.model = command.model
        # The model that an error is about.
        model = self.model
        if isinstance(command, ReferenceCommand):
            model = command.model
        value: Any = None
        try:
            if isinstance(command, PrepareCommand):
                self.prepare(command)
            elif isinstance(command, LoadCommand):
                self.load(command, send)
            elif isinstance(command, ScoreCommand):
                self.score(command, send)
            elif isinstance(command, InspectEngine):
                value = inspect(command.model).model_dump()
            elif isinstance(command, SampleCommand):
                value = self.sample(command, send)
            elif isinstance(command, ReferenceCommand):
                value = self.load_reference(command)
            elif isinstance(command, TrialsCommand):
                value = self.score_trials(command, send)
            elif isinstance(command, OutputsCommand):
                value = self.outputs(command, send)
            else:
                value = call(command, send)
        except Exception as error:
            send(protocol.Failed(self.failure(error, model)))
        else:
            send(protocol.Done(value))

    def failure(self, error: Exception, model: PlannedModel | None) -> str:
        """Return the reason of a failed command for the user; log the traceback of a bug.

        ``model``: the model that the command loads, or the loaded one.
        """
        reason = str(error)
        if not isinstance(error, CompareQError):  # a bug, in compare_q or in an engine
            os.write(2, traceback.format_exc().encode())
            if self.engine is None:
                reason = with_class(error)
            else:
                reason = self.engine.reason_of(error)
        memory_reason = out_of_memory(model, error, self.shared)
        if memory_reason:
            return memory_reason
        return reason

    def prepare(self, command: PrepareCommand) -> None:
        """Do the part of loading a model that needs no GPU, while another model has the GPUs.

        Nothing is done if the engine must still be imported, since the import may use a GPU.
        """
        if not self.import_note:
            self.close()
            self.engine, self.notes = checked_engine(command.model)
            self.engine.prepare_load()
            self.prepared_at = time.time()

    def load(self, command: LoadCommand, send: Send) -> None:
        """Load a model on its GPUs; first close the last model, unless this one was prepared."""
        model = command.model
        engine = None
        waited_s = 0.0
        if self.prepared_at is None:
            self.close()
        else:
            engine = self.engine
            waited_s = time.time() - self.prepared_at
            self.prepared_at = None
        if self.import_note:
            send(protocol.Log(f"{model.label}: {self.import_note}"))
        if command.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(command.devices)
            if command.users is not None:
                self.shared = command.users
            else:
                # Asked before this process uses the GPUs: afterwards it would be one of the users.
                self.shared = machine.gpu_users(command.devices)
        if command.share is not None:
            keep_to_share(*command.share)
        if engine is None:
            engine, self.notes = checked_engine(model)
        self.engine = engine
        engine.load()
        if command.windows is not None:
            windows = protocol.read_windows(command.windows)
            with watched_children(send):
                engine.warm_up(windows, command.request)
        self.moments = {"started": self.requested + waited_s, "loaded": time.time()}
        self.load_seconds = self.moments["loaded"] - self.moments["started"]

    def score(self, command: ScoreCommand, send: Send) -> None:
        """Score windows and commit their scores.  Scores committed before an error are kept.

        The session's record is written before the last windows are committed, so that complete
        scores always have it.
        """
        assert self.engine is not None, "no model is loaded"
        moments = dict(self.moments)
        windows = protocol.read_windows(command.windows)
        committer = Committer(command, self.engine, windows)
        moments["score_began"] = time.time()
        try:
            with watched_children(send):
                for scores in self.engine.score(windows, command.request):
                    moments["last_window"] = time.time()
                    moments.setdefault("first_window", moments["last_window"])
                    committer.add(scores)
                    send(protocol.Progress(1))
        except BaseException:
            # If no window is left, the scores are complete, and the record has to be written first.
            if committer.waiting and committer.windows:
                committer.commit()
            raise
        committer.stop_clock()
        moments["closed"] = time.time()
        # The next command finds the model loaded: it starts where this one ends.
        self.moments = dict.fromkeys(("started", "loaded"), moments["closed"])
        record: dict[str, Any] = {
            "provenance": what_ran(self.engine, self.notes),
            "load_seconds": self.load_seconds,
            "moments": moments,
            **command.facts,
        }
        gpu_users = self.other_gpu_users(command.n_on_gpus, command.n_ending)
        if gpu_users:
            record["shared_gpu"] = gpu_users
        segments.write_record(command.scores, command.session, record)
        committer.commit()
        self.last = command, record

    def sample(self, command: SampleCommand, send: Send) -> dict[str, Any]:
        """Return the tokens that the loaded model samples, and their log-probabilities."""
        assert self.engine is not None, "no model is loaded"
        continuations = Continuations(len(command.prompts), command.n_tokens)
        n_new = 0
        last_message = time.perf_counter()
        with watched_children(send):
            for token in self.engine.sample(command.prompts, command.n_tokens, command.seed):
                continuations.add(token)
                n_new += 1
                if time.perf_counter() - last_message >= SAMPLED_S:
                    send(protocol.Progress(n_new))
                    n_new = 0
                    last_message = time.perf_counter()
        send(protocol.Progress(n_new))
        continuations.check()
        self.engine.check_unchanged()
        return {"token_ids": continuations.token_ids, "logprobs": continuations.logprobs}

    def other_gpu_users(self, n_on_gpus: int, n_ending: int) -> str:
        """Return the processes that use this worker's GPUs, or used them before it loaded.

        After loading, this worker is one of the ``n_on_gpus`` processes of its run on its GPU.
        With several GPUs, the processes of its ranks cannot be distinguished from others: "" then.
        ``n_ending`` processes of other models of the run are awaited if they have not ended.
        """
        if self.shared:
            return self.shared
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if not in_worker() or len(gpus) > 1 or not gpus[0]:
            return ""
        users = machine.gpu_users(gpus, ours=n_on_gpus)
        deadline = time.monotonic() + ENDING_S
        while users and n_ending and time.monotonic() < deadline:
            time.sleep(ENDING_POLL_S)
            users = machine.gpu_users(gpus, ours=n_on_gpus)
        return users

    def load_reference(self, command: ReferenceCommand) -> list[dict[str, Any]]:
        """Load a reference beside the model; return the modules that can be exchanged."""
        assert self.engine is not None, "no model is loaded"
        self.close_reference()
        reference, _ = checked_engine(command.model)
        self.reference = reference
        reference.load()
        return [asdict(module) for module in self.engine.exchangeable(reference)]

    def score_trials(self, command: TrialsCommand, send: Send) -> dict[str, Any]:
        """Score trials and append their scores to a file; return what ran.

        Scores before an error are kept.
        """
        assert self.engine is not None, "no model is loaded"
        assert self.reference is not None, "no reference is loaded"
        windows = protocol.read_windows(command.windows)
        engines = (self.engine, self.reference)
        committer = TrialCommitter(command.scores, engines, command.trials, windows)
        try:
            with watched_children(send):
                for score in self.engine.trials(self.reference, windows, command.trials):
                    committer.add(score, COMMIT_S)
                    send(protocol.Progress(1))
        finally:
            committer.commit()
        return what_ran(self.engine, self.notes)

    def outputs(self, command: OutputsCommand, send: Send) -> list[list[Any]]:
        """Record the outputs of the model's modules, or return their differences, per window."""
        assert self.engine is not None, "no model is loaded"
        windows = protocol.read_windows(command.windows)
        differences = []
        with watched_children(send):
            for window, file in zip(windows, command.files, strict=True):
                differences_of_window: list[ModuleDifference] = []
                if command.compare:
                    differences_of_window = self.engine.compare_outputs(window, file)
                else:
                    self.engine.record_outputs(window, file)
                differences.append(differences_to_json(differences_of_window))
                send(protocol.Progress(1))
        self.engine.check_unchanged()
        return differences

    def close_reference(self) -> None:
        """Close the reference, if one is loaded."""
        reference = self.reference
        self.reference = None
        closed(reference)

    def close(self) -> None:
        """Close the engine and the reference, if they are loaded, and record the time."""
        self.close_reference()
        engine = self.engine
        self.engine = None
        closed(engine)
        if self.last is not None:
            command, record = self.last
            self.last = None
            record["moments"]["closed"] = time.time()
            segments.write_record(command.scores, command.session, record)


def checked_engine(model: PlannedModel) -> tuple[Engine, list[str]]:
    """Return the engine of a model whose files were checked, and notes about its weights.

    ModelError if the files are wrong.
    """
    engine_class = backends.engine_class(model.engine)
    with suppress(Exception):  # loading reports the same error more clearly
        engine_class.import_engine(verbose=model.log_file is None)
    machine.choose_mkl_kernels()
    notes = contents.checked(engine_class.files_of(model))
    fault = engine_class.misreads(model)
    if fault:
        raise ModelError(fault)
    return engine_class(model), notes


def closed(engine: Engine | None) -> None:
    """Close an engine, if there is one.

    Errors are logged: an interrupted engine may fail to close.
    """
    try:
        if engine is not None:
            engine.close()
    except Exception:
        os.write(2, traceback.format_exc().encode())


def call(command: CallCommand, send: Send) -> Any:
    """Return the value of the function that a command names."""
    module_name, _, name = command.function.partition(":")
    function = getattr(importlib.import_module(module_name), name)
    return function(send, **command.arguments)


def what_ran(engine: Engine, notes: list[str]) -> dict[str, Any]:
    """Return the provenance, with further ``notes``, and layers of a finished run.

    If the engine fails to report them, only the notes are returned: the scores are kept.
    """
    try:
        provenance = engine.provenance()
        return {
            **provenance,
            "notes": [*notes, *provenance.get("notes", ())],
            "layers": groups_to_json(engine.layers()),
        }
    except Exception as error:
        return {"notes": [*notes, f"what ran is not known: {with_class(error)}"]}


def keep_to_share(number: int, count: int) -> None:
    """Restrict this process to share ``number`` of ``count`` equal shares of the processors.

    The process gets one thread per processor of its share.
    """
    if count <= 1 or not hasattr(os, "sched_setaffinity"):
        return
    processors = sorted(os.sched_getaffinity(0))
    size = max(len(processors) // count, 1)
    share = processors[number * size : (number + 1) * size]
    if not share:  # more shares than processors
        share = processors[-1:]
    os.sched_setaffinity(0, share)
    os.environ["OMP_NUM_THREADS"] = str(size)
    torch = sys.modules.get("torch")
    if torch is not None:  # OpenMP has read the variable when torch was imported
        torch.set_num_threads(size)


def refusal(_: Any, *, model: dict[str, Any]) -> str:
    """Return ``Engine.refusal`` of a model, which is given as JSON types."""
    planned = PlannedModel.model_validate(model)
    return backends.engine_class(planned.engine).refusal(planned)


def inspect(model: PlannedModel) -> EngineInfo:
    """Return the model's engine as installed in this Python.

    The result also has the reason why the model cannot run with the engine, if there is one.
    """
    engine = backends.engine_class(model.engine)
    capabilities = engine.capabilities
    installed = capabilities.installed()
    if installed is None:
        return EngineInfo()
    info_fields: dict[str, Any] = {}
    if not capabilities.here:
        # ``EngineInfo.facts`` marks a model on a server.  The facts are unknown until it answers.
        info_fields["facts"] = ModelFacts()
    try:
        engine.check(model)
        if capabilities.here:
            check_fixed_options(model)
            if importlib.util.find_spec("torch") is None:
                raise InputError(f"load_fn: scoring needs torch, which {sys.executable} lacks")
        else:
            files = engine.files_of(model)
            facts = files.facts()
            stamp = files.stamp()
            info_fields["facts"] = facts
            info_fields["stamp"] = stamp
        source_digest = digest_of_source(engine, model.engine)
        info_fields["versions"] = {
            **engine.versions(),
            **source_digest,
            **named_files(model.options),
        }
    except InputError as error:
        info_fields["problem"] = str(error)
    except ModelError as error:
        info_fields["unreachable"] = str(error)
    cpu_only = capabilities.torch and machine.cpu_build_of_torch()
    return EngineInfo(installed=installed, cpu_only=cpu_only, **info_fields)


def check_fixed_options(model: PlannedModel) -> None:
    """InputError if an option names a repository on the hub, whose content may change."""
    for name, value in model.options.items():
        for text in strings_in(value):
            if hub.is_hub_id(text):
                raise InputError(
                    f"engine.{name}: {printable(text)} is no path here, and a repository on the "
                    "hub may change; fetch it and give its folder, or owner/name@commit where the "
                    "engine takes that"
                )


def digest_of_source(engine: type[Engine], name: str) -> dict[str, str]:
    """Return module -> digest of its file for an engine outside compare_q, as part of its key.

    Empty for compare_q's engines.
    """
    source = sys.modules[engine.__module__].__file__
    if name in backends.ENGINES or not source:
        return {}
    return {engine.__module__: content_of(Path(source))}


def out_of_memory(model: PlannedModel | None, error: BaseException, shared: str) -> str:
    """Return a line with sizes about an out-of-memory error; empty for other errors.

    ``shared``: the processes that used the GPUs before the model was loaded.
    """
    if model is None or not (isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error))):
        return ""
    numbers = []
    # A failure here must not hide the error itself.
    with suppress(Exception):
        weights = backends.files_of(model).storage().vram_bits
        if weights:
            numbers.append(f"its weights take {bytes_in_words(weights / 8)}")
    with suppress(Exception):
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized():
            free, total = cuda.mem_get_info()
            numbers.append(f"{bytes_in_words(free)} of the GPU's {bytes_in_words(total)} are free")
    if shared:
        numbers.append(f"before it loaded, {shared} used the GPU")
    sizes = ""
    if numbers:
        sizes = f" ({', '.join(numbers)})"
    advice = "close what else uses it, give the model more GPUs, or shorten eval_len"
    return f"{MEMORY_TOO_SMALL}{sizes}: {advice}; the engine says: {one_line(error)}"


@contextmanager
def watched_children(send: Send) -> Iterator[None]:
    """End this worker, after a ``Failed``, if a process of its engine dies in the block.

    The engine would wait for the process.  Exit status 0 does not count: an engine may end its
    helpers.
    """
    children = multiprocessing.active_children()
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(POLL_S):
            for child in children:
                if child.exitcode:
                    end = ending(child.exitcode)
                    send(protocol.Failed(f"{child.name}, a process of its engine, {end}"))
                    # In the driver's own process, an exit would end the whole run.
                    if in_worker():
                        os._exit(1)
                    return

    if children:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        finished.set()
