"""The outcome of ``compare-q flips``: a table with its notes and sentences, CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from ...backends.common.message_text import amount
from ..common.terminal import say
from ..results import ModelResult
from ..stats.flip_statistics import LEVEL, Accuracy
from ..table import csv_text as csv_writer
from ..table.columns import Column
from ..table.numbers import KLD_DIGITS, bound_text, error_text, number_text
from ..table.tables import Cell, FilledColumn, Table
from ..table.terminal_table import least_width, leave_out, print_columns, size_column
from .comparing import OUTCOMES, Comparison, FlipReport, values_of

LAYOUT = 1
"""Version of the layout of the JSON file."""
LEFT_OUT_FIRST = ("other_wrong", "questions", "kld")
"""Columns that a narrow terminal leaves out, in this order."""
NO_EVIDENCE = (
    "p: McNemar's exact test; a p of 0.05 or more is no evidence that two models are equal: few "
    "answers give a large p, too. Of 20 rows of equal models, one may have a p below 0.05"
)
HINT_AT_MARGIN = "--margin 1% tests whether the accuracies differ by less than 1 point"
LEGEND = (
    "acc: share of right answers; its ± is one standard error over independent questions, as in "
    "lm-eval",
    "difference: new minus reference, in points, with its 90 % interval",
    "lost: right in the reference and wrong in the new model; gained: the other way round; other "
    "wrong: both wrong, with different answers",
)
Klds = Mapping[str, ModelResult]
"""Label -> row of a results.json, which has the KLD."""


FLIPS_COLUMNS = (
    Column("task", "task", "", wraps=True),
    Column("metric", "metric", "", wraps=True),
    Column("label", "label", "", wraps=True),
    Column("kld", "KLD", "", digits=0),
    Column("questions", "questions", "", digits=0),
    Column("reference", "reference\nacc %", "", digits=0),
    Column("accuracy", "new\nacc %", "", digits=0),
    Column("difference", "difference\n(90 %)", "", digits=0),
    Column("lost", "lost", "", digits=0),
    Column("gained", "gained", "", digits=0),
    Column("other_wrong", "other\nwrong", "", digits=0),
    Column("p", "p", "", digits=0),
)
"""All columns; "kld" needs a results.json.  A column on equivalence within a margin may follow."""


def table_of_flips(report: FlipReport, klds: Klds | None = None) -> Table:
    """Return the table, one row for each comparison; ``klds``: None without a results.json."""
    return Table(
        title=f"reference: {report.reference}",
        columns=tuple(columns_of_flips(report.comparisons, klds)),
        notes=tuple(notes(report)),
        finding=tuple(sentences(report)),
        left_out_first=LEFT_OUT_FIRST,
    )


def columns_of_flips(rows: Sequence[Comparison], klds: Klds | None) -> list[FilledColumn]:
    """Return the columns, with a cell for each comparison."""
    columns = [column for column in FLIPS_COLUMNS if column.name != "kld" or klds is not None]
    margins = margins_of(rows)
    if margins:
        # All rows have the margin of --margin, so the largest is the only one.
        header = f"equal within {points(max(margins))}"
        columns.append(Column("equal", header, "", wraps=True))
    cells: dict[str, list[Cell]] = {column.name: [] for column in columns}
    for row in rows:
        cells_by_name = cells_of_row(row, klds)
        for column in columns:
            cells[column.name].append(cells_by_name[column.name])
    return [FilledColumn(column, tuple(cells[column.name])) for column in columns]


def cells_of_row(row: Comparison, klds: Klds | None) -> dict[str, Cell]:
    """Return name of a column -> cell of a comparison."""
    kld = None
    if klds is not None:
        kld = klds.get(row.label)
    return {
        "task": Cell(row.task),
        "metric": Cell(row.metric_and_filter),
        "label": Cell(row.label),
        "kld": kld_cell(kld),
        "questions": count_cell(row.flips.questions),
        "reference": accuracy_cell(row.reference_accuracy),
        "accuracy": accuracy_cell(row.accuracy),
        "difference": difference_cell(row),
        "lost": count_cell(row.flips.lost),
        "gained": count_cell(row.flips.gained),
        "other_wrong": count_cell(row.flips.other_wrong),
        "p": p_cell(row.flips.mcnemar_p),
        "equal": outcome_cell(row),
    }


def kld_cell(row: ModelResult | None) -> Cell:
    """Return the cell of a row's KLD; n/a for a label that the results.json does not have."""
    if row is None or row.kld is None:
        return Cell("n/a")
    text = number_text(row.kld, KLD_DIGITS)
    if row.has_bound:
        text = bound_text(row.kld, KLD_DIGITS)
    return Cell(text, error_text(row.kld_stderr))


def accuracy_cell(accuracy: Accuracy) -> Cell:
    """Return the cell of an accuracy in percent."""
    error = ""
    if accuracy.stderr is not None:
        error = error_text(100 * accuracy.stderr)
    return Cell(number_text(100 * accuracy.value, 2), error)


def difference_cell(row: Comparison) -> Cell:
    """Return the cell ``-3.50 (-6.62 to -0.24)``: a difference in points with its interval."""
    value = 100 * row.flips.difference
    low = 100 * row.flips.interval[0]
    high = 100 * row.flips.interval[1]
    # z: a difference just below 0 is +0.00.
    return Cell(f"{value:+z.2f} ({low:+z.2f} to {high:+z.2f})")


