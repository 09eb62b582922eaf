"""Read a checkpoint's config.json: vocabulary, context, rope, quantization, KV cache, sizes of layers.

Multimodal configs nest the language model's part, and checkpoints keep their quantization in one of three places.
``CheckpointConfig`` is the only reader, so that all parts of the program find the same values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from compare_q.backends.checkpoint.files import INDEX, SINGLE
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, read_object
from compare_q.backends.common.messages import printable
from compare_q.backends.layers import schemes
from compare_q.backends.layers.schemes import objects_in, part

QUANTIZATION = "quantization_config"
OLD_QUANTIZATION = "compression_config"
"""Its name in early versions of compressed-tensors."""
LEGACY_FILE = "hf_quant_config.json"
"""File of the quantization in NVIDIA ModelOpt up to 0.29, whose config.json has none, or only MIXED_PRECISION."""
OTHER_CACHES = (
    "kv_lora_rank", "mamba_d_state", "ssm_state_size", "state_size", "linear_num_value_heads", "attn_layer_period",
)  # fmt: skip
"""Keys of configs whose layers cache something else: DeepSeek's, Mamba's, Qwen3-Next's, Jamba's."""
ELSEWHERE = {"transformers_weights": (SINGLE, INDEX), "text_model_id": (), "audio_model_id": ()}
"""Keys that name weights in another file, or (Ultravox) outside the folder -> harmless values."""
TEXT_KEYS = ("text_config", "llm_config", "language_config")
"""Keys of the language model's part in multimodal configs: most, InternVL's, DeepSeek-VL2's.  Qwen-Omni's is in the
text_config of its thinker_config."""
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
FEATURE_PAIRS = (
    ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim"), ("num_attention_heads", "v_head_dim"),
    ("num_attention_heads", "global_head_dim"), ("num_key_value_heads", "global_head_dim"),
    ("num_global_key_value_heads", "global_head_dim"), ("n_shared_experts", "moe_intermediate_size"),
)  # fmt: skip
"""Pairs of config keys whose product is a number of features."""
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
ROPE = "rope"
"""The key of the rope scaling in a row's provenance."""
BY_CONTEXT = ("longrope", "su")
"""Scalings with other factors for contexts above the original one."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The configs of a Hugging Face folder.

    ``raw``: config.json; ``legacy_quantization``: ``hf_quant_config.json``, if config.json has no quantization, or a
    mixed one without its schemes.
    """

    raw: dict[str, Any]
    legacy_quantization: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> CheckpointConfig:
        """The config of a folder; InputError if a file is missing or is not a JSON object."""
        file = folder / "config.json"
        if not exists(file):
            raise InputError(f"{printable(file)}: missing; model_dir must be a Hugging Face model folder")
        config = cls(read_object(file, strict=False))
        for key, usual in ELSEWHERE.items():
            if isinstance(named := config.text.get(key), str) and named not in usual:
                raise InputError(
                    f"{printable(file)}: {key}: {printable(named)}: not every engine loads the weights from there, or "
                    f"the same ones later; save them into the folder as {SINGLE}, and leave the key out"
                )
        legacy = folder / LEGACY_FILE
        stated = config.quantization
        mixed = stated.get("quant_algo") == "MIXED_PRECISION" and not stated.get("quantized_layers")
        if (stated and not mixed) or not exists(legacy):
            return config
        return cls(config.raw, {"quant_method": "modelopt", **read_object(legacy, strict=False)})

    @cached_property
    def text(self) -> dict[str, Any]:
        """The language model's keys; a nested key replaces an outer key of the same name."""
        thinker = self.raw.get("thinker_config")
        parts = [self.raw.get(key) for key in TEXT_KEYS]
        parts += [thinker.get("text_config")] if isinstance(thinker, dict) else []
        return {**self.raw, **next((part for part in parts if isinstance(part, dict)), {})}

    @property
    def vocab_size(self) -> int | None:
        """Rows of the head; None if not stated."""
        return self._integer("vocab_size") or self._integer("padded_vocab_size")

    @property
    def hidden_size(self) -> int | None:
        """Columns of the head; None if not stated."""
        return next((size for key in WIDTH_KEYS if (size := self._integer(key))), None)

    @property
    def dtype(self) -> str | None:
        """The dtype of unquantized weights; None if not stated."""
        stated = self.text.get("dtype", self.text.get("torch_dtype"))
        return stated if isinstance(stated, str) else None

    @property
    def hidden_layers(self) -> int | None:
        """Number of decoder layers of the language model; None if not stated."""
        return self._integer("num_hidden_layers")

    @property
    def stated_context(self) -> int | None:
        """The number of positions that the config states, without its rope scaling; None if not stated."""
        return next((length for key in LENGTH_KEYS if (length := self._integer(key))), None)

    @property
    def context(self) -> int | None:
        """Tokens of the longest sequence, with rope scaling; None if not stated.

        Configs with llama3 or longrope scaling, and Gemma 3's, state the scaled length; configs with yarn either one.
        """
        length, factor = self.stated_context, self.rope_scaling.get("factor")
        if length is None or isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1e9:
            return length
        if self.rope_type == "yarn":
            original = self.rope_scaling.get("original_max_position_embeddings")
            return extended_by_yarn(length, factor, original if type(original) is int else None)
        states_scaled_length = str(self.text.get("model_type")).startswith("gemma3")
        if self.rope_type in ("linear", "dynamic") and not states_scaled_length:
            return int(length * factor)
        return length

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """The rope scaling; empty if there is none."""
        rope = self.text.get("rope_scaling") or self.text.get("rope_parameters")
        return rope if isinstance(rope, dict) else {}

    @property
    def rope_type(self) -> str | None:
        """The name of the rope scaling: "yarn", "llama3", "longrope", ...; None if there is none."""
        name = self.rope_scaling.get("rope_type", self.rope_scaling.get("type"))
        return name if isinstance(name, str) else None

    @property
    def foreign_code(self) -> str | None:
        """Code in another repository that the config names, ``owner/name--module.Class``; None if there is none.

        Loading fetches its current version, which may change.
        """
        named = self.raw.get("auto_map")
        every = itertools.chain.from_iterable(
            each if isinstance(each, list) else [each] for each in (named.values() if isinstance(named, dict) else [])
        )
        return next((str(each) for each in every if "--" in str(each)), None)

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """The quantization config; empty if the checkpoint is not quantized.

        DeepSeek-V4 states the format of its experts outside, in ``expert_dtype`` ("fp4" by default, as in vLLM), which
        is added here.
        """
        stated = [config.get(key) for key in (QUANTIZATION, OLD_QUANTIZATION) for config in (self.text, self.raw)]
        for found in (self.legacy_quantization, *stated):
            if isinstance(found, dict) and found:
                outside = str(self.text.get("model_type")).startswith("deepseek_v4")
                return {"expert_dtype": self.text.get("expert_dtype", "fp4"), **found} if outside else found
        return {}

    @property
    def kv_cache(self) -> str:
        """The format of the KV cache in the words of ``backends/layers/schemes.py``; "" for the model's dtype."""
        return schemes.kv_cache(self.quantization)

    @property
    def kv_numbers(self) -> int | None:
        """Numbers in the KV cache for one token, by the usual keys of attention.

        None if a key is missing, or if layers have latent attention or a state instead.
        """
        hidden, attention_heads = self.hidden_size, self._integer("num_attention_heads")
        if any(map(self.text.get, OTHER_CACHES)) or not (self.hidden_layers and hidden and attention_heads):
            return None
        heads = self._integer("num_key_value_heads") or attention_heads
        return 2 * self.hidden_layers * heads * (self._integer("head_dim") or hidden // attention_heads)

    @property
    def quant_method(self) -> str:
        """The method of the quantization config; "" if not stated."""
        return str(self.quantization.get("quant_method") or "")

    @property
    def bits(self) -> int | None:
        """Bits of a GPTQ or AWQ weight; None if layers may differ (GPTQModel, auto-round)."""
        quantization = self.quantization
        bits = quantization.get("bits", quantization.get("w_bit"))
        own = objects_in(quantization.get("extra_config"))
        differ = quantization.get("dynamic") or any("bits" in changes for changes in own)
        return bits if isinstance(bits, int) and not differ else None

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of FP8 blocks that share a scale; None if the config has none, or several sizes."""
        groups = [part(group, "weights") for group in objects_in(self.quantization.get("config_groups"))]
        stated = [self.quantization.get("weight_block_size"), *(weights.get("block_structure") for weights in groups)]
        pairs = [size for size in stated if isinstance(size, list | tuple) and len(size) == 2]
        sizes = {(size[0], size[1]) for size in pairs if all(type(length) is int and length > 0 for length in size)}
        return next(iter(sizes)) if len(sizes) == 1 else None

    @cached_property
    def head_sizes(self) -> frozenset[int]:
        """Numbers of features that the head can have, for formats that pad them."""
        return frozenset(size for size in map(self._integer, ("hidden_size", "vocab_size")) if size)

    @cached_property
    def layer_sizes(self) -> frozenset[int]:
        """Numbers of features that linear layers can have, by the keys of attention, MLA, delta nets and experts."""
        known = {key: value for key, value in self.text.items() if isinstance(value, int)}

        def times(count: str, size: str) -> int:
            return known.get(count, 0) * known.get(size, 0)

        heads = known.get("num_attention_heads", 0)
        known = {"num_key_value_heads": heads, "head_dim": known.get("hidden_size", 0) // max(heads, 1), **known}
        sizes = {
            value for key, value in known.items() if key.endswith(("hidden_size", "intermediate_size", "lora_rank"))
        }
        sizes |= {times(*pair) for pair in FEATURE_PAIRS}
        sizes |= {2 * times("num_attention_heads", "head_dim")}  # queries with a gate
        keys = times("linear_num_key_heads", "linear_key_head_dim")
        values = times("linear_num_value_heads", "linear_value_head_dim")
        sizes |= {values, 2 * keys + values, 2 * (keys + values)}  # out_proj, in_proj_qkv, in_proj_qkvz
        if nope := known.get("qk_nope_head_dim", 0):
            rope, value = known.get("qk_rope_head_dim", 0), known.get("v_head_dim", 0)
            sizes |= {known.get("kv_lora_rank", 0) + rope, heads * (nope + rope), heads * (nope + value)}
        return frozenset(sizes - {0})

    def _integer(self, key: str) -> int | None:
        value = self.text.get(key)
        return value if type(value) is int and value > 0 else None  # True is an int in Python


def has_longrope(found: Any) -> bool:
    """True if a part of a config has longrope scaling ("su" in older ones), whose factors depend on the context."""
    parts = list(found.values() if isinstance(found, dict) else found if isinstance(found, list) else ())
    stated = [found.get("rope_type"), found.get("type")] if isinstance(found, dict) else []
    return any(each in BY_CONTEXT for each in stated) or any(map(has_longrope, parts))


def rope(config: CheckpointConfig, context: int) -> dict[str, Any]:
    """The rope scaling of a config, in JSON types; empty if there is none.

    ``context``: number of tokens by which the engine chooses rotary factors.
    """
    stated = [each for each in (config.rope_scaling, *objects_in(config.rope_scaling)) if scaling_type(each)]
    if not stated:  # one for all layers, or one for each kind of layers
        return {}
    scaling, text = stated[0], config.text
    original = scaling.get("original_max_position_embeddings", text.get("original_max_position_embeddings"))
    if original is None and scaling_type(scaling) in ("yarn", "dynamic"):
        original = config.stated_context
    return scaling_json(scaling_type(scaling), scaling.get("factor"), original, context)


def scaling_type(scaling: Mapping[str, Any]) -> str:
    """The name of a rope scaling; empty if it scales nothing."""
    name = str(scaling.get("rope_type", scaling.get("type", "")))
    return "" if name in ("default", "none", "") else name


def scaling_json(name: str, factor: Any, original: Any, context: int) -> dict[str, Any]:
    """``type``, ``factor``, ``original_context`` and, if factors depend on it, ``context``, as far as known."""
    found = {
        "type": name,
        "factor": factor if isinstance(factor, int | float) else None,
        "original_context": original if isinstance(original, int) else None,
        "context": context if name in BY_CONTEXT else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def beyond(scaling: dict[str, Any], tokens: int) -> str:
    """A note on a scaling in windows of ``tokens`` tokens; empty if it has no effect."""
    original, context = scaling.get("original_context"), scaling.get("context", 0)
    if original is None or max(tokens, context) <= original:
        return ""
    factor = f", factor {scaling['factor']:g}" if "factor" in scaling else ""
    name = f"{scaling['type']}{factor}"
    if context and tokens <= original:
        return f"positions by {name} as in a context of {context:,} tokens; the original context is {original:,}"
    return f"windows of {tokens:,} tokens reach beyond the original context of {original:,} (positions by {name})"


def extended_by_yarn(length: int, factor: float, original: int | None) -> int:
    """Tokens of the longest sequence under yarn; ``length`` may already be the extended ``original``."""
    return max(length, int(original * factor)) if original else length


def unpadded(size: int, multiple: int, sizes: frozenset[int], otherwise: int = 0) -> int:
    """The only one of ``sizes`` that pads to ``size``; 0 if several sizes do, ``otherwise`` if no size does."""
    found = [known for known in sizes if -(-known // multiple) * multiple == size]
    return found[0] if len(found) == 1 else 0 if found else otherwise
