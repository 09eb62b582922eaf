"""Schemes of layers and KV cache in a checkpoint's quantization config.

All engines describe weights and activations by a number format and the granularity of its scales:
``int4 g128``, ``int8 channel``, ``fp8 token``, ``fp8 block 128x128``, ``nvfp4 g16``, ``nf4 g64``.
``e8m0`` at the end means that scales are powers of two in a format that does not require it.

``declared`` reads a config, with one reader per ``quant_method``.  It returns the scheme of
*quantized* layers; the checkpoint's tensors show which layers are quantized.  Unknown words give
None, never a guess.  No engine, no torch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from .module_names import bare, parts_of, spellings

UNKNOWN = "unknown"
Config = Mapping[str, Any]
IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
"""Keys of configs that list layers which are not quantized.

They are those of compressed-tensors, fp8 and bitsandbytes, ModelOpt, ...
"""
POWERS_OF_TWO = "e8m0"
"""The last word of a scheme whose scales were rounded up to powers of two."""
CACHE_ALGORITHMS = {"FP8": "fp8 tensor", "NVFP4": "nvfp4 g16", "INT8": "int8 tensor"}
"""ModelOpt's ``kv_cache_quant_algo`` -> the format of keys and values."""
SPECIAL_CHARACTERS = frozenset(r"*+?^$()[]{}|\\")
"""Characters that make a name in auto-round's ``extra_config`` a regular expression."""


@dataclass(frozen=True)
class Scheme:
    """Weights and activations of a quantized layer.

    ``activations`` is "" if they keep the model's dtype.  ``zero_points``: True if the weights
    have zero points; None if the config does not say.
    """

    weights: str
    activations: str = ""
    zero_points: bool | None = field(default=None, compare=False)


SchemeKey = tuple[Scheme, bool | None]
"""A scheme and its zero points, which do not count when two schemes are compared."""


@dataclass(frozen=True)
class Declared:
    """The schemes of a checkpoint's quantized layers; None means unknown."""

    default: Scheme | None = None  # of layers that no name or pattern matches
    # by the name that ``bare`` returns
    exact: Mapping[str, Scheme | None] = field(default_factory=dict)
    # the first match at a name's start applies
    patterns: tuple[tuple[re.Pattern[str], Scheme | None], ...] = ()

    def schemes(self) -> list[Scheme]:
        """Return the known schemes of all layers."""
        schemes = [self.default, *self.exact.values()]
        schemes += [scheme for _, scheme in self.patterns]
        return [scheme for scheme in schemes if scheme is not None]

    def of(self, layer: str) -> Scheme | None:
        """Return the scheme of one layer; None if unknown, or if its parts have different schemes.

        ``layer``: its name in the checkpoint or in an engine, fused or not.
        """
        paths = parts_of(layer)
        if bare(layer) in self.exact:
            paths = [layer]
        return common_scheme({self._of_part(path) for path in paths})

    def _of_part(self, path: str) -> Scheme | None:
        name = bare(path)
        # A config may name a module that contains the layer.
        owner = name
        while owner:
            if owner in self.exact:
                return self.exact[owner]
            owner = owner.rpartition(".")[0]
        # Or the modules that the layer contains: the experts of a layer.
        inside = {scheme for key, scheme in self.exact.items() if key.startswith(f"{name}.")}
        if inside:
            return common_scheme(inside)
        names = [path, *spellings(name)]
        for pattern, scheme in self.patterns:
            if any(pattern.match(spelling) for spelling in names):
                return scheme
        return self.default


def common_scheme(schemes: set[Scheme | None]) -> Scheme | None:
    """Return the only scheme of a set; None if there are several."""
    if len(schemes) > 1:
        return None
    return next(iter(schemes), None)


