"""The results of a run, as results.json holds them: facts about its windows, its reference, and a
row for each model.

``RunResult.write`` and ``read`` are the only writer and reader;
``eval/spec/schema/results.schema.json`` is their schema.  Log-probabilities, losses and KLDs are in
nats per token, shares from 0 to 1.  A row's numbers are over all scored tokens; the estimates of a
part of the tokens, such as one text, are in the row's ``slices``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator

from .. import __version__
from ..backends.base import Layer, Storage
from ..backends.common import json_files, machine
from ..backends.common.engine_options import describe
from ..backends.common.errors import InputError
from ..backends.common.message_text import printable, shortened, unicode
from ..backends.layers import groups
from .common.output_files import write_text
from .common.stored import JsonObject, Number, Positive, Stored, Text
from .stats.estimates import PERCENTILES, BlockSums, Curve
from .stats.slices import Slice
from .stats.uncertainty import Count, Error

FORMAT = 9
"""Version of the layout of results.json; other versions are not read."""
MARK = "\N{DAGGER}"
"""After the label of a model whose layers ran differently from what its checkpoint asks."""
BRIEF = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Number formats for a narrow column."""
PREFILL_STEP = 2048
"""Tokens of a prefill step, as in ExLlamaV3 and, on small GPUs, in vLLM; llama.cpp computes 512."""
EMBEDDED = b'<script type="application/json" id="results">'
EMBEDDED_END = b"</script>"
"""The texts before and after the results.json in a report.html."""
NO_RESULTS = "neither a results.json nor a report.html of compare_q"


def all_or_none(percentiles: dict[str, float]) -> dict[str, float]:
    """ValueError unless all percentiles are known, or none is: the plot needs all."""
    if percentiles and set(percentiles) != set(PERCENTILES):
        raise ValueError(f"must have the percentiles {', '.join(PERCENTILES)}")
    return percentiles


Percentiles = Annotated[dict[str, float], AfterValidator(all_or_none)]
"""Percent ("50"), "min" and "max" -> value; empty if not known."""


@dataclass(frozen=True)
class Timing:
    """Times of the steps of a row's worker, in seconds since 1970 by its machine's clock.

    ``started``: the driver requested the worker; ``loaded``: it could score; ``closed``: its engine was closed, None if
    that is not known.
    """

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
        return {
            "load": self.loaded - self.started,
            "first_step": self.first_window - self.score_began,
            "scoring": self.last_window - self.first_window,
            "close": None if self.closed is None else self.closed - self.last_window,
        }


