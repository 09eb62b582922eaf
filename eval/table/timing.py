"""``--timing``: a table of where the seconds of every row went."""

from __future__ import annotations

from eval.results.digits import number_text
from eval.results.run_result import RunResult
from eval.results.timing import PARTS
from eval.table.columns import label_of

HEADERS = ("label", *(f"{part.replace('_', ' ')} s" for part in PARTS))


def timing_rows(run: RunResult) -> list[list[str]]:
    """The cells below ``HEADERS`` of every row that has a timing; * marks those of an earlier run."""
    return [
        [label_of(model) + ("*" if model.cached else ""), *(number_text(seconds[part], 1) for part in PARTS)]
        for model in run.models
        if model.timing and (seconds := model.timing.seconds)
    ]
