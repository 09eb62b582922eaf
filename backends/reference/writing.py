"""Tensors -> a safetensors file with its checksum, in one pass and without a copy of the whole.

The library makes the file in memory first, three copies under Python's lock: engines that score meanwhile stood still.
Files are byte for byte those that the library makes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.common import owned
from backends.reference.manifest import Stored

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 16 << 20
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write(target: Path, tensors: Mapping[str, torch.Tensor]) -> Stored:
    """Write tensors of any device into a file that appears whole; returns its size and SHA-256."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    size, digest = 0, hashlib.sha256()
    with owned.replacing(target) as temporary, temporary.open("wb") as file:
        for piece in pieces(ordered):
            file.write(piece)  # Python's lock is released here and in the next line
            digest.update(piece)
            size += len(piece)
    return Stored(size, digest.hexdigest())


def pieces(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[Any]:
    """The bytes of the file: the header, then every tensor."""
    yield header(tensors)
    for _, tensor in tensors:
        yield from raw(tensor.detach())


def header(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """Eight bytes with the length of the JSON, and the JSON, padded with blanks to a multiple of eight."""
    fields, end = {}, 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        fields[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(tensor: torch.Tensor) -> Iterator[Any]:
    """The bytes of a tensor, some rows at a time; from a GPU by a stream of their own, behind the computation."""
    import torch

    behind: Any = nullcontext()
    if tensor.is_cuda:
        behind = torch.cuda.stream(torch.cuda.Stream(tensor.device))  # type: ignore[no-untyped-call]
    rows = max(PIECE_BYTES // max(tensor[:1].nbytes, 1), 1)
    for begin in range(0, len(tensor), rows):
        with behind:
            piece = tensor[begin : begin + rows].cpu().contiguous()
        yield piece.view(torch.uint8).numpy().reshape(-1).data
