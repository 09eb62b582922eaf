"""Groups of layers and of KV caches, deviations and fused layers, compared with lists by hand."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from compare_q.backends.base import Layer
from compare_q.backends.layers import groups as layers
from compare_q.backends.layers.groups import (
    DYNAMIC,
    FIRST_STEP,
    LOADED,
    SPARSE,
    UNIT_SCALES,
    KVCache,
)
from compare_q.backends.layers.module_names import FUSED_LAYERS


def test_layers_that_differ_in_their_numbers_only_are_one_group() -> None:
    groups = layers.group_layers(
        [
            Layer("model.layers.0.mlp.up", "int4 g128", "bfloat16", "A"),
            Layer("lm_head", "bfloat16", "bfloat16", "B"),
            Layer("model.layers.11.mlp.up", "int4 g128", "bfloat16", "A"),
            # A digit at the end of a name does not number a layer.
            Layer("model.layers.2.mlp.experts.7.up2", "int4 g128", "bfloat16", "A"),
            Layer("model.layers.3.mlp.up", "int8 g128", "bfloat16", "A"),
        ]
    )
    assert groups == (
        Layer("model.layers.*.mlp.up", "int4 g128", "bfloat16", "A", count=2),
        Layer("lm_head", "bfloat16", "bfloat16", "B"),
        Layer("model.layers.*.mlp.experts.*.up2", "int4 g128", "bfloat16", "A"),
        Layer("model.layers.*.mlp.up", "int8 g128", "bfloat16", "A"),
    )


def quantized(count: int, kernel: str, asked: str = "", activations: str = "bfloat16") -> Layer:
    return Layer("x", "int4 g128", activations, kernel, asked, count=count)


EXPERTS = Layer("h.*.mlp.experts.routed_experts", "int4 g128", "bfloat16", "MarlinExperts", count=2)
PLAIN = Layer("h", "bfloat16", "bfloat16", "UnquantizedLinearMethod", count=99)


@pytest.mark.parametrize(
    ("groups", "kernel"),
    [
        ([], ""),
        ([PLAIN], "Unquantized"),
        ([PLAIN, quantized(1, "MarlinLinearKernel")], "Marlin"),
        (
            [quantized(1, "EmulationNvFp4LinearKernel", activations="int4 g128"), PLAIN],
            "EmulationNvFp4",
        ),
        ([quantized(3, "A"), quantized(2, "B"), quantized(2, "B"), PLAIN], "B +1"),
        ([quantized(4, "A"), replace(EXPERTS, count=2), PLAIN], "MarlinExperts +1"),
        ([quantized(4, "A"), replace(EXPERTS, weights="bfloat16")], "A"),
    ],
)
def test_a_row_names_the_kernel_of_most_quantized_layers(groups: list[Layer], kernel: str) -> None:
    assert layers.kernel_of(groups) == kernel


BF16 = "bfloat16"
EIGHT = KVCache("layers.*.attn", 2, "fp8", UNIT_SCALES, BF16, "FlashInferImpl", "")
SIXTEEN = KVCache("layers.*.attn", 30, BF16, "", "fp8", "FlashInferImpl", "")


def test_groups_of_caches_and_what_is_said_of_them() -> None:
    caches = []
    # Layers 3 and 4 are in fp8, the other 30 in bfloat16.
    for number in range(3, 35):
        cache = SIXTEEN
        if number < 5:
            cache = EIGHT
        caches.append(replace(cache, layers=f"layers.{number}.attn", count=1))
    groups = layers.group_kv_caches(caches)
    assert groups == (EIGHT, SIXTEEN)
    assert layers.kv_formats(groups) == "bfloat16 +fp8"
    assert layers.kv_formats(()) == ""
    assert layers.kv_deviations(groups) == [
        "the checkpoint asks for a KV cache in bfloat16, but keys and values were kept in fp8 "
        "(2 layers)",
        "the checkpoint asks for a KV cache in fp8, but keys and values were kept in bfloat16 "
        "(30 layers)",
    ]
    scales = "KV cache in fp8 with scales of 1.0 (2 layers): the checkpoint brings no others"
    assert layers.kv_notes(groups, "fp8") == [scales]
    named = replace(EIGHT, named=True, prefill=FIRST_STEP)
    assert layers.kv_notes([named], "fp8") == [
        "KV cache in fp8, as the spec asks (2 layers); the checkpoint asks for bfloat16",
        scales,
    ]
    assert layers.kv_deviations([named]) == layers.kv_deviations([replace(named, asked="")])
    assert len(layers.kv_deviations([named])) == 1
    assert layers.kv_notes([KVCache("x", 1, "fp8", LOADED, "")], "fp8") == []
    assert layers.kv_notes([], "auto") == layers.kv_notes([], BF16) == []
    packed = KVCache("x", 12, "turboquant_k8v4", DYNAMIC, BF16, named=True)
    assert layers.kv_notes([packed, KVCache("y", 4, BF16)], "turboquant_k8v4") == [
        "KV cache in turboquant_k8v4, as the spec asks (12 layers); the checkpoint asks for "
        "bfloat16",
        "4 of 16 layers keep their KV cache in bfloat16, not in turboquant_k8v4",
    ]
    for cache_dtype in (BF16, "auto"):
        assert layers.kv_notes([KVCache("y", 4, BF16)], cache_dtype) == []
    assert layers.kv_notes([], "fp8_ds_mla") == [
        "KV cache in fp8_ds_mla: how this model's layers keep it, and whether prefill reads it, "
        "is not known"
    ]


@pytest.mark.parametrize(
    ("attention", "prefill", "clause"),
    [
        (
            "TurboQuantAttentionImpl",
            FIRST_STEP,
            "TurboQuantAttentionImpl computes the first step of a window from unquantized keys "
            "and values, and only later steps read the KV cache in fp8 (32 layers)",
        ),
        (
            "FlashMLASparseImpl",
            SPARSE,
            "FlashMLASparseImpl may compute windows of up to index_topk tokens from unquantized "
            "keys and values, and only longer ones read the KV cache in fp8 (32 layers)",
        ),
        (
            "NewImpl",
            "unknown",
            "whether prefill in NewImpl reads the KV cache in fp8 is not known (32 layers)",
        ),
        (
            "NewImpl",
            "newer",
            "whether prefill in NewImpl reads the KV cache in fp8 is not known (32 layers)",
        ),
    ],
)
def test_quantized_caches_that_prefill_does_not_read(
    attention: str, prefill: str, clause: str
) -> None:
    quantized = KVCache("x", 32, "fp8", DYNAMIC, "", attention, prefill)
    assert layers.kv_deviations([quantized]) == [clause]
    assert layers.kv_deviations([KVCache("x", 32, BF16, "", "", attention, prefill)]) == []


def test_sizes_of_a_models_caches() -> None:
    """Gemma 3 1B has 26 layers of one head of 256 numbers.

    Every sixth layer sees all tokens, the others see the last 512.
    """
    # A key and a value of 256 numbers, each of two bytes: 1,024 bytes per token and layer.
    full = replace(SIXTEEN, count=4, token_bytes=2 * 256 * 2.0)
    sliding = replace(full, count=22, window=512)
    assert layers.kv_token_bytes([full, sliding]) == 26 * 1024
    assert layers.kv_windows([full, sliding]) == "22 of 26 layers hold the last 512 tokens"
    assert layers.kv_windows([full]) == ""
    assert layers.kv_token_bytes([full, SIXTEEN]) is None
    assert layers.kv_token_bytes([]) is None


NOT_LANGUAGE = {
    ("fc1", "fc3"),
    ("q", "k", "v"),
    ("gate_proj", "dense_h_to_4h"),
    ("q_conv1d", "k_conv1d", "v_conv1d"),
}
"""Layers of vision towers, and convolutions."""
MAPPING = re.compile(r"\bpacked_modules_mapping = (\{[^{}]*\})")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_the_installed_vllm_fuses_is_known() -> None:
    """The fused layers are literals in vLLM's sources, which are read without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None  # noqa: PT018
    fused = set()
    for file in (Path(spec.origin).parent / "model_executor" / "models").rglob("*.py"):
        for literal in MAPPING.findall(file.read_text(encoding="utf-8")):
            fused |= members_in(literal)
    # The pattern still finds vLLM's literals.
    assert ("q_proj", "k_proj", "v_proj") in fused
    for members in fused - NOT_LANGUAGE:
        n_common = [len(set(members) & set(names)) for names in FUSED_LAYERS]
        assert max(n_common) > 1, members


def members_in(literal: str) -> set[tuple[str, ...]]:
    """Return the lists of several layers in the source of a dict."""
    groups = set()
    for members in getattr(ast.parse(literal, mode="eval").body, "values", ()):
        if isinstance(members, ast.List) and len(members.elts) > 1:
            groups.add(tuple(name.split(".")[-1] for name in ast.literal_eval(members)))
    return groups
