"""Leaving a model behind as a reference: its states or its logits of every window, and its head once.

Every engine records by this file: those that hand out logits, and each of vLLM's ranks its own share.  Several
processes may write into one folder (``backends/reference/store.py``), which ``begin`` has made ready.

The safetensors library makes a file in memory first, three copies under Python's lock: engines that score meanwhile
stood still.  Here tensors go into the file in pieces, and files are byte for byte those that the library makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare_q.backends.common import storage
from compare_q.backends.common.messages import dtype_name
from compare_q.backends.reference.head import Contents, head_difference, head_mismatch, largest_finite
from compare_q.backends.reference.store import DTYPES

if TYPE_CHECKING:
    import torch

    from compare_q.backends.reference.head import RecomputableHead

SAMPLED_ROWS = 64
"""Rows of a window's logits on which the head's product is compared with them."""
PIECE_BYTES = 16 << 20


class Recorder:
    """One process's record in ``folder``: ``contents`` says what is kept of every window, ``reason`` why logits are."""

    def __init__(self, folder: Path, contents: Contents, reason: str = "") -> None:
        self.folder, self.contents, self.reason = folder, contents, reason

    @classmethod
    def of_engine(
        cls, folder: Path, head: RecomputableHead | str, logits: torch.Tensor, states: Callable[[], torch.Tensor]
    ) -> Recorder:
        """The record of an engine that hands out logits, from its head and its first window: states where they suffice.

        ``logits`` [T, V]; ``states`` gives the states [T, H], and is only called if there is a head.
        """
        sample = logits[:SAMPLED_ROWS]
        difference = head if isinstance(head, str) else head_difference(head, states()[:SAMPLED_ROWS], sample)
        reason = head_mismatch(difference, largest_finite(sample), dtype_name(sample.dtype))
        return cls(folder, "logits" if reason else "states", reason)

    def chosen(self, logits: torch.Tensor, states: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What is kept of these rows: their ``states()`` [n, H] or ``logits`` [n, V]."""
        return states() if self.contents == "states" else logits

    def write(self, window: int, kept: torch.Tensor) -> None:
        """Write what was ``chosen`` of one whole window, bit for bit; thread-safe for distinct windows."""
        self.write_pieces(window, len(kept), iter([kept]))

    def write_pieces(self, window: int, n_rows: int, kept: Iterator[torch.Tensor]) -> None:
        """Write what was ``chosen`` of a window of so many rows, of which some come at a time."""
        first = next(kept)
        like = first.new_empty((n_rows, first.shape[1]), device="meta")
        metadata = storage.facts_line({"reason": self.reason})
        storage.keep(self.folder, f"row.{window:06d}", chain(
            [header([(self.contents, like)], metadata)], raw(first), chain.from_iterable(map(raw, kept))
        ))  # fmt: skip

    def write_head(self, head: RecomputableHead | str, first: int = 0) -> None:
        """Write the head, whose entries begin at ``first``; RuntimeError if there is none."""
        if isinstance(head, str):
            raise RuntimeError(head)
        weight, bias, what_it_does = head
        tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        metadata = storage.facts_line({"head": asdict(what_it_does)})
        storage.keep(self.folder, f"head.{first:06d}", pieces(tensors, metadata))


def pieces(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> Iterator[Any]:
    """The bytes of a safetensors file of tensors of any device: the header, then every tensor."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    yield header(ordered, metadata)
    for _, tensor in ordered:
        yield from raw(tensor.detach())


def header(tensors: list[tuple[str, torch.Tensor]], metadata: dict[str, str]) -> bytes:
    """Eight bytes with the length of the JSON, and the JSON, padded with blanks to a multiple of eight."""
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
    """The bytes of a tensor, some rows at a time; from a GPU by a stream of their own, beside later computations.

    A stream of one's own waits for nothing by itself.  Without the line that makes it wait for what computes the
    tensor, one of 100 small windows in Transformers on a busy H100 was kept as the memory had been before.
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
