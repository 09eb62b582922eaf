"""Results -> CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.common.messages import printable
from eval.common.files import replacing
from eval.results.results_json import flat_json
from eval.results.run_result import RunResult
from eval.results.texts import TextsResult

Row = dict[str, Any]
FORMULAS = tuple("=+-@\t\r＝＋－＠")
"""How text begins that spreadsheets run; the last four are the signs as Japanese writes them."""


def csv_text(result: RunResult | TextsResult, fields: Sequence[str] | None = None) -> str:
    """These fields of every model as CSV, a line of names and a line a model; None: all flat fields, and the notes.

    Of several texts a line for each text and model, with the text's name before the fields, and of a text that failed
    one line with its name and, where all fields are asked for, its error.
    """
    if isinstance(result, RunResult):
        rows, first = rows_of(result), []
    else:
        rows, first = [row for text in result.texts for row in rows_of_text(text.name, text.run, text.error)], ["text"]
    names = list(next(row for row in rows if "label" in row)) if fields is None else [*first, *fields]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=names, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def rows_of(run: RunResult) -> list[Row]:
    """The flat fields of every model of a run, and its notes."""
    return [
        {key: csv_cell(value) for key, value in flat_json(model, run).items()}
        | {"notes": csv_cell("; ".join(model.notes))}
        for model in run.models
    ]


def rows_of_text(name: str, run: RunResult | None, error: str) -> list[Row]:
    """The rows of one of several texts, with its name first."""
    text = {"text": csv_cell(name)}
    return [{**text, "error": csv_cell(error)}] if run is None else [{**text, **row} for row in rows_of(run)]


def csv_cell(value: Any) -> Any:
    """A value for a cell; text without control characters, and with an apostrophe where it would be a formula."""
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(FORMULAS) else printable(value)


def write_csv(result: RunResult | TextsResult, file: Path, fields: Sequence[str] | None = None) -> None:
    """Write ``csv_text`` atomically."""
    with replacing(file) as part, part.open("w", encoding="utf-8", newline="") as stream:
        stream.write(csv_text(result, fields))
