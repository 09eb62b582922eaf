"""What a trace's answers are worth, by brute force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.toy import GPU, log_softmax

APART = 0.2 if GPU else 1e-3
"""Nats by which roundings may move the most probable token: of TF32, or of another order of additions."""


def gold(model: Path, rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(log-probability of the token, of the most probable one) of each answered token, by one pass without a cache."""
    from transformers import AutoModelForCausalLM

    loaded, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), []
    for row in rows:
        ids = [*row["input_ids"], *row["response_ids"]]
        with torch.inference_mode():
            logits = loaded(torch.tensor([ids])).logits[0].double()
        scored = {at: log_softmax(logits[at - 1].tolist()) for at in range(len(row["input_ids"]), len(ids))}
        found += [(logprobs[ids[at]], max(logprobs)) for at, logprobs in scored.items()]
    return found


def assert_greedy(model: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Every answered token is the most probable one, or cannot be told from it."""
    assert max(best - mine for mine, best in gold(model, rows)) < APART
