"""What a checkpoint's own quantization config asks for, layer by layer.  One reader a ``quant_method``; no engine.

A reader turns the config into a ``Declared``.  It says what a *quantized* layer has; which layers are left alone, a
checkpoint's tensors say.  What a config does not state in words that are known here is None, never a guess.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from backends.layers.declared import Declared, bare, expression
from backends.layers.schemes import (
    UNKNOWN,
    Scheme,
    at,
    block_scheme,
    compressed_tensors,
    objects_in,
    part,
    quark,
    with_group_size,
)

Config = Mapping[str, Any]
ROUTED = re.compile(r"(?:^|.*\.)experts(?:\.|$)")
"""The experts among which a router chooses; shared experts have another name."""
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
"""``quant_algo`` of NVIDIA ModelOpt.  The WO of FP8_PB_WO is "weight only": ModelOpt's recipe of that name disables the
quantizer of the activations, which vLLM 0.32 rounds to FP8 all the same."""


def declared(config: Config) -> Declared:
    """What a ``quantization_config`` asks for; an empty ``Declared`` if its method is not known here."""
    method = str(config.get("quant_method", "")).lower().removesuffix("_marlin")  # older AutoGPTQ and AutoAWQ
    method = "modelopt" if method.startswith("modelopt") else method  # vLLM: modelopt_fp4, modelopt_mixed
    reader = READERS.get(method.removeprefix("intel/"))
    return reader(config) if reader else Declared()


def integers(config: Config) -> Declared:
    """GPTQ and AWQ; GPTQModel's ``dynamic`` has other bits for some layers (``+:pattern``), or none (``-:pattern``)."""

    def scheme(own: Config) -> Scheme | None:
        bits = own.get("bits", own.get("w_bit"))
        name = "uint" if config["quant_method"].lower().startswith("awq") else "int"
        group = own.get("group_size", own.get("q_group_size"))
        return Scheme(with_group_size(f"{name}{bits}", group)) if isinstance(bits, int) else None

    patterns = []
    for rule, changes in part(config, "dynamic").items():
        pattern = expression(rule.removeprefix("+:").removeprefix("-:"))
        if pattern and isinstance(changes, Mapping):
            patterns.append((pattern, None if rule.startswith("-:") else scheme({**config, **changes})))
    return Declared(scheme(config), patterns=tuple(patterns))


def auto_round(config: Config) -> Declared:
    """Intel's auto-round, which vLLM calls inc; ``extra_config`` has a layer's name, or a pattern, and what differs."""

    def scheme(own: Config) -> Scheme | None:
        bits, group = own.get("bits"), own.get("group_size")
        if not isinstance(bits, int) or bits >= 16:
            return None
        if str(own.get("data_type", "int")) == "int":
            awq = "awq" in f"{config.get('packing_format')} {config.get('backend')}"
            weights = with_group_size(f"{'uint' if awq else 'int'}{bits}", group)
        else:
            weights = auto_round_float(own.get("data_type"), bits, group)
        taken = 16 if own.get("act_bits") is None else own["act_bits"]
        if not isinstance(taken, int):
            return None
        activations = "" if taken >= 16 else auto_round_float(
            own.get("act_data_type"), taken, own.get("act_group_size", group)
        )  # fmt: skip
        return None if UNKNOWN in (weights, activations) else Scheme(weights, activations)

    exact, patterns = {}, []
    for name, changes in part(config, "extra_config").items():
        own = scheme({**config, **changes}) if isinstance(changes, Mapping) else None
        exact[bare(name)] = own
        if set(name) & set(r"*+?^$()[]{}|\\") and (pattern := expression(f".*(?:{name})")):
            patterns.append((pattern, own))
    return Declared(scheme(config), exact, tuple(patterns))


def auto_round_float(data_type: Any, bits: int, group: Any) -> str:
    """A float format of auto-round: mx_fp and nv_fp have groups of their own, and fp8 may have blocks."""
    name = str(data_type)
    if name.startswith("mx_fp") and bits in (4, 8):
        return f"mxfp{bits} g32"
    if name.startswith("nv_fp") and bits == 4:
        return "nvfp4 g16"
    if name.startswith("fp") and bits == 8 and isinstance(group, list | tuple):
        return f"fp8 block {'x'.join(map(str, group))}"
    return UNKNOWN


