"""A reference store beside a model that is being scored: the reference's logits where the model's own logits are.

Every engine compares by this file: those that hand out logits with the whole vocabulary as the shard (0, V), vLLM's
tensor-parallel ranks with the share of the vocabulary that each holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare_q.backends.common.head import head_logits
from compare_q.backends.reference.reading import Blocks, ReferenceWindows, StoredRows
from compare_q.backends.reference.store import Reader
from compare_q.backends.scoring import divergences, statistics

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

CHUNK_ELEMENTS = 1 << 26
"""Logits of the reference that ``Comparison.statistics`` makes at a time: 128 MiB in bfloat16."""
COMPARED_ENTRIES = 1 << 13
"""Entries of a head that are compared at a time."""

FEW_ROWS = 64
"""Stored rows of several windows go to a GPU in one copy where a window has fewer on average, and else by themselves: a
window of 2,048 is not copied on the host first."""

HeadKey = tuple[Path, tuple[str, ...], int, int]
"""Which head of which store: its path, the checksums of the head's files, and the vocabulary entries."""


@dataclass(frozen=True)
class LoadedHead:
    """The reference's head on a device: ``weight`` [n, H], ``bias`` [n] or None, of the entries that ``key`` names.

    ``origin`` says for the results whether it is the model's own memory (``is_own``) or a copy.
    """

    key: HeadKey
    weight: torch.Tensor
    bias: torch.Tensor | None
    origin: str
    is_own: bool = False


def head_key(store: Reader, shard: tuple[int, int]) -> HeadKey:
    """What the loaded head of a store depends on."""
    return store.path, tuple(store.head_digests), *shard


def load_head(store: Reader, shard: tuple[int, int], device: Any, own: torch.Tensor | None = None) -> LoadedHead:
    """The head of a store of states, on a device.

    ``own``: the model's own head [last - first, H] on that device, if it has a plain one without a bias; its memory is
    used where it holds the same numbers.  Comparing a head of 1 GB takes 0.12 s.
    """
    if own is not None and is_same_weight(store, own, *shard):
        return LoadedHead(head_key(store, shard), own, None, "the model's own, bit for bit", is_own=True)
    weight, bias = store.weight(*shard, device)
    return LoadedHead(head_key(store, shard), weight, bias, f"a copy, {weight.nbytes >> 20} MiB")


def is_same_weight(store: Reader, weight: torch.Tensor, first: int, last: int) -> bool:
    """Whether the stored head is the given weight [last - first, H] bit for bit, compared piece by piece."""
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
    """The logits of a reference store, over the vocabulary entries [first, last) of ``shard``, on a device.

    ``head``: the store's head, if it is there already; None: a store of states loads it; ``with_divergences``: score by
    both passes (``backends/scoring/divergences.py``).  ``close`` ends the reading.
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
        """What is stored of some rows of a window: states [n, H], or logits [n, last - first] of the shard."""
        part = self.windows.get(rows)
        return part if self.head is not None else part[:, slice(*self.shard)]

    def on_device(self, parts: Sequence[StoredRows], out: torch.Tensor | None = None) -> torch.Tensor:
        """What is stored of several windows' rows, one after the other, on the device; into ``out`` where it is given.

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
        """The reference's logits [n, last - first] at the rows of ``parts``, one after the other.

        ``stored``: what ``on_device`` gives of them, if it is there already.
        """
        stored = self.on_device(parts) if stored is None else stored
        if self.head is None:
            return stored
        return head_logits(self.store.head, stored, self.head.weight, self.head.bias)

    def statistics(
        self, rows: StoredRows, logits: torch.Tensor, targets: NDArray[np.integer[Any]]
    ) -> NDArray[np.float32]:
        """Partial statistics [n, F] of a window's rows from their logits [n, V], cut to the shard (0, V').

        ``targets`` integers [n].  The reference's logits are made in pieces of bounded size.
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
        return out.cpu().numpy()  # waits for a GPU's copies of the window

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
    """Fetches states of at most ``rows`` rows at a time: one chunk is copied while the one before it is in use.

    In the stream of the computation the copies of 64 windows of 2,048 tokens (H = 4,096) took 20 ms of 3.6 s.
    """

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
        """Begin to copy the rows of ``parts`` once the buffer is free; nothing here waits."""
        import torch

        self.slot = 1 - self.slot
        if self.free[self.slot] is not None:
            self.stream.wait_event(self.free[self.slot])
        with torch.cuda.stream(self.stream):
            states = self.comparison.on_device(parts, self.buffers[self.slot])
            ready = self.stream.record_event()
        self.fetched = Fetched(list(parts), states, ready, self.slot)

    def take(self, parts: Sequence[StoredRows]) -> Fetched:
        """The states [n, H] of ``parts``, which the current stream may use from now on, until ``give_back``."""
        import torch

        if self.fetched is None or self.fetched.parts != list(parts):
            self.fetch(parts)
        taken, self.fetched = self.fetched, None
        assert taken is not None
        torch.cuda.current_stream().wait_event(taken.ready)
        return taken

    def give_back(self, taken: Fetched) -> None:
        """The buffer may be written again once the current stream has come here."""
        import torch

        self.free[taken.slot] = torch.cuda.current_stream().record_event()
