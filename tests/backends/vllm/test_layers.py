"""The activations that kernels compute with, in stand-ins with the attributes of vLLM's kernels,
and in a real vLLM.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare_q.backends.layers.groups import FIRST_STEP, SPARSE
from compare_q.backends.layers.schemes import Scheme
from compare_q.backends.vllm import loaded_layers

BF16 = "bfloat16"
NVFP4 = Scheme("nvfp4 g16", "nvfp4 g16")
MXFP4 = Scheme("mxfp4 g32", "mxfp4 g32")
BLOCKS = Scheme("fp8 block 128x128", "fp8 g128")
ROUNDED = Scheme("fp8 block 128x128", "fp8 g128 e8m0")
FP8 = Scheme("fp8 channel", "fp8 token")
INT8 = Scheme("int8 channel", "int8 token")
INT4 = Scheme("int4 g128")
Shape = namedtuple("Shape", "row col")


def named(name: str, **attributes: Any) -> Any:
    """An object of a class of this name."""
    return type(name, (SimpleNamespace,), {})(**attributes)


def ran(kernel: Any, scheme: Scheme | None, **module: Any) -> tuple[str, str, str]:
    """(activations, kernel, asked) of a layer whose scheme holds the kernel."""
    holder = SimpleNamespace(kernel=kernel, use_a16=module.get("use_a16", False))
    layer = loaded_layers.layer(
        "x", SimpleNamespace(scheme=holder, **module), named("LinearMethod"), scheme, BF16
    )
    return layer.activations, layer.kernel, layer.asked


def fp8(name: str, row: int, col: int, **attributes: Any) -> Any:
    """A kernel whose config names FP8 activations with one scale per group of this shape."""
    scale = SimpleNamespace(group_shape=Shape(row, col))
    key = SimpleNamespace(dtype="torch.float8_e4m3fn", scale=scale)
    return named(name, config=SimpleNamespace(activation_quant_key=key), **attributes)


def mixed(name: str, act_type: str) -> Any:
    """A kernel of mixed precision, whose config names the type of its activations."""
    return named(name, config=SimpleNamespace(act_type=f"torch.{act_type}"))


def fp4(group: int) -> Any:
    """vLLM's key of FP4 activations: two values per byte, and one scale per group."""
    scale = SimpleNamespace(group_shape=Shape(1, group))
    return SimpleNamespace(activation_quant_key=SimpleNamespace(dtype="torch.uint8", scale=scale))


NO_KEY = SimpleNamespace(activation_quant_key=None)


