"""Kernels and KV caches of a loaded model: what vLLM chose for each layer.

This runs in vLLM's workers, after the weights are processed.  The precision of activations is read
from a kernel's config or known from its class (from the sources of 0.26 to 0.33).  Otherwise it is
"unknown", never guessed.  For example, on a GPU without FP4 units, Marlin runs an NVFP4 W4A4
checkpoint weight-only, and vLLM does not report it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..base import Layer
from ..common.message_text import dtype_name
from ..layers.groups import (
    DYNAMIC,
    FIRST_STEP,
    LOADED,
    SPARSE,
    UNIT_SCALES,
    UNQUANTIZED_FORMATS,
    KVCache,
    deviation,
    kv_cache_as_asked,
)
from ..layers.schemes import POWERS_OF_TWO, UNKNOWN, Declared, Scheme, args_text, declared

OWN_SCALES = re.compile(r"per_token_head$|_ds_mla$|^turboquant|^ultraquant|^octave")
"""vLLM's names for caches that keep their scales with keys and values."""
KERNEL_ATTRIBUTES = ("kernel", "fp8_linear", "linear_kernel", "ocp_mx_linear")
WEIGHT_ONLY = re.compile(
    r"Marlin|W4A16|W8A16|WNA16|CPUFp8BlockScaledMMKernel|CPUFp8PerTensorScaledMM"
)
"""Classes whose kernels take activations in the model's dtype.

The checkpoint may state another precision.
"""
QUANTIZES = re.compile(
    r"NvFp4LinearKernel$|Int8ScaledMMLinearKernel$|NvFp4EmulationExperts$|^Nvfp4QuantizationEmulation|^TrtLlmNvFp4"
    r"|^(Cutlass|DeepGemm|Triton|TritonOrCutlass|TritonOrDeepGemm)Experts(Fp4|Fp8)?$"
)
"""Classes without a config whose kernels quantize activations as the checkpoint states.

For example experts before loading.
"""
GROUPED = {("uint8", 16): "nvfp4", ("uint8", 32): "mxfp4", ("fp8", 32): "mxfp8"}
"""(type of a QuantKey, size of its groups) -> format.

vLLM's type of FP4 is the byte that holds two values.
"""
GENERAL_ATTENTION = "vllm.v1.attention.backends."
"""Modules of the attention that vLLM uses for many models; a model's own attention is elsewhere."""
UNQUANTIZED_FIRST = ("turboquant", "ultraquant", "octave")
"""Beginnings of vLLM's names of caches that a window's first step does not read.

Their attention computes it from unquantized values.
"""
LATENT_ATTENTION = {"MLACommonImpl": FIRST_STEP, "SparseMLACommonImpl": SPARSE}
"""Base classes of latent attention (MLA), whose ``forward_mha`` is prefill.

Each has the reason that prefill does not read the cache.
"""
NOT_CAUSAL = {"PrefillPrefixLMAttention", "EncoderOnlyAttention"}
"""Attention of prefix language models (HRM-Text), and of configs with ``is_causal`` false."""
SIZED = {"nvfp4": "nvfp4 g16", "mxfp4": "mxfp4 g32", "mxfp8": "mxfp8 g32"}
"""Formats with one group size."""
CacheSize = tuple[float | None, int | None]
SHORT_NAMES = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float4_e2m1fn_x2": "mxfp4"}


def layers(
    model: Any, quant_config: Any, checkpoint: dict[str, Any], dtype: str
) -> Iterator[Layer]:
    """Yield every linear layer, expert layer and head of a vLLM model.

    ``quant_config``: vLLM's own, or None.  ``checkpoint``: ``quantization_config`` of the model's
    config.json.  ``dtype``: the model's.
    """
    schemes = declared(checkpoint)
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        bases = {base.__name__ for base in type(method).__mro__}
        is_head = type(module).__name__ == "ParallelLMHead"
        if is_head or {"LinearMethodBase", "FusedMoEMethodBase"} & bases:
            scheme = scheme_of(name, module, method, quant_config, schemes)
            yield layer(name, module, method, scheme, dtype)


