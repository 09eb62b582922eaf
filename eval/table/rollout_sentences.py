"""The closing sentence on how far each model is from the rollouts."""

from __future__ import annotations

from ..results import RunResult
from .numbers import error_text, kld_text


def rollout_sentences(run: RunResult) -> list[str]:
    """Return a sentence with the k3 of each row; none without rollouts."""
    distances = []
    for model in run.models:
        if model.d_mean is None:
            continue
        distance = "n/a"
        if model.k3 is not None:
            distance = f"{kld_text(model.k3)} ± {error_text(model.k3_stderr) or 'n/a'}"
        distances.append(f"{model.label} {distance}")
    if not distances:
        return []
    return [f"k3 from the rollouts, nats: {', '.join(distances)}."]
