"""vllm_score against brute force, in a real vLLM: chunks, batches, prefixes, long windows, preemption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm.engine import VllmEngine
from tests.support.toy import ATOL_BATCH, ATOL_LOGPROB, TOY_CONTEXT, brute_force, toy_windows
from tests.support.vllm_engine import (
    WINDOWS,
    against,
    assert_exact,
    assert_same,
    engine,
    recorded,
    scores_of,
)


@pytest.mark.engine
def test_scores_against_float64(toy_engine: VllmEngine, toy_logits: Any) -> None:
    found = scores_of(toy_engine, WINDOWS)
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    for window in WINDOWS:
        assert_exact(found[window.index], toy_logits(window), window, ATOL_LOGPROB)


@pytest.mark.engine
def test_the_same_run_again_is_the_same_to_the_bit(noisy_engine: VllmEngine) -> None:
    """The scheduler is paused while windows are queued, so that batches do not depend on who was faster."""
    first, second = scores_of(noisy_engine, WINDOWS), scores_of(noisy_engine, WINDOWS)
    assert_same(second, first, atol=0.0)


@pytest.mark.engine
def test_repeated_and_shared_beginnings_are_scored_in_full(toy_engine: VllmEngine, noisy_engine: VllmEngine) -> None:
    """vLLM caches prefixes by default; one that is read would leave positions unscored."""
    (window,) = toy_windows(1, 200)
    again = [window, replace(window, index=1), Window.scored_from(2, window.token_ids[:120])]
    for backend in (toy_engine, noisy_engine):
        assert backend.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching is True
        found = scores_of(backend, again)
        assert [len(found[index].logprob) for index in range(3)] == [199, 199, 119]
        np.testing.assert_allclose(found[1].logprob, found[0].logprob, atol=ATOL_BATCH)
        np.testing.assert_allclose(found[2].logprob, found[0].logprob[:119], atol=ATOL_BATCH)


@pytest.mark.engine
def test_a_window_as_long_as_the_context(toy_engine: VllmEngine, toy_logits: Any) -> None:
    """The engine was loaded for TOY_CONTEXT tokens: max_model_len is one more than the config's maximum."""
    (window,) = toy_windows(1, TOY_CONTEXT)
    found = scores_of(toy_engine, [window])[0]
    np.testing.assert_allclose(found.logprob, brute_force(toy_logits(window), window), atol=ATOL_LOGPROB)
    with pytest.raises(ModelError, match="stopped while scoring"):
        scores_of(toy_engine, toy_windows(1, TOY_CONTEXT + 2))


@pytest.mark.engine
def test_preempted_windows_are_scored_all_the_same(
    toy_engine: VllmEngine, noisy_model: Path, noisy_engine: VllmEngine, logs: Path, tmp_path: Path
) -> None:
    """A KV cache of four blocks of 128 tokens for windows of 200, each growing by 40 tokens a step: four start, and
    from the second block on they push each other out."""
    windows = toy_windows(6, 200)
    store = recorded(toy_engine, windows, tmp_path)
    gold = scores_of(noisy_engine, windows, against(store))
    options = {"num_gpu_blocks_override": 5, "block_size": 128, "long_prefill_token_threshold": 40}
    with engine(noisy_model, logs / "tiny.log", max_num_batched_tokens=160, max_num_seqs=6, **options) as backend:
        found = scores_of(backend, windows, against(store))
        assert backend.provenance()["scorer"]["recomputed_positions"] > 0
    assert_same(found, gold)
