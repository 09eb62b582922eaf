"""The head of a model, which turns final hidden states into logits.

A head can be recomputed if its product gives the model's logits up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

    RecomputableHead: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, "Head"]
    """(weight [V, H], bias [V] or None, ``Head``) of a head that torch can recompute."""

Contents = Literal["states", "logits"]
"""Contents of a reference store."""

SPACINGS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-14}


@dataclass(frozen=True)
class Head:
    """A head without its weight: what it computes after the product with the states.

    ``soft_cap`` c replaces a logit z by c tanh(z / c), then ``scale`` s by s z.
    """

    # For the manifest of a store, which is read from a file.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    vocab_size: int  # number of logits without padding
    dtype: str  # name of the dtype in which the product is computed
    soft_cap: float | None = None
    scale: float = 1.0


def head_logits(
    head: Head, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return logits [n, V'] from states [n, H], in their dtype.

    ``weight`` [V', H] and ``bias`` [V'] may be a part of the head's.  Product, bias, soft cap and
    scale are each rounded, in the order of the engines that record states.
    """
    import torch

    logits = torch.nn.functional.linear(states, weight, bias)
    if head.soft_cap is not None:
        logits = logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
    if head.scale != 1.0:
        logits = logits.mul_(head.scale)
    return logits


def spacing(dtype: str) -> float:
    """Return how much two computations of one logit may differ by rounding, relative to the logit.

    bfloat16 and float16: the distance of two neighbouring numbers; unknown dtypes count as
    bfloat16.  float32: two orders of addition, with room.  If the tolerance is too small, logits
    are recorded although states would be enough.  If it is too large, wrong scores are accepted.
    """
    return SPACINGS.get(dtype, SPACINGS["bfloat16"])


def head_difference(
    head: RecomputableHead | str, states: torch.Tensor, logits: torch.Tensor
) -> float | str:
    """Return the largest |head(states) - logits|.

    ``states`` [n, H] and ``logits`` [n, V] are the engine's own.  If they cannot be compared,
    return the reason instead: ``head`` if it is a reason, or a note on different shapes.
    """
    if isinstance(head, str):
        return head
    weight, bias, head_facts = head
    if len(weight) != logits.shape[1]:
        return f"its head has {len(weight)} entries for {logits.shape[1]} logits"
    if states.ndim != 2 or len(states) != len(logits):
        return "its head is given other rows than its logits have"
    return largest_difference(head_logits(head_facts, states, weight, bias), logits)


def head_mismatch(difference: float | str, largest: float, dtype: str) -> str:
    """Return why logits must be recorded instead of states.

    Empty if the head recomputes logits up to rounding.  ``difference``: from ``head_difference``;
    ``largest``: the largest |logit|; ``dtype``: of the logits.  Four spacings are allowed: both
    sides round the product and, with a soft cap, the cap.
    """
    if isinstance(difference, str):
        return difference
    # False for NaN, so that a NaN is a difference.
    if difference <= 4 * spacing(dtype) * largest:
        return ""
    return f"its head's product differs from its logits by {difference:.3g}"


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest |a - b|.

    Infinite if only one is masked or NaN, so that no comparison passes by accident.
    """
    import torch

    a = a.float()
    b = b.float()
    # Of two equal infinities, a - b would be NaN.
    is_equal = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(is_equal, 0.0, a - b).abs()
    return float(difference.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def largest_finite(logits: torch.Tensor) -> float:
    """Largest size of a finite logit; 0 if no logit is finite."""
    import torch

    finite = torch.where(torch.isfinite(logits), logits.float(), 0.0)
    return float(finite.abs().max())
