"""One run: score models on a list of windows and make rows.  The reference is scored first, then
the other models.

Every check that needs no engine runs before the first model loads.  After that, a model that fails
becomes a row with the reason, and the others continue.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace

from ...backends.common.errors import CompareQError
from ..results import RunResult
from ..specs.spec_types import DataSpec, ModelSpec
from ..text import text_windows, tokens_cache
from ..text.eval_data import EvalData
from . import plan
from .rows import Rows
from .run_config import RunConfig
from .run_model import RunModel
from .score import Downloads, Scored, score_model, use_given_store


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run.  Models that a signal stopped have a row with that reason."""

    results: RunResult
    data: EvalData  # the windows of all texts
    signal: int = 0  # the signal that ended the run, or 0


def run(
    config: RunConfig,
    data_specs: Mapping[str, DataSpec],
    specs: Sequence[ModelSpec],
    n_windows: int | None = None,
) -> RunOutcome:
    """Score every model on ``n_windows`` windows of each text; 0: all, None: the data spec's
    ``max_rows``.

    ``data_specs``: by the texts' names.  InputError with one line per problem, before anything
    loads.  A signal raises InterruptedRun before the first model is running; after that, a signal
    ends the run early.  As many models as the GPUs allow score at the same time, each in a thread.
    The main thread makes rows and waits, so that it receives signals, and the next model loads
    while a row is made.
    """
    models, data = prepared(config, data_specs, specs, n_windows)
    rows = Rows(config, models, data)
    waiting: list[Future[Scored]] = []  # models that have no row yet
    stopped = 0
    with config.workers.pool(1) as loader, config.workers.pool(config.gpus.slots) as pool:
        try:
            downloads = Downloads(rows, loader)
            if config.logits_file is not None and not rows.marked:
                use_given_store(config, rows, data)
            for wave in (rows.marked, rows.others):
                waiting += [pool.submit(score_model, rows, model, downloads) for model in wave]
                for future in as_completed(list(waiting)):
                    add_row(rows, future.result())
                    # Not before: a signal while the row is made would lose it.
                    waiting.remove(future)
        except BaseException as stop:
            config.workers.stop()
            pool.shutdown(cancel_futures=True)
            for future in waiting:
                if not future.cancelled() and future.exception() is None:
                    add_row(rows, future.result())
            if not isinstance(stop, KeyboardInterrupt):
                raise
            stopped = int(getattr(stop, "signal", signal.SIGINT))
    return RunOutcome(rows.result(), data, stopped)


def add_row(rows: Rows, scored: Scored) -> None:
    """Add the row of a model whose thread has ended; InputError, which ends the run, if a pack
    failed.
    """
    if scored.work is None or scored.stored is None:
        rows.fail(
            scored.model,
            scored.error or RuntimeError("its thread returned neither scores nor an error"),
        )
    else:
        rows.add(
            scored.work, scored.stored, from_cache=scored.from_cache, recordings=scored.recordings
        )


def prepared(
    config: RunConfig,
    data_specs: Mapping[str, DataSpec],
    specs: Sequence[ModelSpec],
    n_windows: int | None,
) -> tuple[list[RunModel], EvalData]:
    """Return (the checked models, the windows of all texts); InputError with one line per problem."""
    models = plan.plan_models(config, specs, max(spec.longest for spec in data_specs.values()))
    with suppress(CompareQError):  # tokenizing reports it
        if config.clear or not all(
            tokens_cache.are_stored(spec, config.cache) for spec in data_specs.values()
        ):
            first = next((model for model in models if model.is_reference), models[0])
            # Its engine is imported while texts are tokenized.
            if not first.files.is_remote:
                config.workers.import_ahead(first, verbose=config.verbose)
    texts = []
    problems = []
    for name, spec in data_specs.items():
        try:
            text = text_windows.build(
                spec,
                n_windows,
                config.cache,
                config.progress,
                name=name,
                clear=config.clear,
                render_s=config.window_timeout_s,
            )
        except (CompareQError, OSError) as error:
            problems.append(spec.blamed(error))
            continue
        if name in config.alone:
            text = replace(
                text, windows=tuple(replace(window, is_single=True) for window in text.windows)
            )
        texts.append(text)
    plan.raise_all(problems)
    data = EvalData.joined(texts)
    models = plan.fitted(config, specs, models, data)
    for note in (config.cache.note_on_older(), plan.emulated_dtypes(config, models)):
        if note:
            config.progress.say(note)
    return models, data
