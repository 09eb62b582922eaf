"""The results of a run, as results.json holds them: texts, a row for each model on each text, and means over texts.

``RunResult.write`` and ``read`` are the only writer and reader; ``eval/spec/schema/results.schema.json`` is their
schema.  Log-probabilities, losses and KLDs are in nats per token, shares from 0 to 1.

A macro mean gives all texts the same weight, long or short.  For KLD it is the mean of the texts' means; for
perplexity it is the exponential of the mean of the texts' ln PPL.  The texts' errors are independent:
stderr = sqrt(sum of stderr ** 2) / number of texts.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, computed_field

from compare_q import __version__
from compare_q.backends.base import Layer, Storage
from compare_q.backends.common import json_files, machine
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable, redacted, shortened, unicode
from compare_q.backends.common.options import describe
from compare_q.backends.layers import groups
from compare_q.eval.common.files import write_text
from compare_q.eval.specs.reading import numbered
from compare_q.eval.stats.estimates import PERCENTILES, AgainstReference, Estimates
from compare_q.eval.stats.uncertainty import Count, Error, Value

FORMAT = 8
"""Version of the layout of results.json; other versions are not read."""
MARK = "\N{DAGGER}"
"""After the label of a model whose layers ran differently from what its checkpoint asks."""
BRIEF = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Number formats for a narrow column."""
PREFILL_STEP = 2048
"""Tokens of a prefill step, as in ExLlamaV3 and, on small GPUs, in vLLM; llama.cpp computes 512."""
EMBEDDED = re.compile(rb'<script type="application/json" id="results">(.*?)</script>', re.DOTALL)
"""The results.json in a report.html."""
NO_RESULTS = "neither a results.json nor a report.html of compare_q"


