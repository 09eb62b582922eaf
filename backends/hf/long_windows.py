"""Logits of a long window in pieces, by the model's own code: the layers run once, the rest runs
for each piece.

131,072 positions of 128,256 logits would be 33.6 GB in bfloat16.  A model of Transformers has two
parts: a base model, which returns the final states [1, L, H], and a forward that calls it once and
turns states into logits (head, soft cap, scale, masks).  The whole forward runs once, with the
logits of the last token only, and the base model's output is kept.  Then the forward runs again for
each piece, with rows of that output instead of the base model.  The last token's logits are
computed twice, and must agree.
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
    """Run the layers for a window [1, L], and yield its logits [n, V], ``rows`` positions at a
    time.

    ModelError if the last token's logits in a piece differ by more than rounding.
    """
    name, base, outputs = type(model).__name__, model.base_model, list[Any]()
    handle = base.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        last = model(token_ids, use_cache=False, logits_to_keep=1).logits[0]
    finally:
        handle.remove()
    if len(outputs) != 1 or tuple(outputs[0].last_hidden_state.shape[:2]) != tuple(token_ids.shape):
        raise ModelError(f"{name}: its base model returned states of another shape")
    for begin in range(0, token_ids.shape[1], rows):
        part = copy.copy(outputs[0])
        part.last_hidden_state = outputs[0].last_hidden_state[:, begin : begin + rows]
        own = vars(base).get("forward")  # set by accelerate's hooks
        base.forward = lambda *_, part=part, **__: part
        try:
            logits: torch.Tensor = model(
                token_ids[:, begin : begin + rows], use_cache=False
            ).logits[0]
        finally:
            if own is None:
                del base.forward
            else:
                base.forward = own
        if begin + rows >= token_ids.shape[1]:
            difference, largest = largest_difference(last, logits[-1:]), largest_finite(last)
            if head_mismatch(difference, largest, dtype_name(last.dtype)):
                raise ModelError(
                    f"{name}: the last token's logits differ by {difference:.3g} where the head runs over a piece of a "
                    "long window; take shorter windows"
                )
        yield logits
