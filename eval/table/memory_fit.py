"""``--fit 24GB@32k``: mark rows that need more memory for a context, and write footnotes on the
memory of serving.
"""

from __future__ import annotations

from typing import NamedTuple

from ..results import Memory, ModelResult, RunResult
from .columns import Column
from .numbers import number_text

UNKNOWN_MEMORY = Memory(missing="an older compare_q made this row")
"""The memory of a row whose results do not have any."""


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
        models = []
        for model in run.models:
            if not model.error:
                model = self.with_fit(model)
            models.append(model)
        return run.updated(models=tuple(models))

    def with_fit(self, model: ModelResult) -> ModelResult:
        """Return a row with ``fits``, and with a footnote unless it fits."""
        needed: float | None = self.column.value(model)
        notes = []
        for fault in too_long(model, self.column):
            notes.append(f"--fit {self.words}: {fault}")
        if needed is None:
            notes.append(f"--fit {self.words} n/a: {memory_of(model).missing}")
            return model.updated(fits=None, notes=(*model.notes, *notes))
        # The column is in GB of 10^9 bytes.
        fits = 1e9 * needed <= self.limit
        if not fits:
            size = f"{self.column.name} is {number_text(needed, 3)} GB"
            notes.append(f"does not fit into {self.words}: {size}")
        return model.updated(fits=fits, notes=(*model.notes, *notes))

    def summary(self, run: RunResult) -> str | None:
        """Return a line if all rows of known memory fit; None if a row is marked, or if no memory
        is known.
        """
        sizes: dict[str, float] = {}
        for model in run.models:
            if model.error:
                continue
            needed = self.column.value(model)
            if needed is not None:
                sizes[model.label] = needed
        if not sizes or 1e9 * max(sizes.values()) > self.limit:
            return None
        largest = max(sizes, key=lambda label: sizes[label])
        rows = "every row fits"
        if len(sizes) < len(run.models):
            rows = "every row whose memory is known fits"
        size = f"{largest} needs the most, {number_text(sizes[largest], 3)} GB"
        return f"--fit {self.words}: {rows}; {size}"


def memory_of(model: ModelResult) -> Memory:
    """Return the memory of serving a model; it names what is missing if it is not known."""
    if model.memory is None:
        return UNKNOWN_MEMORY
    return model.memory


def too_long(model: ModelResult, column: Column) -> list[str]:
    """Return that a column's number of tokens is beyond the model's context.

    Empty if it is not, or if the context is not known.
    """
    context = memory_of(model).context
    if context is None or not column.context or column.context <= context:
        return []
    return [f"{column.name} is beyond the model's context of {context:,} tokens"]


def memory_facts(model: ModelResult) -> list[str]:
    """Return why the memory of serving a model is not known, or else what is special about it."""
    memory = memory_of(model)
    if memory.missing:
        return [f"memory n/a: {memory.missing}"]
    facts = []
    if memory.kv_source == "config":
        facts.append("memory with a KV cache by the config, since the engine scored without one")
    if memory.kv_is_upper:
        facts.append("memory is an upper limit: layers with a sliding window count in full")
    return facts
