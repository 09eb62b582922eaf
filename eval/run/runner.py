"""One run: score models on texts and make rows.  The reference is scored first and alone, then the other models.

Every check that needs no engine runs before the first model loads.  After that, a model that fails becomes a row with
the reason, and the others continue.  Each model loads once and scores one text after the other.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass

from compare_q import backends
from compare_q.backends.base import PlannedModel
from compare_q.backends.common.errors import CompareQError, InputError
from compare_q.backends.common.messages import one_line
from compare_q.eval.results import RunResult, TextResult
from compare_q.eval.run import plan
from compare_q.eval.run.config import RunConfig
from compare_q.eval.run.score import Downloads, Rows, score_model, use_given_store
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.text import windows
from compare_q.eval.text.windows import EvalData


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run.  Models that a signal stopped have a row with that reason."""

    results: RunResult
    data: tuple[EvalData | None, ...]  # the windows of each text; None for a text that failed
    signal: int = 0  # the signal that ended the run, or 0


def run(
    config: RunConfig, data_specs: Mapping[str, DataSpec], specs: Sequence[ModelSpec], n_windows: int | None = None
) -> RunOutcome:
    """Score every model on ``n_windows`` windows of each text; 0: all, None: the data spec's ``max_rows``.

    ``data_specs``: by the texts' names.  If one of several texts fails, its result has the reason.  InputError with one
    line per problem, before anything loads.  A signal raises InterruptedRun before the first model is running; after
    that, a signal ends the run early.  As many models as the GPUs allow score at the same time, each in a thread.  The
    main thread makes rows and waits, so that it receives signals.
    """
    models, texts, failed = prepared(config, data_specs, specs, n_windows)
    rows, stopped = Rows(config, models, texts), 0
    with config.workers.pool(1) as loader, config.workers.pool(config.gpus.slots) as pool:
        try:
            downloads = Downloads(rows, loader)
            if config.logits_file is not None and not rows.marked:
                use_given_store(config, config.logits_file, rows)
            for wave in (rows.marked, rows.others):
                scoring = [pool.submit(score_model, config, model, downloads, rows) for model in wave]
                for future in as_completed(scoring):
                    future.result()
                    for work in rows.scored:  # the next model loads at the same time
                        rows.add(work, cached=False)
        except BaseException as stop:
            config.workers.stop()
            pool.shutdown(cancel_futures=True)
            for work in rows.scored:
                rows.add(work, cached=False)
            if not isinstance(stop, KeyboardInterrupt):
                raise
            stopped = int(getattr(stop, "signal", signal.SIGINT))
    keys = {name: name if len(data_specs) > 1 else "" for name in data_specs}
    results = [
        TextResult(name=name, error=failed[name]) if name in failed else rows.result(name, key)
        for name, key in keys.items()
    ]
    return RunOutcome(RunResult(texts=tuple(results)), tuple(map(texts.get, keys.values())), stopped)


def prepared(
    config: RunConfig, data_specs: Mapping[str, DataSpec], specs: Sequence[ModelSpec], n_windows: int | None
) -> tuple[list[PlannedModel], dict[str, EvalData], dict[str, str]]:
    """Return (the checked models, the texts' windows, why the other texts failed), texts by name, the only one by "".

    InputError with one line per problem, or if all texts failed.
    """
    several = len(data_specs) > 1
    if several and config.logits_file is not None:
        raise InputError("--logits_file: a reference store is of one text; leave it out, or run once for each text")
    models = plan.plan_models(config, specs, max(spec.longest for spec in data_specs.values()))
    with suppress(CompareQError):  # tokenizing reports it
        if config.clear or not all(windows.are_stored(spec, config.cache) for spec in data_specs.values()):
            first = next((model for model in models if model.is_reference), models[0])
            if not backends.files_of(first).is_remote:  # its engine is imported while texts are tokenized
                config.workers.import_ahead(first, verbose=config.verbose)
    texts, failed = {}, {}
    for name, spec in data_specs.items():
        try:
            text = windows.build(
                spec, n_windows, config.cache, config.progress, clear=config.clear, render_s=config.window_timeout_s
            )
        except (CompareQError, OSError) as error:
            if not several:
                raise InputError(spec.blamed(error)) from None
            failed[name] = one_line(error)
            config.progress.say(f"{name}: failed")
        else:
            texts[name if several else ""] = text
    plan.raise_all([f"{name}: {reason}" for name, reason in failed.items()] if not texts else [])
    models = plan.fitted(config, specs, models, texts)
    if emulated := plan.emulated_dtypes(config, models):
        config.progress.say(emulated)
    return models, texts, failed
