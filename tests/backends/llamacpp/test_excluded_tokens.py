"""Tokens that a model excludes for good: which scores they leave, and which positions are left out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import Task
from compare_q.backends.llamacpp.engine import FLOOR, raise_to_floor
from compare_q.backends.scoring import statistics
from compare_q.backends.worker import scoring
from tests.support.llama_cpp import loaded, runs_llama_cpp
from tests.support.toy import TOY_VOCAB, toy_windows


@runs_llama_cpp
def test_excluded_tokens_leave_every_score_but_the_divergence(toy_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry is -inf at every position, and the target of one position is -3.4e38: that position is left out."""
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
    assert (logits[:99, rare] == FLOOR).all()
    assert logits[40, target] == -math.inf
    (scores,) = scoring.token_scores(engine, [window], Task())
    assert [i for i in range(99) if not math.isfinite(scores.logprob[i])] == [40]
    masked = logits.double().cpu()
    masked[:, rare] = -math.inf
    gold = torch.log_softmax(masked, -1)[torch.arange(99), torch.from_numpy(window.token_ids[1:]).long()]
    np.testing.assert_allclose(np.delete(scores.logprob, 40), np.delete(gold.numpy(), 40), atol=2e-5)
    assert engine.provenance()["logits_set_to_floor"] == {"floor": -65504.0, "entries": 100, "targets_left_out": 1}
    (note,) = engine.provenance()["notes"]
    assert note.startswith("logits that llama.cpp excludes count as -65504: KL divergence is finite")


def test_floor_by_hand() -> None:
    """Below it: the floor; the target: -inf; all: -inf; NaN stays, as do logits at the floor."""
    inf, nan = math.inf, math.nan
    logits = torch.tensor([
        [1.0, -inf, FLOOR, 2.0], [-inf, 0.0, 0.0, 0.0], [-inf, -3e38, -inf, -inf], [nan, -inf, 0.0, 0.0],
    ])  # fmt: skip
    assert raise_to_floor(logits, torch.tensor([0, 0, 1, 2])) == (1 + 1 + 4 + 1, 2)
    expected = [[1.0, FLOOR, FLOOR, 2.0], [-inf, 0.0, 0.0, 0.0], [-inf] * 4, [nan, FLOOR, 0.0, 0.0]]
    torch.testing.assert_close(logits, torch.tensor(expected), equal_nan=True, atol=0, rtol=0)
    assert torch.isfinite(torch.tensor(FLOOR).half())
    rows = torch.empty(4, 10)
    statistics.partial(logits, torch.tensor([0, 0, 1, 2]), rows, reference=torch.zeros(4, 4))
    scores = statistics.scores(0, np.array([0, 0, 1, 2]), [rows.numpy()])
    assert [math.isfinite(value) for value in scores.logprob] == [True, False, False, False]
    assert math.isfinite(scores.kld[0])
    assert not np.isfinite(scores.kld[1:]).any()
    untouched = torch.tensor([[0.0, -1e4]])
    assert raise_to_floor(untouched, torch.tensor([1])) == (0, 0)
