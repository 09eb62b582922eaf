"""Scores of windows in vLLM's worker: compared with a reference, and recorded as one."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..reference.comparison import (
    Comparison,
    LoadedHead,
    ReferenceWindows,
    head_key,
    load_head,
)
from ..reference.recorder import Recorder
from ..reference.store import Reader, open_reference
from ..scoring import token_statistics
from .chunks import Chunk, chunk_rows
from .scoring_plan import ScoringPlan
from .step_scorer import StepScorer

WRITERS = 3
"""Threads that write a record."""
MOST_PENDING_WRITES = 4
"""Largest number of windows waiting to be written.

2,048 x 128,256 float16 logits take 525 MB of pinned memory.
"""


@dataclass
class Scorer(StepScorer):
    """One rank's scorer of the windows of a run."""

    plan: ScoringPlan
    keeps_record: bool = True  # this rank keeps the record's states or logits
    comparison: Comparison | None = None
    recorder: Recorder | None = None
    most_rows: int = 1 << 30  # of a chunk; halved when memory is too small
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(WRITERS))
    writes: deque[Future[None]] = field(default_factory=deque)
    head_write: Future[None] | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        if plan.record is not None:
            self.recorder = Recorder(
                Path(plan.record),
                plan.record_key,
                self.digests,
                plan.record_contents,
                plan.record_reason,
            )
        ahead = self.source.reference_windows
        self.source.reference_windows = None
        if plan.reference is not None:
            self.comparison = self.comparison_with(Path(plan.reference), ahead)
        elif ahead is not None:
            ahead.close()

    def comparison_with(self, path: Path, ahead: ReferenceWindows | None) -> Comparison:
        """Return the comparison with the store in a folder; ``ahead``: windows of an earlier run.

        They are used if they are those of this run, and otherwise closed.
        """
        store = open_reference(path)
        head = None
        if store.contents == "states":
            head = self.head_of(store)
        if ahead is not None and not ahead.is_of(store, self.digests):
            ahead.close()
            ahead = None
        return Comparison(store, self.digests, self.shard, self.device, head, ahead)

    def read_ahead(self) -> None:
        """Read the first windows of the reference, and keep them for the next scoring run.

        This run can score nothing afterwards.
        """
        if self.comparison is None:
            return
        self.comparison.windows.read_ahead()
        self.source.reference_windows = self.comparison.windows
        self.comparison = None

    def head_of(self, store: Reader) -> LoadedHead:
        """Return the head of a store; it stays loaded for the next scoring run."""
        head = self.source.reference_head
        if head is None or head.key != head_key(store, self.shard):
            head = load_head(store, self.shard, self.device, self.model_weight())
            self.source.reference_head = head
        return head

    def model_weight(self) -> torch.Tensor | None:
        """Return the model's own head [last - first, H], which may be the reference's as well.

        None if gathered logits are scored, or if the head is not a plain product without bias.
        """
        weight_and_bias = self.source.weight()
        if self.plan.gathered or isinstance(weight_and_bias, str):
            return None
        weight, bias = weight_and_bias
        if bias is not None:
            return None
        first, last = self.shard
        entries: torch.Tensor = weight[: last - first]
        return entries

    @property
    def digests(self) -> dict[int, str]:
        """The digests of the run's windows, by their indices and in their order."""
        return dict(self.plan.windows)

    @property
    def entries(self) -> int:
        """Number of vocabulary entries that all ranks score together."""
        entries = super().entries
        if self.plan.vocab_size:
            return min(self.plan.vocab_size, entries)
        return entries

    @property
    def width(self) -> int:
        """Number of columns of the results."""
        return token_statistics.width(self.comparison is not None)

    @property
    def needs_collectives(self) -> bool:
        """True if all ranks compute each chunk together."""
        return self.plan.gathered

    @property
    def shares_reference_head(self) -> bool:
        """True if one product can give both logits: the reference's head is the model's own.

        Only on a GPU, where a row's logits do not depend on its place among the rows of one
        product: a model against itself must give equal logits.  With a soft cap, more copies of the
        logits would be in memory.
        """
        comparison = self.comparison
        if self.needs_collectives or comparison is None:
            return False
        if comparison.head is None or not comparison.head.is_own:
            return False
        head = comparison.store.head
        processor = self.source.processor
        caps_logits = head.soft_cap is not None or processor.soft_cap is not None
        if caps_logits or float(processor.scale) != head.scale:
            return False
        return bool(self.device.type == "cuda")

    def rows_per_chunk(self, hidden_size: int, itemsize: int) -> int:
        """Return the number of rows of a chunk of states [N, H]; ``itemsize``: bytes per number."""
        columns = self.vocab_size
        if not self.needs_collectives:
            columns = -(-self.vocab_size // self.tp_size)  # rounded up
        rows = chunk_rows(
            columns=columns,
            hidden_size=hidden_size,
            itemsize=itemsize,
            compares=self.comparison is not None,
            shares_head=self.shares_reference_head,
            caps_logits=self.caps_logits,
            on_cpu=self.device.type == "cpu",
        )
        return min(rows, self.most_rows)

    def score_chunk(self, states: torch.Tensor, chunk: Chunk) -> bool:
        """Write the statistics of a chunk of states [n, H] into its ``out``.

        Return False if memory was too small; chunks then have half as many rows from now on.
        """
        try:
            self.write_scores(states, chunk)
        except torch.OutOfMemoryError:
            if len(states) == 1 or self.error or not self.plan.may_halve_chunks:
                raise
            # Other ranks would not halve theirs, and wait.
            if self.needs_collectives:
                raise
            self.most_rows = len(states) // 2
            return False
        return True

    def write_scores(self, states: torch.Tensor, chunk: Chunk) -> None:
        """Score a chunk, and start to record it."""
        logits, reference = self.logits_of_both(states, chunk)
        if logits is None:  # vLLM gives them to another rank
            self.reports = False
            return
        # The logits were computed only because other ranks waited.
        if self.error:
            return
        logits = self.logits_of_shard(logits)
        if self.comparison is not None and reference is None:
            reference = self.comparison.logits([part.rows for part in chunk.parts])
        if reference is not None:
            reference = reference[:, : logits.shape[1]]
        self.write_statistics(logits, states, chunk, reference)
        if self.recorder is not None and self.keeps_record:
            rows = self.recorder.chosen(logits, lambda: self.source.states)
            self.buffers.record(rows, chunk)

    def logits_of_both(self, states: torch.Tensor, chunk: Chunk) -> tuple[Any, torch.Tensor | None]:
        """Return (the model's logits [n, V'], the reference's) of a chunk.

        The reference's are None unless one product gives both.
        """
        if self.plan.gathered:
            return self.source.gathered(states), None
        if self.comparison is None or self.error or not self.shares_reference_head:
            return self.source.local(states), None
        stored = self.comparison.on_device([part.rows for part in chunk.parts])
        return self.source.logits_of_both(states, stored.to(states.dtype))

    def finish(self, index: int) -> NDArray[np.float32]:
        """Remove a window; return its partial statistics, and start writing its record."""
        buffer = self.buffers.take(index)
        if self.comparison is not None:
            self.comparison.drop(index)
        if self.recorder is not None:
            self.write_record(self.recorder, index, buffer.record)
        return buffer.statistics

    def write_record(self, recorder: Recorder, index: int, rows: torch.Tensor | None) -> None:
        """Start writing the head, with the first window, and the rows of a window, if any."""
        if self.head_write is None and recorder.contents == "states":
            # 1 GB, which is written while windows are scored.
            head = self.source.head(self.logits_dtype)
            self.head_write = self.pool.submit(recorder.write_head, head, self.shard[0])
        if rows is None:
            return
        while len(self.writes) >= MOST_PENDING_WRITES:
            self.writes.popleft().result()
        self.writes.append(self.pool.submit(recorder.write, index, rows))

    def end(self) -> dict[str, Any]:
        """Finish writing; return the report of the scoring run."""
        try:
            for write in self.writes:
                write.result()
            if self.head_write is not None:
                self.head_write.result()
        except Exception as error:
            self.fail(error)
        self.pool.shutdown()
        report = super().end()
        if self.comparison is not None:
            self.comparison.close()
            if self.comparison.head is not None:
                report["reference_head"] = self.comparison.head.origin
        return report
