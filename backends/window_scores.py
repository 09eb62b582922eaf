"""A loaded engine and windows -> scores of every token, whether the engine scores by itself or hands out logits.

Here is the shift by one for engines that hand out logits: the logits at position i predict token i + 1.  An engine that
scores by itself is told what to do; one that hands out logits is scored by the same definitions
(``backends/scoring/statistics.py``), compared with the same store (``backends/reference/comparison.py``) on the same
positions, and leaves the same store behind (``backends/reference/recorder.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from compare_q.backends.base import Engine, LogitsEngine, ScoringEngine, Task, TokenScores, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference.comparison import Comparison
from compare_q.backends.reference.reading import StoredRows, open_reference
from compare_q.backends.reference.recorder import Recorder
from compare_q.backends.scoring import divergences, statistics

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


def token_scores(engine: Engine, windows: Iterable[Window], task: Task) -> Iterator[TokenScores]:
    """Scores of every window, as they become ready."""
    if isinstance(engine, ScoringEngine):
        yield from engine.score(windows, task)
    elif isinstance(engine, LogitsEngine):
        yield from scores_of_logits(engine, list(windows), task)
    else:
        raise TypeError(f"{type(engine).__name__} is neither a LogitsEngine nor a ScoringEngine")


def scores_of_logits(engine: LogitsEngine, windows: Sequence[Window], task: Task) -> Iterator[TokenScores]:
    """Scores of every window from the logits that an engine hands out, in the order of the windows."""
    engine.prepare(windows)
    scorer = LogitsScorer(engine, task)
    try:
        for window in windows:
            yield scorer.scores(window)
        scorer.finish()
    finally:
        scorer.close()


class LogitsScorer:
    """Scores windows as their logits come: no more of a window's logits are there at a time than the engine's piece.

    The comparison and the recorder are made when the first logits have come, which say of what kind they are.
    """

    def __init__(self, engine: LogitsEngine, task: Task) -> None:
        self.engine, self.task = engine, task
        self.head = "" if task.record is None else engine.head()  # before the first logits: states are kept from here
        self.comparison: Comparison | None = None
        self.recorder: Recorder | None = None

    def scores(self, window: Window) -> TokenScores:
        """The scores of one window; what is kept of it goes to its file meanwhile."""
        shard: list[NDArray[np.float32]] = []
        kept = self.scored(window, shard)
        if self.task.record is None:
            deque(kept, maxlen=0)
        else:
            first = next(kept)
            assert self.recorder is not None
            self.recorder.write_pieces(window.index, window.n_scored, chain([first], kept))
        if self.comparison is not None:
            self.comparison.drop(window.index)
        return divergences.scores(window.index, window.targets, [np.concatenate(shard)])

    def scored(self, window: Window, shard: list[NDArray[np.float32]]) -> Iterator[torch.Tensor]:
        """What is to be kept of each piece, once the statistics [n, F] of its scored tokens are in ``shard``."""
        length, begin, done = len(window.token_ids), 0, 0
        for logits in self.engine.pieces(window):
            if logits.ndim != 2:
                shape = tuple(logits.shape)
                raise ModelError(f"window {window.index}: logits of shape {shape} for a window of {length} tokens")
            chosen = list(window.predicting(begin, begin + len(logits)))
            begin += len(logits)
            if chosen:
                logits = rows_of(logits, chosen)
                rows = StoredRows(window.index, window.n_scored, done, done := done + len(logits))
                kept = self.kept(logits, chosen)
                shard.append(self.statistics(rows, logits, window.targets[rows.begin : rows.end]))
                del logits  # the next piece would have to lie beside it
                yield kept
                del kept
        if begin != length:
            raise ModelError(f"window {window.index}: logits of {begin} positions for a window of {length} tokens")

    def kept(self, logits: torch.Tensor, chosen: Sequence[slice]) -> torch.Tensor:
        """What a record holds of scored rows, ``chosen`` of the engine's last piece; without a record the logits."""
        if self.task.record is None:
            return logits

        def states() -> torch.Tensor:
            return rows_of(self.engine.states(), chosen)

        self.recorder = self.recorder or Recorder.of_engine(self.task.record, self.head, logits, states)
        return self.recorder.chosen(logits, states)

    def statistics(self, rows: StoredRows, logits: torch.Tensor, targets: NDArray[np.int32]) -> NDArray[np.float32]:
        """The partial statistics [n, F] of scored rows, over the vocabulary that the task shares with the model."""
        if self.task.reference is None:
            return statistics.of_rows(rows.window, logits, targets)
        self.comparison = self.comparison or compared(self.task, logits)
        return self.comparison.statistics(rows, logits, targets)

    def finish(self) -> None:
        """Write the head, if states were kept."""
        if self.recorder is not None and self.recorder.contents == "states":
            self.recorder.write_head(self.head)

    def close(self) -> None:
        """Stop reading the reference."""
        if self.comparison is not None:
            self.comparison.close()


def compared(task: Task, logits: torch.Tensor) -> Comparison:
    """A model, of whose logits [n, V] some are there, beside the task's store, over the entries of both."""
    assert task.reference is not None
    store = open_reference(task.reference)
    entries = min(task.vocab_size or store.head.vocab_size, logits.shape[1])
    return Comparison(store, (0, entries), logits.device, with_divergences=task.divergences)


def rows_of(values: torch.Tensor, chosen: Sequence[slice]) -> torch.Tensor:
    """Some rows of logits [n, V] or states [n, H]; a view of one range."""
    import torch

    rows = [values[each] for each in chosen]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
