"""The ``engine`` object of a ``vllm_score`` spec: checks, and conversion to the arguments of
``LLM(...)``.

vLLM is not imported here: the names of its arguments come from ``compat.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..base import Decode, PlannedModel
from ..checkpoint import nvfp4_scales, safetensors_files
from ..checkpoint.checkpoint_config import CheckpointConfig, has_longrope
from ..common import machine
from ..common.engine_options import check_names, parse_options
from ..common.errors import InputError
from ..common.message_text import nearest, printable
from ..layers import noise
from ..layers.schemes import ROUTED, declared, number_format
from . import compat
from .kv_cache import BATCHED_TOKENS_GPU, cache_arguments

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
    "kv_sharing_fast_prefill": "vLLM then computes no final states for prompt tokens, and its own prompt_logprobs are "
    "wrong as well",
    TRIMS: "vLLM then leaves out states of prompt tokens; compare_q sets it to false",
    "speculative_config": DRAFTS,
    "spec_method": DRAFTS,
    "spec_model": DRAFTS,
    "spec_tokens": DRAFTS,
}
"""Options that make states of prompt tokens wrong or missing in vLLM -> reason; false or null turns
them off."""
OWN_OPTIONS = set(noise.OPTIONS)
"""Options of the ``engine`` object that belong to compare_q, not vLLM."""
PICKLED = ("pt", "npcache")
LOSES_CHUNKS = ("turboquant", "ultraquant")
"""Caches with a bug in vLLM (0.26 to 0.32, its issue 46460): if a step of prefill holds the rest of
a window and a whole window of the same length, vLLM forgets the first window's earlier tokens (mean
KLD 0.24 instead of 0.0007)."""
SET_IN_DECODE = {
    "long_prefill_token_threshold": "step",
    "max_num_seqs": "batch",
    "enable_prefix_caching": "",
    "long_prefill_token_threshold_adaptive": "",
    "enable_chunked_prefill": "",
    "max_num_partial_prefills": "",
    "max_long_partial_prefills": "",
}
"""Options that compare_q sets in decode because they decide a step's tokens -> the spec's key that
replaces them."""


class CheckedOptions(BaseModel):
    """Options whose values scoring depends on; in other logprobs modes vLLM returns logits."""

    model_config = ConfigDict(strict=True)

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    max_model_len: int = Field(1, gt=0)
    max_num_batched_tokens: int = Field(1, gt=0)


def check_options(model: PlannedModel) -> None:
    """Raise InputError for the first option that vLLM does not have, or that would cause wrong
    scores.
    """
    options = model.options
    if ours := [name for name in SET_BY_COMPARE_Q if name in options]:
        raise InputError(
            f"engine.{ours[0]}: set by compare_q; use model_dir and revision of the spec"
        )
    for name in ("quantization", "load_format"):
        compat.check_plugin(f"engine.{name}", str(options.get(name)))
    if options.get("load_format") in PICKLED:
        raise InputError(
            f"engine.load_format: {options['load_format']} loads pickled weights; leave it out"
        )
    check_names(options, compat.arguments() | OWN_OPTIONS, "the installed vLLM")
    for name in compat.ALLOWED:
        given, known = options.get(name), compat.allowed_values(name)
        if known and isinstance(given, str):
            spelled = given.upper() if name == "attention_backend" else given  # as vLLM reads it
            if spelled not in known and given.lower() != "auto":
                hint = nearest(spelled, known) or f"; it has {', '.join(sorted(known))}"
                raise InputError(
                    f"engine.{name}: the installed vLLM has no {printable(given)!r}{hint}"
                )
    for name, reason in BREAKS_STATES.items():
        if options.get(name):
            raise InputError(f"engine.{name}: {reason}; leave it out")
    if noise.seed_of(options) is not None and not options.get("enforce_eager", True):
        raise InputError("engine.enforce_eager: engine.noise needs it true; leave it out")
    parse_options(CheckedOptions, options)
    if model.decode is not None:
        check_steps(model.decode, options)
    elif options.get("enable_chunked_prefill", False) is not False and loses_chunks(model):
        raise InputError(
            f"engine.enable_chunked_prefill: with a cache in {options['kv_cache_dtype']} vLLM forgets the first part "
            "of a window that it splits over two steps of prefill; compare_q sets it to false; leave it out"
        )
    longest = options.get("max_model_len")
    if longest is not None and longest <= model.max_tokens:
        raise InputError(
            f"engine.max_model_len: {longest} is too short for windows of {model.max_tokens} tokens + 1"
        )


def check_steps(decode: Decode, options: Mapping[str, Any]) -> None:
    """Raise InputError if, with these options, a step could not hold ``step`` tokens of each of
    ``batch`` windows.
    """
    for name, key in SET_IN_DECODE.items():
        if options.get(name) is not None:
            instead = f'give "{key}" beside "phase" in its place' if key else "leave it out"
            raise InputError(f'engine.{name}: set by compare_q with "phase": "decode"; {instead}')
    tokens, batched = decode.step * decode.batch, options.get("max_num_batched_tokens")
    if batched is not None and batched < tokens:
        raise InputError(
            f"engine.max_num_batched_tokens: {batched} holds no step of {tokens} tokens (step x batch)"
        )


def check_checkpoint(model: PlannedModel, folder: Path) -> None:
    """Raise InputError if vLLM would misread a local model."""
    config, stray, options = (
        CheckpointConfig.read(folder),
        safetensors_files.strays(folder),
        model.options,
    )
    if stray and not (folder / "model.safetensors.index.json").is_file():
        raise InputError(
            f"model_dir: {stray[0]}: vLLM would load it as well; move it out of the folder"
        )
    if options.get("quantization_config") and not options.get("quantization"):
        raise InputError(
            "engine.quantization_config: vLLM ignores it without engine.quantization; give both"
        )
    compat.check_plugin("model_dir", str(config.quantization.get("quant_method")))
    nvfp4 = nvfp4_scales.nvfp4_layers(folder)
    nvfp4_scales.check_scales(folder, nvfp4)
    check_kernels(folder, config.quantization, options, nvfp4)
    if "speculators_config" in config.raw:
        raise InputError(
            f"model_dir: {folder}: drafts tokens for another model, which vLLM would load in its place"
        )
    if stray and options.get("load_format") in ("auto", "mistral"):
        raise InputError(
            f"engine.load_format: may load {stray[0]} instead of the model's other files; leave it out"
        )
    check_length(model, config)


def check_kernels(
    folder: Path, quantization: Mapping[str, Any], options: Mapping[str, Any], nvfp4: Iterable[str]
) -> None:
    """Raise InputError if vLLM has no kernel on this CPU for a layer; vLLM itself may fail only in
    its first step.

    ``nvfp4``: names of the checkpoint's NVFP4 layers.
    """
    experts = [name for name in nvfp4 if ROUTED.match(name)]
    if experts and compat.computes_on_cpu():
        raise InputError(
            f"model_dir: {experts[0]}: vLLM has no kernel for NVFP4 experts on CPUs; score it on a GPU"
        )
    if kernel := missing_kernel(quantization, options):
        raise InputError(
            f'model_dir: {folder}: vLLM has no kernel for {kernel}; use "load_fn": "transformers_auto_bf16"'
        )


def missing_kernel(quantization: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return a weight-only format of a checkpoint that vLLM has no kernel for on this CPU; "" if
    vLLM has all kernels.

    For NVFP4 vLLM has only kernels for GPUs.  Its int4 kernel needs AVX-512, and does not compute
    in float32.
    """
    if not compat.computes_on_cpu():
        return ""
    weight_only = [scheme for scheme in declared(quantization).schemes() if not scheme.activations]
    formats = {number_format(scheme.weights) for scheme in weight_only}
    if "nvfp4" in formats:
        return "NVFP4 W4A16 on CPUs"
    if formats.isdisjoint(("int4", "uint4")):
        return ""
    if not machine.has_avx512():
        return "W4A16 on CPUs without AVX-512"
    return "W4A16 in float32 on CPUs" if options.get("dtype") in ("float", "float32") else ""


