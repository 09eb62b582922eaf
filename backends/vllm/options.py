"""The ``engine`` object of a ``vllm_score`` spec: checks, and conversion to the arguments of ``LLM(...)``.

vLLM is not imported here: the names of its arguments come from ``compat.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from compare_q.backends.base import Decode, PlannedModel
from compare_q.backends.checkpoint import contents, files
from compare_q.backends.checkpoint.config import CheckpointConfig, has_longrope
from compare_q.backends.checkpoint.formats import Parts
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import nearest, printable
from compare_q.backends.common.options import check_names, parse_options
from compare_q.backends.common.packages import installed_versions
from compare_q.backends.layers import noise
from compare_q.backends.layers.names import is_expert
from compare_q.backends.layers.schemes import Scheme, declared, number_format
from compare_q.backends.vllm import compat

SET_BY_COMPARE_Q = ("model", "revision", "skip_tokenizer_init", "worker_extension_cls", "hf_config_path")
EMULATE = "emulate"
TRIMS = "swa_bounded_replay"
"""vLLM's option (from 0.32 on, default true) that skips DeepSeek-V4.1's last layers for most prompt tokens of requests
without ``prompt_logprobs``."""
DRAFTS = "drafted tokens share the states that are scored, and have corrupted them (vllm issue 53488)"
BREAKS_STATES = {
    "kv_sharing_fast_prefill": "vLLM then computes no final states for prompt tokens, and its own prompt_logprobs are "
    "wrong as well",
    TRIMS: "vLLM then leaves out states of prompt tokens; compare_q sets it to false",
    "speculative_config": DRAFTS, "spec_method": DRAFTS, "spec_model": DRAFTS, "spec_tokens": DRAFTS,
}  # fmt: skip
"""Options with which vLLM does not compute right states for every prompt token -> why; false or null turns them off."""
MX = {"mxfp4", "mxfp8"}
"""Formats without kernels on a CPU, whose activations vLLM emulates partly or not at all."""
OWN_OPTIONS = {EMULATE, *noise.OPTIONS}
"""Options of the ``engine`` object that belong to compare_q, not vLLM."""
PICKLED = ("pt", "npcache")
BATCHED_TOKENS_CPU, BATCHED_TOKENS_GPU = 8192, 16384
"""At least vLLM's own max_num_batched_tokens, from which the KV cache's size follows."""
LOSES_CHUNKS = ("turboquant", "ultraquant")
"""Caches with a bug in vLLM (0.26 to 0.32, its issue 46460): if a step holds the rest of a window and a whole one of
that length, prefill forgets the window's earlier tokens, because it takes a step whose longest query is as long as its
longest sequence for one of whole windows (``_prefill_attention`` in ``turboquant_attn.py``).  693 such tokens had a
mean KLD of 0.24 instead of 0.0007."""
CHOOSES_CACHE = (
    "kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override", "long_prefill_token_threshold",
)  # fmt: skip
"""Options that decide the size of the KV cache, or let a step hold all windows; otherwise the windows decide it."""
LEAST_FREE = 0.01
SET_IN_DECODE = {
    "long_prefill_token_threshold": "step", "max_num_seqs": "batch", "enable_prefix_caching": "",
    "long_prefill_token_threshold_adaptive": "", "enable_chunked_prefill": "", "max_num_partial_prefills": "",
    "max_long_partial_prefills": "",
}  # fmt: skip
"""Options that compare_q sets in decode, as they decide a step's tokens -> the spec's key that replaces them."""
BLOCK = 256
"""Tokens of a KV cache's largest block, which may extend beyond the end of a window."""
ONLINE = {
    "fp8": "fp8 tensor", "fp8_per_tensor": "fp8 tensor", "fp8_per_tensor_static": "fp8 tensor",
    "fp8_per_channel": "fp8 channel", "fp8_per_channel_static": "fp8 channel",
    "fp8_per_block": "fp8 block 128x128", "fp8_per_block_static": "fp8 block 128x128", "mxfp8": "mxfp8 g32",
    "mxfp4": "mxfp4 g32", "int8_per_channel_weight_only": "int8 channel in the experts",
    "experts_int8": "int8 channel in the experts", "int8_per_channel_static": "int8 channel",
    "nvfp4_per_token": "nvfp4 g16 in the experts",
}  # fmt: skip
"""vLLM's names for quantization while loading, also of one kind of layers -> how the weights are then stored."""


