"""The fields and notes of a row on a text of rollouts, from the recorded log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..results import ModelResult
from ..stats.rollout_columns import Sampled, rollout_notes, rollout_statistics
from ..stats.sampled_check import sampling_notes
from ..stats.temperature import scale_note
from ..text.eval_data import EvalData
from .run_model import RunModel
from .stored_scores import StoredScores, block_assignment

OWN_ROW = (
    "it is the rollouts themselves: k3, |d| and ratios compare the other rows with them, and they "
    "have no KLD"
)
NO_ESTIMATE = "k3 is then no estimate of a KL divergence"


def fields_of(model: RunModel, scores: StoredScores, data: EvalData) -> dict[str, Any]:
    """Return the fields of a row about recorded log-probabilities; none on other texts."""
    if is_own_file(model, data):
        return {"is_rollouts": True}
    return compared_fields(scores, data)


def compared_fields(scores: StoredScores, data: EvalData) -> dict[str, Any]:
    """Return the fields that compare scores with recorded log-probabilities."""
    sampled = sampled_of(scores, data)
    if sampled is None:
        return {}
    return rollout_statistics(sampled, block_assignment(data, scores))


def is_own_file(model: RunModel, data: EvalData) -> bool:
    """Return True if a model is the file of a text of rollouts."""
    file = Path(model.planned.model_dir).resolve()
    for text in data.texts:
        spec = text.spec
        if spec.is_rollouts and Path(spec.locate(spec.path or "")).resolve() == file:
            return True
    return False


def sampled_of(scores: StoredScores, data: EvalData) -> Sampled | None:
    """Return the scores next to what was recorded; None without rollouts."""
    recorded = data.recorded_logprobs
    if recorded is None:
        return None
    return Sampled(scores.columns["logprob"], recorded, scores.window, scores.position)


def notes_of(row: ModelResult, scores: StoredScores, data: EvalData) -> list[str]:
    """Return the footnotes of a row on a text of rollouts.

    The reference's row has those on the rollouts: whether they look like it at another temperature,
    and whether their tokens follow its distribution.
    """
    sampled = sampled_of(scores, data)
    if sampled is None:
        return []
    if row.is_rollouts:
        return [OWN_ROW]
    notes = list(rollout_notes(sampled))
    if row.reference:
        notes += sampling_notes(scores.columns, data.recorded_logprobs, NO_ESTIMATE)
        scale = scale_note(scores.columns, sampled.recorded)
        if scale:
            notes.append(f"rollouts: {scale}")
    return notes
