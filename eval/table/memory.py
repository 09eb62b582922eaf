"""``--fit 24GB@32k``: marks rows whose memory for a context is larger, and footnotes on the memory of serving."""

from __future__ import annotations

from typing import NamedTuple

from compare_q.eval.results import Memory, ModelResult, RunResult
from compare_q.eval.table.columns import Column
from compare_q.eval.table.numbers import number_text

OLDER = Memory(missing="an older compare_q made this row")


class Fit(NamedTuple):
    """Bytes that rows should fit in, the column of their memory for a context, and both as the user wrote them."""

    limit: int
    column: Column
    words: str

    def marked(self, run: RunResult) -> RunResult:
        """Return the run with ``fits`` of every measured row, and a footnote on each row that does not fit or may not.

        Only tables show such a run; results.json has the rows without the marks.
        """
        return run.updated(models=tuple(model if model.error else self.checked(model) for model in run.models))

    def checked(self, model: ModelResult) -> ModelResult:
        """Return a row with ``fits``, and with a footnote unless it fits."""
        needed: float | None = self.column.value(model)
        if needed is None:
            note = f"--fit {self.words} n/a: {(model.memory or OLDER).missing}"
        elif 1e9 * needed > self.limit:
            note = f"does not fit into {self.words}: {self.column.name} is {number_text(needed, 3)} GB"
        else:
            return model.updated(fits=True)
        return model.updated(fits=None if needed is None else False, notes=(*model.notes, note))


def facts(model: ModelResult) -> list[str]:
    """Return why the memory of serving a model is not known, or else what is special about it."""
    found = model.memory or OLDER
    if found.missing:
        return [f"memory n/a: {found.missing}"]
    special = {
        "memory with a KV cache by the config, since the engine scored without one": found.kv_source == "config",
        "memory is an upper limit: layers with a sliding window count in full": found.kv_is_upper,
    }
    return [words for words, holds in special.items() if holds]
