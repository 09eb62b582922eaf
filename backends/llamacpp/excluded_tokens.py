"""Logits of -inf, and of tokens that a model excludes for good (Chameleon's images: -3.4e38; draft vocabularies: -inf).

Such a token has the probability 0 for the model, and a KL divergence of +inf wherever a reference gives it any, which
would leave a model without a single finite position.  Logits below ``FLOOR``, the lowest float16, are therefore set to
``FLOOR``: the probability stays exactly 0 in float32, log-probabilities and entropies do not change, and the divergence
becomes p_ref * (65504 + ...).  A *target* below ``FLOOR`` is set to -inf, so that its position is left out and counted;
so is a position without any logit above ``FLOOR``.  How many logits were set is in the results.  NaN stays NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLOOR = -65504.0


def raise_to_floor(logits: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
    """Set logits [T, V] below ``FLOOR`` to ``FLOOR``, and targets int64 [T] below it to -inf.

    Returns how many logits, and how many targets among them, were below.  A position that has no other logits gets
    -inf in all of them.
    """
    import torch

    if bool(logits.amin() >= FLOOR):
        return 0, 0
    low = logits < FLOOR
    excluded = low.gather(1, targets[:, None])
    logits.masked_fill_(low, FLOOR)
    logits.scatter_(1, targets[:, None], torch.where(excluded, -torch.inf, logits.gather(1, targets[:, None])))
    logits[low.all(-1)] = -torch.inf
    return int(low.sum()), int(excluded.sum())
