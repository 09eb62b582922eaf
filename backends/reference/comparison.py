"""Compare a model that is being scored with a reference store, on one device.

``ReferenceWindows`` reads windows ahead of their use.  ``Comparison`` turns stored rows into the
reference's logits, for the whole vocabulary (0, V) or for a tensor-parallel rank's share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..common.errors import ModelError
from ..scoring import token_statistics
from .head import head_logits
from .store import Reader

if TYPE_CHECKING:
    import torch

AHEAD_BYTES = 512 << 20
"""Bytes of windows to read ahead: 16 windows of 2,048 tokens and H = 4,096 take 268 MB."""
MOST_PIECES_AHEAD = 64
"""Largest number of pieces to read ahead, however small they are."""
PIECE_BYTES = 64 << 20
"""Bytes of a window to read at a time: 8,192 states of H = 4,096 in bf16.

Most windows are one piece.
"""
CHUNK_ELEMENTS = 1 << 26
"""The reference's logits that ``Comparison.statistics`` computes at a time: 128 MiB in bfloat16."""
COMPARED_ENTRIES = 1 << 13
"""Vocabulary entries of two heads that are compared at a time."""
FEW_ROWS = 64
"""Fewer rows per window, on average, are joined on the host, so that a GPU copies them once."""
HeadKey = tuple[Path, tuple[str, ...], int, int]
"""Identity of a head: the store's path, its head's files, the vocabulary entries [first, last)."""


class StoredRows(NamedTuple):
    """Scored positions ``begin`` to ``end`` of a window that has ``n_scored``."""

    window: int
    n_scored: int
    begin: int
    end: int

    @property
    def n_rows(self) -> int:
        """Number of these positions."""
        return self.end - self.begin


class Piece(NamedTuple):
    """One piece of a window, by its number in the window."""

    window: int
    number: int


