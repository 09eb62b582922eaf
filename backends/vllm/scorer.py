"""Inside vLLM's worker: the statistics of every scored position, computed next to the lm_head in bounded chunks.

A window arrives in segments, in any step and again after a preemption.  Its statistics are written by absolute
position into a buffer on the host, so that a repetition overwrites itself and a gap shows.  Nothing here waits for the
GPU: results are copied behind the computation, and an event says when a window's are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends.common.messages import one_line
from backends.reference.head import Head, Kind, head_logits, largest_difference
from backends.reference.reading import ReferenceWindows, open_reference
from backends.reference.store import Writer
from backends.scoring import statistics as statistics
from backends.vllm.hooks import Segment
from backends.vllm.logits import LogitsSource

if TYPE_CHECKING:
    import torch

DEVICE_BYTES = 255 << 20
"""What the logits of a chunk, the reference's logits and states and the results may take together: measured on an H200,
512 rows of 128,256 entries against a reference took 254.4 MiB beyond what the step had."""
RESULT_BYTES = 10 * 4 + 8
CPU_ROWS = 256
"""Two cores of an AMD EPYC, head product and statistics of 1,024 rows against a reference (V = 49,152), by rows
at a time: 16 1.91, 32 1.41, 64 1.11, 128 1.00, 256 1.01, 512 1.06, 1,024 1.01; V = 128,256 likewise."""
COMPARED = 1 << 13


@dataclass(frozen=True)
class Plan:
    """What a run's steps have to do; JSON types, so that it travels to the workers.

    ``gathered``: use vLLM's gathered logits.  ``vocab_size``: cut logits to it; None: the model's own.  ``probe``:
    compare gathered with local logits and the head's product with both.  ``reference``: store to compare with.
    ``record``: folder to leave this model's states or logits (``record_kind``) in.
    """

    gathered: bool = False
    vocab_size: int | None = None
    probe: bool = False
    reference: str | None = None
    record: str | None = None
    record_kind: Kind = "states"
    record_reason: str = ""


@dataclass
class Buffer:
    """One window on its way: partial statistics [T, F] and, for a reference, states [T, H] or logits [T, V]."""

    statistics: torch.Tensor
    kept: torch.Tensor | None
    written: NDArray[np.bool_]
    done: Any = None


@dataclass
class Probe:
    """Largest differences seen: local from gathered logits, head(states) from the engine's own; the dtype of those.

    ``head_reason`` says why there is no head to compare.
    """

    local: float = 0.0
    head: float = 0.0
    head_reason: str = ""
    dtype: str = ""


@dataclass
class Scorer:
    """One rank's scorer between ``begin`` and ``end`` of a run; ``keeps``: whether this rank keeps the record."""

    source: LogitsSource
    plan: Plan
    device: Any
    vocab_size: int
    tp_size: int
    keeps: bool = True
    buffers: dict[int, Buffer] = field(default_factory=dict)
    probe: Probe = field(default_factory=Probe)
    recomputed: int = 0
    extra_bytes: int = 0
    largest_chunk: int = 0
    kept_columns: int = 0
    error: str = ""
    reference_head: str = ""
    writer: Writer | None = None
    reference: ReferenceWindows | None = None
    reports: bool = True
    _weight: tuple[Any, Any] | None = None

    def __post_init__(self) -> None:
        if self.plan.record is not None:
            self.writer = Writer(Path(self.plan.record), self.plan.record_kind, self.plan.record_reason)
        if self.plan.reference is not None:
            self.reference = ReferenceWindows(open_reference(Path(self.plan.reference)), pin=self.device.type == "cuda")
            if self.reference.store.kind == "states":
                self._weight = self._reference_weight(*self.shard)

    @property
    def entries(self) -> int:
        """Vocabulary entries that are scored, on all ranks together."""
        processor = self.source.processor
        whole = self.vocab_size if processor is None else int(processor.org_vocab_size)
        return min(self.plan.vocab_size or whole, whole)

    @property
    def shard(self) -> tuple[int, int]:
        """Those of them, [first, last), that this rank scores."""
        whole = (0, self.entries)
        first, last = whole if self.plan.gathered else self.source.shard or whole
        return min(first, self.entries), min(last, self.entries)

    def chunk_rows(self, hidden_size: int, itemsize: int) -> int:
        """Rows at a time, a multiple of 128 where that is possible."""
        columns = self.vocab_size if self.plan.gathered or self.plan.probe else -(-self.vocab_size // self.tp_size)
        copies = 1 + (self.reference is not None)
        if any(processor.soft_cap is not None for processor in self.source.processors):
            copies += 2  # the LogitsProcessor divides, takes tanh and multiplies out of place
        states = hidden_size * itemsize if self.reference is not None else 0
        rows = DEVICE_BYTES // (columns * itemsize * copies + states + RESULT_BYTES)
        if self.device.type == "cpu":
            rows = min(rows, CPU_ROWS)
        return max(rows // 128 * 128 or rows, 1)

    def step(self, hidden_states: torch.Tensor, segments: list[Segment]) -> None:
        """Score this step's rows of ours; the first error is kept in ``error``."""
        together = self.plan.gathered or self.plan.probe
        with memory_of(self):
            for segment in segments:
                window, score_from, n_scored = segment.tag
                # The row at position p predicts token p + 1: scored rows are score_from - 1 to L - 2.
                begin = max(segment.start, score_from - 1)
                end = min(segment.start + segment.count, score_from - 1 + n_scored)
                size = self.chunk_rows(hidden_states.shape[1], hidden_states.element_size())
                for a in range(begin, end, size):
                    if self.error and not together:
                        return
                    b = min(a + size, end)
                    hidden = hidden_states[segment.begin + a - segment.start : segment.begin + b - segment.start]
                    logits = self.logits(hidden)  # ranks gather together: also after an error on one of them
                    if logits is None:  # vLLM gathers on another rank
                        self.reports = False
                    elif not self.error:
                        self.try_score(window, n_scored, a - score_from + 1, logits, segment.tokens(a + 1, b + 1))

    def try_score(self, window: int, n_scored: int, at: int, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """``score``, whose error is kept: raised here it would kill the engine."""
        try:
            self.score(window, n_scored, at, logits, targets)
        except Exception as error:
            self.error = f"{type(error).__name__}: {one_line(error)}"

    def score(self, window: int, n_scored: int, at: int, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Statistics of logits [n, V'], scored positions ``at`` to ``at + n`` of a window, into its buffer."""
        import torch

        first, last = self.shard
        self.probe.dtype = str(logits.dtype).removeprefix("torch.")
        logits = logits[:, : last - first]
        n = len(logits)
        self.largest_chunk = max(self.largest_chunk, n)
        reference = self.reference_logits(window, n_scored, at, n)
        out = torch.empty(n, statistics.width(reference is not None), dtype=torch.float32, device=logits.device)
        statistics.partial(logits, targets, out, first=first, reference=reference)
        kept = None
        if self.writer is not None and self.keeps:
            kept = self.source.states if self.plan.record_kind == "states" else logits
            self.kept_columns = kept.shape[1]
        buffer = self.buffers.get(window) or self._new(window, n_scored, out, kept)
        self.recomputed += int(buffer.written[at : at + n].sum())
        buffer.statistics[at : at + n].copy_(out, non_blocking=True)
        if kept is not None and buffer.kept is not None:
            buffer.kept[at : at + n].copy_(kept, non_blocking=True)
        buffer.written[at : at + n] = True
        if buffer.written.all() and self.device.type == "cuda":
            buffer.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.done.record()

    def _new(self, window: int, n_scored: int, out: torch.Tensor, kept: torch.Tensor | None) -> Buffer:
        import torch

        pin = self.device.type == "cuda"
        self.buffers[window] = Buffer(
            torch.empty(n_scored, out.shape[1], dtype=torch.float32, pin_memory=pin),
            None if kept is None else torch.empty(n_scored, kept.shape[1], dtype=kept.dtype, pin_memory=pin),
            np.zeros(n_scored, dtype=np.bool_),
        )
        return self.buffers[window]

    def logits(self, hidden: torch.Tensor) -> Any:
        """The logits that are scored; in a probe all ways to them are compared first."""
        if self.plan.gathered:
            self.probe.head_reason = "its logits are not its head's alone"
            return self.source.gathered(hidden)
        return self.probed(hidden) if self.plan.probe else self.source.local(hidden)

    def probed(self, hidden: torch.Tensor) -> Any:
        """This rank's own logits, after a comparison with the gathered ones and with the head's product."""
        whole = self.source.gathered(hidden)
        local = self.source.local_again()
        if local is None:
            self.probe.local = math.inf
            return whole
        difference = self.source.head_difference(local)
        if isinstance(difference, str):
            self.probe.head_reason = difference
        else:
            self.probe.head = max(difference, self.probe.head)
        if whole is not None:
            first, last = self.source.shard or (0, whole.shape[-1])
            self.probe.local = max(largest_difference(whole[:, first:last], local), self.probe.local)
        return local

    def reference_logits(self, window: int, n_scored: int, at: int, n: int) -> Any:
        """The reference's logits [n, last - first] at the same positions."""
        if self.reference is None:
            return None
        first, last = self.shard
        whole = self.reference.get(window)
        if len(whole) != n_scored:
            raise ValueError(f"window {window}: the reference has {len(whole)} positions, the window {n_scored}")
        stored = whole[at : at + n]
        if self.reference.store.kind == "logits":
            return stored[:, first:last].to(self.device, non_blocking=True)
        assert self._weight is not None
        return head_logits(self.reference.store.head, stored.to(self.device, non_blocking=True), *self._weight)

    def _reference_weight(self, first: int, last: int) -> tuple[Any, Any]:
        """The reference's head on this device: the model's own memory where it holds the same numbers.

        Found once for each engine and store: comparing a head of 1 GB takes 0.12 s.
        """
        assert self.reference is not None
        store = self.reference.store
        key = (store.path, tuple(store.head_digests), first, last)
        if key not in self.source.reference_heads:
            own = self.source.weight()
            plain = not isinstance(own, str) and own[1] is None and not self.plan.gathered
            mine = own[0][: last - first] if plain else None
            if mine is not None and same_weight(store, mine, first, last):
                self.source.reference_heads = {key: (mine, None, "the model's own, bit for bit")}
            else:
                copy, copied_bias = store.weight(first, last, self.device)
                self.source.reference_heads = {key: (copy, copied_bias, f"a copy, {copy.nbytes >> 20} MiB")}
        weight, bias, self.reference_head = self.source.reference_heads[key]
        return weight, bias

    def close_record(self) -> None:
        """Write this rank's share of the head, if states were kept, and close the record."""
        assert self.writer is not None
        if self.writer.kind == "logits":
            if self.keeps:  # another rank that has the gathered logits knows no more of them
                self.writer.close(Head(self.kept_columns, self.probe.dtype))
            return
        weight = self.source.weight()
        if isinstance(weight, str):
            raise RuntimeError(weight)
        self.writer.head(self.shard[0], *weight)
        self.writer.close(self.source.head(self.probe.dtype))


def same_weight(store: Any, weight: Any, first: int, last: int) -> bool:
    """Whether the stored head is the given weight bit for bit, compared in pieces of 8,192 entries."""
    import torch

    for begin in range(first, last, COMPARED):
        end = min(begin + COMPARED, last)
        stored, bias = store.weight(begin, end, "cpu")
        mine = weight[begin - first : end - first]
        if bias is not None or stored.dtype != mine.dtype or stored.shape != mine.shape:
            return False
        if not torch.equal(stored.to(mine.device), mine):
            return False
    return True


@contextmanager
def memory_of(scorer: Scorer) -> Iterator[None]:
    """Note how much device memory a step takes at its peak beyond what it found."""
    import torch

    if scorer.device.type != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    scorer.extra_bytes = max(scorer.extra_bytes, torch.cuda.max_memory_allocated() - before)