class WorstToken(Stored):
    """A token on which a model lost much: its place, its scores, and its text with the text around it."""

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
    """

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
        """Return the memory for ``context`` tokens in GB of 10^9 bytes; None if a part is not
        known.
        """
        if self.missing or self.weights is None or self.logits is None or self.step_token is None:
            return None
        cache = sum(part.token_bytes * min(context, part.window or context) for part in self.kv)
        return (
            self.weights + cache + self.logits + self.step_token * min(context, PREFILL_STEP)
        ) / 1e9


class ModelResult(Stored):
    """A row of the table: one model on one text.  ``error`` is set, and ``blocks`` None, if the model failed.

    Errors (``..._stderr``) are standard errors from the blocks of the text (``eval/stats/uncertainty.py``).  A field is
    None if its value is not known.
    """

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

    # The statistics, which eval/run/row.py fills.
    ppl: Positive | None = Field(
        default=None, description="perplexity; None also if it is too large for a number"
    )
    ppl_stderr: Error | None = Field(
        default=None, description="its error: mostly the choice of text, common to all rows"
    )
    ppl_stderr_independent: Error | None = Field(
        default=None, description="its error if tokens were independent"
    )
    logprob_sum: Number = Field(
        default=None, description="sum of the finite log-probabilities, nats"
    )
    tokens: Count | None = Field(
        default=None, description="scored tokens with a finite log-probability"
    )
    non_finite: Count | None = Field(
        default=None, description="scored tokens without one, which means leave out"
    )
    ln_ppl_ratio: Number = Field(default=None, description="ln(PPL / PPL of the reference)")
    ln_ppl_ratio_stderr: Error | None = Field(default=None, description="its paired error")
    ppl_ratio: Number = Field(default=None, description="PPL / PPL of the reference")
    ppl_ratio_stderr: Error | None = Field(default=None, description="its paired error")
    kld: Number = Field(
        default=None, description="mean KL(reference || model), nats per token; 0 for the reference"
    )
    kld_stderr: Error | None = Field(default=None, description="its error, nats")
    kld_median: Number = Field(default=None, description="median of the tokens' KLDs, nats")
    kld_p99: Number = Field(default=None, description="99th percentile of the tokens' KLDs, nats")
    kld_p99_9: Number = Field(
        default=None, alias="kld_p99.9", description="99.9th percentile of the tokens' KLDs, nats"
    )
    kld_max: Number = Field(default=None, description="largest KLD of a token, nats")
    kld_sum: Number = Field(default=None, description="sum of the finite KLDs, nats")
    kld_tokens: Count | None = Field(default=None, description="tokens with a finite KLD")
    kld_non_finite: Count | None = Field(
        default=None, description="tokens without one, which the mean leaves out"
    )
    same_top: Number = Field(
        default=None, description="share of tokens with the reference's most probable token"
    )
    same_top_stderr: Error | None = Field(default=None, description="its error")
    top1: Number = Field(
        default=None,
        description="share of tokens of the text that are the model's most probable ones",
    )
    entropy: Number = Field(
        default=None, description="mean entropy of the model's predictions, nats"
    )
    bits_per_byte: Number = Field(
        default=None, description="loss in bits per byte of the text (UTF-8)"
    )
    byte_perplexity: Number = Field(default=None, description="perplexity per byte")
    word_perplexity: Number = Field(default=None, description="perplexity per word")
    ref_ppl: Positive | None = Field(
        default=None,
        description="the reference's perplexity on the tokens that both have a finite log-probability of",
    )
    ref_ppl_tokens: Count | None = Field(default=None, description="number of these tokens")
    ppl_difference: Number = Field(
        default=None, description="PPL - PPL of the reference on these tokens"
    )
    ppl_difference_stderr: Error | None = Field(default=None, description="its paired error")
    correlation: Number = Field(
        default=None, description="correlation of both models' losses; None if one is constant"
    )
    delta_p: Number = Field(
        default=None,
        description="mean change of a token's probability: the model's minus the reference's",
    )
    delta_p_stderr: Error | None = Field(default=None, description="its error")
    delta_p_rms: Number = Field(
        default=None, description="root of the mean square of these changes"
    )
    delta_p_rms_stderr: Error | None = Field(default=None, description="its error")
    ln_ppl_stderr_of_text: Error | None = Field(
        default=None,
        description="error of ln PPL as that of all windows of the text, of which these are a sample",
    )
    kld_stderr_of_text: Error | None = Field(
        default=None, description="error of the KLD as that of all windows of the text, nats"
    )
    kld_percentiles: Percentiles = Field(
        default={}, description="percentiles of the tokens' KLDs, nats"
    )
    delta_p_percentiles: Percentiles = Field(default={}, description="percentiles of these changes")
    slices: dict[str, Slice] = Field(
        default={}, description="statistics of named parts of the scored tokens"
    )
    blocks: BlockSums | None = Field(
        default=None, description="sums by block of the text: differences of two rows"
    )
    curve: Curve | None = Field(default=None, description="means by position in the window")

    reference: bool = Field(default=False, description="true if the others are compared with it")
    noise_floor: bool = Field(
        default=False, description="true if its spec calls it the noise floor"
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
        facts = {
            "label": label,
            "engine": engine,
            **facts_of_storage(storage or Storage()),
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
            facts["tokens_per_second"] = (tokens + (fields.get("non_finite") or 0)) / seconds
        timing = fields.get("timing")
        if timing is not None:
            facts["seconds"] = timing.seconds
        return cls(**facts | fields)

    @property
    def is_compared(self) -> bool:
        """True if its scores were compared with a reference's."""
        return self.kld_tokens is not None

    @property
    def scored_tokens(self) -> int:
        """All scored tokens, also those without a finite log-probability."""
        return (self.tokens or 0) + (self.non_finite or 0)

    @property
    def is_quantized(self) -> bool:
        """True if its layers store less than 16 bits per weight, or if the size is unknown and a
        layer is quantized.

        A model whose size and layers are both unknown counts as quantized.
        """
        if self.bpw_layer is not None:
            return self.bpw_layer < 16
        return not self.layers or any(group.weights not in groups.PLAIN for group in self.layers)

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
        parts = folder[:1] if isinstance(folder, list) else [folder]
        return self.spec.get("load_fn"), parts, self.phase

    def scores_equal(self, other: ModelResult) -> bool:
        """True if both have the same log-probability at every token, to the last bit."""
        return self.scores_digest == other.scores_digest != ""

    @property
    def marked_label(self) -> str:
        """The label, with a mark if the layers ran differently from what the checkpoint asks."""
        return f"{self.label} {MARK}" if self.deviations else self.label

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


