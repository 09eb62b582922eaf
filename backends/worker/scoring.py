"""A loaded engine and windows -> scores of every token, whether the engine scores by itself or hands out logits.

Here is the shift by one for engines that hand out logits: the logits at position i predict token i + 1.  An engine that
scores by itself is told what to do; one that hands out logits is scored by the same definitions
(``backends/scoring/statistics.py``), compared with the same store (``backends/reference/comparison.py``) on the same
positions, and leaves the same store behind (``backends/reference/recorder.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from compare_q.backends.base import Engine, LogitsEngine, ScoringEngine, Task, TokenScores, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference.comparison import Comparison
from compare_q.backends.reference.reading import open_reference
from compare_q.backends.reference.recorder import Recorder
from compare_q.backends.scoring import statistics

if TYPE_CHECKING:
    import torch


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
    head = "" if task.record is None else engine.head()  # before the first logits: states are kept from here on
    comparison: Comparison | None = None
    recorder: Recorder | None = None
    try:
        for window in windows:
            logits = scored_rows(engine.logits(window), window)
            targets = window.targets
            states = partial(scored_states, engine, window)
            if task.record is not None:
                recorder = recorder or Recorder.of_engine(task.record, head, logits, states)
                recorder.write(window.index, recorder.chosen(logits, states))
            if task.reference is not None:
                comparison = comparison or compared(task, logits)
                yield comparison.window_scores(window.index, logits, targets)
            else:
                yield statistics.window_scores(window.index, logits, targets)
        if recorder is not None and recorder.contents == "states":
            recorder.write_head(head)
    finally:
        if comparison is not None:
            comparison.close()


def compared(task: Task, logits: torch.Tensor) -> Comparison:
    """A model, of whose logits [T, V] the first are there, beside the task's store, over the entries of both."""
    assert task.reference is not None
    store = open_reference(task.reference)
    entries = min(task.vocab_size or store.head.vocab_size, logits.shape[1])
    return Comparison(store, (0, entries), logits.device, with_divergences=task.divergences)


def scored_states(engine: LogitsEngine, window: Window) -> torch.Tensor:
    """The states [T, H] from which the window's scored tokens were predicted, just after ``logits`` of the window."""
    return scored_rows(engine.states(), window)


def scored_rows(values: torch.Tensor, window: Window) -> torch.Tensor:
    """Of logits [L, V] or states [L, H], the rows [T, ...] that predict the scored tokens; a view of one range."""
    import torch

    length = len(window.token_ids)
    if values.ndim != 2 or values.shape[0] != length:
        shape = tuple(values.shape)
        raise ModelError(f"window {window.index}: logits of shape {shape} for a window of {length} tokens")
    rows = [values[begin - 1 : end - 1] for begin, end in window.spans]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
