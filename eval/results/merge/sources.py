"""What is merged: files and the runs in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval.results.run_result import Part, StoredRun


@dataclass(frozen=True)
class Source:
    """One file: its name, its run, and the report's inspection (JSON types) or None."""

    name: str
    run: StoredRun
    inspection: Any = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The runs in it: itself, or those that it was merged from."""
        run = self.run
        labels = tuple(model.label for model in run.models)
        return run.parts or (Part(self.name, labels, run.origin, run.reference, run.reference_ppl),)