class CheckedOptions(BaseModel):
    """Options whose values matter to the scoring; other logprobs modes return logits."""

    model_config = ConfigDict(strict=True)

    emulate: bool = False
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    max_model_len: int = Field(1, gt=0)
    max_num_batched_tokens: int = Field(1, gt=0)


def check_options(model: PlannedModel) -> None:
    """Raise InputError for the first option that vLLM does not have, or that prevents right scores."""
    options = model.options
    for name in SET_BY_COMPARE_Q:
        if name in options:
            raise InputError(f"engine.{name}: set by compare_q; use model_dir and revision of the spec")
    for name in ("quantization", "load_format"):
        compat.check_plugin(f"engine.{name}", str(options.get(name)))
    if options.get("load_format") in PICKLED:
        raise InputError(f"engine.load_format: {options['load_format']} loads pickled weights; leave it out")
    check_names(options, compat.arguments() | OWN_OPTIONS, "the installed vLLM")
    for name in compat.WORDS:
        check_word(name, options.get(name))
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
        raise InputError(f"engine.max_model_len: {longest} is too short for windows of {model.max_tokens} tokens + 1")


def check_word(name: str, given: Any) -> None:
    """Raise InputError if the installed vLLM lists the option's values and ``given`` is another one."""
    known = compat.words(name)
    spelled = given.upper() if isinstance(given, str) and name == "attention_backend" else given  # as vLLM reads it
    if known and isinstance(given, str) and spelled not in known and given.lower() != "auto":
        hint = nearest(spelled, known) or f"; it has {', '.join(sorted(known))}"
        raise InputError(f"engine.{name}: the installed vLLM has no {printable(given)!r}{hint}")


def check_steps(decode: Decode, options: Mapping[str, Any]) -> None:
    """Raise InputError for options with which a step could not hold ``step`` tokens of each of ``batch`` windows."""
    for name, key in SET_IN_DECODE.items():
        if options.get(name) is not None:
            instead = f'give "{key}" beside "phase" in its place' if key else "leave it out"
            raise InputError(f'engine.{name}: set by compare_q with "phase": "decode"; {instead}')
    tokens, batched = decode.step * decode.batch, options.get("max_num_batched_tokens")
    if batched is not None and batched < tokens:
        raise InputError(f"engine.max_num_batched_tokens: {batched} holds no step of {tokens} tokens (step x batch)")


def check_checkpoint(model: PlannedModel, folder: Path) -> None:
    """Raise InputError if vLLM would misread a local model, or could not emulate its activations."""
    stray = files.strays(folder)
    if stray and not (folder / "model.safetensors.index.json").is_file():
        raise InputError(f"model_dir: {stray[0]}: vLLM would load it as well; move it out of the folder")
    if model.options.get("quantization_config") and not model.options.get("quantization"):
        raise InputError("engine.quantization_config: vLLM ignores it without engine.quantization; give both")
    config = CheckpointConfig.read(folder)
    compat.check_plugin("model_dir", str(config.quantization.get("quant_method")))
    layers = contents.nvfp4_layers(folder)
    contents.check_scales(folder, layers)
    if compat.is_cpu_build() and (missing := without_kernel(folder, layers, machine.cpu_kind())):
        raise InputError(f"model_dir: {missing}; score it on a GPU")
    chosen = emulation_arguments(folder, layers) if model.options.get(EMULATE) else {}
    for name in chosen:
        if name in model.options:
            raise InputError(f"engine.{name}: chosen by engine.{EMULATE}; give one of the two")
    if "speculators_config" in config.raw:
        raise InputError(f"model_dir: {folder}: drafts tokens for another model, which vLLM would load in its place")
    if stray and model.options.get("load_format") in ("auto", "mistral"):
        raise InputError(f"engine.load_format: may load {stray[0]} in place of the model's other files; leave it out")
    check_length(model, config)


