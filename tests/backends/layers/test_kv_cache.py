"""What is said of a model's KV cache, against groups and sentences made by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from backends.layers.kv_cache import (
    DYNAMIC,
    FIRST_STEP,
    LOADED,
    ONE,
    SPARSE,
    KVCache,
    KVGroup,
    deviations,
    from_json,
    grouped,
    in_words,
    kv_cache,
    notes,
)

BF16 = "bfloat16"
EIGHT = KVGroup("layers.*.attn", 2, "fp8", ONE, BF16, "FlashInferImpl", "")
PLAIN = KVGroup("layers.*.attn", 30, BF16, "", "fp8", "FlashInferImpl", "")


@pytest.mark.parametrize(
    ("stored", "scales", "asked", "found"),
    [
        (BF16, ONE, "", (BF16, "", "")),
        ("fp8", LOADED, "fp8 tensor", ("fp8", LOADED, "")),
        ("fp8", DYNAMIC, "fp8 tensor", ("fp8", DYNAMIC, "")),
        (BF16, ONE, "fp8 tensor", (BF16, "", "fp8")),
        ("fp8", ONE, "", ("fp8", ONE, BF16)),
        ("fp8", LOADED, "nvfp4 g16", ("fp8", LOADED, "nvfp4")),
        # What is asked in words that are not known here is not compared.
        ("fp8", LOADED, "unknown", ("fp8", LOADED, "")),
    ],
)
def test_one_cache(stored: str, scales: str, asked: str, found: tuple[str, str, str]) -> None:
    assert kv_cache(KVCache("x", stored, scales), asked, BF16) == KVCache("x", *found)


def test_a_cache_that_is_not_quantized_is_read_or_not_with_one_result() -> None:
    assert kv_cache(KVCache("x", BF16, ONE, "", "New", "unknown"), "", BF16) == KVCache("x", BF16, "", "", "New", "")
    assert kv_cache(KVCache("x", "fp8", ONE, "", "New", "unknown"), "", BF16).prefill == "unknown"


def test_groups_and_what_is_said_of_them() -> None:
    caches = [KVCache(f"layers.{number}.attn", "fp8", ONE, BF16, "FlashInferImpl") for number in (3, 4)]
    caches += [KVCache(f"layers.{number}.attn", BF16, "", "fp8", "FlashInferImpl") for number in range(5, 35)]
    groups = grouped(caches)
    assert groups == (EIGHT, PLAIN)
    assert in_words(groups) == "bfloat16 +fp8"
    assert in_words(()) == ""
    assert deviations(groups) == [
        "the checkpoint asks for a KV cache in bfloat16, but keys and values were kept in fp8 (2 layers)",
        "the checkpoint asks for a KV cache in fp8, but keys and values were kept in bfloat16 (30 layers)",
    ]
    assert notes(groups, "fp8") == ["KV cache in fp8 with scales of 1.0 (2 layers): the checkpoint brings no others"]
    assert notes([KVGroup("x", 1, "fp8", LOADED, "")], "fp8") == []
    assert notes([], "auto") == notes([], BF16) == []
    assert notes([], "fp8_ds_mla") == [
        "KV cache in fp8_ds_mla: how this model's layers keep it, and whether prefill reads it, is not known"
    ]


@pytest.mark.parametrize(
    ("attention", "prefill", "said"),
    [
        ("TurboQuantAttentionImpl", FIRST_STEP,
         "TurboQuantAttentionImpl computes the first step of a window from unquantized keys and values, and only later "
         "steps read the KV cache in fp8 (32 layers)"),
        ("FlashMLASparseImpl", SPARSE,
         "FlashMLASparseImpl may compute windows of up to index_topk tokens from unquantized keys and values, and only "
         "longer ones read the KV cache in fp8 (32 layers)"),
        ("NewImpl", "unknown", "whether prefill in NewImpl reads the KV cache in fp8 is not known (32 layers)"),
        ("NewImpl", "newer", "whether prefill in NewImpl reads the KV cache in fp8 is not known (32 layers)"),
    ],
)  # fmt: skip
def test_quantized_caches_that_prefill_does_not_read(attention: str, prefill: str, said: str) -> None:
    assert deviations([KVGroup("x", 32, "fp8", DYNAMIC, "", attention, prefill)]) == [said]
    assert deviations([KVGroup("x", 32, BF16, "", "", attention, prefill)]) == []


def test_older_results_do_not_say_what_prefill_read() -> None:
    old = {"layers": "x", "count": 2, "stored": "fp8", "scales": "loaded", "asked": ""}
    assert deviations(from_json([old])) == [
        "whether prefill in this attention reads the KV cache in fp8 is not known (2 layers)"
    ]
    assert deviations(from_json([{**old, "stored": BF16, "scales": ""}])) == []


def test_results_hold_groups() -> None:
    assert from_json(json.loads(json.dumps([asdict(EIGHT), asdict(PLAIN)]))) == (EIGHT, PLAIN)
    assert from_json(None) == ()


@pytest.mark.parametrize("damaged", [[{**asdict(EIGHT), "count": "many"}], [{"count": 2}], ["fp8"], 7])
def test_damaged_groups_are_refused(damaged: Any) -> None:
    with pytest.raises(ValueError, match="validation error"):
        from_json(damaged)
