"""The head of a model: what turns its final hidden states into logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


Kind = Literal["states", "logits"]


@dataclass(frozen=True)
class Head:
    """What turns states into logits beside the weight: ``soft_cap`` c (z -> c tanh(z / c)), then ``scale`` (z -> s z).

    ``vocab_size`` is the number of real logits; ``dtype`` that of the product, torch's name without the prefix.
    """

    vocab_size: int
    dtype: str
    soft_cap: float | None = None
    scale: float = 1.0


def head_logits(head: Head, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Logits [n, V'] from states [n, H] and the head's weight [V', H] and bias [V'], in their dtype.

    Product, bias, soft cap, scale, each rounded: the order in which the engines that leave states behind compute them.
    """
    import torch

    logits = torch.nn.functional.linear(states, weight, bias)
    if head.soft_cap is not None:
        logits = logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
    return logits.mul_(head.scale) if head.scale != 1.0 else logits


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest |a - b|; infinite where only one is masked or NaN, so that no comparison with it passes by accident."""
    import torch

    a, b = a.float(), b.float()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).abs()
    return float(apart.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def largest_finite(logits: torch.Tensor) -> float:
    """Largest size of a finite logit; 0 if there is none."""
    import torch

    finite = torch.where(torch.isfinite(logits), logits.float(), 0.0)
    return float(finite.abs().max())
