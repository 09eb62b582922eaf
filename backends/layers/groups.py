"""Kernels and KV caches of a model, in groups of layers, and differences from the checkpoint's
scheme.

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
from .module_names import NUMBER
from .schemes import UNKNOWN, has_rounded_scales, number_format

if TYPE_CHECKING:
    from pydantic import TypeAdapter

EXPERTS = re.compile(r"\.experts(?:\.|$)")
"""Names of routed experts."""
SUFFIX = re.compile(r"(?:ScaledMM)?(?:LinearKernel|LinearMethod|EmbeddingMethod|Kernel|Method)$")
PLAIN = {"bfloat16", "float16", "float32", "bf16", "f16", "f32"}
"""Names of unquantized weights in torch and ggml."""
LOADED, ONE, DYNAMIC = "loaded", "1.0", "dynamic"
"""Origin of the scales of a quantized cache: the checkpoint; no origin (all are 1.0); the keys and
values."""
NO_CACHE = "no_kv_cache"
"""The key in a model's provenance for the reason that it has no KV cache."""
WITHOUT_CACHE = {NO_CACHE: "windows are scored whole, without one"}
FIRST_STEP, SPARSE = "not in the first step", "sparse"
"""Reasons that prefill may not read the quantized cache.

First: it reads the tokens of the current step unquantized (the whole window, if one step computes
it).  Second: the window is shorter than the selection of sparse attention, which then does not read
the cache.
"""
PREFILL_NOTES = {
    FIRST_STEP: "{attention} computes the first step of a window from unquantized keys and values, and only later "
    "steps read the KV cache in {stored} ({count} layers)",
    SPARSE: "{attention} may compute windows of up to index_topk tokens from unquantized keys and values, and only "
    "longer ones read the KV cache in {stored} ({count} layers)",
    UNKNOWN: "whether prefill in {attention} reads the KV cache in {stored} is not known ({count} layers)",
}
"""Notes on quantized caches that prefill does not read, or may not read."""


@dataclass(frozen=True)
class KVCache:
    """The caches of ``count`` attention layers of one kind."""

    layers: str  # the module's path, with ``*`` for its numbers if there are several
    count: int
    stored: str  # number format of keys and values: "bfloat16", "fp8"
    scales: str = ""  # ``LOADED``, ``ONE`` or ``DYNAMIC``; "" for an unquantized cache
    asked: str = ""  # number format in the checkpoint's config if another one ran
    attention: str = "this attention"  # the engine's name of the attention that reads the cache
    # ``FIRST_STEP`` or ``SPARSE``; "" if prefill reads the cache or nothing is quantized
    prefill: str = UNKNOWN
    token_bytes: float | None = None  # per token and layer, with scales, on all GPUs together
    window: int | None = (
        None  # number of last tokens of a sequence that the cache holds; None for all
    )
    named: bool = False  # the spec names the format ``stored``
    backend: str = ""  # the engine's name of the kind of attention; a spec chooses it by this name


@cache
def validator(of: Any) -> TypeAdapter[tuple[Any, ...]]:
    """A validator of groups of a type; it is only built when needed, because this takes 0.02 s."""
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[of, ...])