@pytest.mark.parametrize(
    ("kernel", "scheme", "module", "activations", "expected"),
    [
        # Marlin is weight-only, even if the checkpoint requests quantized activations, or its FP8
        # config names them.
        (named("MarlinNvFp4LinearKernel"), NVFP4, {}, BF16, "nvfp4 g16"),
        (fp8("MarlinFP8ScaledMMLinearKernel", 1, -1), FP8, {}, BF16, "fp8 token"),
        (named("EmulationNvFp4LinearKernel"), NVFP4, {}, "nvfp4 g16", ""),
        (named("CutlassNvFp4LinearKernel"), NVFP4, {"use_a16": True}, BF16, "nvfp4 g16"),
        (named("FlashInferCuteDslNvFp4W4A16LinearKernel"), NVFP4, {}, BF16, "nvfp4 g16"),
        (named("HummingNvFp4LinearKernel"), NVFP4, {}, "unknown", "nvfp4 g16"),
        (fp8("CutlassFP8ScaledMMLinearKernel", 1, -1), FP8, {}, "fp8 token", ""),
        (fp8("DeepGemmFp8BlockScaledMMKernel", 1, 128), FP8, {}, "fp8 g128", ""),
        # VLLM_USE_DEEP_GEMM_E8M0, which is on unless it is set to 0, rounds scales up to powers of
        # two.
        (
            fp8("DeepGemmFp8BlockScaledMMKernel", 1, 128, use_deep_gemm_e8m0=True),
            BLOCKS,
            {},
            "fp8 g128 e8m0",
            "fp8 g128",
        ),
        (
            fp8(
                "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
                1,
                128,
                fallback=named("x", use_deep_gemm_e8m0=True),
            ),
            BLOCKS,
            {},
            "fp8 g128 e8m0",
            "fp8 g128",
        ),
        (fp8("CutlassFp8BlockScaledMMKernel", 1, 128), ROUNDED, {}, "fp8 g128", ""),
        (fp8("CPUFp8PerTensorScaledMMLinearKernel", 1, -1), FP8, {}, BF16, "fp8 token"),
        (named("CPUInt8ScaledMMLinearKernel"), INT8, {}, "int8 token", ""),
        (mixed("MacheteLinearKernel", "bfloat16"), INT4, {}, BF16, ""),
        # VLLM_MARLIN_INPUT_DTYPE, and CPUs with AMX, quantize activations that are unquantized in
        # the checkpoint.
        (mixed("MarlinLinearKernel", "int8"), INT4, {}, "int8", BF16),
        (mixed("CPUWNA16LinearKernel", "bfloat16"), INT4, {"use_w4a8": True}, "int8 token", BF16),
        # If a scheme quantizes activations outside of the kernel, the kernel's config still names
        # the model's dtype.
        (mixed("Dynamic4bitLinearKernel", "bfloat16"), INT8, {}, "unknown", "int8 token"),
        (named("NeverSeen"), FP8, {}, "unknown", "fp8 token"),
        # The requested activations are unknown, so that no deviation is reported; the kernel's own
        # are still read.
        (named("NeverSeen"), None, {}, "unknown", ""),
        (fp8("CutlassFP8ScaledMMLinearKernel", 1, -1), None, {}, "fp8 token", ""),
        (named("EmulationMxfp4LinearKernel", config=NO_KEY), MXFP4, {}, BF16, "mxfp4 g32"),
        (named("EmulationMxfp4LinearKernel", config=fp4(32)), MXFP4, {}, "mxfp4 g32", ""),
        (
            named("TritonExperts", quant_config=SimpleNamespace(quant_dtype=None)),
            NVFP4,
            {},
            BF16,
            "nvfp4 g16",
        ),
        # Emulated MXFP8 experts dequantize their weights; their property quant_dtype shows that
        # they round nothing.
        (
            named(
                "Mxfp8EmulationTritonExperts",
                quant_config=SimpleNamespace(quant_dtype="mxfp8"),
                quant_dtype=None,
            ),
            Scheme("mxfp8 g32", "mxfp8 g32"),
            {},
            BF16,
            "mxfp8 g32",
        ),
        (
            named(
                "MarlinExperts",
                quant_config=SimpleNamespace(quant_dtype=None),
                input_dtype="torch.int8",
            ),
            INT4,
            {},
            "int8",
            BF16,
        ),
        (
            named("CPUExpertsInt4", quant_config=SimpleNamespace(quant_dtype=None)),
            INT4,
            {},
            "int8 token",
            BF16,
        ),
        # vLLM runs all MXFP4 layers of compressed-tensors as W4A4, even weight-only ones.
        (
            named("FlashInferMxFp4LinearKernel", config=fp4(32)),
            Scheme("mxfp4 g32"),
            {},
            "mxfp4 g32",
            BF16,
        ),
    ],
)
def test_activations(
    kernel: Any, scheme: Scheme | None, module: dict[str, Any], activations: str, expected: str
) -> None:
    assert ran(kernel, scheme, **module) == (activations, type(kernel).__name__, expected)


