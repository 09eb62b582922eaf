"""Opening a reference store, ours or upstream's, and reading its windows ahead of their use."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from backends.reference.store import MANIFEST, Reader, ReferenceStore
from backends.reference.upstream import UpstreamReader

if TYPE_CHECKING:
    import torch


AHEAD_BYTES = 512 << 20
"""Rows that are read before they are asked for: 16 of 2,048 tokens and hidden size 4,096 take 268 MB."""


def open_reference(path: Path) -> ReferenceStore:
    """The store at ``path``; InputError names what is wrong with it."""
    return Reader(path) if (path / MANIFEST).is_file() else UpstreamReader(path)


class Rows:
    """Rows of a store, in their order, read by a thread while earlier ones are in use."""

    def __init__(self, store: ReferenceStore, *, pin: bool) -> None:
        self.store = store
        self.pin = pin
        self.pool = ThreadPoolExecutor(1)
        self.ahead = min(max(AHEAD_BYTES * store.n_rows // max(store.stored_bytes, 1), 1), 64)
        self.futures: dict[int, Future[torch.Tensor]] = {}
        self._submit(0)

    def _read(self, row: int) -> torch.Tensor:
        tensor = self.store.row(row)
        return tensor.pin_memory() if self.pin else tensor

    def get(self, row: int) -> torch.Tensor:
        """Window ``row``'s tensor on the CPU, pinned for the GPU's sake if that was asked for."""
        self._submit(row)
        return self.futures[row].result()

    def _submit(self, row: int) -> None:
        for wanted in range(row, min(row + 1 + self.ahead, self.store.n_rows)):
            if wanted not in self.futures:
                self.futures[wanted] = self.pool.submit(self._read, wanted)

    def drop(self, row: int) -> None:
        """Forget a row that is done."""
        self.futures.pop(row, None)

    def close(self) -> None:
        """Stop reading."""
        self.pool.shutdown(cancel_futures=True)
        self.futures.clear()
