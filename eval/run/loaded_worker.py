"""One worker with one loaded model, for work other than scoring windows into the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...backends.worker.protocol import LoadCommand
from .run_config import RunConfig
from .run_model import RunModel
from .workers import Worker


@contextmanager
def loaded_worker(
    config: RunConfig, model: RunModel, key: str, title: str, n_gpus: int | None = None
) -> Iterator[Worker]:
    """Run the block with a worker that has loaded a fetched model on its GPUs.

    ``key``: in the name of the engine's log (``Cache.log_file``).  ``title``: of the model, for the
    progress.  ``n_gpus``: GPUs that the worker gets; None: as many as the model needs.  ModelError
    if the model does not load.
    """
    if n_gpus is None:
        n_gpus = model.n_gpus
    log_file = None
    if not config.verbose:
        log_file = config.cache.log_file(model.label, key)
    model = model.with_planned(log_file=log_file)
    with (
        config.gpus.take(max(n_gpus, 1), config.workers.check) as gpus,
        config.workers.started(lambda: config.workers.create(model)) as worker,
    ):
        devices = None
        if gpus.names is not None:
            devices = gpus.names[:n_gpus]
        load = LoadCommand(model.planned, devices)
        with config.progress.phase(f"loading {title}") as phase:
            worker.perform(load, config.load_timeout_s, phase.show)
        yield worker
