"""Scores in vLLM's worker: statistics of every scored position, computed next to the lm_head in
bounded chunks.

All scored rows of a step, of any windows, are scored together.  The rows of a window arrive in
parts, in any step, and again after a preemption.  Its statistics are written by absolute position
into a buffer on the host.  Repeated rows therefore overwrite the same entries, and gaps are
detected.  This module never waits for the GPU: results are copied asynchronously, and an event
shows when the results of a step have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.errors import ModelError
from ..common.message_text import dtype_name, one_line, with_class
from ..reference.comparison import Comparison, StoredRows, head_key, load_head
from ..reference.recorder import Recorder
from ..reference.store import open_reference
from ..scoring import token_statistics
from ..scoring.token_statistics import Column
from .hooks import RequestRows, ScoredRows, Steps, Tokens, scored_rows, states_of
from .logits import LogitsSource
from .scoring_plan import ScoringPlan

DEVICE_BYTES = 255 << 20
"""Largest total size of a chunk's logits, the reference's logits, states and results."""
PRODUCT_ROWS = (768, 128)
"""Rows of a head's product are a multiple of one of these numbers; on an H200, 768 was fastest in 5
of 6 shapes."""
CPU_ROWS = 256
"""Largest number of rows of a chunk on a CPU: on two cores 128 to 1,024 rows are equally fast,
fewer are slower."""
NO_STATES = -1.0
"""Written instead of the sum of exponentials, which is positive, where a row's states are all zero.

A final norm never produces such a row.  The row was not computed: vLLM leaves out prompt tokens
whose states are not read.  All models would give it the same score, so that a quantized model would
have a KL divergence of 0.
"""
ZEROS = (
    ": they are all zero there, so that vLLM left these tokens out, or its weights are scaled wrongly and no state "
    "was finite; compare-q doctor checks the scales in the files"
)
"""Continues the message on positions whose states arrived as zeros."""
WAITING = 4
"""Largest number of windows waiting to be written: 2,048 x 128,256 float16 logits take 525 MB of
pinned memory."""


class Chunk(NamedTuple):
    """Some rows of a step: their ``targets`` [n], and their results ``out`` [n, F]."""

    parts: Sequence[ScoredRows]
    targets: torch.Tensor
    out: torch.Tensor


def chunks_of(parts: Sequence[ScoredRows], rows: int) -> Iterator[list[ScoredRows]]:
    """Yield the parts in lists of ``rows`` rows; the last list may be shorter; parts are cut to
    fit.
    """
    chunk, room = [], rows
    for part in parts:
        begin = 0
        while begin < part.n_rows:
            end = min(begin + room, part.n_rows)
            chunk.append(part.cut(begin, end))
            begin, room = end, room - (end - begin)
            if not room:
                yield chunk
                chunk, room = [], rows
    if chunk:
        yield chunk


@dataclass
class Buffer:
    """One window."""

    statistics: NDArray[np.float32]  # partial ones, [T, F]
    written: NDArray[np.bool_]  # [T]: which scored positions have statistics of computed states
    kept: torch.Tensor | None = None  # states [T, H] or logits [T, V] if the window is recorded
    landed: int = 0  # positions that arrived, including repetitions


@dataclass
class Buffers:
    """Windows of a scoring run."""

    windows: dict[int, Buffer] = field(default_factory=dict)  # by index
    # (Partial statistics [N, F] of a step, its rows, the GPU's event after which they are on the
    # host).
    landings: deque[tuple[torch.Tensor, Sequence[ScoredRows], Any]] = field(default_factory=deque)
    recomputed: int = 0  # positions of finished windows that were scored again

    def finished(self, window: int) -> Buffer:
        """Remove and return a window's buffer; ModelError if positions are missing."""
        buffer = self.windows.pop(window, None)
        if buffer is None or not buffer.written.all():
            missing = "any" if buffer is None else int((~buffer.written).sum())
            cause = ZEROS if buffer is not None and buffer.landed >= len(buffer.written) else ""
            raise ModelError(
                f"window {window}: vLLM computed no hidden states for {missing} of its positions{cause}"
            )
        self.recomputed += buffer.landed - len(buffer.written)
        return buffer

    def of(self, rows: StoredRows, width: int) -> Buffer:
        """Return the buffer of the rows' window, whose statistics have ``width`` columns."""
        if rows.window not in self.windows:
            nothing = np.empty((rows.n_scored, width), np.float32)
            self.windows[rows.window] = Buffer(nothing, np.zeros(rows.n_scored, np.bool_))
        return self.windows[rows.window]

    def send(self, out: torch.Tensor, parts: Sequence[ScoredRows]) -> None:
        """Start copying a step's statistics [N, F] to the host."""
        host, event = out, None
        if out.device.type == "cuda":
            host = on_host(len(out), out).copy_(out, non_blocking=True)
            event = torch.cuda.current_stream().record_event()
        self.landings.append((host, parts, event))

    def keep(self, kept: torch.Tensor, chunk: Chunk) -> None:
        """Start copying states [n, H] or logits [n, V] to their windows; they arrive with the
        step's statistics.
        """
        begin = 0
        for part in chunk.parts:
            rows, buffer = part.rows, self.of(part.rows, chunk.out.shape[1])
            if buffer.kept is None:
                buffer.kept = on_host(rows.n_scored, kept)
            buffer.kept[rows.begin : rows.end].copy_(
                kept[begin : begin + part.n_rows], non_blocking=True
            )
            begin += part.n_rows

    def land(self, *, wait: bool = True) -> None:
        """Put statistics that have arrived on the host into their windows; ``wait`` for all that
        were sent.
        """
        while self.landings and (
            wait or self.landings[0][2] is None or self.landings[0][2].query()
        ):
            host, parts, event = self.landings.popleft()
            if event is not None:
                event.synchronize()
            begin, values = 0, host.numpy()
            for part in parts:
                rows, buffer = (
                    slice(part.rows.begin, part.rows.end),
                    self.of(part.rows, values.shape[1]),
                )
                buffer.statistics[rows] = values[begin : begin + part.n_rows]
                buffer.written[rows] = buffer.statistics[rows, Column.SUM] != NO_STATES
                buffer.landed += part.n_rows
                begin += part.n_rows


