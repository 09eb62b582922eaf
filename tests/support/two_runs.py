"""Runs in threads of this process, to let two of them overlap."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare_q.eval.common.progress import Progress
from compare_q.eval.results import ModelResult
from compare_q.eval.run import runner
from compare_q.eval.run.run_config import RunConfig
from compare_q.eval.run.runner import RunOutcome
from compare_q.eval.specs import spec_files
from compare_q.eval.specs.spec_types import DataSpec
from compare_q.eval.text import text_windows
from compare_q.eval.text.eval_data import EvalData

TOGETHER_S = 120.0


class Run(threading.Thread):
    """A run of models on texts, with workers in threads and its own GPUs.

    ``data``: its windows; ``said``: its progress messages.
    """

    def __init__(
        self,
        config: RunConfig,
        texts: dict[str, DataSpec],
        models: Sequence[dict[str, Any]],
        n_windows: int | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.config = config
        self.texts = texts
        self.models = models
        self.n_windows = n_windows
        parts = []
        for name, spec in texts.items():
            parts.append(
                text_windows.build(spec, n_windows, config.cache, Progress(quiet=True), name=name)
            )
        self.data = EvalData.joined(parts)
        self.said = list[str]()
        self.outcome: RunOutcome | None = None
        # An entry in the object's own dict hides the method; mypy refuses an assignment to a
        # method.
        vars(config.progress)["say"] = self.said.append

    def run(self) -> None:
        specs = [spec_files.parse_model_spec(model, Path("models.json")) for model in self.models]
        self.outcome = runner.run(self.config, self.texts, specs, self.n_windows)

    def of(self, label: str) -> ModelResult:
        """Return a model's row; assert that no row of the run has failed."""
        assert self.outcome is not None, "it waits for ever, or has failed"
        rows = self.outcome.results.models
        assert [row.error for row in rows if row.error] == []
        (row,) = [row for row in rows if row.label == label]
        return row

    def scores_of(self, label: str) -> Path:
        """Return the folder of a model's scores."""
        return self.config.cache.path("scores", self.of(label).scores_key.partition("/")[0], "")


def together(*runs: Run) -> None:
    """Execute runs at the same time, and wait for their end."""
    for run in runs:
        run.start()
    for run in runs:
        run.join(TOGETHER_S)
