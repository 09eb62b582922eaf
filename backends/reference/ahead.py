"""Stored states on their way to a GPU while it computes: two buffers in turn, on a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backends.reference.comparison import Comparison
from backends.reference.reading import StoredRows


@dataclass(frozen=True)
class Fetched:
    """States that are being copied into buffer ``slot``; ``ready``: the event at the end of the copy."""

    parts: Sequence[StoredRows]
    states: torch.Tensor
    ready: Any
    slot: int


class StatesAhead:
    """Fetches states of at most ``rows`` rows at a time: one chunk is copied while the one before it is in use.

    In the stream of the computation the copies of 64 windows of 2,048 tokens (H = 4,096) took 20 ms of 3.6 s.
    """

    def __init__(self, comparison: Comparison, rows: int, width: int, dtype: torch.dtype) -> None:
        self.comparison = comparison
        self.stream: Any = torch.cuda.Stream(comparison.device)  # type: ignore[no-untyped-call]
        self.buffers = [torch.empty(rows, width, dtype=dtype, device=comparison.device) for _ in range(2)]
        self.stream.wait_stream(torch.cuda.current_stream())
        self.free: list[Any] = [None, None]
        self.fetched: Fetched | None = None
        self.slot = 1

    def fetch(self, parts: Sequence[StoredRows]) -> None:
        """Begin to copy the rows of ``parts`` once the buffer is free; nothing here waits."""
        self.slot = 1 - self.slot
        if self.free[self.slot] is not None:
            self.stream.wait_event(self.free[self.slot])
        with torch.cuda.stream(self.stream):
            states = self.comparison.on_device(parts, self.buffers[self.slot])
            ready = self.stream.record_event()
        self.fetched = Fetched(list(parts), states, ready, self.slot)

    def take(self, parts: Sequence[StoredRows]) -> Fetched:
        """The states [n, H] of ``parts``, which the current stream may use from now on, until ``give_back``."""
        if self.fetched is None or self.fetched.parts != list(parts):
            self.fetch(parts)
        taken, self.fetched = self.fetched, None
        assert taken is not None
        torch.cuda.current_stream().wait_event(taken.ready)
        return taken

    def give_back(self, taken: Fetched) -> None:
        """The buffer may be written again once the current stream has come here."""
        self.free[taken.slot] = torch.cuda.current_stream().record_event()