def json_value(value: Any) -> Any:
    """Return the value as JSON: tuples become lists; bytes of a name that are not UTF-8 become escape sequences.

    ValueError for a number that is not finite.
    """
    if isinstance(value, str):
        return unicode(value)
    if isinstance(value, Mapping):
        return {unicode(str(key)): json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number that JSON has")
    return value


Text = Annotated[str, BeforeValidator(lambda value: redacted(unicode(value)) if isinstance(value, str) else value)]
JsonObject = Annotated[dict[str, Any], AfterValidator(json_value), AfterValidator(redacted)]
Number = float | None


class Stored(BaseModel):
    """A part of results.json.  All numbers are finite, since JSON has no other numbers; rows are checked when made."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", allow_inf_nan=False, revalidate_instances="always",
        validate_by_name=True, validate_by_alias=True, serialize_by_alias=True,
    )  # fmt: skip

    def updated(self, **changes: Any) -> Self:
        """A copy with other values of some fields; ValidationError for values that results.json cannot have."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


PARTS = ("load", "first_step", "scoring", "close")
"""Parts of a worker's time, in their order.

``load`` includes the engine's import if that was not imported before; ``first_step`` ends with the first scored window,
``scoring`` with the last one.
"""


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
        """The seconds of each of the ``PARTS``."""
        return {
            "load": self.loaded - self.started,
            "first_step": self.first_window - self.score_began,
            "scoring": self.last_window - self.first_window,
            "close": None if self.closed is None else self.closed - self.last_window,
        }


def copied(path: str, description: str, alias: str | None = None) -> Any:
    """A flat field that copies the value at ``path`` in ``estimates``; None if this value does not exist."""
    return Field(default=None, alias=alias, description=description, json_schema_extra={"copied_from": path})


class WorstToken(Stored):
    """A token on which a model lost much: its place, its scores, and its text with the text around it."""

    window: Count
    position: Count = Field(description="place in its window")
    kld: Number = Field(default=None, description="nats; None without a reference")
    logprob: Number = Field(default=None, description="the model's log-probability, nats; None if it is not finite")
    ref_logprob: Number = Field(default=None, description="the reference's log-probability, nats")
    before: Text = ""
    token: Text = ""
    after: Text = ""


class CachePart(Stored):
    """The KV cache of a group of attention layers."""

    token_bytes: Error = Field(description="bytes of a token in all layers of the group, with scales, on all GPUs")
    window: Count | None = Field(default=None, description="number of last tokens that are kept; None for all")


class Memory(Stored):
    """The parts of the memory for serving one sequence; ``gigabytes`` adds them up for a context.

    A prefill step computes at most ``PREFILL_STEP`` tokens.  What an engine and its GPU libraries reserve is not
    contained: the GPU's context, CUDA graphs, workspaces, room for more sequences.
    """

    weights: Count | None = Field(default=None, description="weight files that it loads, bytes; from their sizes")
    kv: tuple[CachePart, ...] = Field(default=(), description="KV cache; empty if not known")
    kv_source: str = Field(default="", description='"engine", or "config" in the dtype that ran')
    kv_is_upper: bool = Field(default=False, description="true if layers with a sliding window count in full")
    logits: Count | None = Field(default=None, description="logits of a token in float32, bytes; from the vocabulary")
    step_token: Count | None = Field(default=None, description="activations of a token, bytes; from the config")
    missing: Text | None = Field(default=None, description="a part that is not known, and why; None if all are")

    def gigabytes(self, context: int) -> float | None:
        """Return the memory for ``context`` tokens in GB of 10^9 bytes; None if a part is not known."""
        if self.missing or self.weights is None or self.logits is None or self.step_token is None:
            return None
        cache = sum(part.token_bytes * min(context, part.window or context) for part in self.kv)
        return (self.weights + cache + self.logits + self.step_token * min(context, PREFILL_STEP)) / 1e9


class ModelResult(Stored):
    """A row of the table: one model on one text.  ``error`` is set, and ``estimates`` None, if the model failed.

    ``of`` makes a row; it fills the flat fields from ``estimates``, storage and provenance.  Errors (``..._stderr``)
    are standard errors from the blocks of the text (``eval/stats/uncertainty.py``).
    """

    label: Text
    engine: str
    where: Text | None = Field(default=None, description="GPUs or CPU that it ran on; None for a server")
    kernel: Text | None = Field(default=None, description="short name of the kernel that ran most layers")
    deviations: Text | None = Field(default=None, description="how it ran differently from what its checkpoint asks")
    attention: Text | None = Field(default=None, description="the engine's name of the attention that ran")
    engine_version: Text | None = Field(default=None, description="package and version that provided the engine")
    options: Text | None = Field(default=None, description="options that its spec gives the engine, as JSON")
    phase: str | None = Field(default=None, description='"prefill", or "decode 1x32": steps of 1 token of 32 windows')
    kv_cache: str | None = Field(default=None, description="number format of the cached keys and values")
    kv_mb: Error | None = Field(default=None, description="KV cache of 1,000 tokens, MB of 10^6 bytes")
    bpw_layer: Error | None = Field(default=None, description="bits per weight of the layers")
    bpw_head: Error | None = Field(default=None, description="bits per weight of the head")
    vram_gib: Error | None = Field(default=None, description="layers and head, GiB")
    vram_bits: Error | None = Field(default=None, description="layers and head, bits")
    file_bytes: Count | None = Field(default=None, description="weight files on disk, bytes")
    storage_note: Text | None = Field(default=None, description="why a size is not known")
    memory: Memory | None = Field(default=None, description="memory of serving, in parts; None in older results")
    fits: bool | None = Field(default=None, exclude=True, description="false above --fit; None if not known")

    ppl: Number = copied("ppl/value", "perplexity; None also if it is too large for a number")
    ppl_stderr: Number = copied("ppl/stderr", "its error: mostly the choice of text, common to all rows")
    ppl_stderr_independent: Number = copied("ppl/stderr_independent", "its error if tokens were independent")
    logprob_sum: Number = copied("ppl/logprob_sum", "sum of the finite log-probabilities, nats")
    tokens: Count | None = copied("ppl/tokens", "scored tokens with a finite log-probability")
    non_finite: Count | None = copied("ppl/non_finite", "scored tokens without one, which means leave out")
    ln_ppl_ratio: Number = copied("against/ln_ppl_ratio/value", "ln(PPL / PPL of the reference)")
    ln_ppl_ratio_stderr: Number = copied("against/ln_ppl_ratio/stderr", "its paired error")
    ppl_ratio: Number = copied("against/ppl_ratio/value", "PPL / PPL of the reference")
    ppl_ratio_stderr: Number = copied("against/ppl_ratio/stderr", "its paired error")
    kld: Number = Field(default=None, description="mean KL(reference || model), nats per token; 0 for the reference")
    kld_stderr: Number = copied("against/kld/stderr", "its error, nats")
    kld_median: Number = copied("against/kld_percentiles/50", "median of the tokens' KLDs, nats")
    kld_p99: Number = copied("against/kld_percentiles/99", "99th percentile of the tokens' KLDs, nats")
    kld_p99_9: Number = copied(
        "against/kld_percentiles/99.9", "99.9th percentile of the tokens' KLDs, nats", "kld_p99.9"
    )
    kld_max: Number = copied("against/kld_percentiles/max", "largest KLD of a token, nats")
    kld_sum: Number = copied("against/kld/total", "sum of the finite KLDs, nats")
    kld_tokens: Count | None = copied("against/kld/tokens", "tokens with a finite KLD")
    kld_non_finite: Count | None = copied("against/kld/non_finite", "tokens without one, which the mean leaves out")
    same_top: Number = copied("against/same_top/value", "share of tokens with the reference's most probable token")
    same_top_stderr: Number = copied("against/same_top/stderr", "its error")
    top1: Number = copied("top1/value", "share of tokens of the text that are the model's most probable ones")
    entropy: Number = copied("entropy/value", "mean entropy of the model's predictions, nats")
    bits_per_byte: Number = copied("rates/bits_per_byte/value", "loss in bits per byte of the text (UTF-8)")
    byte_perplexity: Number = copied("rates/byte_perplexity/value", "perplexity per byte")
    word_perplexity: Number = copied("rates/word_perplexity/value", "perplexity per word")

    reference: bool = Field(default=False, description="true if the others are compared with it")
    noise_floor: bool = Field(default=False, description="true if its spec calls it the noise floor")
    windows: Count = Field(default=0, description="scored windows")
    load_seconds: Error | None = Field(default=None, description="seconds of loading, in its worker")
    score_seconds: Error | None = Field(default=None, description="seconds of scoring, the first step included")
    tokens_per_second: Error | None = Field(default=None, description="scored tokens per second of scoring")
    from_cache: bool = Field(default=False, description="true if an earlier run scored it")
    error: Text | None = Field(default=None, description="why it has no scores; None if it has")
    spec_sha256: str = Field(default="", description="digest of the spec")
    scores_key: str = Field(default="", description="key of its token scores in the cache")
    scores_digest: str = Field(default="", description="digest of the log-probabilities of all scored tokens")
    seconds: dict[str, Error | None] | None = Field(default=None, description="load, first_step, scoring, close")
    timing: Timing | None = Field(default=None, description="when its worker did what, seconds since 1970")
    notes: tuple[Text, ...] = Field(default=(), description="footnotes of the row")
    spec: JsonObject = Field(default={}, description="its spec")
    provenance: JsonObject = Field(default={}, description="what ran: versions, hardware, options, groups of layers")
    estimates: Estimates | None = Field(default=None, description="every statistic, with sums and curves")
    worst_tokens: tuple[WorstToken, ...] = Field(default=(), description="tokens with the largest KLD or loss")

    @classmethod
    def of(
        cls, label: str, engine: str, storage: Storage | None = None, estimates: Estimates | None = None, **fields: Any
    ) -> Self:
        """Return a row with its flat fields filled; ``fields``: the fields that cannot be computed, by their names.

        ValidationError for values that results.json cannot have.
        """
        size, provenance, timing = storage or Storage(), fields.get("provenance", {}), fields.get("timing")
        layers = groups.groups_from_json(provenance.get("layers", ()))
        kv_caches = groups.kv_caches_from_json(provenance.get("kv_cache_layers"))
        token_bytes, kv_cache = groups.kv_token_bytes(kv_caches), str(provenance.get("kv_cache") or "")
        for name, brief in BRIEF.items():
            kv_cache = kv_cache.replace(name, brief)
        flat: dict[str, Any] = {
            name: value_at(estimates, str(field.json_schema_extra["copied_from"]))
            for name, field in cls.model_fields.items() if isinstance(field.json_schema_extra, dict)
        }  # fmt: skip
        error, seconds = fields.get("error"), fields.get("score_seconds")
        scored = None if estimates is None else estimates.ppl.tokens + estimates.ppl.non_finite
        return cls(**flat | {
            "label": label, "engine": engine, "where": machine.words(provenance) or None,
            "kernel": groups.kernel_of(layers) or None,
            "deviations": "; ".join(deviations_of(provenance)) or None,
            "attention": str(provenance.get("attention") or "") or None,
            "engine_version": str(provenance.get("engine_version") or "") or None,
            "options": ", ".join(option_texts(options_of(fields.get("spec", {})))) or None,
            "phase": None if error else str(provenance.get("phase") or "prefill"),
            "kv_cache": kv_cache or None, "kv_mb": None if token_bytes is None else token_bytes / 1000,
            "bpw_layer": size.bpw_layer, "bpw_head": size.bpw_head, "vram_gib": size.vram_gib,
            "vram_bits": size.vram_bits, "file_bytes": size.file_bytes, "storage_note": size.note or None,
            "kld": None if error else 0.0 if fields.get("reference") else value_at(estimates, "against/kld/value"),
            "noise_floor": bool(fields.get("spec", {}).get("noise_floor")),
            "tokens_per_second": scored / seconds if scored is not None and seconds else None,
            "seconds": timing.seconds if timing else None, "estimates": estimates,
        } | fields)  # fmt: skip

    @property
    def is_quantized(self) -> bool:
        """True if its layers store less than 16 bits per weight, or if the size is unknown and a layer is quantized.

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
        given = self.spec.get("model_dir")
        return self.spec.get("load_fn"), given[:1] if isinstance(given, list) else [given], self.phase

    def scores_equal(self, other: ModelResult) -> bool:
        """True if both have the same log-probability at every token, to the last bit."""
        return self.scores_digest == other.scores_digest != ""

    @property
    def marked_label(self) -> str:
        """The label, with a mark if the layers ran differently from what the checkpoint asks."""
        return f"{self.label} {MARK}" if self.deviations else self.label

    @property
    def flat(self) -> dict[str, Any]:
        """The fields with a single value, by their names in results.json: the columns of CSV and pandas."""
        return self.model_dump(exclude=NESTED)


def options_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a model spec gives the engine, in ``engine`` or in ``[dir, options]``."""
    given, engine = spec.get("model_dir"), spec.get("engine")
    more = given[-1] if isinstance(given, list) and given else None
    return {name: value for each in (engine, more) if isinstance(each, dict) for name, value in each.items()}


def option_texts(options: Mapping[str, Any]) -> list[str]:
    """Each option as ``name=value``."""
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]