ROUTED = re.compile(r"(?:^|.*\.)experts(?:\.|$)")
"""Names of experts that a router chooses; shared experts have other names."""
MX = "mxfp8 g32"
ALGORITHMS = {
    "NVFP4": Scheme("nvfp4 g16", "nvfp4 g16"),
    "NVFP4_AWQ": Scheme("nvfp4 g16", "nvfp4 g16"),
    "W4A16_NVFP4": Scheme("nvfp4 g16"),
    "FP8": Scheme("fp8 tensor", "fp8 tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8 channel", "fp8 token"),
    "FP8_PB_WO": Scheme("fp8 block 128x128"),
    "MXFP8": Scheme(MX, MX),
}
"""``quant_algo`` of NVIDIA ModelOpt.

FP8_PB_WO is weight-only in ModelOpt's recipe; vLLM 0.32 rounds its activations to FP8 nevertheless.
"""


def has_rounded_scales(described: str) -> bool:
    """True if scales are powers of two in a format that does not require it: "fp8 g128 e8m0"."""
    return described.endswith(f" {POWERS_OF_TWO}")


def number_format(described: str) -> str:
    """Return the number format alone: "fp8" of "fp8 token"."""
    return described.partition(" ")[0]


def with_group_size(name: str, group_size: Any) -> str:
    """Return ``int4 g128``; ``int4 channel`` if a group is a whole row (-1, 0 or None)."""
    if isinstance(group_size, int) and group_size > 0:
        return f"{name} g{group_size}"
    return f"{name} channel"


def args_text(args: Any) -> str:
    """Return the scheme of compressed-tensors' ``QuantizationArgs``; "" for None.

    ``args``: an object of that class, or its JSON.
    """
    if not args:
        return ""
    fields = args
    if not isinstance(args, Mapping):
        fields = args.model_dump(mode="json")
    bits = fields.get("num_bits", 8)
    is_float = fields.get("type") == "float"
    group = fields.get("group_size")
    strategy = fields.get("strategy")
    if not strategy:
        strategy = "tensor"
        if isinstance(group, int) and group > 0:
            strategy = "group"
    if is_float and bits == 4:
        if strategy == "tensor_group":
            return with_group_size("nvfp4", group)
        return with_group_size("mxfp4", group)
    if is_float and bits == 8 and group == 32:
        # FP8 has no other use of such small groups.
        name = "mxfp8"
    elif is_float:
        name = f"fp{bits}"
    else:
        name = f"int{bits}"
    if strategy in ("group", "tensor_group"):
        return with_group_size(name, group)
    if strategy == "block":
        return f"{name} block {sizes_text(fields.get('block_structure'))}".strip()
    return f"{name} {strategy}"


def sizes_text(sizes: Any) -> str:
    """Return ``128x128`` for [128, 128]; "" for anything but a list."""
    if not isinstance(sizes, list | tuple):
        return ""
    return "x".join(str(size) for size in sizes)


