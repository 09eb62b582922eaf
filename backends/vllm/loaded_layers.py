"""Kernels and KV caches of a loaded model: the kernel that vLLM chose for each layer, and the
precision of activations.

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
    ONE,
    PLAIN,
    SPARSE,
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
"""Classes whose kernels take activations in the model's dtype, even if the checkpoint states
another precision."""
QUANTIZES = re.compile(
    r"NvFp4LinearKernel$|Int8ScaledMMLinearKernel$|NvFp4EmulationExperts$|^Nvfp4QuantizationEmulation|^TrtLlmNvFp4"
    r"|^(Cutlass|DeepGemm|Triton|TritonOrCutlass|TritonOrDeepGemm)Experts(Fp4|Fp8)?$"
)
"""Classes without a config, such as experts before loading, whose kernels quantize activations as
the checkpoint states."""
GROUPED = {("uint8", 16): "nvfp4", ("uint8", 32): "mxfp4", ("fp8", 32): "mxfp8"}
"""(type of a QuantKey, size of its groups) -> format; vLLM's type of FP4 is the byte that holds two
values."""
GENERAL_ATTENTION = "vllm.v1.attention.backends."
"""Modules of the attention that vLLM uses for many models; a model's own attention is elsewhere."""
UNREAD_IN_PREFILL = ("turboquant", "ultraquant", "octave")
"""Beginnings of vLLM's names of caches whose attention computes a window's first step from
unquantized values."""
LATENT = {"MLACommonImpl": FIRST_STEP, "SparseMLACommonImpl": SPARSE}
"""Base classes of multi-head latent attention, dense and sparse, whose ``forward_mha`` is prefill.
"""
NOT_CAUSAL = {"PrefillPrefixLMAttention", "EncoderOnlyAttention"}
"""Attention of prefix language models (HRM-Text), and of models whose config has ``is_causal``
false."""
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
    stated = declared(checkpoint)
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        bases = {base.__name__ for base in type(method).__mro__}
        is_head = type(module).__name__ == "ParallelLMHead"
        if is_head or {"LinearMethodBase", "FusedMoEMethodBase"} & bases:
            yield layer(
                name, module, method, scheme_of(name, module, method, quant_config, stated), dtype
            )


def layer(name: str, module: Any, method: Any, scheme: Scheme | None, dtype: str) -> Layer:
    """Return one layer; ``scheme``: the checkpoint's scheme for it, None if unknown."""
    if type(method).__name__.startswith("Unquantized"):
        return Layer(name, dtype, dtype, class_name(experts_of(method) or method))
    kernel = kernel_of(module, method)
    asked = scheme.activations if scheme else UNKNOWN
    ran = activations(module, method, kernel, asked, dtype)
    if (
        scheme is None
    ):  # quantized while loading, or by an unknown method: no scheme to deviate from
        key = getattr(getattr(kernel, "config", None), "weight_quant_key", None)
        return Layer(
            name, UNKNOWN if key is None else key_text(key, "channel"), ran, class_name(kernel)
        )
    return Layer(name, scheme.weights, ran, class_name(kernel), deviation(asked or dtype, ran))


def scheme_of(
    name: str, module: Any, method: Any, quant_config: Any, stated: Declared
) -> Scheme | None:
    """Return the checkpoint's scheme for a layer; vLLM's own matching of layers to config groups
    has priority.
    """
    if hasattr(method, "weight_quant") and hasattr(
        method, "input_quant"
    ):  # experts of compressed-tensors
        return Scheme(args_text(method.weight_quant), args_text(method.input_quant))
    if hasattr(quant_config, "get_scheme_dict") and hasattr(module, "scheme"):
        schemes = quant_config.get_scheme_dict(module, getattr(module, "prefix", None))
        return (
            Scheme(args_text(schemes["weights"]), args_text(schemes["input_activations"]))
            if schemes
            else None
        )
    return stated.of(name)


def kernel_of(module: Any, method: Any) -> Any:
    """Return the object whose class computes the product: the kernel, else the scheme, else the
    method.
    """
    scheme = getattr(module, "scheme", None)
    held = (getattr(owner, name, None) for owner in (scheme, method) for name in KERNEL_ATTRIBUTES)
    return next(
        (each for each in (experts_of(method), *held) if each is not None), scheme or method
    )


