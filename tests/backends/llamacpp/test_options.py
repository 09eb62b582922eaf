"""The ``engine`` object and the ``model_dir`` of a llamacpp spec: what is refused, and what is on the hub."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from compare_q.backends.layers.groups import KVCache
from compare_q.backends.llamacpp import (
    LlamacppOptions,
    context_parameters,
    kv_caches,
    model_parameters,
)


def test_the_caches_that_llama_cpp_has_made() -> None:
    """By the lines of 0.3.36's log, for 1,024 tokens: SmolLM2's 30 layers of 3 heads of 64 numbers, keys and values, in
    f16 and in q4_0, whose blocks of 32 numbers take 18 bytes; and Gemma 3's two caches, the second one quantized."""
    line = "llama_kv_cache: size = {} MiB (  1024 cells,  {} layers,  1/1 seqs), K ({}): {} MiB, V ({}): {} MiB\n"
    (plain,) = kv_caches("llama_kv_cache: CPU KV buffer size = 22.50 MiB\n" + line.format(
        "  22.50", "30", "f16", "  11.25", "f16", "  11.25"), 1024)  # fmt: skip
    assert plain == KVCache("blk.*", 30, "f16", "", "", "llama.cpp", "", 2 * 3 * 64 * 2.0)
    (small,) = kv_caches(line.format("   6.33", "30", "q4_0", "   3.16", "q4_0", "   3.16"), 1024)
    assert (small.stored, small.scales, small.prefill) == ("q4_0", "dynamic", "")
    assert small.token_bytes == pytest.approx(2 * 3 * 64 * 18 / 32, rel=0.005 / 6.33)
    lines = line.format(" 4.00", " 4", "f16", " 2.00", "f16", "2.00")
    lines += line.format("16.84", "22", "q8_0", "5.84", "f16", "11.00")
    assert [(found.count, found.stored) for found in kv_caches(lines, 1024)] == [(4, "f16"), (22, "q8_0 (values f16)")]


def test_what_llama_cpp_is_told() -> None:
    """Every option reaches its parameter; the others stay llama.cpp's defaults."""
    library = SimpleNamespace(
        llama_model_default_params=SimpleNamespace, llama_context_default_params=SimpleNamespace,
        llama_max_devices=lambda: 2, LLAMA_SPLIT_MODE_ROW=2,
    )  # fmt: skip
    options = LlamacppOptions(n_gpu_layers=3, split_mode="row", tensor_split=[1, 3], n_batch=64, type_k="bf16")
    model = model_parameters(library, options, repacks=False)
    assert (model.n_gpu_layers, model.main_gpu, model.split_mode, model.use_extra_bufts) == (3, 0, 2, False)
    assert list(model.tensor_split) == [1, 3, *[0] * 14]
    context = context_parameters(library, options, max_tokens=100, threads=5)
    assert vars(context) == {
        "n_ctx": 100, "n_batch": 64, "n_ubatch": 512, "n_threads": 5, "n_threads_batch": 5, "type_k": 30, "type_v": 1,
    }  # fmt: skip
