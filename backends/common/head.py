"""The head of a model: what turns its final hidden states into logits, and whether it can be computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

    RecomputableHead: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, "Head"]
    """Weight [V, H], bias [V] or None, and what else there is of a head that torch can compute again."""

Contents = Literal["states", "logits"]
"""What a reference store holds of every window."""

SPACINGS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-14}


@dataclass(frozen=True)
class Head:
    """What turns states into logits beside the weight: ``soft_cap`` c (z -> c tanh(z / c)), then ``scale`` (z -> s z).

    ``vocab_size`` is the number of real logits; ``dtype`` the name of the dtype in which the product is computed.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

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


def spacing(dtype: str) -> float:
    """How far two computations of one logit may lie apart by rounding, relative to the logit, by the dtype's name.

    For bfloat16 and float16 the distance of two neighbouring numbers; a dtype that is not known counts as bfloat16.
    For float32 it is two orders of addition, with room: on a CPU they moved logits by up to 9e-7 of the largest
    (H = 4,096).

    One value serves both users, the probe of vLLM's log-probabilities and the comparison of heads.  Of the two values
    that these had for float32 (2**-14 and 2**-12) it is the smaller one: a tolerance that is too small keeps logits
    where states would do, one that is too large lets a wrong score pass.
    """
    return SPACINGS.get(dtype, SPACINGS["bfloat16"])


def head_difference(head: RecomputableHead | str, states: torch.Tensor, logits: torch.Tensor) -> float | str:
    """Largest |head(states) - logits| of states [n, H] and the engine's own logits [n, V].

    Or why there is nothing to compare: the reason that stands in the place of the head, or shapes that do not fit.
    """
    if isinstance(head, str):
        return head
    weight, bias, rest = head
    if len(weight) != logits.shape[1]:
        return f"its head has {len(weight)} entries for {logits.shape[1]} logits"
    if states.ndim != 2 or len(states) != len(logits):
        return "its head is given other rows than its logits have"
    return largest_difference(head_logits(rest, states, weight, bias), logits)


def head_mismatch(difference: float | str, largest: float, dtype: str) -> str:
    """Why logits have to be kept in the place of states; empty if the head can be recomputed from states, to rounding.

    ``difference`` as ``head_difference`` says it, ``largest`` the size of the largest logit there, ``dtype`` the name
    of the logits' dtype.  Four spacings are allowed: each of the two sides rounds the product and, with a soft cap, the
    cap.
    """
    if isinstance(difference, str):
        return difference
    if difference <= 4 * spacing(dtype) * largest:
        return ""
    return f"its head's product differs from its logits by {difference:.3g}"


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
