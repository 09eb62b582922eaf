"""One text of a run, while it is at work: its windows, its rows so far, and its reference once that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

from eval.results.run_result import ModelResult, RunResult
from eval.run import references, table_rows
from eval.run.jobs import Job
from eval.run.references import HeldReference, Reference
from eval.run.session import Session
from eval.specs.types import DataSpec
from eval.text import windows
from eval.text.windows import EvalData

POLL_S = 0.5
"""Seconds between two looks whether a run was stopped."""


@dataclass(eq=False)
class TextRun:
    """A text of a run; ``name`` tells several texts apart, and is empty for the only one.

    ``rows``: by the models' labels.  ``expected``: the reference, once its model begins to score, or was not to be
    scored, for those who want to be ready when it is there; ``reference``: as it is in the end.  ``error``: why the
    text has no rows, set before the reference is: its reference's store is another one's, or damaged.
    """

    name: str
    spec: DataSpec
    data: EvalData
    rows: dict[str, ModelResult] = field(default_factory=dict)
    expected: Future[Reference] = field(default_factory=Future)
    reference: Future[Reference] = field(default_factory=Future)
    error: str = ""

    def settle(self, reference: Reference) -> None:
        """Say which reference the text has in the end, unless that was said before."""
        for future in (self.expected, self.reference):
            if not future.done():
                future.set_result(reference)

    def of(self, label: str) -> str:
        """A model in messages, with the text that it scores where there are several."""
        return f"{label} on {self.name}" if self.name else label

    def result(self, jobs: Sequence[Job]) -> RunResult:
        """The rows of these models, in their order; a model that was not finished is a row that says so."""
        for job in jobs:
            unfinished = replace(table_rows.row_of(job), error="interrupted before it was scored; run again to go on")
            self.rows.setdefault(job.request.label, unfinished)
        reference = self.reference.result()
        known = references.as_json(reference, self.data.n_scored) if isinstance(reference, HeldReference) else None
        rows = tuple(self.rows[job.request.label] for job in jobs)
        data_json, subtitle = windows.data_json(self.spec, self.data), windows.subtitle(self.spec, self.data)
        return RunResult(data_json, subtitle, rows, known)


def awaited(session: Session, reference: Future[Reference], idle: Callable[[], None] = lambda: None) -> Reference:
    """A reference that another thread makes; StoppedError if the run is stopped meanwhile.

    ``idle`` is called again and again while it is not there.
    """
    while True:
        session.hosts.running.check()
        with suppress(TimeoutError):
            return reference.result(timeout=POLL_S)
        idle()
