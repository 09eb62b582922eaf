"""Inside vLLM's worker: the statistics of every scored position, computed next to the lm_head in bounded chunks.

A window arrives in segments, in any step and again after a preemption.  The statistics are written by absolute position
into a buffer on the host, so that a repetition overwrites itself and a gap shows.  Nothing here waits for the GPU:
results are copied behind the computation, and an event says when the results of a window are there.
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

from backends.common.dtypes import dtype_name
from backends.common.head import Contents, largest_difference
from backends.common.messages import one_line
from backends.reference.comparison import Comparison, head_key, load_head
from backends.reference.reading import open_reference
from backends.reference.recorder import Recorder
from backends.scoring import statistics
from backends.vllm.hooks import Segment
from backends.vllm.logits import LogitsSource

if TYPE_CHECKING:
    import torch

DEVICE_BYTES = 255 << 20
"""What the logits of a chunk, the reference's logits and states and the results may take together: measured on an H200,
512 rows of 128,256 entries against a reference took 254.4 MiB beyond what the step had."""
RESULT_BYTES = 10 * 4 + 8
"""Bytes a row: ten float32 columns of partial statistics, and the target's id."""
CPU_ROWS = 256
"""Most rows of a chunk on a CPU.  Two cores of an AMD EPYC, head product and statistics of 1,024 rows against a
reference (V = 49,152), time relative to the best by rows at a time: 16 1.91, 32 1.41, 64 1.11, 128 1.00, 256 1.01,
512 1.06, 1,024 1.01; V = 128,256 likewise."""


@dataclass(frozen=True)
class Plan:
    """What a pass's steps have to do; JSON types, so that it travels to the workers.

    ``gathered``: use vLLM's gathered logits.  ``vocab_size``: cut logits to this many entries; None: the model's own.
    ``probe``: compare gathered with local logits and the head's product with both.  ``reference``: folder of the store
    to compare with.  ``record``: folder in which this model's states or logits (``record_contents``) are left as a
    reference; ``record_reason`` says why logits.
    """

    gathered: bool = False
    vocab_size: int | None = None
    probe: bool = False
    reference: str | None = None
    record: str | None = None
    record_contents: Contents = "states"
    record_reason: str = ""


@dataclass
class Buffer:
    """One window that is being scored: partial statistics [T, F] and, in a recording, states [T, H] or logits [T, V].

    ``written`` marks the scored positions [T] that are there; ``done`` is the GPU's event after the last copy.
    """

    statistics: torch.Tensor
    kept: torch.Tensor | None
    written: NDArray[np.bool_]
    done: Any = None


@dataclass
class ProbeDifferences:
    """What a probe has found: how far local logits are from gathered ones, and head(states) from the engine's logits.

    Both are the largest seen; ``head_reason`` says why there is no head to compare.
    """

    local: float = 0.0
    head: float = 0.0
    head_reason: str = ""