def objects_in(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects among an object's values; empty for anything else."""
    if not isinstance(value, Mapping):
        return []
    return [entry for entry in value.values() if isinstance(entry, Mapping)]


def part(owner: Any, key: str) -> Mapping[str, Any]:
    """Return the object under a key; empty if there is none."""
    if not isinstance(owner, Mapping):
        return {}
    value = owner.get(key)
    if not isinstance(value, Mapping):
        return {}
    return value


def modelopt_section(config: Config) -> Config:
    """Return the object with ModelOpt's keys.

    hf_quant_config.json has them in an object ``quantization``, config.json next to the other keys.
    """
    section = part(config, "quantization")
    if section:
        return section
    return config


def asks_for_input_scales(quantization: Mapping[str, Any]) -> bool:
    """True if a config requires a stored scale of the activations in every quantized layer."""
    if quantization.get("quant_method") == "fp8":
        return quantization.get("activation_scheme") == "static"
    algorithm = modelopt_section(quantization).get("quant_algo")
    if str(algorithm).upper() in ("NVFP4", "NVFP4_AWQ", "FP8"):
        return True
    groups = objects_in(quantization.get("config_groups"))
    return bool(groups) and all(is_static(group.get("input_activations")) for group in groups)


def zero_points(arguments: Any) -> bool | None:
    """True if compressed-tensors' ``QuantizationArgs``, as JSON, promise zero points.

    False if they rule zero points out, None if they do not say.
    """
    if not isinstance(arguments, Mapping) or arguments.get("type", "int") != "int":
        return None
    symmetric = arguments.get("symmetric")
    if not isinstance(symmetric, bool):
        return None
    return not symmetric


def ignored_names(quantization: Config) -> list[str]:
    """Return the names and patterns of layers that a config lists as not quantized."""
    ignored = []
    for section in (quantization, part(quantization, "quantization")):
        for key in IGNORED:
            names = section.get(key)
            if isinstance(names, list):
                ignored += [name for name in names if isinstance(name, str)]
    return ignored


def is_ignored(module: str, patterns: Sequence[str]) -> bool:
    """True if a pattern matches a module.

    A pattern is a module's whole name, a name with ``*``, or ``re:`` and a regular expression.
    """
    for pattern in patterns:
        # An invalid expression matches no module.
        with suppress(re.error):
            if matches(pattern, module):
                return True
    return False


def matches(pattern: str, module: str) -> bool:
    """True if a pattern (``is_ignored``) matches a module; re.error if it is invalid."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def is_static(arguments: Any) -> bool:
    """True if compressed-tensors' ``QuantizationArgs``, as JSON, describe a scale that is stored.

    ``"dynamic": "local"`` is NVFP4's: the scales of groups are computed, the global one is stored.
    """
    if not isinstance(arguments, Mapping):
        return False
    dynamic = arguments.get("dynamic")
    if dynamic == "local":
        return bool(arguments.get("strategy") == "tensor_group")
    return dynamic in (None, False)


def kv_cache(config: Mapping[str, Any]) -> str:
    """Return the format of keys and values in a checkpoint's config: "fp8 tensor", "unknown", ...

    It is "" for the model's dtype.  compressed-tensors and ModelOpt have ``kv_cache_scheme``,
    ModelOpt's hf_quant_config.json has ``kv_cache_quant_algo``.  AMD Quark's ``kv_cache_group`` is
    not read further: "unknown".
    """
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return args_text(scheme)
    if part(config, "export").get("kv_cache_group"):
        return UNKNOWN
    algorithm = modelopt_section(config).get("kv_cache_quant_algo")
    if not algorithm:
        algorithm = scheme
    if not algorithm or str(algorithm).upper() == "NONE":
        return ""
    return CACHE_ALGORITHMS.get(str(algorithm).upper(), UNKNOWN)


def by_name(default: Scheme | None, schemes: Mapping[str, Scheme | None]) -> Declared:
    """Return a default scheme, and other schemes by the names of layers.

    A name may have ``*``, or be ``re:`` and a regular expression.  An invalid expression matches
    no layer.
    """
    exact: dict[str, Scheme | None] = {}
    patterns: list[tuple[re.Pattern[str], Scheme | None]] = []
    for name, scheme in schemes.items():
        if name.startswith("re:") or "*" in name:
            with suppress(re.error):
                patterns.append((pattern_of(name), scheme))
        else:
            exact[bare(name)] = scheme
    return Declared(default, exact, tuple(patterns))


def pattern_of(name: str) -> re.Pattern[str]:
    """Compile ``re:`` and a regular expression, or a name with ``*``; re.error if it is invalid."""
    if name.startswith("re:"):
        return re.compile(name[3:])
    return re.compile(fnmatch.translate(name))


def declared(config: Config) -> Declared:
    """Return the schemes of a ``quantization_config``; empty if its method is unknown."""
    method = str(config.get("quant_method", "")).lower()
    # Older AutoGPTQ and AutoAWQ write "gptq_marlin" and "awq_marlin".
    method = method.removesuffix("_marlin")
    # vLLM's names are modelopt_fp4 and modelopt_mixed.
    if method.startswith("modelopt"):
        method = "modelopt"
    reader = READERS.get(method.removeprefix("intel/"))
    if reader is None:
        return Declared()
    return reader(config)


def integers(config: Config) -> Declared:
    """GPTQ, AWQ and Intel's auto-round (``inc`` in vLLM): all have integers.

    Extra keys describe some layers.  GPTQModel's ``dynamic``: ``+:pattern``, or ``-:pattern`` for
    layers that are not quantized.  auto-round's ``extra_config``: name or pattern.
    """
    is_unsigned = has_unsigned_integers(config)
    schemes: dict[str, Scheme | None] = {}
    for rule, changes in part(config, "dynamic").items():
        if not isinstance(changes, Mapping):
            continue
        scheme = None
        if not rule.startswith("-:"):
            scheme = integer_scheme({**config, **changes}, is_unsigned=is_unsigned)
        schemes[f"re:{rule.removeprefix('+:').removeprefix('-:')}"] = scheme
    for name, changes in part(config, "extra_config").items():
        scheme = None
        if isinstance(changes, Mapping):
            scheme = integer_scheme({**config, **changes}, is_unsigned=is_unsigned)
        # Nothing marks a pattern, except that names of layers have no such characters.
        is_pattern = not SPECIAL_CHARACTERS.isdisjoint(name)
        if is_pattern:
            schemes[f"re:.*(?:{name})"] = scheme
        else:
            schemes[name] = scheme
    return by_name(integer_scheme(config, is_unsigned=is_unsigned), schemes)


def has_unsigned_integers(config: Config) -> bool:
    """True for AWQ, and for auto-round that writes AWQ's format."""
    values = [str(config.get(key)) for key in ("quant_method", "packing_format", "backend")]
    return "awq" in " ".join(values).lower()


def integer_scheme(layer_config: Config, *, is_unsigned: bool) -> Scheme | None:
    """Return the scheme of layers with these keys; None unless their weights are integers."""
    bits = layer_config.get("bits", layer_config.get("w_bit"))
    group = layer_config.get("group_size", layer_config.get("q_group_size"))
    if not isinstance(bits, int) or bits >= 16 or layer_config.get("data_type", "int") != "int":
        return None
    if layer_config.get("act_bits") not in (None, 16):
        return None
    has_zero_points = None
    symmetric = layer_config.get("sym")
    if isinstance(symmetric, bool):
        has_zero_points = not symmetric
    name = f"int{bits}"
    if is_unsigned:
        name = f"uint{bits}"
    return Scheme(with_group_size(name, group), zero_points=has_zero_points)


def compressed(config: Config) -> Declared:
    """compressed-tensors: groups of layers, with one scheme per group.

    A group's targets are classes ("Linear"), ``re:`` and a pattern, or names of layers.
    """
    schemes: dict[SchemeKey, Scheme] = {}
    targets: list[tuple[str, Scheme]] = []
    for group in objects_in(config.get("config_groups")):
        weights = group.get("weights")
        activations = group.get("input_activations")
        for arguments in (weights, activations):
            if arguments and not isinstance(arguments, Mapping):
                return Declared()
        scheme = Scheme(args_text(weights), args_text(activations), zero_points(weights))
        schemes[scheme, scheme.zero_points] = scheme
        names = group.get("targets")
        if isinstance(names, list):
            targets += [(str(name), scheme) for name in names]
    if len(schemes) < 2:
        return Declared(next(iter(schemes.values()), None))
    layers: dict[str, Scheme | None] = {}
    for name, scheme in targets:
        if name.startswith("re:") or "." in name or name.islower():
            layers[name] = scheme
    schemes_of_classes: dict[SchemeKey, Scheme] = {}
    for name, scheme in targets:
        if name not in layers:
            schemes_of_classes[scheme, scheme.zero_points] = scheme
    default = None
    # Which class a layer has is not known here, so that only one scheme of classes is certain.
    if len(schemes_of_classes) == 1:
        default = next(iter(schemes_of_classes.values()))
    return by_name(default, layers)


def fp8(config: Config) -> Declared:
    """FP8 of DeepSeek, Qwen and vLLM.

    If weights have blocks, activations have groups as long as a block.  If ``scale_fmt`` is
    "ue8m0", scales are powers of two.

    If ``expert_dtype`` is "fp4", as in DeepSeek-V4, the experts have MXFP4 weights and the FP8
    activations of the other layers.  With ``moe_quant_algo``, they have the scheme of that
    algorithm instead, such as NVFP4.  ``expert_dtype`` is a key of the model's config, which
    ``CheckpointConfig.quantization`` adds.
    """
    sizes = config.get("weight_block_size")
    if not sizes:
        # Without a granularity: for dynamic scales, the config states none.
        activations = "fp8"
        if config.get("activation_scheme") == "static":
            activations = "fp8 tensor"
        return Declared(Scheme("fp8 tensor", activations))
    if not sizes_text(sizes):
        return Declared()
    activations = f"fp8 g{sizes[-1]}"
    if config.get("scale_fmt") == "ue8m0":
        activations = f"{activations} {POWERS_OF_TWO}"
    default = Scheme(f"fp8 block {sizes_text(sizes)}", activations)
    if config.get("expert_dtype") != "fp4":
        return Declared(default)
    algorithm = config.get("moe_quant_algo")
    experts: Scheme | None = Scheme("mxfp4 g32", default.activations)
    if algorithm:
        experts = ALGORITHMS.get(str(algorithm).upper())
    return Declared(default, patterns=((ROUTED, experts),))


def fbgemm_fp8(_config: Config) -> Declared:
    """FP8 of FBGEMM, with one scale per row and per token."""
    return Declared(Scheme("fp8 channel", "fp8 token"))


def mxfp8(_config: Config) -> Declared:
    """MXFP8 of weights and activations."""
    return Declared(Scheme(MX, MX))


def mxfp4(_config: Config) -> Declared:
    """MXFP4 of weights alone."""
    return Declared(Scheme("mxfp4 g32"))


def bitsandbytes(config: Config) -> Declared:
    """4 bits in groups of 64, or 8 bits with one scale per row."""
    if config.get("load_in_4bit"):
        return Declared(Scheme(f"{config.get('bnb_4bit_quant_type', 'fp4')} g64"))
    return Declared(Scheme("int8 channel", "int8 token"))


def modelopt(config: Config) -> Declared:
    """NVIDIA ModelOpt, which names its scheme; MIXED_PRECISION names one for each layer."""
    section = modelopt_section(config)
    if str(section.get("quant_algo", "")).upper() != "MIXED_PRECISION":
        return Declared(modelopt_scheme(section))
    layers = part(section, "quantized_layers")
    return by_name(None, {path: modelopt_scheme(part(layers, path)) for path in layers})


def modelopt_scheme(layer_config: Config) -> Scheme | None:
    """Return the scheme of ModelOpt's ``quant_algo``; None if it is not known.

    NVFP4 has the stated ``group_size``, which should be 16.
    """
    scheme = ALGORITHMS.get(str(layer_config.get("quant_algo", "")).upper())
    group = layer_config.get("group_size")
    if scheme is None or number_format(scheme.weights) != "nvfp4":
        return scheme
    if not isinstance(group, int) or group <= 0:
        return scheme
    return replace(scheme, weights=with_group_size("nvfp4", group))


READERS: dict[str, Callable[[Config], Declared]] = {
    "compressed-tensors": compressed,
    "gptq": integers,
    "gptqmodel": integers,
    "awq": integers,
    "auto-round": integers,
    "inc": integers,
    "fp8": fp8,
    "deepseek_v4_fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "mxfp8": mxfp8,
    "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
    "modelopt": modelopt,
}
"""``quant_method`` -> its reader."""
