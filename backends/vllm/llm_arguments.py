"""The ``engine`` object of a ``vllm_score`` spec: its checks, and the arguments of ``LLM(...)``.

vLLM is not imported here: the names of its arguments come from ``installed_vllm.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..base import PlannedModel
from ..checkpoint import nvfp4_scales, safetensors_files
from ..checkpoint.checkpoint_config import CheckpointConfig, has_longrope
from ..common import machine
from ..common.engine_options import check_names, parse_options
from ..common.errors import InputError
from ..common.message_text import nearest, printable
from ..layers import noise
from ..layers.schemes import ROUTED, declared, number_format
from . import decode, installed_vllm
from .kv_cache import BATCHED_TOKENS_GPU, cache_arguments
from .sampling import EXACT_NOISE

SET_BY_COMPARE_Q = (
    "model",
    "revision",
    "skip_tokenizer_init",
    "worker_extension_cls",
    "hf_config_path",
)
TRIMS = "swa_bounded_replay"
"""vLLM's option (from 0.32 on, default true) that skips DeepSeek-V4.1's last layers for most prompt
tokens of requests without ``prompt_logprobs``."""
DRAFTS = (
    "drafted tokens share the states that are scored, and have corrupted them (vllm issue 53488)"
)
BREAKS_STATES = {
    "kv_sharing_fast_prefill": (
        "vLLM then computes no final states for prompt tokens, and its own prompt_logprobs are "
        "wrong as well"
    ),
    TRIMS: "vLLM then leaves out states of prompt tokens; compare_q sets it to false",
    "speculative_config": DRAFTS,
    "spec_method": DRAFTS,
    "spec_model": DRAFTS,
    "spec_tokens": DRAFTS,
}
"""Options that make states of prompt tokens wrong or missing in vLLM -> reason.

False or null turns them off.
"""
OWN_OPTIONS = set(noise.OPTIONS)
"""Options of the ``engine`` object that belong to compare_q, not vLLM."""
PICKLED_LOAD_FORMATS = ("pt", "npcache")
LOSES_CHUNKS = ("turboquant", "ultraquant")
"""Caches with a bug in vLLM (0.26 to 0.32, its issue 46460).

If a step of prefill holds the rest of a window and a whole window of the same length, vLLM forgets
the first window's earlier tokens (mean KLD 0.24 instead of 0.0007).
"""


class CheckedOptions(BaseModel):
    """Options whose values scoring depends on; in other logprobs modes vLLM returns logits."""

    model_config = ConfigDict(strict=True)

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    max_model_len: int = Field(1, gt=0)
    max_num_batched_tokens: int = Field(1, gt=0)


def check_options(model: PlannedModel) -> None:
    """Raise InputError for the first option that vLLM lacks, or that would cause wrong scores."""
    options = model.options
    for name in SET_BY_COMPARE_Q:
        if name in options:
            raise InputError(
                f"engine.{name}: set by compare_q; use model_dir and revision of the spec"
            )
    for name in ("quantization", "load_format"):
        installed_vllm.check_plugin(f"engine.{name}", str(options.get(name)))
    if options.get("load_format") in PICKLED_LOAD_FORMATS:
        raise InputError(
            f"engine.load_format: {options['load_format']} loads pickled weights; leave it out"
        )
    check_names(options, installed_vllm.arguments() | OWN_OPTIONS, "the installed vLLM")
    check_values(options)
    for name, reason in BREAKS_STATES.items():
        if options.get(name):
            raise InputError(f"engine.{name}: {reason}; leave it out")
    if noise.seed_of(options) is not None and not options.get("enforce_eager", True):
        raise InputError("engine.enforce_eager: engine.noise needs it true; leave it out")
    if model.samples and options.get("logits_processors"):
        raise InputError(
            "engine.logits_processors: may change the distribution that text is sampled from; "
            "leave it out"
        )
    parse_options(CheckedOptions, options)
    if model.decode is not None:
        decode.check_options(model.decode, options)
    elif splits_windows(options) and loses_chunks(model):
        raise InputError(
            f"engine.enable_chunked_prefill: with a cache in {options['kv_cache_dtype']} vLLM "
            "forgets the first part of a window that it splits over two steps of prefill; "
            "compare_q sets it to false; leave it out"
        )
    longest = options.get("max_model_len")
    if longest is not None and longest <= model.max_tokens:
        raise InputError(
            f"engine.max_model_len: {longest} is too short for windows of {model.max_tokens} "
            "tokens + 1"
        )


def check_values(options: Mapping[str, Any]) -> None:
    """Raise InputError for the first value that the installed vLLM does not list."""
    for name in installed_vllm.ALLOWED:
        value = options.get(name)
        allowed = installed_vllm.allowed_values(name)
        if not allowed or not isinstance(value, str) or value.lower() == "auto":
            continue
        spelling = value
        if name == "attention_backend":
            spelling = value.upper()  # as vLLM reads it
        if spelling in allowed:
            continue
        hint = nearest(spelling, allowed)
        if not hint:
            hint = f"; it has {', '.join(sorted(allowed))}"
        raise InputError(f"engine.{name}: the installed vLLM has no {printable(value)!r}{hint}")


def splits_windows(options: Mapping[str, Any]) -> bool:
    """Return True if the spec lets vLLM split windows; null is vLLM's default, which does."""
    return options.get("enable_chunked_prefill", False) is not False