def check_length(model: PlannedModel, config: CheckpointConfig) -> None:
    """Raise InputError if the model's results depend on ``max_model_len``, which must then be what is served with."""
    if model.options.get("max_model_len") is not None:
        return
    overrides, depends = model.options.get("hf_overrides"), ""
    for each in (CheckpointConfig(raw) for raw in (config.raw, overrides) if isinstance(raw, dict)):
        if has_longrope(each.raw):
            depends = depends or "longrope factors depend on it"
        # Above 32,768 tokens vLLM scales the queries of all positions, unless generation_config.json says otherwise.
        elif str(each.text.get("model_type")).startswith("llama4"):
            depends = depends or "attention depends on it"
    if depends:
        raise InputError(
            f"engine.max_model_len: missing; this model's {depends} in vLLM, so set it to what you serve with"
        )


def without_kernel(folder: Path, layers: Mapping[str, Parts], kind: str) -> str:
    """Return what vLLM lacks to run a local model on a CPU of this ``kind``; empty if nothing.

    ``layers``: the model's NVFP4 layers.  From the sources of 0.26 to 0.33; vLLM would fail while loading or, with
    latent attention, in its first step.
    """
    config = CheckpointConfig.read(folder)
    method, schemes = config.quantization.get("quant_method"), schemes_of(config.quantization)
    formats = {number_format(scheme.weights) for scheme in schemes}
    has_amx = kind not in ("AVX2", "AVX-512")
    multiplied = set() if has_amx else formats & {"fp8", "int8", "int4"}
    weight_only = method in ("compressed-tensors", "gptq") and not any(scheme.activations for scheme in schemes)
    names = [name.rpartition(".") for name in files.read_headers(files.weight_files(folder))] if multiplied else []
    lacks = {
        "library for CPUs without AVX2": kind == "SSE",
        # gpt-oss, whose quant_method is mxfp4, has its experts only in that.
        f"kernel for {min(formats & MX, default='MX').upper()} layers on a CPU": formats & MX and method != "mxfp4",
        "kernel for weight-only INT8 layers on a CPU": "int8" in formats and weight_only,
        "latent attention (MLA) for CPUs without AVX-512": kind == "AVX2" and config.text.get("kv_lora_rank"),
        "kernel for FP8 blocks on a CPU without AMX":
            not has_amx and any(scheme.weights.startswith("fp8 block") for scheme in schemes),
        f"kernel for {min(multiplied, default='').upper()} experts on a CPU without AMX":
            any(is_expert(path) and "scale" in leaf for path, _, leaf in names),
        "way to be given a kernel for NVFP4 experts before 0.32":
            any(map(is_expert, layers)) and not compat.has_cpu_router(),
    }  # fmt: skip
    return next((f"vLLM has no {what}" for what, is_lacking in lacks.items() if is_lacking), "")


def engine_arguments(model: PlannedModel, config: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of ``LLM(...)`` except the model: compare_q's defaults, then the spec's options.

    In decode they decide which tokens a step holds, and leave a GPU's compiled graphs on, as they are when serving.  In
    prefill with caches of ``LOSES_CHUNKS``, no window begins in a step that does not hold it all.
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
        defaults |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(BATCHED_TOKENS_GPU, longest)}
    chosen = {name: value for name, value in model.options.items() if name not in OWN_OPTIONS}
    return defaults | cache_arguments(model, config, cpu=cpu) | chosen


def loses_chunks(model: PlannedModel) -> bool:
    """Return True if vLLM scores a window wrongly that two steps of prefill share."""
    return model.decode is None and str(model.options.get("kv_cache_dtype")).startswith(LOSES_CHUNKS)