def deviations_of(provenance: Mapping[str, Any]) -> list[str]:
    """Return one clause per way in which a model ran differently from its checkpoint or spec."""
    layers = groups.groups_from_json(provenance.get("layers", ()))
    kv_caches = groups.kv_caches_from_json(provenance.get("kv_cache_layers"))
    own = provenance.get("deviations")
    said = [each for each in own if isinstance(each, str)] if isinstance(own, list) else []
    return groups.deviations(layers) + groups.kv_deviations(kv_caches) + said


NESTED = {"memory", "seconds", "timing", "notes", "spec", "provenance", "estimates", "worst_tokens"}
"""Fields of a row that hold several values."""


def value_at(found: Any, path: str) -> Any:
    """The value at a path of attributes and keys; None if one of its steps is None, or a missing key."""
    for step in path.split("/"):
        if found is None:
            return None
        found = found.get(step) if isinstance(found, dict) else getattr(found, step)
    return found


def noise_floor_of(models: Sequence[ModelResult]) -> ModelResult | None:
    """The noise floor, as marked in its spec; of several such rows, the one with the largest KLD."""
    return max((m for m in models if m.noise_floor and m.kld is not None), key=lambda m: m.kld or 0.0, default=None)


class TextResult(Stored):
    """The rows of one text.  A text that failed has the reason as its ``error``, and no rows."""

    name: Text = Field(min_length=1, description="distinguishes the texts of a run")
    error: Text | None = Field(default=None, description="why it has no rows; None if it has")
    data: JsonObject = Field(default={}, description="its spec, digests of windows and vocabulary, and counts")
    subtitle: Text = Field(default="", description="what the text is, for plots")
    reference: JsonObject | None = Field(default=None, description="label, key, identity; None without one")
    models: tuple[ModelResult, ...] = ()

    @property
    def reference_ppl(self) -> float | None:
        """The reference's perplexity, from its own row, or else from the model with most scored tokens."""
        rows = [m.estimates.ppl for m in self.models if m.reference and m.estimates]
        compared = [found.against.ref_ppl for m in self.models if (found := m.estimates) and found.against]
        known = [ppl for ppl in rows or compared if ppl.value is not None]
        return max(known, key=lambda ppl: ppl.tokens).value if known else None

    @property
    def noise_floor(self) -> ModelResult | None:
        """The row of ``noise_floor_of``."""
        return noise_floor_of(self.models)


