"""Two tensor-parallel ranks in a real vLLM: the same scores as one, from logits that nobody gathers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.reference import store as reference
from compare_q.backends.vllm import driver
from compare_q.backends.vllm import engine as vllm_score
from compare_q.backends.vllm.engine import VllmEngine
from tests.support.toy import ATOL_BATCH, ATOL_LOGPROB, TOY_VOCAB
from tests.support.vllm_engine import (
    EXACT,
    TWO_DEVICES,
    WINDOWS,
    against,
    assert_exact,
    assert_same,
    engine,
    own_logits,
    recorded,
    scores_of,
)
from tests.support.vllm_spy import BY, EDITED


@pytest.mark.engine
@TWO_DEVICES
def test_two_ranks_equal_one_and_gather_nothing(
    toy_engine: VllmEngine, noisy_engine: VllmEngine, toy_store: Path, toy_model: Path, noisy_model: Path,
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Scores, divergences and the store of a TP=2 run; what is gathered is one row a request, for vLLM's own token."""
    monkeypatch.setattr(vllm_score, "EXTENSION", "tests.support.vllm_spy.SpyExtension")
    gold = scores_of(noisy_engine, WINDOWS, against(toy_store, divergences=True))
    with engine(noisy_model, logs / "tp.log", tensor_parallel_size=2) as backend:
        found = scores_of(backend, WINDOWS, against(toy_store, divergences=True))
        assert_same(found, gold, 10 * ATOL_BATCH)
        for window in WINDOWS[-2:]:
            ref, logits = own_logits(toy_engine, window), own_logits(backend, window)
            assert_exact(found[window.index], logits, window, EXACT, ref)
        plan = driver.Plan(reference=str(toy_store), vocab_size=TOY_VOCAB, divergences=True)
        backend.llm.collective_rpc("compare_q_spied")
        list(backend.driver.scored(WINDOWS, plan))
        for spied in map(json.loads, backend.llm.collective_rpc("compare_q_spied")):
            assert spied["inside"] == 0
            assert 0 < spied["all"] <= len(WINDOWS)
        assert backend.provenance()["scorer"]["gathered"] is False
        store = reference.Reader(recorded(backend, WINDOWS, tmp_path))
    assert list(store.manifest.heads) == [0, 160]
    found = scores_of(noisy_engine, WINDOWS, against(store.path))
    assert max(np.abs(scores.kld).max() for scores in found.values()) < 1e-5
    assert noisy_engine.provenance()["scorer"]["reference_head"] == "the model's own, bit for bit"


@pytest.mark.engine
@TWO_DEVICES
def test_logits_that_are_edited_after_the_gather_are_gathered(
    toy_engine: VllmEngine, toy_model: Path, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their head alone is not what they serve: logits are kept for a reference, and come back exactly."""
    monkeypatch.setattr(vllm_score, "EXTENSION", "tests.support.vllm_spy.EditedExtension")
    with engine(toy_model, logs / "edited.log", tensor_parallel_size=2) as backend:
        found = scores_of(backend, WINDOWS)
        assert backend.provenance()["scorer"]["gathered"] is True
        for window in WINDOWS[-2:]:
            logits = own_logits(toy_engine, window)
            logits[:, EDITED] += BY
            assert_exact(found[window.index], logits, window, ATOL_LOGPROB)
        store = reference.Reader(recorded(backend, WINDOWS, tmp_path))
        assert (store.contents, store.reason) == ("logits", "its logits are not its head's alone")
        itself = scores_of(backend, WINDOWS, against(store.path))
    assert not any(scores.kld.any() for scores in itself.values())


@pytest.mark.engine
@TWO_DEVICES
def test_noise_is_the_same_on_two_ranks(toy_model: Path, floor_engine: VllmEngine, logs: Path) -> None:
    gold = scores_of(floor_engine, WINDOWS)
    with engine(toy_model, logs / "floor tp.log", noise="bf16", noise_seed=3, tensor_parallel_size=2) as backend:
        assert_same(scores_of(backend, WINDOWS), gold, 10 * ATOL_BATCH)
