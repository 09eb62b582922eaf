"""What llama.cpp says of a run, and why it refuses a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.llama_cpp import loaded, runs_llama_cpp
from tests.support.toy import toy_windows


@runs_llama_cpp
def test_what_ran(toy_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = loaded(toy_gguf, n_threads=1, type_k="q8_0", flash_attn=True, n_ubatch=32)
    engine.logits(toy_windows(1)[0])
    said = engine.provenance()
    assert {
        "n_threads": 1,
        "type_k": "q8_0",
        "type_v": "f16",
        "flash_attn": True,
        "n_ubatch": 32,
    }.items() <= said.items()
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