def layer(name: str, module: Any, method: Any, scheme: Scheme | None, dtype: str) -> Layer:
    """Return one layer; ``scheme``: the checkpoint's scheme for it, None if unknown."""
    if type(method).__name__.startswith("Unquantized"):
        experts = experts_of(method)
        if experts is None:
            return Layer(name, dtype, dtype, class_name(method))
        return Layer(name, dtype, dtype, class_name(experts))
    kernel = kernel_of(module, method)
    if scheme is None:
        # Quantized while loading, or by an unknown method: no scheme to deviate from.
        ran = activations(module, method, kernel, UNKNOWN, dtype)
        key = getattr(getattr(kernel, "config", None), "weight_quant_key", None)
        weights = UNKNOWN
        if key is not None:
            weights = key_text(key, "channel")
        return Layer(name, weights, ran, class_name(kernel))
    ran = activations(module, method, kernel, scheme.activations, dtype)
    expected = scheme.activations or dtype
    return Layer(name, scheme.weights, ran, class_name(kernel), deviation(expected, ran))


def scheme_of(
    name: str, module: Any, method: Any, quant_config: Any, schemes: Declared
) -> Scheme | None:
    """Return the checkpoint's scheme for a layer.

    vLLM's own matching of layers to config groups has priority.
    """
    # Experts of compressed-tensors.
    if hasattr(method, "weight_quant") and hasattr(method, "input_quant"):
        return Scheme(args_text(method.weight_quant), args_text(method.input_quant))
    if hasattr(quant_config, "get_scheme_dict") and hasattr(module, "scheme"):
        args = quant_config.get_scheme_dict(module, getattr(module, "prefix", None))
        if not args:
            return None
        return Scheme(args_text(args["weights"]), args_text(args["input_activations"]))
    return schemes.of(name)


def kernel_of(module: Any, method: Any) -> Any:
    """Return the object whose class computes the product.

    This is the kernel, without one the scheme, without a scheme the method.
    """
    experts = experts_of(method)
    if experts is not None:
        return experts
    scheme = getattr(module, "scheme", None)
    for owner in (scheme, method):
        for name in KERNEL_ATTRIBUTES:
            kernel = getattr(owner, name, None)
            if kernel is not None:
                return kernel
    return scheme or method


def experts_of(method: Any) -> Any:
    """Return the object that computes experts, or its class before the weights are loaded.

    None for other layers.
    """
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    if experts is None:
        return getattr(method, "experts_cls", None)
    return experts


def class_name(thing: Any) -> str:
    """Return the name of a class, or of an object's class."""
    if isinstance(thing, type):
        return thing.__name__
    return type(thing).__name__


def activations(module: Any, method: Any, kernel: Any, expected: str, dtype: str) -> str:
    """Return the precision in which a kernel takes the activations.

    ``expected``: the checkpoint's; "" for the model's ``dtype``.
    """
    name = class_name(kernel)
    config = getattr(kernel, "config", None)
    if getattr(module, "use_w4a8", False):  # CPUs with AMX, unless VLLM_CPU_INT4_W4A8=0
        return "int8 token"
    if hasattr(kernel, "quant_config"):
        return activations_of_experts(kernel, dtype)
    input_type = getattr(kernel, "marlin_input_dtype", None)
    if not input_type:
        # Schemes that quantize activations in another place (W4A8 on Arm) have the model's dtype
        # here.
        input_type = getattr(config, "act_type", None)
    if type_name(input_type, dtype) != dtype:
        return type_name(input_type, dtype)
    uses_a16 = getattr(getattr(module, "scheme", None), "use_a16", False)
    if WEIGHT_ONLY.search(name) or uses_a16:
        return dtype
    if "Humming" in name:
        if expected:  # these kernels decide by the platform
            return UNKNOWN
        return dtype
    if config is not None and hasattr(config, "activation_quant_key"):
        return activations_of_key(kernel, config.activation_quant_key, dtype)
    if not expected:
        return dtype
    if QUANTIZES.search(name):
        return expected
    return UNKNOWN


def activations_of_key(kernel: Any, key: Any, dtype: str) -> str:
    """Return the precision that a kernel's QuantKey states.

    Without a ``key`` it is the model's ``dtype``.
    """
    precision = dtype
    if key is not None:
        precision = key_text(key, "token")
    # FlashInfer's kernel passes steps of 32 or more tokens to its fallback, DeepGEMM.
    for owner in (kernel, getattr(kernel, "fallback", None)):
        if getattr(owner, "use_deep_gemm_e8m0", False):
            return f"{precision} {POWERS_OF_TWO}"
    return precision