@pytest.mark.parametrize(
    ("shape", "weights"),
    [
        ((-1, -1), "fp8 tensor"),
        ((-1, 1), "fp8 channel"),
        ((1, -1), "fp8 channel"),
        ((128, 64), "fp8 block 128x64"),
        ((1, 32), "mxfp8 g32"),
    ],
)
def test_weights_quantized_while_loading_are_named_by_the_kernel(
    shape: tuple[int, int], weights: str
) -> None:
    """FP8 by an option such as ``quantization: fp8_per_channel``, not by the checkpoint."""
    kernel = fp8("CutlassFP8ScaledMMLinearKernel", 1, -1)
    kernel.config.weight_quant_key = SimpleNamespace(
        dtype="torch.float8_e4m3fn", scale=SimpleNamespace(group_shape=Shape(*shape))
    )
    module = SimpleNamespace()
    layer = loaded_layers.layer(
        "x", module, named("Fp8PtpcOnlineLinearMethod", fp8_linear=kernel), None, BF16
    )
    assert (layer.weights, layer.activations, layer.asked) == (weights, "fp8 token", "")
    layer = loaded_layers.layer("x", module, named("LinearMethod", fp8_linear=kernel), FP8, BF16)
    assert layer.weights == "fp8 channel"


@pytest.mark.parametrize(
    ("cache_dtype", "scales", "expected", "gold"),
    [
        ("auto", (1.0, 1.0), "", (BF16, "", "")),
        ("auto", (1.0, 1.0), "fp8 tensor", (BF16, "", "fp8")),
        ("fp8", (1.0, 1.0), "fp8 tensor", ("fp8", "1.0", "")),
        ("fp8_e4m3", (1.0, 0.07), "fp8 tensor", ("fp8", "loaded", "")),
        ("fp8_ds_mla", (1.0, 1.0), "", ("fp8", "dynamic", BF16)),
        ("turboquant_k8v4", (1.0, 1.0), "", ("turboquant_k8v4", "dynamic", BF16)),
        ("fp8_e5m2", (1.0, 1.0), "fp8 tensor", ("fp8_e5m2", "1.0", "fp8")),
        ("int8_per_token_head", (1.0, 1.0), "", ("int8", "dynamic", BF16)),
    ],
)
def test_kv_caches(
    cache_dtype: str, scales: tuple[float, float], expected: str, gold: tuple[str, str, str]
) -> None:
    """Only attention layers count: other modules may only pass on a ``kv_cache_dtype``."""
    k_scale, v_scale = map(torch.tensor, scales)
    attention = SimpleNamespace(
        kv_cache_dtype=cache_dtype, impl=object(), _k_scale=k_scale, _v_scale=v_scale
    )
    modules = [
        ("attn", attention),
        ("model", SimpleNamespace(kv_cache_dtype=cache_dtype)),
        ("norm", SimpleNamespace()),
    ]
    model = SimpleNamespace(named_modules=lambda: modules)
    (cache,) = loaded_layers.kv_caches(model, expected, BF16)
    assert (cache.layers, cache.stored, cache.scales, cache.asked) == ("attn", *gold)


PARALLEL = {"tensor_parallel_size": 1, "decode_context_parallel_size": 1}


def vllm_config(hybrid: bool = True, **parallel: int) -> Any:
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**PARALLEL, **parallel}), scheduler_config=scheduler
    )


@pytest.mark.engine
def test_sizes_of_caches_by_hand() -> None:
    """Bytes per token in one layer, from the cache specs of the installed vLLM."""
    from vllm.v1 import kv_cache_interface as vllm

    eight = {"block_size": 16, "num_kv_heads": 8, "head_size": 128}
    specs = {
        "bf16": vllm.FullAttentionSpec(**eight, dtype=torch.bfloat16),
        "fp8": vllm.FullAttentionSpec(**eight, dtype=torch.uint8),
        "mla": vllm.MLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=512 + 64, dtype=torch.bfloat16
        ),
        "sliding": vllm.SlidingWindowSpec(**eight, dtype=torch.bfloat16, sliding_window=1024),
        "mamba": vllm.MambaSpec(block_size=4096, shapes=((16, 128),), dtypes=(torch.float32,)),
    }
    two_bytes = 8 * (128 + 128) * 2
    gold = {"bf16": (two_bytes, None), "fp8": (two_bytes / 2, None), "mla": (576 * 2, None)}
    assert loaded_layers.kv_sizes(specs, vllm_config()) == {**gold, "sliding": (two_bytes, 1024)}
    # Without the hybrid manager, layers with a sliding window keep all tokens.
    assert loaded_layers.kv_sizes(specs, vllm_config(hybrid=False)) == {
        **gold,
        "sliding": (two_bytes, None),
    }
    # A spec describes one rank: four ranks have four times as much, or twice as much if two ranks
    # split the tokens.
    for shared, times in (1, 4), (2, 2):
        config = vllm_config(tensor_parallel_size=4, decode_context_parallel_size=shared)
        assert loaded_layers.kv_sizes(specs, config)["bf16"] == (times * two_bytes, None)


