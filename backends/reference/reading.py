"""Reading a reference store: windows ahead of their use, and rows in blocks on a device.

``Blocks`` serves steps that take one row of each of hundreds of windows.  One token a step, the 256 windows of a step
took their rows from the store in 256 pieces of 8 KB, while the GPU waited.  Read in blocks of several rows, most steps
are one gather on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.reference.store import MANIFEST, Reader, holds_upstreams_logits

if TYPE_CHECKING:
    import torch

AHEAD_BYTES = 512 << 20
"""Bytes of windows that are read before they are asked for: 16 windows of 2,048 tokens and H = 4,096 take 268 MB."""
PIECE_BYTES = 64 << 20
"""Bytes of a window that are read at a time: 8,192 states of H = 4,096 in bf16, so that most windows come whole."""
ROWS, MOST = 2048, 64
"""Rows that are held of all windows together, 16 MiB of states of 4,096 numbers in bf16, 8 of each of 256 windows; and
of one window at most."""


def open_reference(path: Path) -> Reader:
    """Return the store at ``path``; InputError names what is wrong with it."""
    if (path / MANIFEST).is_file():
        return Reader(path)
    if holds_upstreams_logits(path):
        raise InputError(
            f"{path}: holds logits that ExLlamaV3's compare_q kept, which cannot be read; name another path and mark "
            'the model as the reference ("reference": true), so that it is recorded anew'
        )
    raise InputError(f"{path}: holds no reference: there is no {MANIFEST}")


class StoredRows(NamedTuple):
    """Scored positions ``begin`` to ``end`` of a window that has ``n_scored``."""

    window: int
    n_scored: int
    begin: int
    end: int


class Piece(NamedTuple):
    """One piece of a window, by its number in the window."""

    window: int
    number: int


class Read(NamedTuple):
    """What was read of a piece, and the rows of its whole window in the store."""

    tensor: torch.Tensor
    n_rows: int


class ReferenceWindows:
    """Windows of a store, in pieces of at most ``PIECE_BYTES``, which a thread reads ahead in their order.

    ``pin``: in pinned memory, from which a GPU copies without waiting.
    """

    def __init__(self, store: Reader, *, pin: bool) -> None:
        self.store = store
        self.pin = pin
        self.pool = ThreadPoolExecutor(1)
        piece = max(store.stored_bytes // max(store.n_windows * self.n_pieces(0), 1), 1)
        self.ahead = min(max(AHEAD_BYTES // piece, 1), 64)
        self.futures: dict[Piece, Future[Read]] = {}
        self.asked: set[Piece] = set()  # those that were forgotten, too: nothing reads them ahead once more

    def n_pieces(self, window: int) -> int:
        """In how many pieces a window is read."""
        return max(-(-self.store.window_bytes(window) // PIECE_BYTES), 1)

    def pieces(self, window: int, number: int) -> Iterator[Piece]:
        """All pieces from one on, in their order."""
        for later in range(window, self.store.n_windows):
            for each in range(number if later == window else 0, self.n_pieces(later)):
                yield Piece(later, each)

    def _read(self, piece: Piece) -> Read:
        n_rows = self.store.n_rows(piece.window)
        size = -(-n_rows // self.n_pieces(piece.window))
        tensor = self.store.window(piece.window, piece.number * size, (piece.number + 1) * size)
        return Read(tensor.pin_memory() if self.pin else tensor, n_rows)

    def get(self, rows: StoredRows) -> torch.Tensor:
        """States [n, H] or logits [n, V] of some rows of a window, on the CPU.

        Pieces before these rows are forgotten.  ModelError unless the store has all rows of the window: a warm-up would
        shift every position.
        """
        import torch

        size = -(-rows.n_scored // self.n_pieces(rows.window))
        first, last = rows.begin // size, (rows.end - 1) // size
        self.forget(rows.window, first)
        found = [self._piece(Piece(rows.window, number)) for number in range(first, last + 1)]
        if (stored := found[0].n_rows) != rows.n_scored:
            raise ModelError(f"window {rows.window}: the reference has {stored} positions, the window {rows.n_scored}")
        tensor = found[0].tensor if first == last else torch.cat([each.tensor for each in found])
        return tensor[rows.begin - first * size : rows.end - first * size]

    def _piece(self, piece: Piece) -> Read:
        if piece not in self.asked or piece not in self.futures:  # a window may go back, and start again
            self.asked.add(piece)
            ahead = islice(self.pieces(*piece), 1, 1 + self.ahead)
            for wanted in (piece, *(each for each in ahead if each not in self.asked)):
                if wanted not in self.futures:
                    self.futures[wanted] = self.pool.submit(self._read, wanted)
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
        self.asked.clear()


class Block(NamedTuple):
    """Rows ``begin`` to ``end`` of a window, which lie from ``place`` on."""

    place: int
    begin: int
    end: int


class Blocks:
    """Blocks of ``size`` rows on a device; ``read`` gives stored rows on the host.

    All work on the device is done in the current stream, which must be the same one each time.
    """

    def __init__(self, read: Callable[[StoredRows], torch.Tensor], device: torch.device) -> None:
        self.read, self.device = read, device
        self.rows: torch.Tensor | None = None
        self.size = 0
        self.held: dict[int, Block] = {}
        self.used: dict[int, int] = {}
        self.free: list[int] = []

    def get(self, parts: Sequence[StoredRows], out: torch.Tensor) -> bool:
        """Write the rows of ``parts`` into ``out`` [n, H], one after the other; False if blocks have no room."""
        import torch

        windows = {part.window for part in parts}
        most = max(part.end - part.begin for part in parts)
        if len(windows) < len(parts) or most > MOST:
            return False
        if missing := [part for part in parts if not self.has(part)]:
            waiting = {window for window, block in self.held.items() if self.used[window] < block.end} - windows
            if ROWS // (len(parts) + len(waiting)) < 2:
                waiting = set()
            count = len(parts) + len(waiting)  # the others of this step, where a step has more than one chunk
            if ROWS // count < 2:
                return False
            if self.rows is None or count * self.size > len(self.rows):
                self.plan(count, out)
                missing = list(parts)
            if most > self.size:
                return False
            self.load(missing, windows | waiting)
        assert self.rows is not None
        index: list[int] = []
        for part in parts:
            block = self.held[part.window]
            begin = block.place + part.begin - block.begin
            self.used[part.window] = part.end
            index.extend(range(begin, begin + part.end - part.begin))
        torch.index_select(self.rows, 0, sent(np.array(index, np.int64), self.device), out=out)
        return True

    def plan(self, count: int, like: torch.Tensor) -> None:
        """Make room for blocks of so many windows, with rows like [n, H]; what was held is read again."""
        import torch

        self.size, self.held = min(ROWS // count, MOST), {}
        self.free = [place * self.size for place in range(count)]
        self.rows = torch.empty(self.size * count, like.shape[1], dtype=like.dtype, device=self.device)

    def has(self, part: StoredRows) -> bool:
        """Whether a part's rows are on the device."""
        block = self.held.get(part.window)
        return block is not None and block.begin <= part.begin and part.end <= block.end

    def load(self, parts: Sequence[StoredRows], wanted: set[int]) -> None:
        """Read a block for each part, from its first row on, in the places of windows that are not ``wanted`` now."""
        import torch

        assert self.rows is not None
        for window in [window for window in self.held if window not in wanted]:
            self.free.append(self.held.pop(window).place)
        stored, places = [], []
        for part in parts:
            end = min(part.begin + self.size, part.n_scored)
            place = self.held[part.window].place if part.window in self.held else self.free.pop()
            self.held[part.window] = Block(place, part.begin, end)
            stored.append(self.read(part._replace(end=end)))
            places.append(np.arange(place, place + end - part.begin))
        host = torch.cat(stored, out=torch.empty(
            sum(map(len, stored)), self.rows.shape[1], dtype=stored[0].dtype, pin_memory=self.device.type == "cuda"
        ))  # fmt: skip
        rows = host.to(self.device, non_blocking=True).to(self.rows.dtype)
        self.rows.index_copy_(0, sent(np.concatenate(places), self.device), rows)


def sent(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """An array on a device; pinned on its way, because a pageable copy would wait for the GPU."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
