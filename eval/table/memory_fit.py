"""``--fit 24GB@32k``: marks rows whose memory for a context is larger, and footnotes on the memory
of serving.
"""

from __future__ import annotations

from typing import NamedTuple

from ..results import Memory, ModelResult, RunResult
from .columns import Column
from .numbers import number_text

OLDER = Memory(missing="an older compare_q made this row")


class Fit(NamedTuple):
    """Bytes that rows should fit in, the column of their memory for a context, and both as the user
    wrote them.
    """

    limit: int
    column: Column
    words: str

    def marked(self, run: RunResult) -> RunResult:
        """Return the run with ``fits`` of every measured row, and a footnote on each row that does
        not fit or may not.

        Only tables show such a run; results.json has the rows without the marks.
        """
        return run.updated(
            models=tuple(model if model.error else self.checked(model) for model in run.models)
        )

    def checked(self, model: ModelResult) -> ModelResult:
        """Return a row with ``fits``, and with a footnote unless it fits."""
        needed: float | None = self.column.value(model)
        notes = [f"--fit {self.words}: {fault}" for fault in too_long(model, self.column)]
        if needed is None:
            notes.append(f"--fit {self.words} n/a: {(model.memory or OLDER).missing}")
            return model.updated(fits=None, notes=(*model.notes, *notes))
        fits = 1e9 * needed <= self.limit
        if not fits:
            notes.append(
                f"does not fit into {self.words}: {self.column.name} is {number_text(needed, 3)} GB"
            )
        return model.updated(fits=fits, notes=(*model.notes, *notes))

    def summary(self, run: RunResult) -> str | None:
        """Return a line if all rows of known memory fit; None if a row is marked, or if no memory
        is known.
        """
        sizes: dict[str, float] = {}
        for model in run.models:
            needed = None if model.error else self.column.value(model)
            if needed is not None:
                sizes[model.label] = needed
        if not sizes or 1e9 * max(sizes.values()) > self.limit:
            return None
        largest = max(sizes, key=lambda label: sizes[label])
        rows = "every row fits"
        if len(sizes) < len(run.models):
            rows = "every row whose memory is known fits"
        return f"--fit {self.words}: {rows}; {largest} needs the most, {number_text(sizes[largest], 3)} GB"


def too_long(model: ModelResult, column: Column) -> list[str]:
    """Return that a column's number of tokens is beyond the model's context; empty if it is not, or
    not known.
    """
    context = (model.memory or OLDER).context
    if context is None or not column.context or column.context <= context:
        return []
    return [f"{column.name} is beyond the model's context of {context:,} tokens"]


def facts(model: ModelResult) -> list[str]:
    """Return why the memory of serving a model is not known, or else what is special about it."""
    found = model.memory or OLDER
    if found.missing:
        return [f"memory n/a: {found.missing}"]
    special = {
        "memory with a KV cache by the config, since the engine scored without one": found.kv_source
        == "config",
        "memory is an upper limit: layers with a sliding window count in full": found.kv_is_upper,
    }
    return [words for words, holds in special.items() if holds]