class RunResult(Stored):
    """A run of one or more texts, whose names differ; every text without an error has the same labels, in one order."""

    format: Literal[8] = 8
    created: str = Field(default="", description="date and time of the run; empty until it is written")
    command: tuple[Text, ...] = Field(default=(), description="the command line")
    commit: str | None = Field(default=None, description="commit of the checkout of compare_q")
    versions: dict[str, str] = {}
    hardware: JsonObject = {}
    title: Text | None = Field(default=None, description="the user's title of report and plots; None: each has its own")
    texts: tuple[TextResult, ...]

    @computed_field(description="macro means of each model over the texts")  # type: ignore[prop-decorator]
    @property
    def means(self) -> list[dict[str, Any]]:
        """The means for results.json and pandas; they are not read back."""
        means = [(label, self.mean_kld(label), self.mean_ppl(label)) for label in self.labels]
        return [
            {"label": label, "mean_kld": kld.value, "mean_kld_stderr": kld.stderr, "mean_ppl": ppl.value,
             "mean_ppl_stderr": ppl.stderr} for label, kld, ppl in means
        ]  # fmt: skip

    @property
    def scored(self) -> tuple[TextResult, ...]:
        """The texts that did not fail."""
        return tuple(text for text in self.texts if not text.error)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of all models."""
        return tuple(model.label for model in self.scored[0].models) if self.scored else ()

    def of_label(self, label: str) -> tuple[ModelResult | None, ...]:
        """A model's row for each text; None for a text that failed."""
        return tuple(next((m for m in text.models if m.label == label), None) for text in self.texts)

    def mean_kld(self, label: str) -> Value:
        """Macro mean of a model's KLD, nats; unknown unless every text has one; 0 without error for the reference."""
        models = self.of_label(label)
        return macro_mean([m.kld if m else None for m in models], [m.kld_stderr if m else None for m in models])

    def mean_ppl(self, label: str) -> Value:
        """Geometric mean of a model's perplexities; unknown unless every text has one."""
        rows = self.of_label(label)
        return geometric_mean([m.ppl if m else None for m in rows], [m.ppl_stderr if m else None for m in rows])

    def with_origin(self, command: Sequence[str]) -> RunResult:
        """The run with the date, versions and hardware of now; unchanged if it was read from a file."""
        if self.created:
            return self
        return self.updated(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=tuple(map(unicode, command)),
            commit=machine.commit(),
            versions={**machine.versions(), "compare-q": __version__},
            hardware=machine.hardware(machine.gpus(), cpu_only=machine.cpu_build_of_torch()) | machine.threads(),
        )

    def masked(self, keeps: Sequence[str]) -> RunResult:
        """The run with only the models of these labels; the reference's row stays."""
        return self.updated(texts=tuple(
            text.updated(models=tuple(m for m in text.models if m.label in keeps or m.reference)) for text in self.texts
        ))  # fmt: skip

    def write(self, file: Path) -> None:
        """Write results.json atomically."""
        write_text(file, self.json_text())

    def json_text(self) -> str:
        """The content of results.json."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def read(cls, file: Path) -> RunResult:
        """The run of a results.json or a report.html; InputError in one line for another file or format, or damage."""
        name, content = printable(file), json_files.read_bytes(file)
        if not content.lstrip().startswith(b"{"):  # in a JSON object a label may hold what EMBEDDED looks for
            found = EMBEDDED.search(content)
            if found is None:
                raise InputError(f"{name}: {NO_RESULTS}")
            content = found[1]
        raw = json_files.parsed(content, name)
        if not isinstance(raw, dict) or "format" not in raw:
            raise InputError(f"{name}: {NO_RESULTS}")
        if raw["format"] != FORMAT:
            other = f"results of format {shortened(repr(raw['format']), 20)}, but this compare_q reads format {FORMAT}"
            raise InputError(f"{name}: {other}; run compare_q again with -o (token scores in the cache are used)")
        try:
            run = cls.model_validate_json(content)
            check(run)
        except ValueError as error:
            said = describe(error, ()) if isinstance(error, ValidationError) else error
            raise InputError(f"{name}: damaged results: {said}") from None
        return run


def macro_mean(values: Sequence[float | None], errors: Sequence[float | None]) -> Value:
    """Mean of independent values and its error; unknown if a value is, and without error if an error is unknown."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return Value(None)
    found = [error for error in errors if error is not None]
    try:
        stderr = math.sqrt(sum(error**2 for error in found)) / len(known) if len(found) == len(values) else None
        return Value(math.fsum(known) / len(known), stderr)
    except OverflowError:  # numbers of a damaged file
        return Value(None)


