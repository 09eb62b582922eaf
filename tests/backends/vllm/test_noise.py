"""The noise floor in a real vLLM: the same in every run, on two ranks, and in Transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.base import LoadRequest
from backends.vllm.backend import VllmScoreBackend
from tests.support.toy import ATOL_BATCH, ATOL_LOGPROB, GPU, brute_force, toy_windows
from tests.support.vllm_engine import TWO_DEVICES, WINDOWS, against, assert_same, engine, scores_of


@pytest.mark.engine
def test_noise_is_the_same_in_every_run(floor_engine: VllmScoreBackend, toy_store: Path) -> None:
    """Each run draws from the beginning, and the hooks of the one before are gone."""
    first, second = (scores_of(floor_engine, WINDOWS, against(toy_store)) for _ in range(2))
    assert_same(second, first, atol=0.0)
    assert 1e-6 < np.mean([scores.kld.mean() for scores in first.values()]) < 0.1
    said = floor_engine.provenance()
    assert (said["enforce_eager"], said["noise"]["seed"], len(said["notes"])) == (True, 3, 1)
    assert said["scorer"]["largest"] < ATOL_BATCH
    assert said["scorer"]["reference_head"] == "the model's own, bit for bit"


@pytest.mark.engine
@pytest.mark.skipif(GPU, reason="TF32 products hide noise of this size")
def test_noise_is_that_of_transformers(
    toy_model: Path, toy_engine: VllmScoreBackend, floor_engine: VllmScoreBackend
) -> None:
    """One window in one step: each layer of either engine draws the same numbers for the same elements."""
    from backends.hf.backend import TransformersBackend

    (window,) = toy_windows(1, 100)
    options = {"dtype": "float32", "noise": "bf16", "noise_seed": 3}
    backend = TransformersBackend(LoadRequest("hf", "transformers", str(toy_model), 100, options))
    backend.load()
    gold = np.array(brute_force(backend.logits(window), window))
    found, plain = (scores_of(each, [window])[0].logprob for each in (floor_engine, toy_engine))
    np.testing.assert_allclose(found, gold, atol=ATOL_LOGPROB, rtol=0)
    assert np.abs(plain - gold).mean() > 20 * ATOL_LOGPROB


@pytest.mark.engine
@TWO_DEVICES
def test_noise_is_the_same_on_two_ranks(toy_model: Path, floor_engine: VllmScoreBackend, logs: Path) -> None:
    gold = scores_of(floor_engine, WINDOWS)
    with engine(toy_model, logs / "floor tp.log", noise="bf16", noise_seed=3, tensor_parallel_size=2) as backend:
        assert_same(scores_of(backend, WINDOWS), gold, 10 * ATOL_BATCH)
