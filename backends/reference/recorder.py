"""Record a model as a reference: states or logits of every window, and the head once.

All engines use this recorder; each of vLLM's ranks records its share.  Several processes may write
into one folder, after ``begin`` of ``backends/reference/store.py``.

Tensors are written in pieces.  The safetensors library would first create the file in memory, with
three copies under the GIL, while scoring waits.  The files are byte for byte equal to the
library's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import storage
from ..common.message_text import dtype_name
from .head import Contents, head_difference, head_mismatch, largest_finite
from .store import DTYPES

if TYPE_CHECKING:
    import torch

    from .head import RecomputableHead

SAMPLED_ROWS = 64
"""Rows of a window whose logits are compared with the head's product."""
PIECE_BYTES = 16 << 20


class Recorder:
    """Writes into ``folder``; ``contents``: states or logits are recorded; ``reason``: why logits,
    not states.

    ``windows``: the digests of the windows, by their indices; their files are named by the digests.
    ``key``: of the reference; each file has it, since a file may be moved into the folder of
    another reference.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        windows: Mapping[int, str],
        contents: Contents,
        reason: str = "",
    ) -> None:
        self.folder = folder
        self.key = key
        self.windows = windows
        self.contents = contents
        self.reason = reason

    @classmethod
    def of_engine(
        cls,
        folder: Path,
        key: str,
        windows: Mapping[int, str],
        head: RecomputableHead | str,
        logits: torch.Tensor,
        states: Callable[[], torch.Tensor],
    ) -> Recorder:
        """Return a recorder of states if the head recomputes the first window's logits from them,
        else of logits.

        ``logits`` [T, V]; ``states`` returns states [T, H], and is only called if ``head`` is not a
        reason.
        """
        sample = logits[:SAMPLED_ROWS]
        difference = (
            head
            if isinstance(head, str)
            else head_difference(head, states()[:SAMPLED_ROWS], sample)
        )
        reason = head_mismatch(difference, largest_finite(sample), dtype_name(sample.dtype))
        return cls(folder, key, windows, "logits" if reason else "states", reason)

    def chosen(self, logits: torch.Tensor, states: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the ``states()`` [n, H] or ``logits`` [n, V] of these rows, by ``contents``."""
        return states() if self.contents == "states" else logits

    def write(self, window: int, kept: torch.Tensor) -> None:
        """Write the ``chosen`` rows of a whole window, bit for bit; thread-safe for different
        windows.
        """
        self.write_pieces(window, len(kept), iter([kept]))

    def write_pieces(self, window: int, n_rows: int, kept: Iterator[torch.Tensor]) -> None:
        """Write the ``chosen`` rows of a window that has ``n_rows``, in pieces."""
        first = next(kept)
        like = first.new_empty((n_rows, first.shape[1]), device="meta")
        metadata = storage.facts_line({"key": self.key, "reason": self.reason})
        rows = chain(
            [header([(self.contents, like)], metadata)],
            raw(first),
            chain.from_iterable(map(raw, kept)),
        )
        with storage.keeping("the reference", self.folder):
            storage.keep(self.folder, f"row.{self.windows[window]}", rows)

    def write_head(self, head: RecomputableHead | str, first: int = 0) -> None:
        """Write the head, whose entries begin at ``first``; RuntimeError if ``head`` is only a
        reason.
        """
        if isinstance(head, str):
            raise RuntimeError(head)
        weight, bias, what_it_does = head
        tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        metadata = storage.facts_line({"key": self.key, "head": asdict(what_it_does)})
        with storage.keeping("the reference", self.folder):
            storage.keep(self.folder, f"head.{first:06d}", pieces(tensors, metadata))


def pieces(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> Iterator[Any]:
    """Yield the bytes of a safetensors file of tensors on any device: the header, then every
    tensor.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    yield header(ordered, metadata)
    for _, tensor in ordered:
        yield from raw(tensor.detach())


def header(tensors: list[tuple[str, torch.Tensor]], metadata: dict[str, str]) -> bytes:
    """Return eight bytes with the length of the JSON, and the JSON, padded with blanks to a
    multiple of eight.
    """
    names = {ours: theirs for theirs, ours in DTYPES.items()}
    fields: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        dtype = names[dtype_name(tensor.dtype)]
        fields[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield the bytes of a tensor, some rows at a time; from a GPU in a separate stream, next to
    later computations.

    That stream must wait for the one that computes the tensor, or else it may copy memory that is
    not written yet.
    """
    import torch

    behind: Any = nullcontext()
    if tensor.is_cuda:
        stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        behind = torch.cuda.stream(stream)
    rows = max(PIECE_BYTES // max(tensor[:1].nbytes, 1), 1)
    for begin in range(0, len(tensor), rows):
        with behind:
            piece = tensor[begin : begin + rows].cpu().contiguous()
        yield piece.view(torch.uint8).numpy().reshape(-1).data
