"""Kernels and KV caches of a model in groups of layers, compared with the checkpoint's scheme.

An engine describes every layer by a ``Layer``, and the cache of every attention layer by a
``KVCache``; results contain groups of these.  If prefill attends to the unquantized keys and values
of the current step, and only writes the quantized cache, the cache changes no score, and a note is
added.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ..base import Layer
from ..common.errors import InputError
from ..common.message_text import amount
from .module_names import kind_of
from .schemes import UNKNOWN, has_rounded_scales, number_format

if TYPE_CHECKING:
    from pydantic import TypeAdapter

ROUTED_EXPERTS = re.compile(r"\.experts(?:\.|$)")
"""Names of routed experts."""
SUFFIX = re.compile(r"(?:ScaledMM)?(?:LinearKernel|LinearMethod|EmbeddingMethod|Kernel|Method)$")
UNQUANTIZED_FORMATS = {"bfloat16", "float16", "float32", "bf16", "f16", "f32"}
"""Names of unquantized weights in torch and ggml."""
LOADED = "loaded"
"""The scales of a quantized cache come from the checkpoint."""
UNIT_SCALES = "1.0"
"""The scales of a quantized cache have no origin: all are 1.0."""
DYNAMIC = "dynamic"
"""The scales of a quantized cache are computed from the keys and values."""
NO_CACHE = "no_kv_cache"
"""The key in a model's provenance for the reason that it has no KV cache."""
WITHOUT_CACHE = {NO_CACHE: "windows are scored whole, without one"}
FIRST_STEP = "not in the first step"
"""A reason that prefill may not read the quantized cache.

It reads the tokens of the current step unquantized: the whole window, if one step computes it.
"""
SPARSE = "sparse"
"""Another reason: the window is shorter than the selection of sparse attention.

Such attention then does not read the cache.
"""
PREFILL_NOTES = {
    FIRST_STEP: (
        "{attention} computes the first step of a window from unquantized keys and values, "
        "and only later steps read the KV cache in {stored} ({count} layers)"
    ),
    SPARSE: (
        "{attention} may compute windows of up to index_topk tokens from unquantized keys "
        "and values, and only longer ones read the KV cache in {stored} ({count} layers)"
    ),
    UNKNOWN: (
        "whether prefill in {attention} reads the KV cache in {stored} is not known "
        "({count} layers)"
    ),
}
"""Notes on quantized caches that prefill does not read, or may not read."""


@dataclass(frozen=True)
class KVCache:
    """The caches of ``count`` attention layers of one kind."""

    layers: str  # the module's path, with ``*`` for its numbers if there are several
    count: int
    stored: str  # number format of keys and values: "bfloat16", "fp8"
    scales: str = ""  # ``LOADED``, ``UNIT_SCALES`` or ``DYNAMIC``; "" for an unquantized cache
    asked: str = ""  # number format in the checkpoint's config if another one ran
    attention: str = "this attention"  # the engine's name of the attention that reads the cache
    # ``FIRST_STEP`` or ``SPARSE``; "" if prefill reads the cache or nothing is quantized
    prefill: str = UNKNOWN
    token_bytes: float | None = None  # per token and layer, with scales, on all GPUs together
    # number of last tokens of a sequence that the cache holds; None for all
    window: int | None = None
    named: bool = False  # the spec names the format ``stored``
    backend: str = ""  # the engine's name of the kind of attention; a spec chooses it by this name


@cache
def validator(group_type: Any) -> TypeAdapter[tuple[Any, ...]]:
    """Return a validator of groups of a type."""
    # Built when it is first needed, because this takes 0.02 s.
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[group_type, ...])


