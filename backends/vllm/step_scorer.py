"""One rank's part in a scoring run: it receives vLLM's steps and scores their rows in chunks.

All scored rows of a step, of any windows, are scored together, next to the lm_head, in chunks of
bounded memory.  ``Scorer`` scores the windows of a run, ``ProbeScorer`` the probe's.

The probe, and runs with gathered logits, need collective operations: a rank that leaves out a chunk
would leave the others waiting for ever.  Such a rank computes on after an error, and does not halve
its chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.errors import ModelError
from ..common.message_text import dtype_name, one_line, with_class
from ..scoring import token_statistics
from ..scoring.token_statistics import Column
from .chunks import NO_STATES, Chunk, WindowBuffers, chunks_of
from .decode_steps import Steps
from .hooks import RequestRows, Tokens, scored_rows, states_of
from .logits import LogitsSource
from .scoring_plan import ProbePlan, ScoringPlan


@dataclass
class StepScorer(ABC):
    """One rank's scorer in one scoring run."""

    source: LogitsSource
    plan: ScoringPlan | ProbePlan
    device: Any
    vocab_size: int
    tp_size: int
    # This rank has statistics: it is in the last pipeline stage, and vLLM gives it logits.
    reports: bool = True
    steps: Steps | None = None  # counts decode steps; None in prefill
    error: str = ""  # the first error, which ``collect`` and ``end`` report
    logits_dtype: str = ""
    largest_chunk: int = 0  # rows
    buffers: WindowBuffers = field(default_factory=WindowBuffers)

    @property
    @abstractmethod
    def needs_collectives(self) -> bool:
        """True if all ranks compute each chunk together."""

    @abstractmethod
    def rows_per_chunk(self, hidden_size: int, itemsize: int) -> int:
        """Return the number of rows of a chunk of states [N, H]; ``itemsize``: bytes per number."""

    @abstractmethod
    def score_chunk(self, states: torch.Tensor, chunk: Chunk) -> bool:
        """Write the statistics of a chunk of states [n, H] into its ``out``.

        Return False if memory was too small; ``rows_per_chunk`` is then smaller from now on.
        """

    @property
    def entries(self) -> int:
        """Number of vocabulary entries that all ranks score together.

        ``vocab_size`` until the model has called a LogitsProcessor, whose number may be smaller.
        """
        processor = self.source.processor
        if processor is None:
            return self.vocab_size
        return int(processor.org_vocab_size)

    @property
    def shard(self) -> tuple[int, int]:
        """Vocabulary entries [first, last) that this rank scores."""
        entries = self.entries
        shard = None
        if not self.plan.gathered:
            shard = self.source.shard
        if shard is None:
            return 0, entries
        first, last = shard
        return min(first, entries), min(last, entries)

    @property
    def width(self) -> int:
        """Number of columns of the results."""
        return token_statistics.width(False)

    @property
    def must_continue(self) -> bool:
        """True if the next chunk must be computed, possibly only because other ranks wait."""
        return not self.error or self.needs_collectives

    @torch.inference_mode()
    def step(
        self, hidden_states: torch.Tensor, requests: list[RequestRows], tokens: Tokens
    ) -> None:
        """Score the rows of hidden states [N, H] that belong to our requests.

        It never raises: the engine must survive to report the error.
        """
        try:
            self.score_step(hidden_states, requests, tokens)
        except Exception as error:
            self.fail(error)

    def score_step(
        self, hidden_states: torch.Tensor, requests: list[RequestRows], tokens: Tokens
    ) -> None:
        """Score a step's rows by chunks, and send the results to the host."""
        if self.steps is not None:
            fault = self.steps.count(requests)
            if fault:
                raise ModelError(fault)
        self.buffers.land()
        parts = scored_rows(requests)
        if not parts or not self.must_continue:
            return
        targets = tokens(parts)
        out = torch.empty(len(targets), self.width, device=targets.device)
        hidden_size = hidden_states.shape[1]
        itemsize = hidden_states.element_size()
        chunks = deque(chunks_of(parts, self.rows_per_chunk(hidden_size, itemsize)))
        begin = 0
        while chunks and self.must_continue:
            end = begin + sum(part.n_rows for part in chunks[0])
            chunk = Chunk(chunks[0], targets[begin:end], out[begin:end])
            states = states_of(hidden_states, chunk.parts)
            if self.is_scored(states, chunk):
                chunks.popleft()
                begin = end
            else:
                remaining = list(chain.from_iterable(chunks))
                chunks = deque(chunks_of(remaining, self.rows_per_chunk(hidden_size, itemsize)))
        if self.reports and not self.error:
            self.buffers.send(out, parts)

    def is_scored(self, states: torch.Tensor, chunk: Chunk) -> bool:
        """Score a chunk; return False if it must be cut.  An error is kept, not raised."""
        try:
            return self.score_chunk(states, chunk)
        except Exception as error:
            # The loop continues with the next chunk if other ranks wait for this one.
            self.fail(error)
            return True

    def fail(self, error: Exception) -> None:
        """Keep the first error."""
        if self.error:
            return
        if isinstance(error, ModelError):
            self.error = one_line(error)
        else:
            self.error = with_class(error)

    def logits_of_shard(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V'] without padding, and note their dtype and number for the report."""
        self.logits_dtype = dtype_name(logits.dtype)
        self.largest_chunk = max(self.largest_chunk, len(logits))
        first, last = self.shard
        return logits[:, : last - first]

    def write_statistics(
        self,
        logits: torch.Tensor,
        states: torch.Tensor,
        chunk: Chunk,
        reference: torch.Tensor | None = None,
    ) -> None:
        """Write the partial statistics of logits [n, V'] of this rank's shard.

        Rows without states are marked, so that their window counts as incomplete.
        """
        first, _ = self.shard
        token_statistics.partial(logits, chunk.targets, chunk.out, first=first, reference=reference)
        chunk.out[:, Column.SUM].masked_fill_(~states.any(1), NO_STATES)

    def collect(self, indices: Sequence[int]) -> tuple[dict[str, Any], bytes]:
        """Return (header, partial statistics) of finished windows."""
        statistics: list[NDArray[np.float32]] = []
        if self.reports and not self.error:
            try:
                self.buffers.land(indices)
                statistics = [self.finish(index) for index in indices]
            except Exception as error:  # a gap, or a full disk
                self.fail(error)
        header = {
            "error": self.error,
            "shard": self.shard,
            "entries": self.entries,
            "counts": [len(rows) for rows in statistics],
        }
        return header, b"".join(rows.tobytes() for rows in statistics)

    def finish(self, index: int) -> NDArray[np.float32]:
        """Remove a window; return its partial statistics."""
        return self.buffers.take(index).statistics

    def end(self) -> dict[str, Any]:
        """Return the report of the scoring run."""
        steps = {}
        if self.steps is not None and self.steps.sizes:
            steps = self.steps.report()
        return {
            "error": self.error,
            "recomputed_positions": self.buffers.recomputed,
            "chunk_rows": self.largest_chunk,
            "reference_head": "",
            "logits_dtype": self.logits_dtype,
            "steps": steps,
        }

    @property
    def caps_logits(self) -> bool:
        """True if a LogitsProcessor of the model has a soft cap."""
        return any(processor.soft_cap is not None for processor in self.source.processors)
