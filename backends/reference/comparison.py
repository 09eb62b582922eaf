"""A reference store next to a model that is being scored: the reference's logits on the device of the model's own.

``ReferenceWindows`` reads windows ahead of their use.  ``Blocks`` holds some rows of each window on the device, for
decode steps that need one row of hundreds of windows: one gather instead of 256 copies of 8 KB.  ``Comparison`` turns
stored rows into the reference's logits, for the whole vocabulary (0, V) or for a tensor-parallel rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference.head import head_logits
from compare_q.backends.reference.store import Reader
from compare_q.backends.scoring import divergences, statistics

if TYPE_CHECKING:
    import torch

AHEAD_BYTES = 512 << 20
"""Bytes of windows to read ahead: 16 windows of 2,048 tokens and H = 4,096 take 268 MB."""
PIECE_BYTES = 64 << 20
"""Bytes of a window to read at a time: 8,192 states of H = 4,096 in bf16, so that most windows are one piece."""
ROWS, MOST = 2048, 64
"""Rows that ``Blocks`` holds of all windows (16 MiB of bf16 states with H = 4,096), and of one window."""
CHUNK_ELEMENTS = 1 << 26
"""Logits of the reference that ``Comparison.statistics`` computes at a time: 128 MiB in bfloat16."""
COMPARED_ENTRIES = 1 << 13
"""Vocabulary entries of two heads that are compared at a time."""
FEW_ROWS = 64
"""With fewer rows per window on average, rows of several windows are joined on the host and copied to the GPU once."""
HeadKey = tuple[Path, tuple[str, ...], int, int]
"""Identity of a head: the store's path, the checksums of the head's files, the vocabulary entries [first, last)."""


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
    """The rows of a piece, and the number of rows of its whole window in the store."""

    tensor: torch.Tensor
    n_rows: int


class ReferenceWindows:
    """Reads windows of a store in pieces of at most ``PIECE_BYTES``; a thread reads ahead in their order.

    ``pin``: into pinned memory, from which a GPU copies without waiting.
    """

    def __init__(self, store: Reader, *, pin: bool) -> None:
        self.store = store
        self.pin = pin
        self.pool = ThreadPoolExecutor(1)
        piece = max(store.stored_bytes // max(store.n_windows * self.n_pieces(0), 1), 1)
        self.ahead = min(max(AHEAD_BYTES // piece, 1), 64)
        self.futures: dict[Piece, Future[Read]] = {}
        self.asked: set[Piece] = set()  # also those that were forgotten, which are not read ahead again

    def n_pieces(self, window: int) -> int:
        """Number of pieces in which a window is read."""
        return max(-(-self.store.window_bytes(window) // PIECE_BYTES), 1)

    def pieces(self, window: int, number: int) -> Iterator[Piece]:
        """Yield this piece and all later ones, in order."""
        for later in range(window, self.store.n_windows):
            for each in range(number if later == window else 0, self.n_pieces(later)):
                yield Piece(later, each)

    def _read(self, piece: Piece) -> Read:
        n_rows = self.store.n_rows(piece.window)
        size = -(-n_rows // self.n_pieces(piece.window))
        tensor = self.store.window(piece.window, piece.number * size, (piece.number + 1) * size)
        return Read(tensor.pin_memory() if self.pin else tensor, n_rows)

    def get(self, rows: StoredRows) -> torch.Tensor:
        """Return states [n, H] or logits [n, V] of rows of a window, on the CPU; forget the pieces before them.

        ModelError unless the store has as many rows of the window as are scored: with another warm-up, every position
        would be shifted.
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
        if piece not in self.asked or piece not in self.futures:  # a preempted window starts again
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
    """Rows ``begin`` to ``end`` of a window, stored from row ``place`` on."""

    place: int
    begin: int
    end: int