def group_layers(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Return groups of layers that differ only in the numbers of their names.

    They are in the order of each group's first layer.
    """
    counts: Counter[Layer] = Counter()
    for layer in layers:
        counts[replace(layer, name=kind_of(layer.name))] += 1
    return tuple(replace(layer, count=count) for layer, count in counts.items())


def groups_to_json(groups: Iterable[Layer]) -> list[dict[str, Any]]:
    """Return groups for results.json; there the key of the layer's name is "layers"."""
    objects = []
    for group in groups:
        fields = asdict(group)
        name = fields.pop("name")
        count = fields.pop("count")
        objects.append({"layers": name, "count": count, **fields})
    return objects


def groups_from_json(objects: Sequence[Mapping[str, Any]]) -> tuple[Layer, ...]:
    """Return the groups that ``groups_to_json`` wrote.

    KeyError, TypeError or ValueError for anything else.
    """
    entries = [{**entry, "name": entry["layers"]} for entry in objects]
    return validator(Layer).validate_python(entries)


def recorded_groups(provenance: Mapping[str, Any], where: str) -> tuple[Layer, ...]:
    """Return the groups in the provenance of an unknown source.

    InputError that begins with ``where`` for anything else.
    """
    try:
        return groups_from_json(provenance.get("layers", ()))
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{where}: provenance.layers: are not groups of layers") from None


def deviation(requested: str, activations: str) -> str:
    """Return ``requested`` if the ``activations`` that ran deviate from it, else "".

    ``requested``: the activations of the checkpoint's scheme.  A different number format is a
    deviation.  Another scaling of the same number format (static FP8 in the scheme, dynamic FP8
    ran) is not.  Scales rounded up to powers of two are a deviation: they doubled the KLD of an FP8
    model (docs/measurements.md).
    """
    is_rounded = has_rounded_scales(activations) and not has_rounded_scales(requested)
    if is_rounded or number_format(requested) != number_format(activations):
        return requested
    return ""


def short_kernel_name(kernel: str) -> str:
    """Return a class name without its common ending: MarlinNvFp4LinearKernel -> MarlinNvFp4."""
    return SUFFIX.sub("", kernel) or kernel


def kernel_of(groups: Sequence[Layer]) -> str:
    """Return the short name of the kernel of most quantized layers.

    If no layer is quantized, it is the kernel of most layers.  Experts come first.  Other kernels
    of quantized layers are counted: ``Marlin +1``.  The name is "" if ``groups`` is empty.
    """
    experts: Counter[str] = Counter()
    others: Counter[str] = Counter()
    unquantized: Counter[str] = Counter()
    for group in groups:
        if group.weights in UNQUANTIZED_FORMATS:
            counts = unquantized
        elif ROUTED_EXPERTS.search(group.name):
            counts = experts
        else:
            counts = others
        counts[short_kernel_name(group.kernel)] += group.count
    # Experts hold most weights of a mixture, even if other layers outnumber them.
    kernels = experts.most_common() + others.most_common()
    if not kernels:
        kernels = unquantized.most_common()
    names = list(dict.fromkeys(name for name, _ in kernels))
    if not names:
        return ""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} +{len(names) - 1}"


