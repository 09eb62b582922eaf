"""A loaded engine and windows -> per-token scores, whatever kind of engine it is; here is the shift by one.

The logits at position i predict token i + 1.  An engine that scores by itself is told what to do; one that hands out
logits is scored here, by the same definitions (``backends/scoring/statistics.py``), against the same store, on the same
positions, and leaves the same kind of store behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from backends.base import Backend, LogitsBackend, ScoringBackend, Task, TokenScores, Window
from backends.common.errors import ModelError
from backends.reference.head import head_logits, largest_difference, largest_finite
from backends.reference.reading import ReferenceWindows, open_reference
from backends.reference.store import Writer
from backends.scoring import statistics as statistics

if TYPE_CHECKING:
    import torch

    from backends.reference.head import Head

SAMPLED = 64
"""Rows of the first window on which the head's product is compared with the engine's own logits."""
LEAST_SPACING = 2.0**-12
"""Relative; a GPU's float32 products may be TF32."""
CHUNK_ELEMENTS = 1 << 26
"""Reference logits made at a time: 128 MiB in bfloat16."""


def token_scores(backend: Backend, windows: Iterable[Window], task: Task) -> Iterator[TokenScores]:
    """Scores of every window from either kind of engine, as they become ready."""
    if isinstance(backend, ScoringBackend):
        yield from backend.score(windows, task)
    elif isinstance(backend, LogitsBackend):
        windows = list(windows)
        backend.prepare(windows)
        with_reference = None if task.reference is None else Comparison(task)
        recorder = None if task.record is None else Recorder(backend, task)
        try:
            for window in windows:
                logits = scored_rows(backend.logits(window), window)
                if recorder is not None:
                    recorder.keep(window, logits)
                if with_reference is not None:
                    yield with_reference.scores(window, logits)
                else:
                    yield statistics.window_scores(window.index, logits, window.token_ids[window.score_from :])
            if recorder is not None:
                recorder.close()
        finally:
            if with_reference is not None:
                with_reference.close()
    else:
        raise TypeError(f"{type(backend).__name__} is neither a LogitsBackend nor a ScoringBackend")


def scored_rows(logits: torch.Tensor, window: Window) -> torch.Tensor:
    """Of logits [L, V], those [T, V] that predict the window's scored tokens."""
    length = len(window.token_ids)
    if logits.ndim != 2 or logits.shape[0] != length:
        raise ModelError(
            f"window {window.index}: logits of shape {tuple(logits.shape)} for a window of {length} tokens"
        )
    return logits[window.score_from - 1 : length - 1]


class Comparison:
    """A reference store beside logits: its own logits, window by window, on the device of the model's."""

    def __init__(self, task: Task) -> None:
        assert task.reference is not None
        self.store = open_reference(task.reference)
        self.windows = ReferenceWindows(self.store, pin=False)
        self.vocab_size = task.vocab_size or self.store.head.vocab_size
        self.weight: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def scores(self, window: Window, logits: torch.Tensor) -> TokenScores:
        """Scores of one window's logits [T, V], in pieces of bounded size."""
        import torch

        stored = self.windows.get(window.index)
        if len(stored) != len(logits):
            raise ModelError(
                f"window {window.index}: the reference has {len(stored)} positions, the window {len(logits)}"
            )
        self.vocab_size = min(self.vocab_size, logits.shape[1])
        logits = logits[:, : self.vocab_size]
        targets = window.token_ids[window.score_from :]
        ids = statistics.target_ids(window.index, logits, targets)
        out = torch.empty(len(logits), statistics.width(True), device=logits.device)
        step = max(CHUNK_ELEMENTS // self.vocab_size, 1)
        for begin in range(0, len(logits), step):
            part = slice(begin, begin + step)
            reference = self.logits(stored[part].to(logits.device), logits.device)
            statistics.partial(logits[part], ids[part], out[part], reference=reference)
        self.windows.drop(window.index)
        return statistics.scores(window.index, targets, [out.cpu().numpy()])

    def logits(self, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The reference's logits [n, V] from stored states or logits."""
        if self.store.kind == "logits":
            return stored[:, : self.vocab_size]
        if self.weight is None:
            self.weight = self.store.weight(0, self.vocab_size, device)
        return head_logits(self.store.head, stored, *self.weight)

    def close(self) -> None:
        """Stop reading."""
        self.windows.close()


class Recorder:
    """Leaves a model's states behind as a reference; its logits, where its head cannot be recomputed."""

    def __init__(self, backend: LogitsBackend, task: Task) -> None:
        assert task.record is not None
        self.backend = backend
        self.folder = task.record
        self.head = backend.head()
        self.writer: Writer | None = None
        self.logits_head: Head | None = None

    def keep(self, window: Window, logits: torch.Tensor) -> None:
        """Write one window, whose logits [T, V] have just been computed."""
        if self.writer is None:
            reason = self.head if isinstance(self.head, str) else self.mismatch(window, logits)
            self.writer = Writer(self.folder, "logits" if reason else "states", reason)
            if isinstance(self.head, str) or reason:
                self.logits_head = logits_head(logits)
        states = self.writer.kind == "states"
        self.writer.window(window.index, scored_rows(self.backend.states(), window) if states else logits)

    def mismatch(self, window: Window, logits: torch.Tensor) -> str:
        """Why head(states) is not what the engine computed; empty if it is, to rounding."""
        import torch

        assert not isinstance(self.head, str)
        weight, bias, facts = self.head
        if logits.shape[1] != facts.vocab_size:
            return f"its head has {facts.vocab_size} entries for {logits.shape[1]} logits"
        sample = logits[:SAMPLED]
        again = head_logits(facts, scored_rows(self.backend.states(), window)[:SAMPLED], weight, bias)
        difference = largest_difference(again, sample)
        spacing = max(torch.finfo(sample.dtype).eps, LEAST_SPACING)
        allowed = 2 * spacing * largest_finite(sample)
        return "" if difference <= allowed else f"its head's product differs from its logits by {difference:.3g}"

    def close(self) -> None:
        """Write the head, and close the record."""
        assert self.writer is not None
        if self.logits_head is not None:
            self.writer.close(self.logits_head)
            return
        assert not isinstance(self.head, str)
        weight, bias, facts = self.head
        self.writer.head(0, weight, bias)
        self.writer.close(facts)


def logits_head(logits: torch.Tensor) -> Head:
    """What a store of logits says of its head."""
    from backends.reference.head import Head

    return Head(logits.shape[1], str(logits.dtype).removeprefix("torch."))
