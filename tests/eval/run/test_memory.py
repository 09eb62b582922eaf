"""The parts of the memory of serving, by hand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.base import Layer, Storage
from compare_q.backends.layers.groups import KVCache, groups_to_json
from compare_q.eval.results import CachePart, Memory
from compare_q.eval.run.serving_memory import memory_of
from tests.support.checkpoints import ENDS, write_checkpoint
from tests.support.run_models import run_model
from tests.support.toy import planned

CONFIG = {
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
STORED = Storage(16.0, 16.0, 800, file_bytes=1000)
RAN = {"dtype": "bfloat16"}


def cached(*caches: KVCache) -> dict[str, Any]:
    """Return the provenance of an engine with these caches."""
    return {**RAN, "kv_cache": "fp8", "kv_cache_layers": [asdict(cache) for cache in caches]}


def layers(weights: str, kernel: str = "Linear") -> dict[str, Any]:
    """Return the provenance of an engine that ran layers of one kind."""
    return {**RAN, "layers": groups_to_json([Layer("a", weights, "bfloat16", kernel)])}


def of(
    folder: Path, provenance: dict[str, Any], storage: Storage = STORED, **config: Any
) -> Memory:
    """Return the memory of a model with this config."""
    checkpoint = write_checkpoint(folder / "m", ENDS, CONFIG | config)
    model = run_model(planned("m", "transformers", str(checkpoint), 100))
    return memory_of(model, storage, provenance)


def test_parts_by_the_config(tmp_path: Path) -> None:
    """The cache has one head of two numbers in two layers.

    A step needs 4 x 4 and 3 x 8 numbers per token.
    """
    memory = of(tmp_path, RAN)
    # K and V of one head of two numbers, in 2 bytes, in two layers: 16 bytes per token. The logits
    # of 10 entries in float32: 40. A step: 2 bytes for each of 16 + 24 numbers.
    assert memory == Memory(
        weights=1000,
        kv=(CachePart(token_bytes=2 * 2 * 2 * 2),),
        kv_source="config",
        logits=40,
        step_token=80,
    )
    assert memory.gigabytes(100) == pytest.approx((1000 + 16 * 100 + 40 + 80 * 100) / 1e9)
    # A long text is read in steps of 2,048 tokens.
    assert memory.gigabytes(8192) == pytest.approx((1000 + 16 * 8192 + 40 + 80 * 2048) / 1e9)
    # Logits are in float32 in any case.
    single = of(tmp_path, {"dtype": "float32"})
    assert (single.kv[0].token_bytes, single.logits, single.step_token) == (32, 40, 160)
    assert of(tmp_path, RAN, sliding_window=7).kv_is_upper


def test_the_cache_of_the_engine(tmp_path: Path) -> None:
    """The engine's sizes count before the config's, in their own format.

    A sliding-window layer holds one window.
    """
    one = KVCache("a", 1, "fp8", token_bytes=4.0)
    two = KVCache("b", 1, "fp8", token_bytes=4.0, window=10)
    memory = of(tmp_path, cached(one, two), sliding_window=10)
    assert (memory.kv_source, memory.kv_is_upper, memory.missing) == ("engine", False, None)
    assert memory.gigabytes(100) == pytest.approx((1000 + 4 * 100 + 4 * 10 + 40 + 80 * 100) / 1e9)


@pytest.mark.parametrize(
    ("provenance", "storage", "config", "part"),
    [
        (RAN, Storage(16.0), {}, "weights: no weight files"),
        (
            RAN,
            Storage(note="quantized while loading", file_bytes=9),
            {},
            "weights: quantized while loading",
        ),
        (
            layers("int8 channel", "torch linear (dequantized)"),
            STORED,
            {},
            "weights: the engine decompresses",
        ),
        (
            layers("float32"),
            STORED,
            {},
            "weights: stored with 16 bits per weight, and loaded with 32",
        ),
        (cached(KVCache("a", 2, "fp8")), STORED, {}, "KV cache: "),
        # The engine reports one of two layers.
        (
            cached(KVCache("a", 1, "fp8", token_bytes=4.0)),
            STORED,
            {},
            "KV cache: ",
        ),
        ({**RAN, "kv_cache": "fp8"}, STORED, {}, "KV cache: "),
        (RAN, STORED, {"kv_lora_rank": 3}, "KV cache: "),
        (RAN, STORED, {"intermediate_size": None}, "activations: "),
    ],
)
def test_a_part_that_is_not_known(
    tmp_path: Path, provenance: dict[str, Any], storage: Storage, config: dict[str, Any], part: str
) -> None:
    """An unknown part is named, and the sum is unknown.

    If layers run as stored, the sum is known.
    """
    memory = of(tmp_path, provenance, storage, **config)
    assert (memory.missing or "").startswith(part)
    assert ";" not in (memory.missing or "")
    assert memory.gigabytes(100) is None
    assert of(tmp_path, layers("bfloat16")).missing is None
