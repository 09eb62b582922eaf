"""Reading a reference store, of compare_q or of upstream: windows ahead of their use, and rows in blocks on a device.

``Blocks`` serves steps that take one row of each of hundreds of windows.  One token a step, the 256 windows of a step
took their rows from the store in 256 pieces of 8 KB, while the GPU waited.  Read in blocks of several rows, most steps
are one gather on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compare_q.backends.reference.store import MANIFEST, Reader, ReferenceStore
from compare_q.backends.reference.upstream import UpstreamReader

if TYPE_CHECKING:
    import torch

AHEAD_BYTES = 512 << 20
"""Bytes of windows that are read before they are asked for: 16 windows of 2,048 tokens and H = 4,096 take 268 MB."""
ROWS, MOST = 2048, 64
"""Rows that are held of all windows together, 16 MiB of states of 4,096 numbers in bf16, 8 of each of 256 windows; and
of one window at most."""


def open_reference(path: Path) -> ReferenceStore:
    """The store at ``path``; InputError names what is wrong with it."""
    return Reader(path) if (path / MANIFEST).is_file() else UpstreamReader(path)


class StoredRows(NamedTuple):
    """Scored positions ``begin`` to ``end`` of a window that has ``n_scored``."""

    window: int
    n_scored: int
    begin: int
    end: int


class ReferenceWindows:
    """Windows of a store, read in their order by a thread while earlier windows are in use, from the first asked for.

    ``pin``: in pinned memory, from which a GPU copies without waiting.
    """

    def __init__(self, store: ReferenceStore, *, pin: bool) -> None:
        self.store = store
        self.pin = pin
        self.pool = ThreadPoolExecutor(1)
        self.ahead = min(max(AHEAD_BYTES * store.n_windows // max(store.stored_bytes, 1), 1), 64)
        self.futures: dict[int, Future[torch.Tensor]] = {}
        self.asked: set[int] = set()

    def _read(self, window: int) -> torch.Tensor:
        tensor = self.store.window(window)
        return tensor.pin_memory() if self.pin else tensor

    def get(self, window: int) -> torch.Tensor:
        """States [T, H] or logits [T, V] of a window, on the CPU."""
        if window not in self.asked:
            self.asked.add(window)
            for wanted in range(window, min(window + 1 + self.ahead, self.store.n_windows)):
                if wanted not in self.futures:
                    self.futures[wanted] = self.pool.submit(self._read, wanted)
        return self.futures[window].result()

    def drop(self, window: int) -> None:
        """Forget a window that has been scored."""
        self.futures.pop(window, None)
        self.asked.discard(window)

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
        torch.index_select(self.rows, 0, self.sent(np.array(index, np.int64)), out=out)
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
        sent = host.to(self.device, non_blocking=True).to(self.rows.dtype)
        self.rows.index_copy_(0, self.sent(np.concatenate(places)), sent)

    def sent(self, index: NDArray[np.int64]) -> torch.Tensor:
        """Places on the device; pinned on their way, because a pageable copy would wait for the GPU."""
        import torch

        tensor = torch.from_numpy(index)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
