"""Collect the scores of trials, and append them to a file (``trial_scores.py``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ..base import Engine, Window
from ..restoring import Trial, TrialScore
from . import trial_scores
from .trial_scores import Place


class TrialCommitter:
    """Collects scores of trials; both models are checked for changes before scores are appended.

    ``engines``: the quantized model and the reference.
    """

    def __init__(
        self,
        file: Path,
        engines: Sequence[Engine],
        trials: Sequence[Trial],
        windows: Sequence[Window],
    ) -> None:
        self.file = file
        self.engines = engines
        self.trials = [trial.digest for trial in trials]
        self.windows = {window.index: window.digest for window in windows}
        self.last_commit = time.perf_counter()
        self.waiting: list[tuple[Place, TrialScore]] = []

    def add(self, score: TrialScore, seconds: float) -> None:
        """Add a score; write all if the last ones were written ``seconds`` ago or earlier."""
        place = Place(self.trials[score.trial], self.windows[score.window])
        self.waiting.append((place, score))
        if time.perf_counter() - self.last_commit >= seconds:
            self.commit()

    def commit(self) -> None:
        """Append the collected scores; ModelError if a model has changed since it was loaded.

        The scores are dropped then.
        """
        scores = self.waiting
        # Dropped before the check: a caller may commit once more, and the second check may reach
        # the right model by chance.
        self.waiting = []
        if not scores:
            return
        for engine in self.engines:
            engine.check_unchanged()
        trial_scores.append(self.file, scores)
        self.last_commit = time.perf_counter()
