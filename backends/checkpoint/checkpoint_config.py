"""Read a checkpoint's config.json: vocabulary, context, rope, quantization, KV cache, sizes of
layers.

Only ``CheckpointConfig`` reads nested configs (multimodal models) and the three places of a
quantization config.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base import ServingFacts
from ..common.errors import InputError
from ..common.json_files import exists, is_file, read_object
from ..common.message_text import printable, shortened
from ..hub_files import INDEX, SINGLE
from ..layers.schemes import objects_in, part
from .safetensors_files import ADAPTER

QUANTIZATION = ("quantization_config", "compression_config")
"""Keys of the quantization config; early versions of compressed-tensors have the second one."""
LEGACY_FILE = "hf_quant_config.json"
"""File of the quantization config in NVIDIA ModelOpt up to 0.29; config.json lacks it or has only
MIXED_PRECISION."""
OTHER_CACHES = (
    "kv_lora_rank",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "linear_num_value_heads",
    "attn_layer_period",
)
"""Keys of configs whose layers cache something else: DeepSeek's, Mamba's, Qwen3-Next's, Jamba's."""
UNEQUAL_CACHES = ("global_head_dim", "num_global_key_value_heads")
"""Keys of configs whose attention layers have caches of different sizes (Gemma 4's)."""
ELSEWHERE = {"transformers_weights": (SINGLE, INDEX), "text_model_id": (), "audio_model_id": ()}
"""Keys that name weights in another file, or (Ultravox) outside the folder -> harmless values."""
TEXT_KEYS = ("text_config", "llm_config", "language_config")
"""Keys of the language model's part in multimodal configs: most, InternVL's, DeepSeek-VL2's.
Qwen-Omni's is in the text_config of its thinker_config."""
FEATURE_PAIRS = (
    ("num_attention_heads", "head_dim"),
    ("num_key_value_heads", "head_dim"),
    ("num_attention_heads", "v_head_dim"),
    ("num_attention_heads", "global_head_dim"),
    ("num_key_value_heads", "global_head_dim"),
    ("num_global_key_value_heads", "global_head_dim"),
    ("n_shared_experts", "moe_intermediate_size"),
)
"""Pairs of config keys whose product is a number of features."""
ROPE = "rope"
"""The key of the rope scaling in a row's provenance."""
SIZES = {
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), 10**8),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 10**6),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2_000),
    **dict.fromkeys(("num_attention_heads", "n_head"), 10**5),
}
"""Keys of sizes that every model needs -> the largest value; with more layers, building a model
takes minutes."""
COUNTS = {
    **dict.fromkeys(
        ("num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts"),
        10**5,
    ),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner"), 10**7),
}
"""Keys of sizes that may be 0 or null, or a list with one for each layer -> the largest value."""
MOST_NAMED = 6
"""Largest number of models that the error about their folder names."""
BY_CONTEXT = ("longrope", "su")
"""Scalings that have different factors for contexts above the original one."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The configs of a Hugging Face folder.

    ``raw``: config.json; ``legacy_quantization``: ``hf_quant_config.json``, if config.json has no
    quantization, or a mixed one without its schemes.
    """

    raw: dict[str, Any]
    legacy_quantization: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> CheckpointConfig:
        """The config of a folder; InputError if a file is missing or is not a JSON object."""
        file = folder / "config.json"
        if not exists(file):
            if is_file(folder):
                raise InputError(
                    f"{printable(folder)}: is a file; name the folder that holds config.json and weights"
                )
            hint = "; model_dir must be a Hugging Face model folder"
            inside = models_inside(folder)
            if exists(folder / ADAPTER):
                hint = "; it holds a LoRA adapter: merge that into its model, and name the merged folder"
            elif inside:
                hint = f"; the folder has models in it, name one of them: {', '.join(inside)}"
            raise InputError(f"{printable(file)}: missing{hint}")
        config = cls(read_object(file, strict=False))
        if fault := wrong_size(config.text, strict=True):
            raise InputError(f"{printable(file)}: {fault}")
        for key, usual in ELSEWHERE.items():
            if isinstance(named := config.text.get(key), str) and named not in usual:
                raise InputError(
                    f"{printable(file)}: {key}: {printable(named)}: not every engine loads the weights from there, or "
                    f"the same ones later; save them into the folder as {SINGLE}, and leave the key out"
                )
        stated, legacy = config.quantization, folder / LEGACY_FILE
        mixed = stated.get("quant_algo") == "MIXED_PRECISION" and not stated.get("quantized_layers")
        if (mixed or not stated) and exists(legacy):
            return cls(
                config.raw, {"quant_method": "modelopt", **read_object(legacy, strict=False)}
            )
        return config

    @cached_property
    def text(self) -> dict[str, Any]:
        """The language model's keys; a nested key replaces an outer key of the same name."""
        parts = [*map(self.raw.get, TEXT_KEYS), part(self.raw, "thinker_config").get("text_config")]
        return {**self.raw, **next((part for part in parts if isinstance(part, dict)), {})}

    @property
    def vocab_size(self) -> int | None:
        """Rows of the head; None if not stated."""
        return self._integer("vocab_size", "padded_vocab_size")

    @property
    def hidden_size(self) -> int | None:
        """Columns of the head; None if not stated."""
        return self._integer("hidden_size", "n_embd", "d_model")

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
        """The number of positions that the config states, without its rope scaling; None if not
        stated.
        """
        return self._integer("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

    @property
    def context(self) -> int | None:
        """Tokens of the longest sequence, with rope scaling; None if not stated.

        Configs with llama3 or longrope scaling, and Gemma 3's, state the scaled length; configs
        with yarn state either length.
        """
        length, kind = self.stated_context, scaling_type(self.rope_scaling)
        factor: Any = self.rope_scaling.get("factor")
        if length is None or type(factor) not in (int, float) or not 0 < factor < 1e9:
            return length
        if kind == "yarn":
            original = self.rope_scaling.get("original_max_position_embeddings")
            return max(length, int(original * factor)) if type(original) is int else length
        states_scaled_length = str(self.text.get("model_type")).startswith("gemma3")
        return (
            int(length * factor)
            if kind in ("linear", "dynamic") and not states_scaled_length
            else length
        )

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """The rope scaling; empty if there is none."""
        rope = self.text.get("rope_scaling") or self.text.get("rope_parameters")
        return rope if isinstance(rope, dict) else {}

    @property
    def foreign_code(self) -> str | None:
        """Code in another repository that the config names, ``owner/name--module.Class``; None if
        it names none.

        Loading fetches its current version, which may change.
        """
        stated = part(self.raw, "auto_map").values()
        named = [name for each in stated for name in (each if isinstance(each, list) else [each])]
        return next((str(name) for name in named if "--" in str(name)), None)

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """The quantization config; empty if the checkpoint is not quantized.

        DeepSeek-V4 states the format of its experts outside, in ``expert_dtype`` ("fp4" by default,
        as in vLLM), which is added here.
        """
        stated = [config.get(key) for key in QUANTIZATION for config in (self.text, self.raw)]
        for found in (self.legacy_quantization, *stated):
            if isinstance(found, dict) and found:
                outside = str(self.text.get("model_type")).startswith("deepseek_v4")
                return (
                    {"expert_dtype": self.text.get("expert_dtype", "fp4"), **found}
                    if outside
                    else found
                )
        return {}

    @property
    def kv_numbers(self) -> int | None:
        """Numbers in the KV cache for one token, by the usual keys of attention.

        None if a key is missing, or if layers have latent attention, or a state instead of keys and
        values.
        """
        hidden, heads = self.hidden_size, self._integer("num_attention_heads")
        if any(map(self.text.get, OTHER_CACHES)) or not (self.hidden_layers and hidden and heads):
            return None
        size = self._integer("head_dim") or hidden // heads
        return 2 * self.hidden_layers * (self._integer("num_key_value_heads") or heads) * size

    @property
    def serving(self) -> ServingFacts:
        """Sizes that decide how much memory serving takes; ``layer_types`` has the layers with a
        sliding window.
        """
        types, layers = self.text.get("layer_types"), self.hidden_layers or 1
        numbers = 0 if any(map(self.text.get, UNEQUAL_CACHES)) else (self.kv_numbers or 0) // layers
        windows = {
            "full_attention": None,
            "sliding_attention": self._integer("sliding_window"),
            "chunked_attention": self._integer("attention_chunk_size"),
        }
        counts = Counter[int | None]({None: layers})
        if isinstance(types, list):
            counts = Counter(windows[kind] for kind in map(str, types[:layers]) if kind in windows)
        slides = (
            self._integer("sliding_window") and self.text.get("use_sliding_window") is not False
        )
        return ServingFacts(
            self.vocab_size,
            tuple((numbers * count, window) for window, count in counts.items() if numbers),
            kv_layers=sum(counts.values()) if numbers else 0,
            kv_is_upper=bool(slides) and not isinstance(types, list),
            step_numbers=self._step_numbers,
        )

    @property
    def _step_numbers(self) -> int | None:
        """``step_numbers`` of this model."""
        dense = self._integer("intermediate_size") or 0
        expert = self._integer("moe_intermediate_size") or dense
        shared = self._integer("shared_expert_intermediate_size") or expert * (
            self._integer("n_shared_experts") or 0
        )
        return step_numbers(
            self.hidden_size, dense, self._integer("num_experts_per_tok"), expert, shared
        )

    @property
    def quant_method(self) -> str:
        """The method of the quantization config; "" if not stated."""
        return str(self.quantization.get("quant_method") or "")

    @property
    def bits(self) -> int | None:
        """Bits of a GPTQ or AWQ weight; None if layers may differ (GPTQModel, auto-round)."""
        bits = self.quantization.get("bits", self.quantization.get("w_bit"))
        differ = any(
            "bits" in changes for changes in objects_in(self.quantization.get("extra_config"))
        )
        return (
            bits
            if isinstance(bits, int) and not differ and not self.quantization.get("dynamic")
            else None
        )

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of FP8 blocks that share a scale; None if the config states no block
        size, or several.
        """
        groups = objects_in(self.quantization.get("config_groups"))
        stated = [part(group, "weights").get("block_structure") for group in groups]
        sizes = {
            (size[0], size[1])
            for size in (self.quantization.get("weight_block_size"), *stated)
            if isinstance(size, list)
            and [type(length) for length in size] == [int, int]
            and min(size) > 0
        }
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def sizes(self) -> dict[str, frozenset[int]]:
        """Numbers of features that the head ("head") and linear layers ("layer") can have, for
        formats that pad them.

        Layers: by the keys of attention, MLA, delta nets and experts.
        """
        known = Counter(
            {key: value for key, value in self.text.items() if isinstance(value, int)}
        )  # 0 if not stated
        heads = known["num_attention_heads"]
        own_heads = {
            "num_key_value_heads": heads,
            "head_dim": known["hidden_size"] // max(heads, 1),
        }
        known = Counter({**own_heads, **known})
        layers = {
            known[key]
            for key in known
            if key.endswith(("hidden_size", "intermediate_size", "lora_rank"))
        }
        layers |= {known[count] * known[size] for count, size in FEATURE_PAIRS}
        keys = known["linear_num_key_heads"] * known["linear_key_head_dim"]
        values = known["linear_num_value_heads"] * known["linear_value_head_dim"]
        # Queries with a gate; out_proj, in_proj_qkv, in_proj_qkvz.
        layers |= {2 * heads * known["head_dim"], values, 2 * keys + values, 2 * (keys + values)}
        if nope := known["qk_nope_head_dim"]:
            rope, value = known["qk_rope_head_dim"], known["v_head_dim"]
            layers |= {known["kv_lora_rank"] + rope, heads * (nope + rope), heads * (nope + value)}
        head = {self._integer("hidden_size") or 0, self._integer("vocab_size") or 0}
        return {"layer": frozenset(layers - {0}), "head": frozenset(head - {0})}

    def _integer(self, *keys: str) -> int | None:
        """The value of the first key that has a positive integer."""
        values = map(self.text.get, keys)
        return next(
            (value for value in values if type(value) is int and value > 0), None
        )  # True is an int in Python


def models_inside(folder: Path) -> list[str]:
    """Return the paths of models in a folder, at most ``MOST_NAMED``."""
    found = []
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.suffix == ".gguf" or exists(path / "config.json"):
                found.append(printable(path))
    if len(found) > MOST_NAMED:
        return [*found[:MOST_NAMED], f"{len(found) - MOST_NAMED} more"]
    return found


def wrong_size(config: Any, *, strict: bool = False) -> str:
    """The first key of a size that no model can have, at any depth, and its bounds; empty if there
    is none.

    Without ``strict``, as for parts of other modalities, only numbers that are too large are wrong.
    """
    if isinstance(config, list):
        return next(filter(None, map(wrong_size, config)), "")
    for key, value in config.items() if isinstance(config, dict) else ():
        most: float = SIZES.get(key) or COUNTS.get(key) or math.inf
        least = int(key in SIZES)
        for each in (
            value if isinstance(value, list) and key in COUNTS else [value] * (value is not None)
        ):
            is_large = type(each) in (int, float) and each > most
            if is_large or (
                strict and most < math.inf and not (type(each) is int and each >= least)
            ):
                given = shortened(printable(json.dumps(each)), 40)
                return f"{key}: must be a whole number from {least} to {most:,} (got {given})"
        if found := wrong_size(value) if key not in QUANTIZATION else "":
            return f"{key}.{found}"
    return ""


def has_longrope(found: Any) -> bool:
    """True if a part of a config has longrope scaling ("su" in older ones), whose factors depend on
    the context.
    """
    if isinstance(found, dict):
        return any(found.get(key) in BY_CONTEXT for key in ("rope_type", "type")) or has_longrope(
            [*found.values()]
        )
    return isinstance(found, list) and any(map(has_longrope, found))


def rope(config: CheckpointConfig, context: int) -> dict[str, Any]:
    """The rope scaling of a config, in JSON types; empty if there is none.

    ``context``: the engine's number of tokens, which decides its rotary factors.
    """
    stated = (
        config.rope_scaling,
        *objects_in(config.rope_scaling),
    )  # one for all layers, or one for each kind
    scaling = next(filter(scaling_type, stated), None)
    if scaling is None:
        return {}
    key = "original_max_position_embeddings"
    original = scaling.get(key, config.text.get(key))
    if original is None and scaling_type(scaling) in ("yarn", "dynamic"):
        original = config.stated_context
    return scaling_json(scaling_type(scaling), scaling.get("factor"), original, context)


def scaling_type(scaling: Mapping[str, Any]) -> str:
    """The name of a rope scaling; empty if it scales nothing."""
    name = str(scaling.get("rope_type", scaling.get("type", "")))
    return "" if name in ("default", "none", "") else name


def scaling_json(name: str, factor: Any, original: Any, context: int) -> dict[str, Any]:
    """``type``, ``factor``, ``original_context`` and, if factors depend on it, ``context``, as far
    as known.
    """
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


def unpadded(size: int, multiple: int, sizes: frozenset[int], otherwise: int = 0) -> int:
    """The only one of ``sizes`` that pads to ``size``; 0 if several sizes do, ``otherwise`` if no
    size does.
    """
    found = [known for known in sizes if -(-known // multiple) * multiple == size]
    return found[0] if len(found) == 1 else 0 if found else otherwise


def step_numbers(
    hidden: int | None, dense: int, chosen: int | None, expert: int, shared: int
) -> int | None:
    """Return how many numbers of a token a decoder layer holds while its MLP computes; None if a
    size is missing.

    Of the size ``hidden``: the embedding, the layer's input, the residual and its normalized copy.
    Of the MLP's size: gate, up and their product.  The MLP's size is ``dense``, or the size of a
    mixture if that is larger: ``chosen`` experts of size ``expert``, and ``shared``, the size of
    the experts that compute every token.  ``LlamaModel`` and ``LlamaMLP`` of Transformers compute
    like this; their measured peak in 2,048 tokens is within 2 % of it.
    """
    wide = max(dense, chosen * expert + shared if chosen else 0)
    return 4 * hidden + 3 * wide if hidden and wide else None