@dataclass
class Scorer:
    """One rank's scorer in one pass; ``keeps``: whether this rank keeps the record's states or logits."""

    source: LogitsSource
    plan: Plan
    device: Any
    vocab_size: int
    tp_size: int
    keeps: bool = True
    buffers: dict[int, Buffer] = field(default_factory=dict)
    differences: ProbeDifferences = field(default_factory=ProbeDifferences)
    logits_dtype: str = ""
    recomputed: int = 0
    extra_bytes: int = 0
    largest_chunk: int = 0
    error: str = ""
    comparison: Comparison | None = None
    recorder: Recorder | None = None
    reports: bool = True
    most_rows: int = 1 << 30

    def __post_init__(self) -> None:
        if self.plan.record is not None:
            self.recorder = Recorder(Path(self.plan.record), self.plan.record_contents, self.plan.record_reason)
        if self.plan.reference is not None:
            self.comparison = self.compared(Path(self.plan.reference))

    def compared(self, path: Path) -> Comparison:
        """The comparison with a store; the head of the last store is kept with the model for the next pass."""
        store, head = open_reference(path), self.source.reference_head
        if store.contents == "states" and (head is None or head.key != head_key(store, self.shard)):
            own = self.source.weight()
            shared = None if isinstance(own, str) or own[1] is not None or self.plan.gathered else own[0]
            first, last = self.shard
            head = load_head(store, self.shard, self.device, None if shared is None else shared[: last - first])
            self.source.reference_head = head
        return Comparison(store, self.shard, self.device, head if store.contents == "states" else None)

    @property
    def entries(self) -> int:
        """Vocabulary entries that are scored, on all ranks together."""
        processor = self.source.processor
        whole = self.vocab_size if processor is None else int(processor.org_vocab_size)
        return min(self.plan.vocab_size or whole, whole)

    @property
    def shard(self) -> tuple[int, int]:
        """The vocabulary entries [first, last) that this rank scores."""
        whole = (0, self.entries)
        first, last = whole if self.plan.gathered else self.source.shard or whole
        return min(first, self.entries), min(last, self.entries)

    def chunk_rows(self, hidden_size: int, itemsize: int) -> int:
        """Rows of a chunk of states [N, H], of ``itemsize`` bytes a number; a multiple of 128 where one fits."""
        columns = self.vocab_size if self.plan.gathered or self.plan.probe else -(-self.vocab_size // self.tp_size)
        compares = self.comparison is not None
        copies = 1 + compares
        if any(processor.soft_cap is not None for processor in self.source.processors):
            copies += 2  # the LogitsProcessor divides, takes tanh and multiplies out of place
        states = hidden_size * itemsize if compares else 0
        rows = DEVICE_BYTES // (columns * itemsize * copies + states + RESULT_BYTES)
        if self.device.type == "cpu":
            rows = min(rows, CPU_ROWS)
        return max(min(rows // 128 * 128 or rows, self.most_rows), 1)

    def step(self, hidden_states: torch.Tensor, segments: list[Segment]) -> None:
        """Score the rows of hidden states [N, H] that belong to our segments; the first error is kept in ``error``."""
        together = self.plan.gathered or self.plan.probe
        with memory_of(self):
            for segment in segments:
                window, score_from, n_scored = segment.tag
                # The row at position p predicts token p + 1: scored rows are score_from - 1 to L - 2.
                begin = max(segment.start, score_from - 1)
                end = min(segment.start + segment.count, score_from - 1 + n_scored)
                a = begin
                while a < end and (together or not self.error):
                    b = min(a + self.chunk_rows(hidden_states.shape[1], hidden_states.element_size()), end)
                    hidden = hidden_states[segment.begin + a - segment.start : segment.begin + b - segment.start]
                    if self.try_score(window, n_scored, a - score_from + 1, hidden, segment.tokens(a + 1, b + 1)):
                        a = b

    def try_score(self, window: int, n_scored: int, at: int, hidden: torch.Tensor, targets: torch.Tensor) -> bool:
        """Score a chunk of states [n, H], and keep an error: raised here it would kill the engine.

        False: there was too little memory for so many rows, and from now on chunks have half as many.
        """
        import torch

        try:
            logits = self.logits(hidden)  # ranks gather together: also after an error on one of them
            if logits is None:  # vLLM gathers on another rank
                self.reports = False
            elif not self.error:
                self.score(window, n_scored, at, logits, targets)
        except torch.OutOfMemoryError as error:
            if len(hidden) > 1 and not (self.plan.gathered or self.plan.probe or self.error):
                self.most_rows = len(hidden) // 2
                return False
            self.error = self.error or f"out of memory: {one_line(error)}"
        except Exception as error:
            self.error = self.error or f"{type(error).__name__}: {one_line(error)}"
        return True

    def score(self, window: int, n_scored: int, at: int, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Statistics of logits [n, V'], scored positions ``at`` to ``at + n`` of a window, into its buffer."""
        import torch

        first, last = self.shard
        self.logits_dtype = dtype_name(logits.dtype)
        logits = logits[:, : last - first]
        n = len(logits)
        reference = None if self.comparison is None else self.comparison.logits(window, n_scored, at, at + n)
        out = torch.empty(n, statistics.width(reference is not None), dtype=torch.float32, device=logits.device)
        statistics.partial(logits, targets, out, first=first, reference=reference)
        kept = None
        if self.recorder is not None and self.keeps:
            kept = self.recorder.chosen(logits, lambda: self.source.states)
        buffer = self.buffers.get(window) or self._new_buffer(window, n_scored, out, kept)
        self.recomputed += int(buffer.written[at : at + n].sum())
        buffer.statistics[at : at + n].copy_(out, non_blocking=True)
        if kept is not None and buffer.kept is not None:
            buffer.kept[at : at + n].copy_(kept, non_blocking=True)
        buffer.written[at : at + n] = True
        self.largest_chunk = max(self.largest_chunk, n)
        if buffer.written.all() and self.device.type == "cuda":
            buffer.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.done.record()

    def _new_buffer(self, window: int, n_scored: int, out: torch.Tensor, kept: torch.Tensor | None) -> Buffer:
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
            self.differences.head_reason = "its logits are not its head's alone"
            return self.source.gathered(hidden)
        return self.probed(hidden) if self.plan.probe else self.source.local(hidden)

    def probed(self, hidden: torch.Tensor) -> Any:
        """This rank's own logits, after a comparison with the gathered ones and with the head's product."""
        whole = self.source.gathered(hidden)
        local = self.source.local_again()
        if local is None:
            self.differences.local = math.inf
            return whole
        difference = self.source.head_difference(local)
        if isinstance(difference, str):
            self.differences.head_reason = difference
        else:
            self.differences.head = max(difference, self.differences.head)
        if whole is not None:
            first, last = self.source.shard or (0, whole.shape[-1])
            self.differences.local = max(largest_difference(whole[:, first:last], local), self.differences.local)
        return local

    def close_record(self) -> None:
        """Write this rank's share of the head, if states were kept, and close the record."""
        assert self.recorder is not None
        self.recorder.close(self.source.head(self.logits_dtype), self.shard[0])


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
