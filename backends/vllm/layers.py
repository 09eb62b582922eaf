"""Which kernel vLLM chose for each layer of a loaded model, and the precision in which it takes the activations.

This code runs in vLLM's workers, after the weights are processed.  vLLM keeps the kernel in one of a few attributes of
a layer's ``scheme`` or ``quant_method``.  What a kernel does with activations is read from the kernel's own config
where it has one, else known from its class, by the sources of 0.26 to 0.33.  The activations of a kernel that is not
known here are "unknown", never guessed: on a GPU without FP4 units Marlin runs an NVFP4 W4A4 checkpoint weight-only,
and nothing that vLLM returns says so (on an H200, PPL 29.20 in place of the 40.96 that the emulated checkpoint has).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compare_q.backends.base import Layer
from compare_q.backends.common.messages import dtype_name
from compare_q.backends.layers.groups import (
    DYNAMIC,
    FIRST_STEP,
    LOADED,
    ONE,
    PLAIN,
    SPARSE,
    KVCache,
    deviation,
    kv_cache_as_asked,
)
from compare_q.backends.layers.schemes import POWERS_OF_TWO, UNKNOWN, Declared, Scheme, args_text, declared

OWN_SCALES = re.compile(r"per_token_head$|_ds_mla$|^turboquant|^ultraquant|^octave")
"""vLLM's words for caches that keep scales beside keys and values."""
KERNEL_ATTRIBUTES = ("kernel", "fp8_linear", "linear_kernel", "ocp_mx_linear")
WEIGHT_ONLY = re.compile(r"Marlin|W4A16|W8A16|WNA16|CPUFp8BlockScaledMMKernel|CPUFp8PerTensorScaledMM")
"""Classes whose kernels take activations in the model's dtype, whatever the checkpoint asks for."""
QUANTIZES = re.compile(
    r"NvFp4LinearKernel$|Int8ScaledMMLinearKernel$|NvFp4EmulationExperts$|^Nvfp4QuantizationEmulation|^TrtLlmNvFp4"
    r"|^(Cutlass|DeepGemm|Triton|TritonOrCutlass|TritonOrDeepGemm)Experts(Fp4|Fp8)?$"
)
"""Classes without a config that says so, as those of experts before they are loaded, whose kernels quantize activations
as the checkpoint asks."""
GROUPED = {("uint8", 16): "nvfp4", ("uint8", 32): "mxfp4", ("fp8", 32): "mxfp8"}
"""(type of a QuantKey, size of its groups) -> format; vLLM's type of FP4 is the byte that holds two values."""
ONLINE = {
    "Fp8PerTensorOnline": "fp8 tensor", "Fp8OnlineLinear": "fp8 tensor", "Fp8PerBlockOnline": "fp8 block 128x128",
    "Fp8PtpcOnline": "fp8 channel", "Mxfp8Online": "mxfp8 g32", "Mxfp4Online": "mxfp4 g32",
    "Int8Online": "int8 channel", "Nvfp4Online": "nvfp4 g16",
}  # fmt: skip
"""How the names of methods begin that quantize while vLLM loads -> what their weights are stored as."""
READ_IN_PREFILL = {
    "FlashAttentionImpl", "FlashAttentionDiffKVImpl", "TritonAttentionImpl", "TritonAttentionDiffKVImpl",
    "FlashInferImpl", "CompositeAttentionImpl", "FlexAttentionImpl", "CPUAttentionBackendImpl", "HpcAttentionImpl",
    "B12xPagedAttentionImpl", "RocmAiterUnifiedAttentionImpl", "Qwen4ExpQSAFlashAttentionImpl",
}  # fmt: skip
"""Classes of attention whose prefill writes its keys and values to the cache and reads them there, by the sources of
0.26 to 0.33; with decode context parallelism none does."""
UNREAD_IN_PREFILL = {
    "TurboQuantAttentionImpl": FIRST_STEP, "UltraQuantAttentionImpl": FIRST_STEP, "RocmAttentionImpl": FIRST_STEP,
    "AiterFlashAttentionImpl": FIRST_STEP, "RocmOctaveAttentionImpl": FIRST_STEP,
}  # fmt: skip
"""Classes whose prefill attends to the keys and values that it has at hand."""
LATENT = {"MLACommonImpl": FIRST_STEP, "SparseMLACommonImpl": SPARSE}
"""Classes from which multi-head latent attention derives, dense and sparse, whose ``forward_mha`` is prefill."""
NOT_CAUSAL = {"PrefillPrefixLMAttention", "EncoderOnlyAttention"}
"""Attention of prefix language models (HRM-Text), and of models whose config has ``is_causal`` false."""
SIZED = {"nvfp4": "nvfp4 g16", "mxfp4": "mxfp4 g32", "mxfp8": "mxfp8 g32"}
"""Formats whose groups have one size only."""
CacheSize = tuple[float | None, int | None]
SHORT_NAMES = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float4_e2m1fn_x2": "mxfp4"}