def deviations(groups: Sequence[Layer]) -> list[str]:
    """Return one clause for each difference between layers' kernels and the checkpoint's scheme."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for group in groups:
        if group.asked:
            kernel = short_kernel_name(group.kernel)
            counts[group.asked, group.activations, kernel] += group.count
    clauses = []
    for (requested, activations, kernel), count in counts.items():
        clauses.append(deviation_clause(requested, activations, kernel, count))
    return clauses


def deviation_clause(requested: str, activations: str, kernel: str, count: int) -> str:
    """Return the clause for ``count`` modules whose ``kernel`` took other activations."""
    subject = f"the checkpoint asks for {number_format(requested)} activations"
    modules = amount(count, "module")  # a decoder layer has several
    if number_format(requested) == number_format(activations):
        return (
            f"the checkpoint asks for {requested} activations, but {kernel} rounded their scales, "
            f"and those of the weights, up to powers of two ({activations}, {modules})"
        )
    if activations.startswith(("bfloat", "float")):
        return f"{subject}, but {kernel} left them unquantized ({activations}, {modules})"
    if activations == UNKNOWN:
        return f"{subject}; what {kernel} took ({modules}) is not known"
    return f"{subject}, but {kernel} took {activations} ({modules})"


def kv_cache_as_asked(cache: KVCache, asked: str, dtype: str) -> KVCache:
    """Return the cache with ``asked`` set if its format is not the checkpoint's.

    ``asked``: ``schemes.kv_cache`` of the checkpoint's config.
    """
    requested = number_format(asked) or dtype
    deviating = ""
    if requested not in (number_format(cache.stored), UNKNOWN):
        deviating = requested
    described = replace(cache, asked=deviating)
    if cache.stored in UNQUANTIZED_FORMATS:
        return replace(described, scales="", prefill="")
    return described


def group_kv_caches(caches: Iterable[KVCache]) -> tuple[KVCache, ...]:
    """Return groups of the caches that differ only in the numbers of their names."""
    counts: Counter[KVCache] = Counter()
    for kv_cache in caches:
        counts[replace(kv_cache, layers=kind_of(kv_cache.layers))] += 1
    return tuple(replace(kv_cache, count=count) for kv_cache, count in counts.items())


def kv_caches_from_json(objects: Any) -> tuple[KVCache, ...]:
    """Return groups from the objects in results.json; ValueError for anything else."""
    if not objects:
        return ()
    return validator(KVCache).validate_python(objects)


def kv_formats(groups: Iterable[KVCache]) -> str:
    """Return the number formats of a model's caches, the most frequent first.

    For example "fp8", or "fp8 +bfloat16"; "" if unknown.
    """
    counts: Counter[str] = Counter()
    for group in groups:
        # results.json may state a count of 0, whose format must not be named.
        if group.count > 0:
            counts[group.stored] += group.count
    return " +".join(name for name, _ in counts.most_common())


def kv_token_bytes(groups: Sequence[KVCache]) -> float | None:
    """Return the bytes of one token in the caches of all layers; None if unknown for a layer."""
    sizes = []
    for group in groups:
        if group.token_bytes is None:
            return None
        sizes.append(group.token_bytes * group.count)
    if not sizes:
        return None
    return sum(sizes)


def kv_windows(groups: Sequence[KVCache]) -> str:
    """Return the caches that hold only the last tokens; "" if all caches hold all tokens.

    For example "5 of 6 layers hold the last 1,024 tokens".
    """
    n_layers = 0
    counts: Counter[int] = Counter()
    for group in groups:
        n_layers += group.count
        if group.window and group.count > 0:
            counts[group.window] += group.count
    clauses = []
    for size, count in counts.items():
        clauses.append(f"{count} of {n_layers} layers hold the last {size:,} tokens")
    return ", ".join(clauses)


def kv_deviations(groups: Sequence[KVCache]) -> list[str]:
    """Return clauses for caches that differ from the config, and for caches not read by prefill.

    A format that the spec names is not a deviation; ``kv_notes`` returns a note on it.  A group's
    ``prefill`` is the reason that prefill does not read its cache.
    """
    clauses = []
    for group in groups:
        if group.asked and not group.named:
            clauses.append(
                f"the checkpoint asks for a KV cache in {group.asked}, but keys and values were "
                f"kept in {group.stored} ({group.count} layers)"
            )
    for group in groups:
        if group.prefill and group.stored not in UNQUANTIZED_FORMATS:
            note = PREFILL_NOTES.get(group.prefill, PREFILL_NOTES[UNKNOWN])
            clauses.append(note.format(**asdict(group)))
    return clauses


def kv_notes(groups: Sequence[KVCache], cache_dtype: str) -> list[str]:
    """Return notes on caches that the spec chose, or that are unusual.

    Unusual caches have no calibrated scales, are unknown, or are in the model's dtype although
    ``cache_dtype``, the engine's word for the number format of all caches, is quantized.  (With
    TurboQuant, vLLM keeps the first two and the last two layers in the model's dtype.)
    """
    is_quantized = cache_dtype != "auto" and cache_dtype not in UNQUANTIZED_FORMATS
    if not groups and is_quantized:
        return [
            f"KV cache in {cache_dtype}: how this model's layers keep it, and whether prefill "
            "reads it, is not known"
        ]
    n_layers = sum(group.count for group in groups)
    notes = []
    for group in groups:
        if group.asked and group.named:
            notes.append(
                f"KV cache in {group.stored}, as the spec asks ({group.count} layers); "
                f"the checkpoint asks for {group.asked}"
            )
    for group in groups:
        if is_quantized and group.stored in UNQUANTIZED_FORMATS and not group.asked:
            notes.append(
                f"{group.count} of {n_layers} layers keep their KV cache in {group.stored}, "
                f"not in {cache_dtype}"
            )
    for group in groups:
        if group.scales == UNIT_SCALES:
            notes.append(
                f"KV cache in {group.stored} with scales of 1.0 ({group.count} layers): "
                "the checkpoint brings no others"
            )
    return notes
