"""How a model's layers ran: groups of layers, the kernel of a table row, and where layers ran not as was asked.

An engine describes every layer by a ``Layer``; the results carry groups of layers (``backends/base.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from backends.base import Layer, LayerGroup
from backends.layers.schemes import UNKNOWN, has_rounded_scales, number_format

if TYPE_CHECKING:
    from pydantic import TypeAdapter

EXPERTS = re.compile(r"\.experts(?:\.|$)")
"""Names of routed experts."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+$")
SUFFIX = re.compile(r"(?:ScaledMM)?(?:LinearKernel|LinearMethod|EmbeddingMethod|Kernel|Method)$")

PLAIN = {"bfloat16", "float16", "float32", "bf16", "f16", "f32"}
"""Weights that are not quantized, as torch and ggml call them."""
AFTER_LOADING = "after_loading"
"""The key under which a prediction of kernels says why an engine chooses them only when it has loaded the weights."""


@cache
def _groups() -> TypeAdapter[tuple[LayerGroup, ...]]:
    """Made when it is needed: 0.04 s that --help and a check need not wait."""
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[LayerGroup, ...])


def group_layers(layers: Iterable[Layer]) -> tuple[LayerGroup, ...]:
    """Groups of the layers that differ only in their numbers, in the order of each group's first layer."""
    counts = Counter(replace(layer, name=NUMBER.sub("*", layer.name)) for layer in layers)
    return tuple(LayerGroup(layer, count) for layer, count in counts.items())


def groups_to_json(groups: Iterable[LayerGroup]) -> list[dict[str, Any]]:
    """Groups as results.json has them: one flat object for each, in which the layer's name is called "layers"."""
    found = []
    for group in groups:
        layer = asdict(group.layer)
        found.append({"layers": layer.pop("name"), "count": group.count, **layer})
    return found


def groups_from_json(found: Sequence[Mapping[str, Any]]) -> tuple[LayerGroup, ...]:
    """The groups that ``groups_to_json`` wrote; KeyError, TypeError or ValueError for anything else."""
    nested = [{"count": each["count"], "layer": {**each, "name": each["layers"]}} for each in found]
    return _groups().validate_python(nested)


def deviation(asked: str, activations: str) -> str:
    """``asked``, the activations of a checkpoint's scheme, if ``activations`` ran in another number format; else "".

    Another scaling of the same number format (static FP8 asked, dynamic FP8 ran) is no deviation.  Scales rounded up
    to powers of two are one: on an H200 DeepGEMM's took an FP8 model's KLD from 0.026 to 0.053 (docs/measurements.md).
    """
    rounded = has_rounded_scales(activations) and not has_rounded_scales(asked)
    return asked if rounded or number_format(asked) != number_format(activations) else ""


def short_kernel_name(kernel: str) -> str:
    """A kernel's class name without the words in which all such names end: MarlinNvFp4LinearKernel -> MarlinNvFp4."""
    return SUFFIX.sub("", kernel) or kernel


def kernel_of(groups: Sequence[LayerGroup]) -> str:
    """The short name of the kernel that ran most quantized layers, or most layers of a model without quantized ones.

    Experts come first: they hold most weights of a mixture.  Other kernels of quantized layers are counted: ``Marlin
    +1``.  Without groups the name is "".
    """
    experts, others, plain = Counter[str](), Counter[str](), Counter[str]()
    for group in groups:
        quantized = experts if EXPERTS.search(group.layer.name) else others
        counts = plain if group.layer.weights in PLAIN else quantized
        counts[short_kernel_name(group.layer.kernel)] += group.count
    counted = experts.most_common() + others.most_common() or plain.most_common()
    ranked = list(dict.fromkeys(name for name, _ in counted))
    if not ranked:
        return ""
    return ranked[0] if len(ranked) == 1 else f"{ranked[0]} +{len(ranked) - 1}"


def deviations(groups: Sequence[LayerGroup]) -> list[str]:
    """One clause for each way in which layers ran otherwise than their checkpoint asks."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for group in groups:
        if group.layer.asked:
            counts[group.layer.asked, group.layer.activations, short_kernel_name(group.layer.kernel)] += group.count
    return [deviation_in_words(*key, count) for key, count in counts.items()]


def deviation_in_words(asked: str, activations: str, kernel: str, count: int) -> str:
    """One clause: ``count`` layers took ``activations`` in ``kernel``, where the checkpoint asks for ``asked``."""
    if number_format(asked) == number_format(activations):
        return (
            f"the checkpoint asks for {asked} activations, but {kernel} rounded their scales, and those of the "
            f"weights, up to powers of two ({activations}, {count} layers)"
        )
    asked = number_format(asked)
    if activations == UNKNOWN:
        return f"the checkpoint asks for {asked} activations; what {kernel} took ({count} layers) is not known"
    if activations.startswith(("bfloat", "float")):
        told = f"left them unquantized ({activations}, {count} layers)"
    else:
        told = f"took {activations} ({count} layers)"
    return f"the checkpoint asks for {asked} activations, but {kernel} {told}"
