"""The workers of one model: they load it, each on its GPUs, and score its windows together."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from ...backends.base import ScoreRequest, Window
from ...backends.common import storage
from ...backends.common.errors import InputError, LostWorkerError, ModelError
from ...backends.reference import store
from ...backends.scoring import segments
from ...backends.worker.protocol import (
    LoadCommand,
    PrepareCommand,
    ScoreCommand,
    write_windows,
)
from ..common.progress import Show
from . import reference
from .gpu_pool import TakenGpus, Turn
from .reference import Reference
from .run_scoring import Scoring
from .score_gap import Gap
from .score_target import ScoreTarget
from .workers import Worker, show_nothing

MOST_LOST = 3
"""Workers of one model that may be lost with their machines.

A fourth loss is more likely caused by the model.
"""


class ModelWorkers:
    """The workers of one model on its GPUs.

    They start, and load the model, before the first scoring.  If the GPUs are not free yet, they
    may start earlier and prepare the load.
    """

    # Set by ``score``.
    gpus: TakenGpus

    def __init__(self, scoring: Scoring, target: ScoreTarget) -> None:
        self.config = scoring.config
        self.data = scoring.data
        self.title = scoring.title_of(target.model)
        self.target = target
        self.model = target.model
        self.workers: list[Worker] = []
        self.is_loaded = False
        # Closes the workers.
        self.open_workers = ExitStack()

    def close(self) -> None:
        """Let all workers end."""
        self.workers = []
        self.is_loaded = False
        self.open_workers.close()

    def end(self) -> None:
        """End all workers at once."""
        for worker in self.workers:
            worker.kill()
        self.close()

    def prepare(self) -> None:
        """Start the workers, and let them do what loading needs no GPU for.

        ModelError if the model fails.
        """
        self.start()
        commands = [PrepareCommand(self.model.planned)] * self.model.replicas
        self.perform(commands, self.config.load_timeout_s, show_nothing)

    def score(self, gap: Gap, gpus: TakenGpus) -> str:
        """Score the windows of a gap, split among the workers, and record those for the store.

        ``gpus``: of all workers.  If the machine of a worker is lost, new workers continue.  Return
        why the windows could not be recorded, or "" if they were.  ModelError if the model fails;
        committed scores stay.
        """
        self.gpus = gpus
        config = self.config
        config.cache.check_writable()
        to_score = gap.to_score
        to_record = gap.to_record
        target_store = self.target.store
        store_failure = ""
        n_lost = 0
        while True:
            try:
                if target_store is None or not to_record:
                    self.score_windows(to_score, ScoreRequest())
                else:
                    self.record(target_store, to_score, to_record)
                return store_failure
            except LostWorkerError as lost:
                self.end()
                n_lost += 1
                if n_lost > MOST_LOST:
                    raise ModelError(
                        f"{lost}, as {MOST_LOST} workers of this model before"
                    ) from None
                config.progress.say(
                    f"{self.model.label}: {lost}; what is not kept of it is scored again"
                )
                to_score = to_score - self.committed()
            except (InputError, ModelError) as error:
                if target_store is None or not to_record or storage.NOT_KEPT not in str(error):
                    raise
                # Without a store there may be room for the scores.
                self.end()
                store_failure = reference.abandon(config, target_store, to_record, error)
                config.progress.say(f"{self.model.label}: {store_failure}; it is scored without")
                to_record = frozenset()
                to_score = to_score - self.committed()

    def committed(self) -> frozenset[str]:
        """Return the windows whose scores are on disk by now."""
        target = self.target
        return segments.committed(target.folder, target.tag, target.recordings)

    def record(
        self, target_store: Reference, to_score: Collection[str], to_record: Collection[str]
    ) -> None:
        """Score and record windows, and add them to the store."""
        path = target_store.path
        with ExitStack() as cleanup:
            cleanup.callback(reference.tidy, self.config, target_store)
            with storage.keeping("the reference", path):
                reference.begin(self.config, target_store)
                # With complete files of a run that was killed before it could seal them.
                windows_in_store = store.recorded(path, to_record)
            request = ScoreRequest(record=path, record_key=target_store.key)
            self.score_windows(set(to_score) | (set(to_record) - windows_in_store), request)
            with storage.keeping("the reference", path):
                reference.seal(self.config, target_store, to_record)

    def score_windows(self, digests: Collection[str], request: ScoreRequest) -> None:
        """Score the windows with these digests: all together, and the single ones one by one."""
        batch = []
        single_windows = []
        for window in self.data.distinct:
            if window.digest not in digests:
                continue
            if window.is_single:
                single_windows.append(window)
            else:
                batch.append(window)
        if batch:
            self.score_batch(batch, request)
        for window in single_windows:
            self.score_batch([window], request)

    def score_batch(self, windows: Sequence[Window], request: ScoreRequest) -> None:
        """Score windows in one command for each worker."""
        with ExitStack() as files:
            commands = self.commands(windows, request, files)
            self.load(commands)
            turn = self.gpus.wait_for_turn(self.config.workers.check)
            may_halve = not self.gpus.was_shared
            commands = [in_turn(command, turn, may_halve=may_halve) for command in commands]
            title = f"scoring {self.title}"
            silence_s = self.config.window_timeout_s
            with self.config.progress.phase(title, unit="windows", total=len(windows)) as phase:
                self.perform(commands, silence_s, phase.show)

    def commands(
        self, windows: Sequence[Window], request: ScoreRequest, files: ExitStack
    ) -> list[ScoreCommand]:
        """Return a command for each worker; ``files`` removes the files of its windows."""
        cache = self.config.cache
        target = self.target
        facts: dict[str, Any] = {
            "label": self.model.label,
            "known": dict(self.model.provenance),
            "reference": None,
        }
        if target.reference is not None and target.tag != segments.ALONE:
            reference_store = target.reference.store
            n_entries = store.open_reference(reference_store.path).head.vocab_size
            request = ScoreRequest(reference=reference_store.path, vocab_size=n_entries)
            facts["reference"] = {
                "label": reference_store.label,
                "key": reference_store.key,
                "vocab_size": n_entries,
                "model_vocab_size": self.model.facts.vocab_size,
            }
        session = uuid.uuid4().hex
        n_workers = min(self.model.replicas, len(windows))
        commands = []
        for number in range(n_workers):
            # So the shares differ by at most one window.
            begin = len(windows) * number // n_workers
            end = len(windows) * (number + 1) // n_workers
            file = files.enter_context(cache.scratch())
            with storage.keeping("the windows of a run", file.parent):
                write_windows(file, windows[begin:end])
            command = ScoreCommand(
                request, file, target.folder, target.tag, f"{session}-{number}", facts
            )
            commands.append(command)
        return commands

    def start(self) -> None:
        """Start the workers, unless they have started; their model gets its log file."""
        if self.workers:
            return
        config = self.config
        log_file = None
        if not config.verbose:
            log_file = config.cache.log_file(self.target.model.label, self.target.key)
        self.model = self.target.model.with_planned(log_file=log_file)
        for _ in range(self.model.replicas):
            start = config.workers.started(lambda: config.workers.create(self.model))
            self.workers.append(self.open_workers.enter_context(start))

    def load(self, first_commands: Sequence[ScoreCommand]) -> None:
        """Have the workers load the model, unless they have, and warm up for these commands."""
        if self.is_loaded:
            return
        self.start()
        model = self.model
        commands = []
        # There are fewer commands than workers if there are fewer windows.
        for number, first in zip_longest(range(model.replicas), first_commands):
            devices = None
            if self.gpus.names is not None:
                begin = number * model.n_gpus
                devices = self.gpus.names[begin : begin + model.n_gpus]
            # Replicas without GPUs share the processor.
            share = None
            if not model.n_gpus:
                share = (number, model.replicas)
            load = LoadCommand(model.planned, devices, share, self.gpus.users)
            if first is not None:
                # Nothing is recorded before the first window.
                request = first.request.model_copy(update={"record": None})
                load = replace(load, windows=first.windows, request=request)
            commands.append(load)
        with self.config.progress.phase(f"loading {self.title}") as phase:
            self.perform(commands, self.config.load_timeout_s, phase.show)
        self.is_loaded = True

    def perform(self, commands: Sequence[Any], silence_s: float, show: Show) -> None:
        """Give each worker a command; ``show`` gets their messages.

        The first failure ends all workers.
        """
        with self.config.workers.pool(len(commands)) as pool:
            unfinished = []
            # There are fewer commands than workers if there are fewer windows.
            for worker, command in zip(self.workers, commands, strict=False):
                future = pool.submit(worker.perform, command, silence_s, show)
                unfinished.append(future)
            try:
                for future in as_completed(unfinished):
                    future.result()
            except BaseException:
                # Before the pool is left, which waits for its threads.
                for worker in self.workers:
                    worker.kill()
                raise


def in_turn(command: ScoreCommand, turn: Turn, *, may_halve: bool) -> ScoreCommand:
    """Return a command of a model that scores now; ``may_halve``: chunks (``ScoreRequest``)."""
    request = command.request.model_copy(update={"may_halve_chunks": may_halve})
    return replace(command, request=request, n_on_gpus=turn.n_models, n_ending=turn.n_ending)
