"""``LogitsEngine``: scores windows with an engine that returns logits.

The logits at position i predict token i + 1.  All engines share the definitions of scores
(``backends/scoring/token_statistics.py``), the comparison with a reference store
(``backends/reference/comparison.py``) and the recorder of a store
(``backends/reference/recorder.py``).

This is a complete engine: all tokens of its vocabulary of 49,152 are equally probable.
CONTRIBUTING.md explains how to register it:

    import torch
    from compare_q.backends.base import Capabilities, ModelFiles, Window
    from compare_q.backends.logits_engine import LogitsEngine

    class UniformEngine(LogitsEngine):
        capabilities = Capabilities(
            load_fns=("uniform",),
            fwd_fn="uniform",
            packages=("torch",),
            install="pip install torch",
            summary="uniform",
        )
        # The default: no files.  HuggingFaceFolder: a folder with config.json and safetensors.
        files = ModelFiles

        def load(self) -> None:
            self.table = torch.zeros(49_152)

        def pieces(self, window: Window) -> Iterator[torch.Tensor]:
            yield self.table.expand(len(window.token_ids), -1)
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .base import Engine, PlannedModel, ScoreRequest, TokenScores, Window
from .common.engine_options import EngineOptions, parse_options
from .common.errors import ModelError
from .reference.comparison import Comparison, StoredRows
from .reference.recorder import Recorder
from .reference.store import open_reference
from .scoring import token_statistics

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from .reference.head import RecomputableHead

PIECE_ELEMENTS = 1 << 28
"""Logits that an engine computes at a time: 512 MiB in bfloat16.

For example 2,093 positions of 128,256 entries.
"""


class LogitsEngine(Engine):
    """One model in an engine that returns logits."""

    options_type: ClassVar[type[EngineOptions]] = EngineOptions
    """Type of the ``engine`` object of its specs."""

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.options: Any = parse_options(self.options_type, model.options)
        # The loaded model, for subclasses.
        self.model: Any = None
        # States [n, H] of the last piece of logits, once ``head`` has returned a head.
        self.head_inputs: Any = None

    @classmethod
    def option_names(cls) -> Collection[str]:
        return cls.options_type.model_fields.keys()

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        parse_options(cls.options_type, model.options)

    def prepare(self, windows: Sequence[Window]) -> None:
        """Called before the first window of a text, with all its windows in order.

        Scores of a text must not depend on texts before it: counters and random numbers restart.
        """

    @abstractmethod
    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        """Yield logits [n, V] of the next n positions of one window, until all L are complete.

        They cover the vocabulary without padding, in any float dtype, on any device.  If no
        position of a piece predicts a scored token, the engine may yield [n, 0] instead.  A piece
        has at most ``PIECE_ELEMENTS`` logits if the engine can limit them.  It is not used after
        the next piece is requested.
        """

    def logits(self, window: Window) -> torch.Tensor:
        """Return the logits [L, V] of a whole window."""
        import torch

        return torch.cat(list(self.pieces(window)))

    def head(self) -> RecomputableHead | str:
        """Return (weight [V, H], bias [V] or None, ``Head``), which recompute logits from states.

        If that is impossible, return why.
        """
        return "this engine does not show its head"

    def states(self) -> torch.Tensor:
        """Return the states [n, H] that entered the head for the last of ``pieces``.

        Only called once ``head`` has returned a head.
        """
        states: torch.Tensor = self.head_inputs
        return states

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield the scores of every window, in the order of the windows."""
        self.prepare(windows)
        digests = {window.index: window.digest for window in windows}
        scorer = LogitsScorer(self, request, digests)
        try:
            for window in windows:
                yield scorer.scores(window)
            recorder = scorer.recorder
            if recorder is not None and recorder.contents == "states":
                recorder.write_head(scorer.head)
        finally:
            if scorer.comparison is not None:
                scorer.comparison.close()


