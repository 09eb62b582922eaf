"""Let each window start from the original factors of rotary embeddings that change.

With ``dynamic`` scaling, Transformers computes other factors for a sequence that is longer than all
before it, and uses them for later, shorter sequences too.  With ``longrope``, it switches between
two sets of factors.  Scores of a window would depend on the windows before it, and with
``streaming`` on those that run at the same time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

LONGEST_SEEN = "max_seq_len_cached"
"""Attribute of a rotary embedding: the length of the longest sequence so far."""


def start_from_original_factors(model: Any) -> None:
    """Restore the present factors of every rotary embedding of a model before each of its calls."""
    for module in model.modules():
        if LONGEST_SEEN in vars(module):
            original = partial(restore, numbers_of(module), dict(module._buffers))
            module.register_forward_pre_hook(original)


def numbers_of(module: Any) -> dict[str, Any]:
    """Return the numbers and tensors among a module's attributes, by name, without its buffers."""
    import torch

    numbers = {}
    for name, value in vars(module).items():
        if isinstance(value, int | float | torch.Tensor):
            numbers[name] = value
    return numbers


def restore(numbers: dict[str, Any], buffers: dict[str, Any], module: Any, *_: Any) -> None:
    """Give a module these attributes and buffers again, and delete those that it has added.

    Transformers replaces the tensors and does not change their content.
    """
    for name in numbers_of(module).keys() - numbers.keys():
        delattr(module, name)
    vars(module).update(numbers)
    module._buffers.clear()
    module._buffers.update(buffers)
