"""Results on their way from the device to the host, and the windows that they are put together to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends.reference.reading import StoredRows
from backends.scoring.statistics import Column
from backends.vllm.packing import Part

if TYPE_CHECKING:
    import torch


NO_STATES = -1.0
"""In place of the sum of exponentials, which is positive: the row's states are all zero.

No final norm leaves such a row.  vLLM has not computed it: it leaves out prompt tokens whose states, it thinks, nobody
reads.  Every model would score it alike, so that a quantized one had a KL divergence of 0.
"""


@dataclass
class Buffer:
    """One window: partial statistics [T, F] and, in a recording, states [T, H] or logits [T, V].

    ``written`` marks the scored positions [T] whose statistics are there and of states that vLLM has computed,
    ``landed`` counts the positions that came, repetitions too.
    """

    statistics: NDArray[np.float32]
    written: NDArray[np.bool_]
    kept: torch.Tensor | None = None
    landed: int = 0


@dataclass(frozen=True)
class Landing:
    """Partial statistics [N, F] of a step's rows, on the host once ``event`` (a GPU's) is over."""

    statistics: torch.Tensor
    parts: Sequence[Part]
    event: Any = None


@dataclass
class Buffers:
    """The windows of a pass, by index; ``recomputed``: positions of finished windows that were scored again."""

    windows: dict[int, Buffer] = field(default_factory=dict)
    landings: deque[Landing] = field(default_factory=deque)
    recomputed: int = 0

    def finished(self, window: int) -> Buffer | int:
        """A window's whole buffer, which is forgotten here, or how many of its positions are missing, -1 for all."""
        buffer = self.windows.pop(window, None)
        if buffer is None:
            return -1
        if missing := int((~buffer.written).sum()):
            return missing
        self.recomputed += buffer.landed - len(buffer.written)
        return buffer

    def send(self, out: torch.Tensor, parts: Sequence[Part]) -> None:
        """Send a step's statistics [N, F] to the host, behind the computation."""
        import torch

        if out.device.type != "cuda":
            self.landings.append(Landing(out, parts))
            return
        host = on_host(len(out), out)
        host.copy_(out, non_blocking=True)
        self.landings.append(Landing(host, parts, torch.cuda.current_stream().record_event()))

    def keep(self, kept: torch.Tensor, parts: Sequence[Part]) -> None:
        """Send states [n, H] or logits [n, V] to their windows; they are there when the step's statistics are."""
        begin = 0
        for part in parts:
            rows, buffer = part.rows, self.of(part.rows)
            if buffer.kept is None:
                buffer.kept = on_host(rows.n_scored, kept)
            buffer.kept[rows.begin : rows.end].copy_(kept[begin : begin + part.n_rows], non_blocking=True)
            begin += part.n_rows

    def of(self, rows: StoredRows) -> Buffer:
        """The buffer of the window that rows belong to."""
        if rows.window not in self.windows:
            nothing = np.empty((rows.n_scored, 0), np.float32)
            self.windows[rows.window] = Buffer(nothing, np.zeros(rows.n_scored, np.bool_))
        return self.windows[rows.window]

    def land(self, *, wait: bool = True) -> None:
        """Put statistics that have come to the host into their windows; ``wait``: for all that are on their way."""
        while self.landings and (wait or self.landings[0].event is None or self.landings[0].event.query()):
            landed = self.landings.popleft()
            if landed.event is not None:
                landed.event.synchronize()
            begin, values = 0, landed.statistics.numpy()
            for part in landed.parts:
                rows, buffer = slice(part.rows.begin, part.rows.end), self.of(part.rows)
                if not buffer.statistics.size:
                    buffer.statistics = np.empty((len(buffer.written), values.shape[1]), np.float32)
                buffer.statistics[rows] = values[begin : begin + part.n_rows]
                buffer.written[rows] = buffer.statistics[rows, Column.SUM] != NO_STATES
                buffer.landed += part.n_rows
                begin += part.n_rows


def on_host(rows: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor [rows, F] on the host, to which a GPU copies without waiting, of another tensor's dtype and width."""
    import torch

    return torch.empty(rows, like.shape[1], dtype=like.dtype, pin_memory=like.device.type == "cuda")