def p_cell(p: float) -> Cell:
    """Return the cell of a p, with four decimals."""
    if p < 0.0001:
        return Cell("<0.0001")
    return Cell(f"{p:.4f}")


def count_cell(number: int | None) -> Cell:
    """Return the cell of a count that may be unknown."""
    if number is None:
        return Cell("n/a")
    return Cell(f"{number:,}")


def margins_of(rows: Sequence[Comparison]) -> set[float]:
    """Return the margin within which rows were tested to be equal; empty without one."""
    return {row.equivalence.margin for row in rows if row.equivalence}


def points(margin: float) -> str:
    """Return a margin in points: 1 point, 0.5 points."""
    if margin == 0.01:
        return "1 point"
    return f"{100 * margin:g} points"


def outcome_cell(row: Comparison) -> Cell:
    """Return the cell on equivalence."""
    if row.equivalence is None:
        return Cell("n/a")
    return Cell(OUTCOMES[row.equivalence.outcome])


def notes(report: FlipReport) -> list[str]:
    """Return the notes below the table."""
    lines = []
    for label, task in report.absent:
        lines.append(f"{label}: {task}: n/a: it has no samples of this task")
    lines += [*report.notes, *LEGEND]
    if any(row.flips.other_wrong is None for row in report.comparisons):
        lines.append("other wrong n/a: the samples do not say which answer was chosen")
    lines.append(NO_EVIDENCE)
    margins = margins_of(report.comparisons)
    if not margins:
        lines.append(HINT_AT_MARGIN)
    for margin in margins:
        size = points(margin)
        tests = f"two one-sided tests at {100 * LEVEL:g} % reject a difference of {size} or more"
        lines.append(
            f"equal within {size}: yes if {tests}; not shown if the answers do not decide it; "
            "no if the difference is larger for certain"
        )
    return lines


def sentences(report: FlipReport) -> list[str]:
    """Return a sentence for each new model: in how many of its rows the two differ."""
    rows_by_label: dict[str, list[Comparison]] = {}
    for row in report.comparisons:
        rows_by_label.setdefault(row.label, []).append(row)
    lines = []
    for label, rows in rows_by_label.items():
        clauses = "; ".join(clauses_on_rows(rows))
        lines.append(f"{label} against {report.reference}, {amount(len(rows), 'row')}: {clauses}.")
    return lines


def clauses_on_rows(rows: Sequence[Comparison]) -> list[str]:
    """Return clauses on the numbers of rows in which a new model is worse, better, or neither."""
    worse = 0
    better = 0
    for row in rows:
        is_significant = row.flips.mcnemar_p < LEVEL
        if is_significant and row.flips.difference < 0:
            worse += 1
        if is_significant and row.flips.difference > 0:
            better += 1
    unclear = len(rows) - worse - better
    clauses = []
    if worse:
        clauses.append(f"worse in {worse} (p below {LEVEL:g})")
    if better:
        clauses.append(f"better in {better} (p below {LEVEL:g})")
    if unclear:
        clauses.append(f"no difference found in {unclear}, which does not show that there is none")
    outcomes = [row.equivalence.outcome for row in rows if row.equivalence]
    if outcomes:
        number = outcomes.count("equivalent")
        equal = "none"
        if number:
            equal = str(number)
        clauses.append(f"equality within the margin shown in {equal}")
    return clauses


def print_flips(table: Table, console: Console) -> None:
    """Print the table with as many columns as fit, the notes and the sentences."""
    columns = [size_column(filled) for filled in table.columns]
    titles: list[str] = []
    for name in table.left_out_first:
        if least_width(columns) <= console.width:
            break
        titles += [column.filled.column.title for column in columns if column.name == name]
        columns = leave_out(columns, [name])
    print_columns(console, table.title, columns)
    if titles:
        line = f"left out in {console.width} columns: {', '.join(titles)}; --csv has them"
        say(line, console=console)
    say(*table.notes, "", *table.finding, console=console)


def rows_of(report: FlipReport, klds: Klds | None = None) -> list[dict[str, Any]]:
    """Return the numbers of every comparison, with the KLD of its label, as in CSV."""
    rows = []
    for comparison in report.comparisons:
        row = None
        if klds is not None:
            row = klds.get(comparison.label)
        rows.append({**values_of(comparison), **kld_values(row)})
    return rows


def kld_values(row: ModelResult | None) -> dict[str, Any]:
    """Return the numbers of a row's KLD, by their fields; None without a KLD."""
    if row is None or row.kld is None:
        return {"kld": None, "kld_stderr": None, "kld_kind": None}
    return {"kld": row.kld, "kld_stderr": row.kld_stderr, "kld_kind": row.kld_kind}


def csv_text(report: FlipReport, klds: Klds | None = None) -> str:
    """Return a line for each comparison as CSV."""
    rows = rows_of(report, klds)
    return csv_writer.csv_text(rows, list(rows[0]))


def json_text(report: FlipReport, klds: Klds | None = None) -> str:
    """Return the outcome as JSON."""
    comparisons = []
    for values, comparison in zip(rows_of(report, klds), report.comparisons, strict=True):
        comparisons.append(
            {
                **values,
                "lost_documents": comparison.lost_documents,
                "gained_documents": comparison.gained_documents,
            }
        )
    content = {
        "flips": LAYOUT,
        "reference": report.reference,
        "comparisons": comparisons,
        "absent": [{"label": label, "task": task} for label, task in report.absent],
        "notes": report.notes,
    }
    return json.dumps(content, indent=2) + "\n"
