"""vLLM's own prompt log-probabilities, which the probe reads, and a probe that does not agree with them."""

from __future__ import annotations

import numpy as np
import pytest

from backends.base import Window
from backends.common.errors import ModelError
from backends.vllm import driver
from backends.vllm.backend import VllmScoreBackend
from tests.support.vllm_engine import WINDOWS, scores_of


class Flat:
    """The parts of vLLM's FlatLogprobs that are read."""

    def __init__(self, tokens: list[int], logprobs: list[float], starts: list[int], ends: list[int]) -> None:
        self.token_ids, self.logprobs, self.start_indices, self.end_indices = tokens, logprobs, starts, ends

    def __len__(self) -> int:
        return len(self.start_indices)


WINDOW = Window.scored_from(3, np.array([5, 6, 7], np.int32))


def test_entry_i_belongs_to_token_i() -> None:
    found = driver.own_logprobs(WINDOW, Flat([6, 7], [-1.5, -2.5], [0, 0, 1], [0, 1, 2]))
    assert found.tolist() == [-1.5, -2.5]


def test_the_real_token_comes_first_whatever_the_top_k() -> None:
    flat = Flat([6, 1, 7, 2], [-1.0, -0.1, -2.0, -0.2], [0, 0, 2], [0, 2, 4])
    assert driver.own_logprobs(WINDOW, flat).tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (None, "window 3: vLLM returned log-probabilities for none of 3"),
        (Flat([6], [-1.0], [0, 0], [0, 1]), "for 2 of 3 positions"),
        (Flat([6], [-1.0], [0, 0, 1], [0, 1, 1]), "no log-probability at position 2"),
        (Flat([6, 8], [-1.0, -2.0], [0, 0, 1], [0, 1, 2]), "another token at position 2"),
    ],
)
def test_a_missing_score_is_an_error(flat: Flat | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        driver.own_logprobs(WINDOW, flat)


@pytest.mark.engine
@pytest.mark.parametrize("shift", ["by one token", "by half a nat"])
def test_scores_that_are_not_vllms_own_stop_the_run(
    toy_engine: VllmScoreBackend, monkeypatch: pytest.MonkeyPatch, shift: str
) -> None:
    own = driver.own_logprobs
    changed = (lambda *a: np.roll(own(*a), 1)) if shift == "by one token" else (lambda *a: own(*a) - 0.5)
    monkeypatch.setattr(driver, "own_logprobs", changed)
    with pytest.raises(ModelError, match=r"scores differ from vLLM's own prompt_logprobs by .* \(rounding explains"):
        scores_of(toy_engine, WINDOWS)
