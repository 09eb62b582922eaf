"""Logits of llama.cpp, compared with Transformers on the same weights.

Also its batches and KV cache, tokens that a model never allows, and the provenance of a run.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.stale_inputs import write_gguf
from compare_q.backends.base import ScoreRequest
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.llamacpp import LOWEST_LOGIT
from compare_q.backends.reference import store as reference
from tests.support.llama_cpp import EXACT_OPTIONS, loaded, needs_llama_cpp
from tests.support.long_window import LOGITS, LONG, VOCAB, growth
from tests.support.stores import recorded
from tests.support.toy import (
    TOY_CONTEXT,
    TOY_VOCAB,
    brute_force,
    planned,
    save_llama,
    toy_windows,
    with_gaps,
)

pytestmark = [pytest.mark.engine, needs_llama_cpp]


def test_float32_model_gives_transformers_logits(toy_model: Path, toy_gguf: Path) -> None:
    """Same weights, no quantization: only the order of float32 operations differs."""
    ours = loaded(toy_gguf, **EXACT_OPTIONS)
    theirs = TransformersEngine(
        planned("t", "transformers", str(toy_model), 100, {"dtype": "float32"})
    )
    theirs.load()
    for window in [toy_windows(1, 100, 3)[0], with_gaps(toy_windows(1)[0])]:
        logits = ours.logits(window).cpu()
        torch.testing.assert_close(logits, theirs.logits(window).cpu(), atol=2e-3, rtol=0)
        (scores,) = ours.score([window], ScoreRequest())
        np.testing.assert_allclose(scores.logprob, brute_force(logits, window), atol=1e-5)
    facts = ours.files(ours.planned).facts()
    assert (facts.vocab_size, facts.context) == (TOY_VOCAB, TOY_CONTEXT)
    ours.close()
    theirs.close()


def test_scores_do_not_depend_on_the_batches(toy_gguf: Path) -> None:
    """With batches of 7 tokens, the last batch has 2.

    Flash attention's kernel for few tokens has other roundings.
    """
    (window,) = toy_windows(1)

    def run(n_batch: int, n_ubatch: int, **options: Any) -> torch.Tensor:
        engine = loaded(toy_gguf, n_batch=n_batch, n_ubatch=n_ubatch, **options)
        logits = engine.logits(window)
        assert engine.provenance()["n_ubatch"] == min(n_ubatch, 100)
        engine.close()
        return logits

    torch.testing.assert_close(
        run(7, 7, **EXACT_OPTIONS), run(512, 512, **EXACT_OPTIONS), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(run(7, 7), run(100, 7), atol=1e-5, rtol=0)
    assert (run(7, 7) - run(512, 512)).abs().mean() < 0.02


def test_a_reference_is_kept_exactly(toy_gguf: Path, tmp_path: Path) -> None:
    """The store has float32 logits, because ggml's head cannot be computed again.

    The KLD of a bf16 cache is small and equals its value in float64.
    """
    windows = toy_windows(2)
    ours = loaded(toy_gguf, **EXACT_OPTIONS)
    other = loaded(toy_gguf, **{**EXACT_OPTIONS, "type_k": "bf16"})
    store = recorded(ours, windows, tmp_path)
    assert reference.Reader(store).window(windows[0].digest).dtype == torch.float32
    task = ScoreRequest(reference=store, vocab_size=TOY_VOCAB)
    assert not any(np.any(scores.kld) for scores in ours.score(windows, task))
    for window, scores in zip(windows, other.score(windows, task), strict=True):
        p = ours.logits(window)[:-1].double().log_softmax(-1).cpu()
        q = other.logits(window)[:-1].double().log_softmax(-1).cpu()
        exact = (p.exp() * (p - q)).sum(-1).numpy()
        assert 0 < exact.mean() < 1e-2
        np.testing.assert_allclose(scores.kld, exact, atol=1e-6, rtol=0)


def test_excluded_tokens_leave_every_score_but_the_divergence(
    toy_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One entry is -inf at every position, and the target of one position is -3.4e38.

    That position is left out.
    """
    (window,) = toy_windows(1)
    engine = loaded(toy_gguf)
    plain = engine._decode
    target = int(window.token_ids[41])
    rare = next(token for token in range(256, TOY_VOCAB) if token != target)

    def decode(*arguments: Any) -> Any:
        pointer = plain(*arguments)
        logits = np.ctypeslib.as_array(pointer, (100, TOY_VOCAB))
        logits[:, rare] = -np.inf
        logits[40, target] = -3.4e38
        return pointer

    monkeypatch.setattr(engine, "_decode", decode)
    logits = engine.logits(window)
    assert (logits[:99, rare] == LOWEST_LOGIT).all()
    assert logits[40, target] == -math.inf
    (scores,) = engine.score([window], ScoreRequest())
    assert [i for i in range(99) if not math.isfinite(scores.logprob[i])] == [40]
    masked = logits.double().cpu()
    masked[:, rare] = -math.inf
    gold = torch.log_softmax(masked, -1)[
        torch.arange(99), torch.from_numpy(window.token_ids[1:]).long()
    ]
    np.testing.assert_allclose(
        np.delete(scores.logprob, 40), np.delete(gold.numpy(), 40), atol=2e-5
    )
    assert engine.provenance()["logits_set_to_floor"] == {
        "floor": -65504.0,
        "entries": 100,
        "targets_left_out": 1,
    }
    (note,) = engine.provenance()["notes"]
    assert note.startswith(
        "logits that llama.cpp excludes count as -65504: KL divergence is finite"
    )


def test_memory_does_not_grow_with_a_windows_logits(tmp_path: Path) -> None:
    """Only a part of a window's logits, and of its reference's logits, is in memory."""
    save_llama(tmp_path / "model", vocab_size=VOCAB, max_position_embeddings=LONG)
    file = write_gguf(tmp_path / "model", tmp_path / "toy.gguf")
    assert growth("llamacpp", file) < LOGITS / 2


def test_what_ran(toy_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = loaded(toy_gguf, n_threads=1, type_k="q8_0", flash_attn=True, n_ubatch=32)
    engine.logits(toy_windows(1)[0])
    provenance = engine.provenance()
    options = {"n_threads": 1, "type_k": "q8_0", "type_v": "f16", "flash_attn": True}
    assert {**options, "n_ubatch": 32}.items() <= provenance.items()
    assert sum(provenance["devices"].values()) == 3  # two layers and the head
    (cache,) = provenance["kv_cache_layers"]
    assert (cache["count"], cache["stored"]) == (2, "q8_0 (values f16)")
    # 2 heads of 32 numbers: 34 bytes for keys in q8_0, 64 for values in f16.  The log has MiB with
    # two digits, of two layers.
    rounding = 0.005 * 1024**2 / provenance["n_ctx"] / 2
    assert cache["token_bytes"] == pytest.approx(2 * (34 + 64), abs=rounding)
    assert provenance["logits_set_to_floor"]["entries"] == 0
    assert provenance["notes"] == []
    layers = {(layer.name, layer.count, layer.weights) for layer in engine.layers()}
    assert {("output.weight", 1, "f32"), ("blk.*.ffn_down.weight", 2, "f32")} < layers
    assert len(layers) == 8
    assert isinstance(engine.head(), str)
    engine.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "llama_model_loader" in err  # a worker's log has this output
