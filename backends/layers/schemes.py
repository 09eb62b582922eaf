"""What a checkpoint's own quantization config asks for, in words that the results of every engine share.

Weights and activations are each described by a number format and by how finely it is scaled: ``int4 g128``, ``int8
channel``, ``fp8 token``, ``fp8 block 128x128``, ``nvfp4 g16``, ``nf4 g64``.  No engine, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Scheme:
    """Weights and activations of a quantized layer; ``activations`` is "" where they keep the model's dtype."""

    weights: str
    activations: str = ""


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


def objects_in(found: Any) -> list[Mapping[str, Any]]:
    """The objects among an object's values; none of anything else."""
    return [each for each in found.values() if isinstance(each, Mapping)] if isinstance(found, Mapping) else []


def compressed_tensors(weights: Any, input_activations: Any) -> Scheme:
    """A config group of compressed-tensors."""
    return Scheme(args_text(weights), args_text(input_activations))


def declared_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The one scheme of a ``quantization_config``; None if it has several, or its method is not known here."""
    method = str(config.get("quant_method", "")).lower().removesuffix("_marlin")  # older AutoGPTQ and AutoAWQ
    bits = config.get("bits", config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size"))
    if method == "compressed-tensors":
        wanted = ("weights", "input_activations")
        groups = [[entry.get(key) for key in wanted] for entry in objects_in(config.get("config_groups"))]
        if not all(isinstance(args, Mapping) or not args for pair in groups for args in pair):
            return None
        schemes = {compressed_tensors(*pair) for pair in groups}
        return schemes.pop() if len(schemes) == 1 else None
    if method in ("gptq", "gptqmodel", "awq") and isinstance(bits, int):
        return Scheme(with_group_size(f"{'uint' if method == 'awq' else 'int'}{bits}", group))
    if method == "fp8":
        if block := config.get("weight_block_size"):
            return Scheme(f"fp8 block {sizes_text(block)}", f"fp8 g{block[-1]}") if sizes_text(block) else None
        return Scheme("fp8 tensor", "fp8 tensor" if config.get("activation_scheme") == "static" else "fp8")
    if method == "bitsandbytes":
        if config.get("load_in_4bit"):
            return Scheme(f"{config.get('bnb_4bit_quant_type', 'fp4')} g64")
        return Scheme("int8 channel", "int8 token")
    if method.startswith("modelopt"):  # vLLM writes modelopt_fp4 into the config of older checkpoints
        return modelopt(config)
    return Scheme("mxfp4 g32") if method == "mxfp4" else None


def modelopt(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config of NVIDIA ModelOpt, which names its scheme; None for an unknown name."""
    nested = config.get("quantization")
    name = str((nested if isinstance(nested, Mapping) else config).get("quant_algo", "")).upper()
    return {
        "NVFP4": Scheme("nvfp4 g16", "nvfp4 g16"),
        "NVFP4_AWQ": Scheme("nvfp4 g16", "nvfp4 g16"),
        "W4A16_NVFP4": Scheme("nvfp4 g16"),
        "FP8": Scheme("fp8 tensor", "fp8 tensor"),
        "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8 channel", "fp8 token"),
    }.get(name)
