"""The results of a run: one ModelResult a model, in the order of the specs; and of runs read back or merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.base import LayerGroup, Storage
from backends.common import machine
from backends.layers import groups
from eval.results.timing import Timing
from eval.stats.estimates import Estimates
from eval.stats.uncertainty import Mean, Perplexity

MARK = "\N{DAGGER}"
"""Beside the label of a model whose layers ran otherwise than its checkpoint asks."""
BRIEF = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Number formats as a narrow column has them."""
ORIGIN = ("created", "command", "commit", "versions", "hardware")
"""Keys of results.json that say when, how and where the run was made."""
SAME_AS = "same_as"
"""Key of a reference's description in a merged run: the key of an earlier run's reference with the same scores."""


@dataclass(frozen=True)
class ModelResult:
    """One row of the table.  ``error`` is set, and ``estimates`` None, if the model failed.

    ``kld`` and ``same_top`` are None without a reference, for the reference itself, and where an engine cannot tell
    them, as ``notes`` then say; ``notes`` are printed below the table.  ``scores_key`` is the key of the model's token
    scores in the cache.  ``reference_key``, in a merged run with several references: the key of the reference that the
    model's KLD is against.  ``timing`` is None in results of compare_q 0.2.
    """

    label: str
    engine: str
    storage: Storage = field(default_factory=Storage)
    estimates: Estimates | None = None
    is_reference: bool = False
    windows: int = 0
    load_seconds: float | None = None
    score_seconds: float | None = None
    timing: Timing | None = None
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
    def mean_kld(self) -> float | None:
        """Mean KLD in nats; 0 for the reference, by definition; None where it is not known, and for a failed model."""
        if self.error:
            return None
        if self.is_reference:
            return 0.0
        return self.kld.value if self.kld else None

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
        """Whether its layers store less than 16 bits a weight; if the size is not known, whether any is quantized.

        A model whose size and layers are both unknown counts as quantized.
        """
        if self.storage.bpw_layer is not None:
            return self.storage.bpw_layer < 16
        return not self.layers or any(group.layer.weights not in groups.PLAIN for group in self.layers)

    @property
    def layers(self) -> tuple[LayerGroup, ...]:
        """How its layers ran; empty where the engine does not tell."""
        return groups.groups_from_json(self.provenance.get("layers", ()))

    @property
    def kv_caches(self) -> tuple[groups.KVCache, ...]:
        """How its keys and values were cached; empty where the engine does not tell."""
        return groups.kv_caches_from_json(self.provenance.get("kv_cache_layers"))

    @property
    def where(self) -> str:
        """The GPUs or the CPU that it ran on; empty where the engine does not tell (a server)."""
        return machine.words(self.provenance)

    @property
    def kv_cache(self) -> str:
        """The precision in which its keys and values were kept ("bf16", "fp8 +bf16"); empty: the engine does not tell.

        The key "kv_cache" of ``provenance``; results of compare_q 0.2 have vLLM's option, whose "auto" is the model's.
        """
        told = self.provenance.get("kv_cache") or self.provenance.get("kv_cache_dtype") or ""
        kept = str(self.provenance.get("dtype") or "" if told == "auto" else told)
        for name, brief in BRIEF.items():
            kept = kept.replace(name, brief)
        return kept

    @property
    def tokens_per_second(self) -> float | None:
        """Scored tokens a second of scoring, the first step included; None where either is not known."""
        if self.ppl is None or not self.score_seconds:
            return None
        return (self.ppl.tokens + self.ppl.non_finite) / self.score_seconds

    @property
    def deviations(self) -> list[str]:
        """In which ways layers and KV cache ran otherwise than the checkpoint asks, a clause each."""
        return groups.deviations(self.layers) + groups.kv_deviations(self.kv_caches)

    @property
    def marked_label(self) -> str:
        """The label, with a mark if the layers ran otherwise than the checkpoint asks."""
        return f"{self.label} {MARK}" if self.deviations else self.label


def several_references(models: Sequence[ModelResult]) -> bool:
    """Whether the KL divergences of a merged run are against references of different machines."""
    return len({model.reference_key for model in models if model.reference_key}) > 1


def floor_of(models: Sequence[ModelResult]) -> ModelResult | None:
    """The row that its spec calls the noise floor; of several such rows, the one with the largest KLD."""
    floors = ((model.kld, model) for model in models if model.is_noise_floor)
    known = [(kld.value, model) for kld, model in floors if kld is not None and kld.value is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


@dataclass(frozen=True)
class RunResult:
    """A whole run: its data (JSON types), its subtitle for plots, its models, and the reference of their KLDs.

    ``reference`` (JSON types) has at least ``label``, and ``contents``, "states" or "logits", while its store is there;
    None without a reference.  ``title``: the user's title of report and plots; None: each has its own.
    """

    data: dict[str, Any]
    subtitle: str
    models: tuple[ModelResult, ...]
    reference: dict[str, Any] | None = None
    title: str | None = None

    @property
    def reference_ppl(self) -> float | None:
        """The reference's perplexity: of its row, or else from the model beside which most tokens were scored."""
        rows = [model.ppl for model in self.models if model.is_reference and model.ppl]
        beside = [found.against.ref_ppl for model in self.models if (found := model.estimates) and found.against]
        known = [ppl for ppl in rows or beside if ppl.value is not None]
        return max(known, key=lambda ppl: ppl.tokens).value if known else None

    @property
    def noise_floor(self) -> ModelResult | None:
        """The row that ``floor_of`` says."""
        return floor_of(self.models)

    @property
    def failed(self) -> tuple[ModelResult, ...]:
        """The models that have no score."""
        return tuple(model for model in self.models if model.error)


@dataclass(frozen=True)
class Part:
    """One of the runs that were merged (``eval/results/merge``): its file, its ``ORIGIN``, and the reference of
    its KLDs.

    ``labels``: the merged run's rows that come from this one.  ``reference_ppl``: the reference's perplexity in it.
    """

    file: str
    labels: tuple[str, ...]
    origin: dict[str, Any]
    reference: dict[str, Any] | None = None
    reference_ppl: float | None = None

    @property
    def reference_key(self) -> str | None:
        """The key of its reference, or of the earlier run's reference that this one is the same as."""
        found = self.reference or {}
        return found.get(SAME_AS) or found.get("key")

    @property
    def where(self) -> str:
        """The GPUs or the CPU of its machine."""
        return machine.words(self.origin["hardware"]) or "an unknown machine"

    @property
    def created(self) -> str:
        """When its results were written, ISO 8601."""
        return str(self.origin.get("created"))

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages with which it ran."""
        return dict(self.origin["versions"])


@dataclass(frozen=True)
class StoredRun(RunResult):
    """A finished run that was read back; ``origin`` (``ORIGIN``, JSON types) goes unchanged into every copy.

    ``parts``: the runs that it was merged from; empty for one that ran as a whole.
    """

    origin: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
