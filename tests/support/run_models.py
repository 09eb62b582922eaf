"""Models of a run, without a plan."""

from __future__ import annotations

from typing import Any

from compare_q.backends.base import PlannedModel
from compare_q.eval.run.run_model import RunModel
from compare_q.eval.specs.spec_types import ModelSpec


def run_model(planned: PlannedModel, **fields: Any) -> RunModel:
    """Return the run's model with what its workers get, and a spec without options."""
    spec = ModelSpec(load_fn=planned.load_fn, model_dir=planned.model_dir)
    return RunModel(spec, planned, **fields)
