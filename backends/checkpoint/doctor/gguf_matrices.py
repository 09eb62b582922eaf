"""The matrices of a GGUF model as numbers, by the ``gguf`` package, under the names that Hugging Face gives them.

llama.cpp's converters reorder the rows of the query and key projections of Llama and its relatives for another form of
rotary embedding.  Which architectures do is not written in the file, so both orders are compared and the nearer one
counts: the wrong one has a relative error of about 1.4, as unrelated matrices have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from backends.checkpoint.doctor.matrices import Matrix
from backends.checkpoint.doctor.numbers import Floats
from backends.checkpoint.gguf import GgufModel
from backends.common.errors import InputError
from backends.common.packages import check_installed

INSTALL = "pip install gguf"
REORDERED = {"qwen3next", "qwen35", "qwen35moe"}
"""Architectures whose heads of linear attention llama.cpp's converter puts in another order."""
ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


def matrices_of(model: GgufModel, names: Sequence[str]) -> Iterator[tuple[str, Matrix | str]]:
    """(one of the ``names`` of Hugging Face's modules, its matrix or why it is not read), as far as the model has it.

    InputError if the package ``gguf`` is missing.
    """
    check_installed("gguf", INSTALL)
    from gguf import GGUFReader

    own = names_in_gguf(model, names)
    readers = [GGUFReader(file) for file in model.files]  # maps the file, and reads its header in some seconds
    there = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    for name in names:
        tensor = there.get(f"{own.get(name, name)}.weight")
        if tensor is not None and ".linear_attn." in name and model.architecture in REORDERED:
            yield name, "llama.cpp reorders the heads of its linear attention"
        elif tensor is not None:
            yield name, matrix(tensor, heads_of(model, name))


def names_in_gguf(model: GgufModel, names: Sequence[str]) -> dict[str, str]:
    """Hugging Face's name of a module -> llama.cpp's; a name that llama.cpp does not map is left out.

    llama.cpp knows the names of a language model alone, the hub has some as part of a model with a vision tower.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next((number for number, name in MODEL_ARCH_NAMES.items() if name == model.architecture), None)
    if arch is None:
        raise InputError(f"{model.files[0]}: the architecture {model.architecture!r} is not known to gguf")
    mapped = get_tensor_name_map(arch, model.field("block_count") or 0)
    found = {}
    for name in names:
        rest = name.rpartition("language_model.")[2].removeprefix("model.")
        alone = (f"model.{rest}", rest) if "language_model." in name else ()
        theirs = next((own for each in (name, *alone) if (own := mapped.get_name(each)) is not None), None)
        if theirs is not None:
            found[name] = theirs
    return found


def heads_of(model: GgufModel, name: str) -> int:
    """How many heads the rows of a projection belong to; 0 where their order is the same in both formats."""
    if not name.endswith(ROTATED):
        return 0
    heads = model.field("attention.head_count")
    count = (model.field("attention.head_count_kv") if name.endswith(ROTATED[1]) else None) or heads
    return count if isinstance(count, int) and count > 0 else 0


def matrix(tensor: Any, heads: int) -> Matrix | str:
    """The matrix of one tensor of ``GGUFReader``."""
    from gguf.quants import dequantize

    columns, rows = int(tensor.shape[0]), int(np.prod(tensor.shape[1:]))
    data = tensor.data.reshape(rows, -1)
    try:
        dequantize(data[:1], tensor.tensor_type)
    except NotImplementedError:
        return f"{tensor.tensor_type.name}, which gguf cannot dequantize"

    def band(begin: int, end: int) -> Floats:
        return np.asarray(dequantize(data[begin:end], tensor.tensor_type), np.float32)

    name = tensor.tensor_type.name.lower().replace("_k", "_K")
    other = restored(band, rows, heads) if heads and rows % (2 * heads) == 0 else None
    return Matrix(name, (rows, columns), band, other=other)


def restored(band: Callable[[int, int], Floats], rows: int, heads: int) -> Callable[[int, int], Floats]:
    """The rows in Hugging Face's order: first the halves of each head, in which llama.cpp alternates."""
    size = rows // heads
    order = np.arange(rows).reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(-1)

    def reordered(begin: int, end: int) -> Floats:
        wanted = order[begin:end]
        low = int(wanted.min())
        found: Floats = band(low, int(wanted.max()) + 1)[wanted - low]
        return found

    return reordered
