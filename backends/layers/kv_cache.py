"""How a model's keys and values were cached: groups of attention layers, and where that is not what was asked.

An engine describes the cache of every attention layer by a ``KVCache``; the results carry groups of them.  A quantized
cache costs a score nothing where prefill attends to the keys and values that have just been computed, and only writes
the cache: such a row says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from backends.layers.groups import NUMBER, PLAIN
from backends.layers.schemes import UNKNOWN, number_format

LOADED, ONE, DYNAMIC = "loaded", "1.0", "dynamic"
"""Where the scales of a quantized cache come from: the checkpoint, nowhere, or the keys and values themselves."""
FIRST_STEP, SPARSE = "not in the first step", "sparse"
"""When prefill does not read a quantized cache: for the tokens of its own step, which are all of a window that one step
computes; or likewise, but only in windows no longer than what sparse attention selects."""
PREFILL = {
    FIRST_STEP: "{attention} computes the first step of a window from unquantized keys and values, and only later "
    "steps read the KV cache in {stored} ({count} layers)",
    SPARSE: "{attention} may compute windows of up to index_topk tokens from unquantized keys and values, and only "
    "longer ones read the KV cache in {stored} ({count} layers)",
    UNKNOWN: "whether prefill in {attention} reads the KV cache in {stored} is not known ({count} layers)",
}
"""What is said of quantized caches that prefill does not read, or not as far as is known."""


@dataclass(frozen=True)
class KVCache:
    """The cache of one attention layer as an engine kept it.

    ``name``: the module's path; ``stored``: the number format of keys and values ("bfloat16", "fp8"); ``scales``:
    ``LOADED``, ``ONE`` or ``DYNAMIC``, "" for a cache that is not quantized; ``asked``: the number format that the
    checkpoint asks for where another one ran, else ""; ``attention``: the engine's name for what reads it; ``prefill``:
    ``FIRST_STEP``, ``SPARSE`` or ``UNKNOWN``, "" where prefill reads the cache or nothing is quantized.
    """

    name: str
    stored: str
    scales: str = ""
    asked: str = ""
    attention: str = ""
    prefill: str = ""


@dataclass(frozen=True)
class KVGroup:
    """``count`` layers with caches alike: the fields of ``KVCache``, where ``layers`` is a name with ``*`` for its
    numbers.  Older results have no ``attention`` and no ``prefill``.
    """

    layers: str
    count: int
    stored: str
    scales: str
    asked: str
    attention: str = "this attention"
    prefill: str = UNKNOWN


def kv_cache(found: KVCache, asked: str, dtype: str) -> KVCache:
    """One layer's cache; ``asked`` is what ``schemes.kv_cache`` says of the checkpoint, ``dtype`` the model's."""
    wanted = number_format(asked) or dtype
    deviates = wanted not in (number_format(found.stored), UNKNOWN)
    plain = {"scales": "", "prefill": ""} if found.stored in PLAIN else {}
    return replace(found, asked=wanted if deviates else "", **plain)


def grouped(caches: Iterable[KVCache]) -> tuple[KVGroup, ...]:
    """Groups of caches that differ in the numbers of their names only."""
    counts = Counter(replace(cache, name=NUMBER.sub("*", cache.name)) for cache in caches)
    return tuple(KVGroup(cache.name, count, *astuple(cache)[1:]) for cache, count in counts.items())


def from_json(found: Any) -> tuple[KVGroup, ...]:
    """Groups from the objects that results.json has of them; ValueError for anything else."""
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[KVGroup, ...]).validate_python(found) if found else ()


def in_words(groups: Iterable[KVGroup]) -> str:
    """The number formats of a model's caches, the most frequent first: "fp8", "fp8 +bfloat16"; "" if none is known."""
    counts = Counter[str]()
    for group in groups:
        counts[group.stored] += group.count
    return " +".join(name for name, _ in counts.most_common())


def deviations(groups: Sequence[KVGroup]) -> list[str]:
    """One clause for each way in which caches differ from what the checkpoint asks, or from what prefill reads."""
    asked = [
        f"the checkpoint asks for a KV cache in {group.asked}, but keys and values were kept in {group.stored} "
        f"({group.count} layers)"
        for group in groups if group.asked
    ]  # fmt: skip
    unread = [group for group in groups if group.prefill and group.stored not in PLAIN]
    return asked + [PREFILL.get(group.prefill, PREFILL[UNKNOWN]).format(**asdict(group)) for group in unread]


def notes(groups: Sequence[KVGroup], told: str) -> list[str]:
    """What has to be said of caches whose scales no calibration has set, or of which no layer says anything.

    ``told``: the engine's word for the number format of all caches.
    """
    if not groups and told != "auto" and told not in PLAIN:
        return [f"KV cache in {told}: how this model's layers keep it, and whether prefill reads it, is not known"]
    return [
        f"KV cache in {group.stored} with scales of 1.0 ({group.count} layers): the checkpoint brings no others"
        for group in groups if group.scales == ONE
    ]  # fmt: skip
