"""Compare a model that is being scored with a reference store, with both models' logits on one
device.

``ReferenceWindows`` reads windows ahead of their use.  ``Comparison`` turns stored rows into the
reference's logits, for the whole vocabulary (0, V) or for a tensor-parallel rank's share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
PIECE_BYTES = 64 << 20
"""Bytes of a window to read at a time: 8,192 states of H = 4,096 in bf16, so that most windows are
one piece."""
CHUNK_ELEMENTS = 1 << 26
"""Logits of the reference that ``Comparison.statistics`` computes at a time: 128 MiB in bfloat16.
"""
COMPARED_ENTRIES = 1 << 13
"""Vocabulary entries of two heads that are compared at a time."""
FEW_ROWS = 64
"""With fewer rows per window on average, rows of several windows are joined on the host and copied
to the GPU once."""
HeadKey = tuple[Path, tuple[str, ...], int, int]
"""Identity of a head: the store's path, the checksums of the head's files, the vocabulary entries
[first, last)."""


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
    """Reads windows of a store in pieces of at most ``PIECE_BYTES``; a thread reads ahead in the
    order of their use.

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
        for index in windows:
            self.pieces += [Piece(index, number) for number in range(self.n_pieces(index))]
        self.place = {piece: number for number, piece in enumerate(self.pieces)}
        sizes = [store.window_bytes(digest) for digest in windows.values()]
        average = max(sum(sizes) // max(len(self.pieces), 1), 1)
        self.ahead = min(max(AHEAD_BYTES // average, 1), 64)
        self.futures: dict[Piece, Future[tuple[torch.Tensor, int]]] = {}
        self.asked: set[Piece] = set()  # also forgotten pieces, which are not read ahead again

    def n_pieces(self, window: int) -> int:
        """Number of pieces in which a window is read."""
        return max(-(-self.store.window_bytes(self.windows[window]) // PIECE_BYTES), 1)

    def read(self, piece: Piece) -> tuple[torch.Tensor, int]:
        """Return a piece's rows, and the number of rows of its window."""
        digest = self.windows[piece.window]
        n_rows = self.store.n_rows(digest)
        size = -(-n_rows // self.n_pieces(piece.window))
        tensor = self.store.window(digest, piece.number * size, (piece.number + 1) * size)
        return tensor.pin_memory() if self.pin else tensor, n_rows

    def get(self, rows: StoredRows) -> torch.Tensor:
        """Return states [n, H] or logits [n, V] of rows of a window, on the CPU; forget the pieces
        before them.

        ModelError unless the store has one row per scored position of the window: with another
        warm-up, every position would be shifted.
        """
        import torch

        size = -(-rows.n_scored // self.n_pieces(rows.window))
        first, last = rows.begin // size, (rows.end - 1) // size
        self.forget(rows.window, first)
        found = [self.piece(Piece(rows.window, number)) for number in range(first, last + 1)]
        if (stored := found[0][1]) != rows.n_scored:
            raise ModelError(
                f"window {rows.window}: the reference has {stored} positions, the window {rows.n_scored}"
            )
        tensor = found[0][0] if first == last else torch.cat([each for each, _ in found])
        return tensor[rows.begin - first * size : rows.end - first * size]

    def piece(self, piece: Piece) -> tuple[torch.Tensor, int]:
        """Return the result of ``read``, and start to read the next pieces."""
        if piece not in self.asked or piece not in self.futures:  # a preempted window starts again
            self.asked.add(piece)
            first = self.place[piece] + 1
            for later in (piece, *self.pieces[first : first + self.ahead]):
                if later not in self.futures and (later == piece or later not in self.asked):
                    self.futures[later] = self.pool.submit(self.read, later)
        return self.futures[piece].result()

    def forget(self, window: int, before: int) -> None:
        """Forget the pieces of a window before one of them."""
        for number in range(before):
            self.futures.pop(Piece(window, number), None)
            self.asked.add(Piece(window, number))

    def drop(self, window: int) -> None:
        """Forget a window that has been scored."""
        self.forget(window, self.n_pieces(window))

    def close(self) -> None:
        """Stop reading."""
        self.pool.shutdown(cancel_futures=True)
        self.futures.clear()


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
    store: Reader, shard: tuple[int, int], device: Any, own: torch.Tensor | None = None
) -> LoadedHead:
    """Return the head of a store of states, on a device.

    ``own``: the model's own head [last - first, H] on that device, if it has a head without bias.
    Its memory is used if it holds the same numbers.
    """
    if own is not None and is_same_weight(store, own, *shard):
        return LoadedHead(
            head_key(store, shard), own, None, "the model's own, bit for bit", is_own=True
        )
    weight, bias = store.weight(*shard, device)
    return LoadedHead(head_key(store, shard), weight, bias, f"a copy, {weight.nbytes >> 20} MiB")


def is_same_weight(store: Reader, weight: torch.Tensor, first: int, last: int) -> bool:
    """Return True if the stored head equals ``weight`` [last - first, H] bit for bit."""
    import torch

    for begin in range(first, last, COMPARED_ENTRIES):
        end = min(begin + COMPARED_ENTRIES, last)
        stored, bias = store.weight(begin, end, "cpu")
        given = weight[begin - first : end - first]
        if bias is not None or stored.dtype != given.dtype or stored.shape != given.shape:
            return False
        if not torch.equal(stored.to(given.device), given):
            return False
    return True


class Comparison:
    """Logits of a reference store on a device, over the vocabulary entries [first, last) of
    ``shard``.

    ``windows``: the digests of the windows that will be scored, by their indices.  ``head``: the
    store's head, if it is loaded already.  ``close`` ends the reading thread.
    """

    def __init__(
        self,
        store: Reader,
        windows: Mapping[int, str],
        shard: tuple[int, int],
        device: torch.device,
        head: LoadedHead | None = None,
    ) -> None:
        self.store = store
        self.shard = shard
        self.device = device
        if store.contents == "states" and head is None:
            head = load_head(store, shard, device)
        self.head = head
        self.windows = ReferenceWindows(store, windows, pin=device.type == "cuda")

    def on_host(self, rows: StoredRows) -> torch.Tensor:
        """Return the stored states [n, H], or logits [n, last - first] of the shard, of some rows
        of a window.
        """
        part = self.windows.get(rows)
        return part if self.head is not None else part[:, slice(*self.shard)]

    def on_device(self, parts: Sequence[StoredRows]) -> torch.Tensor:
        """Return stored rows of different windows, one after the other, on the device, without
        waiting for the copy.
        """
        import torch

        stored = [self.on_host(part) for part in parts]
        n_rows = sum(map(len, stored))
        if self.device.type == "cuda" and len(stored) > 1 and n_rows < FEW_ROWS * len(stored):
            pinned = torch.empty(n_rows, stored[0].shape[1], dtype=stored[0].dtype, pin_memory=True)
            stored = [torch.cat(stored, out=pinned)]
        if len(stored) == 1:
            return stored[0].to(self.device, non_blocking=True)
        out = torch.empty(n_rows, stored[0].shape[1], dtype=stored[0].dtype, device=self.device)
        for part, place in zip(stored, torch.split(out, list(map(len, stored))), strict=True):
            place.copy_(part, non_blocking=True)
        return out

    def logits(self, parts: Sequence[StoredRows]) -> torch.Tensor:
        """Return the reference's logits [n, last - first] of the rows of ``parts``, one after the
        other.
        """
        stored = self.on_device(parts)
        if self.head is None:
            return stored
        return head_logits(self.store.head, stored, self.head.weight, self.head.bias)

    def statistics(
        self, rows: StoredRows, logits: torch.Tensor, targets: NDArray[np.integer[Any]]
    ) -> NDArray[np.float32]:
        """Return partial statistics [n, F] of rows of a window from their logits [n, V], cut to the
        shard (0, V').

        ``targets``: integers [n].  The reference's logits are computed in pieces of at most
        ``CHUNK_ELEMENTS``.
        """
        import torch

        logits = logits[:, slice(*self.shard)]
        n_rows, entries = logits.shape
        ids = token_statistics.target_ids(rows.window, logits, targets)
        out = torch.empty(n_rows, token_statistics.width(True), device=logits.device)
        step = max(CHUNK_ELEMENTS // entries, 1)
        for begin in range(0, n_rows, step):
            end = min(begin + step, n_rows)
            reference = self.logits([rows._replace(begin=rows.begin + begin, end=rows.begin + end)])
            token_statistics.partial(
                logits[begin:end], ids[begin:end], out[begin:end], reference=reference
            )
        return out.cpu().numpy()  # waits until the GPU has copied the window

    def drop(self, window: int) -> None:
        """Forget a window that has been scored."""
        self.windows.drop(window)

    def close(self) -> None:
        """Stop reading."""
        self.windows.close()
