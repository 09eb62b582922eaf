"""The rows of a run as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from compare_q.backends.common.messages import printable
from compare_q.eval.results import RunResult

FORMULAS = tuple("=+-@\t\r＝＋－＠")
"""How text begins that spreadsheets run; the last four are the signs as Japanese writes them."""


def csv_text(results: RunResult, fields: Sequence[str] | None = None) -> str:
    """These fields of every model as CSV, a line of names and a line a model; None: all flat fields, and the notes.

    Of several texts a line for each text and model, with the text's name before the fields, and of a text that failed
    one line with its name and, where all fields are asked for, its error.
    """
    rows = []
    for text in results.texts:
        for model in text.models:
            cells = {**model.flat, "notes": "; ".join(model.notes)}
            rows.append({"text": text.name, **cells})
        if text.error:
            rows.append({"text": text.name, "error": text.error})
    names = [name for name in next(row for row in rows if "label" in row) if name != "text"]
    stream = io.StringIO()
    columns = [*(["text"] if len(results.texts) > 1 else []), *(names if fields is None else fields)]
    writer = csv.DictWriter(stream, fieldnames=columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def csv_cell(value: Any) -> Any:
    """A value for a cell; text without control characters, and with an apostrophe where it would be a formula."""
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(FORMULAS) else printable(value)
