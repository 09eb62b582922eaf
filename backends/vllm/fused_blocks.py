"""Find layers whose FP8 blocks end inside the matrix that vLLM fuses them into.

vLLM fuses q, k and v into one matrix, and computes each row's block from its number in this matrix.
If q has 576 rows and a block has 128, the first 64 rows of k get the last scale of q, and the
scales of k and v are put on wrong rows: a KLD of 0.57, and 0.026 for the same weights with correct
scales (vLLM 0.32, on CPUs).  vLLM does not warn if ``quant_method`` is ``fp8``
(``MergedColumnParallelLinear._maybe_allow_fp8_block_shape_mismatch``).  With compressed-tensors,
vLLM refuses the model with an error that does not name the layer.  vLLM itself checks experts.

The last part may end inside a block, unless ranks divide it: each rank then begins a new block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..checkpoint.checkpoint_config import CheckpointConfig
from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import main_tensor
from ..layers.module_names import FUSED_AS, fused_layers, is_outside
from ..layers.schemes import ROUTED, declared

WRONG_ROWS = (
    "the scales of the other parts fall on wrong rows; quantize per channel, or in blocks whose "
    "rows divide each part, and its share on each GPU"
)
WHOLE_ON_EACH_RANK = {"q_a_proj", "kv_a_proj_with_mqa", "wq_a", "wkv"}
"""Parts of latent attention, which each rank computes whole."""
KEYS_AND_VALUES = {"k_proj", "v_proj", "wk", "wv", "key", "value"}
"""Parts that are divided by heads.

If there are fewer heads than ranks, several ranks have the same head.
"""


def misplaced_scales(checkpoint: Checkpoint, ranks: int) -> Iterator[str]:
    """Yield a clause per fused group whose scales vLLM would put on wrong rows.

    ``ranks``: tensor parallel size.
    """
    heights = block_heights(checkpoint)
    for group in fused_groups(heights):
        clause = misplaced_part(group, heights, checkpoint, ranks)
        if clause:
            yield clause


def misplaced_part(
    group: tuple[str, ...], heights: dict[str, int], checkpoint: Checkpoint, ranks: int
) -> str:
    """Return a clause on the first part of a fused group that ends inside a block; "" if none."""
    parts = []
    for path in group:
        for rows in parts_of(path, checkpoint):
            parts.append((path, rows))
    for number, (path, rows) in enumerate(parts):
        shares = divided_by(path, checkpoint.config, ranks)
        rows_of_rank = rows // shares
        height = heights[path]
        # Nothing follows the last part, unless ranks divide it.
        is_last = number == len(parts) - 1 and shares == 1
        if rows_of_rank % height == 0 or is_last:
            continue
        names = ", ".join(name.rpartition(".")[2] for name in group)
        place = path
        if len(parts) != len(group):
            place = f"a part of {path}"
        share = ""
        if shares > 1:
            share = f" ({rows_of_rank:,} on each of {ranks} GPUs)"
        return (
            f"{place} has {rows:,} rows{share}, no multiple of the {height} in a block, and vLLM "
            f"fuses {names}"
        )
    return ""


def block_heights(checkpoint: Checkpoint) -> dict[str, int]:
    """Return module -> rows of an FP8 block.

    These are the modules of the text model that have blocks and are not routed experts.  The number
    of rows is positive.
    """
    schemes = declared(checkpoint.config.quantization)
    heights: dict[str, int] = {}
    for module, parts in checkpoint.quantized.items():
        is_text_module = not is_outside(module) and checkpoint.role(module) != ""
        if ROUTED.match(module) or not is_text_module:
            continue
        if not main_tensor(parts).dtype.startswith("F8_E"):
            continue
        scheme = schemes.of(module)
        if scheme is None:
            continue
        block = re.fullmatch(r"fp8 block (\d{1,9})x\d{1,9}", scheme.weights)
        if block is not None and int(block[1]) > 0:
            heights[module] = int(block[1])
    return heights


def fused_groups(modules: dict[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield groups of modules that vLLM fuses, in the order of the fused matrix.

    DeepSeek-V4's wq_a and wkv are such a group, too.
    """
    yield from fused_layers(modules)
    first, second = FUSED_AS["fused_wqa_wkv"]
    for path in modules:
        parent, _, name = path.rpartition(".")
        if name == first and f"{parent}.{second}" in modules:
            yield path, f"{parent}.{second}"


def parts_of(path: str, checkpoint: Checkpoint) -> list[int]:
    """Return the rows of each part of a stored matrix.

    It has one part, or q, k and v in a delta net's ``in_proj_qkv``.
    """
    parts = checkpoint.quantized[path]
    rows = main_tensor(parts).shape[-2]
    if path.rpartition(".")[2] != "in_proj_qkv":
        return [rows]
    text = checkpoint.config.text
    heads = text.get("linear_num_key_heads")
    size = text.get("linear_key_head_dim")
    if type(heads) is int and type(size) is int and 0 < 2 * heads * size < rows:
        return [heads * size, heads * size, rows - 2 * heads * size]
    return [rows]


def divided_by(path: str, config: CheckpointConfig, ranks: int) -> int:
    """Return the number of shares into which ranks divide the rows of a layer."""
    name = path.rpartition(".")[2]
    if name in WHOLE_ON_EACH_RANK:
        return 1
    heads = config.text.get("num_key_value_heads")
    if name in KEYS_AND_VALUES and type(heads) is int and heads > 0:
        return min(ranks, heads)
    return ranks
