"""The tensors of a checkpoint under the names that they have without quantization."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from ..layers.module_names import module_and_part
from .folder import Checkpoint
from .formats import FORMATS, is_quantized, layout_of, main_part
from .safetensors_files import Tensor

PACKED = re.compile(rf"(?<=\.)({'|'.join(FORMATS)})$")


class Stored(NamedTuple):
    """A tensor, its module, and the number of weights that it encodes, 0 if that is not known."""

    module: str
    weights: int
    tensor: Tensor


def stored_tensors(
    checkpoint: Checkpoint, modules: Collection[str] | None = None
) -> dict[str, Stored]:
    """Return the name that an unquantized checkpoint would have -> the tensor stored for it.

    ``modules``: only the tensors of these.
    """
    stored: dict[str, Stored] = {}
    for name, tensor in checkpoint.tensors.items():
        module, part_name = module_and_part(name)
        if modules is not None and module not in modules:
            continue
        parts = checkpoint.modules[module]
        if part_name == main_part(parts):
            weights = layout_of(parts, checkpoint.config, checkpoint.role(module)).weights
            if not isinstance(weights, int):
                weights = 0
            # gpt-oss stores the down_proj of its experts as down_proj_blocks.
            plain_name = PACKED.sub("weight", name).removesuffix("_blocks")
            stored[plain_name] = Stored(module, weights, tensor)
        elif part_name == "bias" or not is_quantized(parts):
            stored[name] = Stored(module, tensor.numel, tensor)
    return stored