def activations_of_experts(kernel: Any, dtype: str) -> str:
    """Return the precision in which experts take their inputs.

    It may differ from their ``quant_config``: Marlin follows VLLM_MARLIN_INPUT_DTYPE, emulated
    MXFP8 does not round, and weight-only int4 experts compute in int8 on a CPU with AMX.
    """
    if type(kernel).__name__ == "CPUExpertsInt4":
        return "int8 token"
    quant_dtype = getattr(kernel, "quant_dtype", kernel.quant_config.quant_dtype)
    input_dtype = getattr(kernel, "input_dtype", None)
    name = type_name(input_dtype or quant_dtype, dtype)
    return SIZED.get(name, name)


def kv_caches(
    model: Any, expected: str, dtype: str, sizes: Mapping[str, CacheSize] | None = None
) -> Iterator[KVCache]:
    """Yield the cache of every attention layer of a vLLM model.

    ``expected``: the checkpoint's format (``schemes.kv_cache``).  ``sizes``: from ``kv_sizes``.
    "auto" is the model's ``dtype``.
    """
    attention_layers = attention_layers_of(model)
    # The sizes are unknown if other modules have a cache as well, such as the indexers of sparse
    # attention.
    if not sizes or not sizes.keys() <= attention_layers.keys():
        sizes = {}
    for name, module in attention_layers.items():
        cache_dtype = module.kv_cache_dtype
        stored = dtype
        if cache_dtype != "auto":
            stored = type_name(cache_format(cache_dtype), dtype)
        token_bytes, window = sizes.get(name, (None, None))
        if sizes and getattr(module, "kv_sharing_target_layer_name", None):
            token_bytes = 0.0
            window = None
        cache = KVCache(
            layers=name,
            count=1,
            stored=stored,
            scales=kv_scales(module, cache_dtype),
            attention=class_name(module.impl),
            prefill=unread_in_prefill(module.impl, cache_dtype),
            token_bytes=token_bytes,
            window=window,
            backend=backend_name(module),
        )
        yield kv_cache_as_asked(cache, expected, dtype)


def attention_layers_of(model: Any) -> dict[str, Any]:
    """Return name -> module of the layers that keep keys and values."""
    return {name: module for name, module in model.named_modules() if is_attention(module)}


def backend_name(module: Any) -> str:
    """Return vLLM's name of a layer's attention backend; "" if it is not known."""
    get_name = getattr(getattr(module, "attn_backend", None), "get_name", None)
    if not callable(get_name):
        return ""
    return str(get_name())


def mark_chosen_formats(caches: Sequence[KVCache], cache_dtype: str | None) -> tuple[KVCache, ...]:
    """Return the caches, marked if the spec's ``kv_cache_dtype`` names their format."""
    chosen = cache_format(cache_dtype or "auto")
    return tuple(replace(cache, named=cache.stored == chosen) for cache in caches)


def is_attention(module: Any) -> bool:
    """Return True if a module keeps keys and values.

    Other modules may only pass on ``kv_cache_dtype``.
    """
    return isinstance(getattr(module, "kv_cache_dtype", None), str) and hasattr(module, "impl")


def kv_sizes(specs: Mapping[str, Any], config: Any) -> dict[str, CacheSize]:
    """Return layer -> (bytes per token, number of tokens that are kept), as in ``KVCache``.

    ``specs``: a worker's ``get_kv_cache_spec()``, of its rank.
    """
    parallel = config.parallel_config
    # Tensor-parallel ranks keep the heads that they compute; with decode context parallelism they
    # share the tokens.
    ranks = parallel.tensor_parallel_size / parallel.decode_context_parallel_size
    is_bounded = not config.scheduler_config.disable_hybrid_kv_cache_manager
    sizes: dict[str, CacheSize] = {}
    for name, spec in specs.items():
        if not hasattr(spec, "num_kv_heads"):  # a state (Mamba's) does not count
            continue
        window = None
        if is_bounded:
            window = window_of(spec)
        sizes[name] = (spec.page_size_bytes / spec.block_size * ranks, window)
    return sizes


def window_of(spec: Any) -> int | None:
    """Return the number of tokens that a cache keeps; None: all."""
    window: int | None = None
    if "SlidingWindow" in class_name(spec):
        window = spec.sliding_window
    elif "ChunkedLocal" in class_name(spec):
        window = spec.attention_chunk_size
    return window


