"""Rows as CSV, which spreadsheets can open safely."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from ...backends.common.message_text import printable
from ..results import RunResult
from .columns import fields_of, values_of

FORMULA_STARTS = tuple("=+-@\t\r＝＋－＠")
"""First characters of a text that spreadsheets run; the last four are the full-width signs."""


def csv_of_run(run: RunResult, names: Sequence[str] | None = None) -> str:
    """Return the columns of these names, with their errors, as CSV; None: all fields with one
    value, and the notes.
    """
    rows = []
    for model in run.models:
        rows.append({**values_of(model, names), "notes": "; ".join(model.notes)})
    if names is None:
        fields = list(rows[0])
    else:
        fields = fields_of(names, run.models)
    return csv_text(rows, fields)


def csv_text(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> str:
    """Return the ``fields`` of all rows as CSV, with a header."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fields, extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: csv_value(value) for name, value in row.items()})
    return stream.getvalue()


def csv_value(value: Any) -> Any:
    """Return a value for a cell.

    A text has no control characters, and begins with an apostrophe if a spreadsheet would run it.
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    # Not the text: a tab, which begins a formula, is escaped in it.
    if value.startswith(FORMULA_STARTS):
        return f"'{text}"
    return text
