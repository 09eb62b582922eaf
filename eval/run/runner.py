"""One run: score models on a list of windows and make rows.

The reference is scored first, then the other models.  Every check that needs no engine runs before
the first model loads.  After that, a model that fails becomes a row with the reason, and the others
continue.
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
from ..text.text_windows import TextWindows
from . import model_checks, model_hardware, plan, sampled_text, window_checks
from .rows import RowList, ScoredModel
from .run_config import RunConfig
from .run_model import RunModel
from .run_scoring import Scoring
from .score_model import bytes_on_gpu, score_model
from .score_target import store_of_user


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run.  Models that a signal stopped have a row with that reason."""

    results: RunResult
    # The windows of all texts.
    data: EvalData
    # The signal that ended the run, or 0.
    signal: int = 0


def run(
    config: RunConfig,
    data_specs: Mapping[str, DataSpec],
    specs: Sequence[ModelSpec],
    n_windows: int | None = None,
) -> RunOutcome:
    """Score every model on ``n_windows`` windows of each text, and return the rows.

    ``n_windows``: 0 for all, None for the data spec's ``max_rows``.  ``data_specs``: by the texts'
    names.  InputError with one line per problem, before anything
    loads.  A signal raises InterruptedRun before the first model is running; after that, a signal
    ends the run early.  As many models as the GPUs allow score at the same time, each in a thread.
    The main thread makes rows and waits, so that it receives signals, and the next model loads
    while a row is made.  The next models prepare their loads while others have the GPUs.
    """
    models, data = prepare(config, data_specs, specs, n_windows)
    rows = RowList(config, models, data)
    # Models that have no row yet.
    unfinished: list[Future[ScoredModel]] = []
    signal_number = 0
    n_sharing = 0
    if config.gpus.may_share:
        n_sharing = sum(bytes_on_gpu(model) is not None for model in models)
    n_threads = config.gpus.n_threads(n_sharing)
    with config.workers.pool(1) as loader, config.workers.pool(n_threads) as pool:
        try:
            scoring = Scoring(config, models, data, loader)
            if config.logits_file is not None and not scoring.reference_models:
                rows.reference = store_of_user(scoring, config.logits_file)
            # The others start after the reference's row was made, and are compared with it.
            for group in (scoring.reference_models, scoring.compared_models):
                for model in group:
                    future = pool.submit(score_model, scoring, model, rows.reference)
                    unfinished.append(future)
                for future in as_completed(list(unfinished)):
                    rows.add(future.result())
                    # Not before: a signal while the row is made would lose it.
                    unfinished.remove(future)
        except BaseException as stop:
            # Before the pool is left, which waits for its threads.
            config.workers.stop()
            pool.shutdown(cancel_futures=True)
            # What was finished is shown.
            for future in unfinished:
                if not future.cancelled() and future.exception() is None:
                    rows.add(future.result())
            if not isinstance(stop, KeyboardInterrupt):
                raise
            signal_number = int(getattr(stop, "signal", signal.SIGINT))
    return RunOutcome(rows.result(), data, signal_number)


def prepare(
    config: RunConfig,
    data_specs: Mapping[str, DataSpec],
    specs: Sequence[ModelSpec],
    n_windows: int | None,
) -> tuple[list[RunModel], EvalData]:
    """Return (the checked models, the windows of all texts).

    InputError with one line per problem.
    """
    longest_window = max(spec.longest for spec in data_specs.values())
    if config.workers.is_local:
        import_first_engine(config, data_specs, specs, longest_window)
        models = plan.plan_models(config, specs, longest_window)
    else:
        # On a cluster, planning chooses the nodes that will import it.
        models = plan.plan_models(config, specs, longest_window)
        import_first_engine(config, data_specs, specs, longest_window)
    data = EvalData.joined(build_texts(config, data_specs, n_windows, models))
    models = window_checks.fitted(config, specs, models, data)
    for note in (config.cache.note_on_older(), model_hardware.emulated_dtypes(config, models)):
        if note:
            config.progress.say(note)
    return models, data


def needs_tokenizing(config: RunConfig, data_specs: Mapping[str, DataSpec]) -> bool:
    """Return True if the tokens of a text are not in the cache, or will be deleted."""
    if config.clear:
        return True
    for spec in data_specs.values():
        # The sampler's worker imports its engine itself.
        is_sampled_here = spec.is_sampled and spec.pack is None
        if not is_sampled_here and not tokens_cache.are_stored(spec, config.cache):
            return True
    return False


def import_first_engine(
    config: RunConfig,
    data_specs: Mapping[str, DataSpec],
    specs: Sequence[ModelSpec],
    longest_window: int,
) -> None:
    """Start to import the engine of the first model that runs, if a text must be tokenized.

    Meanwhile the models are checked, and texts are tokenized.
    """
    first_spec = specs[0]
    for spec in specs:
        if spec.is_reference:
            first_spec = spec
            break
    # Planning and tokenizing report the error.
    with suppress(CompareQError, OSError):
        model = plan.as_planned(config, first_spec, longest_window)
        if not model.files.is_remote and needs_tokenizing(config, data_specs):
            config.workers.import_ahead(model, verbose=config.verbose)


def build_texts(
    config: RunConfig,
    data_specs: Mapping[str, DataSpec],
    n_windows: int | None,
    models: Sequence[RunModel] = (),
) -> list[TextWindows]:
    """Return the windows of each text; InputError with one line per problem.

    ``models``: of the run; the reference samples the texts that must be sampled.
    """
    texts = []
    problems = []
    for name, spec in data_specs.items():
        try:
            text = built_text(config, models, spec, n_windows, name)
        except (CompareQError, OSError) as error:
            problems.append(spec.blamed(error))
            continue
        if name in config.alone:
            single_windows = tuple(replace(window, is_single=True) for window in text.windows)
            text = replace(text, windows=single_windows)
        texts.append(text)
    model_checks.raise_all(problems)
    return texts


def built_text(
    config: RunConfig,
    models: Sequence[RunModel],
    spec: DataSpec,
    n_windows: int | None,
    name: str,
) -> TextWindows:
    """Return the windows of one text, which the reference may have to sample first."""
    if spec.is_sampled and spec.pack is None:
        return sampled_text.build(config, models, spec, n_windows, name)
    return text_windows.build(
        spec,
        n_windows,
        config.cache,
        config.progress,
        name=name,
        clear=config.clear,
        render_s=config.window_timeout_s,
    )
