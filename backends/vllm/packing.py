"""The scored rows of one step, packed: which rows of the hidden states they are, and which positions of which windows.

A step holds anything between a few windows of thousands of tokens and one token of each of hundreds of windows.
Packed, both are one list of rows, which is scored in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends.reference.comparison import StoredRows
from backends.vllm.hooks import Segment, Tokens, on_device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Part:
    """Neighbouring scored rows of one window.

    ``rows`` are its scored positions, ``row`` is where in the hidden states the first of them lies; the first predicted
    token is number ``token`` of ``prompt``.
    """

    rows: StoredRows
    row: int
    prompt: Any
    token: int

    def cut(self, begin: int, end: int) -> Part:
        """The part's own rows ``begin`` to ``end``."""
        rows = replace(self.rows, begin=self.rows.begin + begin, end=self.rows.begin + end)
        return Part(rows, self.row + begin, self.prompt, self.token + begin)

    def __len__(self) -> int:
        return self.rows.end - self.rows.begin


def parts_of(segments: Sequence[Segment]) -> list[Part]:
    """The scored rows of the segments, in the order in which they lie in the hidden states.

    The row at position p of a window predicts token p + 1: scored rows are those at ``score_from`` - 1 to L - 2.
    """
    parts = []
    for segment in segments:
        window, score_from, n_scored = segment.tag
        begin = max(segment.start, score_from - 1)
        end = min(segment.start + segment.count, score_from - 1 + n_scored)
        if begin < end:
            rows = StoredRows(window, n_scored, begin - score_from + 1, end - score_from + 1)
            parts.append(Part(rows, segment.begin + begin - segment.start, segment.prompt, begin + 1))
    return sorted(parts, key=lambda part: part.row)


@dataclass(frozen=True)
class Pack:
    """All parts of a step, one after the other: packed rows 0 to ``len``."""

    parts: Sequence[Part]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Where in the pack each part ends."""
        return np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.parts else 0

    def between(self, a: int, b: int) -> list[Part]:
        """The parts of packed rows ``a`` to ``b``; the first and the last are cut to fit."""
        first, last = np.searchsorted(self.ends, (a, b - 1), side="right")
        found = []
        for number in range(first, last + 1):
            part, begin = self.parts[number], int(self.ends[number]) - len(self.parts[number])
            found.append(part.cut(max(a - begin, 0), min(b - begin, len(part))))
        return found

    def targets(self, tokens: Tokens) -> torch.Tensor:
        """The predicted tokens of all rows, int64."""
        return tokens([(part.prompt, part.token, part.token + len(part)) for part in self.parts])

    def states(self, hidden_states: torch.Tensor, a: int, b: int) -> torch.Tensor:
        """The hidden states [b - a, H] of packed rows: a view where they lie side by side, else one gather."""
        parts = self.between(a, b)
        first, last = parts[0].row, parts[-1].row + len(parts[-1])
        if last - first == b - a:
            return hidden_states[first:last]
        rows = np.concatenate([np.arange(part.row, part.row + len(part)) for part in parts])
        return hidden_states.index_select(0, on_device(rows, hidden_states.device))