def layers(model: Any, quant_config: Any, checkpoint: dict[str, Any], dtype: str) -> Iterator[Layer]:
    """Every linear layer, expert layer and head of a vLLM model.

    ``quant_config``: vLLM's own, or None; ``checkpoint``: the ``quantization_config`` of the model's config.json;
    ``dtype``: the model's.
    """
    stated = declared(checkpoint)
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        bases = {base.__name__ for base in type(method).__mro__}
        is_head = type(module).__name__ == "ParallelLMHead"
        if is_head or {"LinearMethodBase", "FusedMoEMethodBase"} & bases:
            yield layer(name, module, method, scheme_of(name, module, method, quant_config, stated), dtype)


def layer(name: str, module: Any, method: Any, scheme: Scheme | None, dtype: str) -> Layer:
    """One layer; ``scheme`` is what the checkpoint asks of it, None if that is not known."""
    if type(method).__name__.startswith("Unquantized"):
        return Layer(name, dtype, dtype, class_name(experts_of(method) or method))
    kernel = kernel_of(module, method)
    asked = scheme.activations if scheme else UNKNOWN
    ran = activations(module, method, kernel, asked, dtype)
    if scheme is None:  # quantized while loading, or by a method that is not known here: nothing to deviate from
        key = getattr(getattr(kernel, "config", None), "weight_quant_key", None)
        by_method = (words for begins, words in ONLINE.items() if type(method).__name__.startswith(begins))
        stored = next(by_method, UNKNOWN) if key is None else key_text(key, "channel")
        return Layer(name, stored, ran, class_name(kernel))
    return Layer(name, scheme.weights, ran, class_name(kernel), deviation(asked or dtype, ran))


def scheme_of(name: str, module: Any, method: Any, quant_config: Any, stated: Declared) -> Scheme | None:
    """What the checkpoint asks of a layer; vLLM's own matching of layers to config groups decides where it has one."""
    if hasattr(method, "weight_quant") and hasattr(method, "input_quant"):  # experts of compressed-tensors
        return Scheme(args_text(method.weight_quant), args_text(method.input_quant))
    if hasattr(quant_config, "get_scheme_dict") and hasattr(module, "scheme"):
        schemes = quant_config.get_scheme_dict(module, getattr(module, "prefix", None))
        return Scheme(args_text(schemes["weights"]), args_text(schemes["input_activations"])) if schemes else None
    return stated.of(name)


def kernel_of(module: Any, method: Any) -> Any:
    """The object whose class computes the product: the kernel, else the scheme, else the method."""
    if (experts := experts_of(method)) is not None:
        return experts
    for owner in (getattr(module, "scheme", None), method):
        for name in KERNEL_ATTRIBUTES:
            if (kernel := getattr(owner, name, None)) is not None:
                return kernel
    return getattr(module, "scheme", None) or method


def experts_of(method: Any) -> Any:
    """The object that computes a layer of experts, its class before the weights are loaded; None for other layers."""
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return experts if experts is not None else getattr(method, "experts_cls", None)


def class_name(thing: Any) -> str:
    """The name of an object's class, or of a class."""
    return thing.__name__ if isinstance(thing, type) else type(thing).__name__