def facts_of_storage(storage: Storage) -> dict[str, Any]:
    """The fields of a row about the size of its weights."""
    return {
        "bpw_layer": storage.bpw_layer,
        "bpw_head": storage.bpw_head,
        "vram_gib": storage.vram_gib,
        "vram_bits": storage.vram_bits,
        "file_bytes": storage.file_bytes,
        "storage_note": storage.note or None,
    }


def facts_of_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that its spec gives."""
    return {
        "options": ", ".join(option_texts(options_of(spec))) or None,
        "noise_floor": bool(spec.get("noise_floor")),
    }


def facts_of_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row about its machine, kernels, attention and KV cache."""
    layers = groups.groups_from_json(provenance.get("layers", ()))
    kv_caches = groups.kv_caches_from_json(provenance.get("kv_cache_layers"))
    token_bytes = groups.kv_token_bytes(kv_caches)
    kv_cache = str(provenance.get("kv_cache") or "")
    for name, brief in BRIEF.items():
        kv_cache = kv_cache.replace(name, brief)
    return {
        "where": machine.words(provenance) or None,
        "kernel": groups.kernel_of(layers) or None,
        "deviations": "; ".join(deviations_of(provenance)) or None,
        "attention": str(provenance.get("attention") or "") or None,
        "engine_version": str(provenance.get("engine_version") or "") or None,
        "phase": str(provenance.get("phase") or "prefill"),
        "kv_cache": kv_cache or None,
        "kv_mb": None if token_bytes is None else token_bytes / 1000,
    }


