"""Divergence from a reference store, recorded in a real vLLM or by Transformers, against float64."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from compare_q.backends.base import LoadRequest, Task
from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference import store as reference
from compare_q.backends.vllm.engine import VllmEngine
from tests.support.stores import window_of
from tests.support.toy import ATOL_BATCH, ATOL_LOGPROB, TOY_CONTEXT, TOY_VOCAB, brute_force
from tests.support.vllm_engine import (
    EXACT,
    WINDOWS,
    against,
    assert_exact,
    assert_same,
    engine,
    own_logits,
    recorded,
    scores_of,
)


@pytest.mark.engine
def test_divergence_against_float64(toy_engine: VllmEngine, noisy_engine: VllmEngine, toy_store: Path) -> None:
    store = reference.Reader(toy_store)
    store.verify()
    assert (store.contents, store.head.vocab_size, store.head.dtype) == ("states", TOY_VOCAB, "float32")
    found = scores_of(noisy_engine, WINDOWS, against(toy_store, divergences=True))
    assert 0.01 < np.mean([scores.kld.mean() for scores in found.values()]) < 10
    assert noisy_engine.provenance()["scorer"]["reference_head"].startswith("a copy, ")
    for window in WINDOWS[-2:]:
        ref = own_logits(toy_engine, window)
        assert_exact(found[window.index], own_logits(noisy_engine, window), window, EXACT, ref)


@pytest.mark.engine
def test_a_model_against_itself_is_zero_and_its_head_is_shared(toy_engine: VllmEngine, toy_store: Path) -> None:
    found = scores_of(toy_engine, WINDOWS, against(toy_store))
    assert max(np.abs(scores.kld).max() for scores in found.values()) < 1e-6
    assert all(scores.same_top.all() for scores in found.values())
    assert toy_engine.provenance()["scorer"]["reference_head"] == "the model's own, bit for bit"
    for scores in found.values():
        np.testing.assert_allclose(scores.ref_logprob, scores.logprob, atol=ATOL_BATCH)


@pytest.mark.engine
def test_vocabularies_are_cut_to_what_both_have(noisy_engine: VllmEngine, toy_store: Path) -> None:
    """A reference with 300 entries: everything is scored over the first 300."""
    found = scores_of(noisy_engine, WINDOWS, against(toy_store, 300))
    window = WINDOWS[0]
    logits = own_logits(noisy_engine, window)[:, :300]
    np.testing.assert_allclose(found[0].logprob, brute_force(logits, window), atol=EXACT)


@pytest.mark.engine
def test_a_reference_from_transformers_gives_the_same(
    toy_model: Path, noisy_engine: VllmEngine, toy_store: Path, tmp_path: Path
) -> None:
    from compare_q.backends.hf.engine import TransformersEngine
    from compare_q.backends.worker import scoring

    backend = TransformersEngine(LoadRequest("hf", "transformers", str(toy_model), 200, {"dtype": "float32"}))
    backend.load()
    (tmp_path / "store").mkdir()
    list(scoring.token_scores(backend, WINDOWS, Task(record=tmp_path / "store")))
    reference.seal(tmp_path / "store", {}, len(WINDOWS))
    backend.close()
    found = scores_of(noisy_engine, WINDOWS, against(tmp_path / "store"))
    assert_same(found, scores_of(noisy_engine, WINDOWS, against(toy_store)), ATOL_LOGPROB)


@pytest.mark.engine
def test_an_error_in_the_worker_names_the_file_and_leaves_the_engine_alive(
    toy_engine: VllmEngine, toy_store: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(toy_store, broken)
    window_of(broken, 3).unlink()
    with pytest.raises(ModelError, match=r"scoring failed in vLLM's worker: .*row\.000003"):
        scores_of(toy_engine, WINDOWS, against(broken))
    assert len(scores_of(toy_engine, WINDOWS)) == len(WINDOWS)


@pytest.mark.engine
def test_soft_cap_is_part_of_the_head(tmp_path: Path, logs: Path) -> None:
    """Gemma 2 caps its logits in the LogitsProcessor and ties its head."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=TOY_VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=TOY_CONTEXT, query_pre_attn_scalar=32,
        final_logit_softcapping=3.0, sliding_window=64, initializer_range=0.3, dtype="bfloat16",
    )  # fmt: skip
    Gemma2ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "gemma")
    with engine(tmp_path / "gemma", logs / "gemma.log") as backend:
        store = reference.Reader(recorded(backend, WINDOWS, tmp_path))
        assert (store.contents, store.head.soft_cap) == ("states", 3.0)
        found = scores_of(backend, WINDOWS, against(store.path))
        window = WINDOWS[-1]
        logits = own_logits(backend, window)
        assert 2.0 < float(logits.abs().max()) <= 3.0
        assert_exact(found[window.index], logits, window, EXACT, logits)