@pytest.mark.parametrize(
    ("words", "cache_dtype", "message"),
    [
        (("fp8", "fp8"), "fp8", ""),
        # vLLM does not quantize the first layer's cache.
        (("auto", "fp8"), "fp8", ""),
        (("auto", "auto"), "auto", ""),
        (
            ("auto", "int8_per_token_head"),
            "int8_per_token_head",
            r"^1: CPUAttentionBackendImpl cannot read a KV cache in int8_per_token_head$",
        ),
        (
            ("auto", "auto"),
            "turboquant_k8v4",
            "^no layer keeps its KV cache in turboquant_k8v4: vLLM leaves that of all 2 "
            "unquantized$",
        ),
        # The same as "auto".
        (("bfloat16", "bfloat16"), "bfloat16", ""),
        (
            ("float16", "float16"),
            "float16",
            "^0: CPUAttentionBackendImpl cannot read a KV cache in float16$",
        ),
        # No layer has a cache.
        ((), "fp8", ""),
    ],
)
def test_caches_that_would_be_misread(words: Sequence[str], cache_dtype: str, message: str) -> None:
    backend = SimpleNamespace(supports_kv_cache_dtype=lambda word: word in ("auto", "fp8"))
    attention = {"impl": named("CPUAttentionBackendImpl"), "attn_backend": backend}
    modules = [
        (str(number), SimpleNamespace(kv_cache_dtype=word, **attention))
        for number, word in enumerate(words)
    ]
    model = SimpleNamespace(named_modules=lambda: modules)
    with pytest.raises(RuntimeError, match=message) if message else nullcontext():
        loaded_layers.check_caches(model, cache_dtype, "bfloat16")


BACKENDS = "vllm.v1.attention.backends"


def impl(module: str, *classes: str, **attributes: Any) -> Any:
    """Return an object of the first class, which is defined in a module.

    Each class derives from the next one.
    """
    impl_class: type = SimpleNamespace
    for name in reversed(classes):
        impl_class = type(name, (impl_class,), {"__module__": module})
    return impl_class(**attributes)


@pytest.mark.parametrize(
    ("attention", "cache_dtype", "gold"),
    [
        (impl(f"{BACKENDS}.flash_attn", "FlashAttentionImpl", dcp_world_size=1), "fp8", ""),
        (impl(f"{BACKENDS}.cpu_attn", "CPUAttentionBackendImpl"), "fp8", ""),
        # With decode context parallelism, a step's own keys and values are used unquantized.
        (impl(f"{BACKENDS}.flash_attn", "FlashAttentionImpl", dcp_world_size=2), "fp8", FIRST_STEP),
        (
            impl(f"{BACKENDS}.turboquant_attn", "TurboQuantAttentionImpl"),
            "turboquant_k8v4",
            FIRST_STEP,
        ),
        (
            impl(f"{BACKENDS}.mla.flashmla", "FlashMLAImpl", "MLACommonImpl", "MLACommonBaseImpl"),
            "fp8",
            FIRST_STEP,
        ),
        (
            impl(f"{BACKENDS}.mla.flashmla_sparse", "FlashMLASparseImpl", "SparseMLACommonImpl"),
            "fp8_ds_mla",
            SPARSE,
        ),
        (impl("vllm.models.new.attention", "NewImpl", "FlashAttentionImpl"), "fp8", "unknown"),
        (impl(f"{BACKENDS}.rocm_attn", "RocmAttentionImpl"), "fp8", "unknown"),
    ],
)
def test_which_attention_reads_the_cache_in_prefill(
    attention: Any, cache_dtype: str, gold: str
) -> None:
    assert loaded_layers.unread_in_prefill(attention, cache_dtype) == gold
