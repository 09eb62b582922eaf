"""Schemes of layers and KV cache in a checkpoint's quantization config, in terms that all engines
share.

Weights and activations are described by a number format and the granularity of its scales: ``int4
g128``, ``int8 channel``, ``fp8 token``, ``fp8 block 128x128``, ``nvfp4 g16``, ``nf4 g64``.  ``
e8m0`` at the end means that scales are powers of two in a format that does not require it.

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
"""Keys of configs that list layers which are not quantized: compressed-tensors, fp8 and
bitsandbytes, ModelOpt, ..."""
POWERS_OF_TWO = "e8m0"
"""The last word of a scheme whose scales were rounded up to powers of two."""


@dataclass(frozen=True)
class Scheme:
    """Weights and activations of a quantized layer; ``activations`` is "" if they keep the model's
    dtype.

    ``zero_points``: whether the weights have zero points; None if the config does not say.
    """

    weights: str
    activations: str = ""
    zero_points: bool | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Declared:
    """The schemes of a checkpoint's quantized layers; None means unknown."""

    default: Scheme | None = None  # of layers that no name or pattern matches
    exact: Mapping[str, Scheme | None] = field(
        default_factory=dict
    )  # by the name that ``bare`` returns
    patterns: tuple[
        tuple[re.Pattern[str], Scheme | None], ...
    ] = ()  # the first match at a name's start applies

    def schemes(self) -> list[Scheme]:
        """The known schemes of all layers."""
        schemes = [self.default, *self.exact.values(), *(scheme for _, scheme in self.patterns)]
        return [scheme for scheme in schemes if scheme is not None]

    def of(self, layer: str) -> Scheme | None:
        """The scheme of one layer, by its name in the checkpoint or in an engine, fused or not."""
        paths = [layer] if bare(layer) in self.exact else parts_of(layer)
        schemes = {self._of_part(path) for path in paths}
        return schemes.pop() if len(schemes) == 1 else None

    def _of_part(self, path: str) -> Scheme | None:
        name = owner = bare(path)
        while owner:  # a config may name a module that contains the layer
            if owner in self.exact:
                return self.exact[owner]
            owner = owner.rpartition(".")[0]
        inside = {scheme for key, scheme in self.exact.items() if key.startswith(f"{name}.")}
        if inside:
            return inside.pop() if len(inside) == 1 else None
        spelled = spellings(name)
        for pattern, scheme in self.patterns:
            if pattern.match(path) or any(map(pattern.match, spelled)):
                return scheme
        return self.default


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
"""``quant_algo`` of NVIDIA ModelOpt.  FP8_PB_WO is weight-only in ModelOpt's recipe; vLLM 0.32
rounds its activations to FP8 nevertheless."""


def has_rounded_scales(described: str) -> bool:
    """True if scales are powers of two in a format that does not require it: "fp8 g128 e8m0"."""
    return described.endswith(f" {POWERS_OF_TWO}")


def number_format(described: str) -> str:
    """The number format alone: "fp8" of "fp8 token"."""
    return described.partition(" ")[0]


def with_group_size(name: str, group_size: Any) -> str:
    """``int4 g128``; ``int4 channel`` if the group is a whole row of the weights (-1, 0 or None)."""
    return (
        f"{name} g{group_size}"
        if isinstance(group_size, int) and group_size > 0
        else f"{name} channel"
    )


def args_text(args: Any) -> str:
    """The scheme of a ``QuantizationArgs`` of compressed-tensors, an object or JSON; "" for None."""
    if not args:
        return ""
    fields = dict(args) if isinstance(args, Mapping) else args.model_dump(mode="json")
    bits, floating, group = (
        fields.get("num_bits", 8),
        fields.get("type") == "float",
        fields.get("group_size"),
    )
    strategy = fields.get("strategy") or (
        "group" if isinstance(group, int) and group > 0 else "tensor"
    )
    if floating and bits == 4:
        return with_group_size("nvfp4" if strategy == "tensor_group" else "mxfp4", group)
    name = f"{'fp' if floating else 'int'}{bits}"
    if floating and bits == 8 and group == 32:  # FP8 has no other use of such small groups
        name = "mxfp8"
    if strategy in ("group", "tensor_group"):
        return with_group_size(name, group)
    if strategy == "block":
        return f"{name} block {sizes_text(fields.get('block_structure'))}".strip()
    return f"{name} {strategy}"


def sizes_text(sizes: Any) -> str:
    """``128x128``; "" for anything but a list."""
    return "x".join(map(str, sizes)) if isinstance(sizes, list | tuple) else ""


def objects_in(value: Any) -> list[Mapping[str, Any]]:
    """The objects among an object's values; empty for anything else."""
    return (
        [entry for entry in value.values() if isinstance(entry, Mapping)]
        if isinstance(value, Mapping)
        else []
    )


