"""A model's list of decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backends.common.errors import ModelError

if TYPE_CHECKING:
    pass


def layer_list(decoder: Any, count: int, owner: str) -> Sequence[Any]:
    """The first list of ``count`` modules in a decoder; ModelError that begins with ``owner`` if there is none."""
    import torch

    for module in decoder.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise ModelError(f"{owner} has no list of {count} decoder layers")
