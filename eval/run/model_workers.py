"""The workers of one model: they load it, each on its GPUs, and score its missing windows together."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from typing import Any

from ...backends.base import ScoreRequest, Window
from ...backends.common import storage
from ...backends.common.errors import InputError, LostWorkerError, ModelError
from ...backends.reference import store
from ...backends.scoring import segments
from ...backends.worker.protocol import LoadCommand, ScoreCommand, write_windows
from . import reference
from .rows import Rows
from .token_scores import Work
from .workers import Worker

MOST_LOST = 3
"""Workers of one model that may be lost with their machines.  A fourth loss is more likely caused
by the model."""


class Replicas:
    """The workers of one model on its GPUs.  They start, and load the model, before the first
    scoring.
    """

    def __init__(self, rows: Rows, work: Work, gpus: Sequence[str] | None) -> None:
        self.config = rows.config
        self.data = rows.data
        self.recordings = rows.recordings
        self.title = rows.title_of(work.model)
        self.work = work
        self.model = work.model
        self.gpus = gpus
        self.workers: list[Worker] = []
        self.held = ExitStack()

    def close(self) -> None:
        """Let all workers end."""
        self.workers = []
        self.held.close()

    def end(self) -> None:
        """End all workers at once."""
        for worker in self.workers:
            worker.kill()
        self.close()

    def score(self, missing: Collection[str], to_record: Collection[str]) -> None:
        """Score the windows with these digests, split among the workers, and record those of the
        reference's store.

        ``missing``: windows without scores; ``to_record``: windows that the reference's store must
        have.  If the machine of a worker is lost, new workers continue.  ModelError if the model
        fails; committed scores stay.
        """
        self.config.cache.check_writable()
        n_lost = 0
        while True:
            try:
                if self.work.store is None or not to_record:
                    self.score_windows(missing, ScoreRequest())
                else:
                    self.record(self.work.store, missing, to_record)
                return
            except LostWorkerError as lost:
                self.end()
                n_lost += 1
                if n_lost > MOST_LOST:
                    raise ModelError(
                        f"{lost}, as {MOST_LOST} workers of this model before"
                    ) from None
                self.config.progress.say(
                    f"{self.model.label}: {lost}; what is not kept of it is scored again"
                )
                missing = set(missing) - self.committed()
            except (InputError, ModelError) as error:
                if self.work.store is None or storage.NOT_KEPT not in str(error) or not to_record:
                    raise
                self.end()  # without a store there may be room for the scores
                self.work.unkept = reference.abandon(self.config, self.work.store, to_record, error)
                self.config.progress.say(
                    f"{self.model.label}: {self.work.unkept}; it is scored without"
                )
                to_record = ()
                missing = set(missing) - self.committed()

    def committed(self) -> frozenset[str]:
        """Return the windows whose scores are on disk by now."""
        folder = self.config.cache.path("scores", self.work.key, "")
        return segments.committed(folder, self.work.tag, self.recordings)

    def record(
        self, own: reference.Reference, missing: Collection[str], to_record: Collection[str]
    ) -> None:
        """Score and record windows, and add them to the store."""
        with ExitStack() as held:
            held.callback(reference.tidy, self.config, own)
            with storage.keeping("the reference", own.path):
                reference.begin(self.config, own)
                recorded = store.recorded(own.path, to_record)
            request = ScoreRequest(record=own.path, record_key=own.key)
            self.score_windows(set(missing) | (set(to_record) - recorded), request)
            with storage.keeping("the reference", own.path):
                reference.seal(self.config, own, to_record)

    def score_windows(self, wanted: Collection[str], request: ScoreRequest) -> None:
        """Score the windows with these digests: all together, and those that must be alone one
        after the other.
        """
        windows = [window for window in self.data.distinct if window.digest in wanted]
        together = [window for window in windows if not window.is_single]
        batches = [together] if together else []
        batches += [[window] for window in windows if window.is_single]
        for batch in batches:
            with ExitStack() as held:
                commands = self.commands(batch, request, held)
                self.load()
                title = f"scoring {self.title}"
                self.perform(commands, self.config.window_timeout_s, title, "windows", len(batch))

    def commands(
        self, windows: Sequence[Window], request: ScoreRequest, held: ExitStack
    ) -> list[ScoreCommand]:
        """Return a command for each worker; ``held`` removes the files of its windows."""
        cache = self.config.cache
        work = self.work
        facts: dict[str, Any] = {
            "label": self.model.label,
            "known": dict(self.model.provenance),
            "reference": None,
        }
        if work.reference is not None and work.tag != segments.ALONE:
            entries = store.open_reference(work.reference.path).head.vocab_size
            request = ScoreRequest(reference=work.reference.path, vocab_size=entries)
            facts["reference"] = {
                "label": work.reference.label,
                "key": work.reference.key,
                "vocab_size": entries,
                "model_vocab_size": self.model.facts.vocab_size,
            }
        session = uuid.uuid4().hex
        count = min(self.model.replicas, len(windows))
        folder = cache.path("scores", work.key, "")
        commands = []
        for number in range(count):  # shares differ by one window at most
            begin = len(windows) * number // count
            end = len(windows) * (number + 1) // count
            file = held.enter_context(cache.scratch())
            with storage.keeping("the windows of a run", file.parent):
                write_windows(file, windows[begin:end])
            commands.append(
                ScoreCommand(request, file, folder, work.tag, f"{session}-{number}", facts)
            )
        return commands

    def load(self) -> None:
        """Start the workers and have them load the model, unless they have."""
        if self.workers:
            return
        config = self.config
        log = None if config.verbose else config.cache.log_file(self.model.label, self.work.key)
        model = self.model.with_planned(log_file=log)
        commands = []
        for number in range(model.replicas):
            start = config.workers.started(lambda: config.workers.create(model))
            self.workers.append(self.held.enter_context(start))
            gpus = None
            if self.gpus is not None:
                gpus = tuple(self.gpus[number * model.n_gpus : (number + 1) * model.n_gpus])
            share = None if model.n_gpus else (number, model.replicas)
            commands.append(LoadCommand(model.planned, gpus, share))
        self.perform(commands, config.load_timeout_s, f"loading {self.title}")

    def perform(
        self,
        commands: Sequence[Any],
        silence_s: float,
        title: str,
        unit: str = "",
        total: int | None = None,
    ) -> None:
        """Give each worker a command, and show their progress; the first failure ends all workers."""
        with (
            self.config.progress.phase(title, unit=unit, total=total) as phase,
            self.config.workers.pool(len(commands)) as pool,
        ):
            pairs = zip(self.workers, commands, strict=False)
            ends = [
                pool.submit(worker.perform, command, silence_s, phase.show)
                for worker, command in pairs
            ]
            try:
                for end in as_completed(ends):
                    end.result()
            except BaseException:
                for worker in self.workers:
                    worker.kill()
                raise
