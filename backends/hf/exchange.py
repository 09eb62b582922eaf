"""Trials: score one of two loaded models with modules of the other (``backends/restoring.py``).

Whole modules are exchanged, so that a restored module computes as the reference's does: its weights
are the reference's, and its activations are not rounded.  This is what a checkpoint computes whose
config ignores the module.  Both models are as before whenever a score is yielded.

The KL divergence is that of a row of the table: ``LogitsScorer`` scores the windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..base import ScoreRequest, TokenScores, Trial, TrialScore, Window
from ..common.errors import InputError
from ..logits_engine import LogitsEngine, LogitsScorer
from ..reference.comparison import StoredRows
from ..restoring import Base
from ..scoring import token_statistics
from .model_pair import ModelPair
from .prefix_sharing import Calls

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Change(NamedTuple):
    """The modules that a trial exchanges.

    ``paths``: their paths in the models.  ``layers``: the numbers of the decoder layers that have
    some of them; None if the embedding or another module before the layers is one.
    """

    paths: tuple[str, ...]
    layers: frozenset[int] | None


class TrialScorer(LogitsScorer):
    """Scores a model relative to the reference's logits of the same window.

    ``reference_rows``: index of a piece's first scored row -> the reference's logits [n, V] of the
    piece's scored rows.
    """

    def __init__(self, engine: LogitsEngine, reference_rows: Mapping[int, torch.Tensor]) -> None:
        super().__init__(engine, ScoreRequest(), {})
        self.reference_rows = reference_rows

    def statistics(
        self, rows: StoredRows, logits: torch.Tensor, targets: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        ids = token_statistics.target_ids(rows.window, logits, targets)
        out = torch.empty(rows.n_rows, token_statistics.width(True), device=logits.device)
        reference = self.reference_rows[rows.begin]
        token_statistics.partial(logits, ids, out, reference=reference)
        return out.cpu().numpy()


class RowCollector(LogitsScorer):
    """Collects the logits [n, V] of the scored rows of a window, by the first row of each piece."""

    def __init__(self, engine: LogitsEngine) -> None:
        super().__init__(engine, ScoreRequest(), {})
        self.rows: dict[int, torch.Tensor] = {}

    def statistics(
        self, rows: StoredRows, logits: torch.Tensor, targets: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        self.rows[rows.begin] = logits
        return np.empty((0, 0), np.float32)


class Exchange:
    """Scores trials with two loaded models; ``shares_prefix``: see ``prefix_sharing.py``.

    InputError if a trial names a module that the models do not have.
    """

    def __init__(
        self, pair: ModelPair, trials: Sequence[Trial], *, shares_prefix: bool = True
    ) -> None:
        self.pair = pair
        self.trials = trials
        self.changes = [self.change_of(trial) for trial in trials]
        # The bases whose trials replay recorded outputs of layers.
        self.sharing: set[Base] = set()
        if shares_prefix:
            self.sharing = set(self.pair.engines)
        self.checked: set[Base] = set()

    def change_of(self, trial: Trial) -> Change:
        """Return the modules and decoder layers that differ in a trial."""
        paths = []
        layers: set[int] = set()
        is_before_layers = False
        for name in trial.modules:
            path = self.pair.paths.get(name)
            if path is None:
                raise InputError(f"{name}: is not a module of {self.pair.label}")
            paths.append(path)
            if path == self.pair.head_path:
                continue
            for place in self.pair.places[path]:
                layer = self.pair.layer_of(place)
                if layer is None:
                    is_before_layers = True
                else:
                    layers.add(layer)
        if is_before_layers:
            return Change(tuple(paths), None)
        return Change(tuple(paths), frozenset(layers))

    def scores(self, window: Window) -> Iterator[TrialScore]:
        """Yield the score of every trial in a window, first of the trials of base "reference"."""
        calls = Calls(self.pair.layers["reference"])
        rows = self.rows_of_base("reference", window, calls)
        yield from self.scores_of_base("reference", window, rows, calls)
        # Otherwise the recorded outputs of both models would be in memory at the same time.
        calls = Calls(self.pair.layers["quantized"])
        if self.gains_by_sharing("quantized"):
            self.rows_of_base("quantized", window, calls)
        yield from self.scores_of_base("quantized", window, rows, calls)

    def rows_of_base(self, base: Base, window: Window, calls: Calls) -> dict[int, torch.Tensor]:
        """Return the logits of the scored rows of an unchanged model (``RowCollector``).

        If trials can share the outputs of its layers, they are recorded in ``calls``.
        """
        engine = self.pair.engines[base]
        if not self.gains_by_sharing(base):
            return scored_rows(engine, window)
        with calls.recorded():
            rows = scored_rows(engine, window)
        if base not in self.checked:
            self.checked.add(base)
            if not self.is_shareable(engine, window, rows, calls):
                self.sharing.discard(base)
                calls.calls.clear()
        return rows

    def gains_by_sharing(self, base: Base) -> bool:
        """Return True if the trials of a base save more than the pass that is recorded costs.

        The reference runs once in any case, because its logits are needed.
        """
        if base not in self.sharing:
            return False
        n_layers = len(self.pair.layers[base])
        saved = 0.0  # passes through all layers
        for trial, change in zip(self.trials, self.changes, strict=True):
            if trial.base == base and change.layers is not None:
                saved += min(change.layers, default=n_layers) / n_layers
        cost = 1.0
        if base == "reference":
            cost = 0.0
        return saved > cost

    def is_shareable(
        self,
        engine: LogitsEngine,
        window: Window,
        rows: dict[int, torch.Tensor],
        calls: Calls,
    ) -> bool:
        """Return True if replayed layers give the same logits, bit for bit.

        They do not if a layer passes numbers to a later one in another way than by its output, as
        layers do that share keys and values.  Then every trial runs all layers.
        """
        n_calls = len(calls.calls)
        for count in sorted({n_calls // 2, n_calls - 1}):
            try:
                with calls.replayed(count):
                    replayed_rows = scored_rows(engine, window)
            # A layer that misses what an earlier one did may raise anything.
            except Exception:
                return False
            if replayed_rows.keys() != rows.keys():
                return False
            if not all(torch.equal(replayed_rows[begin], rows[begin]) for begin in rows):
                return False
        return True

    def scores_of_base(
        self,
        base: Base,
        window: Window,
        reference_rows: dict[int, torch.Tensor],
        calls: Calls,
    ) -> Iterator[TrialScore]:
        """Yield the scores of the trials with this base; ``calls``: empty if nothing is shared."""
        scorer = TrialScorer(self.pair.engines[base], reference_rows)
        for index, (trial, change) in enumerate(zip(self.trials, self.changes, strict=True)):
            if trial.base != base:
                continue
            n_replayed = 0
            if change.layers is not None:
                n_replayed = calls.before(change.layers)
            with calls.replayed(n_replayed), self.pair.exchanged(base, change.paths):
                token_scores = scorer.scores(window)
            yield score_of(index, token_scores)


def scored_rows(engine: LogitsEngine, window: Window) -> dict[int, torch.Tensor]:
    """Return the logits of a window's scored rows (``RowCollector``)."""
    collector = RowCollector(engine)
    deque(collector.scored_pieces(window, []), maxlen=0)
    return collector.rows


def score_of(index: int, token_scores: TokenScores) -> TrialScore:
    """Return the score of a trial from the scores of its tokens; sums are in float64."""
    assert token_scores.kld is not None
    klds = token_scores.kld.astype(np.float64)
    finite = klds[np.isfinite(klds)]
    non_finite = len(klds) - len(finite)
    return TrialScore(index, token_scores.window, float(finite.sum()), len(finite), non_finite)