def geometric_mean(values: Sequence[float | None], errors: Sequence[float | None]) -> Value:
    """The exponential of the ``macro_mean`` of the logarithms of values above 0, with its error."""
    logs = [math.log(value) if value else None for value in values]
    relative = [e / value if value and e is not None else None for value, e in zip(values, errors, strict=True)]
    mean = macro_mean(logs, relative)
    value = None if mean.value is None else math.exp(mean.value)
    return Value(value, None if value is None or mean.stderr is None else value * mean.stderr)


class Described(Stored):
    """Types of the values that are used from a text's free descriptions."""

    class Reference(Stored):
        label: str
        key: str | None = None

    reference: Reference | None
    text_tokens: Count | None = None
    windows: Count | None = None
    windows_of_the_text: Count | None = None
    windows_sha256: str | None = None
    vocabulary_sha256: str | None = None


def check(run: RunResult) -> None:
    """ValueError for a run that compare_q does not write, and that tables, plots or the report could not show."""
    if not run.labels or len({text.name for text in run.texts}) < len(run.texts):
        raise ValueError("texts: none has rows, or two have one name")
    for text in run.scored:
        place = f"{text.name}: " if len(run.texts) > 1 else ""
        labels = [model.label for model in text.models]
        if tuple(labels) != run.labels or len(set(labels)) < len(labels):
            raise ValueError(f"{place}models: two have one label, or are not those of {run.scored[0].name}")
        Described.model_validate(text.data | {"reference": text.reference})
        for model in text.models:
            if wrong := contradiction(model):
                raise ValueError(f"{place}{model.label}: {wrong}")


