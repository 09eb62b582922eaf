"""Opening a reference store, of compare_q or of upstream, and reading its windows ahead of their use."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backends.reference.store import MANIFEST, Reader, ReferenceStore
from backends.reference.upstream import UpstreamReader

if TYPE_CHECKING:
    import torch


AHEAD_BYTES = 512 << 20
"""Bytes of windows that are read before they are asked for: 16 windows of 2,048 tokens and H = 4,096 take 268 MB."""


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
        self.read: dict[int, torch.Tensor] = {}

    def _read(self, window: int) -> torch.Tensor:
        tensor = self.store.window(window)
        return tensor.pin_memory() if self.pin else tensor

    def get(self, window: int) -> torch.Tensor:
        """States [T, H] or logits [T, V] of a window, on the CPU."""
        if window not in self.read:
            self._submit(window)
            self.read[window] = self.futures[window].result()
        return self.read[window]

    def _submit(self, window: int) -> None:
        for wanted in range(window, min(window + 1 + self.ahead, self.store.n_windows)):
            if wanted not in self.futures:
                self.futures[wanted] = self.pool.submit(self._read, wanted)

    def drop(self, window: int) -> None:
        """Forget a window that has been scored."""
        self.futures.pop(window, None)
        self.read.pop(window, None)

    def close(self) -> None:
        """Stop reading."""
        self.pool.shutdown(cancel_futures=True)
        self.futures.clear()
        self.read.clear()