def check_length(model: PlannedModel, config: CheckpointConfig) -> None:
    """Raise InputError if results depend on ``max_model_len``; the spec must then state the value
    used in serving.
    """
    if model.options.get("max_model_len") is not None:
        return
    for raw in (config.raw, model.options.get("hf_overrides")):
        each = CheckpointConfig(raw if isinstance(raw, dict) else {})
        # Above 32,768 tokens vLLM scales Llama 4's queries of all positions, unless
        # generation_config.json forbids it.
        scales = (
            "attention depends" if str(each.text.get("model_type")).startswith("llama4") else ""
        )
        if depends := "longrope factors depend" if has_longrope(each.raw) else scales:
            raise InputError(
                f"engine.max_model_len: missing; this model's {depends} on it in vLLM, so set it to what you serve with"
            )


def engine_arguments(model: PlannedModel, config: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of ``LLM(...)`` except the model: compare_q's defaults, then the spec's
    options.

    In decode, the arguments decide a step's tokens, and keep a GPU's compiled graphs on, as in
    serving.  In prefill with caches of ``LOSES_CHUNKS``, a window only begins in a step that holds
    all of it.
    """
    defaults: dict[str, Any] = {
        "max_model_len": model.max_tokens + 1,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "enforce_eager": True,
        **({TRIMS: False} if TRIMS in compat.arguments() else {}),
    }
    if model.decode is not None:
        defaults |= {
            "long_prefill_token_threshold": model.decode.step,
            "max_num_seqs": model.decode.batch,
            "enable_prefix_caching": False,
            "enforce_eager": cpu or noise.seed_of(model.options) is not None,
        }
    elif loses_chunks(model):
        longest = model.options.get("max_model_len", model.max_tokens + 1)
        defaults |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(BATCHED_TOKENS_GPU, longest),
        }
    chosen = {name: value for name, value in model.options.items() if name not in OWN_OPTIONS}
    return defaults | cache_arguments(model, config, cpu=cpu) | chosen


def loses_chunks(model: PlannedModel) -> bool:
    """Return True if vLLM wrongly scores windows that are split over two steps of prefill."""
    return model.decode is None and str(model.options.get("kv_cache_dtype")).startswith(
        LOSES_CHUNKS
    )


def ranks(options: Mapping[str, Any]) -> int:
    """Return the number of GPUs of a model."""
    sizes = [options.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def quantized_on_load(options: Mapping[str, Any], *, quantized: bool) -> str:
    """Return the option that makes vLLM quantize while loading a checkpoint (``quantized`` or not);
    empty: none.
    """
    overrides = options.get("hf_overrides")
    if options.get("quantization_config") or (
        isinstance(overrides, dict) and "quantization_config" in overrides
    ):
        return "quantization_config"
    if options.get("load_format") == "bitsandbytes":
        return "load_format"
    return "quantization" if options.get("quantization") and not quantized else ""
