"""The statistics of every token by definition, in float64 and plain Python loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from compare_q.backends.base import TokenScores
from tests.support.toy import log_softmax

INF = math.inf
NAN = math.nan
Partial = Callable[..., np.ndarray]
"""``partial(logits, targets, first=0, reference=None)`` -> partial statistics [n, width]."""


def draw(rows: int, columns: int, seed: int = 0, sigma: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * sigma


def draw_excluding() -> tuple[torch.Tensor, torch.Tensor]:
    """Return six rows of 3,000 logits, and the reference's.

    They have -inf in one of them, in both, and in a whole shard.
    """
    logits = draw(6, 3000)
    reference = draw(6, 3000, seed=1)
    logits[0, 1000:2000] = reference[0, 1000:2000] = -INF
    reference[1, 5:2999] = -INF
    logits[2, 2999] = -INF
    logits[3, 0] = reference[3, 0] = -INF
    logits[4, 1000:] = reference[4, 500:] = -INF
    logits[5, :1000] = -INF
    return logits, reference


def definitions(
    logits: torch.Tensor, targets: Any, reference: torch.Tensor | None
) -> dict[str, list[float]]:
    """Every field in float64 from its definition, one row at a time; finite logits and -inf."""
    values: dict[str, list[float]] = {}
    for field in fields(TokenScores):
        if field.name not in ("window", "kld_kind"):
            values[field.name] = []
    for i, target in enumerate(targets):
        q = log_softmax(logits[i].double().tolist())
        values["logprob"].append(q[target])
        values["entropy"].append(-math.fsum(math.exp(lq) * lq for lq in q if lq > -INF))
        values["top1_logprob"].append(max(q))
        values["top1"].append(q.index(max(q)) == target)
        if reference is None:
            continue
        p = log_softmax(reference[i].double().tolist())
        values["ref_logprob"].append(p[target])
        values["ref_top1_logprob"].append(max(p))
        values["kld"].append(divergence(p, q))
        # By convention, a target that the model excludes makes this False.
        values["same_top"].append(p.index(max(p)) == q.index(max(q)) and q[target] > -INF)
    return values


def divergence(p: list[float], q: list[float]) -> float:
    """Return sum exp(lp) (lp - lq) of log-probabilities; a probability of 0 contributes 0."""
    terms = []
    for lp, lq in zip(p, q, strict=True):
        if lp > -INF:
            terms.append(math.exp(lp) * (lp - lq))
    return math.fsum(terms)
