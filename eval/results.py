"""What a run yields: one ModelResult a model, in the order of the specs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backends.base import Storage
from eval.estimates import Perplexity


@dataclass(frozen=True)
class ModelResult:
    """One row of the table.  ``error`` is set, and ``ppl`` None, if the model failed."""

    label: str
    engine: str
    storage: Storage = field(default_factory=Storage)
    ppl: Perplexity | None = None
    rows: int = 0
    load_seconds: float | None = None
    score_seconds: float | None = None
    cached: bool = False
    spec: dict[str, Any] = field(default_factory=dict)
    spec_sha256: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class RunResult:
    """A whole run: its data (JSON types), its subtitle for plots, its models."""

    data: dict[str, Any]
    subtitle: str
    models: tuple[ModelResult, ...]

    @property
    def failed(self) -> tuple[ModelResult, ...]:
        """The models that have no score."""
        return tuple(model for model in self.models if model.error)
