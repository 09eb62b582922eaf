"""The results of a run: a list of texts, of each text a row for each model, and the means over the texts.

One text is a list of one.  A macro mean weighs all texts alike, whatever their lengths: of KL divergence it is the mean
of the texts' means; of perplexity it is the exponential of the mean of the texts' ln PPL, the geometric mean, so that a
text with a large perplexity does not drown the others.  The texts' errors are independent: stderr = sqrt(sum of
stderr ** 2) / number of texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from compare_q.backends.base import Layer, Storage
from compare_q.backends.common import machine
from compare_q.backends.layers import groups
from compare_q.eval.results.timing import Timing
from compare_q.eval.stats.estimates import Estimates
from compare_q.eval.stats.uncertainty import Mean, Perplexity, Value

MARK = "\N{DAGGER}"
"""Beside the label of a model whose layers ran otherwise than its checkpoint asks."""
BRIEF = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Number formats as a narrow column has them."""
ORIGIN = ("created", "command", "commit", "versions", "hardware")
"""Keys of results.json that say when, how and where the run was made."""


@dataclass(frozen=True)
class WorstToken:
    """A token on which a model lost much: its place, its scores (nats), and its text with the text around it.

    ``position``: in window number ``window``.  ``kld`` and ``ref_logprob`` are None without a reference, and a score
    that is not finite is None.
    """

    window: int
    position: int
    kld: float | None
    logprob: float | None
    ref_logprob: float | None
    before: str = ""
    token: str = ""
    after: str = ""


@dataclass(frozen=True)
class ModelResult:
    """One row of the table.  ``error`` is set, and ``estimates`` None, if the model failed.

    ``kld`` and ``same_top`` are None without a reference, for the reference itself, and where an engine cannot tell
    them, as ``notes`` then say; ``notes`` are printed below the table.  ``scores_key`` is the key of the model's token
    scores in the cache.  ``timing`` is None where a worker did not tell it.
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
    notes: tuple[str, ...] = ()
    worst_tokens: tuple[WorstToken, ...] = ()
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
        return not self.layers or any(group.weights not in groups.PLAIN for group in self.layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """How its layers ran; empty where the engine does not tell."""
        return groups.groups_from_json(self.provenance.get("layers", ()))

    @property
    def kv_caches(self) -> tuple[groups.KVCache, ...]:
        """How its keys and values were cached; empty where the engine does not tell."""
        return groups.kv_caches_from_json(self.provenance.get("kv_cache_layers"))

    @property
    def kv_token_bytes(self) -> float | None:
        """Bytes that its KV cache takes for one token; None where the engine does not tell."""
        return groups.kv_token_bytes(self.kv_caches)

    @property
    def kv_mb(self) -> float | None:
        """Its KV cache for 1,000 tokens, in MB of 10^6 bytes."""
        return None if self.kv_token_bytes is None else self.kv_token_bytes / 1000

    @property
    def where(self) -> str:
        """The GPUs or the CPU that it ran on; empty where the engine does not tell (a server)."""
        return machine.words(self.provenance)

    @property
    def kv_cache(self) -> str:
        """The precision in which keys and values were kept ("bf16", "fp8 +bf16"); empty: the engine does not tell."""
        kept = str(self.provenance.get("kv_cache") or "")
        for name, brief in BRIEF.items():
            kept = kept.replace(name, brief)
        return kept

    @property
    def phase(self) -> str:
        """ "prefill", or "decode 1x32": in steps of one token of each of 32 windows."""
        return str(self.provenance.get("phase") or "prefill")

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


def floor_of(models: Sequence[ModelResult]) -> ModelResult | None:
    """The row that its spec calls the noise floor; of several such rows, the one with the largest KLD."""
    floors = ((model.kld, model) for model in models if model.is_noise_floor)
    known = [(kld.value, model) for kld, model in floors if kld is not None and kld.value is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


@dataclass(frozen=True)
class TextResult:
    """The models' results on one text, whose ``data`` are JSON types; ``subtitle`` says in plots what the text is.

    ``name`` tells the texts of a run apart.  ``reference`` (JSON types) describes the reference of the KLDs, with at
    least its ``label``, and ``contents``, "states" or "logits", while its store is there; None without a reference.
    A text that failed has the reason as its ``error``, and no models.
    """

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    subtitle: str = ""
    models: tuple[ModelResult, ...] = ()
    reference: dict[str, Any] | None = None
    error: str = ""

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

    @property
    def is_answers(self) -> bool:
        """Whether its windows are answers to questions, wrong ones too, so that its PPL says nothing of a text."""
        return "answers" in self.data


@dataclass(frozen=True)
class Results:
    """A run of one or more texts, whose names differ; every text without an error has the same labels, in one order.

    ``title``: the user's title of report and plots; None: each has its own.  ``origin`` (``ORIGIN``, JSON types) of a
    run that was read back goes unchanged into every copy; None: the run has just been made.
    """

    texts: tuple[TextResult, ...]
    title: str | None = None
    origin: dict[str, Any] | None = None

    @property
    def scored(self) -> tuple[TextResult, ...]:
        """The texts that did not fail."""
        return tuple(text for text in self.texts if not text.error)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of all models."""
        return tuple(model.label for model in self.scored[0].models) if self.scored else ()

    def of_label(self, label: str) -> tuple[ModelResult | None, ...]:
        """A model's result for each text; None for a text that failed."""
        return tuple(
            None if text.error else next(model for model in text.models if model.label == label) for text in self.texts
        )

    def mean_kld(self, label: str) -> Value:
        """Macro mean of a model's KLD, nats; unknown unless every text has one; 0 without error for the reference."""
        models = self.of_label(label)
        klds = [None if model is None else model.mean_kld for model in models]
        return macro_mean(klds, [model.kld.stderr if model and model.kld else None for model in models])

    def mean_ppl(self, label: str) -> Value:
        """Geometric mean of a model's perplexities, without those of answers; unknown unless every text has one."""
        models = zip(self.texts, self.of_label(label), strict=True)
        ppls = [None if model is None else model.ppl for text, model in models if not text.is_answers]
        logs = [None if ppl is None or not ppl.value else math.log(ppl.value) for ppl in ppls]
        errors = [ppl.stderr / ppl.value if ppl and ppl.value and ppl.stderr is not None else None for ppl in ppls]
        mean = macro_mean(logs, errors)
        if mean.value is None:
            return mean
        value = math.exp(mean.value)
        return Value(value, None if mean.stderr is None else value * mean.stderr)


def macro_mean(values: list[float | None], errors: list[float | None]) -> Value:
    """Mean of independent values and its error; unknown if any value is, without error if any error is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return Value(None)
    squares = [error**2 for error in errors if error is not None]
    stderr = math.sqrt(sum(squares)) / len(known) if len(squares) == len(values) else None
    return Value(math.fsum(known) / len(known), stderr)