class Blocks:
    """Holds blocks of ``size`` rows of each window on a device; ``read`` returns stored rows on the host.

    All device work is in the current stream, which must be the same each time.
    """

    def __init__(self, read: Callable[[StoredRows], torch.Tensor], device: torch.device) -> None:
        self.read, self.device = read, device
        self.rows: torch.Tensor | None = None
        self.size = 0
        self.held: dict[int, Block] = {}
        self.used: dict[int, int] = {}
        self.free: list[int] = []

    def get(self, parts: Sequence[StoredRows], out: torch.Tensor) -> bool:
        """Write the rows of ``parts`` into ``out`` [n, H], in order; False if blocks do not fit."""
        import torch

        windows = {part.window for part in parts}
        most = max(part.end - part.begin for part in parts)
        if len(windows) < len(parts) or most > MOST:
            return False
        if missing := [part for part in parts if not self.has(part)]:
            waiting = {window for window, block in self.held.items() if self.used[window] < block.end} - windows
            if ROWS // (len(parts) + len(waiting)) < 2:
                waiting = set()
            count = len(parts) + len(waiting)  # waiting: windows of other chunks of this step
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
        """Allocate blocks for ``count`` windows, with rows like [n, H]; rows held so far are read again."""
        import torch

        self.size, self.held = min(ROWS // count, MOST), {}
        self.free = [place * self.size for place in range(count)]
        self.rows = torch.empty(self.size * count, like.shape[1], dtype=like.dtype, device=self.device)

    def has(self, part: StoredRows) -> bool:
        """Return True if a part's rows are on the device."""
        block = self.held.get(part.window)
        return block is not None and block.begin <= part.begin and part.end <= block.end

    def load(self, parts: Sequence[StoredRows], wanted: set[int]) -> None:
        """Read a block for each part, from its first row on, instead of windows that are not ``wanted``."""
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
    """Copy an array to a device, through pinned memory, because a pageable copy would wait for the GPU."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True)
class LoadedHead:
    """The reference's head on a device: ``weight`` [n, H] and ``bias`` [n] or None, of the entries in ``key``.

    ``is_own``: it is the model's own memory; ``origin`` states that, or the size of the copy, for the results.
    """

    key: HeadKey
    weight: torch.Tensor
    bias: torch.Tensor | None
    origin: str
    is_own: bool = False


def head_key(store: Reader, shard: tuple[int, int]) -> HeadKey:
    """Return the identity of a store's head."""
    return store.path, tuple(store.head_digests), *shard


def load_head(store: Reader, shard: tuple[int, int], device: Any, own: torch.Tensor | None = None) -> LoadedHead:
    """Return the head of a store of states, on a device.

    ``own``: the model's own head [last - first, H] on that device, if it has one without a bias; its memory is used if
    it holds the same numbers.
    """
    if own is not None and is_same_weight(store, own, *shard):
        return LoadedHead(head_key(store, shard), own, None, "the model's own, bit for bit", is_own=True)
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
    """Logits of a reference store on a device, over the vocabulary entries [first, last) of ``shard``.

    ``head``: the store's head, if it is loaded already; ``with_divergences``: also compute the second pass of
    ``backends/scoring/divergences.py``.  ``close`` ends the reading.
    """

    def __init__(
        self, store: Reader, shard: tuple[int, int], device: torch.device, head: LoadedHead | None = None,
        *, with_divergences: bool = False,
    ) -> None:  # fmt: skip
        self.store, self.shard, self.device, self.with_divergences = store, shard, device, with_divergences
        self.head = load_head(store, shard, device) if store.contents == "states" and head is None else head
        self.windows = ReferenceWindows(store, pin=device.type == "cuda")
        self.blocks = Blocks(self.on_host, device)

    def on_host(self, rows: StoredRows) -> torch.Tensor:
        """Return the stored states [n, H], or logits [n, last - first] of the shard, of some rows of a window."""
        part = self.windows.get(rows)
        return part if self.head is not None else part[:, slice(*self.shard)]

    def on_device(self, parts: Sequence[StoredRows], out: torch.Tensor | None = None) -> torch.Tensor:
        """Return stored rows of several windows, one after the other, on the device, in ``out`` if given.

        Nothing waits for the copy.
        """
        import torch

        is_gpu, n = self.device.type == "cuda", sum(part.end - part.begin for part in parts)
        if is_gpu and out is not None and len(parts) > 1 and self.blocks.get(parts, out[:n]):
            return out[:n]
        stored = [self.on_host(part) for part in parts]
        if len(stored) == 1 and out is None:
            return stored[0].to(self.device, non_blocking=True)
        if out is None:
            out = torch.empty(n, stored[0].shape[1], dtype=stored[0].dtype, device=self.device)
        if is_gpu and n < FEW_ROWS * len(stored):
            stored = [torch.cat(stored, out=torch.empty_like(out[:n], device="cpu", pin_memory=True))]
        begin = 0
        for part in stored:
            out[begin : begin + len(part)].copy_(part, non_blocking=True)
            begin += len(part)
        return out[:n]

    def logits(self, parts: Sequence[StoredRows], stored: torch.Tensor | None = None) -> torch.Tensor:
        """Return the reference's logits [n, last - first] of the rows of ``parts``, one after the other.

        ``stored``: the result of ``on_device`` for them, if it exists already.
        """
        stored = self.on_device(parts) if stored is None else stored
        if self.head is None:
            return stored
        return head_logits(self.store.head, stored, self.head.weight, self.head.bias)

    def statistics(
        self, rows: StoredRows, logits: torch.Tensor, targets: NDArray[np.integer[Any]]
    ) -> NDArray[np.float32]:
        """Return partial statistics [n, F] of rows of a window from their logits [n, V], cut to the shard (0, V').

        ``targets``: integers [n].  The reference's logits are computed in pieces of at most ``CHUNK_ELEMENTS``.
        """
        import torch

        logits = logits[:, slice(*self.shard)]
        n_rows, entries = logits.shape
        ids = statistics.target_ids(rows.window, logits, targets)
        out = torch.empty(n_rows, divergences.width(True, self.with_divergences), device=logits.device)
        step = max(CHUNK_ELEMENTS // entries, 1)
        for begin in range(0, n_rows, step):
            end = min(begin + step, n_rows)
            reference = self.logits([rows._replace(begin=rows.begin + begin, end=rows.begin + end)])
            divergences.both_passes(logits[begin:end], ids[begin:end], out[begin:end], reference)
        return out.cpu().numpy()  # waits until the GPU has copied the window

    def drop(self, window: int) -> None:
        """Forget a window that has been scored."""
        self.windows.drop(window)

    def close(self) -> None:
        """Stop reading."""
        self.windows.close()


@dataclass(frozen=True)
class Fetched:
    """States that are being copied into buffer ``slot``; ``ready``: the event at the end of the copy."""

    parts: Sequence[StoredRows]
    states: torch.Tensor
    ready: Any
    slot: int


class StatesAhead:
    """Copies states of at most ``rows`` rows to the device, in its own stream, while the chunk before is used."""

    def __init__(self, comparison: Comparison, rows: int, width: int, dtype: torch.dtype) -> None:
        import torch

        self.comparison = comparison
        self.stream: Any = torch.cuda.Stream(comparison.device)  # type: ignore[no-untyped-call]
        self.buffers = [torch.empty(rows, width, dtype=dtype, device=comparison.device) for _ in range(2)]
        self.stream.wait_stream(torch.cuda.current_stream())
        self.free: list[Any] = [None, None]
        self.fetched: Fetched | None = None
        self.slot = 1

    def fetch(self, parts: Sequence[StoredRows]) -> None:
        """Start to copy the rows of ``parts`` once the buffer is free; returns at once."""
        import torch

        self.slot = 1 - self.slot
        if self.free[self.slot] is not None:
            self.stream.wait_event(self.free[self.slot])
        with torch.cuda.stream(self.stream):
            states = self.comparison.on_device(parts, self.buffers[self.slot])
            ready = self.stream.record_event()
        self.fetched = Fetched(list(parts), states, ready, self.slot)

    def take(self, parts: Sequence[StoredRows]) -> Fetched:
        """Return the states [n, H] of ``parts``, for the current stream, until ``give_back``."""
        import torch

        if self.fetched is None or self.fetched.parts != list(parts):
            self.fetch(parts)
        taken, self.fetched = self.fetched, None
        assert taken is not None
        torch.cuda.current_stream().wait_event(taken.ready)
        return taken

    def give_back(self, taken: Fetched) -> None:
        """Let the buffer be written again after the current stream's work so far."""
        import torch

        self.free[taken.slot] = torch.cuda.current_stream().record_event()
