"""What a run yields: one ModelResult a model, in the order of the specs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backends.base import LayerGroup, Storage
from backends.layers import groups
from eval.common import machine
from eval.stats.estimates import Estimates
from eval.stats.uncertainty import Mean, Perplexity

MARK = "\N{DAGGER}"
"""Beside the label of a model whose layers ran otherwise than its checkpoint asks."""


@dataclass(frozen=True)
class ModelResult:
    """One row of the table.  ``error`` is set, and ``estimates`` None, if the model failed.

    ``kld`` and ``same_top`` are None without a reference, for the reference itself, and where an engine cannot tell,
    which ``notes`` then say; ``notes`` are printed below the table.  ``scores_key`` is the key of the model's per-token
    scores in the cache.  ``reference_key``: of the reference that its KLD is against, where a merged run has several.
    """

    label: str
    engine: str
    storage: Storage = field(default_factory=Storage)
    estimates: Estimates | None = None
    is_reference: bool = False
    windows: int = 0
    load_seconds: float | None = None
    score_seconds: float | None = None
    cached: bool = False
    spec: dict[str, Any] = field(default_factory=dict)
    spec_sha256: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    scores_key: str = ""
    reference_key: str = ""
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def ppl(self) -> Perplexity | None:
        """Perplexity; None for a failed model."""
        return self.estimates.ppl if self.estimates else None

    @property
    def kld(self) -> Mean | None:
        """Mean KL(reference || model), nats."""
        return self.estimates.kld if self.estimates else None

    @property
    def same_top(self) -> Mean | None:
        """Share of positions with the reference's most probable token."""
        return self.estimates.same_top if self.estimates else None

    @property
    def group(self) -> str:
        """The group that its spec names; empty: the label's first word."""
        return str(self.spec.get("group") or "")

    @property
    def is_noise_floor(self) -> bool:
        """Whether its spec calls it the noise floor."""
        return bool(self.spec.get("noise_floor"))

    @property
    def is_quantized(self) -> bool:
        """Whether its layers store less than 16 bits a weight; where the size is not known, whether any is quantized.

        A model of which neither is known counts as quantized.
        """
        if self.storage.bpw_layer is not None:
            return self.storage.bpw_layer < 16
        return not self.layers or any(group.layer.weights not in groups.PLAIN for group in self.layers)

    @property
    def layers(self) -> tuple[LayerGroup, ...]:
        """How its layers ran; empty where the engine does not tell."""
        return groups.groups_from_json(self.provenance.get("layers", ()))

    @property
    def where(self) -> str:
        """The GPUs or the CPU that it ran on; empty where that is not known, as of a server."""
        return machine.words(self.provenance)

    @property
    def deviations(self) -> list[str]:
        """In which ways layers ran otherwise than the checkpoint asks, a clause each."""
        return groups.deviations(self.layers)

    @property
    def marked_label(self) -> str:
        """The label, with a mark if the layers ran otherwise than the checkpoint asks."""
        return f"{self.label} {MARK}" if self.deviations else self.label


@dataclass(frozen=True)
class RunResult:
    """A whole run: its data (JSON types), its subtitle for plots, its models, and what KLD is measured against.

    ``reference`` (JSON types) has at least ``label``, and ``kind``, "states" or "logits", while its store is there;
    None without a reference.  ``title``: the user's, of report and plots; None: each says what it shows.
    """

    data: dict[str, Any]
    subtitle: str
    models: tuple[ModelResult, ...]
    reference: dict[str, Any] | None = None
    title: str | None = None

    @property
    def reference_ppl(self) -> float | None:
        """The reference's perplexity: of its row, or else as most of its tokens were scored beside a model."""
        rows = [model.ppl for model in self.models if model.is_reference and model.ppl]
        beside = [found.against.ref_ppl for model in self.models if (found := model.estimates) and found.against]
        known = [ppl for ppl in rows or beside if ppl.value is not None]
        return max(known, key=lambda ppl: ppl.tokens).value if known else None

    @property
    def noise_floor(self) -> ModelResult | None:
        """The row that its spec calls the noise floor; of several, that with the largest KLD."""
        floors = ((model.kld, model) for model in self.models if model.is_noise_floor)
        known = [(kld.value, model) for kld, model in floors if kld is not None and kld.value is not None]
        return max(known, key=lambda pair: pair[0])[1] if known else None

    @property
    def failed(self) -> tuple[ModelResult, ...]:
        """The models that have no score."""
        return tuple(model for model in self.models if model.error)