def unread_in_prefill(impl: Any, cache_dtype: str) -> str:
    """Return "" if attention reads a quantized cache in prefill, else a key of ``PREFILL_NOTES``.

    Latent attention (MLA) and the caches of ``UNQUANTIZED_FIRST`` read unquantized values first.
    vLLM's general attention writes keys and values to the cache and reads them there, except with
    decode context parallelism.  For ROCm, and for a model's own attention, it is unknown.
    """
    for base in type(impl).__mro__:
        if base.__name__ in LATENT_ATTENTION:
            return LATENT_ATTENTION[base.__name__]
    if cache_dtype.startswith(UNQUANTIZED_FIRST):
        return FIRST_STEP
    module = type(impl).__module__
    if not module.startswith(GENERAL_ATTENTION) or module.startswith(f"{GENERAL_ATTENTION}rocm"):
        return UNKNOWN
    if getattr(impl, "dcp_world_size", 1) != 1:
        return FIRST_STEP
    return ""


def check_causal(model: Any) -> None:
    """Raise RuntimeError if prompt tokens attend to later ones, which would then be "predicted"."""
    for name, module in model.named_modules():
        if class_name(module) in NOT_CAUSAL:
            raise RuntimeError(
                f"{name} ({class_name(module)}) lets prompt tokens see what follows; nothing to "
                "score"
            )


def check_caches(model: Any, cache_dtype: str, dtype: str) -> None:
    """Raise RuntimeError if layers misread their cache, or none keeps it in ``cache_dtype``.

    vLLM does not check what its attention for CPUs and XPUs can read (0.32: a KLD of 0.73 with int8
    on a CPU).  With TurboQuant, the first two and the last two layers keep caches in the model's
    dtype; a model may have no others.
    """
    # A cache in the model's dtype is the same as "auto".  It is not checked: vLLM's attention for
    # CPUs lists "auto" among the dtypes that it can read, but not bfloat16.
    if cache_dtype == dtype:
        return
    attention_layers = attention_layers_of(model)
    for name, module in attention_layers.items():
        can_read = getattr(getattr(module, "attn_backend", None), "supports_kv_cache_dtype", None)
        if module.kv_cache_dtype != cache_dtype or can_read is None:
            continue
        if not can_read(cache_dtype):
            raise RuntimeError(
                f"{name}: {class_name(module.impl)} cannot read a KV cache in {cache_dtype}"
            )
    unquantized = {"auto", *UNQUANTIZED_FORMATS}
    if not attention_layers or cache_dtype in unquantized:
        return
    if all(module.kv_cache_dtype in unquantized for module in attention_layers.values()):
        raise RuntimeError(
            f"no layer keeps its KV cache in {cache_dtype}: vLLM leaves that of all "
            f"{len(attention_layers)} unquantized"
        )


def cache_format(cache_dtype: str) -> str:
    """Return our name of a cache's number format from vLLM's name.

    "fp8_e4m3", "fp8_ds_mla" and similar are fp8.
    """
    for word in ("fp8_e5m2", "fp8", "nvfp4", "int8", "int4"):
        if cache_dtype.startswith(word):
            return word
    return cache_dtype


def kv_scales(module: Any, cache_dtype: str) -> str:
    """Return the origin of the scales of a layer's cache."""
    if OWN_SCALES.search(cache_dtype) or getattr(module, "calculate_kv_scales", False):
        return DYNAMIC
    for name in ("_k_scale", "_v_scale"):
        scale = getattr(module, name, None)
        if scale is not None and bool((scale != 1.0).any()):
            return LOADED
    return UNIT_SCALES


def type_name(number_type: Any, dtype: str) -> str:
    """Return our name of a type that vLLM gives as a torch dtype, a word, or None (``dtype``)."""
    name = dtype
    if number_type is not None:
        name = dtype_name(number_type)
    return SHORT_NAMES.get(name, name)


def key_text(key: Any, line: str) -> str:
    """Return a vLLM QuantKey in the words of ``backends/layers/schemes.py``.

    ``line``: word for one scale per row or column.  Group shapes: (-1, -1) is one scale per tensor;
    (1, -1) and (-1, 1) one per line; (1, n) one per n values of a row; (n, m) one per tile.
    """
    rows, columns = key.scale.group_shape
    name = type_name(key.dtype, UNKNOWN)
    if rows < 0 and columns == rows:
        return f"{name} tensor"
    if rows < 0 or columns < 0:
        return f"{name} {line}"
    if rows == 1:
        grouped = GROUPED.get((name, columns), name)
        return f"{grouped} g{columns}"
    return f"{name} block {rows}x{columns}"