def on_host(rows: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor [rows, F] on the host, with dtype and width of ``like``, for asynchronous
    copies from a GPU.
    """
    return torch.empty(rows, like.shape[1], dtype=like.dtype, pin_memory=like.device.type == "cuda")


@dataclass
class Scorer:
    """One rank's scorer in one scoring run."""

    source: LogitsSource
    plan: ScoringPlan
    device: Any
    vocab_size: int
    tp_size: int
    keeps: bool = True  # this rank keeps the record's states or logits
    reports: bool = (
        True  # this rank has statistics: it is in the last pipeline stage, and vLLM gives it logits
    )
    steps: Steps | None = None  # counts decode steps; None in prefill
    local_difference: float = 0.0
    head_difference: float = 0.0
    head_reason: str = ""
    logits_dtype: str = ""
    largest_chunk: int = 0
    error: str = ""  # the first error, which ``collect`` and ``end`` report
    comparison: Comparison | None = None
    recorder: Recorder | None = None
    most_rows: int = 1 << 30
    buffers: Buffers = field(default_factory=Buffers)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(3))
    writes: deque[Future[None]] = field(default_factory=deque)
    head_write: Future[None] | None = None

    def __post_init__(self) -> None:
        if self.plan.record is not None:
            folder = Path(self.plan.record)
            plan = self.plan
            self.recorder = Recorder(
                folder, plan.record_key, self.digests, plan.record_contents, plan.record_reason
            )
        if self.plan.reference is not None:
            self.comparison = self.compared(Path(self.plan.reference))

    def compared(self, path: Path) -> Comparison:
        """Return the comparison with a store; the store's head is kept for the next scoring run."""
        store, head, (first, last) = open_reference(path), self.source.reference_head, self.shard
        if store.contents == "states" and (head is None or head.key != head_key(store, self.shard)):
            own = self.source.weight()
            weight = (
                None if isinstance(own, str) or own[1] is not None or self.plan.gathered else own[0]
            )
            head = load_head(
                store, self.shard, self.device, None if weight is None else weight[: last - first]
            )
            self.source.reference_head = head
        if store.contents != "states":
            head = None
        return Comparison(store, self.digests, self.shard, self.device, head)

    @property
    def digests(self) -> dict[int, str]:
        """The digests of the run's windows, by their indices and in their order."""
        return dict(self.plan.windows)

    @property
    def entries(self) -> int:
        """Number of vocabulary entries that all ranks score together."""
        processor = self.source.processor
        whole = self.vocab_size if processor is None else int(processor.org_vocab_size)
        return min(self.plan.vocab_size or whole, whole)

    @property
    def shard(self) -> tuple[int, int]:
        """Vocabulary entries [first, last) that this rank scores."""
        whole = (0, self.entries)
        first, last = whole if self.plan.gathered else self.source.shard or whole
        return min(first, self.entries), min(last, self.entries)

    @property
    def width(self) -> int:
        """Number of columns of the results."""
        return token_statistics.width(self.comparison is not None)

    @property
    def gathers(self) -> bool:
        """True if ranks gather logits together."""
        return self.plan.gathered or self.plan.probe

    @property
    def goes_on(self) -> bool:
        """True if the next chunk must be computed: no error occurred, or other ranks would wait for
        this rank.
        """
        return not self.error or self.gathers

    @property
    def has_head_beside(self) -> bool:
        """True if one product can give both logits: the reference's head is the model's own, and
        nothing else differs.

        Only on a GPU, where a row's logits do not depend on its place among the rows of one
        product: a model against itself must give equal logits.  With a soft cap, more copies of the
        logits would be in memory.
        """
        comparison, processor = self.comparison, self.source.processor
        if (
            comparison is None
            or comparison.head is None
            or not comparison.head.is_own
            or self.gathers
        ):
            return False
        head = comparison.store.head
        plain = (
            head.soft_cap is None
            and processor.soft_cap is None
            and float(processor.scale) == head.scale
        )
        return plain and self.device.type == "cuda"

    def chunk_rows(self, hidden_size: int, itemsize: int) -> int:
        """Return the number of rows of a chunk of states [N, H] with ``itemsize`` bytes per number.

        A chunk holds its logits and its gathered states.  A reference adds its logits and states
        or, where one product gives both logits, copies of its states and the states of both models
        side by side.
        """
        columns = self.vocab_size if self.gathers else -(-self.vocab_size // self.tp_size)
        copies = states = 2 if self.comparison is not None else 1
        products = 1
        if any(processor.soft_cap is not None for processor in self.source.processors):
            copies += 2  # the LogitsProcessor divides, takes tanh and multiplies out of place
        if self.has_head_beside:
            states, products = 5, 2
        results = token_statistics.width(True) * 4 + 8  # with the targets
        rows = DEVICE_BYTES // ((columns * copies + hidden_size * states) * itemsize + results)
        if self.device.type == "cpu":
            rows = min(rows, CPU_ROWS)
        unit = next((unit // products for unit in PRODUCT_ROWS if rows >= unit // products), 1)
        return max(min(rows // unit * unit, self.most_rows), 1)

    @torch.inference_mode()
    def step(
        self, hidden_states: torch.Tensor, requests: list[RequestRows], tokens: Tokens
    ) -> None:
        """Score the rows of hidden states [N, H] that belong to our requests by chunks, and send
        the results.
        """
        try:
            if self.steps is not None and (wrong := self.steps.count(requests)):
                raise ModelError(wrong)
            self.buffers.land(wait=False)
            parts = scored_rows(requests)
            if not parts or not self.goes_on:
                return
            targets = tokens(parts)
            out = torch.empty(len(targets), self.width, device=targets.device)
            shape = hidden_states.shape[1], hidden_states.element_size()
            begin, chunks = 0, deque(chunks_of(parts, self.chunk_rows(*shape)))
            while chunks and self.goes_on:
                end = begin + sum(part.n_rows for part in chunks[0])
                chunk = Chunk(chunks[0], targets[begin:end], out[begin:end])
                if self.score(states_of(hidden_states, chunk.parts), chunk):
                    chunks.popleft()
                    begin = end
                else:
                    chunks = deque(
                        chunks_of(list(chain.from_iterable(chunks)), self.chunk_rows(*shape))
                    )
            if self.reports and not self.error:
                self.buffers.send(out, parts)
        except Exception as error:  # never raise here: the engine must survive to report the error
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Keep the first error."""
        self.error = self.error or (
            one_line(error) if isinstance(error, ModelError) else with_class(error)
        )

    def score(self, hidden: torch.Tensor, chunk: Chunk) -> bool:
        """Write the statistics of a chunk of states [n, H] into its ``out``, and keep an error.

        Return False if memory was too small for these rows; chunks then have half as many rows from
        now on.
        """
        try:
            logits, reference = self.both_logits(hidden, chunk)
            if logits is None:  # vLLM gives them to another rank
                self.reports = False
            elif not self.error:
                self.logits_dtype = dtype_name(logits.dtype)
                self.largest_chunk = max(self.largest_chunk, len(logits))
                first, last = self.shard
                logits = logits[:, : last - first]
                if self.comparison is not None and reference is None:
                    reference = self.comparison.logits([part.rows for part in chunk.parts])
                reference = None if reference is None else reference[:, : last - first]
                token_statistics.partial(
                    logits, chunk.targets, chunk.out, first=first, reference=reference
                )
                if self.recorder is not None and self.keeps:
                    self.buffers.keep(
                        self.recorder.chosen(logits, lambda: self.source.states), chunk
                    )
                chunk.out[:, Column.SUM].masked_fill_(~hidden.any(1), NO_STATES)
        except torch.OutOfMemoryError as error:
            if len(hidden) > 1 and not (self.gathers or self.error):
                self.most_rows = len(hidden) // 2
                return False
            self.fail(error)
        except Exception as error:
            self.fail(error)
        return True

    def both_logits(self, hidden: torch.Tensor, chunk: Chunk) -> tuple[Any, torch.Tensor | None]:
        """Return (the model's logits [n, V'], the reference's [n, V'] if one product gives both) of
        a chunk.
        """
        if self.plan.gathered:
            self.head_reason = "its logits are not its head's alone"
            return self.source.gathered(hidden), None
        if self.plan.probe:
            logits, local, head = self.source.probed(hidden)
            self.local_difference = max(local, self.local_difference)
            if isinstance(head, str):
                self.head_reason = head
            else:
                self.head_difference = max(head, self.head_difference)
            return logits, None
        if self.comparison is None or self.error or not self.has_head_beside:
            return self.source.local(hidden), None
        states = self.comparison.on_device([part.rows for part in chunk.parts])
        return self.source.local_beside(hidden, states.to(hidden.dtype))

    def collect(self, indices: Sequence[int]) -> tuple[dict[str, Any], bytes]:
        """Return (header, partial statistics) of finished windows; records are written in the
        background.
        """
        parts: list[NDArray[np.float32]] = []
        if self.reports and not self.error:
            try:
                self.buffers.land()
                parts = [self.finished(index) for index in indices]
            except Exception as error:  # a gap, or a full disk
                self.fail(error)
        header = {
            "error": self.error,
            "shard": self.shard,
            "entries": self.entries,
            "counts": list(map(len, parts)),
        }
        return header, b"".join(part.tobytes() for part in parts)

    def finished(self, index: int) -> NDArray[np.float32]:
        """Remove a window and return its partial statistics; start writing its record."""
        buffer = self.buffers.finished(index)
        if self.comparison is not None:
            self.comparison.drop(index)
        if self.recorder is not None:
            if (
                self.head_write is None and self.recorder.contents == "states"
            ):  # 1 GB, while windows are scored
                head = self.source.head(self.logits_dtype)
                self.head_write = self.pool.submit(self.recorder.write_head, head, self.shard[0])
            if buffer.kept is not None:
                while len(self.writes) >= WAITING:
                    self.writes.popleft().result()
                self.writes.append(self.pool.submit(self.recorder.write, index, buffer.kept))
        return buffer.statistics

    def end(self) -> dict[str, Any]:
        """Finish writing; return the report of the scoring run."""
        try:
            for write in (*self.writes, *filter(None, [self.head_write])):
                write.result()
        except Exception as error:
            self.fail(error)
        self.pool.shutdown()
        if self.comparison is not None:
            self.comparison.close()
        return {
            "error": self.error,
            "recomputed_positions": self.buffers.recomputed,
            "chunk_rows": self.largest_chunk,
            "reference_head": self.comparison.head.origin
            if self.comparison and self.comparison.head
            else "",
            "local_difference": self.local_difference,
            "head_difference": self.head_difference,
            "head_reason": self.head_reason,
            "logits_dtype": self.logits_dtype,
            "steps": self.steps.report() if self.steps is not None and self.steps.sizes else {},
        }
