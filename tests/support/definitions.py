"""The statistics of every token by definition, in float64 and plain Python loops, and comparisons
with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from compare_q.backends.base import TokenScores
from tests.support.toy import log_softmax

INF, NAN = math.inf, math.nan
Partial = Callable[..., np.ndarray]
"""``partial(logits, targets, first=0, reference=None)`` -> partial statistics [n, width]."""


def draw(rows: int, columns: int, seed: int = 0, sigma: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * sigma


def draw_excluding() -> tuple[torch.Tensor, torch.Tensor]:
    """Return six rows of 3,000 logits, and the reference's: -inf in one of them, in both, and in a
    whole shard.
    """
    logits, reference = draw(6, 3000), draw(6, 3000, seed=1)
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
    found: dict[str, list[float]] = {
        field.name: [] for field in fields(TokenScores) if field.name != "window"
    }
    for i, target in enumerate(targets):
        q = log_softmax([float(z) for z in logits[i].double()])
        found["logprob"].append(q[target])
        found["entropy"].append(-math.fsum(math.exp(lq) * lq for lq in q if lq > -INF))
        found["top1_logprob"].append(max(q))
        found["top1"].append(q.index(max(q)) == target)
        if reference is None:
            continue
        p = log_softmax([float(r) for r in reference[i].double()])
        found["ref_logprob"].append(p[target])
        found["ref_top1_logprob"].append(max(p))
        found["kld"].append(
            math.fsum(math.exp(lp) * (lp - lq) for lp, lq in zip(p, q, strict=True) if lp > -INF)
        )
        found["same_top"].append(
            p.index(max(p)) == q.index(max(q)) and q[target] > -INF
        )  # by convention
    return found