def options_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a model spec gives the engine, in ``engine`` or in ``[dir, options]``."""
    engine = spec.get("engine")
    options = dict(engine) if isinstance(engine, dict) else {}
    folder = spec.get("model_dir")
    if isinstance(folder, list) and folder and isinstance(folder[-1], dict):
        options |= folder[-1]
    return options


def option_texts(options: Mapping[str, Any]) -> list[str]:
    """Each option as ``name=value``."""
    texts = []
    for name, value in options.items():
        written = value if isinstance(value, str) else json.dumps(value)
        texts.append(f"{name}={written}")
    return texts


def deviations_of(provenance: Mapping[str, Any]) -> list[str]:
    """Return one clause per way in which a model ran differently from its checkpoint or spec."""
    layers = groups.groups_from_json(provenance.get("layers", ()))
    kv_caches = groups.kv_caches_from_json(provenance.get("kv_cache_layers"))
    of_engine = provenance.get("deviations")
    clauses = (
        [each for each in of_engine if isinstance(each, str)] if isinstance(of_engine, list) else []
    )
    return groups.deviations(layers) + groups.kv_deviations(kv_caches) + clauses


def noise_floor_of(models: Sequence[ModelResult]) -> ModelResult | None:
    """The noise floor, as marked in its spec; of several such rows, the one with the largest KLD."""
    floors = [model for model in models if model.noise_floor and model.kld is not None]
    return max(floors, key=lambda model: model.kld or 0.0, default=None)


class UsedText(Stored):
    """Types of those facts about one text that tables and reports use."""

    name: Text = Field(min_length=1)
    spec: dict[str, Any] = Field(default={})
    text_tokens: Count | None = None
    windows: Count = 0
    windows_of_the_text: Count | None = None
    window_length: Count = 0
    scored_tokens: Count = 0
    method: str | None = None
    text_note: str = ""
    notes: list[str] = Field(default=[])


class UsedData(Stored):
    """Types of those facts about the windows that tables and reports use."""

    texts: list[UsedText] = Field(min_length=1)
    windows: Count = 0
    window_length: Count = 0
    scored_tokens: Count = 0
    windows_sha256: str | None = None
    vocabulary_sha256: str | None = None


class UsedReference(Stored):
    """Types of those facts about the reference that tables and plots use."""

    label: str
    key: str | None = None


def check_types(types: type[Stored], values: dict[str, Any]) -> None:
    """ValueError in one line for a value that has another type."""
    try:
        types.model_validate(values)
    except ValidationError as error:
        raise ValueError(describe(error, ())) from None


class RunResult(Stored):
    """A run: its windows, its reference, and a row for each model."""

    format: Literal[9] = 9
    created: str = Field(
        default="", description="date and time of the run; empty until it is written"
    )
    command: tuple[Text, ...] = Field(default=(), description="the command line")
    commit: str | None = Field(default=None, description="commit of the checkout of compare_q")
    versions: dict[str, str] = Field(default={})
    hardware: JsonObject = Field(default={})
    title: Text | None = Field(
        default=None, description="the user's title of report and plots; None: each has its own"
    )
    subtitle: Text = Field(default="", description="what the windows are, for plots")
    data: JsonObject = Field(
        description="facts about each of the ``texts``; digests and numbers of all windows"
    )
    reference: JsonObject | None = Field(
        default=None, description="label, key, identity; None without one"
    )
    models: tuple[ModelResult, ...]

    @field_validator("data")
    @classmethod
    def check_data(cls, data: dict[str, Any]) -> dict[str, Any]:
        check_types(UsedData, data)
        return data

    @field_validator("reference")
    @classmethod
    def check_reference(cls, reference: dict[str, Any] | None) -> dict[str, Any] | None:
        if reference is not None:
            check_types(UsedReference, reference)
        return reference

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of all models."""
        return tuple(model.label for model in self.models)

    @property
    def texts(self) -> tuple[UsedText, ...]:
        """Facts about each text."""
        return tuple(UsedData.model_validate(self.data).texts)

    @property
    def slices(self) -> tuple[str, ...]:
        """The names of all slices that a row has, in their order."""
        names = dict.fromkeys(name for model in self.models for name in model.slices)
        return tuple(names)

    @property
    def text_tokens(self) -> int | None:
        """Tokens of all texts together, scored or not; None if the number of one text is not known."""
        counts = [text.text_tokens for text in self.texts]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def available_windows(self) -> int:
        """Windows that the whole texts would have; of a text without a sample, its scored ones."""
        return sum(text.windows_of_the_text or text.windows for text in self.texts)

    @property
    def is_sample(self) -> bool:
        """True if the windows of a text are a part that is spread over it."""
        return any(text.windows_of_the_text is not None for text in self.texts)

    @property
    def reference_ppl(self) -> float | None:
        """The reference's perplexity, from its own row, or else from the model with most scored
        tokens.
        """
        known = [(row.tokens or 0, row.ppl) for row in self.models if row.reference and row.blocks]
        if not known:
            known = [
                (row.ref_ppl_tokens or 0, row.ref_ppl) for row in self.models if row.is_compared
            ]
        known = [(tokens, ppl) for tokens, ppl in known if ppl is not None]
        if not known:
            return None
        _, ppl = max(known, key=lambda each: each[0])
        return ppl

    @property
    def noise_floor(self) -> ModelResult | None:
        """The row of ``noise_floor_of``."""
        return noise_floor_of(self.models)

    def with_origin(self, command: Sequence[str]) -> RunResult:
        """The run with the date, versions and hardware of now; unchanged if it was read from a
        file.
        """
        return self if self.created else self.updated(**origin(command))

    def masked(self, keeps: Sequence[str]) -> RunResult:
        """The run with only the models of these labels; the reference's row stays."""
        models = [model for model in self.models if model.label in keeps or model.reference]
        return self.updated(models=tuple(models))

    def write(self, file: Path) -> None:
        """Write results.json atomically."""
        write_text(file, self.json_text())

    def json_text(self) -> str:
        """The content of results.json."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def read(cls, file: Path) -> RunResult:
        """The run of a results.json or a report.html; InputError in one line for another file or
        format, or damage.
        """
        name = printable(file)
        content = json_of(file)
        raw = json_files.parsed(content, name)
        if not isinstance(raw, dict) or "format" not in raw:
            raise InputError(f"{name}: {NO_RESULTS}")
        if raw["format"] != FORMAT:
            other = f"results of format {shortened(repr(raw['format']), 20)}, but this compare_q reads format {FORMAT}"
            raise InputError(
                f"{name}: {other}; run compare_q again with -o (token scores in the cache are used)"
            )
        try:
            run = cls.model_validate_json(content)
            check_names(run)
        except ValidationError as error:
            raise InputError(f"{name}: damaged results: {describe(error, ())}") from None
        except ValueError as error:
            raise InputError(f"{name}: damaged results: {error}") from None
        return run


def origin(command: Sequence[str]) -> dict[str, Any]:
    """The fields of a run that say when, how and where it was made: now, by this command, on this
    machine.
    """
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": tuple(map(unicode, command)),
        "commit": machine.commit(),
        "versions": {**machine.versions(), "compare-q": __version__},
        "hardware": machine.hardware(machine.gpus(), cpu_only=machine.cpu_build_of_torch())
        | machine.threads(),
    }


def json_of(file: Path) -> bytes:
    """The results.json in a file, which may be a report.html; InputError if there is none."""
    content = json_files.read_bytes(file)
    if content.lstrip().startswith(
        b"{"
    ):  # in a JSON object a label may hold what EMBEDDED looks for
        return content
    begin = content.find(EMBEDDED)
    end = content.find(EMBEDDED_END, begin)
    if begin < 0 or end < 0:
        raise InputError(f"{printable(file)}: {NO_RESULTS}")
    return content[begin + len(EMBEDDED) : end]


def check_names(run: RunResult) -> None:
    """ValueError unless there are rows, and names of texts and labels of rows are unique."""
    if not run.labels:
        raise ValueError("models: there is none")
    names = [text.name for text in run.texts]
    if len(set(names)) < len(names):
        raise ValueError("data.texts: two have one name")
    if len(set(run.labels)) < len(run.labels):
        raise ValueError("models: two have one label")


def json_schema() -> dict[str, Any]:
    """The JSON Schema of results.json; ``python -m compare_q.eval.results`` writes it."""
    schema = RunResult.model_json_schema(mode="serialization")
    return {"title": "results.json of compare_q", **schema}


if __name__ == "__main__":
    target = Path(__file__).parent / "spec" / "schema" / "results.schema.json"
    target.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
