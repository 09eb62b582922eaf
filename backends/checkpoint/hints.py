"""What a config says of stored weights that headers do not: bits, sizes before padding, who wrote the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.checkpoint.config import CheckpointConfig
from backends.layers.schemes import objects_in, part

PAIRS = (
    ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim"), ("num_attention_heads", "v_head_dim"),
    ("num_attention_heads", "global_head_dim"), ("num_key_value_heads", "global_head_dim"),
    ("num_global_key_value_heads", "global_head_dim"), ("n_shared_experts", "moe_intermediate_size"),
)  # fmt: skip
"""Pairs of config keys whose product is a number of features."""


@dataclass(frozen=True)
class ConfigHints:
    """What a config says of stored weights that headers do not.

    ``bits`` of a GPTQ or AWQ weight, None if layers may differ in them; ``layer_sizes`` and ``head_sizes``: the numbers
    of features that linear layers and the head can have, for formats that pad them; ``exl3``: whether exllamav3 wrote
    the files; ``int4_bytes``: whether an int8 weight with scales for parts of its rows is two int4 (W4AFP8), as nothing
    in a header tells; ``block``: rows and columns of the blocks that share a scale; ``gptq_v2``: whether GPTQ's zero
    points are stored as they are, and not less 1.
    """

    bits: int | None
    layer_sizes: frozenset[int]
    head_sizes: frozenset[int]
    exl3: bool
    int4_bytes: bool = False
    block: tuple[int, int] | None = None
    gptq_v2: bool = False


def config_hints(config: CheckpointConfig) -> ConfigHints:
    """The hints in a checkpoint's config."""
    quantization = config.quantization
    bits = quantization.get("bits", quantization.get("w_bit"))
    uniform = isinstance(bits, int) and not has_exceptions(quantization)
    known = {key: value for key, value in config.text.items() if isinstance(value, int)}
    ends = frozenset({known.get("hidden_size", 0), known.get("vocab_size", 0)} - {0})
    method = quantization.get("quant_method")
    sizes = frozenset(_layer_sizes(known))
    return ConfigHints(
        bits if uniform else None, sizes, ends, method == "exl3", method == "w4afp8", block_size(quantization),
        quantization.get("checkpoint_format") == "gptq_v2",
    )  # fmt: skip


def block_size(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size of blocks of FP8 that a config states; None if it states none, or several."""
    groups = [part(group, "weights") for group in objects_in(quantization.get("config_groups"))]
    stated = [quantization.get("weight_block_size"), *(weights.get("block_structure") for weights in groups)]
    pairs = [size for size in stated if isinstance(size, list | tuple) and len(size) == 2]
    sizes = {(size[0], size[1]) for size in pairs if all(type(length) is int and length > 0 for length in size)}
    return next(iter(sizes)) if len(sizes) == 1 else None


def has_exceptions(quantization: Mapping[str, Any]) -> bool:
    """Whether a GPTQ or AWQ config has other bits for some layers, as GPTQModel and auto-round write it."""
    extra = quantization.get("extra_config")
    changes = extra.values() if isinstance(extra, dict) else ()
    return bool(quantization.get("dynamic")) or any(isinstance(own, dict) and "bits" in own for own in changes)


def _layer_sizes(known: dict[str, int]) -> set[int]:
    """Features that linear layers can have, from the usual keys of attention, MLA, delta nets and (shared) experts."""

    def times(count: str, each: str) -> int:
        return known.get(count, 0) * known.get(each, 0)

    heads = known.get("num_attention_heads", 0)
    known = {"num_key_value_heads": heads, "head_dim": known.get("hidden_size", 0) // max(heads, 1), **known}
    sizes = {value for key, value in known.items() if key.endswith(("hidden_size", "intermediate_size", "lora_rank"))}
    sizes |= {times(*pair) for pair in PAIRS} | {2 * times("num_attention_heads", "head_dim")}  # queries with a gate
    keys = times("linear_num_key_heads", "linear_key_head_dim")
    values = times("linear_num_value_heads", "linear_value_head_dim")
    sizes |= {values, 2 * keys + values, 2 * (keys + values)}  # out_proj, in_proj_qkv, in_proj_qkvz
    if nope := known.get("qk_nope_head_dim", 0):
        rope, value = known.get("qk_rope_head_dim", 0), known.get("v_head_dim", 0)
        sizes |= {known.get("kv_lora_rank", 0) + rope, heads * (nope + rope), heads * (nope + value)}
    return sizes - {0}


def unpadded(size: int, multiple: int, sizes: frozenset[int], otherwise: int = 0) -> int:
    """The only one of ``sizes`` that pads to ``size``; 0 if several sizes do, ``otherwise`` if no size does."""
    found = [known for known in sizes if -(-known // multiple) * multiple == size]
    return found[0] if len(found) == 1 else 0 if found else otherwise
