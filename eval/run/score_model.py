"""Scoring of one model of a run: its missing windows are scored by its workers.

model = scoring.download(planned)           on this machine, with the fingerprint of its files
gap = gap_of(target)                        nothing is missing: no claim, no GPU, no worker
claim the missing windows                   waits for another run that scores one of them
look up again, take GPUs, load, score       committed every two seconds, so that a kill loses little
look up the complete scores                 the main thread makes the row of them
"""

from __future__ import annotations

from contextlib import closing

from ... import backends
from ...backends.common.errors import MEMORY_TOO_SMALL, InputError, ModelError
from . import plan
from .model_workers import ModelWorkers
from .reference import RunReference
from .rows import ScoredModel
from .run_model import RunModel
from .run_scoring import Scoring
from .score_gap import Gap, claims_on, forget_outdated, gap_of, gap_under_claim, look_up_target
from .score_target import ScoreTarget, note_use, target_of, with_store


def score_model(
    scoring: Scoring, planned: RunModel, run_reference: RunReference | None
) -> ScoredModel:
    """Complete the scores of one model in its thread; return them, or the error of its row.

    InputError, which ends the run before any model loads, if the store of a reference is another
    reference's, or damaged.
    """
    try:
        scoring.order.wait(planned, scoring.config.workers.check)
        return complete_scores(scoring, planned, run_reference)
    finally:
        scoring.order.note_start(planned)
        scoring.end_reading(planned)


def complete_scores(
    scoring: Scoring, planned: RunModel, run_reference: RunReference | None
) -> ScoredModel:
    """Do what ``score_model`` does, at once.

    Everything is acquired in one order, so that no two runs wait for each other: this thread, the
    claim on scores, the claim on the store, GPUs.
    """
    try:
        model = scoring.download(planned)
        target = target_of(scoring, model, run_reference)
    except Exception as error:
        return ScoredModel(planned, error=error)
    note_use(scoring, target)
    if model.is_reference:
        target = with_store(scoring, target)
    try:
        # Without a claim: another run may hold one while it scores for hours.
        gap = gap_of(scoring, target)
    except Exception as error:
        return ScoredModel(model, error=error)
    if gap.scores is not None and not target.required:
        return ScoredModel(model, target, gap.scores, from_cache=True)
    try:
        while True:
            with claims_on(scoring, target, gap.windows):
                claimed_windows = gap.windows
                gap = gap_under_claim(scoring, target)
                if gap.windows <= claimed_windows:
                    return score_gap(scoring, target, gap)
            # A damaged file was found, or another run has deleted windows.  Claims are released and
            # acquired together, so that two runs never wait for each other.
    except ModelError as error:
        # Scores in the cache that do not belong together.
        return ScoredModel(model, error=error)


def score_gap(scoring: Scoring, target: ScoreTarget, gap: Gap) -> ScoredModel:
    """Take GPUs, load, score and commit what is missing, under claims on it.

    Return the complete scores, or the error of the model's row.
    """
    model = target.model
    forget_outdated(scoring, target, gap.to_score)
    scores = gap.scores
    store_failure = ""
    try:
        if gap.windows:
            store_failure = compute(scoring, target, gap)
            scores = look_up_target(scoring, target).scores
        if scores is None:
            raise ModelError(f"{target.folder}: vanished during the run")
    except Exception as error:
        return ScoredModel(model, error=error)
    return ScoredModel(
        model, target, scores, from_cache=not gap.windows, store_failure=store_failure
    )


def compute(scoring: Scoring, target: ScoreTarget, gap: Gap) -> str:
    """Take GPUs, load, and score what is missing; return why windows were not recorded, or "".

    ModelError if the model fails.  If other models were on its GPU, and it failed to load or ran
    out of memory, it is loaded once more, and has the GPU alone.
    """
    config = scoring.config
    model = target.model
    n_gpus = max(model.n_gpus, 1) * model.replicas
    n_bytes = None
    if n_gpus == 1 and config.gpus.may_share:
        n_bytes = bytes_on_gpu(model)
    if model.label == scoring.models[0].label:
        # Its engine is being imported.
        scoring.begin_reading(model)

    def queued() -> None:
        # Not before: the models after it could request their GPUs first.
        scoring.order.note_start(model)

    def prepare() -> None:
        scoring.begin_reading(model)
        workers.prepare()

    while True:
        workers = ModelWorkers(scoring, target)
        with (
            # Also if it fails before it has GPUs.
            closing(workers),
            config.gpus.take(n_gpus, config.workers.check, prepare, n_bytes, queued) as gpus,
            # Before the GPUs are free for others.
            closing(workers),
        ):
            try:
                store_failure = workers.score(gap, gpus)
                gpus.end_turn()
                return store_failure
            except ModelError as error:
                # A load may fail for want of memory without saying so.
                is_of_sharing = not workers.is_loaded or MEMORY_TOO_SMALL in str(error)
                if not (gpus.was_shared and is_of_sharing):
                    raise
                reason = str(error)
        config.progress.say(
            f"{model.label}: failed while other models were on its GPU, and is loaded again alone "
            f"({reason})"
        )
        n_bytes = None
        gap = gap._replace(to_score=gap.to_score - workers.committed())


def bytes_on_gpu(model: RunModel) -> int | None:
    """Return the memory of a GPU that is enough for a model; None if that is not known."""
    if not plan.is_available(model):
        return None
    try:
        return backends.engine_class(model.engine).gpu_bytes(model.planned)
    except (InputError, OSError):
        # Loading reports the damage.
        return None