def activations(module: Any, method: Any, kernel: Any, asked: str, dtype: str) -> str:
    """The precision in which a kernel takes the activations."""
    name, config = class_name(kernel), getattr(kernel, "config", None)
    if getattr(module, "use_w4a8", False):  # CPUs with AMX, unless VLLM_CPU_INT4_W4A8=0
        return "int8 token"
    if hasattr(kernel, "quant_config"):
        return activations_of_experts(kernel, dtype)
    # Schemes that quantize activations elsewhere (W4A8 on Arm) leave the model's dtype in act_type.
    taken = getattr(kernel, "marlin_input_dtype", None) or getattr(config, "act_type", None)
    if (given := type_name(taken, dtype)) != dtype:
        return given
    if WEIGHT_ONLY.search(name) or getattr(getattr(module, "scheme", None), "use_a16", False):
        return dtype
    if "Humming" in name:  # Humming kernels decide by the platform
        return UNKNOWN if asked else dtype
    if config is not None and hasattr(config, "activation_quant_key"):
        key = config.activation_quant_key
        words = dtype if key is None else key_text(key, "token")
        # FlashInfer's kernel hands steps of 32 tokens and more to its fallback, DeepGEMM.
        parts = (kernel, getattr(kernel, "fallback", None))
        rounds = any(getattr(owner, "use_deep_gemm_e8m0", False) for owner in parts)
        return f"{words} {POWERS_OF_TWO}" if rounds else words
    if not asked:
        return dtype
    return asked if QUANTIZES.search(name) else UNKNOWN


def activations_of_experts(kernel: Any, dtype: str) -> str:
    """The precision in which experts take their inputs; some do not as their ``quant_config`` would have it.

    Marlin follows VLLM_MARLIN_INPUT_DTYPE, emulated MXFP8 rounds nothing, and int4 experts on a CPU with AMX, which are
    asked to be weight-only, compute in int8.
    """
    if type(kernel).__name__ == "CPUExpertsInt4":
        return "int8 token"
    taken = getattr(kernel, "quant_dtype", kernel.quant_config.quant_dtype)
    name = type_name(getattr(kernel, "input_dtype", None) or taken, dtype)
    return SIZED.get(name, name)


def kv_caches(model: Any, asked: str, dtype: str, sizes: Mapping[str, CacheSize] | None = None) -> Iterator[KVCache]:
    """The cache of every attention layer of a vLLM model; ``asked``: by the checkpoint, as ``schemes.kv_cache`` says.

    ``sizes``: of layers' caches, as ``kv_sizes`` says.

    A layer says in ``kv_cache_dtype`` what it was told, "auto" for the model's dtype, and keeps the scales of tensors
    as numbers: those of the checkpoint, or 1.0.  No size is told where something else is cached as well, as for the
    indexers of sparse attention.
    """
    found = {name: module for name, module in model.named_modules() if is_attention(module)}
    known = sizes if sizes and sizes.keys() <= found.keys() else {}
    for name, module in found.items():
        told = module.kv_cache_dtype
        stored = dtype if told == "auto" else type_name(cache_format(told), dtype)
        attention, scales, read = class_name(module.impl), kv_scales(module, told), prefill(module.impl)
        shares = known and getattr(module, "kv_sharing_target_layer_name", None)
        token_bytes, window = (0.0, None) if shares else known.get(name, (None, None))
        cache = KVCache(name, 1, stored, scales, "", attention, read, token_bytes, window)
        yield kv_cache_as_asked(cache, asked, dtype)


def named(groups: Sequence[KVCache], told: str | None) -> tuple[KVCache, ...]:
    """Caches that say whether the spec's ``kv_cache_dtype``, ``told``, names the format that they are kept in."""
    return tuple(replace(group, named=group.stored == cache_format(told or "auto")) for group in groups)


def is_attention(module: Any) -> bool:
    """Whether a module keeps keys and values: others may hold a word for the cache that they pass on."""
    return isinstance(getattr(module, "kv_cache_dtype", None), str) and hasattr(module, "impl")


def kv_sizes(specs: Mapping[str, Any], config: Any) -> dict[str, CacheSize]:
    """Layer -> (bytes of a token, tokens that are held) of its cache, as ``KVCache`` has them.

    ``specs``: a worker's ``get_kv_cache_spec()``, of its own rank; ``config``: vLLM's.  Tensor-parallel ranks hold the
    heads that they compute, latent attention all of it; with decode context parallelism they share the tokens.  A state
    that does not grow with the tokens (Mamba's) is no cache of tokens.
    """
    parallel = config.parallel_config
    ranks = parallel.tensor_parallel_size / parallel.decode_context_parallel_size
    bounded = not config.scheduler_config.disable_hybrid_kv_cache_manager

    def held(spec: Any) -> int | None:
        names = {"SlidingWindow": "sliding_window", "ChunkedLocal": "attention_chunk_size"}
        own = (getattr(spec, name) for word, name in names.items() if word in class_name(spec))
        return next(own, None) if bounded else None

    return {
        name: (spec.page_size_bytes / spec.block_size * ranks, held(spec))
        for name, spec in specs.items() if hasattr(spec, "num_kv_heads")
    }  # fmt: skip


