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
from .store import DTYPES, store_folder

if TYPE_CHECKING:
    import torch

    from .head import RecomputableHead

SAMPLED_ROWS = 64
"""Rows of a window whose logits are compared with the head's product."""
WRITE_BYTES = 16 << 20
"""Bytes of a tensor to copy from its device, and to write, at a time."""
SAFETENSORS_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


class Recorder:
    """Writes the windows and the head of a reference into a folder.

    Attributes:
        key: of the reference; each file has it, since a file may be moved into the folder of
            another reference.
        windows: the digests of the windows, by their indices; their files are named by the digests.
        contents: states or logits are recorded.
        reason: why logits are recorded instead of states; empty for states.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        windows: Mapping[int, str],
        contents: Contents,
        reason: str = "",
    ) -> None:
        self.folder = store_folder(folder)
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
        """Return a recorder of states if the head recomputes logits from them, else of logits.

        ``logits`` [T, V] of the first window; ``states`` returns its states [T, H], and is only
        called if ``head`` is not a reason.
        """
        sample = logits[:SAMPLED_ROWS]
        difference: float | str
        if isinstance(head, str):
            difference = head
        else:
            difference = head_difference(head, states()[:SAMPLED_ROWS], sample)
        reason = head_mismatch(difference, largest_finite(sample), dtype_name(sample.dtype))
        contents: Contents = "states"
        if reason:
            contents = "logits"
        return cls(folder, key, windows, contents, reason)

    def chosen(self, logits: torch.Tensor, states: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the ``states()`` [n, H] or ``logits`` [n, V] of these rows, by ``contents``."""
        if self.contents == "states":
            return states()
        return logits

    def write(self, window: int, rows: torch.Tensor) -> None:
        """Write the ``chosen`` rows of a whole window, bit for bit.

        Thread-safe for different windows.
        """
        self.write_pieces(window, len(rows), iter([rows]))

    def write_pieces(
        self, window: int, n_rows: int, pieces_of_rows: Iterator[torch.Tensor]
    ) -> None:
        """Write the ``chosen`` rows of a window that has ``n_rows``, in pieces."""
        first = next(pieces_of_rows)
        # The header of the whole window comes before the first piece; "meta" takes no memory.
        window_rows = first.new_empty((n_rows, first.shape[1]), device="meta")
        metadata = storage.facts_line({"key": self.key, "reason": self.reason})
        content = chain(
            [header([(self.contents, window_rows)], metadata)],
            raw(first),
            chain.from_iterable(raw(piece) for piece in pieces_of_rows),
        )
        self.folder.add(f"row.{self.windows[window]}", content)

    def write_head(self, head: RecomputableHead | str, first: int = 0) -> None:
        """Write the head, whose entries begin at ``first``.

        RuntimeError if ``head`` is only a reason why there is none.
        """
        if isinstance(head, str):
            raise RuntimeError(head)
        weight, bias, head_facts = head
        tensors = {"weight": weight}
        if bias is not None:
            tensors["bias"] = bias
        metadata = storage.facts_line({"key": self.key, "head": asdict(head_facts)})
        self.folder.add(f"head.{first:06d}", pieces(tensors, metadata))


def pieces(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> Iterator[Any]:
    """Yield the bytes of a safetensors file: its header, then every tensor, from any device."""
    # The library's order: the widest dtype first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    yield header(ordered, metadata)
    for _, tensor in ordered:
        yield from raw(tensor.detach())


def header(tensors: list[tuple[str, torch.Tensor]], metadata: dict[str, str]) -> bytes:
    """Return a safetensors header: the length of a JSON text in eight bytes, and the text.

    Blanks pad the text to a multiple of eight bytes.
    """
    fields: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, tensor in tensors:
        end = begin + tensor.nbytes
        fields[name] = {
            "dtype": SAFETENSORS_DTYPES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield the bytes of a tensor, some rows at a time.

    Bytes of a GPU are copied in a separate stream, next to later computations.
    """
    import torch

    copy_stream: Any = nullcontext()
    if tensor.is_cuda:
        stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        # Without this, the stream may copy memory that is not written yet.
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        copy_stream = torch.cuda.stream(stream)
    row_bytes = tensor[:1].nbytes
    # A row may have no bytes, and is itself a piece if it is larger than a piece.
    n_rows = max(WRITE_BYTES // max(row_bytes, 1), 1)
    for begin in range(0, len(tensor), n_rows):
        # Entered for the copy only: the caller's code runs between two pieces.
        with copy_stream:
            piece = tensor[begin : begin + n_rows].cpu().contiguous()
        yield piece.view(torch.uint8).numpy().reshape(-1).data
