"""What a run yields: one ModelResult a model, in the order of the specs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backends import layers
from backends.base import LayerGroup, Storage
from eval.estimates import Mean, Perplexity

MARK = "\N{DAGGER}"
"""Beside the label of a model whose layers ran otherwise than its checkpoint asks."""


@dataclass(frozen=True)
class ModelResult:
    """One row of the table.  ``error`` is set, and ``ppl`` None, if the model failed.

    ``kld`` (nats) and ``same_top`` (share) are None without a reference, for the reference itself, and where an engine
    cannot tell, which ``notes`` then say; ``notes`` are printed below the table.  ``scores_key`` is the key of the
    model's per-token scores in the store.
    """

    label: str
    engine: str
    storage: Storage = field(default_factory=Storage)
    ppl: Perplexity | None = None
    kld: Mean | None = None
    same_top: Mean | None = None
    top1: Mean | None = None
    entropy: Mean | None = None
    ref_ppl: Perplexity | None = None
    is_reference: bool = False
    rows: int = 0
    load_seconds: float | None = None
    score_seconds: float | None = None
    cached: bool = False
    spec: dict[str, Any] = field(default_factory=dict)
    spec_sha256: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    scores_key: str = ""
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def layers(self) -> tuple[LayerGroup, ...]:
        """How its layers ran; empty where the engine does not tell."""
        return tuple(LayerGroup(**group) for group in self.provenance.get("layers", ()))

    @property
    def deviations(self) -> list[str]:
        """In which ways layers ran otherwise than the checkpoint asks, a clause each."""
        return layers.deviations(self.layers)

    @property
    def marked_label(self) -> str:
        """The label, with a mark if the layers ran otherwise than the checkpoint asks."""
        return f"{self.label} {MARK}" if self.deviations else self.label


@dataclass(frozen=True)
class RunResult:
    """A whole run: its data (JSON types), its subtitle for plots, its models, and what KLD is measured against.

    ``reference`` (JSON types) has at least ``label``, and ``kind``, "states" or "logits", while its store is there;
    None without a reference.
    """

    data: dict[str, Any]
    subtitle: str
    models: tuple[ModelResult, ...]
    reference: dict[str, Any] | None = None

    @property
    def failed(self) -> tuple[ModelResult, ...]:
        """The models that have no score."""
        return tuple(model for model in self.models if model.error)