def prefill(impl: Any) -> str:
    """Whether attention of an object's class reads a quantized cache in prefill: "" or as ``PREFILL_NOTES`` has it.

    Classes that derive from a known one may do otherwise, but for those of multi-head latent attention.
    """
    name = class_name(impl)
    if name in READ_IN_PREFILL:
        return "" if getattr(impl, "dcp_world_size", 1) == 1 else FIRST_STEP
    bases = [base.__name__ for base in type(impl).__mro__]
    return UNREAD_IN_PREFILL.get(name) or next((LATENT[base] for base in bases if base in LATENT), UNKNOWN)


def check_causal(model: Any) -> None:
    """RuntimeError if prompt tokens of a vLLM model attend to those that follow them, which would be "predicted"."""
    for name, module in model.named_modules():
        if class_name(module) in NOT_CAUSAL:
            raise RuntimeError(f"{name} ({class_name(module)}) lets prompt tokens see what follows; nothing to score")


def check_caches(model: Any, told: str, dtype: str) -> None:
    """RuntimeError if layers of a vLLM model misread their cache, or none of them keeps it in ``told``, vLLM's word.

    A cache in the model's ``dtype`` is what "auto" keeps, although vLLM's attention for CPUs does not name bfloat16
    among the caches that it can read.

    vLLM does not ask its attention for CPUs and XPUs what it can read: on a CPU (0.32), caches in int8 and in int4 per
    token and head both gave a toy the KLD 0.73 in prefill and 0.32 in decode.  With TurboQuant two layers at either end
    of a model keep their caches in its dtype, which are all layers of a toy.
    """
    if told == dtype:
        return
    caches = {name: module for name, module in model.named_modules() if is_attention(module)}
    for name, module in caches.items():
        can_read = getattr(getattr(module, "attn_backend", None), "supports_kv_cache_dtype", None)
        if module.kv_cache_dtype == told and can_read is not None and not can_read(told):
            raise RuntimeError(f"{name}: {class_name(module.impl)} cannot read a KV cache in {told}")
    plain = {"auto", *PLAIN}
    if caches and told not in plain and all(module.kv_cache_dtype in plain for module in caches.values()):
        raise RuntimeError(f"no layer keeps its KV cache in {told}: vLLM leaves that of all {len(caches)} unquantized")


def cache_format(told: str) -> str:
    """vLLM's word for a cache -> our word for its number format: "fp8_e4m3", "fp8_ds_mla" and the like are fp8."""
    for word in ("fp8_e5m2", "fp8", "nvfp4", "int8", "int4"):
        if told.startswith(word):
            return word
    return told


def kv_scales(module: Any, told: str) -> str:
    """Where the scales of a layer's cache come from."""
    if OWN_SCALES.search(told) or getattr(module, "calculate_kv_scales", False):
        return DYNAMIC
    scales = [getattr(module, f"_{letter}_scale", None) for letter in "kv"]
    return LOADED if any(bool((scale != 1.0).any()) for scale in scales if scale is not None) else ONE


def type_name(taken: Any, dtype: str) -> str:
    """Our name of a type that vLLM holds as a torch dtype, as a word, or as None, which means ``dtype``."""
    name = dtype if taken is None else dtype_name(taken)
    return SHORT_NAMES.get(name, name)


def key_text(key: Any, line: str) -> str:
    """A vLLM QuantKey in the words of ``backends/layers/schemes.py``.

    ``line`` is the word for one scale a row or column.  Group shapes: (-1, -1) is one scale for the tensor; (1, -1) and
    (-1, 1) one a line; (1, n) one for n values of a row; (n, m) one for a tile of the matrix.
    """
    rows, columns = key.scale.group_shape
    name = type_name(key.dtype, UNKNOWN)
    if rows < 0 or columns < 0:
        return f"{name} {'tensor' if rows == columns else line}"
    return f"{GROUPED.get((name, columns), name)} g{columns}" if rows == 1 else f"{name} block {rows}x{columns}"