def cache_arguments(model: PlannedModel, config: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the size of the KV cache for the windows of two steps, or of a decode batch; empty if the spec decides it.

    ``gpu_memory_utilization`` is then only the memory that must be free when vLLM starts.
    """
    options, numbers = model.options, CheckpointConfig(config).kv_numbers
    if not cpu and (numbers is None or any(name in options for name in CHOOSES_CACHE)):
        return {}
    batched = options.get("max_num_batched_tokens", BATCHED_TOKENS_CPU if cpu else BATCHED_TOKENS_GPU)
    tokens = tokens_at_work(model.max_tokens + 1, batched)
    if model.decode is not None:
        tokens = max(tokens, model.decode.batch * (model.max_tokens + 1 + BLOCK))
    size = kv_cache_bytes(numbers, tokens)
    return {"kv_cache_memory_bytes": size} | ({} if cpu else {"gpu_memory_utilization": LEAST_FREE})


def ranks(options: Mapping[str, Any]) -> int:
    """Return the number of GPUs of a model."""
    sizes = [options.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def tokens_at_work(longest: int, batched: int) -> int:
    """Return the largest number of cached tokens in a step of at most ``batched`` tokens, counted generously.

    A window that is longer than a step takes several, and only the next window may begin in the last of them, so that
    one window and two steps are enough.
    """
    return max(2 * batched, min(4 * longest, longest + 2 * batched))


def kv_cache_bytes(numbers: int | None, tokens: int) -> int:
    """Return the bytes of a KV cache: ``numbers`` of 16 bits per token, at least 256 MiB; 4 GiB if unknown."""
    return 4 << 30 if numbers is None else max(2 * numbers * tokens, 256 << 20)


def emulation_arguments(folder: Path, layers: Mapping[str, Parts]) -> dict[str, Any]:
    """Return the arguments of ``LLM(...)`` on a GPU that emulate activations; empty for weight-only layers.

    ``layers``: the local model's NVFP4 layers.  InputError where vLLM's emulation does not round activations.
    """
    quantization = CheckpointConfig.read(folder).quantization
    method = quantization.get("quant_method")
    formats = {number_format(scheme.activations) for scheme in schemes_of(quantization)} & MX
    rounded = [path for path, parts in layers.items() if contents.has_input_scale(parts)]
    paths = [*rounded, *(name.rpartition(".")[0] for name in files.read_headers(files.weight_files(folder)) if formats)]
    has_experts = any(map(is_expert, paths))
    refusals = {
        f"nothing to emulate: no layer of {folder} has NVFP4 or MXFP4 activations": not layers and not formats,
        "vLLM's emulation of MXFP8 leaves activations unquantized": "mxfp8" in formats,
        "this vLLM has no emulation of MXFP4; 0.32 has":
            formats and method != "quark" and not compat.emulates_mxfp4(),
        f"vLLM emulates MXFP4 experts of Quark only, and these are of {method}":
            formats and has_experts and method != "quark",
        "vLLM emulates MXFP4 by a package that is missing (pip install amd-quark)":
            formats and not installed_versions(("amd-quark",)),
    }  # fmt: skip
    for reason, applies in refusals.items():
        if applies:
            raise InputError(f"engine.{EMULATE}: {reason}; leave it out")
    if not rounded and not formats:
        return {}
    return {"linear_backend": "emulation"} | ({"moe_backend": "emulation"} if has_experts else {})


def schemes_of(quantization: Mapping[str, Any]) -> set[Scheme]:
    """Return every scheme of a ``quantization_config``."""
    stated = declared(quantization)
    named_schemes = [stated.default, *stated.exact.values(), *(scheme for _, scheme in stated.patterns)]
    return {scheme for scheme in named_schemes if scheme is not None}


def quantized_on_load(options: Mapping[str, Any], *, quantized: bool) -> str:
    """Return the option that makes vLLM quantize while loading a checkpoint (``quantized`` or not); empty: none."""
    overrides = options.get("hf_overrides")
    if options.get("quantization_config") or (isinstance(overrides, dict) and "quantization_config" in overrides):
        return "quantization_config"
    if options.get("load_format") == "bitsandbytes":
        return "load_format"
    return "quantization" if options.get("quantization") and not quantized else ""


def stored_on_load(options: Mapping[str, Any]) -> str:
    """Return in words how vLLM stores weights that it quantizes while loading; empty if unknown."""
    kinds = options.get("quantization_config")
    if not isinstance(kinds, dict):
        return ONLINE.get(str(options.get("quantization")), "")
    base, words = ONLINE.get(str(options.get("quantization")), ""), []
    for kind, of in (("linear", ""), ("moe", " in the experts")):
        named = kinds.get(kind)
        kind_words = ONLINE.get(str(named.get("weight") if isinstance(named, dict) else named)) if named else base
        words += [kind_words if kind_words.endswith("experts") else kind_words + of] if kind_words else []
    return " and ".join(dict.fromkeys(words))
