"""The closing sentence on how far each model is from the rollouts."""

from __future__ import annotations

from ..results import RunResult
from .numbers import number_with_error


def rollout_sentences(run: RunResult) -> list[str]:
    """Return a sentence with the k3 of each row; none without rollouts."""
    distances = []
    for model in run.models:
        if model.d_mean is None:
            continue
        distance = "n/a"
        if model.k3 is not None:
            distance = number_with_error(model.k3, model.k3_stderr, "nats")
        distances.append(f"{model.label} {distance}")
    if not distances:
        return []
    return [f"k3 from the rollouts: {', '.join(distances)}."]
