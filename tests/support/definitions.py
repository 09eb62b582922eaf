"""The statistics of every token by definition, in float64 and plain Python loops, and comparisons with them."""

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
    """Return six rows of 3,000 logits, and the reference's: -inf in one of them, in both, and in a whole shard."""
    logits, reference = draw(6, 3000), draw(6, 3000, seed=1)
    logits[0, 1000:2000] = reference[0, 1000:2000] = -INF
    reference[1, 5:2999] = -INF
    logits[2, 2999] = -INF
    logits[3, 0] = reference[3, 0] = -INF
    logits[4, 1000:] = reference[4, 500:] = -INF
    logits[5, :1000] = -INF
    return logits, reference


def definitions(logits: torch.Tensor, targets: Any, reference: torch.Tensor | None) -> dict[str, list[float]]:
    """Every field in float64 from its definition, one row at a time; finite logits and -inf."""
    found: dict[str, list[float]] = {field.name: [] for field in fields(TokenScores) if field.name != "window"}
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
        found["kld"].append(math.fsum(math.exp(lp) * (lp - lq) for lp, lq in zip(p, q, strict=True) if lp > -INF))
        found["same_top"].append(p.index(max(p)) == q.index(max(q)) and q[target] > -INF)  # by convention
    return found


def divergence_definitions(logits: torch.Tensor, reference: torch.Tensor) -> dict[str, list[float]]:
    """The four divergences of the second pass in float64 from their definitions; finite logits and -inf."""
    found: dict[str, list[float]] = {"reverse_kld": [], "js": [], "tv": [], "top5": []}
    for z, r in zip(logits.double().tolist(), reference.double().tolist(), strict=True):
        log_q, log_p = log_softmax(z), log_softmax(r)
        both = [(math.exp(lq), lq, math.exp(lp), lp) for lq, lp in zip(log_q, log_p, strict=True)]
        found["reverse_kld"].append(math.fsum(q * (lq - lp) if lq > -INF else 0.0 for q, lq, _, lp in both))
        if any(lq > -INF and lp == -INF for _, lq, _, lp in both):
            found["reverse_kld"][-1] = INF
        found["tv"].append(math.fsum(abs(p - q) for q, _, p, _ in both) / 2)
        halves = [a * math.log(2 * a / (p + q)) for q, _, p, _ in both for a in (p, q) if a > 0]
        found["js"].append(math.fsum(halves) / 2)
        tops = [sorted(range(len(x)), key=lambda i, x=x: (-x[i], i))[:5] for x in (z, r)]  # type: ignore[misc]
        found["top5"].append(len(set(tops[0]) & set(tops[1])) / len(tops[0]))
    return found


def assert_divergences_of(found: TokenScores, logits: torch.Tensor, reference: torch.Tensor, atol: float) -> None:
    """Compare the four divergences of a window with float64 results from the same logits [T, V], all finite."""
    q, p = (each.double().log_softmax(-1) for each in (logits, reference))
    middle = (p.exp() + q.exp()).log() - math.log(2)
    tops = [each.sort(dim=-1, descending=True, stable=True).indices[:, :5] for each in (logits, reference)]
    expected = {
        "reverse_kld": (q.exp() * (q - p)).sum(-1), "tv": (p.exp() - q.exp()).abs().sum(-1) / 2,
        "js": (p.exp() * (p - middle) + q.exp() * (q - middle)).sum(-1) / 2,
        "top5": (tops[0][:, :, None] == tops[1][:, None]).sum((1, 2)) / 5,
    }  # fmt: skip
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(found, name), values, atol=atol, rtol=0, err_msg=name)
