"""How a model's layers ran: grouping them, naming the kernel of a table row, and saying where it is not what was asked.

An engine describes every layer by a ``Layer``; the results carry the groups (``backends/base.py``, ``LayerGroup``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backends.base import LayerGroup
from backends.layers.schemes import UNKNOWN, kind

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+$")
SUFFIX = re.compile(r"(?:ScaledMM)?(?:LinearKernel|LinearMethod|EmbeddingMethod|Kernel|Method)$")

PLAIN = {"bfloat16", "float16", "float32", "bf16", "f16", "f32"}
"""Weights that are not quantized, as torch and ggml call them."""


@dataclass(frozen=True)
class Layer:
    """One linear layer as it ran; fields as in ``LayerGroup``, ``name`` with its numbers."""

    name: str
    weights: str
    activations: str
    kernel: str
    asked: str = ""


def group(layers: Iterable[Layer]) -> tuple[LayerGroup, ...]:
    """Layers that differ only in their numbers, together, in the order in which each kind comes first."""
    counts: Counter[Layer] = Counter()
    for layer in layers:
        counts[Layer(NUMBER.sub("*", layer.name), layer.weights, layer.activations, layer.kernel, layer.asked)] += 1
    return tuple(
        LayerGroup(alike.name, count, alike.weights, alike.activations, alike.kernel, alike.asked)
        for alike, count in counts.items()
    )


def deviation(asked: str, activations: str) -> str:
    """What a checkpoint asks its activations to be, if those that ran are of another kind (or not known), else "".

    Another scaling of the same kind (static FP8 asked, dynamic FP8 ran) is not marked; the groups show it.
    """
    return "" if kind(asked) == kind(activations) else asked


def short(kernel: str) -> str:
    """A kernel's class name without the words that all of them end in: MarlinNvFp4LinearKernel -> MarlinNvFp4."""
    return SUFFIX.sub("", kernel) or kernel


def kernel_of(groups: Sequence[LayerGroup]) -> str:
    """The kernel that ran most quantized layers (of a model without any, most layers), short; "" if none is known.

    Other kernels of quantized layers are counted: ``Marlin +1``.
    """
    plain = Counter[str]()
    quantized = Counter[str]()
    for each in groups:
        (plain if each.weights in PLAIN else quantized)[short(each.kernel)] += each.count
    ranked = (quantized or plain).most_common()
    if not ranked:
        return ""
    return ranked[0][0] if len(ranked) == 1 else f"{ranked[0][0]} +{len(ranked) - 1}"


def deviations(groups: Sequence[LayerGroup]) -> list[str]:
    """One clause for each way in which layers ran otherwise than their checkpoint asks."""
    found: dict[tuple[str, str, str], int] = {}
    for each in groups:
        if each.asked:
            key = (each.asked, each.activations, short(each.kernel))
            found[key] = found.get(key, 0) + each.count
    return [sentence(*key, count) for key, count in found.items()]


def sentence(asked: str, activations: str, kernel: str, count: int) -> str:
    """What one deviation is, in words."""
    if activations == UNKNOWN:
        return f"the checkpoint asks for {kind(asked)} activations; what {kernel} took ({count} layers) is not known"
    if activations.startswith(("bfloat", "float")):
        told = f"left them unquantized ({activations}, {count} layers)"
    else:
        told = f"took {activations} ({count} layers)"
    return f"the checkpoint asks for {kind(asked)} activations, but {kernel} {told}"
