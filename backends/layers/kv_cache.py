"""How a model's keys and values were cached: groups of attention layers, and where that is not what was asked.

An engine describes the cache of every attention layer by a ``KVCache``; the results carry groups of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from backends.layers.groups import NUMBER, PLAIN
from backends.layers.schemes import UNKNOWN, number_format

LOADED, ONE, DYNAMIC = "loaded", "1.0", "dynamic"
"""Where the scales of a quantized cache come from: the checkpoint, nowhere, or the keys and values themselves."""


@dataclass(frozen=True)
class KVCache:
    """The cache of one attention layer as an engine kept it.

    ``name``: the module's path; ``stored``: the number format of keys and values ("bfloat16", "fp8"); ``scales``:
    ``LOADED``, ``ONE`` or ``DYNAMIC``, "" for a cache that is not quantized; ``asked``: the number format that the
    checkpoint asks for where another one ran, else "".
    """

    name: str
    stored: str
    scales: str = ""
    asked: str = ""


@dataclass(frozen=True)
class KVGroup:
    """``count`` layers with caches alike: the fields of ``KVCache``, where ``layers`` is a name with ``*`` for its
    numbers.
    """

    layers: str
    count: int
    stored: str
    scales: str
    asked: str


def kv_cache(name: str, stored: str, scales: str, asked: str, dtype: str) -> KVCache:
    """One layer's cache; ``asked`` is what ``schemes.kv_cache`` says of the checkpoint, ``dtype`` the model's."""
    wanted = number_format(asked) or dtype
    deviates = wanted not in (number_format(stored), UNKNOWN)
    return KVCache(name, stored, "" if stored in PLAIN else scales, wanted if deviates else "")


def grouped(caches: Iterable[KVCache]) -> tuple[KVGroup, ...]:
    """Groups of caches that differ in the numbers of their names only."""
    counts = Counter(replace(cache, name=NUMBER.sub("*", cache.name)) for cache in caches)
    return tuple(KVGroup(cache.name, count, cache.stored, cache.scales, cache.asked) for cache, count in counts.items())


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


def deviations(groups: Iterable[KVGroup]) -> list[str]:
    """One clause for each way in which caches differ from what the checkpoint asks."""
    return [
        f"the checkpoint asks for a KV cache in {group.asked}, but keys and values were kept in {group.stored} "
        f"({group.count} layers)"
        for group in groups if group.asked
    ]  # fmt: skip


def notes(groups: Iterable[KVGroup]) -> list[str]:
    """What has to be said of caches whose scales no calibration has set."""
    return [
        f"KV cache in {group.stored} with scales of 1.0 ({group.count} layers): the checkpoint brings no others"
        for group in groups if group.scales == ONE
    ]  # fmt: skip