def experts_of(method: Any) -> Any:
    """Return the object that computes experts, or its class before the weights are loaded; None for
    other layers.
    """
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return experts if experts is not None else getattr(method, "experts_cls", None)


def class_name(thing: Any) -> str:
    """Return the name of a class, or of an object's class."""
    return thing.__name__ if isinstance(thing, type) else type(thing).__name__


def activations(module: Any, method: Any, kernel: Any, asked: str, dtype: str) -> str:
    """Return the precision in which a kernel takes the activations."""
    name, config = class_name(kernel), getattr(kernel, "config", None)
    if getattr(module, "use_w4a8", False):  # CPUs with AMX, unless VLLM_CPU_INT4_W4A8=0
        return "int8 token"
    if hasattr(kernel, "quant_config"):
        return activations_of_experts(kernel, dtype)
    # Schemes that quantize activations in another place (W4A8 on Arm) have the model's dtype in
    # act_type.
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
        # FlashInfer's kernel passes steps of 32 or more tokens to its fallback, DeepGEMM.
        parts = (kernel, getattr(kernel, "fallback", None))
        rounds = any(getattr(owner, "use_deep_gemm_e8m0", False) for owner in parts)
        return f"{words} {POWERS_OF_TWO}" if rounds else words
    if not asked:
        return dtype
    return asked if QUANTIZES.search(name) else UNKNOWN


def activations_of_experts(kernel: Any, dtype: str) -> str:
    """Return the precision in which experts take their inputs, which may differ from their
    ``quant_config``.

    Marlin follows VLLM_MARLIN_INPUT_DTYPE, emulated MXFP8 does not round, and weight-only int4
    experts compute in int8 on a CPU with AMX.
    """
    if type(kernel).__name__ == "CPUExpertsInt4":
        return "int8 token"
    taken = getattr(kernel, "quant_dtype", kernel.quant_config.quant_dtype)
    name = type_name(getattr(kernel, "input_dtype", None) or taken, dtype)
    return SIZED.get(name, name)


def kv_caches(
    model: Any, asked: str, dtype: str, sizes: Mapping[str, CacheSize] | None = None
) -> Iterator[KVCache]:
    """Yield the cache of every attention layer of a vLLM model.

    ``asked``: the checkpoint's format (``schemes.kv_cache``).  ``sizes``: from ``kv_sizes``;
    unknown if other modules have a cache as well, such as the indexers of sparse attention.  "auto"
    is the model's ``dtype``.
    """
    found = {name: module for name, module in model.named_modules() if is_attention(module)}
    known = sizes if sizes and sizes.keys() <= found.keys() else {}
    for name, module in found.items():
        told = module.kv_cache_dtype
        stored = dtype if told == "auto" else type_name(cache_format(told), dtype)
        attention, scales, read = (
            class_name(module.impl),
            kv_scales(module, told),
            prefill(module.impl, told),
        )
        shares = known and getattr(module, "kv_sharing_target_layer_name", None)
        token_bytes, window = (0.0, None) if shares else known.get(name, (None, None))
        cache = KVCache(
            name,
            1,
            stored,
            scales,
            "",
            attention,
            read,
            token_bytes,
            window,
            backend=backend_name(module),
        )
        yield kv_cache_as_asked(cache, asked, dtype)


def backend_name(module: Any) -> str:
    """Return vLLM's name of a layer's attention backend; "" if it is not known."""
    get_name = getattr(getattr(module, "attn_backend", None), "get_name", None)
    return str(get_name()) if callable(get_name) else ""


def mark_chosen_formats(groups: Sequence[KVCache], told: str | None) -> tuple[KVCache, ...]:
    """Return the caches, marked if the spec's ``kv_cache_dtype`` (``told``) names their format."""
    return tuple(
        replace(group, named=group.stored == cache_format(told or "auto")) for group in groups
    )


def is_attention(module: Any) -> bool:
    """Return True if a module keeps keys and values; other modules may only pass on
    ``kv_cache_dtype``.
    """
    return isinstance(getattr(module, "kv_cache_dtype", None), str) and hasattr(module, "impl")