class ReferenceWindows:
    """Reads windows of a store in pieces; a thread reads ahead in the order of their use.

    ``windows``: the digests of the windows that will be scored, by their indices and in the order
    of scoring; nothing else of the store is read.  ``pin``: read into pinned memory; a GPU copies
    from it without waiting.
    """

    def __init__(self, store: Reader, windows: Mapping[int, str], *, pin: bool) -> None:
        self.store = store
        self.windows = windows
        self.pin = pin
        self.pool = ThreadPoolExecutor(1)
        self.pieces: list[Piece] = []  # all, in the order of their use
        n_bytes = 0
        for window, digest in windows.items():
            n_bytes += store.window_bytes(digest)
            for number in range(self.n_pieces(window)):
                self.pieces.append(Piece(window, number))
        self.index_of = {piece: index for index, piece in enumerate(self.pieces)}
        piece_bytes = max(n_bytes // max(len(self.pieces), 1), 1)  # on average
        self.n_ahead = min(max(AHEAD_BYTES // piece_bytes, 1), MOST_PIECES_AHEAD)
        self.futures: dict[Piece, Future[tuple[torch.Tensor, int]]] = {}
        self.requested: set[Piece] = set()  # also forgotten pieces, which are not read ahead again

    def is_of(self, store: Reader, windows: Mapping[int, str]) -> bool:
        """Return True if these are the ``windows`` of a store in their order, of the same files."""
        files = [store.windows.get(digest) for digest in windows.values()]
        files_here = [self.store.windows.get(digest) for digest in self.windows.values()]
        is_same_order = list(self.windows.items()) == list(windows.items())
        return self.store.path == store.path and is_same_order and files_here == files

    def read_ahead(self) -> None:
        """Read the first pieces now; ``get`` reports the errors."""
        self.start_ahead(0)
        wait(self.futures.values())

    def n_pieces(self, window: int) -> int:
        """Number of pieces in which a window is read."""
        return max(ceil_div(self.store.window_bytes(self.windows[window]), PIECE_BYTES), 1)

    def read(self, piece: Piece) -> tuple[torch.Tensor, int]:
        """Return a piece's rows, and the number of rows of its window."""
        digest = self.windows[piece.window]
        n_rows = self.store.n_rows(digest)
        size = ceil_div(n_rows, self.n_pieces(piece.window))
        tensor = self.store.window(digest, piece.number * size, (piece.number + 1) * size)
        if self.pin:
            tensor = tensor.pin_memory()
        return tensor, n_rows

    def get(self, rows: StoredRows) -> torch.Tensor:
        """Return states [n, H] or logits [n, V] of rows of a window, on the CPU.

        The pieces before them are forgotten.  ModelError unless the store has one row per scored
        position of the window: with another warm-up, every position would be shifted.
        """
        import torch

        size = ceil_div(rows.n_scored, self.n_pieces(rows.window))
        first = rows.begin // size
        last = (rows.end - 1) // size
        self.forget(rows.window, first)
        pieces = [self.piece(Piece(rows.window, number)) for number in range(first, last + 1)]
        tensor, n_stored = pieces[0]
        if n_stored != rows.n_scored:
            raise ModelError(
                f"window {rows.window}: the reference has {n_stored} positions, "
                f"the window {rows.n_scored}"
            )
        if len(pieces) > 1:
            tensor = torch.cat([part for part, _ in pieces])
        return tensor[rows.begin - first * size : rows.end - first * size]

    def piece(self, piece: Piece) -> tuple[torch.Tensor, int]:
        """Return the result of ``read``, and start to read the next pieces."""
        # A piece that was requested before is missing if vLLM has preempted its window, and now
        # starts the window again.
        if piece not in self.requested or piece not in self.futures:
            self.requested.add(piece)
            self.start_reading(piece)
            self.start_ahead(self.index_of[piece] + 1)
        return self.futures[piece].result()

    def start_ahead(self, begin: int) -> None:
        """Read the pieces from index ``begin`` on that were not used yet, as many as fit."""
        for piece in self.pieces[begin : begin + self.n_ahead]:
            if piece not in self.requested:
                self.start_reading(piece)

    def start_reading(self, piece: Piece) -> None:
        """Read a piece in the thread, unless it has been read or is being read."""
        if piece not in self.futures:
            self.futures[piece] = self.pool.submit(self.read, piece)

    def forget(self, window: int, end: int) -> None:
        """Forget the first ``end`` pieces of a window."""
        for number in range(end):
            self.futures.pop(Piece(window, number), None)
            self.requested.add(Piece(window, number))

    def drop(self, window: int) -> None:
        """Forget a window that has been scored."""
        self.forget(window, self.n_pieces(window))

    def close(self) -> None:
        """Stop reading."""
        self.pool.shutdown(cancel_futures=True)
        self.futures.clear()


def ceil_div(value: int, divisor: int) -> int:
    """Return a quotient of integers, rounded up; exact also where a float would not be."""
    return -(-value // divisor)


@dataclass(frozen=True)
class LoadedHead:
    """The reference's head on a device."""

    key: HeadKey
    weight: torch.Tensor  # [n, H], of the entries in ``key``
    bias: torch.Tensor | None  # [n]
    origin: str  # for the results: a note that the model's memory is used, or the size of the copy
    is_own: bool = False  # the head uses the model's own memory


def head_key(store: Reader, shard: tuple[int, int]) -> HeadKey:
    """Return the identity of a store's head."""
    return store.path, tuple(store.heads.values()), *shard


def load_head(
    store: Reader, shard: tuple[int, int], device: Any, model_weight: torch.Tensor | None = None
) -> LoadedHead:
    """Return the head of a store of states, on a device.

    ``model_weight``: the model's own head [last - first, H] on that device, if it has a head
    without bias.  Its memory is used if it holds the same numbers.
    """
    key = head_key(store, shard)
    if model_weight is not None and is_same_weight(store, model_weight, *shard):
        return LoadedHead(key, model_weight, None, "the model's own, bit for bit", is_own=True)
    weight, bias = store.weight(*shard, device)
    return LoadedHead(key, weight, bias, f"a copy, {weight.nbytes >> 20} MiB")


def is_same_weight(store: Reader, weight: torch.Tensor, first: int, last: int) -> bool:
    """Return True if the stored head equals ``weight`` [last - first, H] bit for bit."""
    import torch

    for begin in range(first, last, COMPARED_ENTRIES):
        end = min(begin + COMPARED_ENTRIES, last)
        stored, bias = store.weight(begin, end, "cpu")
        entries = weight[begin - first : end - first]
        if bias is not None or stored.dtype != entries.dtype or stored.shape != entries.shape:
            return False
        if not torch.equal(stored.to(entries.device), entries):
            return False
    return True


class Comparison:
    """Logits of a reference store on a device, over the vocabulary entries of a shard.

    ``shard``: the entries [first, last).  ``windows``: the digests of the windows that will be
    scored, by their indices.  ``head``: the store's head, if it is loaded already.  ``ahead``: the
    windows, if some of them have been read already.  ``close`` ends the reading thread.
    """

    def __init__(
        self,
        store: Reader,
        windows: Mapping[int, str],
        shard: tuple[int, int],
        device: torch.device,
        head: LoadedHead | None = None,
        ahead: ReferenceWindows | None = None,
    ) -> None:
        self.store = store
        self.shard = shard
        self.device = device
        if store.contents == "states" and head is None:
            head = load_head(store, shard, device)
        self.head = head
        self.windows = ahead or ReferenceWindows(store, windows, pin=device.type == "cuda")

    def on_host(self, rows: StoredRows) -> torch.Tensor:
        """Return the stored states [n, H] of some rows, or their logits [n, last - first]."""
        stored = self.windows.get(rows)
        if self.head is None:
            return stored[:, slice(*self.shard)]
        return stored

    def on_device(self, parts: Sequence[StoredRows]) -> torch.Tensor:
        """Return stored rows of different windows, one after the other, on the device.

        The copy to the device is not waited for.
        """
        import torch

        stored = [self.on_host(part) for part in parts]
        n_rows = sum(len(rows) for rows in stored)
        shape = (n_rows, stored[0].shape[1])
        dtype = stored[0].dtype
        has_short_parts = n_rows < FEW_ROWS * len(stored)
        if self.device.type == "cuda" and len(stored) > 1 and has_short_parts:
            pinned = torch.empty(shape, dtype=dtype, pin_memory=True)
            stored = [torch.cat(stored, out=pinned)]
        if len(stored) == 1:
            return stored[0].to(self.device, non_blocking=True)
        out = torch.empty(shape, dtype=dtype, device=self.device)
        begin = 0
        for rows in stored:
            end = begin + len(rows)
            out[begin:end].copy_(rows, non_blocking=True)
            begin = end
        return out

    def logits(self, parts: Sequence[StoredRows]) -> torch.Tensor:
        """Return the reference's logits [n, last - first] of rows, one part after the other."""
        stored = self.on_device(parts)
        if self.head is None:
            return stored
        return head_logits(self.store.head, stored, self.head.weight, self.head.bias)

    def statistics(
        self, rows: StoredRows, logits: torch.Tensor, targets: NDArray[np.integer[Any]]
    ) -> NDArray[np.float32]:
        """Return partial statistics [n, F] of rows of a window from their logits [n, V].

        The logits are cut to the shard, which is the whole vocabulary without padding: (0, V').
        ``targets``: integers [n].  The
        reference's logits are computed in pieces of at most ``CHUNK_ELEMENTS``.
        """
        import torch

        logits = logits[:, slice(*self.shard)]
        n_rows, n_entries = logits.shape
        ids = token_statistics.target_ids(rows.window, logits, targets)
        out = torch.empty(n_rows, token_statistics.width(True), device=logits.device)
        step = max(CHUNK_ELEMENTS // n_entries, 1)
        for begin in range(0, n_rows, step):
            end = min(begin + step, n_rows)
            reference = self.logits([rows._replace(begin=rows.begin + begin, end=rows.begin + end)])
            token_statistics.partial(
                logits[begin:end], ids[begin:end], out[begin:end], reference=reference
            )
        # Waits until the GPU has copied the window.
        return out.cpu().numpy()

    def drop(self, window: int) -> None:
        """Forget a window that has been scored."""
        self.windows.drop(window)

    def close(self) -> None:
        """Stop reading."""
        self.windows.close()