def part(owner: Any, key: str) -> Mapping[str, Any]:
    """The object under a key; empty if there is none."""
    value = owner.get(key) if isinstance(owner, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def asks_for_input_scales(quantization: Mapping[str, Any]) -> bool:
    """True if a config requires a stored scale of the activations in every quantized layer."""
    if quantization.get("quant_method") == "fp8":
        return quantization.get("activation_scheme") == "static"
    algorithm = (part(quantization, "quantization") or quantization).get("quant_algo")
    if str(algorithm).upper() in ("NVFP4", "NVFP4_AWQ", "FP8"):
        return True
    groups = objects_in(quantization.get("config_groups"))
    return bool(groups) and all(is_static(group.get("input_activations")) for group in groups)


def zero_points(arguments: Any) -> bool | None:
    """True if compressed-tensors' ``QuantizationArgs``, as JSON, promise zero points, False if they
    rule them out.
    """
    if not isinstance(arguments, Mapping) or arguments.get("type", "int") != "int":
        return None
    symmetric = arguments.get("symmetric")
    return not symmetric if isinstance(symmetric, bool) else None


def ignored_names(quantization: Config) -> list[str]:
    """The names and patterns of layers that a config lists as not quantized."""
    places = (quantization, part(quantization, "quantization"))
    lists = [place.get(key) for place in places for key in IGNORED]
    return [
        name
        for names in lists
        if isinstance(names, list)
        for name in names
        if isinstance(name, str)
    ]


def is_ignored(module: str, patterns: Sequence[str]) -> bool:
    """True if a pattern matches a module: its whole name, a regular expression after ``re:``, or a
    name with ``*``.
    """
    for pattern in patterns:
        with suppress(re.error):
            if (
                re.match(pattern[3:], module)
                if pattern.startswith("re:")
                else fnmatch.fnmatchcase(module, pattern)
            ):
                return True
    return False


def is_static(arguments: Any) -> bool:
    """True if compressed-tensors' ``QuantizationArgs``, as JSON, describe a scale that is stored.

    ``"dynamic": "local"`` is NVFP4's: the scales of groups are computed, the global one is stored.
    """
    dynamic = arguments.get("dynamic") if isinstance(arguments, Mapping) else True
    return dynamic in (None, False) or (
        dynamic == "local" and arguments.get("strategy") == "tensor_group"
    )


def kv_cache(config: Mapping[str, Any]) -> str:
    """The format of keys and values in a checkpoint's config: "fp8 tensor", ..., "unknown"; "" for
    the model's dtype.

    compressed-tensors and ModelOpt have ``kv_cache_scheme``, ModelOpt's hf_quant_config.json has
    ``kv_cache_quant_algo``.  AMD Quark's ``kv_cache_group`` is not read further: "unknown".
    """
    stated = config.get("kv_cache_scheme")
    if isinstance(stated, Mapping):
        return args_text(stated)
    if part(config, "export").get("kv_cache_group"):
        return UNKNOWN
    algorithm = (part(config, "quantization") or config).get("kv_cache_quant_algo") or stated
    if not algorithm or str(algorithm).upper() == "NONE":
        return ""
    return {"FP8": "fp8 tensor", "NVFP4": "nvfp4 g16", "INT8": "int8 tensor"}.get(
        str(algorithm).upper(), UNKNOWN
    )


def by_name(default: Scheme | None, schemes: Mapping[str, Scheme | None]) -> Declared:
    """A default scheme, and other schemes by a layer's name, with ``*``, or by ``re:`` and a
    regular expression.

    An invalid expression matches no layer.
    """
    exact, patterns = {}, []
    for name, scheme in schemes.items():
        if not name.startswith("re:") and "*" not in name:
            exact[bare(name)] = scheme
            continue
        with suppress(re.error):
            text = name[3:] if name.startswith("re:") else fnmatch.translate(name)
            patterns.append((re.compile(text), scheme))
    return Declared(default, exact, tuple(patterns))


def declared(config: Config) -> Declared:
    """The schemes of a ``quantization_config``; an empty ``Declared`` if its method is unknown."""
    method = (
        str(config.get("quant_method", "")).lower().removesuffix("_marlin")
    )  # older AutoGPTQ and AutoAWQ
    method = (
        "modelopt" if method.startswith("modelopt") else method
    )  # vLLM: modelopt_fp4, modelopt_mixed
    reader = READERS.get(method.removeprefix("intel/"))
    return reader(config) if reader else Declared()


def integers(config: Config) -> Declared:
    """GPTQ, AWQ and Intel's auto-round (``inc`` in vLLM), all with integers; extra keys describe
    some layers.

    GPTQModel's ``dynamic``: ``+:pattern``, or ``-:pattern`` for layers that are not quantized.
    auto-round's ``extra_config``: name or pattern.
    """
    is_awq = (
        "awq"
        in " ".join(
            str(config.get(key)) for key in ("quant_method", "packing_format", "backend")
        ).lower()
    )

    def scheme(own: Config) -> Scheme | None:
        bits, group = (
            own.get("bits", own.get("w_bit")),
            own.get("group_size", own.get("q_group_size")),
        )
        if not isinstance(bits, int) or bits >= 16 or own.get("data_type", "int") != "int":
            return None
        if own.get("act_bits") not in (None, 16):
            return None
        symmetric = own.get("sym")
        points = not symmetric if isinstance(symmetric, bool) else None
        return Scheme(
            with_group_size(f"{'uint' if is_awq else 'int'}{bits}", group), zero_points=points
        )

    rules = {
        f"re:{rule.removeprefix('+:').removeprefix('-:')}": None
        if rule.startswith("-:")
        else scheme({**config, **changes})
        for rule, changes in part(config, "dynamic").items()
        if isinstance(changes, Mapping)
    } | {
        f"re:.*(?:{name})" if set(name) & set(r"*+?^$()[]{}|\\") else name: scheme(
            {**config, **changes}
        )
        if isinstance(changes, Mapping)
        else None
        for name, changes in part(config, "extra_config").items()
    }
    return by_name(scheme(config), rules)


def compressed(config: Config) -> Declared:
    """compressed-tensors: groups with targets, each a class ("Linear"), ``re:`` and a pattern, or a
    layer's name.
    """
    groups = []
    for entry in objects_in(config.get("config_groups")):
        weights, activations = entry.get("weights"), entry.get("input_activations")
        if not all(isinstance(args, Mapping) or not args for args in (weights, activations)):
            return Declared()
        targets = entry.get("targets")
        scheme = Scheme(args_text(weights), args_text(activations), zero_points(weights))
        groups.append((map(str, targets if isinstance(targets, list) else []), scheme))
    schemes = {(scheme, scheme.zero_points): scheme for _, scheme in groups}
    if len(schemes) < 2:
        return Declared(next(iter(schemes.values()), None))
    every = [(target, scheme) for targets, scheme in groups for target in targets]
    layers = {
        name: scheme
        for name, scheme in every
        if name.startswith("re:") or "." in name or name.islower()
    }
    classes = {(scheme, scheme.zero_points): scheme for name, scheme in every if name not in layers}
    return by_name(next(iter(classes.values())) if len(classes) == 1 else None, layers)


def fp8(config: Config) -> Declared:
    """FP8 of DeepSeek, Qwen and vLLM; DeepSeek-V4's experts are MXFP4, with FP8 activations, or
    NVFP4.

    If weights have blocks, activations have groups as long as a block.  If ``scale_fmt`` is
    "ue8m0", scales are powers of two.  ``CheckpointConfig.quantization`` adds ``expert_dtype``, a
    key of the model's config.
    """
    sizes = config.get("weight_block_size")
    if not sizes:
        return Declared(
            Scheme(
                "fp8 tensor", "fp8 tensor" if config.get("activation_scheme") == "static" else "fp8"
            )
        )
    if not sizes_text(sizes):
        return Declared()
    rounded = f" {POWERS_OF_TWO}" if config.get("scale_fmt") == "ue8m0" else ""
    default = Scheme(f"fp8 block {sizes_text(sizes)}", f"fp8 g{sizes[-1]}{rounded}")
    if config.get("expert_dtype") != "fp4":
        return Declared(default)
    algorithm = config.get("moe_quant_algo")
    experts = (
        ALGORITHMS.get(str(algorithm).upper())
        if algorithm
        else Scheme("mxfp4 g32", default.activations)
    )
    return Declared(default, patterns=((ROUTED, experts),))


def bitsandbytes(config: Config) -> Declared:
    """4 bits in groups of 64, or 8 bits with one scale per row."""
    if config.get("load_in_4bit"):
        return Declared(Scheme(f"{config.get('bnb_4bit_quant_type', 'fp4')} g64"))
    return Declared(Scheme("int8 channel", "int8 token"))


def modelopt(config: Config) -> Declared:
    """NVIDIA ModelOpt, which names its scheme; MIXED_PRECISION names one for each layer."""
    nested = part(config, "quantization") or config
    if str(nested.get("quant_algo", "")).upper() != "MIXED_PRECISION":
        return Declared(modelopt_scheme(nested))
    layers = part(nested, "quantized_layers")
    return by_name(None, {path: modelopt_scheme(part(layers, path)) for path in layers})


def modelopt_scheme(stated: Config) -> Scheme | None:
    """The scheme of ModelOpt's ``quant_algo``; for NVFP4 with the stated ``group_size``, which
    should be 16.
    """
    scheme, group = (
        ALGORITHMS.get(str(stated.get("quant_algo", "")).upper()),
        stated.get("group_size"),
    )
    if (
        scheme is None
        or number_format(scheme.weights) != "nvfp4"
        or not isinstance(group, int)
        or group <= 0
    ):
        return scheme
    return replace(scheme, weights=with_group_size("nvfp4", group))


READERS: dict[str, Callable[[Config], Declared]] = {
    "compressed-tensors": compressed,
    **dict.fromkeys(("gptq", "gptqmodel", "awq", "auto-round", "inc"), integers),
    "fp8": fp8,
    "deepseek_v4_fp8": fp8,
    "fbgemm_fp8": lambda _: Declared(Scheme("fp8 channel", "fp8 token")),
    "mxfp8": lambda _: Declared(Scheme(MX, MX)),
    "mxfp4": lambda _: Declared(Scheme("mxfp4 g32")),
    "bitsandbytes": bitsandbytes,
    "modelopt": modelopt,
}
"""``quant_method`` -> its reader."""
