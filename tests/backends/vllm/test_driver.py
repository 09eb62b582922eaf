"""vLLM's own prompt log-probabilities, which the probe reads, and a probe that does not agree with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm import driver
from compare_q.backends.vllm.engine import VllmEngine
from tests.support.toy import GPU, toy_windows
from tests.support.vllm_engine import WINDOWS, against, scores_of


class Flat:
    """The parts of vLLM's FlatLogprobs that are read."""

    def __init__(self, tokens: list[int], logprobs: list[float], starts: list[int], ends: list[int]) -> None:
        self.token_ids, self.logprobs, self.start_indices, self.end_indices = tokens, logprobs, starts, ends

    def __len__(self) -> int:
        return len(self.start_indices)


WINDOW = Window.scored_from(3, np.array([5, 6, 7], np.int32))


def test_entry_i_belongs_to_token_i_whatever_the_top_k() -> None:
    flat = Flat([6, 1, 7, 2], [-1.0, -0.1, -2.0, -0.2], [0, 0, 2], [0, 2, 4])
    assert driver.own_logprobs(WINDOW, flat).tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (None, "window 3: vLLM returned log-probabilities for none of 3"),
        (Flat([6], [-1.0], [0, 0], [0, 1]), "for 2 of 3 positions"),
        (Flat([6], [-1.0], [0, 0, 1], [0, 1, 1]), "another token, or none, at position 2"),
        (Flat([6, 8], [-1.0, -2.0], [0, 0, 1], [0, 1, 2]), "another token, or none, at position 2"),
    ],
)
def test_a_missing_score_is_an_error(flat: Flat | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        driver.own_logprobs(WINDOW, flat)


@pytest.mark.engine
@pytest.mark.parametrize("shift", ["by one token", "by half a nat"])
def test_scores_that_are_not_vllms_own_stop_the_run(
    toy_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, shift: str
) -> None:
    own = driver.own_logprobs
    changed = (lambda *a: np.roll(own(*a), 1)) if shift == "by one token" else (lambda *a: own(*a) - 0.5)
    monkeypatch.setattr(driver, "own_logprobs", changed)
    with pytest.raises(ModelError, match=r"scores differ from vLLM's own prompt_logprobs by .* \(rounding explains"):
        scores_of(toy_engine, WINDOWS)


TWELVE = Window.scored_from(0, np.array([4, 5, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], np.int32))
"""Twelve scored positions, whose second and third prediction follow the same token."""


@pytest.mark.parametrize(
    ("alike", "window", "found"),
    [
        (range(2, 10), TWELVE, True),
        (range(2, 9), TWELVE, False),
        (range(0, 8), TWELVE, False),  # positions 1 and 2 follow one token, which may repeat its logits
        (range(8), Window.scored_from(0, np.full(13, 7, np.int32)), False),
        (range(4), Window.scored_from(0, np.arange(5, dtype=np.int32)), False),
    ],
)
def test_logits_that_do_not_change_with_the_token(alike: range, window: Window, found: bool) -> None:
    """In one of two shards they do change: the other one alone says nothing."""
    shard = np.random.default_rng(0).normal(size=(len(window.targets), 5)).astype(np.float32)
    same = shard.copy()
    same[alike, :3] = same[alike.start, :3]
    assert driver.stuck(window, [same]) is driver.stuck(window, [same, same]) is found
    assert not driver.stuck(window, [same, shard])


def test_nan_is_not_the_same_as_nan() -> None:
    assert not driver.stuck(TWELVE, [np.full((12, 5), np.nan, np.float32)])


Spoil = Callable[[torch.Tensor], torch.Tensor]


def spoil_requests_that_want_nothing(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """A vLLM whose model runner leaves out states in steps where no request wants ``prompt_logprobs``."""
    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    step = runner._get_prompt_logprobs_dict

    def spoiled(states: torch.Tensor, *rest: Any) -> Any:
        return step(states if runner.num_prompt_logprobs else spoil(states), *rest)

    monkeypatch.setattr(runner, "_get_prompt_logprobs_dict", spoiled)


def trimmed(states: torch.Tensor) -> torch.Tensor:
    """All but the last 40 rows are zero, as DeepSeek-V4.1's last layers leave them for what lies before a window."""
    return torch.cat([torch.zeros_like(states[:-40]), states[-40:]])


NO_STATES = r"window \d: vLLM computed no hidden states for \d+ of its positions"
in_this_process = pytest.mark.skipif(GPU, reason="on a GPU the model runner is in another process")


@pytest.mark.engine
@in_this_process
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (trimmed, NO_STATES),
        (lambda states: states.roll(1, 0), "requests without prompt_logprobs score otherwise in vLLM, by .* nats"),
        (lambda states: states[:1].expand_as(states), "window 0: vLLM's logits are the same at 8 different tokens"),
    ],
)
def test_the_probe_runs_what_scoring_runs(
    toy_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, message: str
) -> None:
    spoil_requests_that_want_nothing(toy_engine, monkeypatch, spoil)
    with pytest.raises(ModelError, match=message):
        toy_engine.get_ready(toy_windows(2, 100))


@pytest.mark.engine
@in_this_process
def test_windows_without_states_are_never_scored(
    toy_engine: VllmEngine, toy_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a reference whose states are zero as well, they would have a KL divergence of 0."""
    toy_engine.get_ready(WINDOWS)
    spoil_requests_that_want_nothing(toy_engine, monkeypatch, trimmed)
    with pytest.raises(ModelError, match=NO_STATES):
        next(iter(toy_engine.score(WINDOWS, against(toy_store))))


@pytest.mark.engine
@in_this_process
def test_kernels_that_add_in_another_order_every_time(toy_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe knows by how much scores differ from run to run, and asks no more of requests of their own."""
    (runner,) = toy_engine.llm.collective_rpc(lambda worker: worker.model_runner)
    step, drawn = runner._get_prompt_logprobs_dict, torch.Generator().manual_seed(0)

    def shaken(states: torch.Tensor, *rest: Any) -> Any:
        return step(states * (1 + 0.01 * torch.randn(states.shape, generator=drawn)), *rest)

    monkeypatch.setattr(runner, "_get_prompt_logprobs_dict", shaken)
    assert toy_engine.driver.probe(toy_windows(2, 100)).states