def compressed(config: Config) -> Declared:
    """compressed-tensors: groups with targets, each a class ("Linear"), ``re:`` and a pattern, or a layer's name."""
    sparse = part(config, "sparsity_config").get("sparsity_structure") == "2:4" or config.get("format") == "marlin-24"
    groups = []
    for entry in objects_in(config.get("config_groups")):
        weights, activations = entry.get("weights"), entry.get("input_activations")
        if not all(isinstance(args, Mapping) or not args for args in (weights, activations)):
            return Declared()
        scheme = compressed_tensors(weights, activations)
        pruned = sparse or entry.get("format") == "marlin-24"
        groups.append((entry.get("targets"), Scheme(f"{scheme.weights} 2:4", scheme.activations) if pruned else scheme))
    schemes = {scheme for _, scheme in groups}
    if len(schemes) < 2:
        return Declared(schemes.pop() if schemes else Scheme("2:4 sparse") if sparse else None)
    exact, patterns, classes = {}, [], set()
    for targets, scheme in groups:
        for target in targets if isinstance(targets, list) else []:
            if str(target).startswith("re:") and (pattern := expression(target[3:])):
                patterns.append((pattern, scheme))
            elif "." in str(target) or str(target).islower():
                exact[bare(str(target))] = scheme
            else:
                classes.add(scheme)
    return Declared(classes.pop() if len(classes) == 1 else None, exact, tuple(patterns))


def fp8(config: Config) -> Declared:
    """FP8 as DeepSeek, Qwen and vLLM name it; DeepSeek-V4's experts are MXFP4, with FP8 activations, or NVFP4.

    ``expert_dtype`` is a key of the model's config, which ``CheckpointConfig.quantization`` brings along.
    """
    if sizes := config.get("weight_block_size"):
        default = block_scheme(sizes, config.get("scale_fmt"))
        if config.get("expert_dtype") != "fp4" or default is None:
            return Declared(default)
        algorithm = config.get("moe_quant_algo")
        experts = ALGORITHMS.get(str(algorithm).upper()) if algorithm else Scheme("mxfp4 g32", default.activations)
        return Declared(default, patterns=((ROUTED, experts),))
    return Declared(Scheme("fp8 tensor", "fp8 tensor" if config.get("activation_scheme") == "static" else "fp8"))


def w4afp8(config: Config) -> Declared:
    """SGLang's: int4 experts with FP8 activations, everything else FP8 in blocks; its variants are not known here."""
    group, scheme = config.get("group_size", 128), config.get("moe_activation_scheme", "static")
    if config.get("moe_weight_format", "int4") != "int4" or config.get("linear_weight_format", "fp8") != "fp8":
        return Declared()
    experts = Scheme(with_group_size("int4", group), "fp8 tensor" if scheme == "static" else "fp8")
    return Declared(block_scheme(config.get("weight_block_size") or [128, 128]), patterns=((ROUTED, experts),))


def bitsandbytes(config: Config) -> Declared:
    """4 bits in groups of 64, or 8 bits with a scale a row."""
    if config.get("load_in_4bit"):
        return Declared(Scheme(f"{config.get('bnb_4bit_quant_type', 'fp4')} g64"))
    return Declared(Scheme("int8 channel", "int8 token"))


def modelopt(config: Config) -> Declared:
    """NVIDIA ModelOpt, which names its scheme; MIXED_PRECISION names one for each layer."""
    nested = part(config, "quantization") or config
    name = str(nested.get("quant_algo", "")).upper()
    if name != "MIXED_PRECISION":
        return Declared(ALGORITHMS.get(name))
    layers = part(nested, "quantized_layers")
    return Declared(
        exact={bare(path): ALGORITHMS.get(str(part(layers, path).get("quant_algo")).upper()) for path in layers}
    )


def amd_quark(config: Config) -> Declared:
    """AMD Quark: one spec for all layers, and others by name or wildcard."""

    def scheme(own: Any) -> Scheme | None:
        weights, activations = quark(at(own, "weight"), "channel"), quark(at(own, "input_tensors"), "token")
        return Scheme(weights, activations) if weights and UNKNOWN not in (weights, activations) else None

    exact, patterns = {}, []
    for name, own in part(config, "layer_quant_config").items():
        if not at(own, "weight"):  # what is said of the KV cache
            continue
        if "*" in name:
            patterns.append((re.compile(fnmatch.translate(name)), scheme(own)))
        else:
            exact[bare(name)] = scheme(own)
    linear = part(config, "layer_type_quant_config").get("Linear") or config.get("global_quant_config")
    return Declared(scheme(linear), exact, tuple(patterns))


