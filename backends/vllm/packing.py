"""The scored rows of one step, packed: which rows of the hidden states they are, and which positions of which windows.

A step holds anything between a few windows of thousands of tokens and one token of each of hundreds of windows.
Packed, both are one list of rows, which is scored in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from backends.reference.reading import StoredRows
from backends.vllm.hooks import Segment, Tokens, on_device, ranges

if TYPE_CHECKING:
    import torch


class Part(NamedTuple):
    """``n_rows`` neighbouring scored rows of one window.

    ``rows`` are its scored positions, ``row`` is where in the hidden states the first of them lies; the first predicted
    token is number ``token`` of ``prompt``.
    """

    rows: StoredRows
    row: int
    n_rows: int
    prompt: Any
    token: int

    def cut(self, begin: int, end: int) -> Part:
        """The part's own rows ``begin`` to ``end``."""
        if (begin, end) == (0, self.n_rows):
            return self
        rows = self.rows._replace(begin=self.rows.begin + begin, end=self.rows.begin + end)
        return Part(rows, self.row + begin, end - begin, self.prompt, self.token + begin)


def parts_of(segments: Sequence[Segment]) -> list[Part]:
    """The scored rows of the segments, in the order in which they lie in the hidden states.

    The row at position p of a window predicts token p + 1: scored rows are those one before the positions in ``spans``.
    """
    parts = []
    for segment in segments:
        window, spans = segment.tag
        n_scored, before = sum(end - begin for begin, end in spans), 0
        for first, last in spans:
            begin = max(segment.start, first - 1)
            end = min(segment.start + segment.n_rows, last - 1)
            if begin < end:
                rows = StoredRows(window, n_scored, before + begin - first + 1, before + end - first + 1)
                parts.append(Part(rows, segment.begin + begin - segment.start, end - begin, segment.prompt, begin + 1))
            before += last - first
    return sorted(parts, key=lambda part: part.row)


@dataclass(frozen=True)
class Pack:
    """All parts of a step, one after the other: packed rows 0 to ``len``."""

    parts: Sequence[Part]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Where in the pack each part ends."""
        return np.cumsum([part.n_rows for part in self.parts])

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.parts else 0

    def between(self, a: int, b: int) -> list[Part]:
        """The parts of packed rows ``a`` to ``b``, as far as there are any; the first and the last are cut to fit."""
        b = min(b, len(self))
        if a >= b:
            return []
        first, last = np.searchsorted(self.ends, (a, b - 1), side="right")
        found = []
        for number in range(first, last + 1):
            part, begin = self.parts[number], int(self.ends[number]) - self.parts[number].n_rows
            found.append(part.cut(max(a - begin, 0), min(b - begin, part.n_rows)))
        return found

    def targets(self, tokens: Tokens) -> torch.Tensor:
        """The predicted tokens of all rows, int64."""
        return tokens([(part.prompt, part.token, part.token + part.n_rows) for part in self.parts])


def states_of(hidden_states: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """The hidden states [n, H] of parts, one after the other: a view where they lie side by side, else one gather."""
    first, last = parts[0].row, parts[-1].row + parts[-1].n_rows
    begins = np.array([part.row for part in parts], np.int64)
    counts = np.array([part.n_rows for part in parts], np.int64)
    if last - first == counts.sum():
        return hidden_states[first:last]
    return hidden_states.index_select(0, on_device(ranges(begins, begins + counts), hidden_states.device))