def check_checkpoint(model: PlannedModel, folder: Path) -> None:
    """Raise InputError if vLLM would misread a local model."""
    options = model.options
    config = CheckpointConfig.read(folder)
    strays = safetensors_files.strays(folder)
    if strays and not (folder / "model.safetensors.index.json").is_file():
        raise InputError(
            f"model_dir: {strays[0]}: vLLM would load it as well; move it out of the folder"
        )
    if options.get("quantization_config") and not options.get("quantization"):
        raise InputError(
            "engine.quantization_config: vLLM ignores it without engine.quantization; give both"
        )
    installed_vllm.check_plugin("model_dir", str(config.quantization.get("quant_method")))
    nvfp4_layers = nvfp4_scales.nvfp4_layers(folder)
    nvfp4_scales.check_scales(folder, nvfp4_layers)
    check_kernels(folder, config.quantization, options, nvfp4_layers)
    if "speculators_config" in config.raw:
        raise InputError(
            f"model_dir: {folder}: drafts tokens for another model, which vLLM would load in its "
            "place"
        )
    if strays and options.get("load_format") in ("auto", "mistral"):
        raise InputError(
            f"engine.load_format: may load {strays[0]} instead of the model's other files; leave "
            "it out"
        )
    check_length(model, config)


def check_kernels(
    folder: Path, quantization: Mapping[str, Any], options: Mapping[str, Any], nvfp4: Iterable[str]
) -> None:
    """Raise InputError if vLLM has no kernel on this CPU for a layer.

    vLLM itself may fail only in its first step.  ``nvfp4``: names of the checkpoint's NVFP4 layers.
    """
    experts = [name for name in nvfp4 if ROUTED.match(name)]
    if experts and installed_vllm.computes_on_cpu():
        raise InputError(
            f"model_dir: {experts[0]}: vLLM has no kernel for NVFP4 experts on CPUs; score it on a "
            "GPU"
        )
    kernel = missing_kernel(quantization, options)
    if kernel:
        raise InputError(
            f"model_dir: {folder}: vLLM has no kernel for {kernel}; use "
            '"load_fn": "transformers_auto_bf16"'
        )


def missing_kernel(quantization: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return a weight-only format of a checkpoint that vLLM has no kernel for on this CPU.

    "" if vLLM has all kernels.
    """
    if not installed_vllm.computes_on_cpu():
        return ""
    formats: set[str] = set()
    for scheme in declared(quantization).schemes():
        if not scheme.activations:
            formats.add(number_format(scheme.weights))
    if "nvfp4" in formats:  # vLLM has only kernels for GPUs
        return "NVFP4 W4A16 on CPUs"
    if formats.isdisjoint(("int4", "uint4")):
        return ""
    if not machine.has_avx512():
        return "W4A16 on CPUs without AVX-512"
    if options.get("dtype") in ("float", "float32"):
        return "W4A16 in float32 on CPUs"
    return ""


def check_length(model: PlannedModel, config: CheckpointConfig) -> None:
    """Raise InputError if results depend on ``max_model_len``.

    The spec must then state the value used in serving.
    """
    if model.options.get("max_model_len") is not None:
        return
    configs = [config]
    overrides = model.options.get("hf_overrides")
    # Either may have the keys; overrides that remove them from config.json are not followed.
    if isinstance(overrides, dict):
        configs.append(CheckpointConfig(overrides))
    for stated in configs:
        depends = length_dependence(stated)
        if depends:
            raise InputError(
                f"engine.max_model_len: missing; this model's {depends} on it in vLLM, so set it "
                "to what you serve with"
            )


def length_dependence(config: CheckpointConfig) -> str:
    """Return what depends on ``max_model_len`` in vLLM, with the verb; "" if nothing does."""
    if has_longrope(config.raw):
        return "longrope factors depend"
    # Above 32,768 tokens vLLM scales Llama 4's queries of all positions, unless
    # generation_config.json forbids it.
    if str(config.text.get("model_type")).startswith("llama4"):
        return "attention depends"
    return ""


def engine_arguments(model: PlannedModel, config: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of ``LLM(...)`` except the model.

    They are compare_q's defaults, then the spec's options.
    """
    arguments: dict[str, Any] = {
        "max_model_len": model.max_tokens + 1,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "enforce_eager": True,
    }
    if TRIMS in installed_vllm.arguments():
        arguments[TRIMS] = False
    if model.samples and EXACT_NOISE in installed_vllm.arguments():
        arguments[EXACT_NOISE] = True
    if model.decode is not None:
        arguments |= decode.llm_arguments(model.decode, model.options, cpu=cpu)
    elif loses_chunks(model):
        # A window only begins in a step that holds all of it.
        longest = model.options.get("max_model_len", model.max_tokens + 1)
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(BATCHED_TOKENS_GPU, longest)
    arguments |= cache_arguments(model, config, cpu=cpu)
    for name, value in model.options.items():
        if name not in OWN_OPTIONS:
            arguments[name] = value
    return arguments


def loses_chunks(model: PlannedModel) -> bool:
    """Return True if vLLM wrongly scores windows that are split over two steps of prefill."""
    cache_dtype = str(model.options.get("kv_cache_dtype"))
    return model.decode is None and cache_dtype.startswith(LOSES_CHUNKS)


def ranks(options: Mapping[str, Any]) -> int:
    """Return the number of GPUs of a model."""
    sizes = [options.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def quantized_on_load(options: Mapping[str, Any], *, quantized: bool) -> str:
    """Return the option that makes vLLM quantize while loading a checkpoint; empty: none.

    ``quantized``: the checkpoint is quantized already.
    """
    overrides = options.get("hf_overrides")
    if options.get("quantization_config"):
        return "quantization_config"
    if isinstance(overrides, dict) and "quantization_config" in overrides:
        return "quantization_config"
    if options.get("load_format") == "bitsandbytes":
        return "load_format"
    if options.get("quantization") and not quantized:
        return "quantization"
    return ""
