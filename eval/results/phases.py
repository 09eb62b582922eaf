"""Which rows of a table are one model in its two phases, prefill and decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compare_q.eval.results.run_result import ModelResult

NOT_OF_THE_MODEL = {"label", "group", "phase", "step", "batch", "unscored", "reference", "out_logits"}
"""Keys of a model spec in which a model's two phases may differ."""


def model_keys(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a spec that say which model runs how, in whatever phase."""
    return {key: value for key, value in spec.items() if key not in NOT_OF_THE_MODEL}


def is_decode(spec: Mapping[str, Any]) -> bool:
    """Whether a spec's model is scored in decode."""
    return spec.get("phase") == "decode"


def prefill_of(row: ModelResult, rows: Sequence[ModelResult]) -> ModelResult | None:
    """The row of the same model in prefill, of a row in decode; None for a row in prefill, and without such a row."""
    if not is_decode(row.spec):
        return None
    keys = model_keys(row.spec)
    for other in rows:
        if not is_decode(other.spec) and other.part == row.part and model_keys(other.spec) == keys:
            return other
    return None


def models_once(rows: Sequence[ModelResult]) -> list[ModelResult]:
    """The rows without those that are another row's model in decode: what ranks models, and not their phases."""
    return [row for row in rows if prefill_of(row, rows) is None]
