"""What llama.cpp is told before a run, and what it says of one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from compare_q.backends.layers.groups import KVCache
from compare_q.backends.llamacpp import LlamacppOptions, context_parameters, kv_caches, model_parameters
from tests.support.llama_cpp import loaded, runs_llama_cpp
from tests.support.toy import toy_windows


@runs_llama_cpp
def test_what_ran(toy_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = loaded(toy_gguf, n_threads=1, type_k="q8_0", flash_attn=True, n_ubatch=32)
    engine.logits(toy_windows(1)[0])
    said = engine.provenance()
    asked = {"n_threads": 1, "type_k": "q8_0", "type_v": "f16", "flash_attn": True, "n_ubatch": 32}
    assert asked.items() <= said.items()
    assert sum(said["devices"].values()) == 3  # two layers and the head
    (cache,) = said["kv_cache_layers"]  # 2 heads of 32 numbers: 34 bytes for keys in q8_0, 64 for values in f16
    assert (cache["count"], cache["stored"]) == (2, "q8_0 (values f16)")
    assert cache["token_bytes"] == pytest.approx(2 * (34 + 64), abs=0.005 * 1024**2 / said["n_ctx"] / 2)
    assert said["logits_set_to_floor"]["entries"] == 0
    assert said["notes"] == []
    layers = {(each.name, each.count, each.weights) for each in engine.layers()}
    assert {("output.weight", 1, "f32"), ("blk.*.ffn_down.weight", 2, "f32")} < layers
    assert len(layers) == 8
    assert isinstance(engine.head(), str)
    engine.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "llama_model_loader" in err  # which a worker has in its log


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
