"""The small table of a report: the KLD of every row in each slice of the tokens, or its PPL without a reference."""

from __future__ import annotations

from dataclasses import dataclass

from compare_q.eval.plots.slice_bars import in_order
from compare_q.eval.results import ModelResult, RunResult
from compare_q.eval.table.numbers import KLD_DIGITS, PPL_DIGITS, error_text, number_text


@dataclass(frozen=True)
class SliceCell:
    """A number and its error as text; ``key``: what the page sorts by, empty for a value that is not known."""

    value: str
    error: str = ""
    key: str = ""


@dataclass(frozen=True)
class SliceColumn:
    """A slice, with a cell for each row."""

    name: str
    cells: tuple[SliceCell, ...]


@dataclass(frozen=True)
class SliceTable:
    """The table of slices."""

    measure: str  # "KLD" or "PPL"
    labels: tuple[str, ...]
    columns: tuple[SliceColumn, ...]


def slices_of(run: RunResult) -> SliceTable | None:
    """Return the table of the rows that have slices; None if there is nothing to show."""
    models = [model for model in run.models if model.slices]
    has_kld = any(each.kld is not None for model in models for each in model.slices.values())
    if not models or (run.reference is not None and not has_kld):
        return None
    cell_of = kld_cell if has_kld else ppl_cell
    columns = []
    for name in in_order(run.slices):
        cells = [cell_of(model, name) for model in models]
        columns.append(SliceColumn(name, tuple(cells)))
    labels = [model.marked_label for model in models]
    return SliceTable("KLD" if has_kld else "PPL", tuple(labels), tuple(columns))


def kld_cell(model: ModelResult, name: str) -> SliceCell:
    """Return the KLD of a model in a slice; the reference's is 0 by definition."""
    if model.reference:
        return SliceCell("ref", key="0")
    part = model.slices.get(name)
    if part is None:
        return SliceCell("n/a")
    return number_cell(part.kld, part.kld_stderr, KLD_DIGITS)


def ppl_cell(model: ModelResult, name: str) -> SliceCell:
    """Return the perplexity of a model in a slice."""
    part = model.slices.get(name)
    if part is None:
        return SliceCell("n/a")
    return number_cell(part.ppl, part.ppl_stderr, PPL_DIGITS)


def number_cell(value: float | None, stderr: float | None, digits: int) -> SliceCell:
    """Return the cell of a number with its error."""
    if value is None:
        return SliceCell("n/a")
    return SliceCell(number_text(value, digits), error_text(stderr), str(value))
