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
    """Also in a run that goes on after a crash, and in a replica; the hooks of the run before are gone."""
    first, second = (scores_of(floor_engine, WINDOWS, against(toy_store)) for _ in range(2))
    assert_same(second, first, atol=0.0)
    rest = scores_of(floor_engine, WINDOWS[3:], against(toy_store))
    assert_same(rest, {index: first[index] for index in rest}, ATOL_BATCH)
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
    """Each layer of either engine has the same numbers for the same elements, in whatever steps and order."""
    from backends.hf.backend import TransformersBackend

    windows = toy_windows(3, 100)
    options = {"dtype": "float32", "noise": "bf16", "noise_seed": 3}
    backend = TransformersBackend(LoadRequest("hf", "transformers", str(toy_model), 100, options))
    backend.load()
    gold = {window.index: np.array(brute_force(backend.logits(window), window)) for window in reversed(windows)}
    found, plain = (scores_of(each, windows) for each in (floor_engine, toy_engine))
    for index in gold:
        np.testing.assert_allclose(found[index].logprob, gold[index], atol=ATOL_LOGPROB, rtol=0)
        assert np.abs(plain[index].logprob - gold[index]).mean() > 20 * ATOL_LOGPROB


@pytest.mark.engine
@TWO_DEVICES
def test_noise_is_the_same_on_two_ranks(toy_model: Path, floor_engine: VllmScoreBackend, logs: Path) -> None:
    gold = scores_of(floor_engine, WINDOWS)
    with engine(toy_model, logs / "floor tp.log", noise="bf16", noise_seed=3, tensor_parallel_size=2) as backend:
        assert_same(scores_of(backend, WINDOWS), gold, 10 * ATOL_BATCH)
