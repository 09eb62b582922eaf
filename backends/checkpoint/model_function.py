"""Compare two models' computations, apart from weights.

These are rope, norms, attention, experts, activation and a tied head.

A quantization changes none of these.  If a quantized copy computes differently from its reference,
the KL divergence includes this difference, and is not only the loss of the quantization.  The
values come from config.json or from the header of a GGUF file.

Two configs may describe the same model in different ways: one omits keys that have their default
value, or uses the names of an older Transformers.  The values that the files state are compared
first.  Only if these differ, the caller gets the other values from Transformers' defaults
(``filled``), which requires a process that imports Transformers.

A key of a GGUF header is compared only if llama.cpp's converters write the config's value there
unchanged.  Sizes are not compared: users compare models of different sizes on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..common.message_text import one_line, printable, shortened
from .checkpoint_config import UNEQUAL_CACHES, CheckpointConfig, scaling_type
from .folder import Checkpoint
from .formats import NUMPY_TYPES, main_tensor
from .formats import stored as stored_numbers
from .gguf import LONG_FACTORS, ORIGINAL, GgufModel, is_gguf, read_model
from .safetensors_files import Tensor

Facts = dict[str, Any]
CONFIG_KEY_ALIASES: Mapping[str, tuple[str, ...]] = {
    "rms_norm_eps": ("rms_norm_eps", "norm_eps"),
    "layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon"),
    "hidden_act": ("hidden_activation", "hidden_act", "activation_function"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "sliding_window": ("sliding_window", "sliding_window_size", "attention_window_size"),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_k",
    ),
    "norm_topk_prob": ("norm_topk_prob", "moe_renormalize"),
    "routed_scaling_factor": (
        "routed_scaling_factor",
        "route_scale",
        "moe_router_scaling_factor",
        "router_scaling_factor",
        "moe_routed_scaling_factor",
    ),
    "final_logit_softcapping": (
        "final_logit_softcapping",
        "logits_soft_cap",
        "output_logit_soft_cap",
    ),
}
"""Name of a value -> the config keys that may have it; the first key that is not null counts."""
UNALIASED_KEYS = (
    # attention
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "attention_chunk_size",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "attn_scale",
    "attn_temperature_tuning",
    "floor_scale",
    "use_qk_norm",
    "qk_layernorm",
    "clip_qkv",
    "alibi",
    "multi_query",
    "attention_k_eq_v",
    "num_kv_shared_layers",
    "index_topk",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    # positions
    "no_rope_layers",
    "no_rope_layer_interval",
    "rope_interleave",
    "rotary_dim",
    # residuals and multipliers
    "use_parallel_residual",
    "parallel_attn",
    "residual_multiplier",
    "embedding_multiplier",
    "scale_emb",
    "scale_depth",
    "dim_model_base",
    "lm_head_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "mlp_multipliers",
    "ssm_multipliers",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
    "logit_scale",
    "logits_scaling",
    # experts
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "first_k_dense_replace",
    "moe_layer_freq",
    "decoder_sparse_step",
    "mlp_only_layers",
    "mlp_layer_types",
    "interleave_moe_layer_step",
    "moe_router_logit_softcapping",
    "swiglu_limit",
    "swiglu_alpha",
)
"""Keys of values that have one name in all configs."""
HINTS = (
    "model_type",
    "use_sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "max_window_layers",
)
"""Keys that determine other values if the config does not state those."""
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len")
MODEL_SIZES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
}
"""Sizes in which models of one checkpoint never differ."""
ROPE_BASES = ("rope_theta", "rotary_emb_base", "rope_base")
PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct")
SAME_ACTIVATION = {
    "swish": "silu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_tanh": "gelu_pytorch_tanh",
}
ROPE_DEFAULTS: Mapping[str, Any] = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
"""YaRN's default values, for keys that a config does not state."""
NOT_SCALING = {
    "rope_type",
    "type",
    "rope_theta",
    *PARTIAL,
    "mrope_section",
    "mrope_interleaved",
    "interleaved",
    "finetuned",
}
"""Keys next to the parameters of a rope scaling; sections of ``mrope`` change nothing in text."""
UNSCALED = ("", "mrope")
UNKNOWN_SCALING = "unknown"
"""Type of a rope scaling whose form in a header is uncertain."""
FROM_TENSOR = "rope_freqs"
"""Name of a value that only headers have: a tensor holds factors.

They are from a rope scaling, or have another reason.
"""
HEADER_SCALINGS = ("linear", "yarn", "llama3", "longrope")
ROW_STEP = 64
"""Step between the rows of head and embedding that are compared."""
EQUAL_NUMBERS = 1e-6
"""Largest relative difference between numbers that count as equal; GGUF stores float32."""
MOST_DIFFERENCES = 4
"""Largest number of differences in one line."""
DEFAULT_BASE = 10_000.0
"""llama.cpp's rope base for a header that does not state one."""
HEADER_KEYS: Mapping[str, str] = {
    "{}.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "{}.attention.layer_norm_epsilon": "layer_norm_eps",
    "{}.attn_logit_softcapping": "attn_logit_softcapping",
    "{}.final_logit_softcapping": "final_logit_softcapping",
    "{}.expert_used_count": "num_experts_per_tok",
    "{}.expert_weights_norm": "norm_topk_prob",
    "{}.expert_weights_scale": "routed_scaling_factor",
    "{}.expert_group_count": "n_group",
    "{}.expert_group_used_count": "topk_group",
    "{}.leading_dense_block_count": "first_k_dense_replace",
    "{}.attention.kv_lora_rank": "kv_lora_rank",
    "{}.attention.q_lora_rank": "q_lora_rank",
    "{}.use_parallel_residual": "use_parallel_residual",
    "{}.rope.freq_base_swa": "sliding_attention.rope_theta",
}
"""Key of a GGUF header -> name of the value that the converters write there unchanged.

For every architecture.
"""
FAMILY_KEYS: Mapping[str, Mapping[str, str]] = {
    "command-r": {"{}.logit_scale": "logit_scale"},
    "cohere2": {"{}.logit_scale": "logit_scale"},
    "granite": {
        "{}.logit_scale": "logits_scaling",
        "{}.attention.scale": "attention_multiplier",
        "{}.residual_scale": "residual_multiplier",
        "{}.embedding_scale": "embedding_multiplier",
    },
}
"""Beginning of an architecture's name -> further keys of its headers."""
HEADER_DEFAULTS: Mapping[str, Facts] = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
"""Architecture -> llama.cpp's values for keys that a header does not state."""


