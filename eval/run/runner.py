"""One run: model specs and texts -> rows.  The reference first, on its own, then the other models.

Every check that needs no engine runs before the first model loads.  After that a model that fails is a row with the
reason, and the others go on.  Each model loads once and scores one text after the other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass

from compare_q import backends
from compare_q.backends.base import PlannedModel
from compare_q.backends.common.errors import CompareQError, InputError, StoppedError
from compare_q.backends.common.messages import one_line
from compare_q.eval.results import RunResult, TextResult
from compare_q.eval.run import plan, reference
from compare_q.eval.run.config import RunConfig
from compare_q.eval.run.rows import Rows, row_of
from compare_q.eval.run.score import Downloads, given_store, score_model
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.text import windows
from compare_q.eval.text.windows import EvalData


@dataclass(frozen=True)
class RunOutcome:
    """The results of a run, and the windows of each text, None for a text that failed.

    ``signal``: the signal that ended the run early; 0 if none did.  Models that were not finished then have a row with
    that reason.
    """

    results: RunResult
    data: tuple[EvalData | None, ...]
    signal: int = 0


def run(
    config: RunConfig, data_specs: Mapping[str, DataSpec], specs: Sequence[ModelSpec], n_windows: int | None = None
) -> RunOutcome:
    """Score every model on ``n_windows`` windows of each text; 0: all, None: the data spec's ``max_rows``.

    ``data_specs``: by the texts' names.  Of several texts one may fail, whose result has the reason.  InputError with
    one line per problem, before anything loads.  InterruptedRun before the first model is running; after that a signal
    ends the run early.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # part of the keys of scores on a CPU; see eval/compare_q.py
    several = len(data_specs) > 1
    if several and config.logits_file is not None:
        raise InputError("--logits_file: a reference store is of one text; leave it out, or run once for each text")
    models = plan.plan_models(config, specs, max(spec.longest for spec in data_specs.values()))
    import_ahead(config, models, data_specs)
    built, failed = build_texts(config, data_specs, n_windows)
    texts = {name if several else "": text for name, text in built.items()}
    models = plan.fitted(config, specs, models, texts)
    if emulated := plan.emulated_dtypes(config, models):
        config.progress.say(emulated)
    rows = Rows(config, models, texts)
    stopped = score_all(config, models, texts, rows)
    results = {name: result_of(rows, models, name, name if several else "", text) for name, text in built.items()}
    results |= {name: TextResult(name=name, error=reason) for name, reason in failed.items()}
    result = RunResult(texts=tuple(results[name] for name in data_specs))
    return RunOutcome(result, tuple(map(built.get, data_specs)), stopped)


def import_ahead(config: RunConfig, models: Sequence[PlannedModel], data_specs: Mapping[str, DataSpec]) -> None:
    """Start to import the engine of the first model while texts are tokenized, if one has to be."""
    with suppress(CompareQError):  # tokenizing reports it
        if not config.clear and all(windows.are_stored(spec, config.cache) for spec in data_specs.values()):
            return
    first = next((model for model in models if model.is_reference), models[0])
    if not backends.files_of(first).is_remote:
        config.workers.import_ahead(first, verbose=config.verbose)


def build_texts(
    config: RunConfig, data_specs: Mapping[str, DataSpec], n_windows: int | None
) -> tuple[dict[str, EvalData], dict[str, str]]:
    """Return the windows of the texts and why the others failed, by name; InputError if all failed."""
    built, failed = {}, {}
    for name, spec in data_specs.items():
        try:
            built[name] = windows.build(spec, n_windows, config.cache, config.progress, clear=config.clear)
        except (CompareQError, OSError) as error:
            if len(data_specs) == 1:
                raise InputError(spec.blamed(error)) from None
            failed[name] = one_line(error)
            config.progress.say(f"{name}: failed")
    plan.raise_all([f"{name}: {reason}" for name, reason in failed.items()] if not built else [])
    return built, failed


def score_all(config: RunConfig, models: Sequence[PlannedModel], texts: Mapping[str, EvalData], rows: Rows) -> int:
    """Add the rows of all models; return the number of the signal that ended this early, or 0.

    As many models score at a time as there are GPUs for, each in a thread.  The main thread makes rows and waits, so
    that a signal reaches it.
    """
    marked = [model for model in models if model.is_reference]  # at most one
    others = [model for model in models if not model.is_reference]
    with config.workers.pool(1) as loader, config.workers.pool(config.gpus.slots) as pool:
        try:
            downloads = Downloads(config, [*marked, *others], loader)
            if config.logits_file is not None and not marked:
                for name, text in texts.items():
                    rows.references[name] = given_store(config, config.logits_file, text, others)
            for wave in (marked, others):
                scoring = [pool.submit(score_model, config, model, downloads, texts, rows, others) for model in wave]
                for future in as_completed(scoring):
                    future.result()
                    rows.add_scored()  # the next model loads meanwhile
        except BaseException as stop:
            config.workers.stop()
            pool.shutdown(cancel_futures=True)
            rows.add_scored()
            if not isinstance(stop, KeyboardInterrupt):
                raise
            return int(getattr(stop, "signal", signal.SIGINT))
    return 0


def result_of(rows: Rows, models: Sequence[PlannedModel], name: str, key: str, text: EvalData) -> TextResult:
    """Return the results of a text, whose rows have this key, in the order of the models."""
    found = rows.by_text[key]
    unfinished = str(StoppedError())
    ordered = tuple(found.get(each.label) or row_of(each, error=unfinished) for each in models)
    against = rows.references[key]
    known = None if against is None else reference.as_json(against, text.n_scored)
    return TextResult(
        name=name, data=windows.data_json(text), subtitle=windows.subtitle(text), models=ordered, reference=known
    )
