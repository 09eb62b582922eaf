"""Find parts of quantized modules (scales, ...) that a checkpoint lacks, from headers and config.

Transformers does not build the modules of quantizers, so no built model shows what they need.  A
part is missing if the readers of ``formats`` need it, if the config promises it, or if the module's
peers have it.  Peers are modules with the same stored format and scheme.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..layers.module_names import kind_of, module_and_part
from ..layers.schemes import (
    Scheme,
    asks_for_input_scales,
    declared,
    kv_cache,
    objects_in,
    part,
)
from .checkpoint_config import CheckpointConfig
from .folder import Checkpoint
from .formats import FORMATS, INPUT_SCALES, KV_SCALES, NOT_BITS, Parts, layout_of, main_part

Kinds = dict[str, list[str]]
"""Kind of module (its name without its numbers) -> names of its modules."""


class PeerKey(NamedTuple):
    """Modules with an equal key are peers."""

    main: str
    dtype: str
    scheme: Scheme | None


class PartRules(NamedTuple):
    """Facts of a config about the parts of its modules; ``of(checkpoint)`` reads them."""

    scheme_of: Mapping[str, Scheme | None]  # once per module: a mixture of experts has 100,000
    promised: set[str]  # parts of every module whose format has them
    optional: set[str]  # modules of one scheme may differ in these: bias, promised to some, ...
    needs_input_scales: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> PartRules:
        """Read the config of a checkpoint."""
        quantization = checkpoint.config.quantization
        schemes = declared(quantization)
        promised, of_some_layers = promises(quantization)
        optional = {"bias", *of_some_layers}
        if not kv_cache(quantization):
            optional |= KV_SCALES
        return cls(
            scheme_of={module: schemes.of(module) for module in checkpoint.modules},
            promised=promised,
            optional=optional,
            needs_input_scales=asks_for_input_scales(quantization),
        )


def promises(quantization: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return the further parts (zero points, orders of inputs) that a config promises.

    Two sets of names: those promised to all layers, and those promised to some.
    """
    groups = objects_in(quantization.get("config_groups"))
    counts = Counter[str]()
    for group in groups:
        arguments = part(group, "weights")
        if arguments.get("symmetric") is False:
            counts["weight_zero_point"] += 1
        if arguments.get("actorder") in ("group", "dynamic"):
            counts["weight_g_idx"] += 1
    promised = set()
    of_some_layers = set()
    for name, count in counts.items():
        if count == len(groups):
            promised.add(name)
        else:
            of_some_layers.add(name)
    # GPTQ and AWQ state one value for all layers.
    if quantization.get("sym") is False or quantization.get("zero_point") is True:
        promised.add("qzeros")
    if quantization.get("desc_act") is True:
        promised.add("g_idx")
    return promised, of_some_layers


def lacking_parts(checkpoint: Checkpoint) -> list[str]:
    """Return the names of parts that modules lack: by config, by their peers, by their format."""
    rules = PartRules.of(checkpoint)
    lacking: list[str] = []
    for module, parts in checkpoint.quantized.items():
        lacking += lacking_by_config(module, parts, rules)
    groups = peer_groups(checkpoint, rules)
    lacking += lost_matrices(checkpoint, groups)
    for kinds in groups.values():
        lacking += lacking_by_peers(checkpoint, kinds, rules)
    # A module whose format cannot be read is named only if none of its parts is named above.
    named = {module_and_part(name)[0] for name in lacking}
    for module, parts in checkpoint.quantized.items():
        unreadable = unreadable_format(module, parts, checkpoint.config, rules)
        if unreadable and module not in named:
            lacking.append(unreadable)
    return list(dict.fromkeys(lacking))


def lacking_by_config(module: str, parts: Parts, rules: PartRules) -> list[str]:
    """Return the parts that the config promises to a quantized module, and that it lacks."""
    main = main_part(parts)
    assert main is not None
    scheme = rules.scheme_of[module]
    of_format = FORMATS[main][1].split()
    lacking = [name for name in of_format if name in rules.promised and name not in parts]
    # GPTQ and AWQ have qzeros instead.
    has_zero_points = scheme is not None and scheme.zero_points and main != "qweight"
    if has_zero_points and "weight_zero_point" not in parts:
        lacking.append("weight_zero_point")
    takes_input_scales = scheme is None or scheme.activations
    if rules.needs_input_scales and takes_input_scales and INPUT_SCALES.isdisjoint(parts):
        lacking.append("input_scale")
    return [f"{module}.{name}" for name in lacking]


def unreadable_format(module: str, parts: Parts, config: CheckpointConfig, rules: PartRules) -> str:
    """Return a text on a quantized module that lacks parts of its format; "" for other modules."""
    main = main_part(parts)
    assert main is not None
    if layout_of(parts, config).words:
        return ""
    scheme = rules.scheme_of[module]
    if scheme is not None:
        weights = scheme.weights
    elif not parts.keys() - {main, *NOT_BITS}:
        weights = f"{parts[main].dtype} weights"
    else:
        # Its further parts may be all that a format needs which compare_q does not know.
        return ""
    return f"{module}: scales of its {weights}, next to {', '.join(sorted(parts))}"


def peer_groups(checkpoint: Checkpoint, rules: PartRules) -> dict[PeerKey | None, Kinds]:
    """Return groups of peers, each as kind -> modules; key None: modules without a matrix.

    Unquantized modules count if they have more than a matrix, or scales of a KV cache.
    """
    groups: dict[PeerKey | None, Kinds] = {}
    for module, parts in checkpoint.modules.items():
        main = main_part(parts)
        if module not in checkpoint.quantized:
            has_cache_scales = not (KV_SCALES - rules.optional).isdisjoint(parts)
            has_more_than_matrix = main is not None and parts.keys() - {main, *rules.optional}
            if not has_cache_scales and not has_more_than_matrix:
                continue
        key = None
        if main is not None:
            key = PeerKey(main, parts[main].dtype, rules.scheme_of[module])
        groups.setdefault(key, {}).setdefault(kind_of(module), []).append(module)
    return groups


def lost_matrices(checkpoint: Checkpoint, groups: Mapping[PeerKey | None, Kinds]) -> list[str]:
    """Return the matrices that modules lack although modules of their kind have one."""
    main_of_kind: dict[str, str] = {}
    for key, kinds in groups.items():
        if key is not None:
            main_of_kind.update(dict.fromkeys(kinds, key.main))
    lacking = []
    for module in sorted(checkpoint.modules.keys() - checkpoint.matrices.keys()):
        kind = kind_of(module)
        if kind in main_of_kind:
            lacking.append(f"{module}.{main_of_kind[kind]}")
    return lacking


def lacking_by_peers(checkpoint: Checkpoint, kinds: Kinds, rules: PartRules) -> list[str]:
    """Return the parts that modules lack, and half of their kind or all other kinds have.

    ``kinds``: one group of peers.
    """
    counts: dict[str, Counter[str]] = {}
    for kind, modules in kinds.items():
        counts[kind] = Counter()
        for module in modules:
            counts[kind].update(checkpoint.modules[module].keys())
    lacking = []
    for kind, modules in kinds.items():
        needed = {name for name, count in counts[kind].items() if 2 * count >= len(modules)}
        others = [set(counts[other]) for other in kinds if other != kind]
        if len(others) > 1:  # one other kind alone proves nothing
            needed |= set.intersection(*others)
        for module in modules:
            absent = needed - rules.optional - checkpoint.modules[module].keys()
            lacking += [f"{module}.{name}" for name in sorted(absent)]
    return lacking