def torchao(config: Config) -> Declared:
    """torchao's config object as JSON; its FqnToConfig has one for each of some layers."""
    whole = part(part(config, "quant_type"), "default")
    data = part(whole, "_data")
    if whole.get("_type") not in ("FqnToConfig", "ModuleFqnToConfig"):
        return Declared(torchao_scheme(whole))
    named = part(data, "fqn_to_config") or part(data, "module_fqn_to_config")
    schemes = {name: torchao_scheme(own) for name, own in named.items() if isinstance(own, Mapping)}
    exact = {bare(name.removesuffix(".weight")): own for name, own in schemes.items() if not name.startswith("re:")}
    default = exact.pop("_default", None)
    patterns = [(expression(name[3:]), own) for name, own in schemes.items() if name.startswith("re:")]
    return Declared(default, exact, tuple((pattern, own) for pattern, own in patterns if pattern))


def torchao_scheme(config: Config) -> Scheme | None:
    """One config object of torchao; None for a class, or for a granularity, that is not known here."""
    data = part(config, "_data")
    group = data.get("group_size")
    int8, fp8_weights = grained("int8", data.get("granularity")), grained("fp8", data.get("granularity"))
    intx = str(part(data, "weight_dtype").get("_data"))
    few = grained(intx, data.get("granularity") or data.get("weight_granularity")) if intx.startswith("int") else ""
    schemes: dict[str, tuple[str, str]] = {
        "Int4WeightOnlyConfig": (with_group_size("int4", group or 128), ""),
        "Int8WeightOnlyConfig": (with_group_size("int8", group) if group else int8, ""),
        "IntxWeightOnlyConfig": (few, ""),
        "Int8DynamicActivationInt8WeightConfig": (int8, "int8 token"),
        "Int8DynamicActivationInt4WeightConfig": (with_group_size("int4", group or 32), "int8 token"),
        "Int8DynamicActivationIntxWeightConfig": (few, "int8 token"),
        "Float8WeightOnlyConfig": (fp8_weights, ""),
        "Float8DynamicActivationInt4WeightConfig": ("int4 g128", "fp8 token"),
        "Float8DynamicActivationFloat8WeightConfig": (
            (fp8_weights, fp8_weights.replace("channel", "token"))
            if data.get("granularity")
            else ("fp8 tensor", "fp8 tensor")
        ),
    }
    weights, activations = schemes.get(str(config.get("_type")), ("", ""))
    return Scheme(weights, activations) if weights else None


def grained(name: str, found: Any) -> str:
    """A number format with torchao's granularity, the same for activations and weights; a row if none is said."""
    grain = found[0] if isinstance(found, list) and found and all(each == found[0] for each in found) else found
    size = part(grain, "_data").get("group_size")
    words = {"PerRow": "channel", "PerTensor": "tensor", "PerGroup": f"g{size}" if size else ""}
    scale = "channel" if found is None else words.get(str(at(grain, "_type")), "")
    return f"{name} {scale}" if scale else ""


def fp_quant(config: Config) -> Declared:
    """FP-Quant: weights and activations in the same format, after a Hadamard rotation."""
    found = {"mxfp4": "mxfp4 g32", "nvfp4": "nvfp4 g16"}.get(str(config.get("forward_dtype", "mxfp4")))
    return Declared(Scheme(found, found) if found else None)


READERS: dict[str, Callable[[Config], Declared]] = {
    "compressed-tensors": compressed,
    "gptq": integers,
    "gptqmodel": integers,
    "awq": integers,
    "auto-round": auto_round,
    "inc": auto_round,
    "fp8": fp8,
    "deepseek_v4_fp8": fp8,
    "fbgemm_fp8": lambda _: Declared(Scheme("fp8 channel", "fp8 token")),
    "mxfp8": lambda _: Declared(Scheme(MX, MX)),
    "mxfp4": lambda _: Declared(Scheme("mxfp4 g32")),
    "w4afp8": w4afp8,
    "bitsandbytes": bitsandbytes,
    "modelopt": modelopt,
    "quark": amd_quark,
    "torchao": torchao,
    "fp_quant": fp_quant,
}
"""``quant_method`` -> its reader."""