def kv_sizes(specs: Mapping[str, Any], config: Any) -> dict[str, CacheSize]:
    """Return layer -> (bytes per token, number of tokens that are kept) of its cache, as in
    ``KVCache``.

    ``specs``: a worker's ``get_kv_cache_spec()``, of its rank.  Tensor-parallel ranks keep the
    heads that they compute; with decode context parallelism they share the tokens.  A state
    (Mamba's) does not count.
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
        for name, spec in specs.items()
        if hasattr(spec, "num_kv_heads")
    }


def prefill(impl: Any, told: str) -> str:
    """Return "" if attention reads a quantized cache in prefill, else a key of ``PREFILL_NOTES``.

    ``told``: vLLM's name of the cache's format.  vLLM's general attention writes keys and values to
    the cache and reads them there, except with decode context parallelism.  For ROCm, and for a
    model's own attention, it is unknown.
    """
    for base in type(impl).__mro__:
        if base.__name__ in LATENT:
            return LATENT[base.__name__]
    if told.startswith(UNREAD_IN_PREFILL):
        return FIRST_STEP
    module = type(impl).__module__
    if not module.startswith(GENERAL_ATTENTION) or module.startswith(f"{GENERAL_ATTENTION}rocm"):
        return UNKNOWN
    return "" if getattr(impl, "dcp_world_size", 1) == 1 else FIRST_STEP


def check_causal(model: Any) -> None:
    """Raise RuntimeError if prompt tokens attend to later ones, which would then be "predicted"."""
    for name, module in model.named_modules():
        if class_name(module) in NOT_CAUSAL:
            raise RuntimeError(
                f"{name} ({class_name(module)}) lets prompt tokens see what follows; nothing to score"
            )


def check_caches(model: Any, told: str, dtype: str) -> None:
    """Raise RuntimeError if layers misread their cache, or no layer keeps it in the format ``told``
    (vLLM's name).

    vLLM does not check what its attention for CPUs and XPUs can read (0.32: a KLD of 0.73 with int8
    on a CPU).  With TurboQuant, the first two and the last two layers keep caches in the model's
    dtype; a model may have no others.  A cache in the model's ``dtype`` is "auto", although vLLM's
    attention for CPUs does not list bfloat16.
    """
    if told == dtype:
        return
    caches = {name: module for name, module in model.named_modules() if is_attention(module)}
    for name, module in caches.items():
        can_read = getattr(getattr(module, "attn_backend", None), "supports_kv_cache_dtype", None)
        if module.kv_cache_dtype == told and can_read is not None and not can_read(told):
            raise RuntimeError(
                f"{name}: {class_name(module.impl)} cannot read a KV cache in {told}"
            )
    plain = {"auto", *PLAIN}
    if (
        caches
        and told not in plain
        and all(module.kv_cache_dtype in plain for module in caches.values())
    ):
        raise RuntimeError(
            f"no layer keeps its KV cache in {told}: vLLM leaves that of all {len(caches)} unquantized"
        )


def cache_format(told: str) -> str:
    """Return our name of a cache's number format from vLLM's name: "fp8_e4m3", "fp8_ds_mla" and
    similar are fp8.
    """
    for word in ("fp8_e5m2", "fp8", "nvfp4", "int8", "int4"):
        if told.startswith(word):
            return word
    return told


def kv_scales(module: Any, told: str) -> str:
    """Return the origin of the scales of a layer's cache."""
    if OWN_SCALES.search(told) or getattr(module, "calculate_kv_scales", False):
        return DYNAMIC
    scales = [getattr(module, f"_{letter}_scale", None) for letter in "kv"]
    return (
        LOADED if any(bool((scale != 1.0).any()) for scale in scales if scale is not None) else ONE
    )


def type_name(taken: Any, dtype: str) -> str:
    """Return our name of a type that vLLM gives as a torch dtype, a word, or None (``dtype``)."""
    name = dtype if taken is None else dtype_name(taken)
    return SHORT_NAMES.get(name, name)


def key_text(key: Any, line: str) -> str:
    """Return a vLLM QuantKey in the words of ``backends/layers/schemes.py``.

    ``line``: word for one scale per row or column.  Group shapes: (-1, -1) is one scale per tensor;
    (1, -1) and (-1, 1) one per line; (1, n) one per n values of a row; (n, m) one per tile.
    """
    rows, columns = key.scale.group_shape
    name = type_name(key.dtype, UNKNOWN)
    if rows < 0 or columns < 0:
        return f"{name} {'tensor' if rows == columns else line}"
    return (
        f"{GROUPED.get((name, columns), name)} g{columns}"
        if rows == 1
        else f"{name} block {rows}x{columns}"
    )