def group_layers(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Groups of layers that differ only in the numbers of their names, in the order of each group's
    first layer.
    """
    counts = Counter(replace(layer, name=NUMBER.sub("*", layer.name)) for layer in layers)
    return tuple(replace(layer, count=count) for layer, count in counts.items())


def groups_to_json(groups: Iterable[Layer]) -> list[dict[str, Any]]:
    """Groups for results.json; there the key of the layer's name is "layers"."""
    return [
        {"layers": own.pop("name"), "count": own.pop("count"), **own} for own in map(asdict, groups)
    ]


def groups_from_json(objects: Sequence[Mapping[str, Any]]) -> tuple[Layer, ...]:
    """The groups that ``groups_to_json`` wrote; KeyError, TypeError or ValueError for anything
    else.
    """
    return validator(Layer).validate_python(
        [{**entry, "name": entry["layers"]} for entry in objects]
    )


def recorded_groups(provenance: Mapping[str, Any], where: str) -> tuple[Layer, ...]:
    """The groups in the provenance of an unknown source; InputError that begins with ``where`` for
    anything else.
    """
    try:
        return groups_from_json(provenance.get("layers", ()))
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{where}: provenance.layers: are not groups of layers") from None


def deviation(asked: str, activations: str) -> str:
    """Return ``asked`` if the ``activations`` that ran deviate from it, else "".

    ``asked``: the activations of the checkpoint's scheme.  A different number format is a
    deviation.  Another scaling of the same number format (static FP8 in the scheme, dynamic FP8
    ran) is not.  Scales rounded up to powers of two are a deviation: they doubled the KLD of an FP8
    model (docs/measurements.md).
    """
    rounded = has_rounded_scales(activations) and not has_rounded_scales(asked)
    return asked if rounded or number_format(asked) != number_format(activations) else ""


def short_kernel_name(kernel: str) -> str:
    """A kernel's class name without its common ending: MarlinNvFp4LinearKernel -> MarlinNvFp4."""
    return SUFFIX.sub("", kernel) or kernel


def kernel_of(groups: Sequence[Layer]) -> str:
    """The short name of the kernel of most quantized layers, or of most layers if none is
    quantized.

    Experts come first: they hold most weights of a mixture.  Other kernels of quantized layers are
    counted: ``Marlin +1``.  The name is "" if ``groups`` is empty.
    """
    experts, others, plain = Counter[str](), Counter[str](), Counter[str]()
    for group in groups:
        quantized = experts if EXPERTS.search(group.name) else others
        counts = plain if group.weights in PLAIN else quantized
        counts[short_kernel_name(group.kernel)] += group.count
    counted = experts.most_common() + others.most_common() or plain.most_common()
    ranked = list(dict.fromkeys(name for name, _ in counted))
    return f"{ranked[0]} +{len(ranked) - 1}" if len(ranked) > 1 else "".join(ranked)


def deviations(groups: Sequence[Layer]) -> list[str]:
    """One clause for each difference between the kernels of layers and the checkpoint's scheme."""
    counts = Counter[tuple[str, str, str]]()
    for group in filter(lambda group: group.asked, groups):
        counts[group.asked, group.activations, short_kernel_name(group.kernel)] += group.count
    clauses = []
    for (asked, activations, kernel), count in counts.items():
        wanted = number_format(asked)
        modules = amount(count, "module")  # a decoder layer has several
        clause = f", but {kernel} took {activations} ({modules})"
        if wanted == number_format(activations):
            wanted = asked
            clause = (
                f", but {kernel} rounded their scales, and those of the weights, up to powers of two ({activations}, "
                f"{modules})"
            )
        elif activations.startswith(("bfloat", "float")):
            clause = f", but {kernel} left them unquantized ({activations}, {modules})"
        elif activations == UNKNOWN:
            clause = f"; what {kernel} took ({modules}) is not known"
        clauses.append(f"the checkpoint asks for {wanted} activations{clause}")
    return clauses


def kv_cache_as_asked(cache: KVCache, asked: str, dtype: str) -> KVCache:
    """The cache with ``asked`` set if it deviates; ``asked``: ``schemes.kv_cache`` of the
    checkpoint's config.
    """
    wanted = number_format(asked) or dtype
    deviates = wanted not in (number_format(cache.stored), UNKNOWN)
    told = replace(cache, asked=wanted if deviates else "")
    return replace(told, scales="", prefill="") if cache.stored in PLAIN else told


def group_kv_caches(caches: Iterable[KVCache]) -> tuple[KVCache, ...]:
    """Groups of the caches that differ only in the numbers of their names."""
    counts = Counter(replace(cache, layers=NUMBER.sub("*", cache.layers)) for cache in caches)
    return tuple(replace(cache, count=count) for cache, count in counts.items())


def kv_caches_from_json(objects: Any) -> tuple[KVCache, ...]:
    """Groups from the objects in results.json; ValueError for anything else."""
    return validator(KVCache).validate_python(objects) if objects else ()


def kv_formats(groups: Iterable[KVCache]) -> str:
    """The number formats of a model's caches, the most frequent first: "fp8", "fp8 +bfloat16"; ""
    if unknown.
    """
    stored = (group.stored for group in groups for _ in range(group.count))
    return " +".join(name for name, _ in Counter(stored).most_common())


def kv_token_bytes(groups: Sequence[KVCache]) -> float | None:
    """Bytes of one token in the caches of all layers; None if unknown for a layer."""
    sizes = [group.token_bytes * group.count for group in groups if group.token_bytes is not None]
    return sum(sizes) if sizes and len(sizes) == len(groups) else None


def kv_windows(groups: Sequence[KVCache]) -> str:
    """The caches that hold only the last tokens: "5 of 6 layers hold the last 1,024 tokens"; "" if
    all hold all.
    """
    layers = sum(group.count for group in groups)
    limited = Counter(group.window for group in groups if group.window for _ in range(group.count))
    return ", ".join(
        f"{count} of {layers} layers hold the last {size:,} tokens"
        for size, count in limited.items()
    )


def kv_deviations(groups: Sequence[KVCache]) -> list[str]:
    """One clause for each cache that differs from the checkpoint's config, or that prefill does not
    read.

    A format that the spec names is not a deviation; ``kv_notes`` returns a note on it.
    """
    return [
        f"the checkpoint asks for a KV cache in {group.asked}, but keys and values were kept in {group.stored} "
        f"({group.count} layers)"
        for group in groups
        if group.asked and not group.named
    ] + [
        PREFILL_NOTES.get(group.prefill, PREFILL_NOTES[UNKNOWN]).format(**asdict(group))
        for group in groups
        if group.prefill and group.stored not in PLAIN
    ]


def kv_notes(groups: Sequence[KVCache], told: str) -> list[str]:
    """Notes on caches that the spec chose, that have no calibrated scales, that are unknown, or
    that the engine keeps in the model's dtype (with TurboQuant, vLLM does so in the first two and
    the last two layers).

    ``told``: the engine's word for the number format of all caches.
    """
    is_quantized, count = told != "auto" and told not in PLAIN, sum(group.count for group in groups)
    if not groups and is_quantized:
        return [
            f"KV cache in {told}: how this model's layers keep it, and whether prefill reads it, is not known"
        ]
    return (
        [
            f"KV cache in {group.stored}, as the spec asks ({group.count} layers); the checkpoint asks for {group.asked}"
            for group in groups
            if group.asked and group.named
        ]
        + [
            f"{group.count} of {count} layers keep their KV cache in {group.stored}, not in {told}"
            for group in groups
            if is_quantized and group.stored in PLAIN and not group.asked
        ]
        + [
            f"KV cache in {group.stored} with scales of 1.0 ({group.count} layers): the checkpoint brings no others"
            for group in groups
            if group.scales == ONE
        ]
    )
