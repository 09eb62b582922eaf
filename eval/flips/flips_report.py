"""The outcome of ``compare-q flips``: tables for a terminal and for Markdown, CSV, JSON, and
sentences.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from ...backends.common.message_text import amount, printable
from ..common.terminal import say
from ..stats.flip_statistics import LEVEL
from ..stats.uncertainty import Value
from ..table import layout, render
from ..table.columns import Column
from ..table.numbers import KLD_DIGITS, error_text, number_text
from ..table.tables import Cell, Filled
from .comparing import OUTCOMES, Comparison, FlipReport, values_of

LAYOUT = 1
"""Version of the layout of the JSON file."""
SPARE = ("other_wrong", "questions", "kld")
"""Columns that a narrow terminal leaves out, in this order."""
NO_EVIDENCE = (
    "p: McNemar's exact test; a p of 0.05 or more is no evidence that two models are equal: few answers give a large "
    "p, too. Of 20 rows of equal models, one may have a p below 0.05"
)
ASK = "--margin 1% tests whether the accuracies differ by less than 1 point"
LEGEND = (
    "acc: share of right answers; its ± is one standard error over independent questions, as in lm-eval",
    "difference: new minus reference, in points, with its 90 % interval",
    "lost: right in the reference and wrong in the new model; gained: the other way round; other wrong: both wrong, "
    "with different answers",
)
Klds = Mapping[str, Value]
"""Label -> KLD of a results.json."""


def table(report: FlipReport, klds: Klds | None = None) -> list[Filled]:
    """Return the columns of the table, one row for each comparison; ``klds``: None without a
    results.json.
    """
    rows = report.comparisons
    columns = [
        words("task", "task", [row.task for row in rows]),
        words("metric", "metric", [row.metric_and_filter for row in rows]),
        words("label", "label", [row.label for row in rows]),
    ]
    if klds is not None:
        cells = [kld_cell(klds.get(row.label)) for row in rows]
        columns.append(numbers("kld", "KLD", cells))
    columns += [
        numbers("questions", "questions", [Cell(f"{row.flips.questions:,}") for row in rows]),
        numbers("reference", "reference\nacc %", [share(row.reference_accuracy) for row in rows]),
        numbers("accuracy", "new\nacc %", [share(row.accuracy) for row in rows]),
        numbers("difference", "difference\n(90 %)", [Cell(difference(row)) for row in rows]),
        numbers("lost", "lost", [Cell(f"{row.flips.lost:,}") for row in rows]),
        numbers("gained", "gained", [Cell(f"{row.flips.gained:,}") for row in rows]),
        numbers("other_wrong", "other\nwrong", [count(row.flips.other_wrong) for row in rows]),
        numbers("p", "p", [Cell(p_text(row.flips.mcnemar_p)) for row in rows]),
    ]
    if any(row.equivalence for row in rows):
        columns.append(words("equal", margin_header(rows), [outcome_of(row) for row in rows]))
    return columns


def words(name: str, header: str, cells: Sequence[str]) -> Filled:
    """Return a column of words."""
    return Filled(Column(name, header, "", wraps=True), tuple(Cell(cell) for cell in cells))


def numbers(name: str, header: str, cells: Sequence[Cell]) -> Filled:
    """Return a column of numbers."""
    return Filled(Column(name, header, "", digits=0), tuple(cells))


def kld_cell(kld: Value | None) -> Cell:
    """Return the cell of a KLD; n/a for a label that the results.json does not have."""
    if kld is None or kld.value is None:
        return Cell("n/a")
    return Cell(number_text(kld.value, KLD_DIGITS), error_text(kld.stderr))


def share(accuracy: Any) -> Cell:
    """Return the cell of an accuracy in percent."""
    stderr = None if accuracy.stderr is None else 100 * accuracy.stderr
    return Cell(number_text(100 * accuracy.value, 2), error_text(stderr))


def difference(row: Comparison) -> str:
    """Return ``-3.50 (-6.62 to -0.24)``: a difference in points with its interval."""
    value = 100 * row.flips.difference
    low = 100 * row.flips.interval[0]
    high = 100 * row.flips.interval[1]
    return f"{value:+z.2f} ({low:+z.2f} to {high:+z.2f})"


def p_text(p: float) -> str:
    """Return a p with four decimals."""
    return "<0.0001" if p < 0.0001 else f"{p:.4f}"


def count(number: int | None) -> Cell:
    """Return the cell of a count that may be unknown."""
    return Cell("n/a" if number is None else f"{number:,}")


def margin_header(rows: Sequence[Comparison]) -> str:
    """Return the header of the column on equivalence."""
    margins = {row.equivalence.margin for row in rows if row.equivalence}
    return f"equal within {points(max(margins))}"


def points(margin: float) -> str:
    """Return a margin in points: 1 point, 0.5 points."""
    return f"{100 * margin:g} point{'' if margin == 0.01 else 's'}"


def outcome_of(row: Comparison) -> str:
    """Return whether a row is equivalent, in words."""
    return OUTCOMES[row.equivalence.outcome] if row.equivalence else "n/a"


def notes(report: FlipReport) -> Iterator[str]:
    """Yield the notes below the table."""
    for label, task in report.absent:
        yield f"{label}: {task}: n/a: it has no samples of this task"
    yield from report.notes
    yield from LEGEND
    if any(row.flips.other_wrong is None for row in report.comparisons):
        yield "other wrong n/a: the samples do not say which answer was chosen"
    yield NO_EVIDENCE
    margins = {row.equivalence.margin for row in report.comparisons if row.equivalence}
    if not margins:
        yield ASK
    for margin in margins:
        size = points(margin)
        yield (
            f"equal within {size}: yes if two one-sided tests at {100 * LEVEL:g} % reject a difference of {size} or "
            "more; not shown if the answers do not decide it; no if the difference is larger for certain"
        )


def sentences(report: FlipReport) -> Iterator[str]:
    """Yield a sentence for each new model: in how many of its rows the two differ."""
    for label in dict.fromkeys(row.label for row in report.comparisons):
        rows = [row for row in report.comparisons if row.label == label]
        worse = [row for row in rows if row.flips.mcnemar_p < LEVEL and row.flips.difference < 0]
        better = [row for row in rows if row.flips.mcnemar_p < LEVEL and row.flips.difference > 0]
        unclear = len(rows) - len(worse) - len(better)
        facts = [
            f"worse in {len(worse)} (p below {LEVEL:g})" if worse else "",
            f"better in {len(better)} (p below {LEVEL:g})" if better else "",
            f"no difference found in {unclear}, which does not show that there is none"
            if unclear
            else "",
        ]
        tested = [row for row in rows if row.equivalence]
        equal = sum(row.equivalence.outcome == "equivalent" for row in tested if row.equivalence)
        if tested:
            facts.append(f"equality within the margin shown in {equal or 'none'}")
        yield f"{label} against {report.reference}, {amount(len(rows), 'row')}: {'; '.join(filter(None, facts))}."


def print_terminal(report: FlipReport, console: Console, klds: Klds | None = None) -> None:
    """Print the table with as many columns as fit, the notes and the sentences."""
    columns = [layout.drawn(each) for each in table(report, klds)]
    left_out: list[str] = []
    for name in SPARE:
        if layout.least_width(columns) > console.width:
            left_out += [
                each.filled.column.title for each in columns if each.filled.column.name == name
            ]
            columns = [each for each in columns if each.filled.column.name != name]
    layout.print_columns(console, f"reference: {report.reference}", columns)
    if left_out:
        say(
            f"left out in {console.width} columns: {', '.join(left_out)}; --csv has them",
            console=console,
        )
    say(*notes(report), "", *sentences(report), console=console)


def markdown(report: FlipReport, klds: Klds | None = None) -> str:
    """Return the table, the notes and the sentences as Markdown."""
    lines = [f"**reference: {render.escaped(report.reference)}**", ""]
    lines += render.markdown_lines(table(report, klds))
    lines += ["", *(render.escaped(each) for each in sentences(report)), ""]
    lines += [f"- {render.escaped(each)}" for each in notes(report)]
    return "\n".join([*lines, ""])


def rows_of(report: FlipReport, klds: Klds | None = None) -> list[dict[str, Any]]:
    """Return the numbers of every comparison, with the KLD of its label, as in CSV."""
    rows = []
    for row in report.comparisons:
        kld = (klds or {}).get(row.label) or Value(None)
        rows.append({**values_of(row), "kld": kld.value, "kld_stderr": kld.stderr})
    return rows


def csv_text(report: FlipReport, klds: Klds | None = None) -> str:
    """Return a line for each comparison as CSV; a text that a spreadsheet would run begins with an
    apostrophe.
    """
    rows = rows_of(report, klds)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]))
    writer.writeheader()
    for row in rows:
        texts = {name: printable(value) for name, value in row.items() if isinstance(value, str)}
        formulas = {
            name: f"'{text}" for name, text in texts.items() if text.startswith(render.FORMULAS)
        }
        writer.writerow(row | texts | formulas)
    return stream.getvalue()


def json_text(report: FlipReport, klds: Klds | None = None) -> str:
    """Return the outcome as JSON."""
    content = {
        "flips": LAYOUT,
        "reference": report.reference,
        "comparisons": [
            {
                **values,
                "lost_documents": row.lost_documents,
                "gained_documents": row.gained_documents,
            }
            for values, row in zip(rows_of(report, klds), report.comparisons, strict=True)
        ],
        "absent": [{"label": label, "task": task} for label, task in report.absent],
        "notes": report.notes,
    }
    return json.dumps(content, indent=2) + "\n"