def contradiction(model: ModelResult) -> str:
    """Return the part of a row whose values contradict each other; empty if none do."""
    try:
        groups.groups_from_json(model.provenance.get("layers", ()))
        groups.kv_caches_from_json(model.provenance.get("kv_cache_layers", ()))
    except (KeyError, TypeError, ValueError):
        return "provenance: layers or kv_cache_layers are not groups of layers"
    moments = [each for each in vars(model.timing).values() if each is not None] if model.timing else []
    if moments != sorted(moments):
        return "timing: is not in order"
    if (found := model.estimates) is None:
        return ""
    blocks, curve = found.blocks, found.curve
    sums = {name: own for name in ("nll", "kld", "same_top") if (own := getattr(blocks, name)) is not None}
    bins = max(len(curve.edges) - 1, 0)
    values = [own for own in (curve.nll, curve.kld, curve.nll_stderr, curve.kld_stderr) if own is not None]
    holds = {
        "blocks": all(len(own) == len(blocks.tokens) for own in sums.values())
        and (not blocks.whole or (sum(blocks.tokens) > 0 and set(blocks.whole) <= sums.keys())),
        "curve": all(a < b for a, b in itertools.pairwise((0, *curve.edges)))
        and all(len(own) == bins for own in values),
        "against": found.against is None or distributions_hold(found.against),
    }  # fmt: skip
    wrong = next((name for name, is_so in holds.items() if not is_so), "")
    return f"estimates.{wrong}: its numbers do not go together" if wrong else ""


