"""Logits of a long window in pieces, by the model's own code.

The layers run once, the rest runs for each piece: 131,072 positions of 128,256 logits would be
33.6 GB in bfloat16.  A model of Transformers has two parts: a base model, which returns the final
states [1, L, H], and a forward that calls it once and turns states into logits (head, soft cap,
scale, masks).  The whole forward runs once, with the logits of the last token only, and the base
model's output is kept.  Then the forward runs again for each piece, with rows of that output
instead of the base model.  The last token's logits are computed twice, and must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..common.errors import ModelError
from ..common.message_text import dtype_name
from ..reference.head import head_mismatch, largest_difference, largest_finite

if TYPE_CHECKING:
    import torch


def pieces(model: Any, token_ids: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    """Run the layers for a window [1, L], and yield its logits [n, V], ``rows`` at a time.

    ModelError if the last token's logits in a piece differ by more than rounding.
    """
    name = type(model).__name__
    output, last_logits = base_output(model, token_ids)
    length = token_ids.shape[1]
    for begin in range(0, length, rows):
        part = copy.copy(output)
        part.last_hidden_state = output.last_hidden_state[:, begin : begin + rows]
        logits = logits_of_part(model, part, token_ids[:, begin : begin + rows])
        if begin + rows >= length:
            check_same_logits(name, last_logits, logits[-1:])
        yield logits


def base_output(model: Any, token_ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return the base model's output for a window [1, L], and the last token's logits [1, V]."""
    outputs: list[Any] = []

    def keep_output(_module: Any, _arguments: Any, output: Any) -> None:
        outputs.append(output)

    handle = model.base_model.register_forward_hook(keep_output)
    try:
        last_logits = model(token_ids, use_cache=False, logits_to_keep=1).logits[0]
    finally:
        handle.remove()
    expected = tuple(token_ids.shape)
    if len(outputs) != 1 or tuple(outputs[0].last_hidden_state.shape[:2]) != expected:
        raise ModelError(f"{type(model).__name__}: its base model returned states of another shape")
    return outputs[0], last_logits


def logits_of_part(model: Any, output: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [n, V] of the forward if its base model returns ``output``."""
    base = model.base_model

    def forward(*_: Any, **__: Any) -> Any:
        return output

    # In the module's own dict only if accelerate's hooks have set it.
    hooked = vars(base).get("forward")
    base.forward = forward
    try:
        logits: torch.Tensor = model(token_ids, use_cache=False).logits[0]
    finally:
        if hooked is None:
            del base.forward
        else:
            base.forward = hooked
    return logits


def check_same_logits(name: str, last_logits: torch.Tensor, logits: torch.Tensor) -> None:
    """ModelError if the last token's logits [1, V] of two forwards differ by more than rounding."""
    difference = largest_difference(last_logits, logits)
    largest = largest_finite(last_logits)
    if head_mismatch(difference, largest, dtype_name(last_logits.dtype)):
        raise ModelError(
            f"{name}: the last token's logits differ by {difference:.3g} where the head runs over "
            "a piece of a long window; take shorter windows"
        )
