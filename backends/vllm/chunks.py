"""Chunks of a step's rows in vLLM's worker, and the windows to which their statistics go.

The rows of a window arrive in parts, in any step, and again after a preemption.  Its statistics are
written by absolute position into a buffer on the host.  Repeated rows therefore overwrite the same
entries, and gaps are detected.  Results are copied asynchronously, and an event shows when those of
a step have arrived; only ``land`` waits, for the steps of finished windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.errors import ModelError
from ..reference.comparison import StoredRows
from ..scoring import token_statistics
from ..scoring.token_statistics import Column
from .hooks import ScoredRows

DEVICE_BYTES = 255 << 20
"""Largest total size of a chunk's logits, the reference's logits, states and results."""
PRODUCT_ROWS = (768, 128)
"""Rows of a head's product are a multiple of one of these numbers.

On an H200, 768 was fastest in 5 of 6 shapes.
"""
CPU_ROWS = 256
"""Largest number of rows of a chunk on a CPU.

On two cores 128 to 1,024 rows are equally fast, fewer are slower.
"""
NO_STATES = -1.0
"""Written instead of the sum of exponentials, which is positive, where a row's states are all zero.

A final norm never produces such a row.  The row was not computed: vLLM leaves out prompt tokens
whose states are not read.  All models would give it the same score, so that a quantized model would
have a KL divergence of 0.
"""
ZEROS = (
    ": they are all zero there, so that vLLM left these tokens out, or its weights are scaled "
    "wrongly and no state was finite; compare-q doctor checks the scales in the files"
)
"""Continues the message on positions whose states arrived as zeros."""


class Chunk(NamedTuple):
    """Some rows of a step: their ``targets`` [n], and their results ``out`` [n, F]."""

    parts: Sequence[ScoredRows]
    targets: torch.Tensor
    out: torch.Tensor


def chunks_of(parts: Sequence[ScoredRows], rows: int) -> Iterator[list[ScoredRows]]:
    """Yield the parts in lists of ``rows`` rows, cut to fit; the last list may be shorter."""
    chunk: list[ScoredRows] = []
    room = rows
    for part in parts:
        begin = 0
        while begin < part.n_rows:
            end = min(begin + room, part.n_rows)
            chunk.append(part.cut(begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield chunk
                chunk = []
                room = rows
    if chunk:
        yield chunk


def chunk_rows(
    *,
    columns: int,
    hidden_size: int,
    itemsize: int,
    compares: bool = False,
    shares_head: bool = False,
    caps_logits: bool = False,
    on_cpu: bool = False,
) -> int:
    """Return the number of rows of a chunk, at least 1.

    A chunk holds its logits and its gathered states.  A reference adds its logits and states or,
    where one product gives both logits, copies of its states and the states of both models side by
    side.

    Args:
        columns: vocabulary entries of the logits on this rank.
        hidden_size: numbers in a row's state.
        itemsize: bytes of a number.
        compares: the rows are compared with a reference.
        shares_head: one product gives the logits of the model and of the reference.
        caps_logits: the LogitsProcessor has a soft cap.
    """
    n_logits = 1
    n_states = 1
    n_products = 1
    if compares:
        n_logits = 2
        n_states = 2
    if caps_logits:
        # The LogitsProcessor divides, takes tanh and multiplies out of place.
        n_logits += 2
    if shares_head:
        n_states = 5
        n_products = 2
    results_and_target = token_statistics.width(True) * 4 + 8
    row_bytes = (columns * n_logits + hidden_size * n_states) * itemsize + results_and_target
    rows = DEVICE_BYTES // row_bytes
    if on_cpu:
        rows = min(rows, CPU_ROWS)
    for product_rows in PRODUCT_ROWS:
        unit = product_rows // n_products
        if rows >= unit:
            return rows // unit * unit
    return max(rows, 1)


@dataclass
class WindowBuffer:
    """The results of one window on the host."""

    statistics: NDArray[np.float32]  # partial ones, [T, F]
    written: NDArray[np.bool_]  # [T]: which scored positions have statistics of computed states
    record: torch.Tensor | None = None  # states [T, H] or logits [T, V] if the window is recorded
    landed: int = 0  # positions that arrived, including repetitions


class Landing(NamedTuple):
    """Statistics of a step on their way to the host."""

    statistics: torch.Tensor  # partial ones, [N, F], in host memory
    parts: Sequence[ScoredRows]
    event: Any  # of the GPU, after which they have arrived; None: they never left the host

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()

    def has_rows_of(self, windows: Collection[int]) -> bool:
        return any(part.rows.window in windows for part in self.parts)


@dataclass
class WindowBuffers:
    """The windows of a scoring run whose rows have arrived, but that are not collected yet."""

    windows: dict[int, WindowBuffer] = field(default_factory=dict)  # by index
    landings: deque[Landing] = field(default_factory=deque)
    recomputed: int = 0  # positions of finished windows that were scored again

    def take(self, window: int) -> WindowBuffer:
        """Remove and return a window's buffer; ModelError if positions are missing."""
        no_states = f"window {window}: vLLM computed no hidden states for"
        buffer = self.windows.pop(window, None)
        if buffer is None:
            raise ModelError(f"{no_states} any of its positions")
        n_scored = len(buffer.written)
        n_missing = n_scored - int(buffer.written.sum())
        if n_missing > 0:
            cause = ""
            if buffer.landed >= n_scored:
                cause = ZEROS
            raise ModelError(f"{no_states} {n_missing} of its positions{cause}")
        self.recomputed += buffer.landed - n_scored
        return buffer

    def buffer_of(self, rows: StoredRows, width: int) -> WindowBuffer:
        """Return the buffer of the rows' window, whose statistics have ``width`` columns."""
        if rows.window not in self.windows:
            statistics = np.empty((rows.n_scored, width), np.float32)
            written = np.zeros(rows.n_scored, np.bool_)
            self.windows[rows.window] = WindowBuffer(statistics, written)
        return self.windows[rows.window]

    def send(self, out: torch.Tensor, parts: Sequence[ScoredRows]) -> None:
        """Start copying a step's statistics [N, F] to the host."""
        if out.device.type != "cuda":
            self.landings.append(Landing(out, parts, None))
            return
        host = on_host(len(out), out).copy_(out, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        self.landings.append(Landing(host, parts, event))

    def record(self, rows: torch.Tensor, chunk: Chunk) -> None:
        """Start copying states [n, H] or logits [n, V] of a chunk to their windows.

        They arrive with the step's statistics.
        """
        begin = 0
        for part in chunk.parts:
            positions = part.rows
            buffer = self.buffer_of(positions, chunk.out.shape[1])
            if buffer.record is None:
                buffer.record = on_host(positions.n_scored, rows)
            end = begin + part.n_rows
            target = buffer.record[positions.begin : positions.end]
            target.copy_(rows[begin:end], non_blocking=True)
            begin = end

    def land(self, windows: Collection[int] = ()) -> None:
        """Put statistics that have arrived on the host into their windows.

        Wait for all steps that had rows of ``windows``, but not for later steps: vLLM starts a step
        before it returns the results of the step before it, so that the GPU always computes.
        """
        n_awaited = 0
        for number, landing in enumerate(self.landings, start=1):
            if landing.has_rows_of(windows):
                n_awaited = number
        while self.landings and (n_awaited > 0 or self.landings[0].has_arrived()):
            landing = self.landings.popleft()
            n_awaited -= 1
            if landing.event is not None:
                landing.event.synchronize()
            self.write(landing.statistics.numpy(), landing.parts)

    def write(self, statistics: NDArray[np.float32], parts: Sequence[ScoredRows]) -> None:
        """Write statistics [N, F] into the windows of their rows, by absolute position."""
        begin = 0
        for part in parts:
            end = begin + part.n_rows
            positions = slice(part.rows.begin, part.rows.end)
            buffer = self.buffer_of(part.rows, statistics.shape[1])
            buffer.statistics[positions] = statistics[begin:end]
            buffer.written[positions] = buffer.statistics[positions, Column.SUM] != NO_STATES
            buffer.landed += part.n_rows
            begin = end


def on_host(rows: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor [rows, F] on the host, with dtype and width of ``like``.

    For a tensor on a GPU the memory is pinned, so that copies are asynchronous.
    """
    is_on_gpu = like.device.type == "cuda"
    return torch.empty(rows, like.shape[1], dtype=like.dtype, pin_memory=is_on_gpu)
