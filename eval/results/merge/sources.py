"""What is merged: files and the runs in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval.results.run_result import ModelResult, Part, StoredRun


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

    def reference_key(self, model: ModelResult) -> str:
        """The key of the reference that a row is, or that its KLD is against; "" where the file does not say it."""
        keys = {part.reference_key or "" for part in self.parts if part.reference is not None}
        return model.reference_key or (keys.pop() if len(keys) == 1 else "")
