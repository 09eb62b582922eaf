"""The objects that the threads of a run share: its models, their downloads, and its windows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress

from ...backends.common.errors import StoppedError
from ..common import page_cache
from ..text.eval_data import EvalData
from . import plan
from .gpu_pool import STOP_POLL_S, Check
from .model_checks import raise_all
from .run_config import RunConfig
from .run_model import RunModel
from .window_checks import vocabulary_problems


class Downloads:
    """Downloads and fingerprints the models of a run in their order.

    It is one model ahead of those that score or prepare.
    """

    def __init__(self, config: RunConfig, models: Sequence[RunModel], loader: Executor) -> None:
        self.config = config
        self.loader = loader
        self.lock = threading.Lock()
        self.not_begun = iter(models)
        self.begun: dict[str, Future[RunModel]] = {}

    def result(self, model: RunModel) -> RunModel:
        """Return a model that is on this machine, and start with the next one.

        InputError or ModelError.
        """
        with self.lock:
            for next_model in self.not_begun:
                is_one_ahead = model.label in self.begun
                download = self.loader.submit(plan.fetched, self.config, next_model)
                self.begun[next_model.label] = download
                if is_one_ahead:
                    break
        return self.begun[model.label].result()


class StartOrder:
    """Lets models request their GPUs in order, although each model has its own thread."""

    def __init__(self, models: Sequence[RunModel]) -> None:
        self.labels = [model.label for model in models]
        self.started = {label: threading.Event() for label in self.labels}

    def wait(self, model: RunModel, check: Check) -> None:
        """Wait until the model before this one has requested GPUs, or cannot do so soon."""
        number = self.labels.index(model.label)
        if number > 0:
            started = self.started[self.labels[number - 1]]
            while not started.wait(STOP_POLL_S):
                check()

    def note_start(self, model: RunModel) -> None:
        """Note that a model is queued for its GPUs, waits for another run, or has ended."""
        self.started[model.label].set()


class Scoring:
    """The scoring of a run's models on its windows.

    ``reference_models``: the model that is the reference, if there is one.  ``loader``: an executor
    of one thread, which lives as long as the run.
    """

    def __init__(
        self, config: RunConfig, models: Sequence[RunModel], data: EvalData, loader: Executor
    ) -> None:
        self.config = config
        self.data = data
        self.reference_models = [model for model in models if model.is_reference]
        self.compared_models = [model for model in models if not model.is_reference]
        self.models = self.reference_models + self.compared_models
        self.downloads = Downloads(config, self.models, loader)
        self.order = StartOrder(self.models)
        # Keys of scores that this run has deleted (``-cc``). Two models may share a key; a model
        # adds it while it has the claim on these scores.
        self.cleared: set[str] = set()
        # Label of a model -> the event that ends the reading of its weights into the page cache.
        self.readings: dict[str, threading.Event] = {}
        # Several models may wait for one GPU: their weights are read in order.
        self.reading = threading.Lock()

    def download(self, planned: RunModel) -> RunModel:
        """Return a model that is on this machine, checked again, with its fingerprint.

        InputError or ModelError.
        """
        model = self.downloads.result(planned)
        # The vocabulary of the others was checked before the run.
        if not plan.is_available(planned):
            raise_all(vocabulary_problems(model, self.data))
        return model

    def begin_reading(self, model: RunModel) -> None:
        """Start to read a model's weights into the page cache, while it waits for engine or GPUs.

        If the model is the reference, those of the first compared model are read, too.
        """
        if not self.config.gpus.gpus:
            # Reading would take time from what runs on the CPU.
            return
        models = [model]
        if model.is_reference:
            models += self.compared_models[:1]
        for each in models:
            if each.label in self.readings:
                continue
            self.readings[each.label] = threading.Event()
            # A daemon: the end of the process does not wait for it.
            threading.Thread(target=self.read_weights, args=(each.label,), daemon=True).start()

    def end_reading(self, model: RunModel) -> None:
        """End the reading of a model's weights, if there is one: it has ended, or has failed."""
        if model.label in self.readings:
            self.readings[model.label].set()

    def read_weights(self, label: str) -> None:
        """Read the weights of a model into the page cache, after its download."""
        ended = self.readings[label]

        def check() -> None:
            self.config.workers.check()
            if ended.is_set():
                raise StoppedError

        # Loading reports the errors of the model.
        with suppress(Exception):
            model = self.downloads.begun[label].result()
            with self.reading:
                page_cache.read_ahead(model.files.weight_files(), check)

    def title_of(self, model: RunModel) -> str:
        """Return the label of a model with its number in the run, for titles."""
        if len(self.models) == 1:
            return model.label
        labels = [other.label for other in self.models]
        number = labels.index(model.label) + 1
        return f"{model.label} (model {number} of {len(labels)})"