class LogitsScorer:
    """Scores one window after the other, with one piece of its logits in memory at a time.

    ``digests``: of all windows, by their indices and in their order.  Comparison and recorder are
    created with the first logits, whose dtype, device and size they need.
    """

    def __init__(
        self, engine: LogitsEngine, request: ScoreRequest, digests: Mapping[int, str]
    ) -> None:
        self.engine = engine
        self.request = request
        self.digests = digests
        self.head: RecomputableHead | str = ""
        if request.record:
            # Before the first logits: from this call on, the engine keeps the states.
            self.head = engine.head()
        self.comparison: Comparison | None = None
        self.recorder: Recorder | None = None

    def scores(self, window: Window) -> TokenScores:
        """Return the scores of one window, and record its states or logits if requested."""
        piece_statistics: list[NDArray[np.float32]] = []
        pieces = self.scored_pieces(window, piece_statistics)
        if self.request.record is None:
            # Not a loop: its variable would keep a piece in memory while the next is computed.
            deque(pieces, maxlen=0)
        else:
            # The first piece creates the recorder.
            first = next(pieces)
            assert self.recorder is not None
            all_pieces = chain([first], pieces)
            self.recorder.write_pieces(window.index, window.n_scored, all_pieces)
        if self.comparison is not None:
            self.comparison.drop(window.index)
        # One shard has the whole vocabulary.
        shards = [np.concatenate(piece_statistics)]
        return token_statistics.scores(window.index, window.targets, shards)

    def scored_pieces(
        self, window: Window, piece_statistics: list[NDArray[np.float32]]
    ) -> Iterator[torch.Tensor]:
        """Score a window by pieces; yield the states or logits of each piece's scored rows.

        The statistics [n, F] of these rows are appended to ``piece_statistics``.  What is yielded
        is for the recorder: without one, the caller only advances the iterator.
        """
        length = len(window.token_ids)
        begin = 0
        n_scored = 0  # of the pieces so far
        for logits in self.engine.pieces(window):
            if logits.ndim != 2:
                raise ModelError(
                    f"window {window.index}: logits of shape {tuple(logits.shape)} for a window of "
                    f"{length} tokens"
                )
            scored_slices = list(window.predicting(begin, begin + len(logits)))
            begin += len(logits)
            if not scored_slices:
                continue
            logits = rows_of(logits, scored_slices)
            rows = StoredRows(window.index, window.n_scored, n_scored, n_scored + len(logits))
            n_scored += len(logits)
            recorded_rows = self.rows_to_record(logits, scored_slices)
            targets = window.targets[rows.begin : rows.end]
            piece_statistics.append(self.statistics(rows, logits, targets))
            # Otherwise this piece would be in memory together with the next piece.
            del logits
            yield recorded_rows
            del recorded_rows
        if begin != length:
            raise ModelError(
                f"window {window.index}: logits of {begin} positions for a window of "
                f"{length} tokens"
            )

    def rows_to_record(self, logits: torch.Tensor, scored_slices: Sequence[slice]) -> torch.Tensor:
        """Return states or logits of the scored rows of the last piece, as the recorder needs.

        ``logits`` [n, V]: of these rows; returned if nothing is recorded.
        """
        folder = self.request.record
        if folder is None:
            return logits

        def states() -> torch.Tensor:
            return rows_of(self.engine.states(), scored_slices)

        if self.recorder is None:
            key = self.request.record_key
            self.recorder = Recorder.of_engine(folder, key, self.digests, self.head, logits, states)
        return self.recorder.chosen(logits, states)

    def statistics(
        self, rows: StoredRows, logits: torch.Tensor, targets: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Return partial statistics [n, F] of scored rows.

        With a reference, over the vocabulary that reference and model share.
        """
        request = self.request
        if request.reference is None:
            return token_statistics.of_rows(rows.window, logits, targets)
        if self.comparison is None:
            store = open_reference(request.reference)
            entries = request.vocab_size
            if not entries:
                entries = store.head.vocab_size
            entries = min(entries, logits.shape[1])
            self.comparison = Comparison(store, self.digests, (0, entries), logits.device)
        return self.comparison.statistics(rows, logits, targets)


def rows_of(values: torch.Tensor, row_slices: Sequence[slice]) -> torch.Tensor:
    """Return some rows of logits [n, V] or states [n, H]; a view if there is one slice."""
    import torch

    if len(row_slices) == 1:
        return values[row_slices[0]]
    return torch.cat([values[row_slice] for row_slice in row_slices])