# Values of configs.


def of_config(text: Mapping[str, Any], *, hints: bool = True) -> Facts:
    """Return the values that the keys of a language model state; names without a key are absent.

    ``hints``: also the keys that decide about values which are not stated.
    """
    facts = Facts()
    keys_of = {**CONFIG_KEY_ALIASES, **MODEL_SIZES}
    for name, keys in keys_of.items():
        if any(key in text for key in keys):
            facts[name] = first_value(text, keys)
    for key in UNALIASED_KEYS:
        if key in text:
            facts[key] = text[key]
    activation = facts.get("hidden_act")
    if isinstance(activation, str):
        facts["hidden_act"] = SAME_ACTIVATION.get(activation, activation)
    context = None
    for key in CONTEXTS:
        if is_number(text.get(key)):
            context = text[key]
            break
    if "sliding_window" in facts and not slides(facts["sliding_window"], context, text):
        facts["sliding_window"] = None
    facts |= of_rope(text, context)
    if hints:
        for key in HINTS:
            if key in text:
                facts[key] = text[key]
    return facts


def first_value(text: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the value of the first key that is not null; None if there is none."""
    for key in keys:
        if text.get(key) is not None:
            return text[key]
    return None


def slides(window: Any, context: Any, text: Mapping[str, Any]) -> bool:
    """Return True if a sliding window hides a token: it is used, and shorter than the context."""
    if not is_number(window) or window <= 0 or text.get("use_sliding_window") is False:
        return False
    return context is None or window < context


def of_rope(text: Mapping[str, Any], context: Any) -> Facts:
    """Return base, rotary factor and scaling; with a prefix if each kind of layer has its own.

    Transformers 5 keeps all of them in ``rope_parameters``, older versions have ``rope_theta``,
    ``rope_scaling`` and ``partial_rotary_factor``.
    """
    outside = base_and_rotary_factor(text)
    if text.get("rope_local_base_freq") is not None:
        outside["sliding_attention.rope_theta"] = text["rope_local_base_freq"]
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        return outside
    by_kind = {}
    for kind, of_kind in parameters.items():
        if isinstance(of_kind, Mapping):
            by_kind[kind] = of_kind
    if not by_kind:
        return {**outside, **of_scaling(parameters, context, text)}
    facts = Facts()
    for kind, of_kind in by_kind.items():
        for name, value in {**outside, **of_scaling(of_kind, context, text)}.items():
            facts[f"{kind}.{name}"] = value
    return facts


def base_and_rotary_factor(parameters: Mapping[str, Any]) -> Facts:
    """Return base and rotary factor, as far as stated."""
    facts = Facts()
    for name, keys in (("rope_theta", ROPE_BASES), ("partial_rotary_factor", PARTIAL)):
        value = first_value(parameters, keys)
        if value is not None:
            facts[name] = value
    return facts


def of_scaling(parameters: Mapping[str, Any], context: Any, text: Mapping[str, Any]) -> Facts:
    """Return the values of one object of rope parameters.

    These are base, rotary factor, type and parameters of the scaling.
    """
    facts = base_and_rotary_factor(parameters)
    kind = scaling_type(parameters)
    if kind == "su":
        kind = "longrope"
    if kind in UNSCALED:
        return facts
    facts["rope_type"] = kind
    for key, value in parameters.items():
        if key not in NOT_SCALING and value is not None and value != ROPE_DEFAULTS.get(key):
            facts[f"rope {key}"] = value
    original = "rope original_max_position_embeddings"
    # A linear scaling divides all positions by its factor alone.
    if kind == "linear":
        facts.pop(original, None)
    elif original not in facts:
        facts[original] = text.get("original_max_position_embeddings")
        if facts[original] is None:
            facts[original] = context
    return facts


def filled(folders: Sequence[str]) -> list[Facts]:
    """Return the values of each folder's config with Transformers' defaults.

    If Transformers cannot read a config without the model's own code, the only value is "error",
    the reason.
    """
    return [filled_facts(Path(folder)) for folder in folders]


def filled_facts(folder: Path) -> Facts:
    """Return the values of a folder's config with Transformers' defaults, or {"error": why not}."""
    import transformers

    # Transformers' classes raise anything on a config that they do not expect.
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config(decoder=True).to_dict()
    except Exception as error:
        return {"error": one_line(error, 160)}
    return of_config(text, hints=False)


# Values of GGUF headers.


def of_gguf(model: GgufModel) -> Facts:
    """Return the values that llama.cpp reads from a header, or its defaults.

    Values of uncertain meaning are absent.
    """
    architecture = model.architecture
    facts = dict(HEADER_DEFAULTS.get(architecture, {}))
    keys = dict(HEADER_KEYS)
    for family, more in FAMILY_KEYS.items():
        if architecture.startswith(family):
            keys |= more
    for key, name in keys.items():
        value = header_value(model, key)
        if isinstance(value, bool) or is_number(value):
            facts[name] = value
    facts["rope_theta"] = header_value(model, "{}.rope.freq_base")
    if facts["rope_theta"] is None:
        facts["rope_theta"] = DEFAULT_BASE
    window = header_value(model, "{}.attention.sliding_window")
    context = header_value(model, "{}.context_length")
    if not is_number(context):
        context = None
    if slides(window, context, {}):
        facts["sliding_window"] = window
    return {**facts, **header_sizes(model), **heads_of(model), **header_scaling(model)}


def header_value(model: GgufModel, key: str) -> Any:
    """Return a field of a header.

    If it has a number for each layer, and all are equal, return this number.  Unequal numbers are
    returned as a tuple; ``is_number`` is False for a tuple.
    """
    value = model.fields.get(key.format(model.fields.get("general.architecture", "")))
    if isinstance(value, tuple) and len(set(value)) == 1:
        return value[0]
    return value


def header_sizes(model: GgufModel) -> Facts:
    """Return hidden size and number of layers."""
    facts = Facts()
    blocks = header_value(model, "{}.block_count")
    drafts = header_value(model, "{}.nextn_predict_layers")
    hidden = header_value(model, "{}.embedding_length")
    if is_number(blocks):
        facts["num_hidden_layers"] = blocks
        # ``block_count`` includes the blocks of multi-token prediction.
        if is_number(drafts):
            facts["num_hidden_layers"] = blocks - drafts
    if is_number(hidden):
        facts["hidden_size"] = hidden
    return facts


def heads_of(model: GgufModel) -> Facts:
    """Return numbers and sizes of attention heads.

    No values if attention is latent, or if layers differ in the number or the size of heads.  If
    they differ in the number of KV heads, only that number is absent.
    """
    heads = header_value(model, "{}.attention.head_count")
    has_other_sizes = header_value(model, "{}.attention.key_length_swa") is not None
    is_latent = header_value(model, "{}.attention.kv_lora_rank") is not None
    if not is_number(heads) or not heads or has_other_sizes or is_latent:
        return {}
    facts: Facts = {"num_attention_heads": heads}
    kv_heads = header_value(model, "{}.attention.head_count_kv")
    if kv_heads is None:
        kv_heads = heads
    if is_number(kv_heads):
        facts["num_key_value_heads"] = kv_heads
    hidden = header_value(model, "{}.embedding_length")
    size = header_value(model, "{}.attention.key_length")
    if size is None and is_number(hidden):
        size = hidden // heads
    if is_number(size):
        facts["head_dim"] = size
        rotary = header_value(model, "{}.rope.dimension_count")
        if not is_number(rotary):
            rotary = size
        facts["rotary dimensions"] = rotary
    return facts


def header_scaling(model: GgufModel) -> Facts:
    """Return type, factor and original context of the rope scaling.

    Llama 3's scaling is stored as a tensor of factors, and Phi-3's as two.
    """
    if model.has(LONG_FACTORS):
        return {"rope_type": "longrope"}
    if model.has("rope_freqs"):
        return {"rope_type": "llama3", FROM_TENSOR: True}
    kind = header_value(model, "{}.rope.scaling.type")
    factor = header_value(model, "{}.rope.scaling.factor")
    if factor is None:  # older files have this key
        factor = header_value(model, "{}.rope.scale_linear")
        kind = kind or "linear"
    if kind in (None, "none") or not is_number(factor) or factor in (0, 1):
        return {}
    facts = {"rope_type": kind, "rope factor": factor}
    original = header_value(model, ORIGINAL)
    if is_number(original) and kind != "linear":
        facts["rope original_max_position_embeddings"] = original
    return facts


def as_header(facts: Facts, *, defaults: bool) -> Facts:
    """Return a config's values under the names of ``of_gguf``, as its conversion states them.

    ``defaults``: fill in the usual defaults of heads.  The values of rope are omitted if the form
    of the scaling in headers is uncertain.
    """
    # The header's base and scaling are those of layers without a window.  They replace values
    # without a prefix, and so come last.
    prefix = "full_attention."
    renamed = Facts()
    of_full_attention = Facts()
    for name, value in facts.items():
        if name.startswith(prefix):
            of_full_attention[name.removeprefix(prefix)] = value
        else:
            renamed[name] = value
    renamed |= of_full_attention
    if renamed.get("sliding_window") is None:
        renamed.pop("sliding_window", None)  # llama.cpp's code decides for some architectures
    if renamed.get("rope_type") not in (None, *HEADER_SCALINGS):
        renamed = {name: value for name, value in renamed.items() if "rope" not in name}
        renamed["rope_type"] = UNKNOWN_SCALING
    sizes = head_sizes(renamed, defaults=defaults)
    for name in sizes:
        renamed.pop(name, None)
    for name, value in sizes.items():
        if value is not None:
            renamed[name] = value
    return renamed


def head_sizes(facts: Facts, *, defaults: bool) -> Facts:
    """Return a config's numbers and sizes of heads as a header states them.

    None for values of uncertain form.  ``defaults``: compute what Transformers computes for keys
    that are missing or null.
    """
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "rotary dimensions")
    sizes = {name: facts.get(name) for name in names}
    # The heads of layers differ in size, or attention is latent.
    special_keys = (*UNEQUAL_CACHES, "kv_lora_rank", "qk_rope_head_dim")
    is_uncertain = any(facts.get(key) for key in special_keys)
    if is_uncertain or not is_number(sizes["num_attention_heads"]):
        return dict.fromkeys(names)
    partial = facts.get("partial_rotary_factor")
    if defaults:
        heads = sizes["num_attention_heads"]
        if partial is None:
            partial = 1
        if "num_key_value_heads" in facts and sizes["num_key_value_heads"] is None:
            sizes["num_key_value_heads"] = heads
        if sizes["head_dim"] is None and is_number(facts.get("hidden_size")):
            sizes["head_dim"] = facts["hidden_size"] // heads
    size = sizes["head_dim"]
    if "rope_theta" in facts and isinstance(size, int) and isinstance(partial, int | float):
        sizes["rotary dimensions"] = int(size * partial)
    if is_number(facts.get("rotary_dim")):
        sizes["rotary dimensions"] = facts["rotary_dim"]
    return sizes


# Comparison.


def is_number(value: Any) -> bool:
    """Return True for a number; True and False do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_same(one: Any, other: Any) -> bool:
    """Return True if two values of configs mean the same."""
    if is_number(one) and is_number(other):
        return math.isclose(one, other, rel_tol=EQUAL_NUMBERS)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and first_difference(one, other) is None
    return bool(one == other)


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Return the index of the first entries of two lists that differ; None if all are the same."""
    for index, (value, other_value) in enumerate(zip(one, other, strict=True)):
        if not is_same(value, other_value):
            return index
    return None


def in_words(value: Any) -> str:
    """Return a value for a message: ``10,000``, ``1e-06``, ``true``, ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if is_number(value):
        if math.isfinite(value) and value == int(value):
            return f"{int(value):,}"
        return f"{value:.6g}"
    return shortened(printable(str(value)), 40)


def difference(name: str, mine: Any, reference: Any) -> str:
    """Return ``rope_theta 10,000 for 100,000``, for values that differ.

    Of two lists of the same length, the first entries that differ.
    """
    are_lists = isinstance(mine, list | tuple) and isinstance(reference, list | tuple)
    if are_lists and len(mine) == len(reference):
        index = first_difference(mine, reference)
        assert index is not None
        return f"{name}[{index}] {in_words(mine[index])} for {in_words(reference[index])}"
    return f"{name} {in_words(mine)} for {in_words(reference)}"


def scaling_in_words(facts: Facts, prefix: str) -> str:
    """Return the type and the factor of a rope scaling: ``yarn (factor 4)``, or ``none``."""
    kind = in_words(facts.get(f"{prefix}rope_type"))
    factor = facts.get(f"{prefix}rope factor")
    if factor is None:
        return kind
    return f"{kind} (factor {in_words(factor)})"


def is_another_size(mine: Facts, reference: Facts) -> bool:
    """Return True if a size shows that two models were not made from the same checkpoint."""
    for name in MODEL_SIZES:
        if name in mine and name in reference and not is_same(mine[name], reference[name]):
            return True
    return False


def differing(mine: Facts, reference: Facts) -> Iterator[str]:
    """Yield the differences between values that both have; nothing if their sizes differ.

    A missing type of rope scaling means that nothing is scaled.  If the types differ, their
    parameters are not compared.  If a type is unknown, no value of rope is compared.

    Values of one kind of layers have its name as a prefix: ``full_attention.rope factor``.
    """
    if is_another_size(mine, reference):
        return
    for name in {**reference, **mine}:
        layer_kind, dot, bare_name = name.rpartition(".")
        prefix = f"{layer_kind}{dot}"  # "" if the value is one of all layers
        types = (mine.get(f"{prefix}rope_type"), reference.get(f"{prefix}rope_type"))
        same_type = types[0] == types[1]
        if UNKNOWN_SCALING in types and "rope" in name:
            continue
        if bare_name == "rope_type":
            # A header with a tensor of factors has the type "llama3".  The factors may have another
            # reason than a scaling: a model without a type then agrees with this header.
            may_be_none = None in types and (FROM_TENSOR in mine or FROM_TENSOR in reference)
            if not same_type and not may_be_none:
                ours = scaling_in_words(mine, prefix)
                theirs = scaling_in_words(reference, prefix)
                yield f"{prefix}rope scaling {ours} for {theirs}"
            continue
        if name not in mine or name not in reference or is_same(mine[name], reference[name]):
            continue
        is_parameter = bare_name.startswith("rope ")
        if same_type or not is_parameter:
            yield difference(name, mine[name], reference[name])


def stated_facts(path: Path) -> Facts:
    """Return the values that a folder's config or a GGUF header states; InputError."""
    if is_gguf(path):
        return of_gguf(read_model(path))
    return of_config(CheckpointConfig.read(path).text)


def may_differ(mine: Path, reference: Path) -> bool:
    """Return True if two models state different values, or if only one of them states a value.

    If False, the models compute the same: a value that both omit has the same default in both.
    InputError if a file is damaged.
    """
    ours = stated_facts(mine)
    theirs = stated_facts(reference)
    # A config states more than a header has fields for, so only the header's values must all be
    # in the config.
    if is_gguf(mine) and not is_gguf(reference):
        theirs = as_header(theirs, defaults=True)
        unknown = ours.keys() - theirs.keys()
    elif is_gguf(reference) and not is_gguf(mine):
        ours = as_header(ours, defaults=True)
        unknown = theirs.keys() - ours.keys()
    else:
        unknown = ours.keys() ^ theirs.keys()
    # ``differing`` compares these two although only one model states them.
    if unknown - {"rope_type", FROM_TENSOR}:
        return True
    return next(differing(ours, theirs), None) is not None


def differences(
    mine: Path, reference: Path, filled_by_path: Mapping[Path, Mapping[str, Any]]
) -> list[str]:
    """Return the values of a model that differ from its reference's; InputError.

    As ``rope_theta 10,000 for 100,000``.  ``filled_by_path``: the ``filled_facts`` of the folders
    among them.  Without Transformers' defaults, only values that both files state are compared.
    """
    folders = [path for path in (mine, reference) if not is_gguf(path)]
    complete = True
    for path in folders:
        values = filled_by_path.get(path)
        if not values or "error" in values:
            complete = False
    both = []
    for path in (mine, reference):
        if is_gguf(path):
            facts = of_gguf(read_model(path))
        elif complete:
            facts = dict(filled_by_path[path])
        else:
            facts = of_config(CheckpointConfig.read(path).text, hints=False)
        if len(folders) == 1 and not is_gguf(path):
            facts = as_header(facts, defaults=complete)
        both.append(facts)
    texts = list(differing(*both))
    if not is_another_size(*both) and head_is_embedding(mine) and not head_is_embedding(reference):
        texts.append("tie_word_embeddings true for false")
    return texts


def head_is_embedding(path: Path) -> bool:
    """Return True if the embedding is also the head; InputError.

    No head is stored then, or a copy of the embedding.
    """
    if is_gguf(path):
        return read_model(path).head == "embedding"
    checkpoint = Checkpoint(path)
    ends: dict[str, list[Tensor]] = {"head": [], "embedding": []}
    for module, parts in checkpoint.matrices.items():
        role = checkpoint.role(module)
        if role in ends:
            ends[role].append(main_tensor(parts))
    if not ends["head"] or checkpoint.config.text.get("tie_word_embeddings") is True:
        return True
    if not ends["embedding"]:
        return False
    head = ends["head"][0]
    embedding = ends["embedding"][0]
    if (
        head.dtype != embedding.dtype
        or head.shape != embedding.shape
        or head.dtype not in NUMPY_TYPES
    ):
        return False
    head_rows = stored_numbers(head)
    embedding_rows = stored_numbers(embedding)
    # Read one row after the other: usually the first rows differ, and the rest of the files is not
    # read.
    for row in range(0, head.shape[0], ROW_STEP):
        if not np.array_equal(head_rows[row], embedding_rows[row]):
            return False
    return True


def sentence(mine: Path, texts: Sequence[str]) -> str:
    """Return the line with the ``differences`` of a model from its reference."""
    what = "header" if is_gguf(mine) else "config"
    more = ""
    if len(texts) > MOST_DIFFERENCES:
        more = f" and {len(texts) - MOST_DIFFERENCES} more"
    first = ", ".join(texts[:MOST_DIFFERENCES])
    return f"{what} differs from the reference's: {first}{more}"
