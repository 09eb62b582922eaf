"""A row of results.json: what a model is, its statistics, and what its run recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, field_validator

from ...backends.base import Layer, Storage
from ...backends.layers import groups
from ..common.stored import JsonObject, Number, Stored, Text
from ..stats.rollout_columns import RolloutStatistics
from ..stats.row_statistics import RowStatistics
from ..stats.uncertainty import Count, Error
from .row_facts import facts_of_provenance, facts_of_spec, facts_of_storage, options_of

MARK = "\N{DAGGER}"
"""After the label of a model whose layers ran differently from what its checkpoint asks."""
PREFILL_STEP = 2048
"""Tokens of a prefill step, as in ExLlamaV3 and, on small GPUs, in vLLM; llama.cpp computes 512."""


@dataclass(frozen=True)
class Timing:
    """Times of the steps of a row's worker, in seconds since 1970 by its machine's clock.

    ``started``: the driver requested the worker; ``loaded``: it could score; ``closed``: its engine was closed, None if
    that is not known.
    """  # noqa: E501

    started: float
    loaded: float
    score_began: float
    first_window: float
    last_window: float
    closed: float | None = None

    @property
    def scoring_seconds(self) -> float:
        """Seconds of scoring, the first step included, above 0."""
        return max(self.last_window - self.score_began, 1e-9)

    @property
    def seconds(self) -> dict[str, float | None]:
        """The seconds of each part of a worker's time.

        ``load`` includes the engine's import if that was not imported before; ``first_step`` ends
        with the first scored window, ``scoring`` with the last one.
        """
        close = None
        if self.closed is not None:
            close = self.closed - self.last_window
        return {
            "load": self.loaded - self.started,
            "first_step": self.first_window - self.score_began,
            "scoring": self.last_window - self.first_window,
            "close": close,
        }


class WorstToken(Stored):
    """A token on which a model lost much: its place, its scores, and its text with the text around it."""  # noqa: E501

    window: Count
    position: Count = Field(description="place in its window")
    kld: Number = Field(default=None, description="nats; None without a reference")
    logprob: Number = Field(
        default=None, description="the model's log-probability, nats; None if it is not finite"
    )
    ref_logprob: Number = Field(default=None, description="the reference's log-probability, nats")
    before: Text = ""
    token: Text = ""
    after: Text = ""


class CachePart(Stored):
    """The KV cache of a group of attention layers."""

    token_bytes: Error = Field(
        description="bytes of a token in all layers of the group, with scales, on all GPUs"
    )
    window: Count | None = Field(
        default=None, description="number of last tokens that are kept; None for all"
    )


class Memory(Stored):
    """The parts of the memory for serving one sequence; ``gigabytes`` adds them up for a context.

    A prefill step computes at most ``PREFILL_STEP`` tokens.  What an engine and its GPU libraries reserve is not
    contained: the GPU's context, CUDA graphs, workspaces, room for more sequences.
    """  # noqa: E501

    weights: Count | None = Field(
        default=None, description="weight files that it loads, bytes; from their sizes"
    )
    kv: tuple[CachePart, ...] = Field(default=(), description="KV cache; empty if not known")
    kv_source: str = Field(default="", description='"engine", or "config" in the dtype that ran')
    kv_is_upper: bool = Field(
        default=False, description="true if layers with a sliding window count in full"
    )
    logits: Count | None = Field(
        default=None, description="logits of a token in float32, bytes; from the vocabulary"
    )
    step_token: Count | None = Field(
        default=None, description="activations of a token, bytes; from the config"
    )
    context: Count | None = Field(
        default=None, description="tokens of the model's context; None if not known"
    )
    missing: Text | None = Field(
        default=None, description="a part that is not known, and why; None if all are"
    )

    def gigabytes(self, context: int) -> float | None:
        """Return the memory for ``context`` tokens in GB of 10^9 bytes.

        None if a part is not known.
        """
        if self.missing or self.weights is None or self.logits is None or self.step_token is None:
            return None
        cache = sum(part.token_bytes * min(context, part.window or context) for part in self.kv)
        step = self.step_token * min(context, PREFILL_STEP)
        return (self.weights + cache + self.logits + step) / 1e9


class ModelDescription(Stored):
    """The fields of a row about the model itself: how it ran, its size, and its memory."""

    label: Text
    engine: str
    where: Text | None = Field(
        default=None, description="GPUs or CPU that it ran on; None for a server"
    )
    kernel: Text | None = Field(
        default=None, description="short name of the kernel that ran most layers"
    )
    deviations: Text | None = Field(
        default=None, description="how it ran differently from what its checkpoint asks"
    )
    attention: Text | None = Field(
        default=None, description="the engine's name of the attention that ran"
    )
    engine_version: Text | None = Field(
        default=None, description="package and version that provided the engine"
    )
    options: Text | None = Field(
        default=None, description="options that its spec gives the engine, as JSON"
    )
    phase: str | None = Field(
        default=None, description='"prefill", or "decode 1x32": steps of 1 token of 32 windows'
    )
    kv_cache: str | None = Field(
        default=None, description="number format of the cached keys and values"
    )
    kv_mb: Error | None = Field(
        default=None, description="KV cache of 1,000 tokens, MB of 10^6 bytes"
    )
    bpw_layer: Error | None = Field(default=None, description="bits per weight of the layers")
    bpw_head: Error | None = Field(default=None, description="bits per weight of the head")
    vram_gib: Error | None = Field(default=None, description="layers and head, GiB")
    vram_bits: Error | None = Field(default=None, description="layers and head, bits")
    file_bytes: Count | None = Field(default=None, description="weight files on disk, bytes")
    storage_note: Text | None = Field(default=None, description="why a size is not known")
    memory: Memory | None = Field(
        default=None, description="memory of serving, in parts; None in older results"
    )
    fits: bool | None = Field(
        default=None, exclude=True, description="false above --fit; None if not known"
    )


class ModelResult(RolloutStatistics, RowStatistics, ModelDescription):
    """A row of the table: one model on one text.  ``error`` is set, and ``blocks`` None, if the model failed.

    Errors (``..._stderr``) are standard errors from the blocks of the text (``eval/stats/uncertainty.py``).  A field is
    None if its value is not known.
    """  # noqa: E501

    reference: bool = Field(default=False, description="true if the others are compared with it")
    noise_floor: bool = Field(
        default=False, description="true if its spec calls it the noise floor"
    )
    is_rollouts: bool = Field(
        default=False,
        description="true if its log-probabilities are those that were recorded with the text",
    )
    windows: Count = Field(default=0, description="scored windows")
    load_seconds: Error | None = Field(
        default=None, description="seconds of loading, in its worker"
    )
    score_seconds: Error | None = Field(
        default=None, description="seconds of scoring, the first step included"
    )
    tokens_per_second: Error | None = Field(
        default=None, description="scored tokens per second of scoring"
    )
    from_cache: bool = Field(default=False, description="true if an earlier run scored it")
    error: Text | None = Field(default=None, description="why it has no scores; None if it has")
    spec_sha256: str = Field(default="", description="digest of the spec")
    scores_key: str = Field(default="", description="key of its token scores in the cache")
    scores_digest: str = Field(
        default="", description="digest of the log-probabilities of all scored tokens"
    )
    seconds: dict[str, Error | None] | None = Field(
        default=None, description="load, first_step, scoring, close"
    )
    timing: Timing | None = Field(
        default=None, description="when its worker did what, seconds since 1970"
    )
    notes: tuple[Text, ...] = Field(default=(), description="footnotes of the row")
    spec: JsonObject = Field(default={}, description="its spec")
    provenance: JsonObject = Field(
        default={}, description="what ran: versions, hardware, options, groups of layers"
    )
    worst_tokens: tuple[WorstToken, ...] = Field(
        default=(), description="tokens with the largest KLD or loss"
    )

    @field_validator("provenance")
    @classmethod
    def check_layers(cls, provenance: dict[str, Any]) -> dict[str, Any]:
        """ValueError unless the groups of layers, which tables and plots read, can be read."""
        try:
            groups.groups_from_json(provenance.get("layers", ()))
            groups.kv_caches_from_json(provenance.get("kv_cache_layers", ()))
        except (KeyError, TypeError, ValueError):
            raise ValueError("layers or kv_cache_layers are not groups of layers") from None
        return provenance

    @classmethod
    def of(cls, label: str, engine: str, storage: Storage | None = None, **fields: Any) -> Self:
        """Return a row: ``fields``, and the fields that follow from them and from the ``storage``.

        ValidationError for values that results.json cannot have.
        """
        if storage is None:
            storage = Storage()
        facts = {
            "label": label,
            "engine": engine,
            **facts_of_storage(storage),
            **facts_of_spec(fields.get("spec", {})),
            **facts_of_provenance(fields.get("provenance", {})),
        }
        if fields.get("error"):
            facts["phase"] = None
        elif fields.get("reference"):
            fields["kld"] = 0.0
        tokens = fields.get("tokens")
        seconds = fields.get("score_seconds")
        if tokens is not None and seconds:
            non_finite = fields.get("non_finite") or 0
            facts["tokens_per_second"] = (tokens + non_finite) / seconds
        timing = fields.get("timing")
        if timing is not None:
            facts["seconds"] = timing.seconds
        # ``fields`` come last: rows scored on a shared GPU set ``tokens_per_second`` to None.
        return cls(**facts | fields)

    @property
    def is_compared(self) -> bool:
        """True if its scores were compared with a reference's."""
        return self.ref_ppl_tokens is not None

    @property
    def has_bound(self) -> bool:
        """True if its KLDs are bounds: it loses at least as much."""
        return self.kld is not None and self.kld_kind == "bound"

    @property
    def scored_tokens(self) -> int:
        """All scored tokens, also those without a finite log-probability."""
        return (self.tokens or 0) + (self.non_finite or 0)

    @property
    def is_quantized(self) -> bool:
        """True if its layers store less than 16 bits per weight.

        If their size is unknown: if a layer is quantized, or the layers are unknown too.
        Rollouts cannot be the best model of a column.
        """
        if self.is_rollouts:
            return False
        if self.bpw_layer is not None:
            return self.bpw_layer < 16
        if not self.layers:
            return True
        return any(group.weights not in groups.UNQUANTIZED_FORMATS for group in self.layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Groups of layers, with the kernel of each; empty if the engine does not report them."""
        return groups.groups_from_json(self.provenance.get("layers", ()))

    @property
    def kv_caches(self) -> tuple[groups.KVCache, ...]:
        """Groups of KV caches; empty if the engine does not report them."""
        return groups.kv_caches_from_json(self.provenance.get("kv_cache_layers"))

    @property
    def engine_options(self) -> dict[str, Any]:
        """The options that its spec gives the engine."""
        return options_of(self.spec)

    @property
    def loads(self) -> tuple[Any, ...]:
        """Load function, folder and phase: rows that share them differ only in their options."""
        folder = self.spec.get("model_dir")
        if isinstance(folder, list):
            paths = folder[:1]  # without the options that follow
        else:
            paths = [folder]
        return self.spec.get("load_fn"), paths, self.phase

    def scores_equal(self, other: ModelResult) -> bool:
        """True if both have the same log-probability at every token, to the last bit."""
        return self.scores_digest == other.scores_digest != ""

    @property
    def marked_label(self) -> str:
        """The label, with a mark if the layers ran differently from what the checkpoint asks."""
        if self.deviations:
            return f"{self.label} {MARK}"
        return self.label

    @property
    def flat(self) -> dict[str, Any]:
        """The fields of CSV and pandas, by their names in results.json."""
        return self.model_dump(exclude=set(NOT_FLAT))


NOT_FLAT = frozenset(
    {
        # several values
        "memory",
        "kld_percentiles",
        "delta_p_percentiles",
        "slices",
        "blocks",
        "curve",
        "seconds",
        "timing",
        "notes",
        "spec",
        "provenance",
        "worst_tokens",
        "worst_sequences",
        "ln_seq_ratio_percentiles",
        # statistics of llama.cpp, and inputs of footnotes
        "ref_ppl",
        "ref_ppl_tokens",
        "ppl_difference",
        "ppl_difference_stderr",
        "correlation",
        "delta_p",
        "delta_p_stderr",
        "delta_p_rms",
        "delta_p_rms_stderr",
        "ln_ppl_stderr_of_text",
        "kld_stderr_of_text",
    }
)
"""Fields of a row that CSV and pandas leave out."""


def noise_floor_of(models: Sequence[ModelResult]) -> ModelResult | None:
    """Return the noise floor, as marked in its spec: of several, the one with the largest KLD.

    A row whose KLD is a bound is none: roundings may cost more than it has.
    """
    largest = None
    largest_kld = 0.0
    for model in models:
        if not model.noise_floor or model.kld is None or model.has_bound:
            continue
        if largest is None or model.kld > largest_kld:
            largest = model
            largest_kld = model.kld
    return largest
