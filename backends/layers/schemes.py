"""The words for what a layer stores and asks for, which the results of every engine share.

Weights and activations are each described by a number format and by how finely it is scaled: ``int4 g128``, ``int8
channel``, ``fp8 token``, ``fp8 block 128x128``, ``nvfp4 g16``, ``nf4 g64``; `` 2:4`` at the end says that two of four
weights are zero and not stored, `` e8m0`` that scales are powers of two where the format does not say so itself.
``backends/layers/methods.py`` reads them from configs.  No engine, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNKNOWN = "unknown"
POWERS_OF_TWO = "e8m0"
"""The last word where scales were rounded up to powers of two."""


@dataclass(frozen=True)
class Scheme:
    """Weights and activations of a quantized layer; ``activations`` is "" where they keep the model's dtype."""

    weights: str
    activations: str = ""


def has_rounded_scales(described: str) -> bool:
    """Whether scales are powers of two in a format that need not have such scales: "fp8 g128 e8m0"."""
    return described.endswith(f" {POWERS_OF_TWO}")


def number_format(described: str) -> str:
    """The number format alone: "fp8" of "fp8 token"."""
    return described.partition(" ")[0]


def with_group_size(name: str, group_size: Any) -> str:
    """``int4 g128``; ``int4 channel`` where the group is a whole row of the weights (-1, 0 or None)."""
    return f"{name} g{group_size}" if isinstance(group_size, int) and group_size > 0 else f"{name} channel"


def args_text(args: Any) -> str:
    """A ``QuantizationArgs`` of compressed-tensors, as an object or as JSON; "" for none."""
    if not args:
        return ""
    found = dict(args) if isinstance(args, Mapping) else args.model_dump(mode="json")
    bits, floating, group = found.get("num_bits", 8), found.get("type") == "float", found.get("group_size")
    strategy = found.get("strategy") or ("group" if isinstance(group, int) and group > 0 else "tensor")
    if floating and bits == 4:
        return with_group_size("nvfp4" if strategy == "tensor_group" else "mxfp4", group)
    name = f"{'fp' if floating else 'int'}{bits}"
    if floating and bits == 8 and group == 32:  # FP8 has no other use of such small groups
        name = "mxfp8"
    if strategy in ("group", "tensor_group"):
        return with_group_size(name, group)
    if strategy == "block":
        return f"{name} block {sizes_text(found.get('block_structure'))}".strip()
    return f"{name} {strategy}"


def sizes_text(sizes: Any) -> str:
    """``128x128``; "" for what is no list."""
    return "x".join(map(str, sizes)) if isinstance(sizes, list | tuple) else ""


def block_scheme(sizes: Any, scale_format: Any = None) -> Scheme | None:
    """FP8 weights in blocks of ``sizes``, and activations in groups as long as a block; None for what are no sizes.

    ``scale_format``: "ue8m0" where the checkpoint (DeepSeek's) asks for scales that are powers of two.
    """
    rounded = f" {POWERS_OF_TWO}" if scale_format == "ue8m0" else ""
    return Scheme(f"fp8 block {sizes_text(sizes)}", f"fp8 g{sizes[-1]}{rounded}") if sizes_text(sizes) else None


def objects_in(found: Any) -> list[Mapping[str, Any]]:
    """The objects among an object's values; none of anything else."""
    return [each for each in found.values() if isinstance(each, Mapping)] if isinstance(found, Mapping) else []


def at(found: Any, key: str) -> Any:
    """What an object has under a key; None if it has nothing there, or ``found`` is no object."""
    return found.get(key) if isinstance(found, Mapping) else None


def part(found: Any, key: str) -> Mapping[str, Any]:
    """The object under a key; empty if there is none."""
    value = at(found, key)
    return value if isinstance(value, Mapping) else {}


def compressed_tensors(weights: Any, input_activations: Any) -> Scheme:
    """A config group of compressed-tensors."""
    return Scheme(args_text(weights), args_text(input_activations))


def quark(spec: Any, line: str) -> str:
    """A tensor's spec of AMD Quark, or the two of a tensor with scales of scales; "" for none, "unknown" for others.

    ``line`` is the word for one scale a row: "channel" of weights, "token" of activations.
    """
    if not spec:
        return ""
    specs = spec if isinstance(spec, list) else [spec]
    if not all(isinstance(each, Mapping) for each in specs):
        return UNKNOWN
    first, kinds = specs[0], [(each.get("dtype"), each.get("qscheme")) for each in specs]
    dtype, group = str(first.get("dtype")), first.get("group_size")
    if len(specs) > 1:
        nvfp4 = kinds == [("fp4", "per_group"), ("fp8_e4m3", "per_tensor")] and group == 16
        return "nvfp4 g16" if nvfp4 else UNKNOWN
    if first.get("qscheme") == "per_group" and first.get("scale_format") == "e8m0":
        return f"mx{dtype.removesuffix('_e4m3')} g{group}"
    if first.get("qscheme") == "per_block" and str(first.get("scale_type")).endswith("e8m0fnu"):
        return f"mx{dtype.removesuffix('_e4m3')} block {sizes_text(first.get('block_size'))}"
    name = {"fp8_e4m3": "fp8", "int8": "int8", "int4": "int4", "uint4": "uint4"}.get(dtype)
    scale = {"per_tensor": "tensor", "per_channel": line, "per_token": "token", "per_group": f"g{group}"}
    found = scale.get(str(first.get("qscheme")))
    return f"{name} {found}" if name and found else UNKNOWN


def kv_cache(config: Mapping[str, Any]) -> str:
    """How a checkpoint asks for its keys and values to be cached: "fp8 tensor", ...; "" in the model's dtype.

    "unknown" for what is stated in words that are not known here.  compressed-tensors and ModelOpt have
    ``kv_cache_scheme``, ModelOpt's hf_quant_config.json ``kv_cache_quant_algo``, and Quark what k_proj puts out.
    """
    stated = config.get("kv_cache_scheme")
    if isinstance(stated, Mapping):
        return args_text(stated)
    patterns = part(config, "export").get("kv_cache_group")
    if isinstance(patterns, list) and patterns:
        layers = part(config, "layer_quant_config")
        specs = [layer["output_tensors"] for layer in objects_in(layers) if layer.get("output_tensors")]
        return quark(specs[0], "token") if specs else UNKNOWN
    algorithm = (part(config, "quantization") or config).get("kv_cache_quant_algo") or stated
    if not algorithm or str(algorithm).upper() == "NONE":
        return ""
    return {"FP8": "fp8 tensor", "NVFP4": "nvfp4 g16", "INT8": "int8 tensor"}.get(str(algorithm).upper(), UNKNOWN)