def distributions_hold(against: AgainstReference) -> bool:
    """True if all percentiles of the KLD exist, and with them the KLD, or none of them."""
    if not against.kld_percentiles:
        return True
    return set(against.kld_percentiles) == set(PERCENTILES) and against.kld.value is not None


def load(files: Sequence[Path]) -> RunResult:
    """The run of one file, or the rows of several files in one run.

    InputError in one line for files that are damaged, and for files that ``combine`` refuses.
    """
    resolved = list(map(os.path.realpath, files))
    for file, path in zip(files, resolved, strict=True):
        if resolved.count(path) > 1:
            raise InputError(f"{printable(file)}: is given twice; name each run once")
    runs = {printable(file): RunResult.read(file) for file in files}
    return combine(runs) if len(runs) > 1 else next(iter(runs.values()))


def combine(runs: Mapping[str, RunResult]) -> RunResult:
    """One run with the rows of all ``runs`` (file -> its results), in their order and without duplicates.

    InputError with the file, and with what differs, unless all runs have the same texts, tokenizer, windows and
    reference.
    """
    (first_file, first), *others = runs.items()
    for file, run in others:
        if len(run.texts) != len(first.texts):
            counts = f"({len(run.texts)}, not {len(first.texts)})"
            raise InputError(f"{file}: its number of texts differs from {first_file}'s {counts}")
        for text, own in zip(first.texts, run.texts, strict=True):
            if text.error or own.error:
                raise InputError(f"{file if own.error else first_file}: its text {own.name} failed; run it again")
            for (what, wanted), found in zip(identity(text).items(), identity(own).values(), strict=True):
                if found[0] != wanted[0]:
                    one, two = (f"{words} {(digest or 'none')[:12]}" for digest, words in (found, wanted))
                    raise InputError(f"{file}: its {what} is not that of {first_file} ({one}, not {two})")
    texts = tuple(
        text.updated(models=unique_rows([model for run in runs.values() for model in run.texts[i].models]))
        for i, text in enumerate(first.texts)
    )
    shared = {
        name: {key: value for key, value in getattr(first, name).items()
               if all(getattr(run, name).get(key) == value for run in runs.values())}
        for name in ("versions", "hardware")
    }  # fmt: skip
    commit, created = {run.commit for run in runs.values()}, max(run.created for run in runs.values())
    only = first.commit if len(commit) == 1 else None
    return first.updated(texts=texts, created=created, command=(), commit=only, **shared)


def identity(text: TextResult) -> dict[str, tuple[str | None, str]]:
    """Property that rows must share to be in one table -> (digest, words before the digest in messages).

    The digest of the windows includes the method and the scored positions.
    """
    data, reference = text.data, text.reference or {}
    return {
        "tokenizer": (data.get("vocabulary_sha256"), "vocabulary"),
        "cut into windows": (
            data.get("windows_sha256"), f"{data.get('windows')} windows by method {data.get('method')},"
        ),
        "reference": (reference.get("key"), f"{reference.get('label', 'key')},"),
    }  # fmt: skip


def unique_rows(models: Sequence[ModelResult]) -> tuple[ModelResult, ...]:
    """The rows without duplicates, by the key of their scores.

    A measured row replaces a failed row of the same label.  Other rows with the same label get a number: "label (2)".
    """
    rows: list[ModelResult] = []

    def is_same(one: ModelResult, other: ModelResult) -> bool:
        if one.error or other.error:
            return one.label == other.label
        return one.scores_key == other.scores_key != ""

    for model in models:
        place = next((i for i, row in enumerate(rows) if is_same(row, model)), len(rows))
        if place == len(rows):
            (label,) = numbered([model.label], [row.label for row in rows])
            rows.append(model.updated(label=label))
        elif rows[place].error:
            rows[place] = model.updated(label=rows[place].label)
    return tuple(rows)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of results.json; ``python -m compare_q.eval.results`` writes it."""
    schema = RunResult.model_json_schema(mode="serialization")
    return {"title": "results.json of compare_q", **schema}


if __name__ == "__main__":
    target = Path(__file__).parent / "spec" / "schema" / "results.schema.json"
    target.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
